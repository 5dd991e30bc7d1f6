"""Attention, rope and the cache against loops over single queries and keys."""

from __future__ import annotations

import cmath
import itertools
import math
from typing import Any

import numpy as np
import pytest

from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import FLOATS, INTEGERS, DType, tensor_type
from tests.ir.support import infer, refuses, run
from tests.tolerances import check


def by_hand(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past: Any = None,
    table: Any = None,
    sinks: Any = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    """One query at a time: which keys it sees, their scores, their weights."""
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    batch, heads, seq, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    out = np.zeros((batch, heads, seq, v.shape[-1]))
    for b, h, i in np.ndindex(batch, heads, seq):
        g = h * kv_heads // heads
        first = keys - seq if past is None else int(past[b])
        at = first + i
        scores: dict[int, float] = {}
        for j in range(keys):
            if past is not None and j >= first + seq or causal and j > at or window is not None and at - j >= window:
                continue
            score = math.fsum(q[b, h, i, d] * k[b, g, j, d] for d in range(dim)) * (scale or 1 / math.sqrt(dim))
            score = score if softcap is None else softcap * math.tanh(score / softcap)
            if mask is not None:
                m = np.broadcast_to(mask, (batch, heads, seq, keys))[b, h, i, j]
                if m.dtype == np.bool_ and not m:
                    continue
                score += 0.0 if m.dtype == np.bool_ else float(m)
            if score != -math.inf:
                scores[j] = score
        if scores:
            top = max(scores.values())
            weights = {j: math.exp(s - top) for j, s in scores.items()}
            sink = 0.0 if sinks is None else math.exp(float(sinks[h]) - top)
            for j, w in weights.items():
                out[b, h, i] += w / (math.fsum(weights.values()) + sink) * v[b, g, j]
    return out


def qkv(rng: Any, dtype: DType, heads: int = 4, kv_heads: int = 4, seq: int = 3, keys: int = 5, dim: int = 8) -> Any:
    q = rng.standard_normal((2, heads, seq, dim)).astype(dtype.numpy)
    k = rng.standard_normal((2, kv_heads, keys, dim)).astype(dtype.numpy)
    return q, k, rng.standard_normal((2, kv_heads, keys, dim)).astype(dtype.numpy)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5, "causal": True},
    "window": {"window": 2, "causal": True},
    "window_of_one": {"window": 1, "causal": True},
    "two_sided_window": {"window": 2},
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("option", OPTIONS)
def test_attention(dtype: DType, kv_heads: int, option: str, rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, dtype, kv_heads=kv_heads)
    wanted = by_hand(q, k, v, **OPTIONS[option])
    check(run("attention", q, k, v, **OPTIONS[option]), wanted, dtype, "matmul")
    swapped = run("attention", q.swapaxes(1, 2), k, v, layout="bshd", **OPTIONS[option])
    check(swapped.swapaxes(1, 2), wanted, dtype, "matmul")


@pytest.mark.parametrize("kind", ["bool", "float", "row", "infinite"])
def test_masks(kind: str, rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, FLOATS[1])
    mask = {
        "bool": rng.integers(0, 2, (2, 1, 3, 5)).astype(bool),
        "float": rng.standard_normal((2, 4, 3, 5)).astype(np.float32),
        "row": np.array([True, False, True, True, False]),
        "infinite": np.where(rng.integers(0, 2, (3, 5)), 0.0, -np.inf).astype(np.float32),
    }[kind]
    for causal in (False, True):
        wanted = by_hand(q, k, v, mask, causal=causal)
        check(run("attention", q, k, v, mask, causal=causal), wanted, "f32", "matmul")


def test_sinks(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, FLOATS[1], kv_heads=2)
    sinks = np.array([-50.0, 0.0, 3.0, 50.0], np.float32)
    wanted = by_hand(q, k, v, sinks=sinks, causal=True)
    check(run("attention", q, k, v, None, None, None, sinks, causal=True), wanted, "f32", "matmul")
    refuses(
        "sinks must be floats",
        "attention",
        *(tensor_type("f32", 2, 4, 3, 8) for _ in "qkv"),
        None,
        None,
        None,
        tensor_type("f32", 3),
    )


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_past(dtype: DType, rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, FLOATS[1], kv_heads=2, seq=2, keys=9)
    past = np.array([0, 5], dtype.numpy)
    for causal, window in itertools.product((True, False), (None, 3)):
        wanted = by_hand(q, k, v, past=past, causal=causal, window=window)
        check(run("attention", q, k, v, None, past, causal=causal, window=window), wanted, "f32", "matmul")


def test_unwritten_places_of_a_cache_are_never_read(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, FLOATS[1], seq=2, keys=6)
    past = np.array([1, 3])
    wanted = run("attention", q, k, v, None, past, causal=True)
    for b in range(2):
        k[b, :, int(past[b]) + 2 :] = np.nan
        v[b, :, int(past[b]) + 2 :] = np.nan
    np.testing.assert_array_equal(run("attention", q, k, v, None, past, causal=True), wanted)


