"""What follows a convolution with one number for each channel becomes part of its weight and bias, at load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monoplan.ir.dims import equal
from monoplan.ir.graph import Value
from monoplan.ir.ops.conv import conv2d
from monoplan.ir.ops.elementwise import add, div, mul, neg, sub
from monoplan.ir.ops.shape import reshape
from monoplan.ir.types import bf16, f16
from monoplan.passes.pattern import Match, Rewrite, rewrite_pass


def _per_channel(m: Match) -> bool | str:
    """Whether s is a constant with one number for each output channel, and weights may be rounded anew."""
    s, y, w = m["s"].type, m.root.result.type, m["w"].type
    shape = (1,) * (4 - s.rank) + tuple(s.shape)
    if not (len(shape) == 4 and equal(shape[1], w.shape[0]) and all(equal(shape[i], 1) for i in (0, 2, 3))):
        return "the other operand has not one number for each channel"
    if not all(v is None or _constant(m, v) for v in (m["s"], m["w"], m["b"])):
        return "the weight or the other operand is not a constant"
    if w.dtype in (f16, bf16):
        return f"the weight is {w.dtype}: it would be rounded twice"
    return (s.dtype == w.dtype and y.dtype == m["x"].type.dtype == w.dtype) or "the types differ"


def _constant(m: Match, v: Value) -> bool:
    """Whether a value is made of weights; those that this pass makes are not hoisted yet."""
    made = m.defs.get(v)
    return v in m.params or (made is not None and bool(made.reads) and all(_constant(m, r) for r in made.reads))


def _flat(s: Value, w: Value) -> Value:
    return reshape(s, shape=(w.type.shape[0],))  # type: ignore[no-any-return]


def _scaled(by: Any) -> Callable[..., Value]:
    def make(x: Value, w: Value, b: Value | None, s: Value, **attrs: Any) -> Value:
        weight = by(w, reshape(s, shape=(w.type.shape[0], 1, 1, 1)))
        return conv2d(x, weight, None if b is None else by(b, _flat(s, w)), **attrs)  # type: ignore[no-any-return]

    return make


def _shifted(by: Any, alone: Any) -> Callable[..., Value]:
    def make(x: Value, w: Value, b: Value | None, s: Value, **attrs: Any) -> Value:
        flat = _flat(s, w)
        return conv2d(x, w, alone(flat) if b is None else by(b, flat), **attrs)  # type: ignore[no-any-return]

    return make


def _rewrite(rule: str, by: Any, make: Callable[..., Value]) -> Rewrite:
    return Rewrite(
        "fold-conv",
        rule,
        find=lambda x, w, b, s, *, stride, padding, dilation, groups: by(
            conv2d(x, w, b, stride=stride, padding=padding, dilation=dilation, groups=groups), s
        ),
        make=lambda x, w, b, s, stride, padding, dilation, groups: make(
            x, w, b, s, stride=stride, padding=padding, dilation=dilation, groups=groups
        ),
        when=_per_channel,
    )


FOLD_CONV = rewrite_pass(
    "fold-conv",
    "conv2d(x, w, b) * s + t, with a constant for each channel as in batch_norm -> conv2d(x, w * s, b * s + t)",
    _rewrite("conv2d(x, w, b) * s -> conv2d(x, w * s, b * s)", mul, _scaled(mul)),
    _rewrite("conv2d(x, w, b) / s -> conv2d(x, w / s, b / s)", div, _scaled(div)),
    _rewrite("conv2d(x, w, b) + s -> conv2d(x, w, b + s)", add, _shifted(add, lambda s: s)),
    _rewrite("conv2d(x, w, b) - s -> conv2d(x, w, b - s)", sub, _shifted(sub, neg)),
)
