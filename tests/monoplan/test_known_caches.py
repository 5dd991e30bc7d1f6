"""A KV cache as an argument of calls like earlier ones: grown, cut, selected, replaced in part."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.api import Compiled
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from tests.monoplan.test_state import Remember

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def remember() -> Compiled:
    cache = mp.KVCache.tree_unflatten(
        {
            "k": [mp.spec("b", 2, "capacity", 4)],
            "v": [mp.spec("b", 2, "capacity", 4)],
            "lengths": mp.spec("b", dtype="int32"),
        },
        (None,),
    )
    made: Compiled = mp.compile(Remember(), mp.spec("b", "s", 8), cache)
    return made


def new_cache(batch: int = 1, capacity: int = 4) -> Any:
    return mp.KVCache(1, batch, 2, 4, capacity=capacity)


def token(seed: int, batch: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((batch, 1, 8)).astype(np.float32)


def test_a_cache_that_is_grown_cut_selected_and_cleared(remember: Compiled, long_way: list[Any]) -> None:
    ours, theirs = new_cache(2), new_cache(2)

    def both(seed: int) -> None:
        x = token(seed, ours.batch)
        np.testing.assert_allclose(remember(x, ours), remember.module(Tensor(x), theirs).numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours.k[0].numpy(), theirs.k[0].numpy(), rtol=1e-6)
        assert ours.lengths.tolist() == theirs.lengths.tolist()

    for i in range(4):
        both(i)
    with pytest.raises(ArgumentError, match="needs 5 positions, the cache has 4"):
        remember(token(4, 2), ours)
    for cache in (ours, theirs):
        cache.reserve(1)
    for i in range(4, 8):
        both(i)
    for cache in (ours, theirs):
        cache.truncate([3, 6])
    both(8)
    ours, theirs = ours.select([1, 1, 0]), theirs.select([1, 1, 0])
    both(9)
    for cache in (ours, theirs):
        cache.reset()
    both(10)
    assert len(long_way) == 3  # two capacities, and three rows


def test_a_cache_whose_tensors_are_replaced(remember: Compiled) -> None:
    cache, x = new_cache(), token(1)
    remember(x, cache)
    other = np.zeros((1, 2, 4, 4), np.float32)
    cache.k[0] = Tensor(other)
    remember(x, cache)
    assert other[0, :, 1].any() and not other[0, :, 0].any()
    cache.k[0] = Tensor(np.zeros((1, 2, 4, 4), np.float64))
    with pytest.raises(ArgumentError, match=r"argument cache.k.0: expected f32\[b, .* got dtype float64"):
        remember(x, cache)
    cache.k[0] = Tensor(np.zeros((1, 2, 5, 4), np.float32))
    with pytest.raises(ArgumentError, match=r"argument cache.v.0: expected .* got size 4 at dimension 2, not 5"):
        remember(x, cache)
    plain = np.zeros((1, 2, 4, 4), np.float32)
    cache.k[0] = plain  # an array, no Tensor
    remember(x, cache)
    assert plain[0, :, 2].any()
    strided = np.zeros((1, 2, 8, 4), np.float32)[:, :, ::2]
    cache.k[0], cache.lengths = Tensor(strided), Tensor(np.zeros(1, np.int32))
    remember(x, cache)
    assert strided[0, :, 0].any()
    strided = np.zeros((1, 2, 4, 4), np.float32)
    cache.k[0] = Tensor(strided)
    strided.flags.writeable = False
    with pytest.raises(ArgumentError, match="argument cache.k.0: forward writes into it, but the array is read-only"):
        remember(x, cache)


def test_a_limit_is_part_of_the_structure(remember: Compiled) -> None:
    remember(token(0), new_cache())
    with pytest.raises(ArgumentError, match=r"cache: expected KVCache with \(None,\), got KVCache with \(4,\)"):
        remember(token(0), mp.KVCache(1, 1, 2, 4, capacity=4, limit=4))
    with pytest.raises(ArgumentError, match=r"argument cache.k: expected a list of 1, got a list of 2"):
        remember(token(0), mp.KVCache(2, 1, 2, 4, capacity=4))


def test_a_cache_of_ones_own(remember: Compiled) -> None:
    """A subclass may flatten itself in its own way."""

    class Own(mp.KVCache):
        pass

    own = Own(1, 1, 2, 4, capacity=4)
    remember(token(0), new_cache())
    with pytest.raises(ArgumentError, match="argument cache: expected KVCache, got Own"):
        remember(token(0), own)
    lazy = mp.compile(Remember())
    for i in range(1, 3):
        lazy(token(i), own)
        assert own.lengths.tolist() == [i]


def test_an_old_cache_is_freed(remember: Compiled) -> None:
    """Growing frees the arrays one by one: nothing else may hold them."""
    cache = new_cache()
    remember(token(0), cache)
    gone = weakref.ref(cache.k[0].numpy())
    cache.reserve(8)
    assert gone() is None and cache.capacity == 16
