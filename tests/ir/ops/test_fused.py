"""Fused ops against formulas in float64, written out whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from monoplan.ir.errors import ParseError
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import FLOATS, DType, tensor_type
from tests.ir.support import infer, refuses, run
from tests.tolerances import check


def wide(*arrays: Any) -> list[np.ndarray]:
    return [np.asarray(a, np.float64) for a in arrays]


def normal(rng: np.random.Generator, dtype: DType, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype.numpy)


def logistic(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x * (np.einsum("...k,...k->...", x, x)[..., None] / x.shape[-1] + eps) ** -0.5


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pointwise(dtype: DType, rng: np.random.Generator) -> None:
    x, y = normal(rng, dtype, 3, 1), normal(rng, dtype, 4)
    a, b = wide(x, y)
    got = run("pointwise", x, y, expr="where(gt(x0, x1), mul(x0, 2.0), neg(x1))")
    check(got, np.where(a > b, 2 * a, -b), dtype, "pointwise")
    # An operand that the expression does not name still gives the shape.
    assert run("pointwise", x, y, expr="exp(x0)").shape == (3, 4)
    assert run("pointwise", x, y, expr="lt(x0, x1)").dtype == np.bool_


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
def test_fused_linear(dtype: DType, norm: str, rng: np.random.Generator) -> None:
    x, w, bias = normal(rng, dtype, 2, 6), normal(rng, dtype, 4, 6), normal(rng, dtype, 4)
    scale, shift, residual = normal(rng, dtype, 6), normal(rng, dtype, 6), normal(rng, dtype, 2, 4)
    h, w64, b64, s64, t64, r64 = wide(x, w, bias, scale, shift, residual)
    if norm == "rms":
        h = rms(h, s64, 1e-5)
    if norm == "layer":
        h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5) * s64 + t64
    y = np.einsum("nk,ok->no", h, w64) + b64
    norms = (None, None) if norm == "none" else (scale, shift if norm == "layer" else None)
    got = run("fused_linear", x, w, bias, *norms, residual, norm=norm, eps=1e-5, expr="add(mul(x0, sigmoid(x0)), x1)")
    check(got, y * logistic(y) + r64, dtype, "matmul", scale=4)


@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "plain"])
def test_fused_experts(weighted: bool, rng: np.random.Generator) -> None:
    f = FLOATS[1]
    x, w, up, scale = normal(rng, f, 3, 6), normal(rng, f, 4, 5, 6), normal(rng, f, 4, 5, 6), normal(rng, f, 6)
    ids = rng.integers(0, 4, (3, 2))
    x64, w64, up64, s64 = wide(x, w, up, scale)
    h = rms(x64, s64 if weighted else 1.0, 1e-2)
    gate, other = (np.einsum("rk,rjok->rjo", h, m[ids]) for m in (w64, up64))
    norm_weight = scale if weighted else None
    got = run("fused_experts", x, w, ids, up, None, None, norm_weight, gate="silu", eps=1e-2)
    check(got, gate * logistic(gate) * other, "f32", "matmul", scale=6)
    rows = [tensor_type("f32", 3, 2, 6), tensor_type("f32", 4, 5, 6), tensor_type("i64", 3, 2)]
    refuses(r"x must be \[rows, in\]", "fused_experts", *rows)


def test_gated_linear(rng: np.random.Generator) -> None:
    x, w = normal(rng, FLOATS[1], 3, 4), normal(rng, FLOATS[1], 10, 4)
    gate, up = (wide(x)[0] @ part.T for part in np.split(wide(w)[0], 2))
    got = run("fused_linear", x, w, gated=True, expr="swiglu(x0, x1)")
    check(got, gate * logistic(gate) * up, "f32", "matmul", scale=4)
    refuses(
        "a gated weight needs an even size", "fused_linear", tensor_type("f32", 4), tensor_type("f32", 5, 4), gated=True
    )
    refuses("norm='batch' is not one of", "fused_linear", tensor_type("f32", 4), tensor_type("f32", 4, 4), norm="batch")
    extra = [tensor_type("f32", 2, 4), tensor_type("f32", 6, 4), None, None, None, tensor_type("f32", 3, 2, 6)]
    refuses("do not broadcast to", "fused_linear", *extra, expr="add(x0, x1)")


def test_fused_matmul(rng: np.random.Generator) -> None:
    a, b, c = normal(rng, FLOATS[1], 5, 2, 3), normal(rng, FLOATS[1], 3, 4), normal(rng, FLOATS[1], 4)
    a64, b64, c64 = wide(a, b, c)
    got = run("fused_matmul", a, b, c, expr="mul(x0, x1)")
    check(got, np.einsum("bij,jk,k->bik", a64, b64, c64), "f32", "matmul", scale=4)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_fused_norm(norm: str, rng: np.random.Generator) -> None:
    x, scale, shift, other = (normal(rng, FLOATS[1], *s) for s in ((2, 3, 4), (3, 4), (3, 4), (4,)))
    x64, s64, t64, o64 = wide(x, scale, shift, other)
    flat = x64.reshape(2, 12)
    mean = flat.mean(1, keepdims=True) if norm == "layer" else 0.0
    size = np.sqrt(((flat - mean) ** 2).sum(1, keepdims=True) / 12 + 0.1)
    y = ((flat - mean) / size).reshape(2, 3, 4) * s64 + (t64 if norm == "layer" else 0.0)
    got = run(
        "fused_norm",
        x,
        scale,
        shift if norm == "layer" else None,
        other,
        norm=norm,
        eps=0.1,
        dims=2,
        expr="sub(x0, x1)",
    )
    check(got, y - o64, "f32", "reduce", scale=2)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_linear_norm(norm: str, rng: np.random.Generator) -> None:
    x, w, bias, scale, other = (normal(rng, FLOATS[1], *s) for s in ((3, 5), (4, 5), (4,), (4,), (4,)))
    x64, w64, b64, s64, o64 = wide(x, w, bias, scale, other)
    y = x64 @ w64.T + b64
    y -= y.mean(1, keepdims=True) if norm == "layer" else 0.0
    y /= np.sqrt((y**2).mean(1, keepdims=True) + 0.1)
    got = run("linear_norm", x, w, bias, scale, None, other, norm=norm, eps=0.1, expr="sub(x1, x0)")
    check(got, o64 - y * s64, "f32", "matmul", scale=4)
    refuses(
        "norm='none' is not one of",
        "linear_norm",
        *(tensor_type("f32", *s) for s in ((3, 5), (4, 5))),
        norm="none",
        eps=0.1,
    )


@pytest.mark.parametrize("norm", ["none", "rms"])
def test_linear_route_is_a_gated_product_and_a_choice(norm: str, rng: np.random.Generator) -> None:
    x, scale = normal(rng, FLOATS[1], 2, 3, 5), normal(rng, FLOATS[1], 5) if norm == "rms" else None
    gate, up, router = (normal(rng, FLOATS[1], n, 5) for n in (4, 4, 6))
    weight = np.concatenate([gate, router[:3], up, router[3:]])
    choice = {"k": 2, "score": "sigmoid", "normalize": True, "scale": 2.0, "gates": 1}
    made = run("linear_route", x, weight, scale, scores=6, norm=norm, eps=0.1, expr="swiglu(x0, x1)", **choice)
    front = {"norm": norm, "eps": 0.1}
    both = np.concatenate([gate, up])
    gated = run("fused_linear", x, both, None, scale, None, gated=True, expr="swiglu(x0, x1)", **front)
    scores = run("fused_linear", x, router, None, scale, None, **front).reshape(6, 6)
    for got, wanted in zip(made, (gated, *run("route", scores, **choice)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_linear_route_types() -> None:
    x, weight = tensor_type("f32", "b", "s", 5), tensor_type("f32", 14, 5)
    name, attrs = "linear_route", {"scores": 6, "k": 2}
    found = infer(name, x, weight, **attrs)
    assert [str(t) for t in found] == ["f32[b, s, 4]", "f32[b*s, 2]", "i64[b*s, 2]"]
    refuses("has no 5 rows of scores", name, x, weight, **{**attrs, "scores": 5})
    refuses("has no 14 rows of scores", name, x, weight, **{**attrs, "scores": 14})
    refuses("has no 6 rows of scores", name, x, tensor_type("f32", 13, 5), **attrs)
    refuses("7 of 6 experts can't be chosen", name, x, weight, **{**attrs, "k": 7})
    refuses("norm='layer' is not one of", name, x, weight, norm="layer", **attrs)


def test_fused_gather(rng: np.random.Generator) -> None:
    ids, table, place = np.array([[2, 0, 1]]), normal(rng, FLOATS[1], 3, 4), normal(rng, FLOATS[1], 3, 4)
    got = run("fused_gather", ids, table, place, expr="add(mul(x0, 2.0), x1)")
    wanted = np.stack([2 * wide(table)[0][i] + wide(place)[0][s] for s, i in enumerate(ids[0])])[None]
    check(got, wanted, "f32", "pointwise")


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_fused_reduce(reduce: str, rng: np.random.Generator) -> None:
    x, y, after = normal(rng, FLOATS[1], 3, 5), normal(rng, FLOATS[1], 5), normal(rng, FLOATS[1], 3)
    x64, y64, a64 = wide(x, y, after)
    inner = (x64 * y64).tolist()
    python = {"sum": math.fsum, "mean": lambda v: math.fsum(v) / len(v), "max": max, "min": min}[reduce]
    wanted = np.array([python(row) for row in inner]) - a64
    got = run("fused_reduce", x, y, after, inputs=2, reduce=reduce, axes=(1,), pre="mul(x0, x1)", post="sub(x0, x1)")
    check(got, wanted, "f32", "reduce", scale=2)


def test_linear_argmax() -> None:
    x = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)
    w = np.array([[1.0, 3.0], [5.0, 3.0], [5.0, -1.0]], np.float32)
    assert run("linear_argmax", x, w).tolist() == [1, 0], "ties go to the lowest id"
    assert run("linear_argmax", x, w, np.array([0.0, 0.0, 9.0], np.float32), keepdims=True).tolist() == [[2], [2]]
    scaled = run("linear_argmax", x, w, None, np.array([-1.0, 1.0], np.float32), norm="rms", eps=1e-6)
    assert scaled.tolist() == [0, 0]


@pytest.mark.parametrize("algo", ["gpt_j", "gpt_neox"])
@pytest.mark.parametrize("normed", [False, True])
def test_qkv_rope_cache(algo: str, normed: bool, rng: np.random.Generator) -> None:
    heads, kv_heads, dim, width = 4, 2, 4, 6
    x = normal(rng, FLOATS[1], 2, 3, width)
    w = normal(rng, FLOATS[1], (heads + 2 * kv_heads) * dim, width)
    norm_w, q_norm, k_norm = (normal(rng, FLOATS[1], n) for n in (width, dim, dim))
    caches = [normal(rng, FLOATS[1], 2, kv_heads, 8, dim) for _ in range(2)]
    lengths, valid = np.array([0, 4], np.int32), np.array([3, 2], np.int32)
    positions = lengths[:, None] + np.arange(3)
    angles = np.arange(8)[:, None] * 0.5 ** np.arange(dim // 2)
    sin, cos = np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)

    x64, w64, n64, qn, kn, s64, c64 = wide(x, w, norm_w, q_norm, k_norm, sin, cos)
    y = np.einsum("bsk,ok->bso", rms(x64, n64, 1e-6) if normed else x64, w64).reshape(2, 3, -1, dim)

    def turn(t: np.ndarray) -> np.ndarray:
        c, s = c64[positions][:, :, None], s64[positions][:, :, None]
        if algo == "gpt_j":
            z = (t[..., 0::2] + 1j * t[..., 1::2]) * (c + 1j * s)
            return np.stack([z.real, z.imag], -1).reshape(t.shape)
        z = (t[..., : dim // 2] + 1j * t[..., dim // 2 :]) * (c + 1j * s)
        return np.concatenate([z.real, z.imag], -1)

    q, k, v = y[:, :, :heads], y[:, :, heads : heads + kv_heads], y[:, :, heads + kv_heads :]
    if normed:
        q, k = rms(q, qn, 1e-4), rms(k, kn, 1e-4)
    wanted = [turn(q), *(c.astype(np.float64) for c in caches)]
    for b in range(2):
        for s in range(int(valid[b])):
            wanted[1][b, :, lengths[b] + s] = turn(k)[b, s]
            wanted[2][b, :, lengths[b] + s] = v[b, s]
    norms = (norm_w, None, q_norm, k_norm) if normed else (None,) * 4
    got = run(
        "qkv_rope_cache",
        x,
        w,
        positions,
        sin,
        cos,
        *caches,
        lengths,
        valid,
        None,
        *norms,
        heads=heads,
        kv_heads=kv_heads,
        algo=algo,
        norm="rms" if normed else "none",
        eps=1e-6,
        qk_eps=1e-4,
    )
    for a, b in zip(got, wanted, strict=True):
        check(a, b, "f32", "matmul", scale=8)


def test_qkv_rope_cache_types() -> None:
    def t(dtype: str, *shape: Any) -> Any:
        return tensor_type(dtype, *shape)

    x, w, table = t("f32", "b", "s", 6), t("f32", 32, 6), t("f32", 8, 2)
    cache, n, p = t("f32", "b", 2, "c", 4), t("i32", "b"), t("i64", "b", "s")
    attrs = {"heads": 4, "kv_heads": 2, "algo": "gpt_j"}
    assert infer("qkv_rope_cache", x, w, p, table, table, cache, cache, n, **attrs)[0] == t("f32", "b", "s", 4, 4)
    bad = t("f32", 30, 6)
    refuses("is not 4 \\+ 2 x 2 heads of 4", "qkv_rope_cache", x, bad, p, table, table, cache, cache, n, **attrs)
    flat = t("f32", "s", 6)
    refuses("x must be", "qkv_rope_cache", flat, w, p, table, table, cache, cache, n, **attrs)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_heads_rope_cache_is_norms_rotation_and_updates(norm: str, whole: bool, rng: np.random.Generator) -> None:
    heads, kv_heads, dim = 4, 2, 4
    x = normal(rng, FLOATS[1], 2, 3, (heads + 2 * kv_heads) * dim)
    weights = [normal(rng, FLOATS[1], n * dim) for n in (heads, kv_heads)]
    caches = [normal(rng, FLOATS[1], 2, kv_heads, 8, dim) for _ in range(2)]
    lengths, valid = np.array([0, 4], np.int32), np.array([3, 2], np.int32)
    positions, table = lengths[:, None] + np.arange(3), normal(rng, FLOATS[1], 8, dim // 2)
    attrs = {"heads": heads, "kv_heads": kv_heads, "algo": "gpt_j", "norm": norm, "whole": whole, "eps": 1e-4}
    got = run("heads_rope_cache", x, positions, table, table, *caches, lengths, *weights, valid, **attrs)
    parts = np.split(x, [heads * dim, (heads + kv_heads) * dim], -1)
    wanted = []
    for part, weight in zip(parts, weights, strict=False):
        cut = part if whole else part.reshape(2, 3, -1, dim)
        ones = np.ones(cut.shape[-1], np.float32)
        y = run("rms_norm", cut, ones, eps=1e-4) if norm == "rms" else run("layer_norm", cut, ones, None, eps=1e-4)
        y = y.reshape(2, 3, -1, dim) * weight.reshape(-1, dim)
        wanted.append(run("rope", y, positions, table, table, algo="gpt_j"))
    wanted[1] = run("kv_update", caches[0], wanted[1], lengths, valid)
    wanted.append(run("kv_update", caches[1], parts[2].reshape(2, 3, -1, dim), lengths, valid))
    for a, b in zip(got, wanted, strict=True):
        check(a, b, "f32", "matmul", scale=8)


def test_heads_rope_cache_types() -> None:
    def t(dtype: str, *shape: Any) -> Any:
        return tensor_type(dtype, *shape)

    rest = (t("i64", "b", "s"), t("f32", 8, 2), t("f32", 8, 2), *[t("f32", "b", 2, "c", 4)] * 2, t("i32", "b"))
    attrs = {"heads": 4, "kv_heads": 2, "algo": "gpt_j", "norm": "rms", "whole": True, "eps": 0.1}
    x, q, k, name = t("f32", "b", "s", 32), t("f32", 16), t("f32", 2, 4), "heads_rope_cache"
    assert infer(name, x, *rest, q, k, **attrs)[0] == t("f32", "b", "s", 4, 4)
    refuses("is not", name, t("f32", "b", "s", 30), *rest, q, k, **attrs)
    refuses("must have 8 numbers", name, x, *rest, q, q, **attrs)
    refuses("takes f32, bf16 and f16", name, t("f64", "b", "s", 32), *rest, q, k, **attrs)
    refuses("is not one of", name, x, *rest, q, k, **{**attrs, "norm": "none"})


def test_latent_rope_cache_is_a_norm_rotations_and_an_update(rng: np.random.Generator) -> None:
    latent, key, query, cache = (
        normal(rng, FLOATS[1], *s) for s in ((2, 3, 6), (2, 3, 1, 4), (2, 3, 5, 4), (2, 1, 8, 10))
    )
    lengths, valid, weight = np.array([0, 4], np.int32), np.array([3, 2], np.int32), normal(rng, FLOATS[1], 6)
    turn = (lengths[:, None] + np.arange(3), *[normal(rng, FLOATS[1], 8, 2)] * 2)
    got = run("latent_rope_cache", latent, key, query, *turn, cache, lengths, weight, valid, algo="gpt_j", eps=1e-4)
    turned, rows = (run("rope", t, *turn, algo="gpt_j") for t in (query, key))
    normed = run("rms_norm", latent, weight, eps=1e-4)[:, :, None]
    wanted = run("kv_update", cache, np.concatenate([normed, rows], -1), lengths, valid)
    for a, b in zip(got, (turned, wanted), strict=True):
        check(a, b, "f32", "matmul", scale=8)


def test_latent_rope_cache_with_matrices_makes_whole_queries(rng: np.random.Generator) -> None:
    latent, key, query, cache, plain = (
        normal(rng, FLOATS[1], *s) for s in ((2, 3, 6), (2, 3, 1, 4), (2, 3, 5, 4), (2, 1, 8, 10), (2, 3, 5, 7))
    )
    lengths, weight, matrices = np.array([0, 4], np.int32), normal(rng, FLOATS[1], 6), normal(rng, FLOATS[1], 5, 6, 7)
    given = (latent, key, query, lengths[:, None] + np.arange(3), *[normal(rng, FLOATS[1], 8, 2)] * 2, cache, lengths)
    name, attrs = "latent_rope_cache", {"algo": "gpt_j", "eps": 1e-4}
    (got, new), (turned, wanted) = (
        run(name, *given, weight, None, None, *more, **attrs) for more in ((plain, matrices), (None, None))
    )
    check(got[..., :6], np.einsum("bshi,hoi->bsho", plain, matrices), "f32", "matmul", scale=8)
    np.testing.assert_array_equal(got[..., 6:], turned)
    np.testing.assert_array_equal(new, wanted)


def test_latent_rope_cache_types() -> None:
    def t(*shape: Any, dtype: str = "f32") -> Any:
        return tensor_type(dtype, *shape)

    turn = (t("b", "s", dtype="i64"), t(8, 2), t(8, 2))
    given = [t("b", "s", 6), t("b", "s", 1, 4), t("b", "s", 5, 4), *turn, t("b", 1, "c", 10), t("b", dtype="i32"), t(6)]
    name, attrs = "latent_rope_cache", {"algo": "gpt_j", "eps": 0.1}
    assert infer(name, *given, **attrs) == (given[2], given[6])
    refuses("are not of one key head", name, given[0], t("b", "s", 2, 4), *given[2:], **attrs)
    refuses("do not fit the cache", name, *given[:6], t("b", 1, "c", 11), *given[7:], **attrs)
    plain, matrices = t("b", "s", 5, 7), t(5, 6, 7)
    assert infer(name, *given, None, None, plain, matrices, **attrs) == (t("b", "s", 5, 10), given[6])
    refuses("belong together", name, *given, None, None, plain, **attrs)
    refuses("no matrices of the latent", name, *given, None, None, plain, t(4, 6, 7), **attrs)
    refuses("no matrices of the latent", name, *given, None, None, t("b", "s", 5, 8), matrices, **attrs)
    refuses("the other queries are", name, *given, None, None, t("b", "s", 5, 7, dtype="f64"), matrices, **attrs)
    refuses("takes f32, bf16 and f16", name, *given[:6], t("b", 1, "c", 16, dtype="i8"), *given[7:], **attrs)


def test_every_turn_of_rolled_layers_has_the_types_of_the_body() -> None:
    text = """graph rolled(%x: f32[2, 6]) {
  param %w0: f32[6, 6] = "w0"
  param %w1: f32[6, 6] = "w1"
  %y = repeat_layers(%x, %w0, %w1) {count=2, carried=1, shared=0} : f32[2, 6]
    graph layer(%x: f32[2, 6], %w: f32[6, 6]) {
      %linear = linear(%x, %w) : f32[2, 6]
      return %linear
    }
  return %y
}"""
    assert parse_graph(text).outputs
    with pytest.raises(ParseError, match=r"body input %w is f32\[6, 6\], got f32\[6, 31\]"):
        parse_graph(text.replace("param %w1: f32[6, 6]", "param %w1: f32[6, 31]"))
