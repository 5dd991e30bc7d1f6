"""Rolled layers become one loop: a body that is lowered once, with tables for what differs from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence

from monoplan.codegen.lower.lowerer import Loop, Lowerer, lowers
from monoplan.codegen.views import View, table_buffer, whole
from monoplan.ir.errors import CompileError
from monoplan.ir.graph import Graph, Op, Value


@lowers("repeat")
def lower_repeat(lowerer: Lowerer, op: Op) -> None:
    """Lowers the body once; carried values keep one buffer, per-turn operands become tables."""
    a = op.attrs
    body, count, carried, shared = a["body"], a["count"], a["carried"], a["shared"]
    inner = Lowerer(body, lowerer.target, parent=lowerer)
    carries = []
    for v, b in zip(op.operands[:carried], body.inputs, strict=False):
        assert v is not None
        view = lowerer.read(v)
        fits = view.buffer.kind == "arena" and view.is_whole and _last_reader(lowerer.graph, v) is op
        carries.append(view if fits else lowerer.copy(view))
        inner.views[b] = carries[-1]
    for v, b in zip(op.operands[carried : carried + shared], body.inputs[carried:], strict=False):
        assert v is not None
        if lowerer.is_param(v):
            lowerer.root.param_values.add(b)
            lowerer.root.table_params[b] = (v,)
        else:
            inner.views[b] = lowerer.read(v)
    for i, b in enumerate(body.inputs[carried + shared :]):
        start = carried + shared + i * count
        column = [v for v in op.operands[start : start + count] if v is not None]
        if all(lowerer.is_param(v) for v in column):
            lowerer.root.param_values.add(b)
            lowerer.root.table_params[b] = tuple(column)
        else:
            views = [lowerer.read(v) for v in column]
            table = table_buffer(b.name, views[0].buffer, [w.buffer.index for w in views])
            inner.views[b] = whole(table, b.type.shape)
    copies = _plan_carries(body, inner, carries)
    inner.lower_ops()
    for source, into in copies:
        inner.copy(inner.read(source), into)
    lowerer.items.append(Loop(count, tuple(inner.items)))
    lowerer.result.views.update(inner.views)
    for r, c in zip(op.results[:carried], carries, strict=False):
        lowerer.views[r] = c
    for i, out in enumerate(body.outputs[carried:]):
        for turn in range(count):
            r = op.results[carried + i * count + turn]
            lowerer.views[r] = _turn_view(lowerer, inner.read(out), turn)


def _turn_view(lowerer: Lowerer, view: View, turn: int) -> View:
    """What a per-turn output is outside of the loop: the input behind its table."""
    b = view.buffer
    if b.kind != "table" or b.table_kind != "input":
        raise CompileError(
            "a per-turn result of rolled layers must be a state that is updated in place", where=lowerer.op.loc
        )
    number = b.table[turn]
    source = lowerer.root.graph.inputs[number]
    return lowerer.root.views[source]


def _plan_carries(body: Graph, inner: Lowerer, carries: Sequence[View]) -> list[tuple[Value, View]]:
    """Writes carried results straight into their buffer where the old value is dead by then; else copies."""
    copies = []
    for v, out, view in zip(body.inputs, body.outputs, carries, strict=False):
        last = max((i for i, o in enumerate(body.ops) if v in o.reads), default=-1)
        made = next((i for i, o in enumerate(body.ops) if out in o.results), -1)
        if made > last and body.ops[made].opdef.kind not in ("view", "repeat") and not body.ops[made].opdef.inplace:
            inner.destinations[out] = view
        elif out is not v:
            copies.append((out, view))
    return copies


def _last_reader(graph: Graph, value: Value) -> Op | None:
    """The last op that reads a value, or None if it is an output."""
    if value in graph.outputs:
        return None
    return next((op for op in reversed(graph.ops) if value in op.reads), None)
