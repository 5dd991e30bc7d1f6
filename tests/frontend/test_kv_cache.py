"""KVCache: updates eager and traced, growth, limits, rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.pytree import NoOutline, flatten, outline, unflatten
from monoplan.frontend.specs import Spec, spec
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import ArgumentError
from monoplan.ir.interpreter import interpret
from monoplan.ir.types import bf16, i32, i64


def rows(rng: np.random.Generator, seq: int, batch: int = 2) -> np.ndarray:
    return rng.standard_normal((batch, seq, 2, 4)).astype(np.float32)


def test_updates(rng: np.random.Generator) -> None:
    cache = nn.KVCache(2, 2, 2, 4, capacity=8)
    storage = [t.numpy() for t in (*cache.k, *cache.v)]
    k, v = rows(rng, 3), rows(rng, 3)
    for layer in range(2):
        keys, values = cache.update(layer, k + layer, v)
        assert keys is cache.k[layer] and values is cache.v[layer] and keys.shape == (2, 2, 8, 4)
    assert cache.positions(3).tolist() == [[0, 1, 2]] * 2 and cache.positions(3).dtype is i64
    cache.advance(3)
    assert cache.lengths.tolist() == [3, 3] and cache.lengths.dtype is i32
    more = rows(rng, 2)
    cache.update(0, more, more, Tensor([2, 1]))
    cache.advance(np.array([2, 1]))
    assert cache.lengths.tolist() == [5, 4] and cache.positions(2).tolist() == [[5, 6], [4, 5]]
    np.testing.assert_array_equal(cache.k[0].numpy()[:, :, :3], k.swapaxes(1, 2))
    np.testing.assert_array_equal(cache.k[1].numpy()[:, :, :3], (k + 1).swapaxes(1, 2))
    np.testing.assert_array_equal(cache.v[0].numpy()[0, :, 3:5], more[0].swapaxes(0, 1))
    assert not cache.v[0].numpy()[1, :, 4:].any()
    for before, now in zip(storage, (*cache.k, *cache.v), strict=True):
        assert now.numpy() is before, "the storage stays in place"


def test_a_full_cache() -> None:
    cache = nn.KVCache(1, 2, 2, 4, capacity=4)
    cache.advance(3)
    before = cache.k[0].numpy().copy()
    with pytest.raises(ArgumentError, match="2 rows at position 3 of sequence 0 do not fit a cache of 4 positions"):
        cache.update(0, np.ones((2, 2, 2, 4), np.float32), np.ones((2, 2, 2, 4), np.float32))
    np.testing.assert_array_equal(cache.k[0].numpy(), before)


def test_growth(rng: np.random.Generator) -> None:
    cache = nn.KVCache(1, 2, 2, 4, capacity=4)
    k = rows(rng, 3)
    cache.update(0, k, k)
    cache.advance(Tensor([3, 1]))
    cache.reserve(1)
    assert cache.capacity == 4
    cache.reserve(2)
    assert cache.capacity == 8
    cache.reserve(30)
    assert cache.capacity == 64 and cache.lengths.tolist() == [3, 1]
    np.testing.assert_array_equal(cache.k[0].numpy()[:, :, :3], k.swapaxes(1, 2))
    assert not cache.k[0].numpy()[:, :, 3:].any() and cache.nbytes == 2 * 2 * 2 * 64 * 4 * 4


def test_limits() -> None:
    cache = nn.KVCache(1, 1, 1, 2, capacity=256, limit=10)
    assert cache.capacity == 10
    small = nn.KVCache(1, 1, 1, 2, capacity=4, limit=10)
    small.advance(4)
    small.reserve(6)
    assert small.capacity == 10, "doubling stops at the limit"
    with pytest.raises(ArgumentError, match="4 tokens and 7 more need 11 places, the limit is 10") as caught:
        small.reserve(7)
    assert "raise the limit" in caught.value.fix and small.capacity == 10


def test_between_calls(rng: np.random.Generator) -> None:
    cache = nn.KVCache(1, 3, 2, 4, capacity=8, dtype="bf16", limit=20)
    k = rows(rng, 5, batch=3)
    cache.update(0, k, k)
    cache.advance(Tensor([5, 2, 4]))
    copy = cache.clone()
    cache.truncate(3)
    assert cache.lengths.tolist() == [3, 2, 3] and copy.lengths.tolist() == [5, 2, 4]
    cache.truncate([0, 9, 1])
    assert cache.lengths.tolist() == [0, 2, 1]
    assert not np.shares_memory(copy.k[0].numpy(), cache.k[0].numpy()) and copy.dtype is bf16 and copy.limit == 20
    beams = copy.select([2, 2, 0, 1])
    assert beams.batch == 4 and beams.lengths.tolist() == [4, 4, 5, 2]
    np.testing.assert_array_equal(beams.k[0].numpy()[1], copy.k[0].numpy()[2])
    copy.reset()
    assert copy.lengths.tolist() == [0, 0, 0] and copy.capacity == 8
    for bad in ([3], [-1], []):
        with pytest.raises(ArgumentError, match="the cache has rows 0 to 2"):
            copy.select(bad)
    with pytest.raises(ArgumentError, match="can't keep -1"):
        copy.truncate(-1)
    assert repr(copy) == "KVCache(layers=1, batch=3, kv_heads=2, head_dim=4, capacity=8, dtype=bf16, limit=20)"


@pytest.mark.parametrize("sizes", [(0, 1, 1, 2), (1, 0, 1, 2), (1, 1, 1, 2, 0), (1, 1, 1, 2, 8, "f32", 0)])
def test_wrong_sizes(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match="must be"):
        nn.KVCache(*sizes)


class Attend(nn.Module):
    """A layer that turns its input into keys, values and queries, and looks back."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = nn.RoPE(4, 64, algo=nn.RoPE.Algo.GPT_NEOX)

    def forward(self, x: Any, cache: Any, num_valid: Any = None) -> Any:
        batch, seq = x.shape[:2]
        past, positions = cache.lengths, cache.positions(seq)
        h = self.rope(x.view(batch, seq, 2, 4), positions)
        for layer in range(cache.layers):
            k, v = cache.update(layer, h, h * 2.0, num_valid)
            y = F.scaled_dot_product_attention(h.transpose(1, 2), k, v, is_causal=True, past=past)
            h = h + y.transpose(1, 2)
        cache.advance(seq if num_valid is None else num_valid)
        return h


