"""Compares a plan with the float64 interpreter: each output, and on request each value on the way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from monoplan.inspect.kernel_check import KernelFault, Recorder, check_kernels
from monoplan.inspect.probe import Watched, probe
from monoplan.inspect.walk import Node, Params, compared_type, roundings, walk
from monoplan.ir.dims import evaluate
from monoplan.ir.graph import Graph, Value, definitions
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.tolerances import Difference, compare
from monoplan.ir.types import Array


@dataclass
class Subject:
    """What is examined: a compiled module and one set of inputs."""

    name: str
    target: str
    stages: Sequence[Any]  # each with name, rule, graph: the traced graph first
    executable: Any  # None: the reference interpreter itself
    params: Params
    inputs: Sequence[Array]
    symbols: dict[str, int]
    output_names: Sequence[str]

    @property
    def traced(self) -> Graph:
        graph: Graph = self.stages[0].graph
        return graph

    @property
    def final(self) -> Graph:
        graph: Graph = self.stages[-1].graph
        return graph

    @property
    def sizes(self) -> str:
        """The values of the symbols, as a title shows them."""
        return ", ".join(f"{k}={v}" for k, v in self.symbols.items())

    def fresh_inputs(self) -> list[Array]:
        """Inputs; those that the plan writes are copies."""
        written = {i for i, _ in self.final.writes}
        return [np.array(a, order="C") if i in written else a for i, a in enumerate(self.inputs)]

    def run(self) -> list[Array]:
        """What the plan makes of the inputs."""
        if self.executable is None:
            return walk(self.final, self.fresh_inputs(), self.params, exact=False)
        outputs: list[Array] = self.executable.run(self.fresh_inputs(), self.symbols)
        return outputs

    @cached_property
    def exact(self) -> list[Array]:
        """What forward means: the traced graph in f64."""
        return walk(self.traced, list(self.inputs), self.params, exact=True)

    @cached_property
    def plain(self) -> list[Array]:
        """The traced graph on the references in its own types."""
        return walk(self.traced, list(self.inputs), self.params, exact=False)

    @cached_property
    def watched(self) -> Watched:
        """One instrumented run."""
        found: Watched = self.probe.watch(self.fresh_inputs(), self.symbols)
        return found

    @cached_property
    def probe(self) -> Any:
        """What looks into the plan while it runs."""
        return probe(self.executable)

    @cached_property
    def kernel_fault(self) -> KernelFault | None:
        """The first kernel that is wrong on its own inputs."""
        if self.executable is None:
            return None
        return check_kernels(self.final, list(self.inputs), self.params, self.watched)

    def judge(self, got: Sequence[Array]) -> list[Difference]:
        """Each output against the exact one; the plain reference is asked only where the table says no."""
        rough, made = roundings(self.final), definitions(self.final)
        found = []
        for i, (a, want, v) in enumerate(zip(got, self.exact, self.final.outputs, strict=True)):
            difference = compare(a, want, compared_type(made.get(v), v), "model", epsilon=rough.get(v))
            if not difference.ok and v.type.dtype.is_float:
                difference = compare(a, want, v.type.dtype, "model", epsilon=rough.get(v), plain=self.plain[i])
            found.append(_strict(difference))
        return found


def _strict(d: Difference) -> Difference:
    """A NaN or an infinity that forward does not mean is wrong, also where the plain references have it too."""
    return replace(d, bad=max(d.bad, d.lost))


@dataclass(frozen=True)
class Row:
    """One compared value."""

    name: str
    type: str
    where: str
    difference: Difference


@dataclass(frozen=True)
class Verification:
    """The comparison; prints as a table. True when everything is within tolerance."""

    title: str
    outputs: tuple[Row, ...]
    nodes: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(r.difference.ok for r in self.outputs)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = (
            "ok" if self.ok else f"WRONG in {sum(not r.difference.ok for r in self.outputs)} of {len(self.outputs)}"
        )
        lines = [f"{self.title}: {verdict}"]
        if self.nodes:
            lines += ["", "values of the final graph, in order:", *_table(self.nodes), "", "outputs:"]
        return "\n".join([*lines, *_table(_folded(self.outputs)), *self.notes]) + "\n"

    __repr__ = __str__


def _folded(rows: Sequence[Row], at_least: int = 3) -> list[Row]:
    """Rows of which only a number differs, such as the caches of all layers, as one with their worst errors."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((re.sub(r"(?<=\.)\d+\b", "*", r.name), r.type), []).append(r)
    found = []
    for (name, kind), group in groups.items():
        if len(group) < at_least or not all(r.difference.ok for r in group):
            found += group
            continue
        worst = max((r.difference for r in group), key=lambda d: d.max_abs)
        rel, ulp = max(r.difference.max_rel for r in group), max(r.difference.max_ulp for r in group)
        found.append(Row(f"{name} × {len(group)}", kind, "", replace(worst, max_rel=rel, max_ulp=ulp)))
    return found


