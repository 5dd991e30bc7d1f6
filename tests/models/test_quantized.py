"""Quantized Hugging Face checkpoints: each weight is the formula of its format, exactly; damage is a LoadError."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import monoplan as mp
from monoplan.cli.inspect import _stored_types
from monoplan.codegen.formats.blocks import BLOCK_FORMATS
from monoplan.ir.errors import LoadError
from monoplan.ir.types import LOW_BITS, Part
from monoplan.models.auto import AutoLlamaModel
from monoplan.models.config import LlamaConfig
from monoplan.models.families import family_of
from monoplan.models.load.checkpoint import open_model, parameter_shapes
from tests.matrices import partly

Array = NDArray[Any]
Tensors = dict[str, Array]
CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "torch_dtype": "float16",
}  # fmt: skip
F8 = ml_dtypes.float8_e4m3fn


class Writer:
    """Writes one method's layers: `layer` gives the stored tensors of a matrix [out, in] and what they stand for."""

    def __init__(self, config: dict[str, Any], layer: Callable[[Any, int, int], tuple[Tensors, Array]]) -> None:
        self.config, self.layer = config, layer

    def write(self, path: Path, change: Callable[[Tensors], None] = lambda tensors: None) -> dict[str, Array]:
        random, stored, wanted = np.random.default_rng(3), {}, {}
        for name, shape in parameter_shapes(LlamaConfig.from_dict(CONFIG), 2).items():
            if "_proj" in name and "layers.1.mlp.down" not in name:  # that one is in modules_to_not_convert
                tensors, wanted[name] = self.layer(random, *shape)
                stored |= {name.removesuffix("weight") + own: array for own, array in tensors.items()}
            else:
                stored[name] = wanted[name] = (random.standard_normal(shape) * 0.1).astype(np.float16)
        change(stored)
        save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": self.config}))
        return wanted


def some_scales(random: Any, shape: tuple[int, ...], dtype: Any = np.float16) -> Array:
    return random.uniform(0.002, 0.03, shape).astype(dtype)


def pack(codes: Array, bits: int, places: list[int] | None = None) -> Array:
    """Columns into words of 32 bits: place i of a word has its column places[i]."""
    count = 32 // bits
    places = places or list(range(count))
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // count)), np.uint32)
    for word in range(words.shape[1]):
        for i, place in enumerate(places):
            if word * count + place < codes.shape[1]:
                words[:, word] |= codes[:, word * count + place].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def expand(codes: Array, zeros: Array, scales: Array, group_of: Any) -> Array:
    """scale * (code - zero) with codes [out, in], zeros and scales [out, groups], one column after the other."""
    values = np.zeros(codes.shape, np.float32)
    for column in range(codes.shape[1]):
        g = group_of(column)
        difference = codes[:, column].astype(np.float32) - zeros[:, g].astype(np.float32)
        values[:, column] = scales[:, g].astype(np.float32) * difference
    return values


