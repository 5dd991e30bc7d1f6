"""Lookups and sorting, with indices of every integer type, and errors that name the bad index."""

from __future__ import annotations

import math

import numpy as np
import pytest

from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import INTEGERS, DType, tensor_type
from tests.ir.support import infer, refuses, run

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_embedding(dtype: DType) -> None:
    ids = np.array([[3, 0], [1, 1]], dtype.numpy)
    got = run("embedding", ids, TABLE)
    assert all(got[b, s, f] == 3 * int(ids[b, s]) + f for b, s, f in np.ndindex(2, 2, 3))


@pytest.mark.parametrize(
    ("name", "operands", "attrs", "message"),
    [
        ("embedding", (np.array([[0, 4]]), TABLE), {}, r"embedding: index 4 at position \[0, 1\] .* \[0, 4\)"),
        ("embedding", (np.array([-1]), TABLE), {}, r"index -1 at position \[0\]"),
        ("gather", (TABLE, np.array([0, 3])), {"axis": 1}, r"gather: index 3 at position \[1\] .* \[0, 3\)"),
        ("take_along", (TABLE, np.array([[0], [3], [0], [0]])), {}, r"take_along: index 3 at position \[1, 0\]"),
        ("select_rows", (TABLE[None], np.array([7])), {}, r"select_rows: index 7 at position \[0\]"),
    ],
)
def test_out_of_range(name: str, operands: tuple[np.ndarray, ...], attrs: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(name, *operands, **attrs)


def test_gather() -> None:
    x = np.arange(24).reshape(2, 3, 4)
    index = np.array([[2, 0], [1, 1]], np.int32)
    for axis in (1, -2):
        got = run("gather", x, index, axis=axis)
        assert got.shape == (2, 2, 2, 4)
        assert all(got[a, p, q, d] == x[a, index[p, q], d] for a, p, q, d in np.ndindex(got.shape))
    assert run("gather", x, np.array(1), axis=0).tolist() == x[1].tolist()


def test_take_along() -> None:
    x = np.array([[5.0, 6.0, 7.0], [8.0, 9.0, 4.0]], np.float32)
    index = np.array([[2, 0], [1, 1]], np.uint8)
    assert run("take_along", x, index).tolist() == [[7, 5], [9, 9]]
    assert run("take_along", x, np.array([[1, 0, 1]]), axis=0).tolist() == [[8, 6, 4]]
    refuses("must have the shape", "take_along", tensor_type("f32", 2, 3), tensor_type("i64", 3, 1))


def test_select_rows() -> None:
    x = np.arange(12).reshape(2, 3, 2)
    assert run("select_rows", x, np.array([2, 0], np.int32)).tolist() == [[[4, 5]], [[6, 7]]]
    assert infer("select_rows", tensor_type("f32", "b", "s", 8), tensor_type("i32", "b")) == tensor_type(
        "f32", "b", 1, 8
    )
    refuses("differ in batch", "select_rows", tensor_type("f32", "b", 4), tensor_type("i32", "c"))
    refuses(r"rows must be integers \[batch\]", "select_rows", tensor_type("f32", 2, 4), tensor_type("f32", 2))


def test_sort_is_stable_both_ways() -> None:
    x = np.array([3.0, 1.0, 3.0, -2.0, 1.0], np.float32)
    values, places = run("sort", x)
    assert values.tolist() == [-2, 1, 1, 3, 3] and places.tolist() == [3, 1, 4, 0, 2]
    values, places = run("sort", x, descending=True)
    assert values.tolist() == [3, 3, 1, 1, -2] and places.tolist() == [0, 2, 1, 4, 3]
    down = run("sort", np.stack([x, -x]), axis=0)[1]
    assert down.tolist() == [[1, 1, 1, 0, 1], [0, 0, 0, 1, 0]]


def test_sort_with_infinities() -> None:
    x = np.array([math.inf, 0.0, -math.inf], np.float32)
    assert run("sort", x)[1].tolist() == [2, 1, 0] and run("sort", x, descending=True)[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_topk(k: int, rng: np.random.Generator) -> None:
    x = rng.integers(0, 4, (3, 4)).astype(np.float32)
    values, places = run("topk", x, k=k)
    for row, v, p in zip(x, values, places, strict=True):
        order = sorted(range(4), key=lambda i: (-row[i], i))[:k]
        assert p.tolist() == order and v.tolist() == [row[i] for i in order]
    assert run("topk", x.T, k=k, axis=0)[1].T.tolist() == places.tolist()


def test_refusals() -> None:
    refuses("k=5 does not fit", "topk", tensor_type("f32", 4), k=5)
    refuses("k=0 does not fit", "topk", tensor_type("f32", 4), k=0)
    refuses("k=1 does not fit", "topk", tensor_type("f32", "n"), k=1)
    refuses("ids must be integers", "embedding", tensor_type("f32", 4), tensor_type("f32", 4, 2))
    refuses(r"the weight must be \[vocabulary, features\]", "embedding", tensor_type("i64", 4), tensor_type("f32", 4))
    refuses("the index must be integers", "gather", tensor_type("f32", 4), tensor_type("f32", 2))
    refuses("axis 1 is out of range", "sort", tensor_type("f32", 4), axis=1)


def test_scatter_takes_elements_in_order() -> None:
    x = np.zeros((2, 4), np.float32)
    index, source = np.array([[1, 1, 3]]), np.array([[1.0, 2.0, 3.0]], np.float32)
    assert run("scatter", x, index, source, axis=1).tolist() == [[0, 2, 0, 3], [0] * 4]
    for reduce, wanted in (("add", [1, 4, 1, 4]), ("mul", [1, 2, 1, 3]), ("max", [1, 2, 1, 3]), ("min", [1, 1, 1, 1])):
        assert run("scatter", x + 1, index, source, axis=-1, reduce=reduce).tolist() == [wanted, [1] * 4]
    # 1e8 first: what is added afterwards is lost, and the order is the same in every run.
    many = np.array([1e8, *[1.0] * 7], np.float32)
    assert run("scatter", x[0], np.zeros(8, np.int64), many, reduce="add")[0] == 1e8
    with pytest.raises(ArgumentError, match=r"scatter: index 4 at position \[0, 1\] is out of range \[0, 4\)"):
        run("scatter", x, np.array([[0, 4, 1]]), source, axis=1)


def test_scatter_refusals() -> None:
    x, index = tensor_type("f32", 3, "n"), tensor_type("i64", 2, "n")
    assert infer("scatter", x, index, tensor_type("f32", 2, "n")) == x
    refuses(
        "is larger than .* in dimension 0", "scatter", x, tensor_type("i64", 4, 1), tensor_type("f32", 4, 1), axis=1
    )
    refuses("must have the element type", "scatter", x, index, tensor_type("f16", 2, "n"))
    refuses("must have one shape", "scatter", x, index, tensor_type("f32", 3, "n"))
    refuses("reduce='mean' is not one of", "scatter", x, index, tensor_type("f32", 2, "n"), reduce="mean")
    refuses("needs numbers", "scatter", *(tensor_type(t, 2) for t in ("bool", "i64", "bool")), reduce="add")


def test_smallest() -> None:
    values, places = run("topk", np.array([3.0, math.nan, 1.0, 1.0], np.float32), k=3, largest=False)
    assert values.tolist() == [1, 1, 3] and places.tolist() == [2, 3, 0]
