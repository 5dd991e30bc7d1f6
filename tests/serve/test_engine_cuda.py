"""The engine on a GPU: pages that stay in its memory. On an emulated device that does all work as late as it may, and
with -m cuda on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend.kv_cache import PagedKVCache
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.tolerances import tolerance
from monoplan.llm import PAGE, CompiledLM
from monoplan.runtime.cuda import device as cuda_device
from monoplan.runtime.cuda import executable as cuda
from monoplan.serve.choice import choice_arrays
from monoplan.serve.engine import Engine
from tests.codegen import cuda_emulator
from tests.models.test_device_generation import tiny_lm
from tests.needs import needs
from tests.serve.test_engine import Answer, ask


@pytest.fixture(
    params=[pytest.param("late", marks=[needs("g++"), pytest.mark.full]), pytest.param("gpu", marks=pytest.mark.cuda)]
)
def lm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledLM]:
    if request.param == "gpu":
        cuda_device.gpu()
    else:
        made = cuda_emulator.LateDevice(library=True)
        monkeypatch.setattr(cuda, "gpu", lambda: made)
    yield mp.compile(tiny_lm("bfloat16", head_dim=64, num_attention_heads=2, num_key_value_heads=1), target="cuda")


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 60, count).tolist()


def test_texts_are_those_of_a_single_stream(lm: CompiledLM) -> None:
    """Sums of a batch have another order than those of one row: texts are equal where no two tokens are as likely."""
    prompts = [prompt(1, 5), prompt(2, 70), prompt(1, 5) + prompt(3, 3)]
    want = [lm.generate_batch([p], 6)[0].ids for p in prompts]
    with Engine(lm, streams=3, cache_tokens=4 * PAGE) as engine:
        answers = [ask(engine, p, 6, temperature=0) for p in prompts]
        assert [a.wait_ids() for a in answers] == want
        # The first 40 tokens of a page that another text has: its rows are copied on the device.
        again = ask(engine, prompts[1][:40] + prompt(4, 3), 4, temperature=0)
        again.wait()
        assert again.request is not None and again.request.cached_tokens == 40
        (alone,) = lm.generate_batch([prompts[1][:40] + prompt(4, 3)], 4)
        assert again.ids == alone.ids
        assert not any(cache.numpy().any() for cache in (*engine._k, *engine._v))  # nothing came back to the host
        engine._executable.sync()
        assert all(np.isfinite(cache.numpy().astype(np.float32)).all() for cache in engine._k)
        assert any(cache.numpy().any() for cache in engine._k)


def test_the_host_runs_ahead(lm: CompiledLM) -> None:
    """Texts that end at different times, draw, wait for room or leave: each is what it is alone, and no other."""
    settings = [{}, {"temperature": 0.8, "seed": 5, "top_k": 9}, {}, {"logprobs": 2}, {"temperature": 1.1, "seed": 1}]
    asked = [(prompt(10 + i, 3 + 9 * i), 4 + 3 * i, s) for i, s in enumerate(settings)]
    plain = [{k: v for k, v in s.items() if k != "logprobs"} for s in settings]
    want = [lm.generate_batch([p], n, eos_token_id=(), **s)[0].ids for (p, n, _), s in zip(asked, plain, strict=True)]
    with Engine(lm, streams=4, cache_tokens=3 * PAGE, step_tokens=24) as engine:
        answers = [ask(engine, p, n, **s) for p, n, s in asked]
        gone = ask(engine, prompt(1, 5), 40)
        assert gone.request is not None
        engine.cancel(gone.request)
        assert [answer.wait_ids() for answer in answers] == want
        assert all(a.wait().finish_reason == "length" for a in answers) and gone.wait().finish_reason == "cancelled"
        stop = want[2][4]
        early = ask(engine, asked[2][0], 30, eos_ids=frozenset({stop}))  # a run for its next token is under way then
        beside = ask(engine, asked[4][0], 12)
        assert early.wait().finish_reason == "eos" and early.ids[:-1] == want[2][: want[2].index(stop)]
        assert beside.wait_ids() == lm.generate_batch([asked[4][0]], 12, eos_token_id=())[0].ids
        assert engine._runs and engine.pool.usage == 0


def test_an_embedding_shares_the_pages(lm: CompiledLM) -> None:
    ids, on_host = prompt(5, 70), mp.compile(lm.model, target="cpu")
    vectors = []
    for one in (lm, on_host):
        with Engine(one, streams=2, cache_tokens=4 * PAGE, step_tokens=48) as engine:
            answer = ask(engine, ids[:66], 3, temperature=0)
            request = engine.embed(ids, done := Answer())
            done.wait()
            vectors.append(request.vector)
            assert answer.wait_ids() == one.generate_batch([ids[:66]], 3)[0].ids
    relative, absolute = tolerance("bf16", "model")
    np.testing.assert_allclose(vectors[0], vectors[1], relative, absolute * 0.1)


def test_a_page_that_is_not_there(lm: CompiledLM) -> None:
    plan: Any = lm.paged_plan()
    caches = [[Tensor(np.zeros((3, 1, PAGE, 64), lm.cache_dtype.numpy)) for _ in range(2)] for _ in "kv"]
    with Engine(lm, streams=1, cache_tokens=PAGE) as engine:
        row = ask(engine, [1, 2], 1).request
    assert row is not None
    for number in (-1, 3):
        rows = Tensor(np.array([[0, number]], np.int32)), Tensor(np.array([63], np.int32))
        given = {"input_ids": np.array([[5, 6]]), "num_valid": np.array([2], np.int32), **choice_arrays([row])}
        with pytest.raises(ArgumentError, match=f"page {number} at place 1 of the table"):
            plan(past_key_values=PagedKVCache(*caches, *rows), **given)
