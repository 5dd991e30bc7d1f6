"""LLaMA and its family: configuration, modules, loaders, generation; imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; what runs is below
    from monoplan.models.auto import AutoLlamaModel, AutoModel
    from monoplan.models.config import LlamaConfig
    from monoplan.models.generate.decoding import Generation
    from monoplan.models.generate.generation import GenerationMixin, GenerationStep, Session
    from monoplan.models.llama import (
        LlamaAttention,
        LlamaDecoderLayer,
        LlamaForCausalLM,
        LlamaMLP,
        LlamaModel,
        LlamaRMSNorm,
        LlamaRotaryEmbedding,
    )
    from monoplan.models.load.checkpoint import open_model
    from monoplan.models.load.default_model import default_model_path
    from monoplan.models.text.tokenizer import Tokenizer

_HOMES = {
    "AutoLlamaModel": "auto", "AutoModel": "auto", "LlamaConfig": "config", "LlamaForCausalLM": "llama",
    "LlamaModel": "llama", "LlamaDecoderLayer": "llama", "LlamaAttention": "llama", "LlamaMLP": "llama",
    "LlamaRMSNorm": "llama", "LlamaRotaryEmbedding": "llama", "Tokenizer": "text.tokenizer",
    "Generation": "generate.decoding", "GenerationMixin": "generate.generation",
    "GenerationStep": "generate.generation", "Session": "generate.generation",
    "open_model": "load.checkpoint", "default_model_path": "load.default_model",
}  # fmt: skip
__all__ = [
    "AutoLlamaModel", "AutoModel", "Generation", "GenerationMixin", "GenerationStep", "LlamaAttention", "LlamaConfig",
    "LlamaDecoderLayer", "LlamaForCausalLM", "LlamaMLP", "LlamaModel", "LlamaRMSNorm", "LlamaRotaryEmbedding",
    "Session", "Tokenizer", "default_model_path", "open_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'monoplan.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"monoplan.models.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
