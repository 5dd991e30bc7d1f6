"""What does not depend on a scan's state leaves its loop: products over its slices, values that all turns share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.opdef import NESTED
from monoplan.ir.ops.shape import reshape
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import distinct_readers
from monoplan.passes.rebuild import builder_for, drop_dead

_ROW_WISE = ("linear", "rms_norm", "layer_norm", "embedding")  # in their first operand; the others are weights
_VIEWS = ("reshape", "transpose", "slice", "split")


def hoist_from_scans(graph: Graph, notes: Notes) -> Graph:
    """Changes every scan of a graph; what leaves a loop stands in front of it."""
    readers, fresh = distinct_readers(graph), builder_for(graph).fresh
    ops: list[Op] = []
    for op in graph.ops:
        if op.opdef.kind == "loop":
            scan = _Scan(op, fresh)
            unread = {i for i, r in enumerate(op.results) if i >= scan.state and not readers.get(r)}
            op = scan.changed(unread, notes)
            ops += scan.outside
        ops.append(op)
    return graph if not notes.rewrites else drop_dead(graph.replace(ops=tuple(ops)))


class _Scan:
    """One scan while ops leave its body."""

    def __init__(self, op: Op, fresh: Callable[[str], str]) -> None:
        self.op, self.fresh = op, fresh
        self.body: Graph = op.attrs["body"]
        self.state, self.slices = op.attrs["state"], op.attrs["slices"]
        self.outside: list[Op] = []  # what stands in front of the loop now
        given = dict(zip(self.body.inputs, op.operands, strict=True))
        sliced = self.body.inputs[self.state : self.state + self.slices]
        # Values of the body that can be had outside: of all slices at once, or the same for all.
        self.wide: dict[Value, Any] = {v: given[v] for v in sliced}
        self.fixed: dict[Value, Any] = {v: given[v] for v in self.body.inputs[self.state + self.slices :]}

    def changed(self, unread: set[int], notes: Notes) -> Op:
        """The scan without what left it, and without what nobody reads of its results."""
        constants = {o.result: o for o in self.body.ops if o.opdef.kind == "generate"}
        invariant, wide = self._movable(constants)
        left = [o for o in self.body.ops if o not in invariant and o not in wide]
        if len(left) == len(self.body.ops) and not unread:
            return self.op
        for o in self.body.ops:
            if o in invariant or o in wide:
                self._move(o, constants, o in wide)
                notes.fired("hoist-from-scans", o)
        if unread:
            notes.fired("drop-unread-slices", self.op)
        outputs = tuple(v for i, v in enumerate(self.body.outputs) if i not in unread)
        body = drop_dead(self.body.replace(ops=tuple(left), outputs=outputs))
        read = {v for o in body.ops for v in o.reads} | set(outputs)
        slices = {v: x for v, x in self.wide.items() if v in read}
        fixed = {v: x for v, x in self.fixed.items() if v in read}
        states = self.body.inputs[: self.state]
        body = body.replace(inputs=(*states, *slices, *fixed))
        operands = [*self.op.operands[: self.state], *slices.values(), *fixed.values()]
        attrs = {**self.op.attrs, "slices": len(slices), "body": body}
        made = make_op(self.op.opdef, operands, attrs, loc=self.op.loc, fresh=self.fresh)
        results = tuple(r for i, r in enumerate(self.op.results) if i not in unread)
        return Op(made.opdef, made.operands, made.attrs, results, self.op.loc)

    def _movable(self, constants: Mapping[Value, Op]) -> tuple[set[Op], set[Op]]:
        """Ops whose operands all turns share, and products over slices with what leads to them."""
        fixed, wide = set(self.fixed), set(self.wide)
        invariant: set[Op] = set()
        candidates: dict[Value, Op] = {}
        for o in self.body.ops:
            if o.opdef.inplace or o.opdef.kind in (*NESTED, "collective", "generate"):
                continue
            if all(v in fixed or v in constants for v in o.reads) and not fixed.isdisjoint(o.reads):
                invariant.add(o)
                fixed.update(o.results)
            elif all(v in fixed or v in wide or v in constants for v in o.reads) and _is_row_wise(o, wide):
                wide.update(o.results)
                candidates.update(dict.fromkeys(o.results, o))
        moved: set[Op] = set()
        todo = [o for o in candidates.values() if o.name == "linear"]
        while todo:
            o = todo.pop()
            if o not in moved:
                moved.add(o)
                todo += [candidates[v] for v in o.reads if v in candidates]
        return invariant, moved

    def _move(self, op: Op, constants: Mapping[Value, Op], wide: bool) -> None:
        """Repeats an op of the body outside."""
        operands = [None if v is None else self._outer(v, constants) for v in op.operands]
        attrs = dict(op.attrs)
        if wide:
            operands, attrs = self._over_slices(op, operands, attrs)
        made = make_op(op.opdef, operands, attrs, loc=op.loc, fresh=self.fresh)
        self.outside.append(made)
        (self.wide if wide else self.fixed).update(zip(op.results, made.results, strict=True))

    def _outer(self, v: Value, constants: Mapping[Value, Op]) -> Value:
        if v not in self.wide and v not in self.fixed:
            source = constants[v]
            self.outside.append(make_op(source.opdef, [], source.attrs, loc=source.loc, fresh=self.fresh))
            self.fixed[v] = self.outside[-1].result
        return self.wide[v] if v in self.wide else self.fixed[v]  # type: ignore[no-any-return]

    def _over_slices(
        self, op: Op, operands: Sequence[Value | None], attrs: dict[str, Any]
    ) -> tuple[list[Value | None], dict[str, Any]]:
        """Operands and attributes of an op for all slices at once: there is one more dimension in front."""
        length = self.op.attrs["length"]
        if op.name == "reshape":
            attrs["shape"] = (length, *attrs["shape"])
        elif op.name == "transpose":
            attrs["axes"] = (0, *(a + 1 for a in attrs["axes"]))
        elif op.name in _VIEWS:
            attrs["axis"] = attrs["axis"] % op.reads[0].type.rank + 1
        found: list[Value | None] = list(operands)
        if op.opdef.kind == "pointwise":
            rank = op.result.type.rank
            for i, (v, outer) in enumerate(zip(op.operands, operands, strict=True)):
                if v in self.wide and outer is not None and v.type.rank < rank:  # dimensions align from the back
                    shape = (length, *[1] * (rank - v.type.rank), *v.type.shape)
                    self.outside.append(make_op(reshape, [outer], {"shape": shape}, loc=op.loc, fresh=self.fresh))
                    found[i] = self.outside[-1].result
        return found, attrs


def _is_row_wise(op: Op, wide: set[Value]) -> bool:
    """Whether an op does the same to each slice by itself, so that one op can do it to all."""
    if op.opdef.kind == "pointwise":
        return True
    first, *others = op.operands
    if op.name in _VIEWS:
        return first in wide
    return op.name in _ROW_WISE and first in wide and not wide.intersection(v for v in others if v is not None)


HOIST_FROM_SCANS = Pass(
    "hoist-from-scans",
    "products over a scan's slices run once over all of them; what all turns share is computed once",
    hoist_from_scans,
    bodies=False,
)
