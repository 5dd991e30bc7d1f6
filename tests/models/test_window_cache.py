"""Caches whose layers keep only their window: the same bits, in memory that the window bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend.kv_cache import MARGIN, STEP, KVCache, WindowKVCache
from monoplan.ir.errors import ArgumentError
from monoplan.models import LlamaConfig, LlamaForCausalLM
from monoplan.models.generate.generation import Session, bounded_layers
from monoplan.models.generate.speculation import Ledger

WINDOW, LIMIT = 20, 6000
IDS = np.random.default_rng(0).integers(2, 60, LIMIT)


def config(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    made = {"vocab_size": 60, "max_position_embeddings": LIMIT, "sliding_window": WINDOW, "layer_types": kinds}
    return LlamaConfig(**{**sizes, **made, "num_key_value_heads": 1, "initializer_range": 0.5, **changes})


@pytest.fixture(scope="module")
def lm() -> Any:
    return mp.compile(LlamaForCausalLM.from_config(config(), seed=5), options={"prefill_chunk": 512})


def whole_cache(lm: Any, batch: int = 1) -> KVCache:
    """A cache that keeps all tokens in all layers."""
    c = lm.config
    return KVCache(c.num_hidden_layers, batch, 1, c.head_dim, 16, dtype=lm.cache_dtype, limit=LIMIT)


def run(lm: Any, cache: Any, counts: list[int]) -> list[Any]:
    """Logits behind pieces of IDS."""
    ends = np.cumsum(counts) + int(cache.lengths.numpy()[0])
    return [lm(IDS[None, end - n : end], None, cache) for end, n in zip(ends, counts, strict=True)]


def test_bits_are_those_of_a_cache_that_keeps_all(lm: Any) -> None:
    ours, theirs = lm.new_cache(), whole_cache(lm)
    assert isinstance(ours, WindowKVCache) and ours.bounded == (0, 2)
    counts = [1500, 1, 1, 9, 700, *[1] * 20, 2000, 1, *[2] * 30]
    np.testing.assert_array_equal(run(lm, ours, counts), run(lm, theirs, counts))
    start = int(ours.starts.numpy()[0])
    assert start % STEP == 0 and 2 * STEP <= start < sum(counts) - WINDOW
    assert ours.k[0].shape[2] <= ours.most == WINDOW + MARGIN + 2 * STEP < ours.k[1].shape[2] == theirs.k[0].shape[2]


def test_rows_slide_for_themselves(lm: Any) -> None:
    ids, valid = np.stack([IDS[:1300], IDS[1300:2600]]), np.array([1300, 400], np.int32)
    ours, theirs = lm.new_cache(2), whole_cache(lm, 2)
    for more in range(3):
        both = [lm(ids, None, cache, num_valid=valid) for cache in (ours, theirs)]
        np.testing.assert_array_equal(*both, err_msg=f"call {more}")
    assert ours.starts.numpy().tolist() == [3072, 1024] and ours.lengths.numpy().tolist() == [3900, 1200]
    one = ours.select([0])
    lm(IDS[None, :1], None, one)
    assert one.starts.numpy().tolist() == [3072] and ours.lengths.numpy().tolist() == [3900, 1200]


def test_what_can_be_taken_back(lm: Any) -> None:
    cache, again = lm.new_cache(), lm.new_cache()
    wanted = run(lm, cache, [2500, 1, 1])
    start = int(cache.starts.numpy()[0])
    assert start > 0
    assert cache.can_keep(start + WINDOW - 1) and not cache.can_keep(start + WINDOW - 2) and cache.can_keep(0)
    with pytest.raises(ArgumentError, match=f"its windows begin at token {start}"):
        cache.truncate(start)
    assert cache.lengths.numpy().tolist() == [2502], "a refused call changes nothing"
    cache.truncate(2501)
    np.testing.assert_array_equal(run(lm, cache, [1])[0], wanted[-1])
    cache.truncate(0)
    np.testing.assert_array_equal(run(lm, cache, [40])[0], run(lm, again, [40])[0])


def text(lm: Any, prompt: Any, count: int, **settings: Any) -> list[int]:
    stream = lm.generate(prompt, count, eos_token_id=(), **settings)
    for _ in stream:
        pass
    return list(stream.result.ids)


def test_drafts_and_sessions_change_nothing(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = IDS[:50].tolist() * 22
    wanted, session = text(lm, prompt, 40), Session()
    assert text(lm, prompt, 40, session=session) == wanted
    follow = [*prompt, *wanted, *IDS[:1100].tolist()]
    assert text(lm, follow, 20, session=session) == text(lm, follow, 20)
    # What the windows of an earlier part saw is gone: its prompt runs again.
    assert session.shared(prompt[:300]) == 0
    assert text(lm, prompt[:300], 40, session=session) == text(lm, prompt[:300], 40)
    monkeypatch.setattr(Ledger, "may_try", True)
    monkeypatch.setattr(Ledger, "best", lambda self, chance, most, each=0.0: (2.0, most))
    assert text(lm, prompt, 40, lookup=True) == wanted


def test_short_contexts_keep_all() -> None:
    assert bounded_layers(config()) == (0, 2)
    assert bounded_layers(config(max_position_embeddings=WINDOW + MARGIN + 2 * STEP)) == ()
    assert bounded_layers(config(sliding_window=None, layer_types=None)) == ()


@pytest.mark.full
def test_saved_and_exported(lm: Any, tmp_path: Path) -> None:
    saved = mp.load(lm.save(tmp_path / "model.plan"))
    cache = saved.new_cache()
    assert isinstance(cache, WindowKVCache)
    np.testing.assert_array_equal(run(saved, cache, [2000, 1]), run(lm, lm.new_cache(), [2000, 1]))
    assert "past_key_values.starts" not in (lm.export(tmp_path / "out", chat=False) / "model.h").read_text()


def test_the_eager_model_takes_such_a_cache(lm: Any) -> None:
    cache = lm.model.new_cache(windows=True)
    for end in (1200, 2300, 2301):
        found = lm.model(IDS[None, int(cache.lengths.numpy()[0]) : end], None, cache)
    np.testing.assert_allclose(found.numpy(), run(lm, lm.new_cache(), [2301])[0], rtol=0, atol=2e-4)
    assert cache.starts.numpy().tolist() == [STEP]
