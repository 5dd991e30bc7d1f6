"""Tensor: construction, arithmetic with Python numbers, indexing as numpy does it, numpy's functions."""

from __future__ import annotations

import copy
import operator
from typing import Any

import numpy as np
import pytest

import monoplan.nn.functional as F
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.errors import ArgumentError, TypeRuleError
from monoplan.ir.types import as_dtype, bf16, bool_, f16, f32, f64, i32, i64

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_construction() -> None:
    assert Tensor([1.0, 2.0]).dtype is f32 and Tensor([1, 2]).dtype is i64 and Tensor(True).dtype is bool_
    assert Tensor(np.zeros(2)).dtype is f64, "arrays keep their element type"
    assert Tensor([1.5], "bf16").dtype is bf16 and Tensor(Tensor([1]), dtype="f16").dtype is f16
    assert Tensor(np.float64(1.5)).dtype is f32
    shared = np.zeros(3, np.float32)
    assert Tensor(shared).numpy() is shared and as_tensor(t := Tensor(shared)) is t
    with pytest.raises(TypeRuleError, match="not an element type"):
        Tensor(np.zeros(2, complex))
    with pytest.raises(TypeRuleError):
        Tensor("text")


def test_properties() -> None:
    t = Tensor(X)
    assert t.shape == (2, 3, 4) and t.ndim == t.dim() == 3 and t.numel() == 24 and t.device == "cpu"
    assert t.size() == (2, 3, 4) and t.size(-1) == 4 and len(t) == 2 and not t.is_traced
    assert [r.shape for r in t] == [(3, 4), (3, 4)]
    assert repr(Tensor([1.0, 2.0])) == "Tensor([1., 2.], dtype=f32)"
    with pytest.raises(TypeError, match="without dimensions"):
        len(Tensor(1.0))


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_arithmetic(op: Any) -> None:
    t = Tensor(X + 1)
    for other in (2, 2.5, X[0] + 1, Tensor(X[0] + 1), np.float32(3), np.int64(3)):
        plain = other.numpy() if isinstance(other, Tensor) else other
        np.testing.assert_allclose(op(t, other).numpy(), op(X + 1, plain), rtol=1e-6)
        np.testing.assert_allclose(op(other, t).numpy(), op(plain, X + 1), rtol=1e-6)
        assert isinstance(op(other, t), Tensor) and op(other, t).dtype is f32


def test_numbers_take_the_tensors_type() -> None:
    half, ints = Tensor([1.0], "f16"), Tensor([3, 4], "i32")
    assert (half * 2.5).dtype is f16 and (2 * half).dtype is f16 and (half + np.float64(1)).dtype is f16
    assert (ints + 1).dtype is i32 and (ints * np.int64(2)).dtype is i32 and (ints * 0.5).dtype is f32
    assert (ints / 2).dtype is f32 and (ints / 2).tolist() == [1.5, 2.0] and (ints**2).tolist() == [9, 16]
    assert (2.0**half).tolist() == [2] and (half**0.5).tolist() == [1] and (1 - half).tolist() == [0]
    assert (Tensor([True]) + 1).dtype is i64 and (-ints).tolist() == [-3, -4] and abs(-ints).tolist() == [3, 4]


@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64", "u8"])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7, 10, 63, np.int64(5), True])
def test_integers_to_a_constant_power_are_exact_and_wrap(dtype: str, exponent: Any) -> None:
    given = np.array([0, 1, 2, 3, 7, 100], as_dtype(dtype).numpy)
    bits = given.dtype.itemsize * 8
    wanted = np.array([pow(int(v), int(exponent), 1 << bits) for v in given], np.uint64).astype(given.dtype)
    t = Tensor(given)
    for got in (t**exponent, F.pow(t, exponent), np.power(t, exponent)):
        assert got.dtype is t.dtype and got.tolist() == wanted.tolist()
    assert (t**1).numpy() is not t.numpy()


def test_other_powers_are_of_floats() -> None:
    ints = Tensor([1, 2, 4])
    for got, wanted in (
        (ints**-1, [1, 0.5, 0.25]),
        (ints**0.5, [1, 2**0.5, 2]),
        (ints**2.0, [1, 4, 16]),
        (ints**3.0, [1, 8, 64]),
    ):
        assert got.dtype is f32
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)
    for got, wanted in ((2**ints, [2, 4, 16]), (ints**ints, [1, 4, 256]), (ints.int() ** ints, [1, 4, 256])):
        assert got.dtype is i64 and got.tolist() == wanted
    assert (Tensor([True, False]) ** 2).dtype is i64 and (Tensor([True, False]) ** 3).tolist() == [1, 0]
    assert (Tensor([3.0]) ** 2).dtype is f32 and (Tensor([3.0], "f16") ** 3).dtype is f16


