"""`monoplan compile`: a model's plan as files to read: IR after each pass, source, steps, build command."""

from __future__ import annotations

import argparse
import sys

from monoplan.cli.common import Timings, add_model_arguments, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="where to write")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles and dumps."""
    args.model = args.model_path or args.model
    timings = Timings()
    llm = load(args, timings)
    llm.dump(args.output)
    print(f"written to {args.output}")
    if not getattr(args, "quiet", False):  # a rank other than 0
        print(f"load {timings.load:.2f} s, compile {timings.compile:.2f} s", file=sys.stderr)
    return 0
