"""Keys and values in 8 bits: rows and their scales, steps against the reference, and everything that moves a cache."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend.kv_cache import KVCache
from monoplan.ir.cache_rows import packed_rows, unpacked_rows
from monoplan.ir.errors import ArgumentError
from monoplan.models import LlamaConfig, LlamaForCausalLM
from monoplan.serve.engine import Engine
from monoplan.serve.request import Sampling

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=None,
)
BYTES = {"kv_dtype": "int8"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_config(CONFIG, seed=5)


@pytest.fixture(scope="module")
def llm(model: LlamaForCausalLM) -> Any:
    return mp.compile(model, options=BYTES)


def test_a_row_keeps_its_numbers() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 5, 64)) * np.array([1e-30, 1.0, 1e30])[:, None, None]
    rows[0, 0] = 0
    kept = packed_rows(rows)
    assert kept.dtype == np.int8 and kept.shape == (3, 5, 68)
    step = np.abs(rows).max(-1, keepdims=True) / 127
    assert (np.abs(unpacked_rows(kept) - rows) <= 0.5001 * step).all()
    rows[1, 2, 3], rows[2, 4, 5] = np.nan, np.inf
    lost = np.isnan(unpacked_rows(packed_rows(rows)))
    assert lost[1, 2].all() and lost[2, 4].all() and lost.sum() == 2 * 64


def test_steps_are_those_of_the_reference(llm: Any) -> None:
    """In one kernel with the product, in rolled layers; verify and bisect read the bytes for what they mean."""
    names = [op.name for op in llm.compiled.built[0][2].stages[-1].graph.ops]
    assert "qkv_rope_cache" in names and "repeat_layers" in names
    ids = np.random.default_rng(1).integers(0, 61, (2, 19))
    assert llm.verify(ids).ok and llm.verify(ids[:, :1]).ok
    assert "are right" in str(llm.bisect(ids))


def test_verify_sees_a_wrong_byte(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llm.compiled.source()
    assert "mp_pack_row(" in source
    wrong = source.replace("mp_pack_row(to, sums", "sums[0] = 2 * sums[0] + 1; mp_pack_row(to, sums")
    assert not _edited(llm, wrong).verify().ok


def _edited(llm: Any, text: str) -> Any:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".c", delete=False) as file:
        file.write(text)
    made = mp.compile(llm._given, options={**BYTES, "source": file.name})
    made.compiled  # noqa: B018  (read the file now)
    Path(file.name).unlink()
    return made


def test_what_the_eager_model_computes(model: LlamaForCausalLM, llm: Any) -> None:
    ids = np.random.default_rng(2).integers(0, 61, (1, 30))
    ours, theirs = llm.new_cache(1, 32), model.new_cache(1, 32, dtype="int8")
    got = llm(ids, past_key_values=ours)
    want = model(ids, past_key_values=theirs).numpy()
    assert np.abs(got - want[:, -1:]).max() < 0.02 * np.abs(want).max()
    assert ours.head_dim == 16 and ours.k[0].shape[-1] == 20 and ours.nbytes == 4 * 2 * 2 * 32 * 20
    assert "dtype=i8" in repr(ours)


def test_a_cache_grows_and_moves_with_its_scales(llm: Any) -> None:
    ids = np.random.default_rng(3).integers(0, 61, (2, 40))
    small, large = llm.new_cache(2, 16), llm.new_cache(2, 64)
    for cache in (small, large):
        llm.step(ids, cache)
    chosen: KVCache = small.select([1, 0, 1]).clone()
    want = llm.step(ids[:, :1], large)["logits"]
    got = llm.step(ids[[1, 0, 1], :1], chosen)["logits"]
    np.testing.assert_array_equal(got, want[[1, 0, 1]])


def test_drafts_sessions_and_pages_give_the_same_tokens(llm: Any) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1]
    plain = llm.generate_ids(prompt, 24)
    drafted = llm.generate(prompt, max_new_tokens=24, lookup=True)
    list(drafted)
    assert drafted.result.ids == plain
    answers: list[int] = []
    ended = threading.Event()

    def take(piece: Any) -> None:
        answers.extend([piece.token.token] if piece.token is not None else [])
        if piece.finish_reason is not None:
            ended.set()

    with Engine(llm, streams=2, cache_tokens=256) as engine:
        engine.submit(prompt, Sampling(24), take)
        assert ended.wait(60)
    assert answers == plain


@pytest.mark.parametrize("given", ["int4", "i32", "float64", 8])
def test_other_types_are_refused(model: LlamaForCausalLM, given: Any) -> None:
    with pytest.raises(ArgumentError, match="kv_dtype=.* is no type for keys and values"):
        mp.compile(model, options={"kv_dtype": given})


def test_halves_may_be_asked_for(model: LlamaForCausalLM) -> None:
    assert mp.compile(model, options={"kv_dtype": "bfloat16"}).new_cache().dtype.name == "bf16"


def test_a_saved_model_keeps_the_type(llm: Any, tmp_path: Path) -> None:
    llm.save(tmp_path / "model.plan")
    loaded = mp.load(tmp_path / "model.plan")
    ids = np.array([[1, 2, 3]])
    np.testing.assert_array_equal(loaded(ids), llm(ids))
    assert loaded.new_cache().dtype.name == "i8"
