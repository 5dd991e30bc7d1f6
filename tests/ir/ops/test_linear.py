"""Products and norms against loops over single elements."""

from __future__ import annotations

import math

import numpy as np
import pytest

from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import FLOATS, DType, tensor_type
from tests.ir.support import infer, refuses, run
from tests.tolerances import check


def dot(a: np.ndarray, b: np.ndarray) -> float:
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(dtype: DType, with_bias: bool, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 5)).astype(dtype.numpy)
    w = rng.standard_normal((4, 5)).astype(dtype.numpy)
    bias = rng.standard_normal(4).astype(dtype.numpy) if with_bias else None
    wanted = np.empty((2, 3, 4))
    for b, s, o in np.ndindex(wanted.shape):
        wanted[b, s, o] = dot(x[b, s], w[o]) + (0.0 if bias is None else float(bias[o]))
    check(run("linear", x, w, bias), wanted, dtype, "matmul")
    check(run("linear", x[0, 0], w, bias), wanted[0, 0], dtype, "matmul")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", ["", "silu", "mul(x1, silu(x0))"])
def test_expert_linear(gate: str, biased: bool, rng: np.random.Generator) -> None:
    b, ub = rng.standard_normal((2, 4, 6)).astype(np.float32) * biased
    x, w, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 5), (4, 6, 5), (4, 6, 5)))
    ids = np.array([[0, 3], [2, 2], [3, 0]])
    wanted = np.empty((3, 2, 6))
    for r, j, n in np.ndindex(wanted.shape):
        wanted[r, j, n] = dot(x[r], w[ids[r, j], n]) + b[ids[r, j], n]
        if gate:
            first = wanted[r, j, n]
            wanted[r, j, n] = first / (1 + math.exp(-first)) * (dot(x[r], up[ids[r, j], n]) + ub[ids[r, j], n])
    rest = (up if gate else None, b if biased else None, ub if gate and biased else None)
    found = run("expert_linear", x, w, ids, *rest, gate=gate)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    again = run("expert_linear", np.repeat(x[:, None], 2, 1), w, ids, *rest, gate=gate)
    np.testing.assert_array_equal(again, found)


def test_expert_linear_refuses() -> None:
    x, w, ids = tensor_type("f32", "n", 5), tensor_type("f32", 4, 6, 5), tensor_type("i64", "n", 2)
    refuses("a gate and a weight `up` belong together", "expert_linear", x, w, ids, None, gate="silu")
    refuses("is not one of", "expert_linear", x, w, ids, w, gate="tanh")
    refuses("is not one of", "expert_linear", x, w, ids, w, gate="silu(x0)")
    b = tensor_type("f32", 4, 6)
    refuses("goes with up_bias", "expert_linear", x, w, ids, w, b, gate="silu")
    refuses("goes with up and a bias", "expert_linear", x, w, ids, w, None, b, gate="silu")
    refuses("biases must be", "expert_linear", x, w, ids, None, tensor_type("f32", 6))
    refuses("x must be", "expert_linear", tensor_type("f32", "n", 4), w, ids)
    refuses("the number of choices are constants", "expert_linear", x, w, tensor_type("i64", "n", "k"))
    refuses("needs f32, bf16 or f16", "expert_linear", tensor_type("f64", "n", 5), w, ids)
    with pytest.raises(ArgumentError, match="there are 4 experts"):
        run("expert_linear", np.ones((1, 5), np.float32), np.ones((4, 6, 5), np.float32), np.array([[4]]))


def test_linear_with_wide_activations() -> None:
    x, w = np.ones((2, 3), np.float32), np.ones((4, 3), np.float16)
    assert run("linear", x, w).dtype == np.float32
    refuses("has 3 features, the weight .* takes 5", "linear", tensor_type("f32", "n", 3), tensor_type("f32", 4, 5))
    refuses(r"the weight must be \[out, in\]", "linear", tensor_type("f32", 3), tensor_type("f32", 3))
    refuses(
        "the bias .* does not fit", "linear", tensor_type("f32", 3), tensor_type("f32", 4, 3), tensor_type("f32", 3)
    )
    refuses("needs floating point", "linear", tensor_type("i32", 3), tensor_type("i32", 4, 3))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("left", "right", "result"),
    [((2, 3), (3, 4), (2, 4)), ((5, 2, 3), (3, 4), (5, 2, 4)), ((5, 1, 2, 3), (6, 3, 1), (5, 6, 2, 1))],
)
def test_matmul(
    dtype: DType, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], rng: np.random.Generator
) -> None:
    a, b = rng.standard_normal(left).astype(dtype.numpy), rng.standard_normal(right).astype(dtype.numpy)
    wanted = np.empty(result)
    for *batch, i, j in np.ndindex(result):
        ia = tuple(0 if n == 1 else p for p, n in zip(batch[len(batch) - len(left) + 2 :], left[:-2], strict=True))
        ib = tuple(0 if n == 1 else p for p, n in zip(batch[len(batch) - len(right) + 2 :], right[:-2], strict=True))
        wanted[(*batch, i, j)] = dot(a[ia][i], b[ib][:, j])
    check(run("matmul", a, b), wanted, dtype, "matmul")


