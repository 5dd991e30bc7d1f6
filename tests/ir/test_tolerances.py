"""The check itself: what it lets pass, and how it fails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from monoplan.ir.types import FLOATS, DType
from tests.tolerances import EPSILON, UNITS, check, check_no_worse, tolerance

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["pointwise", "reduce", "matmul", "model"])
def test_one_rounding_passes_and_many_fail(dtype: DType, kind: str) -> None:
    exact = np.array([1.0, -3.0, 0.0, 1000.0])
    check(exact.astype(dtype.numpy), exact, dtype, kind)
    check((exact * (1 + EPSILON[dtype.name])).astype(dtype.numpy), exact, dtype, kind)
    relative, absolute = tolerance(dtype, kind)
    if relative < 0.1:
        with pytest.raises(AssertionError):
            check((exact * (1 + 3 * (relative + absolute))).astype(dtype.numpy), exact, dtype, kind)


def test_kinds_are_ordered() -> None:
    assert UNITS["pointwise"] < UNITS["reduce"] < UNITS["matmul"] < UNITS["model"]


def test_failures_are_readable() -> None:
    got = np.array([[1.0, 2.0], [3.0, 4.5]], np.float32)
    with pytest.raises(AssertionError) as caught:
        check(got, np.array([[1.0, 2.0], [3.0, 4.0]]), "f32", "pointwise")
    text = str(caught.value)
    assert "pointwise f32: 1 of 4 elements differ too much" in text and "worst at [1, 1]" in text
    assert "max abs error 0.5, max rel error 0.125" in text and "4.5" in text


@pytest.mark.parametrize(
    ("got", "want", "passes"),
    [(NAN, NAN, True), (INF, INF, True), (INF, -INF, False), (NAN, 1.0, False), (1.0, NAN, False), (INF, 1.0, False)],
)
def test_special_values(got: float, want: float, passes: bool) -> None:
    arrays = np.array([got], np.float32), np.array([want])
    if passes:
        check(*arrays, "f32", "model")
    else:
        with pytest.raises(AssertionError):
            check(*arrays, "f32", "model")


def test_overflow_of_a_narrow_type() -> None:
    check(np.array([INF], np.float16), np.array([70000.0]), "f16", "pointwise")
    for got, want in ((INF, 60000.0), (-INF, 70000.0)):
        with pytest.raises(AssertionError):
            check(np.array([got], np.float16), np.array([want]), "f16", "pointwise")


def test_scale_is_the_size_of_the_terms() -> None:
    got, want = np.array([1e-5], np.float32), np.array([0.0])
    check(got, want, "f32", "reduce", scale=100.0)
    with pytest.raises(AssertionError):
        check(got, want, "f32", "reduce")


def test_integers_types_and_shapes_are_exact() -> None:
    check(np.array([1, 2]), np.array([1, 2]), "i64", "model")
    for got, dtype in ((np.array([1, 3]), "i64"), (np.array([1, 2], np.int32), "i64"), (np.array([[1, 2]]), "i64")):
        with pytest.raises(AssertionError):
            check(got, np.array([1, 2]), dtype, "model")
    check(np.zeros((0, 3), np.float32), np.zeros((0, 3)), "f32", "pointwise")


def test_no_worse_than_the_plain_reference() -> None:
    exact, plain = np.array([1.0]), np.array([1.001], np.float32)
    check_no_worse(np.array([1.003], np.float32), plain, exact, "f32", "pointwise")
    with pytest.raises(AssertionError):
        check_no_worse(np.array([1.005], np.float32), plain, exact, "f32", "pointwise")
    check_no_worse(np.array([1 + 1e-7], np.float32), exact.astype(np.float32), exact, "f32", "pointwise")