def specs(cache: Any) -> Any:
    """The cache with symbolic batch and capacity."""
    leaves, tree = flatten(cache)
    types = {"k": spec("batch", 2, "capacity", 4), "v": spec("batch", 2, "capacity", 4), "l": spec("batch", dtype=i32)}
    return unflatten(tree, [types[name[0]] for name, _ in leaves])


@pytest.mark.parametrize("with_valid", [False, True])
def test_traced_updates_are_the_eager_ones(with_valid: bool, rng: np.random.Generator) -> None:
    module, cache = Attend(), nn.KVCache(2, 2, 2, 4, capacity=16)
    valid_spec = spec("batch", dtype=i64) if with_valid else None
    traced = trace(module, spec("batch", "seq", 8), specs(cache), valid_spec)
    graph = traced.graph
    # x, two keys, two values, lengths (and the counts): all of the cache is written.
    assert traced.mutated == graph.writes == ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5))
    assert [v.name for v in graph.inputs][1:6] == ["cache.k.0", "cache.k.1", "cache.v.0", "cache.v.1", "cache.lengths"]
    params = {path: t.numpy() for path, t in traced.params.items()}
    for seq, counts in ((5, [5, 3]), (1, [1, 1]), (3, [0, 2])):
        x = rng.standard_normal((2, seq, 8)).astype(np.float32)
        extra = [np.array(counts)] if with_valid else []
        before = [leaf.numpy().copy() for _, leaf in flatten(cache)[0]]
        outs = interpret(graph, [x, *before, *extra], params)
        eager = module(x, cache, *extra).numpy()
        np.testing.assert_allclose(outs[0], eager, rtol=1e-6)
        for got, (name, leaf) in zip(outs[1:], flatten(cache)[0], strict=True):
            np.testing.assert_array_equal(got, leaf.numpy(), err_msg=name)
    assert cache.lengths.tolist() == ([6, 6] if with_valid else [9, 9])


def test_as_an_argument() -> None:
    cache = nn.KVCache(2, 1, 1, 2, capacity=4, limit=9)
    leaves, tree = flatten({"cache": cache})
    assert [n for n, _ in leaves] == ["cache.k.0", "cache.k.1", "cache.v.0", "cache.v.1", "cache.lengths"]
    again = unflatten(tree, [leaf for _, leaf in leaves])["cache"]
    assert again.limit == 9 and again.k[1] is cache.k[1] and again.lengths is cache.lengths
    assert flatten({"cache": nn.KVCache(2, 5, 1, 2, capacity=8, limit=9)})[1] == tree, "sizes are not structure"
    placeholders = unflatten(tree, [Spec(leaf.type) for _, leaf in leaves])["cache"]
    assert isinstance(placeholders.k[0], Spec)


def test_outline_and_bare_form() -> None:
    cache, arrays = nn.KVCache(2, 1, 1, 2, capacity=4, limit=9), []
    found = outline(cache, arrays)
    assert [id(a) for a in arrays] == [id(leaf.numpy()) for _, leaf in flatten(cache)[0]]
    assert found == outline(nn.KVCache(2, 5, 1, 2, capacity=8, limit=9), []), "sizes are not structure"
    assert found != outline(nn.KVCache(3, 1, 1, 2, limit=9), []) and found != outline(nn.KVCache(2, 1, 1, 2), [])
    bare = cache.without_limit()
    assert bare.limit is None and bare.k[1] is cache.k[1] and bare.lengths is cache.lengths and cache.limit == 9
    cache.k[1] = cache.k[1].numpy()  # type: ignore[call-overload]
    with pytest.raises(NoOutline):
        outline(cache, [])

    class Own(nn.KVCache):
        def tree_flatten(self) -> Any:
            return {"k": self.k[:1], "v": self.v[:1], "lengths": self.lengths}, (self.limit,)

    own = Own(2, 1, 1, 2)
    with pytest.raises(NoOutline):
        outline(own, [])
    assert own.without_limit().layers == 1
