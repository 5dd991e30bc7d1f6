"""Pointwise ops on whole numbers and bits: rounding, integer division, shifts; and tests for NaN and infinities."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.opdef import require
from monoplan.ir.rules import broadcast, comparison, pointwise
from monoplan.ir.types import Array, TensorType, promote


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
