"""Prompts in pieces: what each run gets, and that the results are those of the prompt as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from monoplan.models import LlamaForCausalLM
from monoplan.models.generate.decoding import padded, pieces
from tests.models.support import tiny_config

LENGTHS = (70, 1, 33)


def run(ids: Any, valid: Any, chunk: int, start: Any = 0) -> tuple[list[Any], dict[tuple[int, int], int], Any]:
    """Pieces of a prompt, what each place of the cache holds in the end, and the cache."""
    cache = KVCache(1, len(ids), 1, 1)
    cache.advance(np.broadcast_to(start, len(ids)).astype(np.int32))
    found, places = [], {}
    for piece, count in pieces(ids, valid, cache, chunk):
        found.append((piece, count))
        for row, n in enumerate(count):
            for i in range(n):
                places[row, int(cache.lengths.numpy()[row]) + i] = int(piece[row, i])
        cache.advance(count)
    return found, places, cache


@pytest.mark.parametrize("chunk", [1, 7, 16, 60, 10**6])
def test_every_token_arrives_once_at_its_place(chunk: int) -> None:
    rows = [[100 * r + i for i in range(n)] for r, n in enumerate(LENGTHS)]
    ids, valid = padded(rows)
    found, places, cache = run(ids, valid, chunk, start=[5, 0, 2])
    want = {(r, s + i): t for r, (s, row) in enumerate(zip((5, 0, 2), rows, strict=True)) for i, t in enumerate(row)}
    assert places == want
    assert cache.lengths.numpy().tolist() == [75, 1, 35]
    assert all(piece.size <= max(chunk, len(rows)) and (count >= 1).all() for piece, count in found)
    last, count = found[-1]  # its results are those of the last tokens of all rows
    assert [int(last[r, count[r] - 1]) for r in range(3)] == [row[-1] for row in rows]


def test_a_prompt_that_fits_is_one_piece_and_others_are_equal_ones() -> None:
    ids = np.arange(100)[None]
    sizes = [[piece.shape[1] for piece, _ in run(ids, np.array([100]), chunk)[0]] for chunk in (100, 99, 40)]
    assert sizes == [[100], [50, 50], [34, 34, 32]]


def model(dtype: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_config(tiny_config(dtype=dtype, max_position_embeddings=256), seed=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_cache_equal_those_of_the_whole_prompt(dtype: str) -> None:
    lm = model(dtype)
    whole, parts = mp.compile(lm), mp.compile(lm, options={"prefill_chunk": 48})
    rng = np.random.default_rng(0)
    ids, valid = padded([rng.integers(0, lm.config.vocab_size, n).tolist() for n in LENGTHS])
    caches = [whole.new_cache(3), parts.new_cache(3)]
    (want, got) = (c.step(ids, k, valid)["logits"] for c, k in zip((whole, parts), caches, strict=True))
    error = {"float32": 1e-5, "bfloat16": 0.03}[dtype]
    np.testing.assert_allclose(got, want, rtol=error, atol=error)
    assert caches[0].lengths.numpy().tolist() == caches[1].lengths.numpy().tolist() == list(LENGTHS)
    for a, b in zip((*caches[0].k, *caches[0].v), (*caches[1].k, *caches[1].v), strict=True):
        for row, n in enumerate(LENGTHS):
            x, y = (t.numpy()[row, :, :n].astype(np.float32) for t in (a, b))
            np.testing.assert_allclose(x, y, rtol=error, atol=error)


def test_generation_in_pieces() -> None:
    lm = model("float32")
    prompts = [list(range(1, 60)), [3], list(range(20, 44))]
    want = [r.ids for r in mp.compile(lm).generate_batch(prompts, 6)]
    assert [r.ids for r in mp.compile(lm, options={"prefill_chunk": 10}).generate_batch(prompts, 6)] == want
    lm.prefill_chunk = 25
    assert [r.ids for r in lm.generate_batch(prompts, 6)] == want


def test_the_cache_of_a_caller_goes_on(rng: np.random.Generator) -> None:
    lm = model("float32")
    parts, whole = mp.compile(lm, options={"prefill_chunk": 16}), mp.compile(lm)
    ids = rng.integers(0, lm.config.vocab_size, (2, 90))
    cache = parts.new_cache(2)
    parts(ids[:, :41], past_key_values=cache)
    got = parts(ids[:, 41:], past_key_values=cache)
    np.testing.assert_allclose(got, whole(ids), rtol=1e-4, atol=1e-5)


def test_a_chunk_is_a_number() -> None:
    with pytest.raises(ArgumentError, match="prefill_chunk must be a whole number above 0, got 0"):
        mp.compile(model("float32"), options={"prefill_chunk": 0})


def test_tensors_of_lengths_are_not_shared() -> None:
    cache = KVCache(1, 2, 1, 1)
    cache.lengths = Tensor(np.array([3, 4], np.int32))
    list(pieces(np.zeros((2, 5), np.int64), np.array([5, 1], np.int32), cache, 4))
    assert cache.lengths.numpy().tolist() == [3, 4]


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}  # fmt: skip
BY_LENGTH = {  # angles of these follow the length from 32 tokens on
    "dynamic": {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
    "longrope": {"max_position_embeddings": 256, "rope_scaling": LONGROPE},
}


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_a_prompt_stays_whole_where_its_angles_follow_its_length(kind: str, rng: np.random.Generator) -> None:
    lm = LlamaForCausalLM.from_config(tiny_config(**BY_LENGTH[kind]), seed=2)
    whole, parts = mp.compile(lm), mp.compile(lm, options={"prefill_chunk": 16})
    rows = [rng.integers(0, lm.config.vocab_size, n).tolist() for n in (100, 40, 5)]
    alone = [whole(np.array([row]))[0] for row in rows]
    ids, valid = padded(rows)
    np.testing.assert_allclose(parts(ids, num_valid=valid), alone, rtol=1e-4, atol=1e-5)
    want = [whole.generate_ids(row, 4) for row in rows]
    assert [r.ids for r in parts.generate_batch(rows, 4)] == want
    lm.prefill_chunk = 16
    assert [r.ids for r in lm.generate_batch(rows, 4)] == want


@pytest.mark.parametrize(
    ("kind", "start", "count", "number"),
    [
        ("dynamic", 0, 32, 2),
        ("dynamic", 0, 33, 1),
        ("dynamic", 40, 32, 1),
        ("longrope", 0, 32, 2),
        ("longrope", 0, 33, 1),
        ("longrope", 31, 32, 1),
        ("longrope", 32, 32, 2),
    ],
)
def test_prompts_are_still_cut_where_the_angles_stay_the_same(kind: str, start: int, count: int, number: int) -> None:
    cache = KVCache(1, 1, 1, 1)
    cache.advance(start)
    found = pieces(np.zeros((1, count), np.int64), np.array([count]), cache, 16, tiny_config(**BY_LENGTH[kind]))
    assert len(list(found)) == number
