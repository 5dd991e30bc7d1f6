"""`monoplan doctor`: what this machine offers."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    """Prints the report of the runtime."""
    from monoplan.runtime.machine.doctor import report

    sys.stdout.write(report())
    return 0
