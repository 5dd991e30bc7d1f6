"""A model of SmolLM2's shape on a GPU: its text beside the CPU's, bits from replay to replay, batches, long prompts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.models.config import LlamaConfig
from monoplan.models.llama import LlamaForCausalLM

pytestmark = pytest.mark.cuda
SHAPE: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
PROMPTS = [[(37 * i + 11 * r) % 49152 for i in range(n)] for r, n in enumerate((9, 1, 140))]


@functools.cache
def model(dtype: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_config(LlamaConfig(**SHAPE, dtype=dtype), seed=4)


@functools.cache
def compiled(dtype: str, target: str = "cuda", **options: Any) -> Any:
    return mp.compile(model(dtype), target=target, options=options)


def assert_same_text(ours: list[int], theirs: list[int], prompt: list[int], dtype: str = "float32") -> None:
    """Equal, or different from a place on where the CPU's own logits of the two tokens are equal but for rounding."""
    different = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if different is None:
        return
    logits = compiled(dtype, "cpu")(np.array([prompt + theirs[:different]]))[0, 0].astype(np.float64)
    lead = logits[theirs[different]] - logits[ours[different]]
    shown = f"token {different} is {ours[different]} and not {theirs[different]}, which leads by {lead}"
    assert lead <= 1e-4 * logits.std(), shown


def test_text_in_f32_is_the_cpus() -> None:
    for prompt in PROMPTS:
        ours, theirs = (compiled("float32", t).generate_ids(prompt, 48, eos_token_id=()) for t in ("cuda", "cpu"))
        assert_same_text(ours, theirs, prompt)


def test_sampled_text_in_f32_is_the_cpus() -> None:
    settings = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.1}
    ours, theirs = (compiled("float32", t).generate_ids(PROMPTS[0], 24, **settings) for t in ("cuda", "cpu"))
    assert ours[:8] == theirs[:8]  # later a draw may fall on another side of a sum that was rounded otherwise
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 1}], ids=["greedy", "sampled"])
def test_both_paths_give_the_same_tokens(dtype: str, settings: dict[str, Any]) -> None:
    stays, travels = compiled(dtype), compiled(dtype, resident=False)
    for prompts in (PROMPTS[:1], PROMPTS):
        a, b = (lm.generate_batch(prompts, 24, eos_token_id=(), **settings) for lm in (stays, travels))
        assert [r.ids for r in a] == [r.ids for r in b]


def test_tokens_alone_and_in_a_batch() -> None:
    """Kernels for several rows sum in another order: in f32 that changes no token but in a tie."""
    batch = compiled("float32").generate_batch(PROMPTS, 16, eos_token_id=())
    for prompt, row in zip(PROMPTS, batch, strict=True):
        assert_same_text(row.ids, compiled("float32").generate_ids(prompt, 16, eos_token_id=()), prompt)


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_two_hundred_replays_are_bitwise_equal(batch: int) -> None:
    lm = compiled("bfloat16")
    rng = np.random.default_rng(batch)
    lengths = rng.integers(20, 100, batch).astype(np.int32)
    arguments = lm.step_arguments(rng.integers(0, 49152, (batch, 1)))
    cache = arguments["past_key_values"]
    for tensors in (cache.k, cache.v):
        for i, t in enumerate(tensors):
            shape = (*t.shape[:2], 128, t.shape[3])
            tensors[i] = mp.Tensor(rng.normal(size=shape).astype(t.numpy().dtype))
    built, _, arrays, symbols = lm.compiled._bind((), arguments)
    names = [v.name for v in built.graph.inputs]
    arrays[names.index("past_key_values.lengths")] = lengths
    built.executable.resident = True
    try:
        first = [np.array(a) for a in built.run(arrays, symbols)[:3]]
        assert np.isfinite(first[2]).all()
        for _ in range(200):
            for a, b in zip(first, built.run(arrays, symbols), strict=False):
                assert a.tobytes() == np.asarray(b).tobytes()
    finally:
        built.executable.resident = False


def test_long_prompts_in_pieces() -> None:
    prompt = [(7 * i) % 49152 for i in range(3000)]
    whole, parts = compiled("float32", prefill_chunk=4096), compiled("float32", prefill_chunk=512)
    (a,), (b,) = (lm.generate_batch([prompt], 8, eos_token_id=()) for lm in (whole, parts))
    assert_same_text(a.ids, b.ids, prompt)


def test_caches_grow_on_the_device() -> None:
    lm = compiled("bfloat16")
    grown = lm.generate_ids(PROMPTS[0], 1200, eos_token_id=())  # more than a new cache has room for
    assert len(grown) == 1200 and grown[:100] == lm.generate_ids(PROMPTS[0], 100, eos_token_id=())
