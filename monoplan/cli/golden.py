"""`monoplan golden`: records what a model gives, and checks later that it still does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoplan.cli.model_argument import add_model_argument, open_model

if TYPE_CHECKING:
    from monoplan.inspect.golden import Golden
    from monoplan.inspect.verify import Subject

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
    from monoplan.inspect.golden import Golden

    golden = Golden(Path(args.folder))
    if args.action == "record":
        opened = open_model(args)
        kept = {k: getattr(args, k) for k in _KEPT}
        if args.model is not None and Path(args.model).exists():
            kept["model"] = str(Path(args.model).resolve())
        golden.record(opened.compiled.subject(**opened.arguments()), seed=args.seed, inputs=True, about=kept)
        print(f"recorded in {golden.folder}")
        return 0
    meta = golden.meta()
    about = meta["about"] or {}
    args.model = args.model or about.get("model")
    for name in ("dtype", "target", "prompt", "size", "seed"):
        setattr(args, name, about.get(name, getattr(args, name)))
    opened = open_model(args)
    subject = opened.compiled.subject(**opened.arguments())
    subject.inputs = _recorded_inputs(golden, meta, subject)
    golden.check(subject, ir=args.ir, source=args.source)
    print(f"as recorded in {golden.folder}")
    return 0


def _recorded_inputs(golden: Golden, meta: dict[str, Any], subject: Subject) -> Any:
    """What the golden was recorded with; raises if that is gone, or is not what the module takes."""
    from monoplan.inspect.golden import GoldenError

    path = golden.folder / "inputs.npz"
    again = f"or record it again: monoplan golden record {golden.folder} MODEL"
    if len(meta["inputs"]) != len(subject.inputs):
        what = f"{subject.name} takes {len(subject.inputs)} inputs, the golden was recorded with {len(meta['inputs'])}"
        raise GoldenError(what, where=golden.folder, fix=f"give the model of then, {again}")
    stored = golden.stored_inputs(len(subject.inputs), [a.dtype for a in subject.inputs])
    if stored is None:
        if meta["about"] is None:
            return subject.inputs  # a test keeps none: they are made anew, and `check` compares their hashes
        why = "record wrote the inputs there, and check runs with them"
        raise GoldenError("the recorded inputs are missing", where=path, why=why, fix=f"restore the file, {again}")
    rows = zip(subject.traced.inputs, stored, subject.inputs, strict=True)
    other = [f"{v.name}: recorded {[*a.shape]}, now {[*b.shape]}" for v, a, b in rows if a.shape != b.shape]
    if other:
        what = f"{subject.name} takes inputs of other shapes than the recorded ones"
        fix = f"give the model and its inputs() of then, {again}"
        raise GoldenError(what, where=path, why="; ".join(other), fix=fix)
    return stored
