"""The LLaMA modules against logits that Hugging Face transformers gave, and their own manners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend import functional as F
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import ArgumentError
from monoplan.models import LlamaForCausalLM
from monoplan.models.generate.generation import step_specs
from monoplan.models.llama import grouped_query_attention, multi_head_attention, repeat_kv
from tests.matrices import partly
from tests.models.support import CASES, Golden, tiny_config

# Each shape is a plan of its own, which takes seconds to build: these stand for the rest, nightly runs them all.
ALWAYS = ("cached", "qwen3_bias", "mistral_window")
COMPILED = ("cached", "mistral_window_cached", "qwen3_bias", "rope_dynamic_cached")


def compiled(some: Sequence[str]) -> list[Any]:
    """All cases, of which plans are made of a few always, of some by `full`, of all by `nightly`."""
    rest = [pytest.param(case, marks=pytest.mark.nightly) for case in CASES if case not in some]
    return [*partly(some, lambda case: case in ALWAYS), *rest]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    golden = Golden(case)
    model = golden.model()
    for record in range(len(golden.arrays["input_ids"])):
        out = golden.run(model, record)
        np.testing.assert_allclose(out, golden.arrays["logits_f32"][record], rtol=0, atol=1e-4)
        np.testing.assert_allclose(out, golden.arrays["logits_f64"][record], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", compiled(COMPILED))
def test_logits_of_the_plan_are_those_of_transformers(case: str) -> None:
    golden = Golden(case)
    plan = mp.compile(golden.model())
    for record in range(len(golden.arrays["input_ids"])):
        out = golden.run(plan, record)
        np.testing.assert_allclose(out, golden.arrays["logits_f32"][record], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", compiled(CASES[::6]))
def test_the_plan_in_bfloat16_is_nearer_than_transformers_in_bfloat16(case: str) -> None:
    golden = Golden(case)
    check_bfloat16(golden, mp.compile(golden.model("bfloat16")))


@pytest.mark.parametrize("case", CASES[::3])
def test_bfloat16_is_as_near_to_the_exact_logits_as_transformers_in_bfloat16(case: str) -> None:
    golden = Golden(case)
    check_bfloat16(golden, golden.model("bfloat16"), slack=1.5)  # eager rounds after every op: one element is luck


def check_bfloat16(golden: Golden, model: Any, slack: float = 1.0) -> None:
    for record in range(len(golden.arrays["input_ids"])):
        out = golden.run(model, record).astype(np.float64)
        error = np.abs(out - golden.arrays["logits_f64_bf16w"][record])
        assert error.mean() <= golden.arrays["bf16_error_mean"][record]
        assert error.max() <= slack * golden.arrays["bf16_error_max"][record]


@pytest.mark.parametrize("case", ["mha", "qwen2_window", "rope_longrope", "rope_yarn"])
def test_every_spelling_of_a_configuration_is_the_same_model(case: str) -> None:
    golden = Golden(case)
    for spelling in golden.meta["configs"]:
        out = golden.run(golden.model(spelling=spelling), 0)
        np.testing.assert_allclose(out, golden.arrays["logits_f32"][0], rtol=0, atol=1e-4)


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A small model of random weights."""
    return LlamaForCausalLM.from_config(tiny_config(), seed=1)


def ids_of(*rows: list[int]) -> Any:
    return np.array(rows, np.int64)


def test_parameter_names_are_those_of_hugging_face(model: LlamaForCausalLM) -> None:
    names = set(model.state_dict())
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names
    assert {
        f"model.layers.1.{part}.weight"
        for part in (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
            "input_layernorm",
            "post_attention_layernorm",
        )
    } <= names
    assert len(names) == 3 + 2 * 9


