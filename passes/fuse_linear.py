"""Norms in front of linears; residuals, norms and argmax behind them."""

from __future__ import annotations

from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.ops.elementwise import add
from monoplan.ir.ops.fused import fused_linear, linear_argmax, linear_norm
from monoplan.ir.ops.linear import linear
from monoplan.ir.ops.reduce import argmax, layer_norm, rms_norm
from monoplan.ir.ops.shape import concat, full, split
from monoplan.passes.expressions import is_pointwise
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Match, Readers, Rewrite, distinct_readers, param_values, rewrite_pass, too_many
from monoplan.passes.rebuild import Overwrites, builder_for, drop_dead


def _one_dim(m: Match) -> bool | str:
    return True if m["dims"] == 1 else f"the norm covers {m['dims']} dimensions, the linear reads one"


FUSE_RMSNORM_LINEAR = Rewrite(
    "fuse-rmsnorm-linear",
    "linear(rms_norm(x, g), w) -> the norm is applied while x is read",
    find=lambda x, g, w, b, *, eps, dims: linear(rms_norm(x, g, eps=eps, dims=dims), w, b),
    make=lambda x, g, w, b, eps: fused_linear(x, w, b, g, None, norm="rms", eps=eps),
    when=_one_dim,
)
FUSE_LAYERNORM_LINEAR = Rewrite(
    "fuse-layernorm-linear",
    "linear(layer_norm(x, g, c), w) -> the norm is applied while x is read",
    find=lambda x, g, c, w, b, *, eps, dims: linear(layer_norm(x, g, c, eps=eps, dims=dims), w, b),
    make=lambda x, g, c, w, b, eps: fused_linear(x, w, b, g, c, norm="layer", eps=eps),
    when=_one_dim,
)
FUSE_RESIDUAL_ADD = Rewrite(
    "fuse-residual-add",
    "linear(x, w) + r -> the residual is added as the product is stored",
    find=lambda x, w, b, r: add(linear(x, w, b), r),
    make=lambda x, w, b, r: fused_linear(x, w, b, None, None, r, expr="add(x0, x1)"),
    when=lambda m: m["r"].type == m.root.result.type or "the residual is not of the product's shape and type",
)
FUSE_HEAD_ARGMAX = rewrite_pass(
    "fuse-head-argmax",
    "argmax(linear(x, w)) over the last axis -> the logits are never stored",
    Rewrite(
        "fuse-head-argmax",
        "argmax(linear(x, w)) -> linear_argmax",
        find=lambda x, w, b, *, axis, keepdims: argmax(linear(x, w, b), axis=axis, keepdims=keepdims),
        make=lambda x, w, b, keepdims: linear_argmax(x, w, b, keepdims=keepdims),
        when=lambda m: _last_axis(m),
    ),
    Rewrite(
        "fuse-head-argmax",
        "argmax(linear(norm(x), w)) -> linear_argmax",
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
    "fuse-norm-linear",
    "linear(rms_norm or layer_norm(x)) -> the norm is applied while x is read",
    FUSE_RMSNORM_LINEAR,
    FUSE_LAYERNORM_LINEAR,
)


_NORMS = {"rms_norm": "rms", "layer_norm": "layer"}


def fuse_linear_norm(graph: Graph, notes: Notes) -> Graph:
    """A norm, with its tail, of the rows that a product by constant weights makes becomes the end of that product."""
    defs, readers, fixed, overwrites = (
        definitions(graph),
        distinct_readers(graph),
        param_values(graph),
        Overwrites(graph),
    )
    ops: list[Op] = []
    for at, op in enumerate(graph.ops):
        x = op.operands[0] if op.name in (*_NORMS, "fused_norm") else None
        source = None if x is None else defs.get(x)
        if x is None or source is None or source.opdef is not linear:
            ops.append(op)
            continue
        if reason := _refuse_norm(op, source, x, readers, fixed) or overwrites.refusal([source], at):
            notes.missed("fuse-linear-norm", op, reason)
            ops.append(op)
            continue
        count = len(op.opdef.operand_names)
        weights, extras = [*op.operands[1:count], None][:2], op.operands[count:]
        attrs = {"norm": op.attrs.get("norm") or _NORMS[op.name], "eps": op.attrs["eps"]}
        attrs["expr"] = op.attrs.get("expr", "x0")
        made = make_op(linear_norm, [*source.operands, *weights, *extras], attrs, loc=op.loc, fresh=str)
        ops.append(Op(made.opdef, made.operands, made.attrs, op.results, op.loc))
        notes.fired("fuse-linear-norm", ops[-1])
    return drop_dead(graph.replace(ops=tuple(ops))) if notes.rewrites else graph


def _refuse_norm(op: Op, source: Op, x: Value, readers: Readers, fixed: set[Value]) -> str:
    if op.attrs["dims"] != 1:
        return f"the norm covers {op.attrs['dims']} dimensions, the product makes one"
    if len(readers[x]) > 1:
        return too_many(x, readers)
    if x in op.operands[1:]:
        return f"{x} is not only normed: its norm's tail reads it, too"
    given = source.operands[0]
    if source.operands[1] not in fixed or given is None or given.type.dtype.bits > 32:
        return "the packed product takes a constant weight and floats up to f32"
    return ""


FUSE_LINEAR_NORM = Pass(
    "fuse-linear-norm", "norm(linear(x, w)) -> the rows of the product are normed by its own kernel", fuse_linear_norm
)

# linear(x, a), linear(x, b) -> split(linear(x, a|b)): one product for q, k, v and for gate, up.


# Larger products gain nothing from merging, and joined weights must not double the memory of a huge head.
_LARGEST = 65536


def merge_parallel_linears(graph: Graph, notes: Notes) -> Graph:
    """Merges linears that read the same value with weights of the same type; biases are joined too."""
    readers = distinct_readers(graph)
    merged: dict[Op, list[Op]] = {}
    for members in _groups(graph, readers):
        fitting, refused = _fitting(members, readers)
        for op, reason in refused:
            notes.missed("merge-parallel-linears", op, reason)
        if len(fitting) > 1:
            merged[fitting[0]] = fitting
    if not merged:
        return graph
    dropped = {op for members in merged.values() for op in members}
    builder = builder_for(graph)
    setup, ops = list(graph.setup), []
    for op in graph.ops:
        if op in merged:
            more_setup, new_ops = _merge(merged[op], builder.fresh)
            setup += more_setup
            ops += new_ops
            notes.fired("merge-parallel-linears", new_ops[0])
        elif op not in dropped:
            ops.append(op)
    return graph.replace(setup=tuple(setup), ops=tuple(ops))


def _groups(graph: Graph, readers: Readers) -> list[list[Op]]:
    """Linears over one value by constant weights. Those that end in pointwise ops (gate, up, an MLP beside attention)
    are kept apart from those that are cut into heads: a merged product has one epilogue."""
    fixed = param_values(graph)
    groups: dict[Any, list[Op]] = {}
    for op in graph.ops:
        if op.opdef is linear:
            x, weight, bias = op.operands
            if weight in fixed and (bias is None or bias in fixed):
                assert weight is not None
                tail = all(r is not None and is_pointwise(r) for r in readers.get(op.result, ()))
                groups.setdefault((x, weight.type.dtype, tail), []).append(op)
    return [members for members in groups.values() if len(members) > 1]


def _fitting(members: list[Op], readers: Readers) -> tuple[list[Op], list[tuple[Op, str]]]:
    """The members that can be merged, and why the others can't."""
    fitting, refused = [], []
    for op in members:
        w = op.given(1)
        rows = w.type.shape[0]
        if len(readers[w]) > 1:
            refused.append((op, f"{w} is read elsewhere too: joining it would store it twice"))
        elif not isinstance(rows, int) or rows > _LARGEST:
            refused.append((op, f"{w} has {rows} rows, over the limit of {_LARGEST}"))
        else:
            fitting.append(op)
    return fitting, refused


def _merge(members: list[Op], fresh: Any) -> tuple[list[Op], list[Op]]:
    """Setup that joins weights and biases, and the one linear with its split."""
    loc = members[0].loc
    weights = [op.given(1) for op in members]
    setup = [make_op(concat, weights, {"axis": 0}, loc=loc, fresh=fresh)]
    bias: Value | None = None
    if any(op.operands[2] is not None for op in members):
        parts = []
        for op, w in zip(members, weights, strict=True):
            part = op.operands[2]
            if part is None:
                attrs = {"shape": (w.type.shape[0],), "value": 0.0, "dtype": w.type.dtype}
                zeros = make_op(full, [], attrs, loc=op.loc, fresh=fresh)
                setup.append(zeros)
                part = zeros.result
            parts.append(part)
        setup.append(make_op(concat, parts, {"axis": 0}, loc=loc, fresh=fresh))
        bias = setup[-1].result
    wide = make_op(linear, [members[0].operands[0], setup[0].result, bias], {}, loc=loc, fresh=fresh)
    sizes = tuple(op.result.type.shape[-1] for op in members)
    cut = make_op(split, [wide.result], {"sizes": sizes, "axis": -1}, loc=loc, fresh=fresh)
    pieces = Op(cut.opdef, cut.operands, cut.attrs, tuple(op.result for op in members), loc)
    return setup, [wide, pieces]


MERGE_PARALLEL_LINEARS = Pass(
    "merge-parallel-linears",
    "linear(x, a), linear(x, b) -> split(linear(x, a|b)); weights are joined at load",
    merge_parallel_linears,
)
