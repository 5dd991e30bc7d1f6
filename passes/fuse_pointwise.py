"""Chains of pointwise ops become one op, and move into the kernel that makes or reads their value."""

from __future__ import annotations

from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.expr import Arg, count_ops, parse_expr, substitute_args
from monoplan.ir.graph import Graph, Op, Value, definitions, to_networkx
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.ops.fused import fused_gather, fused_linear, fused_matmul, fused_norm, fused_reduce, pointwise
from monoplan.passes.expressions import (
    LARGEST,
    Expression,
    expression_of,
    inline,
    is_pointwise,
    same_shape,
    with_accumulators,
)
from monoplan.passes.manager import NearMiss, Notes, Pass
from monoplan.passes.pattern import distinct_readers
from monoplan.passes.rebuild import drop_dead


def is_convex(graph: Graph, group: set[Op]) -> bool:
    """Whether no path leaves a group of ops and comes back: only then can one kernel take its place."""
    import networkx as nx

    dag = to_networkx(graph)
    after = set().union(*(nx.descendants(dag, op) for op in group)) - group
    before = set().union(*(nx.ancestors(dag, op) for op in group)) - group
    return not after & before


def fuse_pointwise(graph: Graph, notes: Notes) -> Graph:
    """Inlines a pointwise op into its only reader when both have the same shape."""
    defs = dict(definitions(graph))
    readers = distinct_readers(graph)
    ops: list[Op] = []
    for op in graph.ops:
        if not is_pointwise(op):
            ops.append(op)
            continue
        e = expression_of(op, defs)
        changed = e.operands != op.reads
        progress = True
        while progress:
            progress = False
            for v in e.operands:
                source = defs.get(v)
                if source is None or not is_pointwise(source) or source in graph.setup:
                    continue
                reason = _refuse_chain(source, op, e, defs, readers)
                if reason:
                    notes.misses.append(NearMiss("fuse-pointwise", f"{v} into {op.result}", reason))
                    continue
                e = inline(e, v, expression_of(source, defs))
                progress = changed = True
                notes.rewrites += 1
                break
        if changed and e.operands:
            made = make_op(pointwise, e.operands, {"expr": e.text}, names=[op.result.name], loc=op.loc, fresh=str)
            if made.result.type == op.result.type:
                op = Op(made.opdef, made.operands, made.attrs, op.results, op.loc)
                defs[op.result] = op
        ops.append(op)
    return drop_dead(graph.replace(ops=tuple(ops))) if notes.rewrites else graph


def _refuse_chain(source: Op, op: Op, e: Expression, defs: Any, readers: Any) -> str:
    if len(readers[source.result]) != 1:
        return f"{source.result} has {len(readers[source.result])} readers, it must have one"
    if not same_shape(source.result.type, op.result.type):
        return f"{source.result} is {source.result.type}, smaller than {op.result.type}: it would be computed again"
    if count_ops(e.node) + count_ops(expression_of(source, defs).node) > LARGEST:
        return f"the expression would have more than {LARGEST} ops"
    return ""


def fuse_gated(graph: Graph, notes: Notes) -> Graph:
    """f(a, b) over the two halves of one linear -> a gated linear: gate and up are made side by side."""
    defs = dict(definitions(graph))
    readers = distinct_readers(graph)
    ops: list[Op] = []
    for op in graph.ops:
        made = _gated(op, defs, readers, notes) if is_pointwise(op) else None
        if made is not None:
            op = made
            defs[op.result] = op
            notes.rewrites += 1
        ops.append(op)
    return drop_dead(graph.replace(ops=tuple(ops))) if notes.rewrites else graph


