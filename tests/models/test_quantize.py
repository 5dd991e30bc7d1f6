"""Rounding to low-bit blocks: errors against plain rounding, numbers at the limits, and the GGUF files made of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import monoplan as mp
from monoplan.codegen.formats.blocks import BLOCK_FORMATS
from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import LOW_BITS
from monoplan.models import AutoLlamaModel, LlamaForCausalLM
from monoplan.models.load.checkpoint import open_model
from monoplan.models.load.gguf_writer import FILE_TYPES, write_quantized
from monoplan.models.quantize import FP8, SCHEMES, Rounded, Scheme, quantize
from monoplan.models.rope_scaling import inverse_frequencies
from monoplan.models.text.tokenizer import Tokenizer
from tests.matrices import partly
from tests.models.support import tiny_config, tiny_tokenizer_files
from tests.models.vocabularies import byte_level, pieces

Array = NDArray[Any]
FORMATS = {found.name: found for found in BLOCK_FORMATS}


def samples() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((12, 512)).astype(np.float32)
    outliers = np.where(rng.random(normal.shape) < 0.01, normal * 30, normal)
    return {
        "normal": normal * 0.02,
        "outliers": outliers,
        "positive": normal + 4,
        "uniform": rng.random((12, 512)) - 0.5,
    }


def squared_errors(x: Array, kind: str, blocks: Array) -> Array:
    """Of each block."""
    return ((FORMATS[kind].values(blocks).astype(np.float64) - x) ** 2).reshape(-1, LOW_BITS[kind].block).sum(1)


def plain(x: Array, scheme: Scheme) -> Array:
    """The numbers that a format with levels has after rounding to nearest, without any search."""

    def half(a: Array) -> Array:
        return np.asarray(a).astype(np.float16).astype(np.float64)

    groups = x.astype(np.float64).reshape(-1, 256 // scheme.group, scheme.group)
    low, high = scheme.levels or (0, 0)
    if scheme.offset:
        least = np.minimum(groups.min(-1), 0)
        d, m = (groups.max(-1) - least) / scheme.high, -least
    else:
        at = np.abs(groups).argmax(-1)[..., None]
        d, m = np.take_along_axis(groups, at, -1)[..., 0] / scheme.low, np.zeros(groups.shape[:2])
    most = np.take_along_axis(d, np.abs(d).argmax(1)[:, None], 1)
    tops, offsets = half(most / (low or high)), half(m.max(1, keepdims=True) / high)
    d = tops * np.clip(np.rint(d / tops), low, high)
    m = offsets * np.clip(np.rint(m / np.where(offsets, offsets, 1)), 0, high)
    inverse = 1 / np.where(d == 0, np.inf, d)[..., None]
    codes = np.clip(np.rint((groups + m[..., None]) * inverse), scheme.low, scheme.high)
    return (codes * d[..., None] - m[..., None]).reshape(x.shape)


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("name", samples())
def test_errors_are_never_larger_than_those_of_plain_rounding(kind: str, name: str) -> None:
    x, scheme = samples()[name].astype(np.float32), SCHEMES[kind]
    found = squared_errors(x, kind, quantize(x, kind))
    if scheme.levels is None:
        simple = squared_errors(x, kind, gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind.upper()]))
    else:
        simple = ((plain(x, scheme) - x) ** 2).reshape(-1, 256).sum(1)
    assert (found <= simple * (1 + 1e-5)).all()
    assert found.sum() < simple.sum()


def test_more_bits_and_smaller_groups_have_smaller_errors() -> None:
    x = samples()["normal"]
    errors = {kind: float(squared_errors(x, kind, quantize(x, kind)).sum()) for kind in SCHEMES}
    for better, worse in (
        ("q4_k", "q4_0"), ("q4_1", "q4_0"), ("q5_0", "q4_1"), ("q5_k", "q5_0"), ("q6_k", "q5_k"), ("q8_0", "q6_k"),
        ("q4_k", "q3_k"), ("q3_k", "q2_k"),
    ):  # fmt: skip
        assert errors[better] < errors[worse], (better, worse)


@pytest.mark.parametrize("kind", SCHEMES)
def test_important_columns_have_smaller_errors(kind: str) -> None:
    x = samples()["normal"]
    importance = np.random.default_rng(1).random(512) ** 4
    with_it, without = (
        float(((FORMATS[kind].values(quantize(x, kind, given)) - x) ** 2 * importance).sum())
        for given in (importance, None)
    )
    assert with_it < without


@pytest.mark.parametrize("kind", SCHEMES)
def test_zeros_constants_tiny_and_huge_numbers(kind: str) -> None:
    zeros = np.zeros((1, 512), np.float32)
    assert not FORMATS[kind].values(quantize(zeros, kind)).any()
    # Scales near the smallest number of f16 are coarse.
    for value, error in (
        (1.0, 1e-3),
        (-1.0, 1e-3),
        (3e-5, 0.05),
        (-SCHEMES[kind].limit, 1e-3),
        (SCHEMES[kind].limit, 1e-3),
    ):
        assert FORMATS[kind].values(quantize(zeros + value, kind)) == pytest.approx(zeros + value, rel=error)
    for value in (1e-30, -1e-12, 1e-45):
        assert np.abs(FORMATS[kind].values(quantize(zeros + value, kind))).max() <= 1e-8
    one = zeros.copy()
    one[0, 300] = -7.0
    assert FORMATS[kind].values(quantize(one, kind)) == pytest.approx(one, abs=3e-3)


@pytest.mark.parametrize(
    ("value", "why"),
    [(np.nan, "some are NaN"), (np.inf, "the largest is inf"), (1e20, "the largest is 1e"), (-1e20, "the")],
)
def test_numbers_without_a_code_are_refused(value: float, why: str) -> None:
    x = np.zeros((300, 512), np.float32)
    x[299, 3] = value
    with pytest.raises(ArgumentError, match=rf"numbers near row \d+ can't be of type q4_k[^$]*{why}"):
        quantize(x, "q4_k")


def test_shapes_types_and_importance_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"shape \[2, 96\] can't be of type q4_k[^$]*blocks of 256"):
        quantize(np.zeros((2, 96), np.float32), "q4_k")
    with pytest.raises(ArgumentError, match="nothing is quantized to 'q9'"):
        quantize(np.zeros((2, 256), np.float32), "q9")
    with pytest.raises(ArgumentError, match="importance must be 32 numbers"):
        quantize(np.zeros((2, 32), np.float32), "q4_0", np.full(32, -1.0))


def test_floats_of_8_bits() -> None:
    x = samples()["normal"].astype(np.float32)
    x[0] *= np.geomspace(1e-6, 1, x.shape[1], dtype=np.float32)
    x[1], x[2] = 0.0, 1e-45
    for kind in FP8:
        found = FORMATS[kind].values(quantize(x, kind))
        largest = np.abs(x).reshape(len(x), -1, LOW_BITS[kind].block).max(2)
        limit = np.maximum(np.abs(x) / 16, np.repeat(largest, LOW_BITS[kind].block, axis=1) / 448 / 1024)
        assert (np.abs(found - x) <= limit * (1 + 1e-5) + 1e-45).all()
        for bad in (np.nan, -np.inf):
            with pytest.raises(ArgumentError, match=f"near row 1 can't be of type {kind}"):
                quantize(np.float32([[1] * 128, [bad] * 128]), kind)


def test_rows_that_are_not_whole_blocks_have_smaller_ones() -> None:
    made = LlamaForCausalLM.from_config(tiny_config(hidden_size=128, intermediate_size=96), seed=3).with_dtype("fp8")
    kinds = {name.split(".")[-2]: str(p.type.dtype) for name, p in made.named_parameters() if p.ndim == 2}
    assert kinds["down_proj"] == "fp8_32" and kinds["up_proj"] == kinds["lm_head"] == "fp8_128"


@pytest.mark.parametrize(("dtype", "kind"), [("q4_k", "q4_k"), ("int8", "q8_0"), ("int4", "q4_0"), ("fp8", "fp8_128")])
def test_a_model_is_compiled_with_rounded_matrices(dtype: str, kind: str) -> None:
    config = tiny_config(hidden_size=256, intermediate_size=256, tie_word_embeddings=kind == "q4_k")
    model = LlamaForCausalLM.from_config(dataclasses.replace(config, initializer_range=0.05), seed=3)
    fast = mp.compile(model, dtype=dtype)
    rounded, head = LlamaForCausalLM.from_config(model.config, seed=3), kind if kind in ("q8_0", "fp8_128") else "q6_k"
    for parameter in rounded.parameters():
        if parameter.ndim == 2:
            own = head if parameter is rounded.lm_head.weight else kind
            parameter.load(FORMATS[own].values(quantize(parameter.numpy(), own)))
    ids = np.arange(7)[None]
    expected, found = (np.asarray(m(ids, all_logits=True)) for m in (rounded, fast))
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()  # activations are rounded to 8 bits
    assert {str(p.type.dtype) for p in fast.model.parameters()} == {"f32", kind, head}
    assert model.dtype.name == "f32" and fast.model.lm_head.weight.type.dtype.name == head


@pytest.mark.parametrize("better", partly(["q8_0", "fp8_32"], lambda better: better == "q8_0"))
def test_values_may_have_more_bits_than_queries_and_keys(better: str) -> None:
    """One product over weights of two formats, for few rows and many, bit for bit alike with any number of threads."""
    model = LlamaForCausalLM.from_config(tiny_config(hidden_size=64, intermediate_size=64), seed=3)
    mixed, expected = model.with_dtype("q4_0"), LlamaForCausalLM.from_config(model.config, seed=3)
    exact = {n: p.numpy() for n, p in model.named_parameters() if p.ndim == 2}
    kinds = {n: better if ".v_proj." in n else "q8_0" if n.startswith("lm_head") else "q4_0" for n in exact}
    for name, parameter in mixed.named_parameters():
        if ".v_proj." in name:
            rounded = Rounded(name, parameter.full_shape, lambda part=None, n=name: exact[n], LOW_BITS[better])
            parameter.defer(rounded.values, None, LOW_BITS[better], rounded.blocks)
    for name, parameter in expected.named_parameters():
        if name in kinds:
            parameter.load(FORMATS[kinds[name]].values(quantize(exact[name], kinds[name])))
    fast = [mp.compile(mixed, options={"threads": n}) for n in (1, 2)]
    for rows in (1, 3, 21):
        ids = np.arange(rows)[None]
        found, others = (np.asarray(m(ids, all_logits=True)) for m in fast)
        want = np.asarray(expected(ids, all_logits=True))
        assert found.tobytes() == others.tobytes()
        assert np.abs(found - want).max() < 0.01 * np.abs(want).max()  # keys and values are f16
    assert fast[0].ir().count("qkv_rope_cache(") == model.config.num_hidden_layers


def test_what_a_compiled_model_cannot_be_rounded_to() -> None:
    model = LlamaForCausalLM.from_config(tiny_config())
    with pytest.raises(
        ArgumentError, match=r"embed_tokens.weight of the shape \[100, 32\] can't be of type q4_k[^$]*q4_0"
    ):
        mp.compile(model, dtype="q4_k")
    with pytest.raises(ArgumentError, match=r"\[32, 48\] can't be of type q8_0[^$]*bfloat16"):
        mp.compile(model, dtype="int8")
    with pytest.raises(ArgumentError, match="can't be of type mxfp4"):
        mp.compile(model, dtype="mxfp4")
    with pytest.raises(ArgumentError, match="weights must be of a floating point type"):
        mp.compile(mp.nn.Linear(32, 32), mp.spec("n", 32), dtype="int8")


# GGUF files.


def checkpoint(directory: Path, vocabulary: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A Hugging Face directory with a tokenizer that a GGUF file can say."""
    metadata = byte_level("smollm", ("h e", "l l", "he ll")) if vocabulary is None else vocabulary
    size = len(metadata["tokenizer.ggml.tokens"]) + 3  # rows without a token
    config = tiny_config(**{"vocab_size": size, "hidden_size": 64, "intermediate_size": 256, **changes})
    LlamaForCausalLM.from_config(config, seed=3).save_pretrained(directory)
    tokenizer = Tokenizer.from_gguf(metadata)
    tokenizer._core.save(str(directory / "tokenizer.json"))
    settings = {**tokenizer.special_tokens, "add_bos_token": tokenizer.add_bos, "chat_template": "{{ messages }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return directory


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_directory_becomes_a_file_with_the_same_rows(tmp_path: Path, model_type: str) -> None:
    features = {"attention_bias": model_type == "qwen2", "qk_norm": model_type == "qwen3"}
    if model_type == "qwen2":
        features["attention_out_bias"] = False
    source = checkpoint(tmp_path / "hf", model_type=model_type, **features)
    tensors = write_quantized(source, tmp_path / "made.gguf", "q4_k")
    old, new = open_model(source), open_model(tmp_path / "made.gguf")
    assert not list(tmp_path.glob(".*"))
    assert sorted(new.weights.names()) == sorted(old.weights.names())
    kinds = set()
    for name in old.weights.names():
        numbers, low_bit = old.weights.tensor(name), new.weights.low_bit(name)
        if low_bit is None:
            assert np.array_equal(new.weights.tensor(name), numbers), name
        else:
            kinds.add(low_bit.name)
            assert np.array_equal(new.weights.blocks(name), quantize(numbers, low_bit.name)), name
    assert kinds == {"q4_k", "q5_0", "q8_0"}  # rows of 64 are no blocks of 256; the last is the head's
    head = new.weights.low_bit("lm_head.weight")
    assert head is not None and head.name == "q8_0"
    assert {t.kind for t in tensors} == {"f32", *kinds}
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "model_type"):
        assert getattr(new.config, key) == getattr(old.config, key), key
    for text in ("hello hell 123", "he\u00e9", "<|start|>x"):
        assert new.tokenizer().encode(text) == old.tokenizer().encode(text)
    assert new.tokenizer().chat_template == "{{ messages }}" and new.tokenizer().eos_ids == old.tokenizer().eos_ids


