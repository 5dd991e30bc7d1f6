"""Norms in front of linears, residuals and argmax behind them; the last token is picked before the head."""

from __future__ import annotations

from monoplan.ir.builder import make_op
from monoplan.ir.graph import Graph, Op
from monoplan.ir.ops.elementwise import add
from monoplan.ir.ops.fused import fused_linear, linear_argmax
from monoplan.ir.ops.linear import linear
from monoplan.ir.ops.norm import layer_norm, rms_norm
from monoplan.ir.ops.reduce import argmax
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Match, Rewrite, distinct_readers, rewrite_pass, too_many
from monoplan.passes.rebuild import Overwrites, builder_for, drop_dead, rebuilt


def _one_dim(m: Match) -> bool | str:
    return True if m["dims"] == 1 else f"the norm covers {m['dims']} dimensions, the linear reads one"


FUSE_RMSNORM_LINEAR = Rewrite(
    "fuse-rmsnorm-linear", "linear(rms_norm(x, g), w) -> the norm is applied while x is read",
    find=lambda x, g, w, b, *, eps, dims: linear(rms_norm(x, g, eps=eps, dims=dims), w, b),
    make=lambda x, g, w, b, eps: fused_linear(x, w, b, g, None, norm="rms", eps=eps),
    when=_one_dim,
)
FUSE_LAYERNORM_LINEAR = Rewrite(
    "fuse-layernorm-linear", "linear(layer_norm(x, g, c), w) -> the norm is applied while x is read",
    find=lambda x, g, c, w, b, *, eps, dims: linear(layer_norm(x, g, c, eps=eps, dims=dims), w, b),
    make=lambda x, g, c, w, b, eps: fused_linear(x, w, b, g, c, norm="layer", eps=eps),
    when=_one_dim,
)
FUSE_RESIDUAL_ADD = Rewrite(
    "fuse-residual-add", "linear(x, w) + r -> the residual is added as the product is stored",
    find=lambda x, w, b, r: add(linear(x, w, b), r),
    make=lambda x, w, b, r: fused_linear(x, w, b, None, None, r, expr="add(x0, x1)"),
    when=lambda m: m["r"].type == m.root.result.type or "the residual is not of the product's shape and type",
)
FUSE_HEAD_ARGMAX = rewrite_pass(
    "fuse-head-argmax", "argmax(linear(x, w)) over the last axis -> the logits are never stored",
    Rewrite(
        "fuse-head-argmax", "argmax(linear(x, w)) -> linear_argmax",
        find=lambda x, w, b, *, axis, keepdims: argmax(linear(x, w, b), axis=axis, keepdims=keepdims),
        make=lambda x, w, b, keepdims: linear_argmax(x, w, b, keepdims=keepdims),
        when=lambda m: _last_axis(m),
    ),
    Rewrite(
        "fuse-head-argmax", "argmax(linear(norm(x), w)) -> linear_argmax",
        find=lambda x, w, b, g, c, *, norm, eps, axis, keepdims: argmax(
            fused_linear(x, w, b, g, c, norm=norm, eps=eps, gated=False, expr="x0"), axis=axis, keepdims=keepdims
        ),
        make=lambda x, w, b, g, c, norm, eps, keepdims: linear_argmax(
            x, w, b, g, c, norm=norm, eps=eps, keepdims=keepdims
        ),
        when=lambda m: _last_axis(m),
    ),
)


def _last_axis(m: Match) -> bool | str:
    rank = m["x"].type.rank
    return m["axis"] in (-1, rank - 1) or f"argmax is over axis {m['axis']}, not the last"


FUSE_NORM_LINEAR = rewrite_pass(
    "fuse-norm-linear", "linear(rms_norm or layer_norm(x)) -> the norm is applied while x is read",
    FUSE_RMSNORM_LINEAR, FUSE_LAYERNORM_LINEAR,
)


def pull_last_token(graph: Graph, notes: Notes) -> Graph:
    """slice(f(x)) -> f(slice(x)) for norms, linears and unary ops: only the wanted rows are computed."""
    while True:
        sweep = Notes()
        graph = _pull_once(graph, sweep)
        notes.rewrites += sweep.rewrites
        notes.done += sweep.done
        if not sweep.rewrites:
            notes.misses += sweep.misses
            return graph


def _pull_once(graph: Graph, notes: Notes) -> Graph:
    if not any(op.name in ("slice", "select_rows") for op in graph.ops):
        return graph
    defs, readers = {r: op for op in graph.ops for r in op.results}, distinct_readers(graph)
    overwrites = Overwrites(graph)
    builder = builder_for(graph)
    ops: list[Op] = []
    for at, op in enumerate(graph.ops):
        source = defs.get(op.operands[0]) if op.name in ("slice", "select_rows") and op.operands[0] else None
        if source is None or not _row_wise(source, op):
            ops.append(op)
            continue
        many = too_many(source.result, readers) if len(readers[source.result]) != 1 else ""
        if reason := many or overwrites.refusal([source], at):
            notes.missed("pull-last-token", op, reason)
            ops.append(op)
            continue
        picked = make_op(op.opdef, [source.operands[0], *op.operands[1:]], op.attrs, loc=op.loc, fresh=builder.fresh)
        again = rebuilt(source, [picked.result, *source.operands[1:]])
        ops += [picked, Op(again.opdef, again.operands, again.attrs, op.results, source.loc)]
        notes.fired("pull-last-token", ops[-1])
    return drop_dead(graph.replace(ops=tuple(ops))) if notes.rewrites else graph


def _row_wise(source: Op, pick: Op) -> bool:
    """Whether each row along the picked axis is computed from that row alone."""
    x = source.operands[0] if source.operands else None
    if x is None:
        return False
    axis = 1 if pick.name == "select_rows" else pick.attrs["axis"] % pick.operands[0].type.rank  # type: ignore[union-attr]
    if source.name == "linear":
        return axis < x.type.rank - 1
    if source.name in ("rms_norm", "layer_norm"):
        return bool(axis < x.type.rank - source.attrs["dims"])
    return source.opdef.kind == "pointwise" and len(source.operands) == 1


PULL_LAST_TOKEN = Pass(
    "pull-last-token", "slice(f(x)) -> f(slice(x)) for norms, linears and unary ops", pull_last_token
)
