"""LLaMA and its family: configuration, modules, loaders, generation; imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AutoLlamaModel": "auto", "LlamaConfig": "config", "LlamaForCausalLM": "llama", "LlamaModel": "llama",
    "LlamaDecoderLayer": "llama", "LlamaAttention": "llama", "LlamaMLP": "llama", "LlamaRMSNorm": "llama",
    "LlamaRotaryEmbedding": "llama", "Tokenizer": "text.tokenizer", "Generation": "generate.generation",
    "GenerationMixin": "generate.generation", "GenerationStep": "generate.generation",
    "Session": "generate.generation",
    "open_model": "load.checkpoint", "default_model_path": "load.default_model",
}  # fmt: skip
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'monoplan.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"monoplan.models.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
