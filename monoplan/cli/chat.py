"""`monoplan chat`: a conversation, typed or piped in, one line for each turn."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from monoplan.cli.common import (
    Timings,
    add_model_arguments,
    add_sampling_arguments,
    from_first,
    has_chat,
    load,
    ranks,
    sampling,
)
from monoplan.cli.main import INTERRUPTED
from monoplan.ir.errors import ArgumentError

GREETING = "An empty line or Ctrl-D ends the chat, /reset forgets it, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser, max_tokens=512, temp=0.7, top_p=0.95)
    add_model_arguments(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no timings")


def run(args: argparse.Namespace) -> int:
    """Answers each line of stdin until it ends; Ctrl-C stops an answer, and at the prompt the chat.

    A conversation that outgrows the context loses its first turns; a line that is too long alone is left out.
    """
    from monoplan.models.generate.generation import Session

    timings = Timings()
    llm = load(args, timings)
    if not has_chat(llm):
        raise ArgumentError("the model has no chat format", fix="use monoplan generate")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages: list[dict[str, str]] = list(opening)
    comm = ranks(args)
    session, typed, status = Session(), from_first(comm, sys.stdin.isatty), 0
    speaks = comm is None or comm.rank == 0
    if typed and speaks:
        print(GREETING, file=sys.stderr)
    while True:
        try:
            line = from_first(comm, lambda: _read(typed))
        except KeyboardInterrupt:
            status = INTERRUPTED
            break
        if line is None or line in ("/exit", "/quit", "/bye") or (typed and not line):
            break
        if line == "/reset":
            messages = list(opening)
            continue
        if not line:
            continue  # blank lines between piped turns
        messages.append({"role": "user", "content": line})
        ids, note = _fit(llm, messages, len(opening), args.max_tokens)
        if note and speaks:
            print(f"monoplan: {note}", file=sys.stderr)
        if ids is None:
            messages.pop()
            continue
        text, interrupted = _answer(llm, ids, session, timings, sampling(args))
        messages.append({"role": "assistant", "content": text})
        if interrupted and not typed:
            status = INTERRUPTED
            break
    if not args.quiet:
        timings.print()
    return status


def _read(typed: bool) -> str | None:
    """The next turn; None at the end of stdin."""
    if typed:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise ArgumentError("stdin is not text", why=str(error)) from None
    return line.strip() if line else None


def _fit(llm: Any, messages: list[dict[str, str]], opening: int, max_tokens: int) -> tuple[list[int] | None, str]:
    """The tokens of a conversation, None if its last line alone is too long for the model; and what to say of it.

    Turns that leave no room for an answer are dropped from `messages`: the first ones, after the opening.
    """
    ids: list[int] = llm.tokenizer.chat(messages)
    room, dropped = min(max_tokens, llm.max_length // 4), 0
    if len(ids) + room <= llm.max_length:
        return ids, ""
    alone = llm.tokenizer.chat(messages[:opening] + messages[-1:])
    if len(alone) > llm.max_length:
        return None, f"the line is left out: it has {len(alone)} tokens, the context of the model {llm.max_length}"
    while len(ids) + room > llm.max_length and len(messages) > opening + 1:
        del messages[opening : opening + 2]  # a question and its answer
        ids, dropped = llm.tokenizer.chat(messages), dropped + 1
    if not dropped:
        return ids, ""
    first = "question is" if dropped == 1 else f"{dropped} questions are"
    return ids, f"the first {first} forgotten: the context of the model is {llm.max_length} tokens"


def _answer(llm: Any, ids: list[int], session: Any, timings: Timings, settings: dict[str, Any]) -> tuple[str, bool]:
    """Streams one answer; gives its text and whether Ctrl-C cut it short."""
    interrupted = False
    stream = llm.generate(ids, callback=timings.token, session=session, **settings)
    timings.begin(len(stream.result.prompt_ids) - session.shared(stream.result.prompt_ids))
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    sys.stdout.write("\n")
    sys.stdout.flush()
    return stream.result.text, interrupted