def test_matmul_types() -> None:
    assert run("matmul", np.array([[1, 2]], np.int32), np.array([[3], [4]], np.int64)).tolist() == [[11]]
    assert infer("matmul", tensor_type("f32", "b", 2, 3), tensor_type("f16", 3, "n")) == tensor_type("f32", "b", 2, "n")
    refuses("has 3 columns, .* has 4 rows", "matmul", tensor_type("f32", 2, 3), tensor_type("f32", 4, 5))
    refuses("rank 2 or more", "matmul", tensor_type("f32", 3), tensor_type("f32", 3, 5))
    refuses("matmul needs numbers", "matmul", tensor_type("bool", 3, 3), tensor_type("bool", 3, 5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("affine", [False, True])
def test_norms(dtype: DType, dims: int, affine: bool, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((3, 4, 5)) * 2 + 1).astype(dtype.numpy)
    inner = x.shape[3 - dims :]
    weight = rng.standard_normal(inner).astype(dtype.numpy) if affine else None
    bias = rng.standard_normal(inner).astype(dtype.numpy) if affine else None
    rms, layer = np.empty(x.shape), np.empty(x.shape)
    for row in np.ndindex(x.shape[: 3 - dims]):
        v = x[row].astype(np.float64)
        n = v.size
        square = math.fsum(float(t) ** 2 for t in v.flat) / n
        mean = math.fsum(map(float, v.flat)) / n
        variance = square - mean * mean
        scale, shift = (1.0, 0.0) if not affine else (weight.astype(np.float64), bias.astype(np.float64))  # type: ignore[union-attr]
        rms[row] = v * (square + 1e-5) ** -0.5 * scale
        layer[row] = (v - mean) * (variance + 0.5) ** -0.5 * scale + shift
    check(run("rms_norm", x, weight, dims=dims), rms, dtype, "reduce")
    check(run("layer_norm", x, weight, bias, eps=0.5, dims=dims), layer, dtype, "reduce", scale=2)


def test_norms_of_zeros_and_large_values() -> None:
    assert run("rms_norm", np.zeros((2, 4), np.float32)).tolist() == [[0] * 4] * 2
    assert run("layer_norm", np.full((1, 4), 7.0, np.float32)).tolist() == [[0] * 4]
    # The squares of these overflow f16, but not f32, in which the mean is taken.
    assert run("rms_norm", np.full((1, 2), 1000.0, np.float16), eps=0.0).tolist() == [[1, 1]]


def test_norm_refusals() -> None:
    x = tensor_type("f32", "n", 4)
    refuses("does not match the last 1", "rms_norm", x, tensor_type("f32", 5))
    refuses("does not match the last 2", "layer_norm", x, tensor_type("f32", 4), dims=2)
    refuses("the bias .* does not match", "layer_norm", x, tensor_type("f32", 4), tensor_type("f32", 3))
    refuses("normalizes 3 dimensions", "rms_norm", x, dims=3)
    refuses("needs floating point", "rms_norm", tensor_type("i32", 4))


def test_route_chooses_the_best_experts(rng: np.random.Generator) -> None:
    scores = rng.standard_normal((5, 8)).astype(np.float32)
    share, ids = run("route", scores, k=3)
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    assert ids.tolist() == np.argsort(-scores, 1)[:, :3].tolist()
    chosen = np.take_along_axis(p, ids, 1)
    np.testing.assert_allclose(share, chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(run("route", scores, k=3, normalize=False, scale=2.0)[0], 2 * chosen, rtol=1e-5)
    share, ids = run("route", scores, k=2, score="sigmoid", groups=4, kept_groups=1)
    assert (ids // 2 == np.argmax(scores, 1)[:, None] // 2).all()  # both of the best one's group
    bias = np.array([0, 0, 0, 0, 0, 0, 0, 9], np.float32)
    share, ids = run("route", scores, bias, k=1, normalize=False)
    assert ids.tolist() == [[7]] * 5
    np.testing.assert_allclose(share, p[:, 7:], rtol=1e-5)  # the bias counts for the choice alone


def test_gates_are_sigmoids_behind_the_shares(rng: np.random.Generator) -> None:
    scores = rng.standard_normal((4, 7)).astype(np.float32)
    share, ids = run("route", scores, k=2, gates=1)
    wanted, experts = run("route", scores[:, :6], k=2)
    np.testing.assert_allclose(share, np.hstack([wanted, 1 / (1 + np.exp(-scores[:, 6:]))]), rtol=1e-6)
    np.testing.assert_array_equal(ids, experts)


def test_route_refuses_what_can_not_be_chosen() -> None:
    x = tensor_type("f32", "n", 8)
    refuses("9 of 8 experts can't be chosen", "route", x, k=9)
    refuses("8 of 8 scores can't be gates", "route", x, k=1, gates=8)
    refuses("8 of 7 experts can't be chosen", "route", x, k=8, gates=1)
    refuses("3 of 2 experts can't be chosen", "route", x, k=3, groups=4, kept_groups=1)
    refuses("of 3 groups of 8 experts can't be kept", "route", x, k=1, groups=3)
    refuses("score='tanh' is not one of", "route", x, k=1, score="tanh")
    refuses(r"bias must be f32 \[8\]", "route", x, tensor_type("f32", 7), k=1)
    refuses("scores must be f32", "route", tensor_type("bf16", "n", 8), k=1)
