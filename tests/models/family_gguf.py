"""GGUF files of the families, with the names, metadata and changes of values of llama.cpp's converter.

Names of tensors are those of the gguf package (TensorNameMap), which the converter takes; nothing here reads monoplan's
own tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.vocabularies import byte_level

Array = NDArray[Any]
VOCABULARY = 96
WORDS = ["<|end|>", "<|start|>", "a", "b", "ab", *(f"w{i}" for i in range(5, VOCABULARY))]
# llama.cpp wants a merge, and its server holds back tokens that are not whole characters.
TOKENS = byte_level(merges=("a b",)) | {
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (VOCABULARY - 2), np.int32),
}
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """How the converter writes a family: a config.json, metadata beside the common ones, what becomes of a tensor."""

    arch: str
    config: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    change: Callable[[str, Array, Mapping[str, Any]], Array] = lambda name, values, config: values
    tensors: dict[str, Any] = field(default_factory=dict)  # more of them


def _plus_one(name: str, values: Array, config: Mapping[str, Any]) -> Array:
    return values + 1 if name.endswith("norm.weight") else values


def _permuted(name: str, values: Array, config: Mapping[str, Any]) -> Array:
    """LLaMA's order of the rows of q and k."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(config[heads], 2, values.shape[0] // config[heads] // 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _transposed(name: str, values: Array, config: Mapping[str, Any]) -> Array:
    """GPT-2's matrices."""
    return values.T if ".c_" in name and values.ndim == 2 else values


