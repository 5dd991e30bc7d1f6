"""`monoplan chat`: a conversation, typed or piped in, one line for each turn."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from monoplan.cli import INTERRUPTED
from monoplan.cli_common import Timings, add_model_arguments, add_sampling_arguments, has_chat, load, sampling
from monoplan.cli_ranks import from_first, ranks
from monoplan.ir.errors import ArgumentError

GREETING = "An empty line or Ctrl-D ends the chat, /reset forgets it, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser, max_tokens=512, temp=0.7, top_p=0.95)
    add_model_arguments(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no timings")


def run(args: argparse.Namespace) -> int:
    """Answers each line of stdin until it ends; Ctrl-C stops an answer, and at the prompt the chat."""
    from monoplan.models.generation import Session

    timings = Timings()
    llm = load(args, timings)
    if not has_chat(llm):
        raise ArgumentError("the model has no chat format", fix="use monoplan generate")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages: list[dict[str, str]] = list(opening)
    comm = ranks(args)
    session, typed, status = Session(), from_first(comm, sys.stdin.isatty), 0
    if typed and (comm is None or comm.rank == 0):
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
        text, interrupted = _answer(llm, messages, session, timings, sampling(args))
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


def _answer(
    llm: Any, messages: list[dict[str, str]], session: Any, timings: Timings, settings: dict[str, Any]
) -> tuple[str, bool]:
    """Streams one answer; gives its text and whether Ctrl-C cut it short."""
    interrupted = False
    stream = llm.generate(llm.tokenizer.chat(messages), callback=timings.token, session=session, **settings)
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
