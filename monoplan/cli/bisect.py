"""`monoplan bisect`: the pass or the kernel that makes the numbers wrong, and a folder that repeats it."""

from __future__ import annotations

import argparse
import sys

from monoplan.cli.model_argument import add_model_argument, open_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, its inputs, and where the folder goes."""
    add_model_argument(parser)
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="folder of the repetition (default: monoplan_bisect/<plan>)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the finding; status 1 when there is one."""
    opened = open_model(args)
    found = opened.compiled.bisect(**opened.arguments(), folder=args.output)
    sys.stdout.write(str(found))
    return 0 if found.ok else 1
