"""Model families besides the LLaMA-like ones: each is a file of its own and a row of this table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from monoplan.ir.lazy_dataclass import dataclass


@dataclass(frozen=True)
class GGUF:
    """How llama.cpp's converter writes a family.

    `complete` adds to the arguments of `config`, of which those that all families have are there, what it finds in the
    metadata under `keys`. `names` are those of tensors that differ from LLaMA's.
    """

    arch: str
    config: Any  # LlamaConfig or a subclass
    complete: Callable[[Any, dict[str, Any]], None] = lambda keys, arguments: None
    keys: tuple[str, ...] = ()
    names: Callable[[Any], Mapping[str, str]] = lambda config: {}
    permuted: bool = False  # rows of q and k: the pairs that RoPE turns lie side by side
    offset_norms: bool = False  # the weights of norms are 1 + those of the checkpoint


@dataclass(frozen=True)
class Family:
    """What a checkpoint becomes whose config.json has this family's model_type, or whose GGUF file its architecture.

    `config` reads the contents of config.json into a LlamaConfig or a subclass. `model` makes the module of a
    configuration; its parameters have the names of the checkpoint, or `layout` translates. A model that generates text
    is a GenerationMixin, as LlamaForCausalLM is; a subclass of that has all of it.
    """

    config: Callable[[Mapping[str, Any]], Any]
    model: Callable[[Any], Any]
    gguf: GGUF | None = None
    layout: Callable[[Any], Any] | None = None  # of a configuration: how Hugging Face files differ (load/renamed.py)


# By model_type: a Family, or the file here that has it in its own FAMILIES. LLaMA, Mistral, Qwen2, Qwen3 and SmolLM
# differ in their configuration only: load/config_json.py.
FAMILIES: dict[str, Family | str] = {
    "gemma": "gemma", "gemma2": "gemma", "gemma3_text": "gemma", "phi3": "phi3", "olmo2": "olmo", "olmo3": "olmo",
    "granite": "granite", "smollm3": "smollm3", "gpt2": "gpt2", "gpt_neox": "gpt_neox", "stablelm": "stablelm",
    "cohere": "cohere", "cohere2": "cohere", "gptj": "gptj", "falcon": "falcon",
    "mixtral": "moe", "qwen2_moe": "moe", "qwen3_moe": "moe", "gpt_oss": "gpt_oss",
    "deepseek_v2": "deepseek",
}  # fmt: skip
# By the architecture that a GGUF file names, where it is not the model_type.
ARCHITECTURES = {name: name for name in FAMILIES} | {
    "gemma3": "gemma3_text", "olmo2": "olmo3", "gptneox": "gpt_neox", "command-r": "cohere",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
}  # fmt: skip


def family_of(kind: Any) -> Family | None:
    """The family of a model_type; None where it is LLaMA-like or unknown."""
    found = FAMILIES.get(kind) if isinstance(kind, str) else None
    if isinstance(found, str):
        found = importlib.import_module(f"monoplan.models.{found}").FAMILIES[kind]
    return found