def test_tied_embeddings_are_one_parameter() -> None:
    tied = LlamaForCausalLM.from_config(tiny_config(tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())


def test_the_same_seed_gives_the_same_weights() -> None:
    one, same, other = (LlamaForCausalLM.from_config(tiny_config(), seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.1.mlp.up_proj.weight"
    assert np.array_equal(one[name].numpy(), same[name].numpy())
    assert not np.array_equal(one[name].numpy(), other[name].numpy())


def test_the_last_token_is_the_default(model: LlamaForCausalLM) -> None:
    ids = ids_of([5, 6, 7, 8], [9, 10, 11, 12])
    last, every = model(ids).numpy(), model(ids, all_logits=True).numpy()
    assert last.shape == (2, 1, model.config.vocab_size) and every.shape == (2, 4, model.config.vocab_size)
    np.testing.assert_allclose(last, every[:, -1:], rtol=0, atol=1e-5)


def test_the_call_of_the_documentation(model: LlamaForCausalLM) -> None:
    """Explicit positions, use_cache, a cache that is made on the way, then token by token."""
    ids = ids_of([5, 6, 7, 8, 9])
    model(input_ids=ids[:, :3], position_ids=np.arange(3)[None], use_cache=True)
    cache = model.last_cache
    assert cache is not None and cache.lengths.numpy().tolist() == [3]
    for position in (3, 4):
        logits = model(
            input_ids=ids[:, position : position + 1],
            position_ids=np.array([[position]]),
            past_key_values=cache,
            use_cache=True,
        )
    np.testing.assert_allclose(logits.numpy(), model(ids).numpy(), rtol=0, atol=1e-5)
    assert model(ids).shape == logits.shape and cache.lengths.numpy().tolist() == [5]


def test_a_cache_grows_up_to_the_context_and_no_further(model: LlamaForCausalLM) -> None:
    cache = model.new_cache(1, 4)
    for _ in range(4):
        model(ids_of([7] * 24), past_key_values=cache)
    assert cache.lengths.numpy().tolist() == [96]
    with pytest.raises(ArgumentError, match="limit is 96"):
        model(ids_of([7]), past_key_values=cache)


def test_rows_of_a_padded_batch_count_for_themselves(model: LlamaForCausalLM) -> None:
    rows = [[5, 6, 7, 8, 9], [10, 11], [12]]
    padded = np.array([row + [0] * (5 - len(row)) for row in rows])
    valid = np.array([5, 2, 1], np.int32)
    cache = model.new_cache(3)
    first = model(padded, past_key_values=cache, num_valid=valid).numpy()
    assert cache.lengths.numpy().tolist() == [5, 2, 1]
    second = model(ids_of([20], [21], [22]), past_key_values=cache).numpy()
    for i, row in enumerate(rows):
        np.testing.assert_allclose(first[i : i + 1], model(ids_of(row)).numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(second[i : i + 1], model(ids_of([*row, 20 + i])).numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(model(padded, num_valid=valid).numpy(), first, rtol=0, atol=1e-5)


def test_padding_never_reads_beyond_the_tables(model: LlamaForCausalLM) -> None:
    cache = model.new_cache(2)
    cache.advance(np.array([95, 0], np.int32))
    cache.reserve(1)
    out = model(ids_of([5, 0, 0], [5, 6, 7]), past_key_values=cache, num_valid=np.array([1, 3], np.int32))
    np.testing.assert_allclose(out.numpy()[1:], model(ids_of([5, 6, 7])).numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rows_rope_does_not_depend_on_its_batch_mates(kind: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 8}
    scaling = {"rope_type": kind, **({"factor": 2.0} if kind == "dynamic" else factors)}
    config = tiny_config(rope_scaling=scaling, max_position_embeddings=8 if kind == "dynamic" else 32)
    model = LlamaForCausalLM.from_config(config)
    long, short = list(range(5, 17)), [5, 6, 7]
    padded, valid = np.array([long, short + [0] * 9]), np.array([12, 3], np.int32)
    both = model(padded, past_key_values=model.new_cache(2), num_valid=valid).numpy()
    np.testing.assert_allclose(both[:1], model(ids_of(long)).numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(both[1:], model(ids_of(short)).numpy(), rtol=0, atol=1e-5)


def test_attention_as_the_document_writes_it(rng: np.random.Generator) -> None:
    q, k, v = (Tensor(rng.standard_normal((s, h, 8)).astype("f4")) for s, h in ((3, 6), (5, 2), (5, 2)))
    repeated = repeat_kv(k, v, 3)
    assert repeated[0].shape == (5, 6, 8)
    np.testing.assert_array_equal(repeated[1].numpy()[:, 5], v.numpy()[:, 1])
    wanted = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True)
    for got in (grouped_query_attention(q, k, v, 8**-0.5), multi_head_attention(q, *repeated, 8**-0.5)):
        np.testing.assert_allclose(got.numpy(), wanted.numpy().swapaxes(0, 1), rtol=0, atol=1e-6)


def test_the_graph_of_a_step_has_the_names_of_the_checkpoint(model: LlamaForCausalLM) -> None:
    traced = trace(model.generation_step(), **step_specs(model.config, model.dtype))
    assert set(traced.params) - set(model.state_dict()) == {"model.rotary_emb.sin", "model.rotary_emb.cos"}
    assert "model.layers.1.self_attn" in {op.loc.path for op in traced.graph.ops}


def test_a_cache_inside_of_a_trace_is_refused(model: LlamaForCausalLM) -> None:
    from monoplan.frontend.specs import spec

    with pytest.raises(ArgumentError, match="use_cache=True needs a cache"):
        trace(model, spec("batch", "seq", dtype="int64"), use_cache=True)


def test_another_dtype_leaves_the_model_as_it_is(model: LlamaForCausalLM) -> None:
    half = model.with_dtype("bfloat16")
    assert (half.dtype.name, model.dtype.name, half.config.dtype) == ("bf16", "f32", "bfloat16")
    assert half.model.rotary_emb.sin.dtype.name == "f32"
    np.testing.assert_allclose(
        half(ids_of([5, 6])).numpy().astype("f4"), model(ids_of([5, 6])).numpy(), rtol=0, atol=0.2
    )


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_a_stretched_context_is_usable_to_its_end(kind: str, rng: np.random.Generator) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32, **factors}
    # transformers limits neither, and takes the same angles for both: it divides by the original length.
    added, included = (
        LlamaForCausalLM.from_config(tiny_config(max_position_embeddings=n, rope_scaling=rope)) for n in (32, 128)
    )
    ids = rng.integers(0, 90, (1, 128))
    np.testing.assert_array_equal(added(ids).numpy(), included(ids).numpy())
    np.testing.assert_allclose(mp.compile(added)(ids), added(ids).numpy(), rtol=0, atol=1e-4)
    with pytest.raises(ArgumentError, match="the context of the model 128"):
        added.generate([5] * 129)