def test_a_query_that_sees_nothing_gives_zeros(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, FLOATS[1])
    assert (run("attention", q, k, v, np.zeros((3, 5), bool)) == 0).all()
    # More queries than keys: the first stand before all of them.
    early = run("attention", q, k[:, :, :2], v[:, :, :2], causal=True)
    assert (early[:, :, 0] == 0).all() and np.abs(early[:, :, 1:]).min() > 0


def test_large_scores_do_not_overflow(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, FLOATS[1])
    wanted = by_hand(q * 300, k, v, causal=True)
    assert np.isfinite(wanted).all()
    check(run("attention", q * 300, k, v, causal=True), wanted, "f32", "matmul", scale=100)


def test_without_batch(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, FLOATS[1], kv_heads=2)
    got = run("attention", q[0], k[0], v[0], causal=True)
    check(got, by_hand(q[:1], k[:1], v[:1], causal=True)[0], "f32", "matmul")


def test_values_of_another_width(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, FLOATS[1])
    check(run("attention", q, k, v[..., :3]), by_hand(q, k, v[..., :3]), "f32", "matmul")


def test_attention_refusals() -> None:
    def t(*shape: Any, dtype: str = "f32") -> Any:
        return tensor_type(dtype, *shape)

    q, k = t("b", 4, "s", 8), t("b", 2, "n", 8)
    assert infer("attention", q, k, k) == q
    assert infer("attention", t("b", "s", 4, 8), k, k, layout="bshd") == t("b", "s", 4, 8)
    refuses("4 query heads can't share 3", "attention", q, t("b", 3, "n", 8), t("b", 3, "n", 8))
    refuses("differ in the head dimension", "attention", q, t("b", 2, "n", 4), t("b", 2, "n", 4))
    refuses("k .* and v .* do not fit", "attention", q, k, t("b", 2, "m", 8))
    refuses("differ in batch", "attention", q, t("c", 2, "n", 8), t("c", 2, "n", 8))
    refuses("must all have rank 3 or 4", "attention", t(4, 8), t(4, 8), t(4, 8))
    refuses("layout='bsdh' is not one of", "attention", q, k, k, layout="bsdh")
    refuses("the mask must be bool or float", "attention", q, k, k, t("s", "n", dtype="i32"))
    refuses("does not broadcast", "attention", q, k, k, t("s", 7, dtype="bool"))
    # A mask must not be larger than the scores.
    refuses("does not broadcast", "attention", t(1, 4, 3, 8), t(1, 4, 5, 8), t(1, 4, 5, 8), t(2, 1, 3, 5))
    refuses(r"past must be integers \[batch\]", "attention", q, k, k, None, t("b"))
    refuses("window must be positive", "attention", q, k, k, window=0)
    refuses("softcap must be positive", "attention", q, k, k, softcap=0.0)
    refuses("needs floating point", "attention", t(1, 1, 1, 1, dtype="i32"), k, k)


# -- rope ---------------------------------------------------------------------------------------------------


def tables(positions: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] * 0.7 ** np.arange(half)
    return np.sin(angles), np.cos(angles)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("algo", ["gpt_j", "gpt_neox"])
@pytest.mark.parametrize("rotated", [8, 4], ids=["whole", "part"])
@pytest.mark.parametrize("batched", [False, True])
def test_rope(dtype: DType, algo: str, rotated: int, batched: bool, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 2, 8)).astype(dtype.numpy)
    positions = np.array([[0, 1, 2], [9, 4, 4]]) if batched else np.array([3, 0, 7])
    half = rotated // 2
    sin, cos = (t.astype(dtype.numpy) for t in tables(10, half))
    wanted = x.astype(np.float64)
    for b, s, h, i in np.ndindex(2, 3, 2, half):
        p = positions[b, s] if batched else positions[s]
        one, two = (2 * i, 2 * i + 1) if algo == "gpt_j" else (i, i + half)
        # A rotation is a product of complex numbers.
        turned = complex(x[b, s, h, one], x[b, s, h, two]) * complex(cos[p, i], sin[p, i])
        wanted[b, s, h, one], wanted[b, s, h, two] = turned.real, turned.imag
    got = run("rope", x, positions, sin, cos, algo=algo)
    check(got, wanted, dtype, "pointwise", scale=4)
    assert np.array_equal(got[..., rotated:], x[..., rotated:]), "the rest of the head is left alone"
    if not batched:
        check(run("rope", x[1], positions, sin, cos, algo=algo), wanted[1], dtype, "pointwise", scale=4)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_rope_takes_every_integer_type(dtype: DType) -> None:
    x = np.ones((2, 1, 2), np.float32)
    sin, cos = (t.astype(np.float32) for t in tables(4, 1))
    got = run("rope", x, np.array([0, 3], dtype.numpy), sin, cos)
    turned = complex(1, 1) * cmath.rect(1, 3)
    assert np.allclose(got[:, 0], [[1, 1], [turned.real, turned.imag]])


