"""What forward writes: arguments that it replaces, caches that live through calls; and threads that share a plan."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor, call
from monoplan.ir.errors import ArgumentError
from tests.monoplan.test_api import Block, close, eager, normal


class Counter(Module):
    """Writes into its arguments."""

    def forward(self, state: Any, x: Any) -> Any:
        total = state["total"]
        y = total + x
        state["total"] = y
        return y * 2


def test_arguments_that_forward_replaces_are_written_back() -> None:
    fast = mp.compile(Counter())
    state = {"total": np.zeros(3, np.float32)}
    mine = state["total"]
    for i in range(1, 4):
        close(fast(state, np.ones(3, np.float32)), np.full(3, 2.0 * i))
        assert state["total"] is mine and (mine == i).all()
    strided = {"total": np.zeros(6, np.float32)[::2]}
    fast(strided, np.ones(3, np.float32))
    assert (strided["total"] == 1).all()
    read_only = {"total": np.zeros(3, np.float32)}
    read_only["total"].flags.writeable = False
    with pytest.raises(ArgumentError, match="argument state.total: forward writes into it, but the array is read-only"):
        fast(read_only, np.ones(3, np.float32))
    tensors = {"total": Tensor(np.zeros(3, np.float32))}
    fast(tensors, np.ones(3, np.float32))
    assert (tensors["total"].numpy() == 1).all()


class Remember(Module):
    """Attention over all tokens so far."""

    def forward(self, x: Any, cache: Any) -> Any:
        batch, seq, _ = x.shape
        h = x.view(batch, seq, 2, 4)
        past = cache.lengths
        k, v = cache.update(0, h, h + 1)
        y = call("attention", h.transpose(1, 2), k, v, None, past, causal=True)
        cache.advance(seq)
        return y


def test_a_cache_lives_through_calls() -> None:
    module = Remember()
    fast = mp.compile(module)
    ours, theirs = (mp.KVCache(1, 2, 2, 4, capacity=6) for _ in range(2))
    storage = ours.k[0].numpy()
    for i, seq in enumerate((3, 1, 2)):
        x = normal(2, seq, 8, seed=i)
        close(fast(x, ours), module(Tensor(x), theirs))
    close(ours.k[0].numpy(), theirs.k[0])
    assert ours.k[0].numpy() is storage and ours.lengths.tolist() == [6, 6]
    before = storage.copy()
    with pytest.raises(ArgumentError, match="kv_update: sequence 0 needs 7 positions, the cache has 6"):
        fast(normal(2, 1, 8), ours)
    assert ours.lengths.tolist() == [6, 6]
    np.testing.assert_array_equal(storage, before)
    ours.reserve(2)
    theirs.reserve(2)
    x = normal(2, 2, 8)
    close(fast(x, ours), module(Tensor(x), theirs))
    storage.flags.writeable = False
    with pytest.raises(ArgumentError, match="argument cache.k.0: forward writes into it, but the array is read-only"):
        locked = mp.KVCache(1, 2, 2, 4, capacity=6)
        locked.k[0] = Tensor(storage)
        fast(x, locked)


def test_two_threads_may_call_one_plan() -> None:
    block = Block(64, 64)
    fast = mp.compile(block)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(30):
            x = normal(1 + (seed + i) % 5, 64, seed=seed * 100 + i)
            got, want = fast(x), eager(block, x).numpy()
            if not np.allclose(got, want, rtol=1e-4, atol=1e-4):
                wrong.append(f"{seed} {i}")

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and fast.stats.compiles <= 2
