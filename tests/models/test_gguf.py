"""GGUF files: names, row order, every block format, the configuration in the metadata, and damage."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from monoplan.cli.inspect import _stored_types
from monoplan.ir.errors import LoadError
from monoplan.ir.types import Part
from monoplan.models.auto import AutoLlamaModel
from monoplan.models.config import LlamaConfig
from monoplan.models.load import gguf as gguf_files
from monoplan.models.load.checkpoint import open_model
from monoplan.models.load.gguf import FLOATS, KINDS, open_gguf
from monoplan.models.rope_scaling import inverse_frequencies

Array = NDArray[Any]

HEADS, KV_HEADS, HIDDEN, INNER, VOCAB = 4, 2, 64, 96, 24
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def permute(array: Array, heads: int) -> Array:
    """The row order of the llama writer: the two values that RoPE turns together lie side by side."""
    head = array.shape[0] // heads
    rows = [h * head + pair + half * head // 2 for h in range(heads) for pair in range(head // 2) for half in (0, 1)]
    return array[rows]


def weights(arch: str = "llama", layers: int = 2, bias: bool = False) -> dict[str, Array]:
    """Random weights under Hugging Face names."""
    random = np.random.default_rng(3)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": (kv, HIDDEN),
            prefix + "self_attn.v_proj.weight": (kv, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": (INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": (INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INNER),
        }
        if bias:
            sizes = {"q": HIDDEN, "k": kv, "v": kv}
            shapes |= {f"{prefix}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if arch == "qwen3":
            head = HIDDEN // HEADS
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (head,) for name in "qk"}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in fixed:
        return f"{fixed[stem]}.{kind}"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    back = {hf: own for own, hf in NAMES.items()} | {f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"}
    return f"blk.{layer}.{back[rest]}.{kind}"


def write(
    path: Path,
    state: dict[str, Array],
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, Array] | None = None,
    kinds: dict[str, Kind] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a model with the gguf library; `metadata` adds or replaces keys under the architecture's name."""
    keys: dict[str, Any] = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
    } | (metadata or {})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        name = key if key.startswith(("tokenizer.", "split.")) else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, array in {**state, **(extra or {})}.items():
        if name in without:
            continue
        is_hf = name in state
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else 0
        stored = permute(array, heads) if heads and arch == "llama" else array
        kind = (kinds or {}).get(name, Kind.F32)
        stored = gguf.quants.quantize(stored, kind)
        writer.add_tensor(gguf_name(name) if is_hf else name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("arch", "bias"), [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False)])
