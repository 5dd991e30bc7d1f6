"""Pointwise ops: numpy broadcasting, promoted element types."""

from __future__ import annotations

import math

import numpy as np

from monoplan.ir.opdef import Array, op, require
from monoplan.ir.rules import broadcast, comparison, logical, numeric
from monoplan.ir.types import DType, TensorType, bool_, promote

P = "pointwise"


@op(numeric("add"), P)
def add(a: Array, b: Array) -> Array:
    """a + b."""
    return a + b


@op(numeric("sub"), P)
def sub(a: Array, b: Array) -> Array:
    """a - b."""
    return a - b


@op(numeric("mul"), P)
def mul(a: Array, b: Array) -> Array:
    """a * b."""
    return a * b


@op(numeric("div", floats=True), P)
def div(a: Array, b: Array) -> Array:
    """a / b, of floats."""
    return a / b


@op(numeric("pow", floats=True), P)
def pow_(a: Array, b: Array) -> Array:
    """a to the power b, of floats."""
    return np.power(a, b)


@op(numeric("maximum"), P)
def maximum(a: Array, b: Array) -> Array:
    """The larger of a and b; NaN if either is."""
    return np.maximum(a, b)


@op(numeric("minimum"), P)
def minimum(a: Array, b: Array) -> Array:
    """The smaller of a and b; NaN if either is."""
    return np.minimum(a, b)


@op(numeric("neg"), P)
def neg(x: Array) -> Array:
    """-x."""
    return -x


@op(numeric("abs"), P)
def abs_(x: Array) -> Array:
    """|x|."""
    return np.abs(x)


@op(numeric("exp", floats=True), P)
def exp(x: Array) -> Array:
    """e to the x."""
    return np.exp(x)


@op(numeric("log", floats=True), P)
def log(x: Array) -> Array:
    """The natural logarithm."""
    return np.log(x)


@op(numeric("sqrt", floats=True), P)
def sqrt(x: Array) -> Array:
    """The square root."""
    return np.sqrt(x)


@op(numeric("rsqrt", floats=True), P)
def rsqrt(x: Array) -> Array:
    """1 / sqrt(x)."""
    return 1 / np.sqrt(x)


@op(numeric("sin", floats=True), P)
def sin(x: Array) -> Array:
    """The sine of x in radians."""
    return np.sin(x)


@op(numeric("cos", floats=True), P)
def cos(x: Array) -> Array:
    """The cosine of x in radians."""
    return np.cos(x)


@op(numeric("tanh", floats=True), P)
def tanh(x: Array) -> Array:
    """The hyperbolic tangent."""
    return np.tanh(x)


@op(numeric("sigmoid", floats=True), P)
def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


_erf = np.vectorize(math.erf, otypes=[np.float64])


@op(numeric("erf", floats=True), P)
def erf(x: Array) -> Array:
    """The error function."""
    return _erf(x)


@op(numeric("relu"), P)
def relu(x: Array) -> Array:
    """max(x, 0); NaN stays NaN."""
    return np.maximum(x, np.zeros((), x.dtype))


@op(numeric("silu", floats=True), P)
def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return np.where(np.isneginf(x), 0.0, x / (1 + np.exp(-x)))


@op(numeric("swiglu", floats=True), P)
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    return silu.reference(gate) * up


GELU_KINDS = ("none", "tanh", "fast", "fast_tanh")


def _gelu_type(x: TensorType, *, approximate: str) -> TensorType:
    require(
        approximate in GELU_KINDS, f"gelu: approximate={approximate!r} is not one of {', '.join(GELU_KINDS)}"
    )
    return numeric("gelu", floats=True)(x)  # type: ignore[no-any-return]


@op(_gelu_type, P)
def gelu(x: Array, *, approximate: str = "none") -> Array:
    """x * Phi(x): "none" by erf, "tanh", "fast" x*sigmoid(1.702x), "fast_tanh" 0.5x(1+tanh(1.702x))."""
    if approximate == "none":
        return 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    if approximate == "fast":
        return np.where(np.isneginf(x), 0.0, x / (1 + np.exp(-1.702 * x)))
    return 0.5 * x * (1 + np.tanh(1.702 * x))


@op(comparison("eq"), P)
def eq(a: Array, b: Array) -> Array:
    """a == b."""
    return a == b


@op(comparison("ne"), P)
def ne(a: Array, b: Array) -> Array:
    """a != b."""
    return a != b


@op(comparison("lt"), P)
def lt(a: Array, b: Array) -> Array:
    """a < b."""
    return a < b


@op(comparison("le"), P)
def le(a: Array, b: Array) -> Array:
    """a <= b."""
    return a <= b


@op(comparison("gt"), P)
def gt(a: Array, b: Array) -> Array:
    """a > b."""
    return a > b


@op(comparison("ge"), P)
def ge(a: Array, b: Array) -> Array:
    """a >= b."""
    return a >= b


@op(logical("logical_and"), P)
def logical_and(a: Array, b: Array) -> Array:
    """a and b, of bools."""
    return np.logical_and(a, b)


@op(logical("logical_or"), P)
def logical_or(a: Array, b: Array) -> Array:
    """a or b, of bools."""
    return np.logical_or(a, b)


@op(logical("logical_not"), P)
def logical_not(x: Array) -> Array:
    """not x, of bools."""
    return np.logical_not(x)


def _where_type(cond: TensorType, a: TensorType, b: TensorType) -> TensorType:
    require(cond.dtype == bool_, f"where: the condition must be bool, got {cond}")
    return TensorType(promote(a.dtype, b.dtype), broadcast([cond.shape, a.shape, b.shape], "where"))


@op(_where_type, P)
def where(cond: Array, a: Array, b: Array) -> Array:
    """a where cond holds, else b."""
    return np.where(cond, a, b)


def _cast_type(x: TensorType, *, dtype: DType) -> TensorType:
    return x.with_dtype(dtype)


@op(_cast_type, P)
def cast(x: Array, *, dtype: DType) -> Array:
    """x in another element type (floats to integers truncate)."""
    with np.errstate(all="ignore"):
        return x.astype(dtype.numpy)
