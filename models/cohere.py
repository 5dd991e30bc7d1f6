"""Cohere's Command R and R7B: attention and MLP side by side behind one LayerNorm, pairs of RoPE side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.tensor import Tensor
from monoplan.ir.types import as_dtype
from monoplan.models.config import LlamaConfig, same, windows_but_every
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from monoplan.models.load.config_json import whole

_ALWAYS: Mapping[str, tuple[Any, ...]] = {
    "use_parallel_block": (True,), "use_gated_activation": (True,), "use_embedding_sharing": (True,),
    "position_embedding_type": ("rope_gptj",), "rotary_pct": (1, 1.0),
}  # fmt: skip


@dataclass(frozen=True)
class CohereConfig(LlamaConfig):
    """Command R."""

    norm: ClassVar[str] = "layer_without_bias"
    parallel: ClassVar[int] = 1
    rope_algo: ClassVar[str] = "gpt_j"
    keys: ClassVar[Mapping[str, str]] = {
        **same("attention_bias logit_scale"), "layer_norm_eps": "rms_norm_eps", "use_qk_norm": "norm_heads"
    }  # fmt: skip
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = _ALWAYS
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "pad_token_id": 0,
        "bos_token_id": 5, "eos_token_id": 255001, "tie_word_embeddings": True, "attention_bias": False,
        "rope_theta": 500000.0,
    }  # fmt: skip
    logit_scale: float = 0.0625  # type: ignore[misc]
    norm_heads: bool = False  # q and k, each head with weights of its own


@dataclass(frozen=True)
class Cohere2Config(CohereConfig):
    """Command R7B: windows in three of four layers, and RoPE in those alone."""

    keys: ClassVar[Mapping[str, str]] = {
        **same("attention_bias logit_scale sliding_window layer_types"), "layer_norm_eps": "rms_norm_eps"
    }  # fmt: skip
    also: ClassVar[tuple[str, ...]] = ("sliding_window_pattern", "_sliding_window_pattern")
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_ALWAYS, "use_qk_norm": (False,)}
    defaults: ClassVar[Mapping[str, Any]] = {**CohereConfig.defaults, "sliding_window": 4096, "rope_theta": 10000.0}

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        if arguments.get("layer_types") is None:
            pattern = whole(data, "sliding_window_pattern", 4)
            arguments["layer_types"] = windows_but_every(pattern, arguments["num_hidden_layers"])

    def layer_has_rope(self, layer: int) -> bool:
        return self.layer_window(layer) is not None


class HeadNorm(Module):
    """LayerNorm of each head, with weight [heads, dim]."""

    def __init__(self, heads: int, dim: int, eps: float, dtype: str) -> None:
        super().__init__()
        self.weight, self.eps = Parameter(np.ones((heads, dim), as_dtype(dtype).numpy)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class CohereAttention(LlamaAttention):
    """LLaMA's, perhaps with norms of q and k."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.qk_norm = config.norm_heads  # type: ignore[attr-defined]
        if self.qk_norm:
            self.q_norm = HeadNorm(self.num_heads, self.head_dim, config.rms_norm_eps, config.dtype)
            self.k_norm = HeadNorm(self.num_kv_heads, self.head_dim, config.rms_norm_eps, config.dtype)


class CohereDecoderLayer(LlamaDecoderLayer):
    """LLaMA's with that attention."""

    attention_class = CohereAttention


class CohereForCausalLM(LlamaForCausalLM):
    """Command R and R7B."""

    layer_class = CohereDecoderLayer


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    arguments["logit_scale"] = keys.number("logit_scale", 1.0)
    arguments["norm_heads"], arguments["qk_norm"] = arguments["qk_norm"], False
    if keys.arch == "cohere2":
        arguments["layer_types"] = windows_but_every(4, arguments["num_hidden_layers"])


FAMILIES = {
    "cohere": Family(
        CohereConfig.from_dict, CohereForCausalLM, GGUF("command-r", CohereConfig, _from_gguf, ("logit_scale",))
    ),
    "cohere2": Family(
        Cohere2Config.from_dict, CohereForCausalLM, GGUF("cohere2", Cohere2Config, _from_gguf, ("logit_scale",))
    ),
}
