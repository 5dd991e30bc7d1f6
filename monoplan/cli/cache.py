"""`monoplan cache`: the compiled plans on disk."""

from __future__ import annotations

import argparse

from monoplan.ir.errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("info", help="place, number of entries, size")
    actions.add_parser("clear", help="remove every entry")
    prune = actions.add_parser("prune", help="remove the longest unused entries")
    until = "until N bytes are left (default: the cache's own cap)"
    prune.add_argument("--max-bytes", type=int, metavar="N", help=until)


def run(args: argparse.Namespace) -> int:
    """Shows or removes entries."""
    from monoplan.runtime.build import cache

    if args.action == "info":
        found = cache.info()
        note = " (temporary: the usual place can't be used)" if found.temporary else ""
        print(f"place    {found.root}{note}\nentries  {found.entries}")
        print(f"size     {_size(found.nbytes)} of {_size(found.max_bytes)}")
        return 0
    if args.action == "prune" and args.max_bytes is not None and args.max_bytes < 0:
        raise ArgumentError(f"--max-bytes must be 0 or more, got {args.max_bytes}")
    count, freed = cache.clear() if args.action == "clear" else cache.prune(args.max_bytes)
    print(f"removed {count} entries, {_size(freed)}")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
