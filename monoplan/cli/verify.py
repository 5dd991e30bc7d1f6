"""`monoplan verify`: the compiled model against the float64 interpreter."""

from __future__ import annotations

import argparse
import sys

from monoplan.cli.model_argument import add_model_argument, open_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, its inputs, and how much to compare."""
    add_model_argument(parser)
    parser.add_argument("--nodes", action="store_true", help="also every value on the way")


def run(args: argparse.Namespace) -> int:
    """Prints the table; status 1 when something is outside the tolerance."""
    opened = open_model(args)
    result = opened.compiled.verify(**opened.arguments(), nodes=args.nodes)
    sys.stdout.write(str(result))
    return 0 if result.ok else 1
