"""Functions that are made of several ops, compiled for symbolic sizes, against numpy; many to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.ir.tolerances import tolerance
from monoplan.models import LlamaConfig, LlamaForCausalLM

SIZES = ((2, 5), (3, 1), (1, 8))
W = np.random.default_rng(7).standard_normal((6, 4)).astype(np.float32)
C = np.random.default_rng(8).uniform(0.5, 1.5, 6).astype(np.float32)


def put(x: Any, at: Any, value: Any, add: bool = False) -> Any:
    """A copy of x with value at an index."""
    y = x.copy()
    if add:
        np.add.at(y, at, value)
    else:
        y[at] = value
    return y


def layer(x: Any, axes: tuple[int, ...]) -> Any:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


def rows(i: Any) -> Any:
    """An index of the batch beside one of the last dimension."""
    return np.arange(i.shape[0])[:, None], np.arange(i.shape[1])[None]


# Each over x f32 [b, s, 6] and i i64 [b, s] in 0 … 5: ours, and numpy's in f64.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "var": (lambda x, i: F.var(x, 2), lambda x, i: x.var(2, ddof=1)),
    "std": (lambda x, i: x.std((0, 2), unbiased=False), lambda x, i: x.std((0, 2))),
    "var of symbols": (lambda x, i: x.var(1, correction=0), lambda x, i: x.var(1)),
    "logsumexp": (lambda x, i: F.logsumexp(x, -1), lambda x, i: np.log(np.exp(x).sum(-1))),
    "max": (lambda x, i: x.max(2), lambda x, i: (x.max(2), x.argmax(2))),
    "min": (lambda x, i: F.min(i, 1, keepdim=True), lambda x, i: (i.min(1, keepdims=True), i.argmin(1)[:, None])),
    "norm": (lambda x, i: F.norm(x, 2, -1), lambda x, i: np.sqrt((x * x).sum(-1))),
    "count_nonzero": (lambda x, i: F.count_nonzero(i, 1), lambda x, i: (i != 0).sum(1)),
    "cummax": (
        lambda x, i: F.cummax(i, 1),
        lambda x, i: (
            np.maximum.accumulate(i, 1),
            np.maximum.accumulate(np.where(i == np.maximum.accumulate(i, 1), np.arange(i.shape[1]), 0), 1),
        ),
    ),
    "cumsum of bools": (lambda x, i: F.cumsum(x > 0, 2), lambda x, i: np.cumsum(x > 0, 2)),
    "// %": (lambda x, i: (x // 0.75, x % -0.75, i // 4 - i % 3), lambda x, i: (x // 0.75, x % -0.75, i // 4 - i % 3)),
    "div trunc": (lambda x, i: F.div(i - 3, 2, rounding_mode="trunc"), lambda x, i: np.trunc((i - 3) / 2).astype(int)),
    "frac": (lambda x, i: F.frac(x * 3), lambda x, i: np.modf(x * 3)[0]),
    "round": (lambda x, i: F.round(x, 1), lambda x, i: np.round(x, 1)),
    "bits": (lambda x, i: ((i << 2) | 1) ^ (i & 3) >> 1, lambda x, i: ((i << 2) | 1) ^ (i & 3) >> 1),
    "powers": (lambda x, i: (i - 2) ** i, lambda x, i: (i - 2) ** i),
    "nan_to_num": (
        lambda x, i: F.nan_to_num(F.where(x > 0, x, math.nan), 9.0),
        lambda x, i: np.where(x > 0, x, 9.0),
    ),
    "flip": (lambda x, i: F.flip(x, (1, 2)), lambda x, i: x[:, ::-1, ::-1]),
    "flip before a product": (lambda x, i: F.flip(x, -1) @ W, lambda x, i: x[..., ::-1] @ W),
    "negative steps": (lambda x, i: x[:, ::-1, 4:0:-2], lambda x, i: x[:, ::-1, 4:0:-2]),
    "roll": (lambda x, i: F.roll(x, (2, -1), (2, 1)), lambda x, i: np.roll(x, (2, -1), (2, 1))),
    "tile": (lambda x, i: F.tile(x, (2, 3)), lambda x, i: np.tile(x, (2, 3))),
    "pad": (
        lambda x, i: F.pad(x, (1, 2, 0, 1), value=7),
        lambda x, i: np.pad(x, ((0, 0), (0, 1), (1, 2)), constant_values=7),
    ),
    "crop": (lambda x, i: F.pad(x, (-1, 2)), lambda x, i: np.pad(x[..., 1:], ((0, 0), (0, 0), (0, 2)))),
    "reflect": (lambda x, i: F.pad(x, (2, 5), "reflect"), lambda x, i: np.pad(x, ((0, 0), (0, 0), (2, 5)), "reflect")),
    "replicate": (
        lambda x, i: F.pad(x, (0, 0, 2, 3), "replicate"),
        lambda x, i: np.pad(x, ((0, 0), (2, 3), (0, 0)), "edge"),
    ),
    "circular": (
        lambda x, i: F.pad(x, (0, 0, 1, 1), "circular"),
        lambda x, i: np.pad(x, ((0, 0), (1, 1), (0, 0)), "wrap"),
    ),
    "einsum": (
        lambda x, i: F.einsum("bsk,kn,bsk->bn", x, W, x),
        lambda x, i: np.einsum("bsk,kn,bsk->bn", x, W, x),
    ),
    "einsum dots": (lambda x, i: F.einsum("...k,...j->k...j", x, x), lambda x, i: np.einsum("...k,...j->k...j", x, x)),
    "one_hot": (lambda x, i: F.one_hot(i, 6), lambda x, i: np.eye(6, dtype=int)[i]),
    "outer": (lambda x, i: F.outer(x[0, 0], i[0]), lambda x, i: np.outer(x[0, 0], i[0])),
    "meshgrid": (
        lambda x, i: F.meshgrid(i[0], x[0, 0], indexing="xy"),
        lambda x, i: tuple(np.meshgrid(i[0], x[0, 0], indexing="xy")),
    ),
    "diagonal": (lambda x, i: F.diagonal(x.mT @ x, 1, 1, 2), lambda x, i: np.diagonal(x.swapaxes(1, 2) @ x, 1, 1, 2)),
    "symbolic diagonal": (
        lambda x, i: F.diagonal(x @ x.mT, 0, -2, -1),
        lambda x, i: np.diagonal(x @ x.swapaxes(1, 2), 0, -2, -1),
    ),
    "diag_embed": (
        lambda x, i: F.diag_embed(x, 1),
        lambda x, i: np.pad(np.eye(6) * x[..., None], ((0, 0), (0, 0), (0, 1), (1, 0))),
    ),
    "repeat_interleave": (lambda x, i: F.repeat_interleave(x, 2), lambda x, i: np.repeat(x, 2)),
    "negative indices": (lambda x, i: x[:, :, i - 6], lambda x, i: x[:, :, i - 6]),
    "two indices": (lambda x, i: x[0, :, i[0] - 6], lambda x, i: x[0][:, i[0]].T),
    "indices apart": (lambda x, i: x[[0], :, [5, 1, -1]], lambda x, i: x[[0], :, [5, 1, -1]]),
    "scatter": (lambda x, i: F.scatter(x, 2, i.unsqueeze(-1), 3.0), lambda x, i: put(x, (*rows(i), i), 3.0)),
    "scatter_add": (
        lambda x, i: F.scatter_add(x, 2, i.unsqueeze(-1).expand(-1, -1, 3), x),
        lambda x, i: put(x, (*(r[..., None] for r in rows(i)), i[..., None].repeat(3, 2)), x[..., :3], add=True),
    ),
    "scatter_reduce": (
        lambda x, i: F.scatter_reduce(x, 2, i.unsqueeze(-1), x, "mean"),
        lambda x, i: put(x, (*rows(i), i), (x[(*rows(i), i)] + x[..., 0]) / 2),
    ),
    "index_add": (
        lambda x, i: F.index_add(x, 2, [1, 1], x[..., :2], alpha=2),
        lambda x, i: put(x, (..., [1, 1]), 2 * x[..., :2], add=True),
    ),
    "index_copy": (
        lambda x, i: F.index_copy(x, 2, [4, 0], x[..., 1:3]),
        lambda x, i: put(x, (..., [4, 0]), x[..., 1:3]),
    ),
    "index_fill": (lambda x, i: F.index_fill(x, 0, [0], -1), lambda x, i: put(x, [0], -1)),
    "index_put": (
        lambda x, i: F.index_put(x, (i[:1] * 0, i[:1] * 0), F.full((), 2.0), accumulate=True),
        lambda x, i: put(x, (i[:1] * 0, i[:1] * 0), 2.0, add=True),
    ),
    "index_put by a mask": (lambda x, i: F.index_put(x, (x > 0,), F.full((), 0.0)), lambda x, i: np.where(x > 0, 0, x)),
    "tril": (lambda x, i: x.tril(1), lambda x, i: np.tril(x, 1)),
    "leaky_relu": (lambda x, i: F.leaky_relu(x, 0.1), lambda x, i: np.where(x > 0, x, 0.1 * x)),
    "prelu": (lambda x, i: F.prelu(x.mT, C), lambda x, i: np.where(x > 0, x, C * x).swapaxes(1, 2)),
    "elu": (lambda x, i: F.elu(x, 0.5), lambda x, i: np.where(x > 0, x, 0.5 * np.expm1(x))),
    "celu": (lambda x, i: F.celu(x, 0.5), lambda x, i: np.where(x > 0, x, 0.5 * np.expm1(x / 0.5))),
    "selu": (
        lambda x, i: F.selu(x * 1e-4),
        lambda x, i: 1.0507009873554805 * np.where(x > 0, x * 1e-4, 1.6732632423543772 * np.expm1(x * 1e-4)),
    ),
    "mish": (lambda x, i: F.mish(x * 20), lambda x, i: x * 20 * np.tanh(np.logaddexp(x * 20, 0))),
    "logsigmoid": (lambda x, i: F.logsigmoid(x * 20), lambda x, i: -np.logaddexp(-x * 20, 0)),
    "hardswish": (lambda x, i: F.hardswish(x * 4), lambda x, i: x * 4 * np.clip(x * 4 + 3, 0, 6) / 6),
    "hardsigmoid": (lambda x, i: F.hardsigmoid(x * 4), lambda x, i: np.clip(x * 4 + 3, 0, 6) / 6),
    "softshrink": (lambda x, i: F.softshrink(x), lambda x, i: np.sign(x) * np.maximum(abs(x) - 0.5, 0)),
    "glu": (lambda x, i: F.glu(x), lambda x, i: x[..., :3] / (1 + np.exp(-x[..., 3:]))),
    "log_softmax": (lambda x, i: x.log_softmax(-1), lambda x, i: x - np.log(np.exp(x).sum(-1, keepdims=True))),
    "group_norm": (
        lambda x, i: F.group_norm(x.mT, 2, C, C),
        lambda x, i: layer(x.swapaxes(1, 2).reshape(x.shape[0], 2, -1), (2,)).reshape(x.swapaxes(1, 2).shape)
        * C[:, None]
        + C[:, None],
    ),
    "instance_norm": (lambda x, i: F.instance_norm(x.mT), lambda x, i: layer(x.swapaxes(1, 2), (2,))),
    "batch_norm": (
        lambda x, i: F.batch_norm(x.mT, C, C, C, C),
        lambda x, i: ((x - C) / np.sqrt(C + 1e-5) * C + C).swapaxes(1, 2),
    ),
    "normalize": (lambda x, i: F.normalize(x, dim=-1), lambda x, i: x / np.sqrt((x * x).sum(-1, keepdims=True))),
    "linear of integers": (
        lambda x, i: F.linear(i[..., None], np.arange(3)[:, None]),
        lambda x, i: i[..., None] * np.arange(3),
    ),
}  # fmt: skip


class All(nn.Module):
    def forward(self, x: Any, i: Any) -> Any:
        return [ours(x, i) for ours, _ in CASES.values()]


def inputs(b: int, s: int) -> tuple[Any, Any]:
    rng = np.random.default_rng([b, s])
    return rng.standard_normal((b, s, 6)).astype(np.float32), rng.integers(0, 6, (b, s))


@pytest.fixture(scope="module")
def results() -> list[tuple[tuple[int, int], Any]]:
    fast = mp.compile(All(), mp.spec("b", "s", 6), mp.spec("b", "s", dtype="i64"))
    found = [((b, s), fast(*inputs(b, s))) for b, s in SIZES]
    assert fast.stats.compiles == 1
    return found


def check(got: Any, want: Any) -> None:
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for a, b in pairs:
        a = np.asarray(a)
        assert a.shape == b.shape and (a.dtype.kind == "f") == (b.dtype.kind == "f")
        relative, absolute = tolerance(a.dtype.name if a.dtype.kind != "b" else "bool", "matmul")
        np.testing.assert_allclose(a, b, rtol=relative * 8, atol=absolute * 8)


@pytest.mark.parametrize("name", CASES)
def test_function(name: str, results: list[tuple[tuple[int, int], Any]]) -> None:
    ours, wanted = CASES[name]
    at = list(CASES).index(name)
    for (b, s), compiled in results:
        x, i = inputs(b, s)
        want = wanted(x.astype(np.float64), i)
        eager = ours(mp.Tensor(x), mp.Tensor(i))
        check([t.numpy() for t in eager] if isinstance(want, tuple) else eager.numpy(), want)
        check(compiled[at], want)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)

    def forward(self, ids: Any, cache: Any) -> Any:
        rows = self.table(ids).reshape(*ids.shape, 2, 4)
        keys, values = cache.update(0, rows, rows)
        return keys.sum() + values.sum()


def test_after_an_error_a_cache_is_as_it_was() -> None:
    fast = mp.compile(Cached())
    for ids, lengths, message in (
        ([[1, 2], [3, 5]], [0, 0], "index 5 at position"),  # an earlier step
        ([[1, 2], [3, 4]], [0, 3], "sequence 1 needs 5 positions, the cache has 4"),  # another sequence
    ):
        cache = nn.KVCache(1, 2, 2, 4, capacity=4)
        cache.advance(np.array(lengths))
        with pytest.raises(mp.MonoplanError, match=message):
            fast(np.array(ids), cache)
        assert not cache.k[0].numpy().any() and not cache.v[0].numpy().any() and cache.lengths.tolist() == lengths
    cache = nn.KVCache(1, 2, 2, 4, capacity=4)
    assert fast(np.array([[1, 2], [3, 4]]), cache).shape == () and cache.k[0].numpy()[:, :, :2].all()


def test_after_an_error_the_cache_of_a_language_model_is_as_it_was() -> None:
    """Products that write keys and values themselves."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=40,
        max_position_embeddings=12,
    )
    fast = mp.compile(LlamaForCausalLM.from_config(config, seed=1))
    cache = fast.new_cache(2, 8)
    with pytest.raises(mp.MonoplanError, match=r"index 40 at position \[0, 1\]"):
        fast(np.array([[1, 40], [2, 3]]), past_key_values=cache)
    assert not any(t.numpy().any() for t in (*cache.k, *cache.v))
