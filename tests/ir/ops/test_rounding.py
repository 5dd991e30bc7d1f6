"""Rounding, integer division, bits and tests of floats against Python's own."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from monoplan.ir.types import FLOATS, INTEGERS, DType, tensor_type
from tests.ir.support import infer, refuses, run

VALUES = [-2.5, -1.5, -1.25, -0.5, 0.0, 0.25, 0.5, 1.5, 2.5, 7.0]
ROUND = {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ROUND)
def test_rounding(name: str, dtype: DType) -> None:
    x = np.array(VALUES, dtype.numpy)
    assert run(name, x).tolist() == [ROUND[name](v) for v in VALUES]
    assert np.isnan(run(name, np.array(math.nan, dtype.numpy))) and run(name, np.array([7], np.int8)).tolist() == [7]


def test_sign_and_special_numbers() -> None:
    x = np.array([-3.0, -0.0, 2.0, math.inf, -math.inf, math.nan], np.float32)
    assert run("sign", x).tolist() == [-1, 0, 1, 1, -1, 0]
    assert run("sign", np.array([-5, 0, 9], np.int16)).tolist() == [-1, 0, 1]
    assert run("isnan", x).tolist() == [False] * 5 + [True] and run("isinf", x).tolist() == [False] * 3 + [True] * 2 + [
        False
    ]
    assert run("isfinite", x).tolist() == [True] * 3 + [False] * 3
    for name, wanted in (("isnan", False), ("isinf", False), ("isfinite", True)):
        assert run(name, np.array([1], np.int32)).tolist() == run(name, np.array([True])).tolist() == [wanted]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_division(dtype: DType) -> None:
    signed = dtype.kind != "u"
    pairs = [(a, b) for a in (0, 1, 6, 7, *((-7, -6) if signed else ())) for b in (1, 3, 7, *((-3,) if signed else ()))]
    a, b = np.array(pairs, dtype.numpy).T
    assert run("floor_divide", a, b).tolist() == [x // y for x, y in pairs]
    assert run("remainder", a, b).tolist() == [x % y for x, y in pairs]
    assert run("fmod", a, b).tolist() == [math.fmod(x, y) for x, y in pairs]


def test_division_of_fractions_is_exact() -> None:
    a, b = np.float32(1.0), np.float32(0.1)  # 1 / 0.1 rounds to 10, but the tenth 0.1 does not fit
    assert run("floor_divide", a, b) == Fraction(1) // Fraction(float(b)) == 9
    assert run("floor_divide", np.array([1.0, -1.0, 0.0]), np.array([0.0, 0.0, 0.0])).tolist()[:2] == [
        math.inf,
        -math.inf,
    ]
    assert run("floor_divide", np.array([5, -128], np.int8), np.array([0, -1], np.int8)).tolist() == [0, -128]
    assert run("remainder", np.array([5], np.int8), np.array([0], np.int8)).tolist() == [0]


def test_bits() -> None:
    a, b = np.array([12, -1, 5], np.int8), np.array([10, 7, 2], np.int8)
    assert run("bitwise_and", a, b).tolist() == [8, 7, 0] and run("bitwise_or", a, b).tolist() == [14, -1, 7]
    assert run("bitwise_xor", a, b).tolist() == [6, -8, 7] and run("bitwise_not", a).tolist() == [-13, 0, -6]
    flags = np.array([True, False])
    assert run("bitwise_not", flags).tolist() == [False, True] and run("bitwise_xor", flags, True).tolist() == [
        False,
        True,
    ]
    assert run("left_shift", a, np.array([1, 7, 8], np.int8)).tolist() == [24, -128, 0]
    assert run("right_shift", a, np.array([2, 9, -1], np.int8)).tolist() == [3, -1, 0]
    refuses("needs integers or bools", "bitwise_and", tensor_type("f32", 2), tensor_type("i8", 2))
    refuses("needs integers", "left_shift", tensor_type("bool", 2), tensor_type("bool", 2))


def test_powers_of_integers() -> None:
    a, b = np.array([3, 2, -1, -1, 5, 0], np.int8), np.array([4, 9, -3, -2, -1, 0], np.int8)
    assert run("integer_pow", a, b).tolist() == [81, 0, -1, 1, 0, 1]
    assert infer("integer_pow", tensor_type("i32", 2), tensor_type("i64", 2)) == tensor_type("i64", 2)
    refuses("needs integers", "integer_pow", tensor_type("f32", 2), tensor_type("i64", 2))
