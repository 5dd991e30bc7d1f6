"""The commands that write text: generate (a prompt in, streamed text out) and chat (a conversation, line by line)."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from monoplan.cli.common import (
    INTERRUPTED,
    Timings,
    UsageError,
    add_model_options,
    add_sampling_options,
    decoded,
    from_first,
    has_chat,
    load,
    peak_memory,
    ranks,
    sampling,
)
from monoplan.ir.errors import ArgumentError, did_you_mean


def add_generate(parser: argparse.ArgumentParser) -> None:
    """The options of generate."""
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the text; - reads it from stdin")
    add("-p", "--prompt", dest="prompt_option", metavar="TEXT", help="the same as PROMPT")
    add("-f", "--file", metavar="FILE", help="read the prompt from a file")
    form = parser.add_mutually_exclusive_group()
    chat = "as a question in the model's chat format (default where it has one)"
    form.add_argument("--chat", action="store_true", default=None, help=chat)
    form.add_argument("--raw", action="store_false", default=None, dest="chat", help="continue the text as it is")
    add("--system", metavar="TEXT", help="system message of the chat format")
    add_sampling_options(parser, max_tokens=128, temp=0.0, top_p=1.0)
    add_model_options(parser)
    add("--json", action="store_true", help="a JSON object at the end in place of streamed text")
    add("-q", "--quiet", action="store_true", help="no timings")


def generate(args: argparse.Namespace) -> int:
    """Streams the continuation to stdout; Ctrl-C ends it and still prints the timings."""
    settings = sampling(args)
    if args.system and args.chat is False:
        raise UsageError("--system is a message of the chat format, which --raw leaves out", fix="give one of them")
    # Before the model is loaded: a missing prompt should not take seconds to notice.
    prompt = from_first(ranks(args), lambda: _prompt(args))
    if not prompt:
        raise UsageError("the prompt is empty", fix="give some text")
    timings, status = Timings(), 0
    llm = load(args, timings)
    text: Any = prompt
    if args.system and not has_chat(llm):
        raise ArgumentError("the model has no chat format", fix="leave --system out")
    if has_chat(llm) if args.chat is None else args.chat:
        text = llm.tokenizer.chat([*_opening(args), {"role": "user", "content": prompt}])
    stream = llm.generate(text, callback=timings.token, **settings, **args.drafts)
    timings.begin(len(stream.result.prompt_ids))
    try:
        for piece in stream:
            if not args.json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    if args.json:
        print(json.dumps(_summary(llm, prompt, stream.result, timings)))
        return status
    sys.stdout.write("\n")
    if not args.quiet:
        timings.print()
    return status


def _summary(llm: Any, prompt: str, result: Any, timings: Timings) -> dict[str, Any]:
    return {
        "model": Path(llm.name_or_path).name,
        "prompt": prompt,
        "text": result.text,
        "finish_reason": result.finish_reason or "interrupted",
        "prompt_tokens": len(result.prompt_ids),
        "tokens": result.ids,
        "load_s": timings.load,
        "pack_s": timings.pack,
        "compile_s": timings.compile,
        "prompt_s": timings.prompt,
        "generation_s": timings.generation,
        "peak_memory": peak_memory(),
    }


def _opening(args: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _prompt(args: argparse.Namespace) -> str:
    given = [text for text in (args.prompt, args.prompt_option) if text is not None]
    if len(given) + (args.file is not None) > 1:
        raise UsageError("the prompt is given twice", fix="give one of PROMPT, --prompt and --file")
    if args.file is not None:
        try:
            return decoded(Path(args.file).read_bytes(), f"the prompt in {args.file}")
        except OSError as error:
            raise ArgumentError("can't read the prompt", where=args.file, why=error.strerror or str(error)) from None
    if given and given[0] != "-":
        return str(given[0])
    if not given and sys.stdin.isatty():
        fix = 'monoplan generate "Once upon a time", or - to read it from stdin'
        raise UsageError("there is no prompt", fix=fix)
    return decoded(sys.stdin.buffer.read(), "stdin", encoding=sys.stdin.encoding)


GREETING = "Ctrl-D ends the chat, Ctrl-C stops an answer, /help lists the commands."
SLASH = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/exit": "end the chat; so do /quit, /bye and Ctrl-D",
}
_ENDS = ("/exit", "/quit", "/bye")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """The options of chat."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser, max_tokens=512, temp=0.7, top_p=0.95)
    add_model_options(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no timings")


def chat(args: argparse.Namespace) -> int:
    """Answers each line of stdin until it ends; Ctrl-C stops an answer, and at the prompt the chat.

    A conversation that outgrows the context loses its first turns; a line that is too long alone is left out.
    """
    from monoplan.models.generate.generation import Session

    timings, settings = Timings(), sampling(args)
    llm = load(args, timings)
    if not has_chat(llm):
        raise ArgumentError("the model has no chat format", fix="use monoplan generate")
    opening = _opening(args)
    messages = list(opening)
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
        if line is None or line.strip() in _ENDS:
            break
        if command := re.match(r"/[\w?-]*(?=\s|$)", line):
            if command[0] == "/reset":
                messages = list(opening)
            elif speaks:
                print(_help(command[0]), file=sys.stderr)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        ids, note = _fit(llm, messages, len(opening), args.max_tokens)
        if note and speaks:
            print(f"monoplan: {note}", file=sys.stderr)
        if ids is None:
            messages.pop()
            continue
        text, interrupted = _answer(llm, ids, session, timings, {**settings, **args.drafts})
        messages.append({"role": "assistant", "content": text})
        if interrupted and not typed:
            status = INTERRUPTED
            break
    if not args.quiet:
        timings.print()
    return status


def _read(typed: bool) -> str | None:
    """The next turn; None at the end of stdin."""
    while True:
        if typed:
            print("> ", end="", file=sys.stderr, flush=True)
        data = sys.stdin.buffer.readline()
        try:
            return decoded(data, "the line", encoding=sys.stdin.encoding).rstrip("\r\n") if data else None
        except ArgumentError as error:
            if not typed:
                raise
            print(f"monoplan: {error}", file=sys.stderr)  # a slip of the keyboard ends no conversation


def _help(command: str) -> str:
    """The list of commands, which begins with a remark if the one that was typed is none of them."""
    lines = [f"  {name:<8}{what}" for name, what in SLASH.items()]
    lines.append("  A line that begins with a space is said as it stands.")
    if command not in ("/", "/?", "/help"):
        lines.insert(0, f"there is no command {command}{did_you_mean(command, (*SLASH, *_ENDS), '; ')}")
    return "\n".join(lines)


def _fit(llm: Any, messages: list[dict[str, str]], opening: int, max_tokens: int) -> tuple[list[int] | None, str]:
    """The tokens of a conversation, None if its last line alone is too long for the model; and what to say of it.

    Turns that leave no room for an answer are dropped from `messages`: the first ones, after the opening.
    """
    ids: list[int] = llm.tokenizer.chat(messages)
    quarter = llm.max_length // 4
    room, dropped = quarter if max_tokens < 0 else min(max_tokens, quarter), 0
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