def _in_order(name: str, values: Array, config: Mapping[str, Any]) -> Array:
    """All rows of q, then those of k and of v; the checkpoint has them head by head, or group by group."""
    if "query_key_value" not in name:
        return values
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    rows = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
    parts = (rows[:, :-2], rows[:, -2], rows[:, -1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


_SHORT, _LONG = [1.0 + 0.1 * i for i in range(6)], [1.0 + i for i in range(6)]
_LONGROPE = {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
_FACTORS = {"residual": 0.22, "embedding": 12.0, "attention": 0.3}
_COMMON = {name: SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "torch_dtype")}
_LAYER_NORMS = {**{name: value for name, value in SIZES.items() if name != "rms_norm_eps"}, "layer_norm_eps": 1e-5}
_GEMMA = {**SIZES, "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 7}
FILES = {
    "gemma": Written("gemma", {**SIZES, "head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}, {}, _plus_one),
    "gemma2": Written(
        "gemma2",
        {**_GEMMA, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention.sliding_window": 7},
        _plus_one,
    ),
    "gemma3_text": Written(
        "gemma3",
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 32,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "attention.sliding_window": 7,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        _plus_one,
    ),
    "phi3": Written(
        "phi3",
        {
            **SIZES,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 512,
            "partial_rotary_factor": 0.75,
            "rope_scaling": _LONGROPE,
        },
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 512,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(512)),
            "attention.sliding_window": 0,
        },
        tensors={"rope_factors_long.weight": _LONG, "rope_factors_short.weight": _SHORT},
    ),
    "olmo3": Written(
        "olmo2",
        {**SIZES, "sliding_window": 7, "num_hidden_layers": 5, "rope_theta": 500000.0, "tie_word_embeddings": False},
        {
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [True, True, True, False, True],
            "rope.freq_base": 500000.0,
        },
    ),
    "granite": Written(
        "granite",
        {**SIZES, **{f"{name}_multiplier": value for name, value in _FACTORS.items()}, "logits_scaling": 4.0},
        {"residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.3, "logit_scale": 4.0},
        _permuted,
    ),
    "smollm3": Written(
        "smollm3",
        {**SIZES, "num_hidden_layers": 5, "rope_theta": 5e6},
        {"rope.freq_base": 5e6, "rope.dimension_count": 16},
        _permuted,
    ),
    "gpt2": Written(
        "gpt2",
        {
            **_COMMON,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 256,
            "n_inner": 96,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        {},
        _transposed,
    ),
    "gpt_neox": Written(
        "gptneox",
        {**_LAYER_NORMS, "num_key_value_heads": 4, "rotary_pct": 0.5, "tie_word_embeddings": False},
        {"rope.dimension_count": 8, "use_parallel_residual": True},
        _in_order,
    ),
    "stablelm": Written(
        "stablelm",
        {**_LAYER_NORMS, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
        {"rope.dimension_count": 8, "use_parallel_residual": False},
    ),
    "cohere": Written(
        "command-r",
        {**_LAYER_NORMS, "logit_scale": 0.25, "rope_theta": 75000.0},
        {"rope.freq_base": 75000.0, "logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "cohere2": Written(
        "cohere2",
        {**_LAYER_NORMS, "logit_scale": 0.25, "rope_theta": 75000.0, "num_hidden_layers": 5, "sliding_window": 7},
        {
            "rope.freq_base": 75000.0,
            "logit_scale": 0.25,
            "rope.scaling.type": "none",
            "rope.dimension_count": 16,
            "attention.sliding_window": 7,
        },
    ),
    "mixtral": Written(
        "llama",
        {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": False},
        {"expert_count": 5, "expert_used_count": 2, "rope.freq_base": 1e6, "rope.dimension_count": 16},
        _permuted,
    ),
    "qwen2_moe": Written(
        "qwen2moe",
        {
            **SIZES,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
        {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "expert_shared_feed_forward_length": 48,
        },
    ),
    "qwen3_moe": Written(
        "qwen3moe",
        {
            **SIZES,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "head_dim": 32,
            "tie_word_embeddings": False,
        },
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 64},
    ),
    "gpt_oss": Written(
        "gpt-oss",
        {
            **SIZES,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "head_dim": 32,
            "num_hidden_layers": 2,
            "rope_theta": 11000.0,  # llama.cpp rounds the bounds of yarn, which the model does not: here they are whole
            "rope_scaling": _YARN,
            "tie_word_embeddings": False,
        },
        {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 7,
            "rope.freq_base": 11000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "deepseek_v2": Written(
        "deepseek2",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "rope_scaling": {**_YARN, "truncate": True, "mscale": 0.707, "mscale_all_dim": 0.707},
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,  # that of its other norms
        },
        {
            "attention.head_count_kv": 1,
            "attention.key_length": 48,
            "attention.value_length": 32,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 16,
            "attention.q_lora_rank": 32,
            "attention.kv_lora_rank": 32,
            "leading_dense_block_count": 1,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "expert_feed_forward_length": 64,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": False,
            "expert_gating_func": 1,
            "rope.dimension_count": 16,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    "falcon": Written(
        "falcon",
        {
            **_COMMON,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "max_position_embeddings": 256,
            "layer_norm_epsilon": 1e-5,
            "ffn_hidden_size": 256,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
        {},
        _in_order,
    ),
}


def write(path: Path, written: Written, state: Mapping[str, Array], kind: str = "") -> None:
    """Writes a GGUF file of the state of a checkpoint, in float32; with a `kind` the matrices of experts are of it."""
    import gguf

    c = {**written.config, **{mine: written.config[key] for key, mine in OTHER_NAMES.items() if key in written.config}}
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == written.arch)
    names = gguf.get_tensor_name_map(arch, c["num_hidden_layers"])
    file = gguf.GGUFWriter(path, written.arch)
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    metadata = {
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "block_count": c["num_hidden_layers"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c.get("num_key_value_heads", c["num_attention_heads"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **written.metadata,
    }
    if "rms_norm_eps" in c:
        metadata["attention.layer_norm_rms_epsilon"] = c["rms_norm_eps"]
    else:
        metadata["attention.layer_norm_epsilon"] = c["layer_norm_eps"]
    whole = {f"{written.arch}.{key}": value for key, value in metadata.items()} | TOKENS
    for key, value in whole.items():
        put = {bool: file.add_bool, int: file.add_uint32, float: file.add_float32, str: file.add_string}
        put.get(type(value), file.add_array)(key, value.tolist() if isinstance(value, np.ndarray) else value)
    for name, values in state.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"llama.cpp has no name for {name}"
        stored = np.ascontiguousarray(written.change(name, values, c), np.float32)
        if kind and stored.ndim == 3:
            low_bit = gguf.GGMLQuantizationType[kind.upper()]
            blocks = gguf.quants.quantize(stored.reshape(-1, stored.shape[-1]), low_bit)
            file.add_tensor(found, blocks.reshape(*stored.shape[:2], -1), raw_dtype=low_bit)
        else:
            file.add_tensor(found, stored)
    for name, values in written.tensors.items():
        file.add_tensor(name, np.array(values, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


OTHER_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps", "n_inner": "intermediate_size",
    "num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size",
}  # fmt: skip
