"""A compilation in words: what each kernel is made of, what every pass did, and what did not fuse and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from monoplan.ir.dims import equal
from monoplan.ir.errors import printable
from monoplan.ir.graph import Graph, Loc, Op, Value, all_ops, bodies, definitions
from monoplan.passes.manager import NearMiss, Stage
from monoplan.passes.rebuild import fused_groups

_EXAMPLES = 2  # places that are named for each rule


def explain(stages: Sequence[Stage], plan: Any = None) -> str:
    """Kernels (if there is a plan), passes and near misses of a compilation."""
    parts = [] if plan is None else [_kernels(stages, plan)]
    return "\n".join([*parts, _passes(stages), _misses(stages)])


# -- kernels --------------------------------------------------------------------------------------------------


def _kernels(stages: Sequence[Stage], plan: Any) -> str:
    """One line for each step: the op it runs and the ops of forward that went into it."""
    traced = stages[0].graph
    flat = next((s.graph for s in reversed(stages) if not any(op.opdef.kind == "repeat" for op in s.graph.ops)), traced)
    made_of = _made_of(stages, traced, flat)
    for result, body in _scans(traced).items():
        if result in (last := _scans(flat)):
            made_of |= _made_of(stages, body, last[result])
    lines = [f"{plan.name}: {sum(not bodies(op) for op in all_ops(traced))} ops of forward, {plan.summary}"]
    for step, count in plan.steps():
        op = step.kernel.op
        group = made_of.get(op.results[0].name, Counter({op.name: 1}))
        words = " + ".join(name if n == 1 else f"{n} {name}" for name, n in group.items())
        words = "a copy of the state" if op.opdef.kind == "loop" else words
        turns = f" (runs {count} times)" if not equal(count, 1) else ""
        lines.append(f"  {step.number}: {op.name}{turns} = {words}{_at(op.loc)}")
    return "\n".join(lines) + "\n"


def _scans(graph: Graph) -> dict[str, Graph]:
    """The bodies of a graph's scans, by the name of the first result."""
    return {op.results[0].name: op.attrs["body"] for op in graph.ops if op.opdef.kind == "loop"}


def _made_of(stages: Sequence[Stage], traced: Graph, flat: Graph) -> dict[str, Counter[str]]:
    """The traced ops behind each op of a graph, or of a scan's body, by the name of its first result."""
    old = _traced_values(stages, traced)

    def renamed(op: Op) -> Op:
        operands = tuple(None if v is None else old.get(v.name, v) for v in op.operands)
        return Op(op.opdef, operands, op.attrs, tuple(old.get(r.name, r) for r in op.results), op.loc)

    names = {renamed(op): op.results[0].name for op in flat.ops}
    made = {r for op in names for r in op.results}
    anew = {(op.name, op.loc) for op in names if op.results[0] not in definitions(traced)}

    def elsewhere(op: Op, new: Op) -> bool:
        """Whether another kernel does it: it still stands there, or was made anew, on other rows, at its place."""
        return op.results[0] not in new.results and (op.results[0] in made or (op.name, op.loc) in anew)

    found = {}
    for new, group in fused_groups(traced, flat.replace(setup=tuple(map(renamed, flat.setup)), ops=tuple(names))):
        inside = (op for op in traced.ops if op in group and op.opdef.kind != "generate")
        ordered = Counter(op.name for op in inside if not elsewhere(op, new))
        found[names[new]] = ordered or Counter({new.name: 1})
    return found


def _traced_values(stages: Sequence[Stage], traced: Graph) -> dict[str, Value]:
    """The value of forward that each name stands for: widening makes values anew, by their names or as casts, and
    pulling a pick of rows forward makes those rows of values."""
    found = {v.name: v for v in (*traced.inputs, *(p.value for p in traced.params), *definitions(traced))}
    for stage in stages:
        casts = ((op.results[0].name, op.reads[0].name) for op in all_ops(stage.graph) if op.name == "cast")
        for new, old in (*casts, *((f.result, f.part_of) for f in stage.done if f.part_of)):
            if old in found:
                found.setdefault(new, found[old])
    return found


# -- passes ---------------------------------------------------------------------------------------------------


def _passes(stages: Sequence[Stage]) -> str:
    lines = ["what was rewritten"]
    for stage in stages[1:]:
        if not stage.rewrites:
            continue
        lines.append(f"  {stage.name}: {stage.rule}")
        rules = dict.fromkeys(f.rule for f in stage.done)
        for rule in rules:
            done = [f for f in stage.done if f.rule == rule]
            places = dict.fromkeys(_place(f.loc) for f in done if str(f.loc))
            shown = ", ".join(list(places)[:_EXAMPLES]) + (", …" if len(places) > _EXAMPLES else "")
            name = "" if len(rules) == 1 else f"{rule}, "
            lines.append(f"    {name}{_times(len(done))}" + (f": {shown}" if shown else ""))
    return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing"]) + "\n"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


# -- near misses ----------------------------------------------------------------------------------------------


def _misses(stages: Sequence[Stage]) -> str:
    """Near misses that still matter at the end, equal ones of all layers together."""
    final = {op.results[0].name: op for op in all_ops(stages[-1].graph.replace(setup=()))}
    lines = ["what did not fuse, and why"]
    for group in alike(m for stage in stages for m in stage.misses):
        left = next((m for m in group if _matters(m, final.get(m.op.results[0].name))), None)
        if left is not None:
            count = f" ({len(group)} times)" if len(group) > 1 else ""
            lines.append(f"  {left.rule}: {left.op.name} {left.op.results[0]}{_at(left.op.loc)}{count}: {left.reason}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing that came near"]) + "\n"


def alike(misses: Iterable[NearMiss]) -> list[list[NearMiss]]:
    """Near misses in groups that differ in the number of the layer only."""
    groups: dict[tuple[str, ...], list[NearMiss]] = {}
    for m in misses:
        groups.setdefault((m.rule, m.op.name, _numberless(m.reason), _numberless(str(m.op.loc))), []).append(m)
    return list(groups.values())


def _matters(miss: NearMiss, now: Op | None) -> bool:
    """Whether the op still stands alone at the end: a later pass may have found it another place."""
    if miss.rule == "roll-layers":
        return True
    pointwise = ("pointwise", "fused_pointwise")
    return now is not None and (miss.op.opdef.kind not in pointwise or now.opdef.kind in pointwise)


def _numberless(text: str) -> str:
    """The text that misses of all layers have in common."""
    return re.sub(r"\d+", "#", re.sub(r"%[\w.$-]+", "%", text))


def _place(loc: Loc) -> str:
    """Module path and line, with the file's own name only."""
    file = re.split(r"[/\\]", loc.file)[-1]
    line = f"{file}:{loc.line}" if file else ""
    return printable(f"{loc.path} ({line})" if loc.path and line else loc.path or line)


def _at(loc: Loc) -> str:
    return f" at {_place(loc)}" if str(loc) else ""