def _table(rows: Sequence[Row]) -> list[str]:
    head = ("value", "type", "max abs", "max rel", "ulp", "nan/inf", "", "where")
    cells = [head]
    for r in rows:
        d = r.difference
        whole = not d.dtype.is_float
        figures = (
            ("-", "-", "-", "-")
            if whole
            else (f"{d.max_abs:.2e}", f"{d.max_rel:.2e}", f"{d.max_ulp:.3g}", str(d.strange))
        )
        verdict = "ok" if d.ok else f"{d.bad} of {d.size} wrong"
        cells.append((r.name, r.type, *figures, verdict, r.where))
    return aligned(cells)


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as lines of columns, those in `right` with their ends below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (
        [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))] for r in rows
    )
    return ["  ".join(line).rstrip() for line in cells]


def verify(subject: Subject, *, nodes: bool = False) -> Verification:
    """Compares the plan with forward, computed in f64."""
    got = subject.run()
    rows = [
        Row(name, _type(v, subject.symbols), "", d)
        for name, v, d in zip(subject.output_names, subject.final.outputs, subject.judge(got), strict=True)
    ]
    notes = []
    rows, ties = _settle_ties(subject, rows)
    if ties:
        notes.append(
            f"{', '.join(ties)}: another index than the exact one; every kernel is right on its own inputs,"
            " so two scores are equal up to rounding"
        )
    notes += _strange_notes(subject, rows)
    inner: list[Row] = []
    if nodes and subject.executable is not None:
        inner = _nodes(subject)
    if not all(r.difference.ok for r in rows):
        notes.append("bisect() with the same arguments names the pass or the kernel")
    about = f" at {subject.sizes}" if subject.sizes else ""
    title = f"{subject.name} on {subject.target} against the float64 interpreter{about}"
    return Verification(title, tuple(rows), tuple(inner), tuple(notes))


def _strange_notes(subject: Subject, rows: Sequence[Row]) -> list[str]:
    """What to say about outputs that are NaN or infinite: a table of errors does not show it."""
    notes = []
    for i, row in enumerate(rows):
        d = row.difference
        if d.lost:
            text = f"{row.name}: {d.lost} of {d.size} elements are NaN or infinite where forward in float64 is not"
            plain = subject.plain[i]
            if count := int((~np.isfinite(plain.astype(np.float64))).sum()):
                text += f"; so are {count} in plain {d.dtype}, whose range may be too small for this model"
            notes.append(text)
        if d.shared:
            notes.append(
                f"{row.name}: {d.shared} of {d.size} elements are NaN or infinite, as forward in float64 says"
                f" (or beyond the range of {d.dtype}): nothing else is known about them"
            )
    return notes


def _settle_ties(subject: Subject, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """An index (a token, an argmax) may differ where two scores are nearly equal: then no kernel is at fault."""
    wrong = [r for r in rows if not r.difference.ok]
    if not wrong or any(r.difference.dtype.is_float for r in wrong) or subject.kernel_fault is not None:
        return list(rows), []
    settled = [Row(r.name, r.type, r.where, replace(r.difference, bad=0)) if r in wrong else r for r in rows]
    return settled, [r.name for r in wrong]


def _nodes(subject: Subject) -> list[Row]:
    """Every value of the final graph that a kernel wrote, against the exact run of that graph."""
    recorder, rough = Recorder(subject.watched), roundings(subject.final)
    rows: list[Row] = []
    doubtful: dict[tuple[str, int], tuple[int, Array, Array]] = {}

    def look(node: Node, operands: Sequence[Array | None], exact: Sequence[Array]) -> None:
        for i, r in enumerate(node.op.results):
            got = recorder.value(node, i) if recorder.events(node) else None
            if got is None:
                continue
            difference = compare(got, exact[i], compared_type(node.op, r), "model", epsilon=rough.get(r))
            if not difference.ok:
                doubtful[node.name(i), i] = (len(rows), got, exact[i])
            rows.append(Row(node.name(i), _type(r, subject.symbols), node.where, difference))

    walk(subject.final, list(subject.inputs), subject.params, exact=True, visit=look)
    if doubtful:

        def ask(node: Node, operands: Sequence[Array | None], plain: Sequence[Array]) -> None:
            for i, r in enumerate(node.op.results):
                known = doubtful.get((node.name(i), i))
                if known is not None:
                    at, got, want = known
                    kind = compared_type(node.op, r)
                    d = _strict(compare(got, want, kind, "model", epsilon=rough.get(r), plain=plain[i]))
                    rows[at] = Row(rows[at].name, rows[at].type, rows[at].where, d)

        walk(subject.final, list(subject.inputs), subject.params, exact=False, visit=ask)
    return rows


def _type(v: Value, symbols: dict[str, int]) -> str:
    return f"{v.type.dtype}[{', '.join(str(evaluate(d, symbols)) for d in v.type.shape)}]"