def _gated(op: Op, defs: Any, readers: Any, notes: Notes) -> Op | None:
    e = expression_of(op, defs)
    cuts = {defs[v] for v in e.operands if v in defs and defs[v].name == "split"}
    for cut in cuts:
        source = defs.get(cut.operands[0])
        if source is None or source.name not in ("linear", "fused_linear") or len(cut.results) != 2:
            continue
        if source.name == "fused_linear" and (source.attrs["gated"] or source.attrs["expr"] != "x0"):
            continue
        where = f"{op.result} over {source.result}"
        if cut.results[0].type != cut.results[1].type or cut.attrs["axis"] not in (-1, cut.results[0].type.rank - 1):
            notes.misses.append(NearMiss("fuse-gated", where, "the two halves differ in size"))
            continue
        shared = [v for v in (*cut.results, source.result) if len(readers.get(v, ())) != 1]
        if shared or not all(v in e.operands for v in cut.results):
            notes.misses.append(NearMiss("fuse-gated", where, f"{(shared or cut.results)[0]} must have this one reader"))
            continue
        if not same_shape(cut.results[0].type, op.result.type):
            continue
        extras = [v for v in e.operands if v not in cut.results]
        tail = with_accumulators(e, cut.results, extras)
        return _fused_linear(op, source, extras, tail.text, gated=True)
    return None


def _fused_linear(op: Op, source: Op, extras: list[Value], expr: str, gated: bool) -> Op | None:
    if source.name == "linear":
        head = [*source.operands, None, None]
        attrs: dict[str, Any] = {"norm": "none", "eps": 0.0}
    else:
        head = list(source.operands[:5])
        attrs = {"norm": source.attrs["norm"], "eps": source.attrs["eps"]}
    return _like(op, fused_linear, [*head, *extras], attrs | {"gated": gated, "expr": expr})


def _like(op: Op, opdef: Any, operands: list[Any], attrs: dict[str, Any]) -> Op | None:
    """The new op in place of `op`, or None if their types differ."""
    made = make_op(opdef, operands, attrs, names=[op.result.name], loc=op.loc, fresh=str)
    return Op(made.opdef, made.operands, made.attrs, op.results, op.loc) if made.result.type == op.result.type else None


def fuse_into_producer(graph: Graph, notes: Notes) -> Graph:
    """A pointwise op becomes the tail of the kernel that makes one of its operands."""
    defs = dict(definitions(graph))
    readers = distinct_readers(graph)
    order = {op: i for i, op in enumerate(graph.ops)}
    ops: list[Op] = []
    for op in graph.ops:
        made = _into_producer(op, graph, defs, readers, order, notes) if is_pointwise(op) else None
        if made is not None:
            order[made] = order[op]
            op = made
            defs[op.result] = op
            notes.rewrites += 1
        ops.append(op)
    return drop_dead(graph.replace(ops=tuple(ops))) if notes.rewrites else graph


_TAILS = ("linear", "fused_linear", "matmul", "fused_matmul", "norm", "fused_norm", "fused_gather", "fused_reduce")


def _into_producer(op: Op, graph: Graph, defs: Any, readers: Any, order: Any, notes: Notes) -> Op | None:
    e = expression_of(op, defs)
    sources = [defs[v] for v in e.operands if v in defs and defs[v] in order]
    # Products first, since their tails are free; among equals the last, so that the others are ready.
    for source in sorted(sources, key=lambda s: (s.opdef.kind not in ("linear", "fused_linear"), -order[s])):
        takes_tail = source.opdef.kind in _TAILS or source.name in ("embedding", "sum", "mean", "max", "min")
        if not takes_tail or len(source.results) != 1:
            continue
        v = source.result
        where = f"{op.result} into {source.name} {v}"
        if len(readers[v]) != 1:
            reason = f"{v} has {len(readers[v])} readers, it must have one"
            notes.misses.append(NearMiss("fuse-into-producer", where, reason))
            continue
        if not same_shape(v.type, op.result.type):
            notes.misses.append(NearMiss("fuse-into-producer", where, f"{v.type} is stretched to {op.result.type}"))
            continue
        extras = [x for x in e.operands if x is not v]
        if source.name == "fused_linear" and source.attrs["gated"]:
            continue
        made = _with_tail(op, source, e, extras)
        if made is not None:
            return made
    return None


