"""Things that users write out and that have an op of their own: silu, norms, repeated heads, products by weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monoplan.ir.dims import equal, same_dims
from monoplan.ir.graph import Value
from monoplan.ir.ops.conv import conv2d
from monoplan.ir.ops.elementwise import add, div, mul, pow_, rsqrt, sigmoid, silu, sqrt, sub, swiglu
from monoplan.ir.ops.linear import linear, matmul
from monoplan.ir.ops.reduce import layer_norm, mean, rms_norm
from monoplan.ir.ops.shape import expand, repeat, reshape, transpose
from monoplan.ir.types import product
from monoplan.passes.pattern import Match, Rewrite, rewrite_pass


def _is_matrix_param(m: Match) -> bool | str:
    a, w = m["x"], m["w"]
    if w.type.rank != 2 or not a.type.dtype.is_float:
        return False
    return m.is_param("w") or "the second operand is not a weight"


MATMUL_TO_LINEAR = Rewrite(
    "matmul-to-linear",
    "matmul(x, w) -> linear(x, w transposed) when w is a weight",
    find=lambda x, w: matmul(x, w),
    make=lambda x, w: linear(x, transpose(w, axes=(1, 0))),
    when=_is_matrix_param,
)
LINEAR_BIAS = Rewrite(
    "linear-bias",
    "linear(x, w) + b -> linear(x, w, b) when b is one row",
    find=lambda x, w, b: add(linear(x, w, None), b),
    make=lambda x, w, b: linear(x, w, b),
    when=lambda m: m["b"].type.rank == 1 and equal(m["b"].type.shape[0], m["w"].type.shape[0]),
)
SILU = Rewrite("silu", "x * sigmoid(x) -> silu(x)", find=lambda x: mul(x, sigmoid(x)), make=lambda x: silu(x))
SWIGLU = Rewrite(
    "swiglu",
    "silu(gate) * up -> swiglu(gate, up)",
    find=lambda gate, up: mul(silu(gate), up),
    make=lambda gate, up: swiglu(gate, up),
    when=lambda m: m["gate"].type == m["up"].type or "gate and up differ in type",
)


SQUARE = Rewrite(
    "square",
    "pow(x, 2) -> x * x",
    find=lambda x, two: pow_(x, two),
    make=lambda x: mul(x, x),
    when=lambda m: m.scalar("two") == 2,
)


def _last_axis(m: Match) -> bool | str:
    if m.scalar("eps") is None:
        return "eps is not a constant"
    return m["axes"] in ((-1,), (m["x"].type.rank - 1,)) or f"the mean is over axes {m['axes']}, not the last"


def _eps(match: Match) -> float:
    return float(match.scalar("eps"))  # type: ignore[arg-type]


def _norm_rules(scaled: Callable[[Any, Any], Any]) -> list[Rewrite]:
    """Norms written out, without their weights; `scaled(x, v)` is one way to write x / sqrt(v)."""

    def rms(x: Value, eps: Value, axes: Any) -> Any:
        return scaled(x, add(mean(mul(x, x), axes=axes, keepdims=True), eps))

    return [
        Rewrite(
            "layer-norm",
            "(x - mean) / sqrt(mean of its squares + eps) -> layer_norm(x)",
            find=lambda x, eps, *, axes: rms(sub(x, mean(x, axes=axes, keepdims=True)), eps, axes),
            make=lambda x, match: layer_norm(x, eps=_eps(match)),
            when=_last_axis,
        ),
        Rewrite(
            "rms-norm",
            "x / sqrt(mean(x * x) + eps) -> rms_norm(x)",
            find=lambda x, eps, *, axes: rms(x, eps, axes),
            make=lambda x, match: rms_norm(x, eps=_eps(match)),
            when=_last_axis,
        ),
    ]


def _fits_norm(m: Match) -> bool:
    x, w = m["x"].type, m["w"].type
    return m["dims"] == 1 and w.rank == 1 and equal(w.shape[0], x.shape[-1])


NORMS = [
    *_norm_rules(lambda x, v: mul(x, rsqrt(v))),
    *_norm_rules(lambda x, v: div(x, sqrt(v))),
    Rewrite(
        "rms-norm-weight",
        "rms_norm(x) * weight -> rms_norm(x, weight)",
        find=lambda x, w, *, eps, dims: mul(rms_norm(x, None, eps=eps, dims=dims), w),
        make=lambda x, w, eps: rms_norm(x, w, eps=eps),
        when=_fits_norm,
    ),
    Rewrite(
        "layer-norm-weight",
        "layer_norm(x) * weight -> layer_norm(x, weight)",
        find=lambda x, w, *, eps, dims: mul(layer_norm(x, None, None, eps=eps, dims=dims), w),
        make=lambda x, w, eps: layer_norm(x, w, eps=eps),
        when=_fits_norm,
    ),
    Rewrite(
        "layer-norm-bias",
        "layer_norm(x, weight) + bias -> layer_norm(x, weight, bias)",
        find=lambda x, g, w, *, eps, dims: add(layer_norm(x, g, None, eps=eps, dims=dims), w),
        make=lambda x, g, w, eps: layer_norm(x, g, w, eps=eps),
        when=_fits_norm,
    ),
]


def _repeats(m: Match) -> tuple[int, int] | None:
    """(axis, n) when x[…, d, …] was given a dimension of 1 after d, stretched to n and joined with d."""
    x, wide, out = m["x"].type.shape, m["wide"], m["out"]
    for axis in range(len(x)):
        n = wide[axis + 1] if len(wide) == len(x) + 1 else None
        if not isinstance(n, int):
            continue
        middle = (*x[: axis + 1], 1, *x[axis + 1 :])
        stretched = (*x[: axis + 1], n, *x[axis + 1 :])
        joined = (*x[:axis], x[axis] * n, *x[axis + 1 :])
        if same_dims(m["middle"], middle) and same_dims(wide, stretched) and same_dims(out, joined):
            return axis, n
    return None


def _make_repeat(x: Value, match: Match) -> Any:
    found = _repeats(match)
    assert found is not None
    return repeat(x, repeats=found[1], axis=found[0])


REPEAT_KV = Rewrite(
    "repeat-kv",
    "reshape(expand(reshape(x))) that repeats a dimension's elements -> repeat(x)",
    find=lambda x, *, middle, wide, out: reshape(expand(reshape(x, shape=middle), shape=wide), shape=out),
    make=_make_repeat,
    when=lambda m: _repeats(m) is not None or "the elements of no dimension are repeated one by one",
)


def _are_patches(m: Match) -> bool | str:
    """Whether windows lie side by side and cover the image, so that each pixel is in one of them."""
    x, w = m["x"].type, m["w"].type
    sizes, kernel = x.shape[2:], tuple(w.shape[2:])
    if not m.is_param("w") or kernel == (1, 1):
        return False
    if tuple(m["stride"]) != kernel or any(m["padding"]) or any(d != 1 for d in m["dilation"]) or m["groups"] != 1:
        return "the windows of the convolution do not lie side by side"
    whole = all(isinstance(n, int) and n % k == 0 for n, k in zip(sizes, kernel, strict=True))
    joined = same_dims(m["out"], (x.shape[0], w.shape[0], product(sizes) // product(kernel))) if whole else False
    return joined or "the windows do not cover the image, or its size is a symbol"


def _make_patches(x: Value, w: Value, b: Value | None) -> Any:
    batch, channels, height, width = x.type.shape
    columns, _, tall, wide = w.type.shape
    pixels = reshape(x, shape=(batch, channels, height // tall, tall, width // wide, wide))
    rows = (batch, (height // tall) * (width // wide), channels * tall * wide)
    patches = reshape(transpose(pixels, axes=(0, 2, 4, 1, 3, 5)), shape=rows)
    return linear(patches, reshape(w, shape=(columns, channels * tall * wide)), b)


CONV_PATCHES = Rewrite(
    "conv-patches",
    "a convolution over the patches of an image, read as rows of channels -> linear",
    find=lambda x, w, b, *, stride, padding, dilation, groups, out: transpose(
        reshape(conv2d(x, w, b, stride=stride, padding=padding, dilation=dilation, groups=groups), shape=out),
        axes=(0, 2, 1),
    ),
    make=_make_patches,
    when=_are_patches,
)

IDIOMS = rewrite_pass(
    "idioms",
    "silu, swiglu, norms, repeat and linear written out -> the one op",
    SQUARE,
    *NORMS,
    SILU,
    SWIGLU,
    REPEAT_KV,
    MATMUL_TO_LINEAR,
    LINEAR_BIAS,
    CONV_PATCHES,
)
