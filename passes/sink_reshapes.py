"""Reshapes that only join rows move behind linears, norms and pointwise ops, where they meet their counterpart.

`Conv1D` and the like flatten [batch, seq, features] to [tokens, features] and back; between the two reshapes stand ops
that treat every row alike, and that fuse with their neighbours once the reshapes are out of the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.dims import equal
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.ops.shape import reshape
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Readers, distinct_readers
from monoplan.passes.rebuild import Overwrites, builder_for, drop_dead


def sink_reshapes(graph: Graph, notes: Notes) -> Graph:
    """f(reshape(x)) -> reshape(f(x)) where f works on each row by itself and the reshape keeps rows whole."""
    if not any(op.name == "reshape" for op in graph.ops):
        return graph
    defs, overwrites, readers = definitions(graph), Overwrites(graph), distinct_readers(graph)
    builder = builder_for(graph)
    ops: list[Op] = []
    for at, op in enumerate(graph.ops):
        product = _between(op, defs, readers)
        if product is not None and not overwrites.refusal([product, defs[product.reads[0]]], at):
            ops += _regrouped(op, product, builder.fresh)
            notes.fired("sink-reshapes", ops[-1])
            continue
        sources = _sources(op, defs)
        if sources is None or overwrites.refusal([defs[v] for v in op.reads if v in defs], at):
            ops.append(op)
            continue
        inner = make_op(op.opdef, sources, op.attrs, loc=op.loc, fresh=builder.fresh)
        outer = make_op(reshape, [inner.result], {"shape": op.result.type.shape}, loc=op.loc, fresh=builder.fresh)
        ops += [inner, Op(outer.opdef, outer.operands, outer.attrs, op.results, op.loc)]
        defs.update({inner.result: inner, op.result: ops[-1]})
        notes.fired("sink-reshapes", inner)
    return drop_dead(graph.replace(ops=tuple(ops))) if notes.rewrites else graph


def _sources(op: Op, defs: Mapping[Value, Op]) -> list[Value | None] | None:
    """The op's operands in front of their reshapes, or None if it must stay where it is."""
    row_wise = op.name in ("linear", "rms_norm", "layer_norm") and op.attrs.get("dims", 1) == 1
    if not row_wise and op.opdef.kind != "pointwise":
        return None
    moved: list[Value] = []
    sources: list[Value | None] = []
    for i, v in enumerate(op.operands):
        before = _flattened(v, defs) if v is not None and (i == 0 or not row_wise) else None
        if before is not None:
            moved.append(before)
            sources.append(before)
        elif v is None or row_wise or v.type.rank == 0 or (v.type.rank == 1 and op.result.type.rank > 1):
            sources.append(v)  # a weight, or the same for every row
        else:
            return None
    same = all(m.type.rank == moved[0].type.rank and _equal(m.type.shape, moved[0].type.shape) for m in moved)
    widths = all(equal(m.type.shape[-1], op.result.type.shape[-1]) for m in moved) or row_wise
    return sources if moved and same and widths else None


def _flattened(v: Value, defs: Mapping[Value, Op]) -> Value | None:
    """x of reshape(x) when it joins dimensions in front of the last. (Heads are split off the other way.)"""
    op = defs.get(v)
    if op is None or op.name != "reshape":
        return None
    x = op.given(0)
    joins = x.type.rank > v.type.rank > 1
    return x if joins and equal(x.type.shape[-1], v.type.shape[-1]) else None


def _between(op: Op, defs: Mapping[Value, Op], readers: Readers) -> Op | None:
    """The linear of reshape(linear(reshape(x))) that splits its rows again; the inner reshape may join columns too."""
    product = defs.get(op.reads[0]) if op.name == "reshape" else None
    if product is None or product.name != "linear" or len(readers.get(product.result, ())) != 1:
        return None
    flat = defs.get(product.reads[0])
    splits = op.result.type.rank > product.result.type.rank > 1
    splits = splits and equal(op.result.type.shape[-1], product.result.type.shape[-1])
    return product if splits and flat is not None and flat.name == "reshape" else None


def _regrouped(op: Op, product: Op, fresh: Any) -> list[Op]:
    """reshape(linear(x)) -> linear(reshape(x)): what follows the linear is its neighbour then."""
    x = product.reads[0]
    shape = (*op.result.type.shape[:-1], x.type.shape[-1])
    rows = make_op(reshape, [x], {"shape": shape}, loc=op.loc, fresh=fresh)
    return [rows, Op(product.opdef, (rows.result, *product.operands[1:]), product.attrs, op.results, product.loc)]


def _equal(a: tuple[object, ...], b: tuple[object, ...]) -> bool:
    return all(equal(p, q) for p, q in zip(a, b, strict=True))  # type: ignore[arg-type]


SINK_RESHAPES = Pass(
    "sink-reshapes", "f(reshape(x)) -> reshape(f(x)) for what works on each row by itself", sink_reshapes
)
