"""Norms in front of linears, residuals and argmax behind them."""

from __future__ import annotations

from monoplan.ir.ops.elementwise import add
from monoplan.ir.ops.fused import fused_linear, linear_argmax
from monoplan.ir.ops.linear import linear
from monoplan.ir.ops.norm import layer_norm, rms_norm
from monoplan.ir.ops.reduce import argmax
from monoplan.passes.pattern import Match, Rewrite, rewrite_pass


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