def _with_tail(op: Op, source: Op, e: Expression, extras: list[Value]) -> Op | None:
    """The producer with its tail extended by the expression."""
    names = len(source.opdef.operand_names)
    kind = source.opdef.kind
    before: list[Value] = []
    if kind in ("fused_linear", "fused_matmul", "fused_norm", "fused_gather"):
        before = [v for v in source.operands[names:] if v is not None]
        inner = parse_expr(source.attrs["expr"])
    elif kind == "fused_reduce":
        before = list(source.reads[source.attrs["inputs"] :])
        inner = parse_expr(source.attrs["post"])
    else:
        inner = Arg(0)
    merged = [*before, *(x for x in extras if x not in before)]
    place = {v: i + 1 for i, v in enumerate(merged)}
    moved = substitute_args(inner, lambda i: Arg(0) if i == 0 else Arg(place[before[i - 1]]))
    node = substitute_args(e.node, lambda i: moved if e.operands[i] is source.result else Arg(place[e.operands[i]]))
    if count_ops(node) > LARGEST:
        return None
    expr = str(node)
    if kind in ("linear", "fused_linear"):
        return _fused_linear(op, source, merged, expr, gated=False)
    if kind in ("matmul", "fused_matmul"):
        return _like(op, fused_matmul, [*source.operands[:2], *merged], {"expr": expr})
    if kind in ("norm", "fused_norm"):
        norm = source.attrs.get("norm") or {"rms_norm": "rms", "layer_norm": "layer"}[source.name]
        head = [*source.operands[:names], None, None, None][:3]
        return _like(op, fused_norm, [*head, *merged],
                     {"norm": norm, "eps": source.attrs["eps"], "dims": source.attrs["dims"], "expr": expr})
    if kind in ("gather", "fused_gather"):
        return _like(op, fused_gather, [*source.operands[:2], *merged], {"expr": expr})
    a = source.attrs
    if kind == "fused_reduce":
        attrs = {k: a[k] for k in ("inputs", "reduce", "axes", "keepdims", "pre")}
        return _like(op, fused_reduce, [*source.reads[: a["inputs"]], *merged], attrs | {"post": expr})
    attrs = {"inputs": 1, "reduce": source.name, "axes": a["axes"], "keepdims": a["keepdims"], "pre": "x0", "post": expr}
    return _like(op, fused_reduce, [source.operands[0], *merged], attrs)


def fuse_into_reduce(graph: Graph, notes: Notes) -> Graph:
    """A pointwise op whose only reader is a reduction is computed while the reduction reads."""
    defs = dict(definitions(graph))
    readers = distinct_readers(graph)
    ops: list[Op] = []
    for op in graph.ops:
        plain = op.name in ("sum", "mean", "max", "min")
        fused = op.name == "fused_reduce" and op.attrs["inputs"] == 1 and op.attrs["pre"] == "x0"
        source = defs.get(op.reads[0]) if plain or fused else None
        if source is not None and is_pointwise(source) and len(readers[source.result]) == 1:
            e = expression_of(source, defs)
            if e.operands:
                a = op.attrs
                attrs = {"inputs": len(e.operands), "reduce": a["reduce"] if fused else op.name, "axes": a["axes"],
                         "keepdims": a["keepdims"], "pre": e.text, "post": a["post"] if fused else "x0"}
                made = _like(op, fused_reduce, [*e.operands, *op.reads[1:]], attrs)
                if made is not None:
                    op = made
                    defs[op.result] = op
                    notes.rewrites += 1
        ops.append(op)
    return drop_dead(graph.replace(ops=tuple(ops))) if notes.rewrites else graph


FUSE_POINTWISE = Pass("fuse-pointwise", "chains of pointwise ops of one shape become one op", fuse_pointwise)
FUSE_GATED = Pass("fuse-gated", "f(gate, up) over the halves of one linear -> a gated linear (swiglu)", fuse_gated)
FUSE_INTO_PRODUCER = Pass(
    "fuse-into-producer", "a pointwise op becomes the tail of the kernel that makes its operand", fuse_into_producer
)
FUSE_INTO_REDUCE = Pass("fuse-into-reduce", "a pointwise op is computed while its reduction reads", fuse_into_reduce)

__all__ = ["FUSE_GATED", "FUSE_INTO_PRODUCER", "FUSE_INTO_REDUCE", "FUSE_POINTWISE", "REGISTRY", "is_convex"]
