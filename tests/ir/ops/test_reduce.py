"""Reductions, softmax and running sums against plain loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from monoplan.ir.types import FLOATS, DType, tensor_type
from tests.ir.support import infer, refuses, run
from tests.tolerances import check

REDUCE: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "mean": lambda v: math.fsum(v) / len(v),
    "max": max,
    "min": min,
    "prod": math.prod,
}
AXES: list[Any] = [None, (0,), (-1,), (0, 2), (1, -3), ()]


def by_hand(x: np.ndarray, axes: Any, keepdims: bool, fn: Callable[[list[float]], float]) -> np.ndarray:
    """Collects the elements of each cell in a list and applies a Python function."""
    over = set(range(x.ndim)) if axes is None else {a % x.ndim for a in axes}
    cells: dict[tuple[int, ...], list[float]] = {}
    for place in np.ndindex(x.shape):
        kept = tuple((0 if i in over else p) for i, p in enumerate(place) if keepdims or i not in over)
        cells.setdefault(kept, []).append(float(x[place]))
    shape = [(1 if i in over else n) for i, n in enumerate(x.shape) if keepdims or i not in over]
    out = np.empty(shape)
    for place, found in cells.items():
        out[place] = fn(found)
    return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", REDUCE)
def test_reductions(name: str, dtype: DType, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 5, 3)).astype(dtype.numpy)
    for axes, keepdims in itertools.product(AXES, (False, True)):
        got = run(name, x, axes=axes, keepdims=keepdims)
        check(got, by_hand(x, axes, keepdims, REDUCE[name]), dtype, "reduce")


def test_integers_and_bools_are_summed_in_64_bits() -> None:
    assert run("sum", np.full(300, 127, np.int8)) == 300 * 127
    assert run("sum", np.full(3, 2**32 - 1, np.uint32)).dtype == np.uint64
    flags = np.array([[True, False], [True, True]])
    assert run("sum", flags, axes=(0,)).tolist() == [2, 1] and run("sum", flags).dtype == np.int64
    assert run("max", np.array([3, -7], np.int16)) == 3 and run("min", np.array([3, 7], np.uint8)) == 3


def test_nan_wins() -> None:
    x = np.array([1.0, math.nan, 3.0], np.float32)
    assert math.isnan(run("max", x)) and math.isnan(run("min", x)) and math.isnan(run("sum", x))


def test_argmax() -> None:
    x = np.array([[1.0, 5.0, 5.0], [9.0, 2.0, 9.0]], np.float32)
    assert run("argmax", x, axis=1).tolist() == [1, 0], "ties go to the lowest index"
    assert run("argmax", x, axis=-2, keepdims=True).tolist() == [[1, 0, 1]]
    assert run("argmax", x) == 3 and run("argmax", x).dtype == np.int64
    assert run("argmax", np.array([-math.inf, -math.inf], np.float32)) == 0
    assert run("argmax", np.array([2, 9, 9], np.uint8)) == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(dtype: DType, axis: int, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((3, 4, 5)) * 3).astype(dtype.numpy)
    wanted = np.empty(x.shape)
    moved, out = np.moveaxis(x, axis, -1), np.moveaxis(wanted, axis, -1)
    for row in np.ndindex(moved.shape[:-1]):
        terms = [math.exp(float(v)) for v in moved[row]]
        out[row] = [t / math.fsum(terms) for t in terms]
    check(run("softmax", x, axis=axis), wanted, dtype, "reduce")


def test_softmax_of_large_and_infinite_scores() -> None:
    assert run("softmax", np.array([1000.0, 1000.0], np.float32)).tolist() == [0.5, 0.5]
    assert run("softmax", np.array([-math.inf, 0.0], np.float32)).tolist() == [0, 1]
    assert np.isnan(run("softmax", np.array([-math.inf, -math.inf], np.float32))).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (2, 5), (1, 6), (3, 2)])
def test_causal_softmax(dtype: DType, rows: int, columns: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, rows, columns)).astype(dtype.numpy)
    wanted = np.zeros(x.shape)
    for b, i in np.ndindex(2, rows):
        last = i + columns - rows  # the last query sees the last key
        terms = [math.exp(float(x[b, i, j])) for j in range(last + 1)]
        wanted[b, i, : len(terms)] = [t / math.fsum(terms) for t in terms]
    got = run("causal_softmax", x)
    check(got, wanted, dtype, "reduce")
    assert (got[wanted == 0] == 0).all(), "hidden keys get exactly nothing"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cumsum(dtype: DType, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 6)).astype(dtype.numpy)
    for axis in (0, -1):
        moved = np.moveaxis(x.astype(np.float64), axis, -1)
        sums = np.array([list(itertools.accumulate(map(float, row))) for row in moved])
        check(run("cumsum", x, axis=axis), np.moveaxis(sums, -1, axis), dtype, "reduce", scale=6)
    assert run("cumsum", np.array([100, 100, 100], np.int8)).tolist() == [100, -56, 44]


def test_types_and_refusals() -> None:
    x = tensor_type("f32", "n", 4)
    assert infer("sum", x, axes=(1,)) == tensor_type("f32", "n")
    assert infer("mean", x, keepdims=True) == tensor_type("f32", 1, 1)
    assert infer("argmax", x, axis=0) == tensor_type("i64", 4)
    refuses("axis 2 is out of range for rank 2", "sum", x, axes=(2,))
    refuses("an axis is named twice", "max", x, axes=(1, -1))
    refuses("mean needs floating point", "mean", tensor_type("i32", 3))
    refuses("max needs numbers", "max", tensor_type("bool", 3))
    refuses("softmax needs floating point", "softmax", tensor_type("i32", 3))
    refuses("axis 1 is out of range", "softmax", tensor_type("f32", 3), axis=1)
    refuses(r"causal_softmax needs floating point scores \[..., query, key\]", "causal_softmax", tensor_type("f32", 3))
    refuses("cumsum needs numbers", "cumsum", tensor_type("bool", 3))


def test_any_and_all() -> None:
    x = np.array([[0.0, math.nan], [0.0, 0.0]], np.float32)
    assert run("any", x, axes=(1,)).tolist() == [True, False] and run("all", x, axes=(0,)).tolist() == [False, False]
    assert run("any", np.zeros((0,), np.int8)) == np.False_ and run("all", np.zeros((0,), np.int8)) == np.True_
    assert run("all", np.array([1, 2, 3], np.uint8), keepdims=True).tolist() == [True]


def test_argmin_takes_the_first() -> None:
    assert run("argmin", np.array([[2, 1, 1], [0, 5, 0]]), axis=1).tolist() == [1, 0]
    assert run("argmin", np.array([1.0, math.nan, math.nan])) == 1
    refuses("needs numbers", "argmin", tensor_type("bool", 3))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_running(dtype: DType) -> None:
    x = np.array([[2.0, -1.0, 3.0, 0.5], [1.0, 4.0, 4.0, -2.0]], dtype.numpy)
    for name, join in (("cumprod", lambda a, b: a * b), ("cummax", max), ("cummin", min)):
        wanted = [list(itertools.accumulate(map(float, row), join)) for row in x]
        assert run(name, x).tolist() == wanted and run(name, x.T, axis=0).T.tolist() == wanted
    assert math.isnan(run("cummax", np.array([1.0, math.nan, 2.0]))[2])
