"""Fuzzes loaders: `python -m tests.fuzz gguf --cases 100000 --seed 1`; without a target, all of them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork

from tests.fuzz.engine import find_target, fuzz, make_case, target_names, write  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(target_names())} (default: all)")
    parser.add_argument("--cases", type=int, default=1000, help="cases of each target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="where inputs that fail are kept (default: a new folder)")
    parser.add_argument("--case", type=int, help="load this one case here, without limits, and show what happens")
    args = parser.parse_args()
    names = args.targets or target_names()
    if unknown := set(names) - set(target_names()):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    if args.case is not None:
        return _one(names, args.seed, args.case, args.keep)
    results = []
    for name in names:
        results.append(fuzz(name, args.cases, args.seed, args.first, args.keep))
        print(results[-1], flush=True)
    print(f"{sum(r.ran for r in results)} cases, {sum(f.count for r in results for f in r.failures)} failures")
    return 1 if any(r.failures for r in results) else 0


def _one(names: list[str], seed: int, number: int, keep: Path | None) -> int:
    for name in names:
        target = find_target(name)
        seeds = target.seeds()
        chosen, changed = make_case(name, target, seeds, seed, number)
        directory = write((keep or Path("fuzz-case")) / name, {**seeds[chosen], **changed})
        print(f"{name}: seed {chosen} with another {', '.join(changed)}, in {directory}")
        target.load(directory)
        print("loaded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
