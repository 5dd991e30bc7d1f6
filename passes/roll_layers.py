"""Repeated isomorphic layers become a loop over a table of weights; they are found, not marked by the user."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.builder import Builder, make_op
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import NESTED
from monoplan.ir.ops.fused import repeat_layers
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import param_values
from monoplan.passes.rebuild import builder_for

Slot = tuple[int, int]  # (op of the layer, operand or result of it)
_WORTH = 4  # ops that a loop must save
_TRIED = 64  # ways to cut a graph into layers that are looked at


@dataclass(frozen=True)
class _Layers:
    """`count` layers of `period` ops from op `start`."""

    start: int
    period: int
    count: int

    @property
    def size(self) -> int:
        return self.period * self.count


@dataclass
class _Roles:
    """What each outside operand of a layer is: carried from the layer before, the same in all, or one for each."""

    carried: dict[Slot, Value]  # a result of the layer -> the value that the first layer starts with
    carried_at: dict[Slot, Slot]
    shared: dict[Slot, Value]
    tables: dict[Slot, tuple[Value, ...]]


class _Refused(Exception):
    """Why equal-looking ops do not form a loop."""


def roll_layers(graph: Graph, notes: Notes) -> Graph:
    """Rolls runs of equal layers, the longest first, until none is left."""
    while True:
        best: tuple[_Layers, _Roles] | None = None
        refused: tuple[_Layers, str] | None = None
        for layers in _candidates(graph):
            if best is not None and layers.size < best[0].size:
                break
            try:
                roles = _roles(graph, layers)
                _check_results(graph, layers, roles)
            except _Refused as reason:
                refused = refused or (layers, str(reason))
                continue
            if best is None or len(roles.carried) < len(best[1].carried):  # a cut where little crosses
                best = (layers, roles)
        if best is None:
            if refused is not None:
                layers, why = refused
                what = f"{layers.count} times {layers.period} ops look alike, but {why}"
                notes.missed("roll-layers", graph.ops[layers.start], what)
            return graph
        graph = _roll(graph, *best)
        notes.fired("roll-layers", graph.ops[best[0].start])


def _signature(op: Op) -> Any:
    return (
        op.name,
        tuple(sorted((k, str(v)) for k, v in op.attrs.items())),
        tuple(None if v is None else str(v.type) for v in op.operands),
        tuple(str(r.type) for r in op.results),
    )


def _candidates(graph: Graph) -> list[_Layers]:
    """Runs of ops that repeat with some period, most ops covered first, a few shifts of each."""
    numbers: dict[Any, int] = {}
    ids = np.array([numbers.setdefault(_signature(op), len(numbers)) for op in graph.ops])
    found: list[_Layers] = []
    for period in range(1, len(ids) // 2 + 1):
        equal = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            run = int(end - begin)
            if run < period:
                continue
            count = run // period + 1
            rolled = any(op.opdef.kind in NESTED for op in graph.ops[begin : end + period])  # loops are not nested
            if rolled or (count - 1) * period < _WORTH:
                continue
            for shift in range(min(run % period + 1, period)):
                found.append(_Layers(int(begin) + shift, period, count))
    # A multiple of a period covers no more than the period itself: prefer the shorter one.
    return sorted(found, key=lambda x: (-x.count * x.period, x.period, x.start))[:_TRIED]


def _roles(graph: Graph, layers: _Layers) -> _Roles:
    """Classifies every operand; raises _Refused where layers are wired differently."""
    ops = graph.ops
    where: dict[Value, tuple[int, int, int]] = {}  # value -> (layer, op, result)
    for turn in range(layers.count):
        for i in range(layers.period):
            for r, v in enumerate(ops[layers.start + turn * layers.period + i].results):
                where[v] = (turn, i, r)
    fixed, inputs = param_values(graph), set(graph.inputs)
    roles = _Roles({}, {}, {}, {})
    for i in range(layers.period):
        turns = [ops[layers.start + t * layers.period + i] for t in range(layers.count)]
        for j in range(len(turns[0].operands)):
            column = [op.operands[j] for op in turns]
            if column[0] is None:
                continue
            _classify((i, j), column, where, fixed, inputs, roles)
    return roles


def _classify(
    slot: Slot,
    column: list[Value | None],
    where: dict[Value, tuple[int, int, int]],
    fixed: set[Value],
    inputs: set[Value],
    roles: _Roles,
) -> None:
    places = [where.get(v) for v in column if v is not None]
    if all(p is not None and p[0] == turn for turn, p in enumerate(places)):
        if len({p[1:] for p in places if p is not None}) != 1:
            raise _Refused(f"operand {slot[1]} of op {slot[0]} comes from different ops of its layer")
        return
    if len(places) > 1 and all(p is not None and p[0] == turn - 1 for turn, p in enumerate(places) if turn > 0):
        if places[0] is not None and places[0][0] != -1:
            raise _Refused("the first layer reads its own later result")
        sources = {p[1:] for p in places[1:] if p is not None}
        if len(sources) != 1:
            raise _Refused(f"operand {slot[1]} of op {slot[0]} is carried from different ops")
        source = sources.pop()
        first = column[0]
        assert first is not None
        if roles.carried.setdefault(source, first) is not first:
            raise _Refused(f"op {source[0]} is carried from two different starting values")
        roles.carried_at[slot] = source
        return
    if any(p is not None for p in places):
        raise _Refused(f"operand {slot[1]} of op {slot[0]} skips layers")
    values = tuple(v for v in column if v is not None)
    if len(set(values)) == 1:
        roles.shared[slot] = values[0]
    elif fixed.issuperset(values) or inputs.issuperset(values):
        roles.tables[slot] = values
    else:
        raise _Refused(f"operand {slot[1]} of op {slot[0]} is computed outside, one for each layer")


def _check_results(graph: Graph, layers: _Layers, roles: _Roles) -> None:
    """Results that are read after the loop must be carried ones of the last layer, or states updated in place."""
    body = graph.ops[layers.start : layers.start + layers.period * layers.count]
    after = {v for op in graph.ops[layers.start + len(body) :] for v in op.reads} | set(graph.outputs)
    writable = {graph.inputs[i] for i, _ in graph.writes}
    for n, op in enumerate(body):
        turn, i = divmod(n, layers.period)
        for r, v in enumerate(op.results):
            if r in op.opdef.inplace:
                target = op.operand(op.opdef.inplace[r])
                if target in graph.inputs and target not in writable:
                    raise _Refused(f"{target} is updated in place, but the caller keeps its old contents")
                if v in after and target not in graph.inputs:
                    raise _Refused(f"{v} of a layer is read after the loop")
            elif v in after and not ((i, r) in roles.carried and turn == layers.count - 1):
                raise _Refused(f"{v} of layer {turn} is read after the loop")


def _roll(graph: Graph, layers: _Layers, roles: _Roles) -> Graph:
    """The graph with the loop in place of the layers."""
    span = layers.period * layers.count
    before = graph.ops[: layers.start]
    after = graph.ops[layers.start + span :]
    first = graph.ops[layers.start : layers.start + layers.period]
    last = graph.ops[layers.start + span - layers.period : layers.start + span]
    carried = list(roles.carried)
    shared = list(dict.fromkeys(roles.shared.values()))
    tables = list(dict.fromkeys(roles.tables.values()))
    starts = [roles.carried[c] for c in carried]
    fresh = Builder(taken=(r.name for op in first for r in op.results)).fresh  # two tables may begin with one value
    names = [fresh(first[i].results[r].name + "_in") for i, r in carried]
    inner_inputs = [Value(v.type, n) for v, n in zip(starts, names, strict=True)]
    inner_inputs += [Value(v.type, fresh(v.name)) for v in (*shared, *(t[0] for t in tables))]
    new: dict[Value, Value] = {}
    for op in first:
        new.update({r: Value(r.type, r.name) for r in op.results})
    body_ops = []
    for i, op in enumerate(first):
        operands: list[Value | None] = []
        for j, v in enumerate(op.operands):
            slot = (i, j)
            if v is None:
                operands.append(None)
            elif slot in roles.carried_at:
                operands.append(inner_inputs[carried.index(roles.carried_at[slot])])
            elif slot in roles.shared:
                operands.append(inner_inputs[len(carried) + shared.index(roles.shared[slot])])
            elif slot in roles.tables:
                operands.append(inner_inputs[len(carried) + len(shared) + tables.index(roles.tables[slot])])
            else:
                operands.append(new[v])
        body_ops.append(Op(op.opdef, tuple(operands), op.attrs, tuple(new[r] for r in op.results), op.loc))
    written = [(i, r, op.operand(name)) for i, op in enumerate(first) for r, name in op.opdef.inplace.items()]
    states = [(i, r) for i, r, v in written if v in graph.inputs]
    outputs = [new[first[i].results[r]] for i, r in (*carried, *states)]
    body = Graph("layer", tuple(inner_inputs), (), tuple(body_ops), tuple(outputs))
    operands = [*starts, *shared, *(v for t in tables for v in t)]
    attrs = {"count": layers.count, "carried": len(carried), "shared": len(shared), "body": body}
    made = make_op(repeat_layers, operands, attrs, loc=first[0].loc, fresh=builder_for(graph).fresh)
    results: list[Value] = [last[i].results[r] for i, r in carried]
    for i, r in states:
        results += [graph.ops[layers.start + t * layers.period + i].results[r] for t in range(layers.count)]
    loop = Op(made.opdef, made.operands, made.attrs, tuple(results), first[0].loc)
    return graph.replace(ops=(*before, loop, *after))


ROLL_LAYERS = Pass(
    "roll-layers", "repeated isomorphic layers -> a loop over a table of weights", roll_layers, bodies=False
)