def test_comparisons_and_logic() -> None:
    t = Tensor([1.0, 2.0, 3.0])
    assert (t < 2).tolist() == [True, False, False] and (2 <= t).tolist() == [False, True, True]
    assert (t == 2.0).tolist() == [False, True, False] and (t != 2).tolist() == [True, False, True]
    assert ((t > 1) & (t < 3)).tolist() == [False, True, False] and (~(t > 1) | (t > 2)).tolist() == [True, False, True]
    assert hash(t) != hash(Tensor([1.0, 2.0, 3.0])) and bool(t.sum() > 5)
    assert (np.array([1.0, 9.0, 9.0], np.float32) >= t).tolist() == [True, True, True]


def test_matmul() -> None:
    a, b = X, np.ones((4, 5), np.float32)
    np.testing.assert_allclose((Tensor(a) @ b).numpy(), a @ b)
    np.testing.assert_allclose((a @ Tensor(b)).numpy(), a @ b)
    vector = np.ones(4, np.float32)
    assert (Tensor(a) @ vector).shape == (2, 3) and (vector @ Tensor(b)).shape == (5,)
    assert (Tensor(vector) @ vector).item() == 4


def test_conversions() -> None:
    t = Tensor([1.5, -2.5])
    for make, dtype in (
        ("half", f16),
        ("bfloat16", bf16),
        ("double", f64),
        ("int", i32),
        ("long", i64),
        ("float", f32),
    ):
        assert getattr(t, make)().dtype is dtype
    assert t.to("int8").tolist() == [1, -2] and t.to("f32") is t and t.to("cpu") is t
    assert t.type_as(Tensor([1])).dtype is i64 and t.contiguous() is t
    assert Tensor(3).item() == 3 and int(Tensor(3)) == 3 and float(Tensor(2.5)) == 2.5 and [5, 6, 7][Tensor(1)] == 6
    with pytest.raises(TypeError, match="only integer tensors"):
        [1, 2][Tensor(1.0)]


INDICES: list[Any] = [
    0, -1, slice(None), slice(1, None), slice(-1, None), slice(0, 2, 2), slice(5, 9), None, Ellipsis,
    (0, 1), (slice(None), 2), (Ellipsis, 0), (0, Ellipsis, slice(1, 3)), (None, 1, None, slice(None, None, 3)),
    (slice(None), slice(None), slice(3, 1)), np.int64(1), (np.int32(-1), Ellipsis),
    np.array([1, 0, 1]), (slice(None), np.array([[2, 0], [1, 1]])), (Ellipsis, [3, 3, 0]), [1, 1],
    (slice(1, 2), np.array([0]), slice(0, 2)), slice(None, None, -1), (slice(None), slice(2, None, -2)),
    (0, slice(None), slice(-2, 0, -1)), (slice(None), slice(0, 2, -1)), np.array([-1, -2]),
    (np.array([0, -1]), np.array([[1], [2]])), (0, np.array([1, 2])),
    (np.array([1, 0]), slice(None), np.array([3, -4])),
    (slice(None), np.array([0, 1]), np.array([2, 3])), (np.array([1]), None, np.array([2])), np.array([True, False]),
    (slice(None), np.array([True, False, True]), [0, 1]), X > 5, (X[..., 0] > 3, 1),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_like_numpy(index: Any) -> None:
    np.testing.assert_array_equal(Tensor(X)[index].numpy(), X[index])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0, 0, 0), "4 indices for a tensor of rank 3"),
        (2, "go past 2"),
        (-3, "negative"),
        (slice(None, None, 0), "an int other than 0"),
        (slice(0.5, 1), "ends of a slice are ints"),
        ((Ellipsis, Ellipsis), "one ..."),
        ("a", "an index can't be a str"),
        (1.5, "an index can't be a float"),
        (True, "a single bool is no index"),
        (np.array([0.5]), "an index must be integers"),
    ],
)
def test_indexing_errors_name_the_line(index: Any, message: str) -> None:
    with pytest.raises(TypeRuleError, match=message) as caught:
        Tensor(X)[index]
    assert caught.value.where is not None and str(caught.value.where).startswith(__file__)


def test_items_can_not_be_assigned() -> None:
    with pytest.raises(TypeRuleError, match="can't be changed by index"):
        Tensor(X)[0] = 1.0


