"""Only the wanted rows are computed: the pick of a last token moves in front of what treats every row alike.

The pick of LLaMA's last hidden state moves through the head's norm and, on both sides of the residual, through the MLP
of the last layer: a prompt needs one row of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from monoplan.ir.builder import make_op
from monoplan.ir.dims import equal
from monoplan.ir.graph import Graph, Op, Value
from monoplan.passes.canonicalize import merge_equal_ops
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import distinct_readers, too_many
from monoplan.passes.rebuild import Overwrites, builder_for, drop_dead, replace_values

_PICKS, _NORMS = ("slice", "select_rows"), ("rms_norm", "layer_norm")
_ALONG = (*_NORMS, "all_reduce")  # what may stand between a product and its residual


def pull_last_token(graph: Graph, notes: Notes) -> Graph:
    """slice(f(x)) -> f(slice(x)) for norms, linears, pointwise ops and sums over ranks."""
    while True:
        sweep = Notes()
        graph = _pull_once(graph, sweep)
        notes.rewrites += sweep.rewrites
        notes.done += sweep.done
        if not sweep.rewrites:
            notes.misses += sweep.misses
            return graph
        graph = merge_equal_ops(graph, Notes())  # both sides of a residual lead to one value: one pick of it


def _pull_once(graph: Graph, notes: Notes) -> Graph:
    if not any(op.name in _PICKS for op in graph.ops):
        return graph
    defs, readers = {r: op for op in graph.ops for r in op.results}, distinct_readers(graph)
    overwrites = Overwrites(graph)
    builder = builder_for(graph)
    ops: list[Op] = []
    new: dict[Value, Value] = {}
    for at, op in enumerate(graph.ops):
        source = defs.get(op.operands[0]) if op.name in _PICKS and op.operands[0] else None
        wanted = _operands_with_rows(source, op, defs) if source is not None else ()
        if source is None or not wanted:
            ops.append(op)
            continue
        many = too_many(source.result, readers) if len(readers[source.result]) != 1 else ""
        if reason := many or overwrites.refusal([source], at):
            notes.missed("pull-last-token", op, reason)
            ops.append(op)
            continue
        rows: dict[Value | None, Value | None] = {}
        for v in wanted:
            ops.append(make_op(op.opdef, [v, *op.operands[1:]], op.attrs, loc=op.loc, fresh=builder.fresh))
            rows[v] = ops[-1].result
        operands = [rows.get(v, v) for v in source.operands]
        ops.append(make_op(source.opdef, operands, source.attrs, loc=source.loc, fresh=builder.fresh))
        new[op.result] = ops[-1].result
        notes.fired("pull-last-token", ops[-1], part_of=source.result)
    return drop_dead(replace_values(graph.replace(ops=tuple(ops)), new)) if new else graph


def _operands_with_rows(source: Op, pick: Op, defs: Mapping[Value, Op]) -> tuple[Value, ...]:
    """The operands of which a row of the result needs that row alone; none if the pick must stay behind the op."""
    x = source.operands[0] if source.operands else None
    if x is None:
        return ()
    axis = 1 if pick.name == "select_rows" else pick.attrs["axis"] % pick.reads[0].type.rank
    if source.name == "linear":
        return (x,) if axis < x.type.rank - 1 else ()
    if source.name in _NORMS:
        return (x,) if axis < x.type.rank - source.attrs["dims"] else ()
    if source.name == "all_reduce":
        return (x,)
    if source.opdef.kind != "pointwise":
        return ()
    if len(source.operands) == 1:
        return (x,)
    one_row = pick.name == "select_rows" or pick.attrs["length"] == 1
    return _rows_of_several(source, axis, defs) if one_row else ()


def _rows_of_several(source: Op, axis: int, defs: Mapping[Value, Op]) -> tuple[Value, ...]:
    """Operands of a pointwise op that have rows of their own; none if one has them in another place than the result."""
    shape, wanted = source.result.type.shape, dict[Value, None]()
    for v in source.operands:
        if v is None:
            continue
        place = axis - (len(shape) - v.type.rank)
        if place < 0 or equal(v.type.shape[place], 1):  # the same for all rows
            continue
        if v.type.rank != len(shape) or not equal(v.type.shape[0], shape[0]):
            return ()
        wanted[v] = None
    return tuple(wanted) if any(_chained(v, defs) for v in wanted) else ()


def _chained(v: Value, defs: Mapping[Value, Op]) -> bool:
    """Whether v is a product of rows that are computed row by row themselves.

    One product alone, behind attention, stays: it would be another kernel than those of the layers before, and so would
    attention, which hands its rows over in another form then.
    """
    op = defs.get(v)
    while op is not None and (op.name in _ALONG or (op.opdef.kind == "pointwise" and len(op.operands) == 1)):
        op = defs.get(op.reads[0])
    x = defs.get(op.reads[0]) if op is not None and op.name == "linear" else None
    return x is not None and (x.name in (*_NORMS, "linear") or x.opdef.kind == "pointwise")


PULL_LAST_TOKEN = Pass(
    "pull-last-token", "slice(f(x)) -> f(slice(x)) for what works on each row by itself", pull_last_token
)
