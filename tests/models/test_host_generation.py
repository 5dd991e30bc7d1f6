"""Steps through the host: arrays that serve many steps, caches that change between them, several threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.ir.errors import ArgumentError
from monoplan.models import LlamaForCausalLM
from monoplan.models.generate.decoding import (
    HISTORY,
    Settings,
    greedy_arrays,
    random_value,
    sampling_arrays,
    whole_rows,
)
from monoplan.models.generate.generation import DRAWN
from tests.models.support import tiny_config

LONG = HISTORY + DRAWN + 10  # steps that need new room in a history, and new random numbers


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_config(tiny_config(max_position_embeddings=400), seed=5)


@pytest.fixture(scope="module")
def lm(model: LlamaForCausalLM) -> Any:
    return mp.compile(model)


def one_by_one(lm: Any, prompt: list[int], count: int, row: int = 0, **settings: Any) -> list[int]:
    """The plainest loop: every argument made anew for every step, random numbers one by one."""
    s = Settings(**settings)
    tokens, cache, ids = list(prompt), lm.new_cache(1, len(prompt)), np.array([prompt])
    for step in range(count):
        draw = random_value(s.seed, row, step) if s.temperature > 0 else 0.0
        choice = sampling_arrays(s, [draw], [tokens])
        valid = np.array([ids.shape[1]], np.int32)
        out = lm._run_step(input_ids=ids, past_key_values=cache, num_valid=valid, **choice)
        tokens.append(int(out["token"][0]))
        ids = np.array([tokens[-1:]])
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.3}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.8, "repetition_penalty": 1.2}],
    ids=str,
)
@pytest.mark.parametrize("prompt", [[7], [3, 4, 5, 6]], ids=["one", "four"])
def test_arrays_that_are_used_again_hold_what_new_ones_would(lm: Any, prompt: list[int], settings: Any) -> None:
    assert lm.generate_ids(prompt, LONG, eos_token_id=(), **settings) == one_by_one(lm, prompt, LONG, **settings)


def test_rows_that_leave_take_nothing_of_the_others(lm: Any) -> None:
    """Each row keeps its own random numbers and its own history when others end."""
    prompts, ends = [[3, 4, 5], [9], [6, 7], [8] * 70], {0: 4, 1: 30, 2: 90, 3: 9}

    def stop(row: int, token: int, piece: str) -> bool:
        counts[row] += 1
        return counts[row] < ends[row]

    for settings in ({"temperature": 0.9, "seed": 1}, {"temperature": 0.7, "repetition_penalty": 1.3}):
        counts = dict.fromkeys(ends, 0)
        found = lm.generate_batch(prompts, 200, callback=stop, eos_token_id=(), **settings)
        for row, result in enumerate(found):
            assert result.ids == one_by_one(lm, prompts[row], ends[row], row, **settings), row


def test_a_caller_may_use_one_array_for_all_tokens(lm: Any, model: LlamaForCausalLM) -> None:
    ids, ours, theirs = np.zeros((1, 1), np.int64), lm.new_cache(1, 4), model.new_cache(1, 4)
    for token in range(3, 40):  # the cache grows on the way
        ids[0, 0] = token
        want = np.asarray(model(np.array([[token]]), past_key_values=theirs))
        got = lm.step(ids, ours)["logits"] if token % 2 else lm(ids, past_key_values=ours)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    assert ours.capacity == theirs.capacity > 16 and ours.lengths.tolist() == [37]


def test_results_of_a_step_are_its_own(lm: Any) -> None:
    cache = lm.new_cache(1, 16)
    first = lm.step(np.array([[5]]), cache)
    kept = {name: a.copy() for name, a in first.items()}
    lm.step(np.array([[6]]), cache)
    assert all(np.array_equal(first[name], kept[name]) for name in first)


def test_caches_by_turns_cut_and_selected(lm: Any, model: LlamaForCausalLM) -> None:
    pairs = [(lm.new_cache(2, 8), model.new_cache(2, 8)), (lm.new_cache(2, 64), model.new_cache(2, 64))]

    def step(pair: Any, ids: Any) -> None:
        want = np.asarray(model(ids, past_key_values=pair[1]))
        np.testing.assert_allclose(lm.step(ids, pair[0])["logits"], want, rtol=2e-4, atol=2e-4)
        assert pair[0].lengths.tolist() == pair[1].lengths.tolist()

    for i in range(12):
        step(pairs[i % 2], np.array([[3 + i], [60 - i]]))
    for cache in pairs[0]:
        cache.truncate([2, 5])
    step(pairs[0], np.array([[3], [4]]))
    pairs[0] = (pairs[0][0].select([1]), pairs[0][1].select([1]))
    step(pairs[0], np.array([[8]]))
    step(pairs[1], np.array([[8], [9]]))
    for cache in pairs[0]:
        cache.reset()
    step(pairs[0], np.array([[8, 9, 10]]))
    step(pairs[0], np.array([[11]]))


def test_errors_come_as_ever(lm: Any) -> None:
    ids, cache = np.array([[5]]), lm.new_cache(1, 16)
    for _ in range(3):
        lm.step(ids, cache)
    cases: list[tuple[Any, str]] = [
        (lambda: lm.step(np.array([[999]]), cache), "index 999 at position"),
        (lambda: lm.step(ids, cache, np.array([2], np.int32)), "num_valid must be"),
        (lambda: lm.step(ids, cache, np.array([0], np.int32)), "num_valid must be"),
        (lambda: lm.step(ids, cache, np.array([1, 1], np.int32)), "num_valid must be"),
        (lambda: lm.step(ids.astype(np.int32), cache), "argument input_ids: expected i64"),
        (lambda: lm(np.array([[5], [6]]), past_key_values=cache), "2 rows, the cache 1"),
        (lambda: lm.step(np.array([[5], [6]]), cache), "batch"),
    ]
    for act, message in cases:
        with pytest.raises(ArgumentError, match=message):
            act()
    cache.v[1].numpy().flags.writeable = False
    with pytest.raises(ArgumentError, match="past_key_values.v.1: forward writes into it, but the array is read-only"):
        lm.step(ids, cache)
    cache.v[1].numpy().flags.writeable = True
    assert cache.lengths.tolist() == [3], "what failed counted no token"
    lm.step(ids, cache)
    short = mp.KVCache(2, 1, 2, 8, capacity=4, limit=4)
    for _ in range(4):
        lm.step(ids, short)
    with pytest.raises(ArgumentError, match="the limit is 4"):
        lm.step(ids, short)


def test_shared_arguments_stay_as_they_are(lm: Any) -> None:
    cache = lm.new_cache(1, 16)
    for _ in range(3):
        lm.step(np.array([[5]]), cache)
    fresh = sampling_arrays(Settings(), [0.0])
    assert all(np.array_equal(a, fresh[name]) for name, a in greedy_arrays(1).items())
    assert whole_rows(1, 1).tolist() == [1] and whole_rows(2, 5).tolist() == [5, 5]


def test_threads_with_caches_of_their_own(lm: Any) -> None:
    prompts = [[3 + i, 40 - i] for i in range(4)]
    alone = [lm.generate_ids(p, 40, eos_token_id=()) for p in prompts]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        cache, ids, out = lm.new_cache(1, 16), np.array([prompts[i]]), []
        for _ in range(40):
            out.append(int(lm.step(ids, cache)["token"][0]))
            ids = np.array([out[-1:]])
        found[i] = out

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [found.get(i) for i in range(4)] == alone
