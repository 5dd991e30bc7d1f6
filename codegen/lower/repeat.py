"""Loops: rolled layers and scans. A body is lowered once, with buffers for what differs from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence

from monoplan.codegen.lower.lowerer import Loop, Lowerer, lowers
from monoplan.codegen.views import View, slice_buffer, table_buffer, whole
from monoplan.ir.dims import Dim, divide_exactly
from monoplan.ir.errors import CompileError
from monoplan.ir.graph import Graph, Op, Value


@lowers("repeat")
def lower_repeat(lowerer: Lowerer, op: Op) -> None:
    """Lowers the body once; carried values keep one buffer, per-turn operands become tables."""
    a = op.attrs
    body, count, carried, shared = a["body"], a["count"], a["carried"], a["shared"]
    inner = Lowerer(body, lowerer.target, parent=lowerer)
    carries = _carries(lowerer, op, inner, carried)
    _share(lowerer, op.operands[carried : carried + shared], inner, body.inputs[carried:])
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
    _lower_body(body, inner, carries, {})
    lowerer.items.append(Loop(count, tuple(inner.items)))
    lowerer.result.views.update(inner.views)
    lowerer.views.update(zip(op.results, carries, strict=False))
    for i, out in enumerate(body.outputs[carried:]):
        for turn in range(count):
            r = op.results[carried + i * count + turn]
            lowerer.views[r] = _turn_view(lowerer, inner.read(out), turn)


@lowers("loop")
def lower_scan(lowerer: Lowerer, op: Op) -> None:
    """The state keeps one buffer; a turn reads and writes slices of the tensors outside, at their place."""
    if lowerer.parent is not None:
        raise CompileError(
            "a scan inside of another scan's cell can't be compiled",
            where=op.loc,
            fix="scan over both dimensions at once (reshape them to one), or write out the inner steps",
        )
    a = op.attrs
    state, slices = a["state"], a["slices"]
    body = _states_last(a["body"], state)
    inner = Lowerer(body, lowerer.target, parent=lowerer)
    carries = _carries(lowerer, op, inner, state)
    apart: list[tuple[Value, View]] = []  # slices that kernels can't read at their place
    for v, b in zip(op.operands[state : state + slices], body.inputs[state:], strict=False):
        assert v is not None
        view = lowerer.read(v)
        piece = _piece(lowerer.copy(view) if view.is_virtual else view, b.name, a["length"], a["reverse"])
        if _is_aligned(lowerer, piece):
            inner.views[b] = piece
        else:
            apart.append((b, piece))
    _share(lowerer, op.operands[state + slices :], inner, body.inputs[state + slices :])
    inner.protected = {inner.views[b].buffer for b in body.inputs[state + slices :] if b in inner.views}
    inner.op = op
    for b, piece in apart:
        inner.views[b] = inner.copy(piece)
    ys = [lowerer.destination(r) for r in op.results[state:]]
    pieces = [_piece(y, f"{y.buffer.name}_slice", a["length"], a["reverse"]) for y in ys]
    stacked: dict[Value, list[View]] = {}
    for out, piece in zip(body.outputs[state:], pieces, strict=True):
        stacked.setdefault(out, []).append(piece)
    _lower_body(body, inner, carries, stacked)
    if inner.items:
        lowerer.items.append(Loop(a["length"], tuple(inner.items), scan=True))
    lowerer.result.views.update(inner.views)
    lowerer.views.update(zip(op.results, carries, strict=False))


def _states_last(body: Graph, state: int) -> Graph:
    """The body with the ops that make the next state, and what reads them, behind all others: then more of them can
    write over the state that they replace."""
    if any(o.opdef.inplace for o in body.ops):
        return body
    late = {v for v in body.outputs[:state] if v not in body.inputs}
    first, last = [], []
    for o in body.ops:
        if late.isdisjoint((*o.reads, *o.results)):
            first.append(o)
        else:
            late.update(o.results)
            last.append(o)
    return body.replace(ops=(*first, *last))


def _carries(lowerer: Lowerer, op: Op, inner: Lowerer, count: int) -> list[View]:
    """One buffer for each value that goes round: that of the first one, if nobody else needs it, or a copy."""
    found: list[View] = []
    for v, b in zip(op.operands[:count], inner.graph.inputs, strict=False):
        assert v is not None
        view = lowerer.read(v)
        own = view.buffer.kind == "arena" and view.is_whole and not _is_wanted(lowerer, view, v, op)
        found.append(view if own else lowerer.copy(view))
        inner.views[b] = found[-1]
    return found


def _is_wanted(lowerer: Lowerer, view: View, value: Value, op: Op) -> bool:
    """Whether the storage of an operand is read by anything else at or after a loop."""
    graph = lowerer.graph
    later = [v for o in graph.ops[graph.ops.index(op) :] for v in o.reads]
    later += graph.outputs
    later.remove(value)
    return any(v is value or (v in lowerer.views and lowerer.views[v].buffer is view.buffer) for v in set(later))


def _share(lowerer: Lowerer, operands: Sequence[Value | None], inner: Lowerer, inputs: Sequence[Value]) -> None:
    """Values that are the same in all turns."""
    for v, b in zip(operands, inputs, strict=False):
        assert v is not None
        if lowerer.is_param(v):
            lowerer.root.param_values.add(b)
            lowerer.root.table_params[b] = (v,)
        else:
            inner.views[b] = lowerer.read(v)


def _piece(view: View, name: str, length: Dim, reverse: bool) -> View:
    """The slice of a view along its first dimension that a turn reads or writes."""
    step = view.strides[0]
    first = view.offset + (length - 1) * step if reverse else view.offset
    buffer = slice_buffer(name, view.buffer, view.shape[1:], first, -step if reverse else step)
    return View(buffer, view.shape[1:], view.strides[1:])


def _is_aligned(lowerer: Lowerer, piece: View) -> bool:
    """Whether every slice begins where kernels of a GPU may read vectors; those of CPUs read them anywhere."""
    b = piece.buffer
    places = (b.first * b.dtype.itemsize, b.stride * b.dtype.itemsize)
    return lowerer.target.is_cpu or all(divide_exactly(d, 16) is not None for d in places)


def _lower_body(body: Graph, inner: Lowerer, carries: Sequence[View], stacked: dict[Value, list[View]]) -> None:
    """Lowers the ops of a turn; its results are written where they belong at once, or are copied there at the end."""
    for out in [v for v in stacked if v in body.inputs]:  # before the state is overwritten
        inner.copy(inner.read(out), *stacked.pop(out))
    state = list(zip(body.inputs, body.outputs, carries, strict=False))
    for v, out, view in state:
        if out not in inner.destinations and _may_write(body, v, out, {*body.outputs[: len(carries)], *stacked}):
            inner.destinations[out] = view
    for out, pieces in stacked.items():
        if _is_aligned(inner, pieces[0]):
            if out not in inner.destinations:
                inner.destinations[out] = pieces[0]
            inner.also[out] = [p for p in pieces if p is not inner.destinations[out]]
    inner.lower_ops()
    # What is stacked first: it may be a view of the state of the turn before.
    for out, pieces in stacked.items():
        if left := [p for p in pieces if p not in (inner.read(out), *inner.stored.get(out, ()))]:
            inner.copy(inner.read(out), *left)
    copies = [(inner.read(out), view) for _, out, view in state if inner.read(out) != view]
    held = {view.buffer for view in carries}
    copies = [(inner.copy(source) if source.buffer in held else source, view) for source, view in copies]
    for source, view in copies:
        inner.copy(source, view)


def _may_write(body: Graph, value: Value, out: Value, wanted: set[Value]) -> bool:
    """Whether `out` may be written over the carried value that it replaces: all have read that, or the op that makes it
    reads each element just before it writes it. `wanted`: what is read at the end of a turn."""
    made = next((i for i, o in enumerate(body.ops) if out in o.results), -1)
    if made < 0 or body.ops[made].opdef.inplace:
        return False
    same = {value}  # it and views of it
    last = -1
    for i, o in enumerate(body.ops):
        if same.isdisjoint(o.reads):
            continue
        if o.opdef.kind == "view":
            same.update(o.results)
        else:
            last = i
    if not same.isdisjoint(wanted) or last > made:
        return False
    maker = body.ops[made]
    alike = maker.opdef.kind in ("pointwise", "fused_pointwise") or _is_residual(maker, value)
    return last < made or (alike and value.type == out.type and same.intersection(maker.reads) == {value})


def _is_residual(maker: Op, value: Value) -> bool:
    """Whether a product reads a value only as the first of what its epilogue adds to it, element by element."""
    first = len(maker.opdef.operand_names)
    if maker.name != "fused_linear" or maker.attrs["gated"] or maker.operands[first : first + 1] != (value,):
        return False
    return maker.operands.count(value) == 1


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
