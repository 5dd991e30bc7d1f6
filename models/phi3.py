"""Phi-3, Phi-3.5 and Phi-4-mini: q, k and v as one matrix, gate and up as another, a part of a head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from monoplan.models.config import LlamaConfig, same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaForCausalLM


@dataclass(frozen=True)
class Phi3Config(LlamaConfig):
    """Phi-3."""

    joined: ClassVar[bool] = True
    partial: ClassVar[float | None] = 1.0
    keys: ClassVar[Mapping[str, str]] = same("sliding_window")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "eos_token_id": 32000, "pad_token_id": 32000, "attention_bias": False,
    }  # fmt: skip

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        rope = arguments["rope_scaling"]
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("su", "yarn", "longrope"):
            rope["rope_type"] = "longrope"  # older files have the other names for it
            rope.setdefault("original_max_position_embeddings", 4096)


FAMILIES = {
    "phi3": Family(
        Phi3Config.from_dict,
        LlamaForCausalLM,
        GGUF("phi3", Phi3Config, names=lambda config: {"ffn_up": "mlp.gate_up_proj"}),
    )
}
