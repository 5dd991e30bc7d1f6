"""`monoplan report`: one HTML page about a compiled model."""

from __future__ import annotations

import argparse
from pathlib import Path

from monoplan.cli.model_argument import add_model_argument, open_model
from monoplan.ir.errors import MonoplanError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, its inputs, and the file."""
    add_model_argument(parser)
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="the page (default: %(default)s)")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="without times")


def run(args: argparse.Namespace) -> int:
    """Profiles the model and writes the page."""
    from monoplan.inspect.report import write_report

    opened = open_model(args)
    profiles = {}
    if args.profile and args.target != "reference":
        for label, arguments in opened.more.items():
            try:
                profiles[label] = opened.compiled.profile(**arguments())
            except MonoplanError as error:
                if args.inputs or args.size:
                    raise
                print(f"no times of {label}: random inputs do not fit ({error.what}); --inputs gives better ones")
    path = write_report(Path(args.output), opened.compiled._latest(), profiles)
    print(f"written to {path}")
    return 0