def test_shapes() -> None:
    t = Tensor(X)
    assert t.view(6, -1).shape == (6, 4) and t.reshape([4, 6]).shape == (4, 6) and t.reshape(-1).shape == (24,)
    assert t.transpose(0, -1).shape == (4, 3, 2) and t.permute(1, 2, 0).shape == (3, 4, 2) and t.T.shape == (4, 3, 2)
    np.testing.assert_array_equal(t.mT.numpy(), X.swapaxes(1, 2))
    np.testing.assert_array_equal(t.narrow(1, 1, 2).numpy(), X[:, 1:3])
    assert t.unsqueeze(-1).shape == (2, 3, 4, 1) and t.unsqueeze(0).squeeze(0).shape == (2, 3, 4)
    assert t.flatten().shape == (24,) and t.flatten(1).shape == (2, 12) and Tensor(1.0).flatten().shape == (1,)
    assert [p.shape for p in t.chunk(2, -1)] == [(2, 3, 2)] * 2
    assert [p.shape[1] for p in t.chunk(2, 1)] == [2, 1] and [p.shape[2] for p in t.split(3, -1)] == [3, 1]
    assert [p.shape[2] for p in t.split([1, 3], 2)] == [1, 3] and len(t.unbind(1)) == 3
    assert Tensor([[1.0], [2.0]]).expand(3, -1, 2).shape == (3, 2, 2)
    np.testing.assert_array_equal(t.select(1, -1).numpy(), X[:, -1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.view(5, -1), "does not divide into"),
        (lambda t: t.view(-1, -1), "does not divide into"),
        (lambda t: t.view(5), "has 24 elements"),
        (lambda t: t.transpose(0, 3), "dimension 3 is out of range for rank 3"),
        (lambda t: t.split([1, 5], 0), "do not add up"),
        (lambda t: t.split(0, 0), "1 element or more"),
        (lambda t: t.expand(2, 3, 5), "does not broadcast|do not broadcast"),
    ],
)
def test_shape_errors(change: Any, message: str) -> None:
    with pytest.raises(TypeRuleError, match=message):
        change(Tensor(X))


def test_reductions() -> None:
    t = Tensor(X)
    assert t.sum().item() == 276 and t.mean(-1).shape == (2, 3) and t.amax(dim=[0, 1]).tolist() == [20, 21, 22, 23]
    assert (
        t.amin(0, keepdim=True).shape == (1, 3, 4)
        and t.argmax().item() == 23
        and t.argmax(-1).tolist() == [[3] * 3] * 2
    )
    assert Tensor([1, 2]).mean().item() == 1.5


def test_views_share_storage_in_eager_mode() -> None:
    array = np.zeros((2, 3), np.float32)
    t = Tensor(array)
    t.view(6)[2:3].assign(Tensor([7.0]))
    t[1].copy_(5)
    assert array.tolist() == [[0, 0, 7], [5, 5, 5]]


def test_assign() -> None:
    t = Tensor([1.0, 2.0])
    assert t.assign(Tensor([3.0, 4.0])) is t and t.tolist() == [3, 4]
    with pytest.raises(ArgumentError, match=r"out is f32\[2\], the result is f32\[3\]"):
        t.assign(Tensor([1.0, 2.0, 3.0]))
    with pytest.raises(ArgumentError, match=r"out is f32\[2\], the result is f16\[2\]"):
        t.assign(Tensor([1.0, 2.0], "f16"))
    with pytest.raises(ArgumentError, match="read-only"):
        Tensor(1.0).expand(2).assign(t)


def test_numpy_functions_on_concrete_tensors() -> None:
    t = Tensor(X)
    np.testing.assert_array_equal(np.asarray(t), X)
    np.testing.assert_array_equal(np.exp(t), np.exp(X))
    np.testing.assert_array_equal(np.concatenate([t, X], axis=1), np.concatenate([X, X], axis=1))
    assert np.sum(t) == 276 and np.add.reduce(t, axis=0).shape == (3, 4)
    assert isinstance(np.add(X, t), Tensor) and np.array(t, dtype=np.float64).dtype == np.float64
    assert np.array(t, copy=True) is not X


def test_copies() -> None:
    t = Tensor(X)
    other = copy.deepcopy(t)
    assert other.numpy() is not X and np.array_equal(other.numpy(), X)


def test_eager_errors_name_the_line() -> None:
    with pytest.raises(TypeRuleError, match="do not broadcast") as caught:
        Tensor([1.0, 2.0]) + Tensor([1.0, 2.0, 3.0])
    assert "test_tensor.py" in str(caught.value.where)
    with pytest.raises(TypeRuleError, match="needs floating point"):
        from monoplan.frontend.tensor import call

        call("exp", Tensor([1], as_dtype("i8")))
