"""OLMo 2 and 3: norms behind attention and MLP, and over all of q and all of k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor
from monoplan.models.config import FrozenDict, LlamaConfig, layer_kinds, same, windows_but_every
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, make_norm
from monoplan.models.load.config_json import rope_of
from monoplan.models.rotary import RopeRows


@dataclass(frozen=True)
class Olmo2Config(LlamaConfig):
    """OLMo 2."""

    keys: ClassVar[Mapping[str, str]] = same("attention_bias")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50304, "rms_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279,
        "attention_bias": False,
    }  # fmt: skip


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """OLMo 3: windows in three of four layers, where the scaling of RoPE does not hold."""

    keys: ClassVar[Mapping[str, str]] = same("attention_bias sliding_window layer_types")
    defaults: ClassVar[Mapping[str, Any]] = {**Olmo2Config.defaults, "sliding_window": 4096, "rope_theta": 500000.0}
    local_rope: Mapping[str, Any] = FrozenDict(rope_theta=500000.0)  # type: ignore[misc]

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        if arguments.get("layer_types") is None:
            arguments["layer_types"] = windows_but_every(4, arguments["num_hidden_layers"])
        local = rope_of(data, "sliding_attention")
        arguments["local_rope"] = FrozenDict({"rope_theta": 500000.0, **local})


class OlmoAttention(LlamaAttention):
    """LLaMA's with norms over all heads of q and of k."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = make_norm(self.num_heads * self.head_dim, config)
        self.k_norm = make_norm(self.num_kv_heads * self.head_dim, config)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class OlmoDecoderLayer(Module):
    """Attention and MLP, each in front of a norm."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = OlmoAttention(config, layer_idx), LlamaMLP(config)
        self.post_attention_layernorm = make_norm(config.hidden_size, config)
        self.post_feedforward_layernorm = make_norm(config.hidden_size, config)

    def forward(
        self, x: Tensor, rope: RopeRows, past_key_values: KVCache | None = None, num_valid: Tensor | None = None
    ) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, rope, past_key_values, num_valid))
        return x + self.post_feedforward_layernorm(self.mlp(x))  # type: ignore[no-any-return]


class OlmoForCausalLM(LlamaForCausalLM):
    """OLMo 2 and 3."""

    layer_class = OlmoDecoderLayer


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    arguments["qk_norm"] = False  # not of each head
    arguments["local_rope"] = FrozenDict(rope_theta=arguments["rope_theta"])
    pattern = keys.metadata.get(f"{keys.arch}.attention.sliding_window_pattern")
    if arguments["sliding_window"] is not None and pattern is not None:
        if isinstance(pattern, np.ndarray):  # for each layer, whether it has the window
            arguments["layer_types"] = layer_kinds(pattern)
        else:
            every = keys.size("attention.sliding_window_pattern", 4)
            arguments["layer_types"] = windows_but_every(every, arguments["num_hidden_layers"])


_GGUF = GGUF(
    "olmo2",
    Olmo3Config,
    _from_gguf,
    ("attention.sliding_window_pattern",),
    lambda config: {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
)
FAMILIES = {
    "olmo2": Family(Olmo2Config.from_dict, OlmoForCausalLM),
    "olmo3": Family(Olmo3Config.from_dict, OlmoForCausalLM, _GGUF),
}
