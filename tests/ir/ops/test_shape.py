"""Ops that move or make data: every element is looked up where it should come from."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.ir.dims import symbol
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import DTYPES, DType, bf16, f16, f32, i32, i64, tensor_type
from tests.ir.support import infer, refuses, run

N = symbol("n")


def counted(*shape: int, dtype: DType = f32) -> np.ndarray:
    """0, 1, 2, … in a shape."""
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype.numpy)


def test_reshape() -> None:
    x = counted(2, 3, 4)
    y = run("reshape", x, shape=(4, 6))
    assert all(y[i, j] == 6 * i + j for i, j in np.ndindex(4, 6))
    # A transposed view has no row-major storage; its elements still come in row-major order.
    assert run("reshape", counted(2, 3).T, shape=(6,)).tolist() == [0, 3, 1, 4, 2, 5]
    assert infer("reshape", tensor_type("f32", "n", 6), shape=(2 * N, 3)) == tensor_type("f32", "2*n", 3)
    refuses(r"has 6\*n elements, f32\[n, 5\] has 5\*n", "reshape", tensor_type("f32", "n", 6), shape=(N, 5))


def test_transpose() -> None:
    x = counted(2, 3, 4)
    y = run("transpose", x, axes=(2, 0, 1))
    assert y.shape == (4, 2, 3) and all(y[k, i, j] == x[i, j, k] for i, j, k in np.ndindex(2, 3, 4))
    assert infer("transpose", tensor_type("f32", "n", 2), axes=(1, 0)) == tensor_type("f32", 2, "n")
    refuses("not a permutation", "transpose", tensor_type("f32", 2, 3), axes=(0, 0))


@pytest.mark.parametrize(
    ("start", "length", "step"), [(0, 5, 1), (1, 3, 1), (1, 2, 2), (4, 1, 3), (5, 0, 1), (2, 0, 1)]
)
def test_slice(start: int, length: int, step: int) -> None:
    x = counted(3, 5)
    y = run("slice", x, axis=-1, start=start, length=length, step=step)
    assert y.shape == (3, length)
    assert all(y[i, j] == x[i, start + j * step] for i, j in np.ndindex(3, length))


def test_slice_refusals() -> None:
    x = tensor_type("f32", "n", 5)
    refuses("go past 5", "slice", x, axis=1, start=3, length=3)
    refuses("go past 5", "slice", x, axis=1, start=0, length=3, step=3)
    refuses("go past n", "slice", x, axis=0, start=1, length=N)
    refuses("start -1 is negative", "slice", x, axis=1, start=-1, length=1)
    refuses("length -1 is negative", "slice", x, axis=1, start=0, length=-1)
    refuses("the step must not be 0", "slice", x, axis=1, start=0, length=1, step=0)
    refuses("go past 5", "slice", x, axis=1, start=5, length=2, step=-1)
    refuses("go past 5", "slice", x, axis=1, start=1, length=2, step=-2)
    assert run("slice", np.arange(5), axis=0, start=4, length=3, step=-2).tolist() == [4, 2, 0]
    assert run("slice", np.arange(5), axis=0, start=0, length=0, step=-1).tolist() == []
    for start in (-1, 7):  # nothing is read there
        assert infer("slice", x, axis=1, start=start, length=0, step=-1).shape[1] == 0
        assert run("slice", np.arange(5), axis=0, start=start, length=0, step=-1).tolist() == []
    refuses("axis 2 is out of range", "slice", x, axis=2, start=0, length=1)
    assert infer("slice", x, axis=0, start=N - 1, length=1) == tensor_type("f32", 1, 5)
    with pytest.raises(ArgumentError, match="2 elements from 3 go past 4"):
        # What the rule can't decide (symbolic sizes), the reference does.
        from monoplan.ir.opdef import REGISTRY

        REGISTRY["slice"].reference(np.zeros(4), axis=0, start=3, length=2)


def test_expand() -> None:
    x = counted(3, 1)
    y = run("expand", x, shape=(2, 3, 4))
    assert all(y[a, b, c] == b for a, b, c in np.ndindex(2, 3, 4))
    assert infer("expand", tensor_type("f32", 1), shape=(N, 4)) == tensor_type("f32", "n", 4)
    refuses("expand", "expand", tensor_type("f32", 3), shape=(4,))
    refuses("does not broadcast to", "expand", tensor_type("f32", 3), shape=(1,))
    refuses("does not broadcast to", "expand", tensor_type("f32", 2, 3), shape=(3,))


def test_concat_and_split() -> None:
    a, b, c = counted(2, 1), counted(2, 3) + 10, counted(2, 2, dtype=f16) + np.float16(50)
    y = run("concat", a, b, c, axis=-1)
    assert y.dtype == np.float32 and y.tolist() == [[0, 10, 11, 12, 50, 51], [1, 13, 14, 15, 52, 53]]
    parts = run("split", y, sizes=(1, 3, 2), axis=1)
    for part, whole in zip(parts, (a, b, c), strict=True):
        assert part.tolist() == whole.tolist()
    assert run("concat", a).tolist() == a.tolist()
    refuses("at least one", "concat")
    refuses("differ in another dimension", "concat", tensor_type("f32", 2, 3), tensor_type("f32", 3, 3), axis=1)
    refuses("differ in another dimension", "concat", tensor_type("f32", 2, 3), tensor_type("f32", 2), axis=0)
    assert infer("concat", tensor_type("f32", "n"), tensor_type("f32", 2)) == tensor_type("f32", "n+2")
    refuses("do not add up to 5", "split", tensor_type("f32", 5), sizes=(2, 2))
    refuses("is negative", "split", tensor_type("f32", 5), sizes=(6, -1))
    assert infer("split", tensor_type("f32", "n"), sizes=(N - 1, 1))[0] == tensor_type("f32", "n-1")


def test_repeat() -> None:
    x = counted(2, 3)
    y = run("repeat", x, repeats=2, axis=1)
    assert all(y[i, j] == x[i, j // 2] for i, j in np.ndindex(2, 6))
    assert run("repeat", x, repeats=3, axis=-2).tolist() == [x[0].tolist()] * 3 + [x[1].tolist()] * 3
    refuses("repeats must be 1 or more", "repeat", tensor_type("f32", 2), repeats=0, axis=0)


@pytest.mark.parametrize("dtype", [i64, i32, f32, bf16], ids=str)
def test_arange(dtype: DType) -> None:
    assert run("arange", length=4, start=3, dtype=dtype).tolist() == [3, 4, 5, 6]
    assert run("arange", length=0, dtype=dtype).shape == (0,)
    assert infer("arange", length=2 * N, start=N) == tensor_type("i64", "2*n")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_full(dtype: DType) -> None:
    y = run("full", shape=(2, 3), value=1, dtype=dtype)
    assert y.shape == (2, 3) and all(v == 1 for v in y.flat)
    assert run("full", value=True, dtype=dtype).shape == ()
    assert run("full", value=-np.inf).item() == -np.inf


def test_pad() -> None:
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert run("pad", x, before=(1, 0), after=(0, 2), value=7).tolist() == [[7] * 5, [0, 1, 2, 7, 7], [3, 4, 5, 7, 7]]
    assert infer("pad", tensor_type("f32", "n"), before=(N,), after=(1,)) == tensor_type("f32", 2 * N + 1)
    refuses("needs 1 sizes before and after", "pad", tensor_type("f32", 3), before=(1, 1), after=(0, 0))
    refuses("the size -1 is negative", "pad", tensor_type("f32", 3), before=(-1,), after=(0,))
    refuses("nan is no i32", "pad", tensor_type("i32", 3), before=(1,), after=(0,), value=float("nan"))
