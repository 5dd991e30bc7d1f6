"""`monoplan inspect`: IR at any stage, what each pass did, the plan, the source."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from monoplan.cli.model_argument import add_model_argument, open_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to show."""
    add = parser.add_argument
    add_model_argument(parser, inputs=False)
    add("--diff", action="store_true", help="a unified diff of the IR for each pass that changed something")
    add("--ir", action="store_true", help="the IR after all passes")
    add("--stage", metavar="NAME", help="the IR after a pass, or `trace`")
    add("--stop-after", metavar="PASS", help="run no pass after this one")
    add("--plan", action="store_true", help="the table of steps and the arena")
    add("--source", action="store_true", help="the generated source")
    add("--explain", action="store_true", help="what fused into what, what did not, and why")
    add("--dot", action="store_true", help="the graph (of --stage, else the last) in Graphviz DOT")
    add("--no-locs", dest="locs", action="store_false", help="IR without your files and lines")
    add("--color", choices=("auto", "always", "never"), default="auto", help="of --diff (default: on a terminal)")


def run(args: argparse.Namespace) -> int:
    """Prints what the options name; without options the list of stages and the summary of the plan."""
    opened = open_model(args, stop_after=args.stop_after)
    fast = opened.compiled
    shown = False
    if args.diff:
        from monoplan.inspect.diff import diff

        color = {"auto": None, "always": True, "never": False}[args.color]
        sys.stdout.write(diff(fast._latest().stages, color=color, locs=args.locs))
        shown = True
    if args.dot:
        from monoplan.ir.graph import to_dot

        sys.stdout.write(to_dot(fast._latest().stage(args.stage).graph))
        shown = True
    elif args.stage or args.ir:
        sys.stdout.write(fast.ir(args.stage, locs=args.locs))
        shown = True
    if args.explain:
        print(fast.explain())
        shown = True
    if args.plan:
        print(fast.plan if fast.plan is not None else "target reference has no plan")
        shown = True
    if args.source:
        sys.stdout.write(fast.source())
        shown = True
    if not shown:
        print(_summary(fast, opened.label))
    return 0


def _summary(fast: Any, label: str) -> str:
    built = fast._latest()
    lines = [
        f"{label}: {built.graph.name} for {fast.target}",
        "",
        "stage                    ops  rewrites      ms  rule",
    ]
    for s in built.stages:
        mark = f"{s.rewrites:8d}" if s.changed and s.name != "trace" else "       -"
        lines.append(f"{s.name:<22} {_count(s.graph):5d}  {mark}  {s.seconds * 1e3:6.1f}  {s.rule}")
    if built.plan is not None:
        lines += ["", built.plan.summary]
    lines += ["", "more: --diff, --stage NAME, --ir, --plan, --source, --explain, --dot"]
    return "\n".join(lines)


def _count(graph: Any) -> int:
    return sum(1 + (len(op.attrs["body"].ops) if op.opdef.kind == "repeat" else 0) for op in graph.ops)
