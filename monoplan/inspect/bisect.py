"""Names what made the numbers wrong: the first pass whose graph means something else, or the first wrong kernel.

Graphs are compared in f64, where rounding can't hide a mistake, by bisection over the passes that changed
something. When all graphs agree, the kernels are judged one by one on the inputs that they had (kernel_check).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from monoplan.inspect.repro import write_kernel_folder, write_pass_folder
from monoplan.inspect.verify import Subject
from monoplan.inspect.walk import Node, compared_type, walk
from monoplan.ir.errors import MonoplanError, writing
from monoplan.ir.graph import Graph, Op, Value, bodies, definitions
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.printer import print_op
from monoplan.ir.tolerances import Difference, compare
from monoplan.ir.types import Array

DEFAULT_FOLDER = "monoplan_bisect"


@dataclass(frozen=True)
class Finding:
    """What bisect found; prints as a report. `kind` is "none", "pass", "kernel" or "plan"."""

    kind: str
    summary: str
    name: str = ""  # of the pass, or of the kernel's family
    number: int = 0  # of the stage, or of the step
    node: str = ""  # the first value that is wrong, `%add_3[7]` in layer 7 of rolled ones
    where: str = ""  # the user's file and line, and the module
    difference: Difference | None = None
    before: str = ""  # IR lines that were right
    after: str = ""  # IR lines (or C) that are wrong
    folder: Path | None = None
    advice: str = ""

    @property
    def ok(self) -> bool:
        return self.kind == "none"

    def __str__(self) -> str:
        lines = [self.summary]
        if self.node:
            lines.append(f"  first wrong value: {self.node}")
        if self.where:
            lines.append(f"  your line:         {self.where}")
        if self.difference is not None:
            lines.append(f"  difference:        {self.difference}")
        for title, text in (("before", self.before), ("after", self.after)):
            if text:
                lines += [f"  {title}:", *("    " + line for line in text.rstrip("\n").splitlines())]
        if self.folder is not None:
            lines.append(f"  to repeat it alone: python {shlex.quote(str(self.folder / 'repro.py'))}")
        if self.advice:
            lines.append(f"  {self.advice}")
        return "\n".join(lines) + "\n"

    __repr__ = __str__


def bisect(subject: Subject, folder: str | Path | None = None) -> Finding:
    """The first thing that is wrong with a compiled call; a folder that repeats it is written when there is one."""
    into = Path(folder) if folder is not None else Path(DEFAULT_FOLDER) / subject.name
    bad = _first_bad_stage(subject)
    if bad is not None:
        return _describe_pass(subject, bad, into)
    if subject.executable is None:
        return Finding("none", f"{subject.name}: all {len(subject.stages)} graphs give the same numbers")
    if subject.kernel_fault is not None:
        return _describe_kernel(subject, into)
    return _describe_rest(subject)


# -- passes ---------------------------------------------------------------------------------------------------------


def _first_bad_stage(subject: Subject) -> int | None:
    """The number of the first stage whose outputs differ from the traced graph's, by bisection."""
    changed = [i for i, s in enumerate(subject.stages) if i and s.graph is not subject.stages[i - 1].graph]
    if not changed or _agrees(subject, changed[-1]):
        return None
    good, bad = -1, len(changed) - 1  # positions in `changed`; -1 is the traced graph itself
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _agrees(subject, changed[middle]) else (good, middle)
    return changed[bad]


def _agrees(subject: Subject, stage: int) -> bool:
    graph = subject.stages[stage].graph
    try:
        made = walk(graph, list(subject.inputs), subject.params, exact=True)
    except (MonoplanError, ArithmeticError, IndexError, ValueError):
        return False  # a graph that can't even be run is not the same
    ops = definitions(subject.traced)
    return all(
        a.shape == b.shape and compare(a, b, _exact_type(ops.get(v), v), "rewrite").ok
        for a, b, v in zip(made, subject.exact, subject.traced.outputs, strict=True)
    )


def _exact_type(op: Op | None, v: Value) -> str:
    return "f64" if v.type.dtype.is_float else str(compared_type(op, v))


def _describe_pass(subject: Subject, at: int, into: Path) -> Finding:
    stage, old = subject.stages[at], subject.stages[at - 1].graph
    found = _first_bad_value(subject, old, stage.graph)
    summary = f"pass {at} of {len(subject.stages) - 1}, {stage.name}, changes the numbers ({stage.rule})"
    advice = f"leave it out with options={{'passes': ...}} to go on; its graph is stage {stage.name!r} of fast.ir()"
    if found is None:
        return Finding("pass", summary, stage.name, at, advice=advice)
    node, number, counterpart, difference, good = found
    region = Region(old, stage.graph, counterpart, node.op.results[number], good)
    with writing("what repeats the error", into):
        folder = write_pass_folder(into, subject, stage.name, region, node)
    before, after = region.lines()
    return Finding(
        "pass", summary, stage.name, at, node.name(number), node.where, difference, before, after, folder, advice
    )


_Bad = tuple[Node, int, Value, Difference, set[Value]]


