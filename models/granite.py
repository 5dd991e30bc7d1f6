"""Granite 3: LLaMA with factors on embeddings, residuals, scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from monoplan.models.config import LlamaConfig, same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaForCausalLM


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    """Granite 3."""

    keys: ClassVar[Mapping[str, str]] = {
        **same("attention_bias mlp_bias logits_scaling"), "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "attention_multiplier": "attention_scale",
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {"attention_bias": False}
    embedding_scale: float = 1.0  # type: ignore[misc]
    residual_scale: float = 1.0  # type: ignore[misc]
    attention_scale: float = 1.0  # type: ignore[misc,assignment]
    logits_scaling: float = 1.0  # what logits are divided by

    @property
    def logit_scale(self) -> float:  # type: ignore[override]
        return 1.0 / self.logits_scaling


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    default = arguments["head_dim"] ** -0.5  # llama.cpp's, where there is no such key
    arguments["attention_scale"] = keys.number("attention.scale", default)
    arguments["embedding_scale"] = keys.number("embedding_scale", 1.0)
    arguments["residual_scale"] = keys.number("residual_scale", 1.0)
    arguments["logits_scaling"] = keys.number("logit_scale", 1.0)


_KEYS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
FAMILIES = {
    "granite": Family(
        GraniteConfig.from_dict, LlamaForCausalLM, GGUF("granite", GraniteConfig, _from_gguf, _KEYS, permuted=True)
    )
}