def test_weights_and_configuration(tmp_path: Path, arch: str, bias: bool) -> None:
    state = weights(arch, bias=bias)
    checkpoint = open_gguf(write(tmp_path / "model.gguf", state, arch))
    assert set(checkpoint.names()) == set(state)
    for name, array in state.items():
        assert checkpoint.shape(name) == array.shape and checkpoint.dtype(name) == np.float32
        np.testing.assert_array_equal(checkpoint.tensor(name), array, err_msg=name)
    config = checkpoint.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB, HIDDEN, INNER)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, HEADS, KV_HEADS)
    assert (config.head_dim, config.max_position_embeddings) == (HIDDEN // HEADS, 256)
    assert (config.rope_theta, config.rms_norm_eps) == (500000.0, 1e-5)
    assert config.attention_bias == bias and not config.attention_out_bias
    assert config.qk_norm == (arch == "qwen3") and not config.tie_word_embeddings


def test_tensors_are_copies_and_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", weights("qwen2"), "qwen2")
    checkpoint = open_gguf(path)
    name = "model.layers.1.mlp.up_proj.weight"
    array = checkpoint.tensor(name)
    assert array.flags.writeable and not np.shares_memory(array, checkpoint.tensor(name))
    before = array.copy()
    with path.open("r+b") as file:
        file.truncate(100)
    np.testing.assert_array_equal(array, before)
    with pytest.raises(LoadError, match="model.gguf changed while it was being loaded") as caught:
        checkpoint.tensor(name)
    assert "tensor 'blk.1.ffn_up.weight'" in str(caught.value) and "bytes" in str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_parts_of_tensors(tmp_path: Path, kind: str) -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    checkpoint = open_gguf(write(tmp_path / "m.gguf", weights(), kinds={name: Kind[kind] for name in names}))
    for name in names:
        whole = checkpoint.tensor(name)
        for axis, size in enumerate(whole.shape):
            for start, length in ((0, size), (size // 2, size // 2), (3, 5), (size - 1, 1)):
                found = checkpoint.tensor(name, Part(axis, start, length))
                assert found.flags.c_contiguous and not np.may_share_memory(found, whole)
                np.testing.assert_array_equal(found, np.take(whole, range(start, start + length), axis))


def test_a_header_that_is_longer_than_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = weights()
    path = write(tmp_path / "m.gguf", state)
    for count in (4, 23, 100, 1000):
        monkeypatch.setattr(gguf_files, "FIRST_READ", count)
        checkpoint = open_gguf(path)
        np.testing.assert_array_equal(checkpoint.tensor("model.norm.weight"), state["model.norm.weight"])


@pytest.mark.parametrize("odd", ["usual", "", "a\0", "\0" * 9, "é" * 200, "x" * 255, "y" * 256])
def test_strings_of_any_length_and_with_zeros(tmp_path: Path, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many strings are read at once where lengths and texts can be told apart, else one by one: the same list."""
    at_once, found = gguf_files.Header._usual_strings, list[Any]()
    monkeypatch.setattr(gguf_files.Header, "_usual_strings", lambda *a: found.append(at_once(*a)) or found[-1])
    texts = [f"token {i} Ġé"[: 1 + i % 11] for i in range(200)]
    texts[100] = odd
    path, encoded = tmp_path / "m.gguf", [text.encode() for text in texts]
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, len(texts))
    body = b"".join(struct.pack("<Q", len(text)) + text for text in encoded)
    path.write_bytes(head + body)
    assert gguf_files.Header(path).metadata == {"k": texts}
    assert (found == [None]) == (odd in ("", "a\0", "\0" * 9, "é" * 200, "y" * 256))
    path.write_bytes(head + body.replace("Ġ".encode(), b"\xff\xff", 1))
    with pytest.raises(LoadError, match="UTF-8"):
        gguf_files.Header(path)


def test_no_output_matrix_means_tied_embeddings(tmp_path: Path) -> None:
    checkpoint = open_gguf(write(tmp_path / "m.gguf", weights(), without=("lm_head.weight",)))
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.names()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_formats_that_the_library_writes(tmp_path: Path, kind: str) -> None:
    state = weights()
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    checkpoint = open_gguf(write(tmp_path / "m.gguf", state, kinds={name: Kind[kind] for name in names}))
    bits = {"F16": 11, "BF16": 8, "Q8_0": 7, "Q5_0": 4, "Q5_1": 4, "Q4_0": 3, "Q4_1": 3}[kind]
    for name in names:
        found = checkpoint.tensor(name)
        assert checkpoint.stored_type(name) == kind
        expected = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
        assert found.dtype == checkpoint.dtype(name) == expected
        error = np.abs(found.astype(np.float32) - state[name])
        assert error.max() < 4.0 * 2.0**-bits, f"{name}: rows in the wrong order, or a wrong format"
        assert error.max() > 0.0


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL"])
def test_formats_that_the_library_only_reads(kind: str) -> None:
    """Random blocks through our path and the library's, more of them than one chunk holds."""
    from monoplan.models.load.gguf import CHUNK, dequantized

    codec = getattr(gguf.quants, kind)
    rows, columns = 3, 256 * (CHUNK // 256 // 2)
    random = np.random.default_rng(4)
    raw = random.integers(0, 256, (rows, columns // codec.block_size * codec.type_size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, Kind[kind])
    found = dequantized(kind, (rows, columns), raw.reshape(-1))
    np.testing.assert_array_equal(found, expected)


def test_matrices_stay_in_the_types_that_plans_have(tmp_path: Path) -> None:
    """Others are expanded, and `monoplan inspect` says which and why."""
    state, inner, random = weights(), 256, np.random.default_rng(5)
    for layer in (0, 1):
        for name, shape in (("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner))):
            state[f"model.layers.{layer}.mlp.{name}_proj.weight"] = random.standard_normal(shape).astype(np.float32)
    kinds = {
        n: Kind.TQ2_0 if "down" in n else Kind.MXFP4 if "mlp" in n else Kind.Q5_1 for n in state if "norm" not in n
    }
    path = write(tmp_path / "m.gguf", state, metadata={"feed_forward_length": inner}, kinds=kinds)
    model = AutoLlamaModel.from_pretrained(path)
    for name, p in model.state_dict().items():
        kind = kinds.get(name, Kind.F32)
        assert str(p.type.dtype) == {Kind.TQ2_0: "f32", Kind.F32: "f32"}.get(kind, kind.name.lower())
    expanded = "2 TQ2_0 expanded to f32 (plans have no such format)"
    assert _stored_types(model) == [f"weights: 5 F32, 4 MXFP4 kept, 10 Q5_1 kept, {expanded}"]
    wide = AutoLlamaModel.from_pretrained(path, dtype="bfloat16")
    assert {str(p.type.dtype) for p in wide.parameters()} == {"bf16"}
    assert "10 Q5_1 expanded to bf16 (as requested)" in _stored_types(wide)[0]


def test_per_layer_numbers_and_key_length(tmp_path: Path) -> None:
    lists = {"attention.head_count_kv": [KV_HEADS, KV_HEADS], "feed_forward_length": [INNER, INNER]}
    lengths = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
    config = open_gguf(write(tmp_path / "m.gguf", weights(), metadata=lists | lengths)).config
    assert (config.num_key_value_heads, config.intermediate_size, config.head_dim) == (KV_HEADS, INNER, 16)
    for change, message in (
        ({"attention.head_count_kv": [1, 2]}, "attention.head_count_kv must be a positive integer"),
        ({"attention.key_length": 16, "attention.value_length": 8}, "different length"),
        ({"rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"expert_count": [1, 2]}, "expert_count must be a positive integer"),
        ({"expert_count": 8}, "mixture-of-experts"),
        ({"attention.causal": False}, "attention.causal is false: the model is an encoder"),
        ({"block_count": 3}, "block_count is 3, but the file has 2 layers"),
        ({"block_count": 2**31}, "block_count must be .* got 2147483648"),
        ({"embedding_length": 32}, "the embedding has 64 columns"),
        ({"attention.head_count": 0}, "attention.head_count must be a positive integer"),
        ({"attention.head_count": "4"}, "attention.head_count must be a positive integer"),
        ({"context_length": 0}, "context_length must be a positive integer"),
        ({"final_logit_softcapping": 30.0}, "unsupported metadata 'llama.final_logit_softcapping'"),
        ({"rope.freq_base": 0.0}, "rope.freq_base must be a number from 1.001"),
        ({"rope.freq_base": float("nan")}, "rope.freq_base must be a number from 1.001"),
        ({"rope.scaling.factor": 1e-40}, "rope.scaling.factor must be a number from 1e-30"),
        ({"rope.scaling.original_context_length": 2**31}, "rope.scaling.original_context_length must be a positive"),
        ({"attention.layer_norm_rms_epsilon": -1e-5}, "attention.layer_norm_rms_epsilon must be a number from 0"),
        ({"attention.head_count_kv": 0}, "attention.head_count_kv must be a positive integer"),
        ({"attention.head_count_kv": 3}, "head_count 4 is not a multiple of attention.head_count_kv 3"),
        ({"attention.key_length": False}, "attention.key_length must be a positive integer"),
        ({"attention.sliding_window": 0.5}, "attention.sliding_window must be a positive integer"),
        ({"attention.causal": "no"}, "attention.causal must be true or false"),
        ({"rope.scaling.alpha": 2.0}, "unsupported metadata 'llama.rope.scaling.alpha'"),
        ({"rope.scaling.type": "ntk"}, "unsupported rope scaling 'ntk'"),
        ({"split.count": 3}, "split into several files"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "the vocabulary has 2 tokens, but the embedding has 24 rows"),
    ):
        write(tmp_path / "bad.gguf", weights(), metadata=change)
        with pytest.raises(LoadError, match=message) as caught:
            open_gguf(tmp_path / "bad.gguf")
        assert "bad.gguf" in str(caught.value)


def test_an_epsilon_of_zero_is_none(tmp_path: Path) -> None:
    """Other keys may hold 0 for what a model does not have; norms have an epsilon of 0 then, not the usual one."""
    zeros = {"attention.layer_norm_rms_epsilon": 0.0, "attention.sliding_window": 0, "rope.scaling.factor": 0.0}
    config = open_gguf(write(tmp_path / "m.gguf", weights(), metadata=zeros)).config
    assert (config.rms_norm_eps, config.sliding_window, config.rope_scaling) == (0.0, None, None)


@pytest.mark.parametrize("alignment", [0, 1, 2, 4, 24, 2**31])
def test_alignments_that_are_not_those_of_the_tensors(tmp_path: Path, alignment: int) -> None:
    """Weights would begin at other bytes: they would be noise, with NaN in it."""
    whole = write(tmp_path / "m.gguf", weights()).read_bytes()
    pair = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, alignment)
    pairs = int.from_bytes(whole[16:24], "little")
    end = whole.index(b"general.architecture") - 8
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(whole[:16] + (pairs + 1).to_bytes(8, "little") + whole[24:end] + pair + whole[end:])
    with pytest.raises(LoadError, match="alignment"):
        open_gguf(bad)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="unsupported architecture 'mamba'"):
        open_gguf(write(tmp_path / "m.gguf", weights("qwen2"), "mamba"))


def test_qwen_may_rotate_a_part_of_a_head(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", weights("qwen2"), "qwen2", {"rope.dimension_count": 8})
    assert open_gguf(path).config.rotary_dim == 8


def test_rope_scaling_keys(tmp_path: Path) -> None:
    def rope(**metadata: Any) -> Any:
        keys = {name.replace("__", "."): value for name, value in metadata.items()}
        return open_gguf(write(tmp_path / "m.gguf", weights(), metadata=keys)).config.rope_scaling

    assert rope() is None
    assert rope(rope__scaling__type="none", rope__scaling__factor=4.0) is None
    assert rope(rope__scaling__factor=4.0) == {"rope_type": "linear", "factor": 4.0}
    assert rope(rope__scale_linear=4.0) == {"rope_type": "linear", "factor": 4.0}
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert rope(**yarn) == expected
    assert rope(**yarn, rope__scaling__yarn_beta_fast=16.0) == expected | {"beta_fast": 16.0}


def test_rope_freqs_tensor_is_llama3_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "rope_theta": 500000.0}
    scaled = LlamaConfig(**sizes, max_position_embeddings=256, rope_scaling=scaling)
    plain = LlamaConfig(**sizes)
    divisors = inverse_frequencies(plain)[0] / inverse_frequencies(scaled)[0]
    assert divisors.max() == 8.0 and divisors.min() == 1.0
    path = write(tmp_path / "m.gguf", weights(), extra={"rope_freqs.weight": divisors.astype(np.float32)})
    checkpoint = open_gguf(path)
    assert "rope_freqs.weight" not in checkpoint.names()
    for seq_len in (None, 1, 100, 100_000):
        found, factor = inverse_frequencies(checkpoint.config, seq_len)
        np.testing.assert_allclose(found, inverse_frequencies(scaled)[0], rtol=1e-6)
        assert factor == 1.0
    assert LlamaConfig.from_dict(checkpoint.config.to_dict()) == checkpoint.config


def test_longrope_tensors(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 2.0, 8, dtype=np.float32)
    extra = {"rope_factors_short.weight": factors, "rope_factors_long.weight": 3 * factors}
    keys = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64}
    config = open_gguf(write(tmp_path / "m.gguf", weights(), metadata=keys, extra=extra)).config
    short, long = inverse_frequencies(config, 64)[0], inverse_frequencies(config, 65)[0]
    np.testing.assert_allclose(short / long, 3.0, rtol=1e-6)
    with pytest.raises(LoadError, match="unsupported rope scaling"):
        open_gguf(write(tmp_path / "bad.gguf", weights(), extra=extra))


def test_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    extra = {"blk.1.attn_sinks.weight": np.ones(4, np.float32), "strange.weight": np.ones(2, np.float32)}
    checkpoint = open_gguf(write(tmp_path / "m.gguf", weights(), extra=extra))
    assert set(extra) <= set(checkpoint.names())
    with pytest.raises(LoadError, match="there is no tensor 'model.nope'"):
        checkpoint.tensor("model.nope")


def damaged(tmp_path: Path, data: bytes) -> str:
    """Open the bytes as a file, read everything in it, and say how it went."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        checkpoint = open_gguf(path)
        for name in checkpoint.names():
            checkpoint.tensor(name).tobytes()
    except LoadError:
        return "refused"
    return "loaded"


def test_wrong_magic_version_and_counts(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", weights()).read_bytes()
    huge = (2**62).to_bytes(8, "little")
    for data, message in (
        (b"", "does not begin with GGUF"),
        (b"GGML" + whole[4:], "does not begin with GGUF"),
        (whole[:4] + b"\0\0\0\3" + whole[8:], "big-endian"),
        (whole[:4] + b"\1\0\0\0" + whole[8:], "version 1 is unknown"),
        (whole[:8] + huge + whole[16:], "can't fit into the file"),
        (whole[:16] + huge + whole[24:], "can't fit into the file"),
        (whole[:8] + (99).to_bytes(8, "little") + whole[16:], "is not a usable GGUF file"),
        (whole[:24] + huge + whole[32:], "longer than the file"),  # the length of the first key
        (whole[:-8], "ends at byte"),
    ):
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        with pytest.raises(LoadError, match=message):
            open_gguf(path)


@pytest.mark.parametrize("shape", [(), (0,), (0, 2**63), (2**64 - 1, 0, 1)], ids=str)
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "rope_freqs.weight", "strange"])
def test_tensors_of_no_elements_or_no_dimensions(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    whole = write(tmp_path / "m.gguf", {}).read_bytes()
    start = whole.index(b"llama.rope.freq_base") + len(b"llama.rope.freq_base") + 8  # the end of the metadata
    info = len(name).to_bytes(8, "little") + name.encode() + len(shape).to_bytes(4, "little")
    info += b"".join(size.to_bytes(8, "little") for size in shape) + bytes(12)
    path = tmp_path / "bad.gguf"
    path.write_bytes(whole[:8] + (1).to_bytes(8, "little") + whole[16:start] + info + bytes(64))
    with pytest.raises(LoadError, match="has 0 dimensions, not 1 to 4|has no elements") as caught:
        open_gguf(path)
    assert repr(name) in str(caught.value)


def test_any_cut_and_any_flipped_header_byte(tmp_path: Path) -> None:
    """Whatever happens to the header: a LoadError, or tensors within the file; never another exception."""
    tokens = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)], "tokenizer.ggml.scores": [0.5] * VOCAB}
    kinds = {"model.layers.0.mlp.up_proj.weight": Kind.Q4_1, "model.layers.0.mlp.gate_proj.weight": Kind.Q8_0}
    state = weights()
    path = write(tmp_path / "m.gguf", state, metadata=tokens, kinds=kinds)
    whole = path.read_bytes()
    header = gguf.GGUFReader(path).data_offset
    for length in [1, 4, 8, 20, 24, 25, 40, *range(64, header, 97), header, header + 5, len(whole) // 2]:
        assert damaged(tmp_path, whole[:length]) == "refused", length
    random = np.random.default_rng(5)
    outcomes = set()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(random.integers(1, 4)):
            data[random.integers(header)] ^= 1 << int(random.integers(8))
        outcomes.add(damaged(tmp_path, data))
    assert outcomes == {"loaded", "refused"}


def test_open_model_takes_a_file_or_the_only_one_in_a_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "one.gguf", weights())
    for place in (path, tmp_path):
        found = open_model(place)
        assert found.config.vocab_size == VOCAB
        assert found.weights.path == path
        with pytest.raises(LoadError, match="no vocabulary"):
            found.tokenizer()
    # A GGUF repository may have a config.json beside the file.
    (tmp_path / "config.json").write_text("{}")
    assert open_model(tmp_path).weights.path == path
    os.rename(path, tmp_path / "renamed")
    assert open_model(tmp_path / "renamed").config.vocab_size == VOCAB
    write(tmp_path / "a.gguf", weights())
    write(tmp_path / "b.gguf", weights())
    with pytest.raises(LoadError, match="2 GGUF files in the directory") as caught:
        open_model(tmp_path)
    assert "a.gguf, b.gguf" in str(caught.value)


def test_table_of_kinds_is_the_librarys() -> None:
    for number, (name, block, size) in KINDS.items():
        assert (Kind(number).name, *gguf.GGML_QUANT_SIZES[Kind(number)]) == (name, block, size)
        assert name in FLOATS or hasattr(getattr(gguf.quants, name), "dequantize_blocks")
