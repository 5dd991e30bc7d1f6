"""`monoplan generate`: a prompt in, streamed text out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; - reads it from stdin")
    parser.add_argument("-p", "--prompt", dest="prompt_option", metavar="TEXT", help="the same as PROMPT")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        default=None,
        dest="chat",
        help="as a question in the model's chat format (default where it has one)",
    )
    as_it_is = "continue the text as it is"
    form.add_argument("--raw", action="store_false", default=None, dest="chat", help=as_it_is)
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat format")
    add_sampling_arguments(parser, max_tokens=128, temp=0.0, top_p=1.0)
    add_model_arguments(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no timings")


def run(args: argparse.Namespace) -> int:
    """Streams the continuation to stdout; Ctrl-C ends it and still prints the timings."""
    # Before the model is loaded: a missing prompt should not take seconds to notice.
    prompt = from_first(ranks(args), lambda: _prompt(args))
    if not prompt:
        raise ArgumentError("the prompt is empty", fix="give some text")
    timings, status = Timings(), 0
    llm = load(args, timings)
    text: Any = prompt
    if has_chat(llm) if args.chat is None else args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        text = llm.tokenizer.chat([*system, {"role": "user", "content": prompt}])
    stream = llm.generate(text, callback=timings.token, **sampling(args))
    timings.begin(len(stream.result.prompt_ids))
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        status = INTERRUPTED
    if not args.quiet:
        timings.print()
    return status


def _prompt(args: argparse.Namespace) -> str:
    given = [text for text in (args.prompt, args.prompt_option) if text is not None]
    if len(given) + (args.file is not None) > 1:
        raise ArgumentError("the prompt is given twice", fix="give one of PROMPT, --prompt and --file")
    if args.file is not None:
        try:
            return Path(args.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("can't read the prompt", where=args.file, why=str(error)) from None
    if given and given[0] != "-":
        return str(given[0])
    if not given and sys.stdin.isatty():
        fix = 'monoplan generate "Once upon a time", or - to read it from stdin'
        raise ArgumentError("there is no prompt", fix=fix)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ArgumentError("stdin is not text", why=str(error)) from None
