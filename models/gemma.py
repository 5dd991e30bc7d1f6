"""Gemma 1, 2 and 3 (text): scaled embeddings, norms on both sides of a block, windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.tensor import Tensor
from monoplan.ir.types import as_dtype
from monoplan.models.config import FrozenDict, LlamaConfig, same, windows_but_every
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaDecoderLayer, LlamaForCausalLM, make_norm
from monoplan.models.load.config_json import rope_of, whole
from monoplan.models.rotary import RopeRows

_SIZES = {
    "vocab_size": 256000, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
_GEMMA2 = {
    **_SIZES, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
}  # fmt: skip

_KEYS = {
    **same("attention_bias query_pre_attn_scalar sliding_window layer_types final_logit_softcapping"),
    "hidden_activation": "hidden_act",
}


@dataclass(frozen=True)
class GemmaConfig(LlamaConfig):
    """Gemma 1."""

    norm: ClassVar[str] = "rms_offset"
    keys: ClassVar[Mapping[str, str]] = same("attention_bias")
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_bidirectional_attention": (None, False)}
    defaults: ClassVar[Mapping[str, Any]] = {
        **_SIZES, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16,
    }  # fmt: skip
    final_logit_softcapping: float | None = None

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        """The square root of their length, rounded as they are."""
        return float(np.asarray(self.hidden_size**0.5).astype(as_dtype(self.dtype).numpy))

    @property
    def logit_softcap(self) -> float | None:  # type: ignore[override]
        return self.final_logit_softcapping

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        if arguments["hidden_act"] == "gelu":  # Gemma 1's files say so, and mean the tanh form
            arguments["hidden_act"] = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """Gemma 2: soft-capping, and a window in every other layer."""

    keys: ClassVar[Mapping[str, str]] = {**_KEYS, "attn_logit_softcapping": "attn_logit_softcapping"}
    also: ClassVar[tuple[str, ...]] = ("sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq")
    defaults: ClassVar[Mapping[str, Any]] = {
        **_GEMMA2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0
    }  # fmt: skip
    pattern: ClassVar[int] = 2  # every n-th layer sees all tokens
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = None

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        pattern = whole(data, "sliding_window_pattern", cls.pattern)
        arguments.setdefault("layer_types", None)
        if arguments["layer_types"] is None:
            arguments["layer_types"] = windows_but_every(pattern, arguments["num_hidden_layers"])

    @property
    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def attention_softcap(self) -> float | None:  # type: ignore[override]
        return self.attn_logit_softcapping


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """Gemma 3: norms of q and k in place of soft-capping; layers with a window have frequencies of their own."""

    trained_rope: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = _KEYS
    # transformers does not read attn_logit_softcapping, and no Gemma 3 has it.
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {**GemmaConfig.only, "attn_logit_softcapping": (None,)}
    defaults: ClassVar[Mapping[str, Any]] = {
        **_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "qk_norm": True
    }  # fmt: skip
    pattern: ClassVar[int] = 6
    local_rope: Mapping[str, Any] = FrozenDict(rope_theta=10000.0)  # type: ignore[misc]

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        super().complete(arguments, data)
        local = rope_of(data, "sliding_attention")
        arguments["local_rope"] = FrozenDict({"rope_theta": data.get("rope_local_base_freq", 10000.0), **local})


class GemmaDecoderLayer(LlamaDecoderLayer):
    """Attention and MLP between two norms each."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = make_norm(config.hidden_size, config)
        self.post_feedforward_layernorm = make_norm(config.hidden_size, config)

    def forward(
        self, x: Tensor, rope: RopeRows, past_key_values: KVCache | None = None, num_valid: Tensor | None = None
    ) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), rope, past_key_values, num_valid)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)  # type: ignore[no-any-return]


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2 and 3."""

    layer_class = GemmaDecoderLayer


def _from_gguf(largest: int, pattern: int, keys: Any, arguments: dict[str, Any]) -> None:
    layers, size = arguments["num_hidden_layers"], arguments["hidden_size"] // arguments["num_attention_heads"]
    # llama.cpp tells the one model with another scale by its number of layers.
    arguments["query_pre_attn_scalar"] = size if layers == largest else arguments["head_dim"]
    arguments["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    arguments["layer_types"] = windows_but_every(pattern, layers) if arguments["sliding_window"] else None


def _gemma2_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    _from_gguf(46, 2, keys, arguments)
    arguments["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)


def _gemma3_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    _from_gguf(62, keys.size("attention.sliding_window_pattern", 6), keys, arguments)
    arguments["local_rope"] = FrozenDict(rope_theta=keys.number("rope.freq_base_swa", 10000.0))


_CAPS = ("final_logit_softcapping", "attn_logit_softcapping", "rope.freq_base_swa", "attention.sliding_window_pattern")
_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
FAMILIES = {
    "gemma": Family(GemmaConfig.from_dict, LlamaForCausalLM, GGUF("gemma", GemmaConfig, offset_norms=True)),
    "gemma2": Family(
        Gemma2Config.from_dict,
        Gemma2ForCausalLM,
        GGUF("gemma2", Gemma2Config, _gemma2_gguf, _CAPS, lambda config: _NAMES, offset_norms=True),
    ),
    "gemma3_text": Family(
        Gemma3Config.from_dict,
        Gemma2ForCausalLM,
        GGUF("gemma3", Gemma3Config, _gemma3_gguf, _CAPS, lambda config: _NAMES, offset_norms=True),
    ),
}