@pytest.mark.parametrize("position", [4, -1, 1000])
def test_rope_beyond_the_table(position: int) -> None:
    sin, cos = (t.astype(np.float32) for t in tables(4, 1))
    wrong = "beyond the table of 4 positions" if position > 0 else "negative"
    with pytest.raises(ArgumentError, match=rf"position {position} at \[1\] is {wrong}$"):
        run("rope", np.ones((2, 1, 2), np.float32), np.array([0, position]), sin, cos)


def test_rope_refusals() -> None:
    x, p, t = tensor_type("f32", "b", "s", 4, 8), tensor_type("i64", "s"), tensor_type("f32", 16, 4)
    assert infer("rope", x, p, t, t) == x
    odd = tensor_type("f32", "b", "s", 4, 7)
    refuses("the head dimension must be even, got 7", "rope", odd, p, t, t)
    refuses("tables rotate 10 of 8 dimensions", "rope", x, p, *[tensor_type("f32", 16, 5)] * 2)
    refuses("tables must be", "rope", x, p, t, tensor_type("f32", 15, 4))
    refuses("positions .* do not fit", "rope", x, tensor_type("i64", "n"), t, t)
    refuses("positions must be integers", "rope", x, tensor_type("f32", "s"), t, t)
    refuses(
        r"positions must be integers \[seq\] or \[batch, seq\]",
        "rope",
        tensor_type("f32", "s", 4, 8),
        tensor_type("i64", 1, "s"),
        t,
        t,
    )
    refuses("algo='gptj' is not one of", "rope", x, p, t, t, algo="gptj")
    refuses("x must be", "rope", tensor_type("f32", "s", 8), p, t, t)


# -- the cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kv_update(dtype: DType, rng: np.random.Generator) -> None:
    cache = rng.standard_normal((3, 2, 6, 4)).astype(dtype.numpy)
    before = cache.copy()
    rows = rng.standard_normal((3, 3, 2, 4)).astype(dtype.numpy)
    lengths, valid = np.array([0, 2, 6], np.int32), np.array([3, 1, 0], np.int64)
    got = run("kv_update", cache, rows, lengths, valid)
    for b, h, p, d in np.ndindex(cache.shape):
        s = p - int(lengths[b])
        wanted = rows[b, s, h, d] if 0 <= s < valid[b] else before[b, h, p, d]
        assert got[b, h, p, d] == wanted
    assert np.array_equal(cache, before), "the reference does not touch its operand"
    assert np.array_equal(run("kv_update", cache, rows, np.array([1, 2, 3]))[2, :, 3:], rows[2].swapaxes(0, 1))


@pytest.mark.parametrize(
    ("lengths", "valid", "message"),
    [
        ([0, 4], None, "3 rows at position 4 of sequence 1 do not fit a cache of 6 positions"),
        ([-1, 0], None, "3 rows at position -1 of sequence 0"),
        ([0, 0], [1, 4], "4 rows at position 0 of sequence 1"),
        ([0, 0], [-1, 0], "-1 rows at position 0 of sequence 0"),
    ],
)
def test_kv_update_bounds(lengths: list[int], valid: list[int] | None, message: str) -> None:
    cache, rows = np.zeros((2, 1, 6, 4), np.float32), np.zeros((2, 3, 1, 4), np.float32)
    counts = None if valid is None else np.array(valid)
    with pytest.raises(ArgumentError, match=message):
        run("kv_update", cache, rows, np.array(lengths), counts)


def test_kv_update_refusals() -> None:
    cache, rows, n = tensor_type("f32", "b", 2, "c", 8), tensor_type("f32", "b", "s", 2, 8), tensor_type("i32", "b")
    assert infer("kv_update", cache, rows, n) == cache
    refuses("rows .* do not fit the cache", "kv_update", cache, tensor_type("f32", "b", 2, "s", 8), n)
    refuses("the cache is", "kv_update", tensor_type("f32", "b", "c", 8), rows, n)
    refuses(r"must be integers \[batch\]", "kv_update", cache, rows, tensor_type("f32", "b"))
    refuses(r"must be integers \[batch\]", "kv_update", cache, rows, n, tensor_type("i32", "s"))
    refuses("needs floats", "kv_update", tensor_type("i16", "b", 2, "c", 8), tensor_type("i16", "b", "s", 2, 8), n)
    bytes_ = tensor_type("i8", "b", 2, "c", 12)  # codes, and a scale behind them
    assert infer("kv_update", bytes_, rows, n) == bytes_
    refuses("needs floats", "kv_update", bytes_, tensor_type("i8", "b", "s", 2, 8), n)