def _first_bad_value(subject: Subject, old: Graph, new: Graph) -> _Bad | None:
    """The first value of the new graph that differs from the same value of the old one, and the values that agree."""
    known = _record(subject, old)
    by_name = {v.name: v for v in known if not isinstance(v, tuple)}
    position = _Aligned(old, new)
    good: set[Value] = set(old.inputs) | {p.value for p in old.params} | {p.value for p in new.params}
    found: list[_Bad] = []

    def visit(node: Node, operands: Sequence[Array | None], results: Sequence[Array]) -> None:
        for i, (r, a) in enumerate(zip(node.op.results, results, strict=True)):
            twin = r if r in known and node.turn is None else position.twin(node, i) or by_name.get(r.name)
            if twin is None or twin not in known or known[twin].shape != a.shape:
                continue
            difference = compare(a, known[twin], _exact_type(node.op, r), "rewrite")
            if difference.ok:
                good.update((r, twin))
            else:
                found.append((node, i, twin, difference, good))
                raise _Stop

    try:
        walk(new, list(subject.inputs), subject.params, exact=True, visit=visit)
    except _Stop:
        return found[0]
    except (MonoplanError, ArithmeticError, IndexError, ValueError):
        return None
    return None


class _Stop(Exception):
    pass


def _record(subject: Subject, graph: Graph) -> dict[Value, Array]:
    """Every value of a graph in f64."""
    known: dict[Value, Array] = {}

    def keep(node: Node, operands: Sequence[Array | None], results: Sequence[Array]) -> None:
        if node.turn is None:
            known.update(zip(node.op.results, results, strict=True))

    outputs = walk(graph, list(subject.inputs), subject.params, exact=True, visit=keep)
    known.update(zip(graph.outputs, outputs, strict=True))
    return known


class _Aligned:
    """Pairs the ops of rolled layers with those of the graph before, by position: rolling keeps their order."""

    def __init__(self, old: Graph, new: Graph) -> None:
        self.pairs: dict[tuple[Op, int], Op] = {}
        flat: list[tuple[Op, int | None]] = []
        for op in new.ops:
            if op.opdef.kind == "repeat":
                body = op.attrs["body"].ops
                flat += [(inner, turn) for turn in range(op.attrs["count"]) for inner in body]
            else:
                flat.append((op, None))
        if len(flat) == len(old.ops):
            self.pairs = {(op, turn): twin for (op, turn), twin in zip(flat, old.ops, strict=True) if turn is not None}

    def twin(self, node: Node, result: int) -> Value | None:
        op = None if node.turn is None else self.pairs.get((node.op, node.turn))
        return op.results[result] if op is not None and len(op.results) > result else None


@dataclass(frozen=True)
class Region:
    """The ops behind a wrong value, before and after a pass, back to values that are still right."""

    old: Graph
    new: Graph
    right: Value  # in the old graph
    wrong: Value  # in the new graph, or in the body of rolled layers
    good: set[Value]

    def ops(self, *, new: bool) -> list[Op]:
        graph, start = (self.new, self.wrong) if new else (self.old, self.right)
        ops = (*graph.setup, *graph.ops)
        inner = [o for op in ops for body in bodies(op) for o in body.ops]
        wanted, kept = {start}, []
        for op in reversed([*ops, *inner]):
            if wanted.intersection(op.results):
                kept.append(op)
                wanted.update(v for v in op.reads if v not in self.good)
        return kept[::-1]

    def lines(self) -> tuple[str, str]:
        """The IR before and after."""
        before, after = ("\n".join(print_op(op, locs=True) for op in self.ops(new=new)) + "\n" for new in (False, True))
        return before, after


# -- kernels --------------------------------------------------------------------------------------------------------


def _describe_kernel(subject: Subject, into: Path) -> Finding:
    fault = subject.kernel_fault
    assert fault is not None
    step, node = fault.step, fault.node
    function = subject.executable.source.step_functions[step.number]
    others = [s for s in fault.steps if s is not step]
    steps = f"step {step.number}" + (f" (with steps {', '.join(str(s.number) for s in others)})" if others else "")
    family = step.kernel.family
    summary = (
        f"all {len(subject.stages)} graphs agree; the {family} kernel of {steps}, {function}() in the source, is"
        " wrong on the inputs that it had"
    )
    with writing("what repeats the error", into):
        folder = write_kernel_folder(into, subject, fault)
    return Finding(
        "kernel",
        summary,
        family,
        step.number,
        node.name(fault.result),
        node.where,
        fault.difference,
        print_op(node.op, locs=True) + "\n",
        "",
        folder,
        f"its template: codegen/{subject.target}/templates/{family}.{'c' if subject.target == 'cpu' else 'cu'}.j2",
    )


def _describe_rest(subject: Subject) -> Finding:
    """Passes and kernels are right: is the whole?"""
    differences = subject.judge(subject.run())
    wrong = [(n, d) for n, d in zip(subject.output_names, differences, strict=True) if not d.ok]
    count = len(subject.watched.events)
    fine = f"{subject.name}: all {len(subject.stages)} graphs and all {count} kernel runs are right"
    if not wrong:
        return Finding("none", fine)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(subject.run(), subject.watched.outputs, strict=True))
    name, difference = wrong[0]
    if not same:
        return Finding(
            "plan",
            f"{fine} when every step waits for the one before, but not without waiting: "
            "a barrier is missing, or two buffers share memory",
            node=name,
            difference=difference,
        )
    return Finding(
        "plan",
        f"{fine}, each on the inputs it had; their roundings add up to more than the tolerance of the outputs",
        node=name,
        difference=difference,
        advice="verify(..., nodes=True) shows where the error grows",
    )