def test_the_file_runs_and_a_file_is_quantized_again(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", pieces())
    write_quantized(source, tmp_path / "q8.gguf", "q8_0")
    ids = np.array([[1, 260, 262, 264, 2, 9]])
    expected = np.asarray(AutoLlamaModel.from_pretrained(source)(ids, all_logits=True))
    found = np.asarray(AutoLlamaModel.from_pretrained(tmp_path / "q8.gguf")(ids, all_logits=True))
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    (again,) = {t.error for t in write_quantized(tmp_path / "q8.gguf", tmp_path / "same.gguf", "q8_0")}
    assert again == 0 and (tmp_path / "q8.gguf").read_bytes() == (tmp_path / "same.gguf").read_bytes()
    write_quantized(tmp_path / "q8.gguf", tmp_path / "q4.gguf", "q4_0")
    old, new = open_model(tmp_path / "q8.gguf"), open_model(tmp_path / "q4.gguf")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(new.weights.blocks(name), quantize(old.weights.tensor(name), "q4_0"))
    assert (
        new.tokenizer().encode("ab abc")
        == old.tokenizer().encode("ab abc")
        == Tokenizer.from_gguf(pieces()).encode("ab abc")
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "attention_factor": 1.3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 16.0},
        {
            "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 24,
        },
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_rope_scaling_is_written(tmp_path: Path, scaling: dict[str, Any]) -> None:
    source = checkpoint(tmp_path / "hf", rope_scaling=scaling)
    write_quantized(source, tmp_path / "made.gguf", "q4_1")
    old, new = open_model(source).config, open_model(tmp_path / "made.gguf").config
    for length in (20, 90):
        (a, one), (b, other) = (inverse_frequencies(config, length) for config in (old, new))
        assert b == pytest.approx(a, rel=1e-6) and other == pytest.approx(one, rel=1e-6)


def test_what_a_file_cannot_say_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(LoadError, match="can't say the rope scaling 'dynamic'"):
        write_quantized(source, tmp_path / "made.gguf", "q4_0")
    other = checkpoint(tmp_path / "words")
    tiny_tokenizer_files(other)
    with pytest.raises(LoadError, match="can't say this tokenizer"):
        write_quantized(other, tmp_path / "made.gguf", "q4_0")
    (tmp_path / "there.gguf").write_bytes(b"x")
    with pytest.raises(ArgumentError, match="exists already"):
        write_quantized(other, tmp_path / "there.gguf", "q4_0")
    assert (tmp_path / "there.gguf").read_bytes() == b"x" and not (tmp_path / "made.gguf").exists()


def test_the_mixture_has_more_bits_for_heads_values_and_down_projections(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", hidden_size=256, num_hidden_layers=8, head_dim=8)
    kinds = {t.name: t.kind for t in write_quantized(source, tmp_path / "made.gguf", "q4_k_m") if len(t.shape) == 2}
    more = {name for name, kind in kinds.items() if kind == "q6_k"}
    layers = (0, 3, 6, 7)
    expected = {f"blk.{i}.{name}.weight" for i in layers for name in ("attn_v", "ffn_down")} | {"output.weight"}
    assert more == expected and {kinds["blk.1.ffn_up.weight"], kinds["token_embd.weight"]} == {"q4_k"}
    names = {
        2: "Q4_0",
        3: "Q4_1",
        7: "Q8_0",
        8: "Q5_0",
        9: "Q5_1",
        10: "Q2_K",
        11: "Q3_K_S",
        14: "Q4_K_S",
        15: "Q4_K_M",
    }
    names |= {16: "Q5_K_S", 18: "Q6_K"}
    for _, number in FILE_TYPES.values():
        assert gguf.LlamaFileType(number).name == f"MOSTLY_{names[number]}"
