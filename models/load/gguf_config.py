"""What a GGUF file says of its model: metadata and shapes of tensors become a `LlamaConfig`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from monoplan.ir.errors import LoadError
from monoplan.models.config import LlamaConfig
from monoplan.models.load.config_json import changes_numbers
from monoplan.models.load.gguf_header import FLOATS, StoredTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_READ = frozenset(
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length expert_count "
    "attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.sliding_window rope.freq_base "
    "rope.dimension_count rope.scale_linear rope.scaling.type rope.scaling.factor rope.scaling.attn_factor "
    "rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_fast "
    "rope.scaling.yarn_beta_slow".split()
)


class _Keys:
    """The metadata under the name of the architecture, with the types that are wanted."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.arch, self.metadata = metadata.get("general.architecture"), metadata

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry; an array of equal numbers, one for each layer, counts as that number."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        is_array = isinstance(value, np.ndarray) and value.size > 0 and bool((value == value.flat[0]).all())
        return value.flat[0].item() if is_array else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a positive number, a float in its shortest decimal form; 0 stands for an absent key."""
        value = self.get(key, default)
        if value is None or (isinstance(value, (int, float)) and value == 0):
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise LoadError(f"{key} must be a positive number, got {value!r:.60}")
        # The file holds float32, the model was made with the decimal: 1e-05 and not 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> LlamaConfig:
    """Return the configuration in a file, or say what is wrong with it."""
    keys = _Keys(metadata)
    if not isinstance(keys.arch, str) or keys.arch not in ARCHITECTURES:
        raise LoadError(f"unsupported architecture {keys.arch!r}", fix=f"supported: {', '.join(ARCHITECTURES)}")
    if not np.isin(metadata.get("split.count", 1), (0, 1)).all():
        raise LoadError("the model is split into several files", fix="merge them with gguf-split --merge")
    if keys.number("expert_count"):
        raise LoadError("mixture-of-experts models are not supported")
    for name, value in metadata.items():
        key = name.removeprefix(f"{keys.arch}.")
        if key not in (name, *_READ) and not isinstance(value, np.ndarray) and changes_numbers(key, value):
            raise LoadError(f"unsupported metadata {name!r}", why=f"it is {value!r:.60}")
    head_dim = _check_shapes(keys, tensors)
    turned = keys.number("rope.dimension_count", head_dim)
    if keys.arch == "llama" and turned != head_dim:
        raise LoadError(f"rope.dimension_count is {turned}, but a head has {head_dim} values")
    stored = tensors["blk.0.attn_q.weight"].kind if "blk.0.attn_q.weight" in tensors else "F32"
    family: Any = None if keys.arch == "llama" else keys.arch
    return LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=keys.number("embedding_length"),
        intermediate_size=keys.number("feed_forward_length"),
        num_hidden_layers=keys.number("block_count"),
        num_attention_heads=keys.number("attention.head_count"),
        num_key_value_heads=keys.number("attention.head_count_kv"),
        head_dim=head_dim,
        max_position_embeddings=keys.number("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_scaling=_rope(keys, tensors),
        partial_rotary_factor=turned / head_dim,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        sliding_window=keys.number("attention.sliding_window"),
        model_type=family,
        dtype=FLOATS.get(stored, FLOATS["F32"]).name,
    )


def _check_shapes(keys: _Keys, tensors: Mapping[str, StoredTensor]) -> int:
    """Compare the sizes in the metadata with the tensors, and return the length of a head."""
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise LoadError("there is no matrix 'token_embd.weight'")
    rows, width = tensors["token_embd.weight"].shape
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise LoadError(f"the vocabulary has {len(tokens)} tokens, but the embedding has {rows} rows")
    if keys.number("embedding_length") != width:
        raise LoadError(f"embedding_length is {keys.get('embedding_length')!r}, the embedding has {width} columns")
    found = {int(match[1]) for name in tensors if (match := re.match(r"blk\.(\d{1,6})\.", name))}
    layers, heads = keys.number("block_count"), keys.number("attention.head_count")
    if not isinstance(layers, int) or found != set(range(min(layers, len(found) + 1))):
        raise LoadError(f"block_count is {layers!r}, but the file has {len(found)} layers")
    if not isinstance(heads, int) or heads > width:
        raise LoadError(f"attention.head_count must be a positive integer up to {width}, got {heads!r}")
    head_dim = keys.number("attention.key_length", width // heads)
    if not isinstance(head_dim, int) or keys.number("attention.value_length", head_dim) != head_dim:
        raise LoadError("keys and values of different length are not supported")
    return head_dim


def _rope(keys: _Keys, tensors: Mapping[str, StoredTensor]) -> dict[str, Any] | None:
    """Translate the scaling keys and tensors of a GGUF file into `rope_scaling`."""
    kind, context = str(keys.get("rope.scaling.type", "linear")), keys.number("context_length")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) if kind != "none" else 1.0
    original = keys.number("rope.scaling.original_context_length", context)
    attention = keys.number("rope.scaling.attn_factor")
    found = {name: tensors[name].values().ravel().tolist() for name in ROPE_TENSORS if name in tensors}
    if kind == "yarn" and not found:
        values = {name: keys.number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        if attention is not None:
            # llama.cpp multiplies this key with the factor that other formats mean by attention_factor.
            values["attention_factor"] = attention * (1.0 + 0.1 * math.log(max(factor, 1.0)))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **values}
    if kind == "longrope" and found.keys() == set(ROPE_TENSORS[1:]):
        long, short = found["rope_factors_long.weight"], found["rope_factors_short.weight"]
    elif kind in ("none", "linear") and found.keys() == {"rope_freqs.weight"}:
        # Llama 3's scaling comes as one divisor for each frequency: longrope with equal factors is just that.
        long = short = [value * factor for value in found["rope_freqs.weight"]]
        attention, original = 1.0, context
    elif kind in ("none", "linear") and not found:
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    else:
        raise LoadError(f"unsupported rope scaling {kind!r:.60} with the tensors {sorted(found)}")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }
