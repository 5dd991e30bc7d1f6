"""Pointwise ops: numpy broadcasting, promoted element types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from monoplan.ir.opdef import op, require
from monoplan.ir.rules import broadcast, comparison, logical, numeric, pointwise
from monoplan.ir.types import Array, DType, TensorType, bool_, f32, promote


@pointwise("({0} + {1})", commutative=True)
def add(a: Array, b: Array) -> Array:
    """a + b."""
    return a + b


@pointwise("({0} - {1})")
def sub(a: Array, b: Array) -> Array:
    """a - b."""
    return a - b


@pointwise("({0} * {1})", commutative=True)
def mul(a: Array, b: Array) -> Array:
    """a * b."""
    return a * b


@pointwise("({0} / {1})", floats=True)
def div(a: Array, b: Array) -> Array:
    """a / b, of floats."""
    return a / b


@pointwise("mp_pow{f}({0}, {1})", floats=True)
def pow_(a: Array, b: Array) -> Array:
    """a to the power b, of floats."""
    return np.power(a, b)


@pointwise("mp_maximum_{t}({0}, {1})", commutative=True)
def maximum(a: Array, b: Array) -> Array:
    """The larger of a and b; NaN if either is."""
    return np.maximum(a, b)


@pointwise("mp_minimum_{t}({0}, {1})", commutative=True)
def minimum(a: Array, b: Array) -> Array:
    """The smaller of a and b; NaN if either is."""
    return np.minimum(a, b)


@pointwise("(-{0})")
def neg(x: Array) -> Array:
    """-x."""
    return -x


@pointwise({"unsigned": "{0}", "integer": "mp_abs_{t}({0})", "float": "fabs{f}({0})"})
def abs_(x: Array) -> Array:
    """|x|."""
    return np.abs(x)


@pointwise("mp_exp{f}({0})", floats=True)
def exp(x: Array) -> Array:
    """e to the x."""
    return np.exp(x)


@pointwise("mp_exp2{f}({0})", floats=True)
def exp2(x: Array) -> Array:
    """2 to the x."""
    return np.exp2(x)


@pointwise("mp_expm1{f}({0})", floats=True)
def expm1(x: Array) -> Array:
    """exp(x) - 1, exact near 0."""
    return np.expm1(x)


@pointwise("mp_log{f}({0})", floats=True)
def log(x: Array) -> Array:
    """The natural logarithm."""
    return np.log(x)


@pointwise("mp_log2{f}({0})", floats=True)
def log2(x: Array) -> Array:
    """The logarithm to base 2."""
    return np.log2(x)


@pointwise("mp_log10{f}({0})", floats=True)
def log10(x: Array) -> Array:
    """The logarithm to base 10."""
    return np.log10(x)


@pointwise("mp_log1p{f}({0})", floats=True)
def log1p(x: Array) -> Array:
    """log(1 + x), exact near 0."""
    return np.log1p(x)


@pointwise("sqrt{f}({0})", floats=True)
def sqrt(x: Array) -> Array:
    """The square root."""
    return np.sqrt(x)


@pointwise("mp_rsqrt{f}({0})", floats=True)
def rsqrt(x: Array) -> Array:
    """1 / sqrt(x)."""
    return 1 / np.sqrt(x)


@pointwise("mp_sin{f}({0})", floats=True)
def sin(x: Array) -> Array:
    """The sine of x in radians."""
    return np.sin(x)


@pointwise("mp_cos{f}({0})", floats=True)
def cos(x: Array) -> Array:
    """The cosine of x in radians."""
    return np.cos(x)


@pointwise("mp_tan{f}({0})", floats=True)
def tan(x: Array) -> Array:
    """The tangent of x in radians."""
    return np.tan(x)


@pointwise("mp_asin{f}({0})", floats=True)
def asin(x: Array) -> Array:
    """The angle in radians whose sine is x."""
    return np.arcsin(x)


@pointwise("mp_acos{f}({0})", floats=True)
def acos(x: Array) -> Array:
    """The angle in radians whose cosine is x."""
    return np.arccos(x)


@pointwise("mp_atan{f}({0})", floats=True)
def atan(x: Array) -> Array:
    """The angle in radians whose tangent is x."""
    return np.arctan(x)


@pointwise("mp_atan2{f}({0}, {1})", floats=True)
def atan2(a: Array, b: Array) -> Array:
    """The angle in radians of the point (b, a)."""
    return np.arctan2(a, b)


@pointwise("mp_sinh{f}({0})", floats=True)
def sinh(x: Array) -> Array:
    """The hyperbolic sine."""
    return np.sinh(x)


@pointwise("mp_cosh{f}({0})", floats=True)
def cosh(x: Array) -> Array:
    """The hyperbolic cosine."""
    return np.cosh(x)


@pointwise("mp_asinh{f}({0})", floats=True)
def asinh(x: Array) -> Array:
    """The number whose hyperbolic sine is x."""
    return np.arcsinh(x)


@pointwise("mp_acosh{f}({0})", floats=True)
def acosh(x: Array) -> Array:
    """The number of at least 0 whose hyperbolic cosine is x."""
    return np.arccosh(x)


@pointwise("mp_atanh{f}({0})", floats=True)
def atanh(x: Array) -> Array:
    """The number whose hyperbolic tangent is x."""
    return np.arctanh(x)


@pointwise("mp_cbrt{f}({0})", floats=True)
def cbrt(x: Array) -> Array:
    """The cube root."""
    return np.cbrt(x)


@pointwise("mp_tanh{f}({0})", floats=True)
def tanh(x: Array) -> Array:
    """The hyperbolic tangent."""
    return np.tanh(x)


@pointwise("mp_sigmoid{f}({0})", floats=True)
def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@pointwise("mp_erf{f}({0})", floats=True)
def erf(x: Array) -> Array:
    """The error function."""
    return _erf(x)


@pointwise("mp_erfc{f}({0})", floats=True)
def erfc(x: Array) -> Array:
    """1 - erf(x), exact where x is large."""
    return _erfc(x)


@pointwise("mp_maximum_{t}({0}, 0)")
def relu(x: Array) -> Array:
    """max(x, 0); NaN stays NaN."""
    return np.maximum(x, np.zeros((), x.dtype))


@pointwise("mp_silu{f}({0})", floats=True)
def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return np.where(np.isneginf(x), 0.0, x / (1 + np.exp(-x)))


@pointwise("mp_softplus{f}({0}, {beta}, {threshold})", floats=True)
def softplus(x: Array, *, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """log(1 + exp(beta x)) / beta; x where beta x is above the threshold."""
    y = x * beta
    return np.where(y > threshold, x, np.logaddexp(0, y) / beta)


@pointwise("mp_swiglu{f}({0}, {1})", floats=True)
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    return silu.reference(gate) * up


GELU_KINDS = ("none", "tanh", "fast", "fast_tanh")


def _gelu_type(x: TensorType, *, approximate: str) -> TensorType:
    require(approximate in GELU_KINDS, f"gelu: approximate={approximate!r} is not one of {', '.join(GELU_KINDS)}")
    return numeric("gelu", floats=True)(x)  # type: ignore[no-any-return]


@op(_gelu_type, "pointwise", c="mp_gelu_{approximate}{f}({0})", floats=True)
def gelu(x: Array, *, approximate: str = "none") -> Array:
    """x * Phi(x): "none" by erfc, "tanh", "fast" x*sigmoid(1.702x), "fast_tanh" 0.5x(1+tanh(1.702x))."""
    if approximate == "none":
        return np.where(np.isneginf(x), 0.0, 0.5 * x * _erfc(-x / math.sqrt(2)))
    w = {
        "tanh": 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x),  # 0.5 (1 + tanh z) is sigmoid(2 z)
        "fast": 1.702 * x,
        "fast_tanh": 3.404 * x,
    }[approximate]
    return np.where(np.isneginf(x), 0.0, x / (1 + np.exp(-w)))


@pointwise("({0} == {1})", comparison, commutative=True)
def eq(a: Array, b: Array) -> Array:
    """a == b."""
    return a == b


@pointwise("({0} != {1})", comparison, commutative=True)
def ne(a: Array, b: Array) -> Array:
    """a != b."""
    return a != b


@pointwise("({0} < {1})", comparison)
def lt(a: Array, b: Array) -> Array:
    """a < b."""
    return a < b


@pointwise("({0} <= {1})", comparison)
def le(a: Array, b: Array) -> Array:
    """a <= b."""
    return a <= b


@pointwise("({0} > {1})", comparison)
def gt(a: Array, b: Array) -> Array:
    """a > b."""
    return a > b


@pointwise("({0} >= {1})", comparison)
def ge(a: Array, b: Array) -> Array:
    """a >= b."""
    return a >= b


@pointwise("({0} && {1})", logical, commutative=True)
def logical_and(a: Array, b: Array) -> Array:
    """a and b, of bools."""
    return np.logical_and(a, b)


@pointwise("({0} || {1})", logical, commutative=True)
def logical_or(a: Array, b: Array) -> Array:
    """a or b, of bools."""
    return np.logical_or(a, b)


@pointwise("(!{0})", logical)
def logical_not(x: Array) -> Array:
    """not x, of bools."""
    return np.logical_not(x)


def _where_type(cond: TensorType, a: TensorType, b: TensorType) -> TensorType:
    require(cond.dtype == bool_, f"where: the condition must be bool, got {cond}")
    return TensorType(promote(a.dtype, b.dtype), broadcast([cond.shape, a.shape, b.shape], "where"))


@op(_where_type, "pointwise", c="({0} ? {1} : {2})", own_type=("cond",))
def where(cond: Array, a: Array, b: Array) -> Array:
    """a where cond holds, else b."""
    return np.where(cond, a, b)


def _cast_type(x: TensorType, *, dtype: DType) -> TensorType:
    return x.with_dtype(dtype)


def _cast_c(source: DType, attrs: Mapping[str, Any]) -> str:
    target: DType = attrs["dtype"]
    if target.is_float and target.bits == 16:  # computed in f32, but rounded as the cast says
        value = "{0}" if source == f32 else "(float)({0})"
        return f"mp_load_{target}(mp_to_{target}({value}))"
    return "({0} != 0)" if target == bool_ else "({type})({0})"


@op(_cast_type, "pointwise", c=_cast_c)
def cast(x: Array, *, dtype: DType) -> Array:
    """x in another element type (floats to integers truncate)."""
    with np.errstate(all="ignore"):
        return x.astype(dtype.numpy)


# Whole numbers and bits: rounding, integer division, shifts; and tests for NaN and infinities.


def _rounded(x: Array, by: Any) -> Array:
    return by(x) if x.dtype.kind == "f" else x  # older numpy makes floats of integers


@pointwise({"float": "floor{f}({0})", "any": "{0}"})
def floor(x: Array) -> Array:
    """The largest whole number that is not above x."""
    return _rounded(x, np.floor)


@pointwise({"float": "ceil{f}({0})", "any": "{0}"})
def ceil(x: Array) -> Array:
    """The smallest whole number that is not below x."""
    return _rounded(x, np.ceil)


@pointwise({"float": "trunc{f}({0})", "any": "{0}"})
def trunc(x: Array) -> Array:
    """x without its fraction."""
    return _rounded(x, np.trunc)


@pointwise({"float": "rint{f}({0})", "any": "{0}"})
def round_(x: Array) -> Array:
    """The nearest whole number; halves go to the even one."""
    return _rounded(x, np.rint)


@pointwise({"float": "mp_sign_{t}({0})", "unsigned": "({0} > 0)", "integer": "(({0} > 0) - ({0} < 0))"})
def sign(x: Array) -> Array:
    """-1, 0 or 1; 0 of NaN, as in PyTorch."""
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


@pointwise("mp_floor_divide_{t}({0}, {1})")
def floor_divide(a: Array, b: Array) -> Array:
    """a / b rounded down; integers divided by 0 are 0."""
    return np.floor_divide(a, b)


@pointwise("mp_remainder_{t}({0}, {1})")
def remainder(a: Array, b: Array) -> Array:
    """a - floor(a / b) * b, with the sign of b; integers modulo 0 are 0."""
    return np.remainder(a, b)


@pointwise("mp_fmod_{t}({0}, {1})")
def fmod(a: Array, b: Array) -> Array:
    """a - trunc(a / b) * b, with the sign of a; integers modulo 0 are 0."""
    return np.fmod(a, b)


def whole(name: str) -> Any:
    """A pointwise rule over integers; bools beside them count as 0 and 1."""

    def rule(*types: TensorType, **_: Any) -> TensorType:
        dtype = promote(*(t.dtype for t in types))
        require(dtype.is_integer, f"{name} needs integers, got {', '.join(map(str, types))}")
        return TensorType(dtype, broadcast([t.shape for t in types], name))

    return rule


@pointwise("mp_power_{t}({0}, {1})", whole)
def integer_pow(a: Array, b: Array) -> Array:
    """a to the power b, of integers; it wraps around as products do, and is 0 where it would be a fraction."""
    powers = np.power(a, np.maximum(b, 0))
    return np.where(b < 0, np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b & 1), 0)), powers).astype(powers.dtype)


def bits(name: str) -> Any:
    """A pointwise rule over integers or bools."""

    def rule(*types: TensorType, **_: Any) -> TensorType:
        dtype = promote(*(t.dtype for t in types))
        require(not dtype.is_float, f"{name} needs integers or bools, got {', '.join(map(str, types))}")
        return TensorType(dtype, broadcast([t.shape for t in types], name))

    return rule


@pointwise("({0} & {1})", bits, commutative=True)
def bitwise_and(a: Array, b: Array) -> Array:
    """The bits that both have, of integers or bools."""
    return np.bitwise_and(a, b)


@pointwise("({0} | {1})", bits, commutative=True)
def bitwise_or(a: Array, b: Array) -> Array:
    """The bits that one of both has, of integers or bools."""
    return np.bitwise_or(a, b)


@pointwise("({0} ^ {1})", bits, commutative=True)
def bitwise_xor(a: Array, b: Array) -> Array:
    """The bits in which both differ, of integers or bools."""
    return np.bitwise_xor(a, b)


@pointwise({"bool": "(!{0})", "any": "(~{0})"}, bits)
def bitwise_not(x: Array) -> Array:
    """All bits turned over, of integers or bools."""
    return np.invert(x)


@pointwise("mp_left_shift_{t}({0}, {1})", whole)
def left_shift(a: Array, b: Array) -> Array:
    """a * 2**b in the bits of its type; 0 where b is negative or not below their number."""
    return np.left_shift(a, b)


@pointwise("mp_right_shift_{t}({0}, {1})", whole)
def right_shift(a: Array, b: Array) -> Array:
    """a / 2**b rounded down; 0 or -1, by the sign of a, where b is negative or not below the number of bits."""
    return np.right_shift(a, b)


@pointwise({"float": "({0} != {0})", "any": "0"}, comparison)
def isnan(x: Array) -> Array:
    """Whether x is NaN."""
    return np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)


@pointwise({"float": "(fabs{f}({0}) == INFINITY)", "any": "0"}, comparison)
def isinf(x: Array) -> Array:
    """Whether x is infinite."""
    return np.isinf(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)


@pointwise({"float": "(fabs{f}({0}) < INFINITY)", "any": "1"}, comparison)
def isfinite(x: Array) -> Array:
    """Whether x is neither infinite nor NaN."""
    return np.isfinite(x) if x.dtype.kind == "f" else np.ones(x.shape, bool)
