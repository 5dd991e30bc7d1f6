"""`monoplan golden`: records what a model gives, and checks later that it still does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from monoplan.model_argument import add_model_argument, open_model

_KEPT = ("model", "dtype", "target", "prompt", "size", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """record or check, the folder, the model."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    record = actions.add_parser("record", help="run the model and keep outputs, IR and hashes of the source in DIR")
    check = actions.add_parser("check", help="run it again, with the recorded inputs, and compare")
    for action in (record, check):
        action.add_argument("folder", metavar="DIR", help="the golden")
        add_model_argument(action)
    check.add_argument("--ir", action="store_true", help="the IR must be the same, too")
    check.add_argument("--source", action="store_true", help="the source must be the same, too")


def run(args: argparse.Namespace) -> int:
    """Status 1 with a report when something is not as recorded."""
    from monoplan.golden import Golden

    golden = Golden(Path(args.folder))
    if args.action == "record":
        opened = open_model(args)
        kept = {k: getattr(args, k) for k in _KEPT}
        if args.model is not None and Path(args.model).exists():
            kept["model"] = str(Path(args.model).resolve())
        golden.record(opened.compiled.subject(**opened.arguments()), seed=args.seed, inputs=True, about=kept)
        print(f"recorded in {golden.folder}")
        return 0
    about = golden.meta()["about"] or {}
    args.model = args.model or about.get("model")
    for name in ("dtype", "target", "prompt", "size", "seed"):
        setattr(args, name, about.get(name, getattr(args, name)))
    opened = open_model(args)
    subject = opened.compiled.subject(**opened.arguments())
    stored = golden.stored_inputs(len(subject.inputs), [a.dtype for a in subject.inputs])
    subject.inputs = stored if stored is not None and _same_shapes(stored, subject.inputs) else subject.inputs
    golden.check(subject, ir=args.ir, source=args.source)
    print(f"as recorded in {golden.folder}")
    return 0


def _same_shapes(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape for x, y in zip(a, b, strict=True))