def gptq(bits: int, size: int, *, v2: bool = False, desc_act: bool = False, zero: int | None = None) -> Writer:
    def layer(random: Any, out: int, columns: int) -> tuple[Tensors, Array]:
        group = columns if size == -1 else size
        count = -(-columns // group)
        order = np.arange(columns) // group
        if desc_act:
            order = random.permutation(order)
        codes = random.integers(0, 2**bits, (out, columns))
        zeros = random.integers(0, 2**bits, (out, count)) if zero is None else np.full((out, count), zero)
        scales = some_scales(random, (out, count))
        tensors = {
            "qweight": pack(codes, bits).T,
            "qzeros": pack(((zeros if v2 else zeros - 1) % 2**bits).T, bits),
            "scales": scales.T,
            "g_idx": order.astype(np.int32),
            "bias": np.zeros(out, np.float16),  # as some writers do, where the model has none
        }
        return tensors, expand(codes, zeros, scales, lambda column: order[column])

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": desc_act, "sym": zero is not None}
    return Writer(config | ({"checkpoint_format": "gptq_v2"} if v2 else {}), layer)


def awq(size: int, *, zero: int | None = None) -> Writer:
    def layer(random: Any, out: int, columns: int) -> tuple[Tensors, Array]:
        count = -(-columns // size)
        codes = random.integers(0, 16, (out, columns))
        zeros = random.integers(0, 16, (out, count)) if zero is None else np.full((out, count), zero)
        scales, places = some_scales(random, (out, count)), [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {"qweight": pack(codes.T, 4, places), "qzeros": pack(zeros.T, 4, places), "scales": scales.T}
        return tensors, expand(codes, zeros, scales, lambda column: column // size)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return Writer({**config, "modules_to_not_convert": ["model.layers.1.mlp.down_proj"]}, layer)


def expand_blocks(codes: Array, scales: Array, tall: int, wide: int) -> Array:
    values = np.zeros(codes.shape, np.float32)
    for i in range(0, codes.shape[0], tall):
        for j in range(0, codes.shape[1], wide):
            scale = np.float32(scales[i // tall, j // wide])
            values[i : i + tall, j : j + wide] = codes[i : i + tall, j : j + wide].astype(np.float32) * scale
    return values


def fp8(kind: str) -> Writer:
    def layer(random: Any, out: int, columns: int) -> tuple[Tensors, Array]:
        codes = random.standard_normal((out, columns)).astype(F8)
        tall, wide = {"block": (128, 128), "tensor": (out, columns), "channel": (1, columns)}[kind]
        scales = some_scales(random, (-(-out // tall), -(-columns // wide)), np.float32)
        stored = scales.reshape(()) if kind == "tensor" else scales
        own = {"weight_scale_inv" if kind == "block" else "weight_scale": stored, "input_scale": np.float32([2])}
        return {"weight": codes, **own}, expand_blocks(codes, scales, tall, wide)

    sizes = {"weight_block_size": [128, 128]} if kind == "block" else {}
    return Writer({"quant_method": "fp8", "activation_scheme": "dynamic", **sizes}, layer)


def compressed(name: str, layer: Any, **weights: Any) -> Writer:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    config = {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}
    return Writer({**config, "ignore": ["lm_head"], "kv_cache_scheme": None}, layer)


def ints(strategy: str, *, symmetric: bool) -> Writer:
    def layer(random: Any, out: int, columns: int) -> tuple[Tensors, Array]:
        tall, wide = {"tensor": (out, columns), "channel": (1, columns), "group": (1, 32)}[strategy]
        codes = random.integers(-128, 128, (out, columns)).astype(np.int8)
        scales = some_scales(random, (out // tall, columns // wide), ml_dtypes.bfloat16)
        zeros = random.integers(-128, 128, scales.shape) * (not symmetric)
        tensors = {"weight": codes, "weight_scale": scales.reshape(-1) if strategy == "tensor" else scales}
        if not symmetric:
            tensors["weight_zero_point"] = zeros.astype(np.int8).reshape(tensors["weight_scale"].shape)
        repeated = np.repeat(zeros, tall, axis=0), np.repeat(scales, tall, axis=0)
        return tensors, expand(codes, *repeated, lambda column: column // wide)

    size = 32 if strategy == "group" else None
    return compressed(
        "int-quantized", layer, num_bits=8, type="int", symmetric=symmetric, strategy=strategy, group_size=size
    )


def packed(bits: int, size: int, *, symmetric: bool, order: bool = False, scale: Any = np.float16) -> Writer:
    def layer(random: Any, out: int, columns: int) -> tuple[Tensors, Array]:
        group, middle = columns if size == -1 else size, 2 ** (bits - 1)
        count = -(-columns // group)
        groups = random.permutation(np.arange(columns) // group) if order else np.arange(columns) // group
        codes = random.integers(-middle, middle, (out, columns))
        zeros = random.integers(-middle, middle, (out, count)) * (not symmetric)
        scales = some_scales(random, (out, count), scale)
        shape = np.array([out, columns], np.int64)
        tensors = {"weight_packed": pack(codes + middle, bits), "weight_scale": scales, "weight_shape": shape}
        if not symmetric:
            tensors["weight_zero_point"] = pack((zeros + middle).T, bits).T
        if order:
            tensors["weight_g_idx"] = groups.astype(np.int32)
        return tensors, expand(codes, zeros, scales, lambda column: groups[column])

    strategy, group_size = ("channel", None) if size == -1 else ("group", size)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    return compressed("pack-quantized", layer, **weights)


def floats(kind: str) -> Writer:
    block = [64, 32] if kind == "block" else None

    def layer(random: Any, out: int, columns: int) -> tuple[Tensors, Array]:
        codes = random.standard_normal((out, columns)).astype(F8)
        tall, wide = {"tensor": (out, columns), "channel": (1, columns), "block": (64, 32)}[kind]
        scales = some_scales(random, (-(-out // tall), -(-columns // wide)), ml_dtypes.bfloat16)
        tensors = {"weight": codes, "weight_scale": scales.reshape(1) if kind == "tensor" else scales}
        return tensors, expand_blocks(codes, scales, tall, wide)

    return compressed("float-quantized", layer, num_bits=8, type="float", strategy=kind, block_structure=block)


CASES = {
    "gptq": gptq(4, 64), "gptq-column": gptq(4, -1), "gptq-8": gptq(8, 32), "gptq-v2": gptq(4, 128, v2=True),
    "gptq-act": gptq(4, 32, desc_act=True), "gptq-sym": gptq(4, 64, zero=8),
    "gptq-v2-sym": gptq(4, -1, v2=True, zero=8),
    "gptq-act-sym": gptq(4, 32, desc_act=True, zero=8), "gptq-sym-16": gptq(4, 16, zero=8),
    "gptq-sym-32": gptq(4, 32, zero=8), "gptq-8-sym-32": gptq(8, 32, zero=128),
    "awq": awq(64), "awq-sym": awq(64, zero=8),
    "fp8-block": fp8("block"), "fp8-tensor": fp8("tensor"), "fp8-channel": fp8("channel"),
    "int-tensor": ints("tensor", symmetric=True), "int-channel": ints("channel", symmetric=True),
    "int-group": ints("group", symmetric=True), "int-zeros": ints("group", symmetric=False),
    "int-tensor-zeros": ints("tensor", symmetric=False),
    "pack-sym": packed(4, 64, symmetric=True), "pack-bf16-sym": packed(4, -1, symmetric=True, scale=ml_dtypes.bfloat16),
    "pack-f32": packed(4, 64, symmetric=True, scale=np.float32), "pack-zeros": packed(4, 64, symmetric=False),
    "pack-8": packed(8, 64, symmetric=True), "pack-8-zeros": packed(8, -1, symmetric=False),
    "pack-order": packed(4, 32, symmetric=False, order=True),
    "float-tensor": floats("tensor"), "float-channel": floats("channel"), "float-block": floats("block"),
}  # fmt: skip
# The types that rows of 128 and of 192 numbers stay in.
KINDS = {
    "gptq": ("int4_64_f16",) * 2, "gptq-column": ("int4_128_f16", "int4_64_f16"), "gptq-8": ("int8_32_f32",) * 2,
    "gptq-v2": ("int4_128_f16", "int4_64_f16"), "gptq-sym": ("int4_64_f16",) * 2,
    "gptq-v2-sym": ("int4_128_f16", "int4_64_f16"), "gptq-sym-32": ("q4_0",) * 2, "gptq-8-sym-32": ("q8_0",) * 2,
    "awq": ("int4_64_f16",) * 2, "awq-sym": ("int4_64_f16",) * 2,
    **dict.fromkeys(("fp8-block", "fp8-tensor", "fp8-channel", "float-tensor", "float-channel"), ("fp8_128", "fp8_32")),
    **dict.fromkeys(("int-tensor", "int-channel", "int-tensor-zeros", "pack-8-zeros"), ("int8_128_f32", "int8_64_f32")),
    "int-group": ("int8_32_f32",) * 2, "int-zeros": ("int8_32_f32",) * 2, "float-block": ("fp8_32",) * 2,
    "pack-sym": ("int4_64_f16",) * 2, "pack-bf16-sym": ("int4_128_bf16", "int4_64_bf16"),
    "pack-f32": ("int4_64_f32",) * 2, "pack-zeros": ("int4_64_f16",) * 2, "pack-8": ("int8_64_f32",) * 2,
    **dict.fromkeys(("gptq-act", "gptq-act-sym", "gptq-sym-16", "pack-order"), (None, None)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_format(case: str, tmp_path: Path) -> None:
    wanted = CASES[case].write(tmp_path)
    weights = open_model(tmp_path).weights
    assert set(weights.names()) == set(wanted)
    for name, array in wanted.items():
        assert weights.shape(name) == array.shape and weights.dtype(name) == array.dtype
        np.testing.assert_array_equal(weights.tensor(name), array, strict=True)
        coded = "_proj" in name and "layers.1.mlp.down" not in name
        kind = KINDS[case][array.shape[1] == 192] if coded else None
        assert weights.low_bit(name) is (LOW_BITS[kind] if kind else None)
        parts = (
            (Part(0, 13, 27), Part(1, 0, array.shape[1] // 2 if array.shape[1] == 128 else 64))
            if array.ndim == 2
            else ()
        )
        for part in parts:
            np.testing.assert_array_equal(weights.tensor(name, part), part.cut(array), strict=True)
            if kind and (part.axis == 0 or part.length % LOW_BITS[kind].block == 0):
                np.testing.assert_array_equal(decoded(weights.blocks(name, part), kind), part.cut(array))
        if kind:
            np.testing.assert_array_equal(decoded(weights.blocks(name), kind), array)
    again = pickle.loads(pickle.dumps(weights))  # as ranks get it
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(again.tensor(name), wanted[name])


def decoded(blocks: Array, kind: str) -> Array:
    return next(f for f in BLOCK_FORMATS if f.name == kind).values(blocks)


def test_a_number_that_is_none_makes_its_block_none(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[name][3, 7] = np.nan

    CASES["fp8-tensor"].write(tmp_path, change)
    weights = open_model(tmp_path).weights
    assert np.argwhere(np.isnan(weights.tensor(name))).tolist() == [[3, 7]]
    found = np.isnan(decoded(weights.blocks(name), "fp8_128"))
    assert found[3].all() and not np.delete(found, 3, axis=0).any()


@pytest.mark.parametrize("case", partly(["fp8-block", "awq", "pack-8-zeros"], lambda case: case == "fp8-block"))
def test_plans_keep_blocks_or_expand_them(case: str, tmp_path: Path) -> None:
    wanted = CASES[case].write(tmp_path)
    ids = np.array([[3, 1, 4, 1, 5]])
    results = {}
    for dtype in (None, "auto", "float32"):
        model = AutoLlamaModel.from_pretrained(tmp_path, dtype=dtype)
        own = dict(model.named_parameters())
        name = "model.layers.0.mlp.up_proj.weight"
        assert own[name].type.dtype.name == ("f32" if dtype == "float32" else KINDS[case][0])
        np.testing.assert_array_equal(own[name].numpy(), wanted[name])
        assert own["model.embed_tokens.weight"].type.dtype.name == ("f32" if dtype == "float32" else "f16")
        results[dtype] = np.asarray(mp.compile(model)(ids)).astype(np.float32)
        model.save_pretrained(tmp_path / "expanded")
        again = AutoLlamaModel.from_pretrained(tmp_path / "expanded")
        np.testing.assert_array_equal(dict(again.named_parameters())[name].numpy(), wanted[name])
        what = f"{KINDS[case][0]} expanded to f32 (as requested)" if dtype == "float32" else f"{KINDS[case][0]} kept"
        assert f" {what}" in _stored_types(model)[0]
    np.testing.assert_allclose(results[None], results["float32"], atol=5e-4, rtol=0)
    np.testing.assert_array_equal(results[None], results["auto"])


def test_why_columns_in_another_order_are_expanded(tmp_path: Path) -> None:
    CASES["gptq-act"].write(tmp_path)
    found = _stored_types(AutoLlamaModel.from_pretrained(tmp_path, dtype="float32"))[0]
    assert "13 gptq expanded to f32 (columns that share a scale do not lie together)" in found


def test_origins_tell_schemes_and_files_apart(tmp_path: Path) -> None:
    name, origins = "model.layers.0.mlp.up_proj.weight", []
    for case in ("gptq", "gptq-v2"):
        CASES[case].write(tmp_path)
        origins.append(open_model(tmp_path).weights.origin(name))
    assert origins[0] is not None and origins[1] is not None and origins[0].name != origins[1].name
    tensors = {}
    CASES["gptq"].write(tmp_path, lambda stored: tensors.update(stored))
    (tmp_path / "model.safetensors").unlink()
    scales = {key: np.ascontiguousarray(a) for key, a in tensors.items() if key.endswith("scales")}
    rest = {key: np.ascontiguousarray(a) for key, a in tensors.items() if key not in scales}
    save_file(scales, tmp_path / "a.safetensors")
    save_file(rest, tmp_path / "b.safetensors")
    weight_map = {key: "a.safetensors" if key in scales else "b.safetensors" for key in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_model(tmp_path).weights.origin(name) is None


UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("case", "own", "array", "message"),
    [
        ("gptq", "scales", None, "up_proj' has no scales"),
        ("gptq", "qzeros", None, "up_proj' has no qzeros"),
        ("gptq", "scales", np.zeros((3, 192), np.float16), r"is \[3, 192\]"),
        ("gptq", "qzeros", np.zeros((2, 24), np.int64), "type int64"),
        ("gptq", "qweight", np.zeros(16, np.int32), "must be a matrix"),
        ("gptq", "g_idx", np.zeros(8, np.int32), r"is \[8\]"),
        ("gptq", "g_idx", np.full(128, 2, np.int32), "out of range"),
        ("gptq", "g_idx", np.full(128, -2, np.int32), "out of range"),
        ("gptq-act", "g_idx", None, "up_proj' has no g_idx"),
        ("awq", "qzeros", np.zeros((2, 23), np.int32), r"is \[2, 23\]"),
        ("fp8-block", "weight_scale_inv", None, "has no weight_scale"),
        ("fp8-block", "weight_scale_inv", np.ones((3, 1), np.float32), r"is \[3, 1\]"),
        ("int-zeros", "weight_zero_point", None, "has no weight_zero_point"),
        ("pack-sym", "weight_shape", np.array([192, 99]), r"says \[192, 99\]"),
        ("pack-sym", "weight_shape", np.array([192, -1]), r"says \[192, -1\]"),
        ("pack-zeros", "weight_zero_point", np.zeros((192, 2), np.int8), "type int8"),
        ("pack-order", "weight_g_idx", np.full(128, 4, np.int32), "out of range"),
    ],
)
def test_damaged_layers(case: str, own: str, array: Array | None, message: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors.pop(UP + own)
        if array is not None:
            tensors[UP + own] = array

    CASES[case].write(tmp_path, change)
    with pytest.raises(LoadError, match=message):
        open_model(tmp_path).weights.tensor(UP + "weight")


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "bits 3"),
        ("gptq", {"bits": "4"}, "bits '4'"),
        ("gptq", {"group_size": 0}, "group_size 0"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq with checkpoint_format 'marlin'"),
        ("gptq", {"dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic"),
        ("gptq", {"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'"),
        ("gptq", {"quant_method": ["gptq"]}, r"quantized by \['gptq'\]"),
        ("gptq", {"quant_method": None}, "no quant_method"),
        (
            "pack-sym",
            {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 64, "actorder": "group"}}}},
            "has no weight_g_idx",
        ),
        ("awq", {"version": "gemv"}, "awq with version 'gemv'"),
        ("awq", {"bits": 8}, "bits 8"),
        ("fp8-block", {"weight_block_size": [128]}, "weight_block_size"),
        ("pack-sym", {"format": "nvfp4-pack-quantized"}, "compressed-tensors with format 'nvfp4-pack-quantized'"),
        ("pack-sym", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("pack-sym", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("pack-sym", {"config_groups": {}}, "no config_groups"),
        ("pack-sym", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "pack-quantized weights of 3 bits"),
        ("pack-sym", {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "token"}}}}, "strategy 'token'"),
        (
            "pack-sym",
            {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}},
            "in several ways",
        ),
    ],
)
def test_what_is_not_supported_is_named(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    writer = CASES[case]
    Writer({**writer.config, **changes}, writer.layer).write(tmp_path)
    with pytest.raises(LoadError, match=message):
        open_model(tmp_path)


@pytest.mark.full
def test_experts_stay_in_blocks(tmp_path: Path) -> None:
    """Matrices of experts, each with scales of its own, are one weight; its type is that of all of them."""
    config = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    config |= {"moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    family = family_of("qwen3_moe")
    assert family is not None and family.layout is not None
    made = family.model.from_config(family.config({**config, "torch_dtype": "float32"}), seed=1)
    state = {name: t.numpy() for name, t in made.named_parameters()}
    stored, random = {}, np.random.default_rng(3)
    for name, array in family.layout(made.config).stored(state, made.config).items():
        stored[name] = array.astype(np.float16)
        if "_proj" in name:
            tensors, _ = fp8("block").layer(random, *array.shape)
            stored |= {name.removesuffix("weight") + own: values for own, values in tensors.items()}
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": fp8("block").config}))
    ids, results = np.arange(9)[None], []
    for dtype in (None, "float32"):
        model = AutoLlamaModel.from_pretrained(tmp_path, dtype=dtype)
        kind = str(dict(model.named_parameters())["model.layers.1.mlp.experts.up_proj.weight"].type.dtype)
        assert kind == ("f32" if dtype else "fp8_128")
        results.append(np.asarray(mp.compile(model)(ids, all_logits=True)))
    np.testing.assert_allclose(results[0], results[1], atol=2e-3 * np.abs(results[1]).max(), rtol=0)
