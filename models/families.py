"""Model families besides the LLaMA-like ones: each is a file of its own and a row of this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monoplan.models.load.checkpoint import OpenModel
from monoplan.models.load.config_json import read_json
from monoplan.models.load.safetensors import open_checkpoint
from monoplan.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Family:
    """What a checkpoint directory becomes whose config.json has this family's model_type.

    `config` reads the contents of config.json into a dataclass with the fields dtype, vocab_size and
    tie_word_embeddings. `model` makes the module of a configuration; its parameters have the names of the checkpoint. A
    model that generates text is a GenerationMixin, as LlamaForCausalLM is; a subclass of that has all of it.
    """

    config: Callable[[Mapping[str, Any]], Any]
    model: Callable[[Any], Any]

    def open(self, path: Path) -> OpenModel:
        """Configuration, weights and tokenizer of a Hugging Face directory."""
        config = self.config(read_json(path / "config.json"))

        def tokenizer() -> Tokenizer:
            return Tokenizer.from_pretrained(path, vocab_size=config.vocab_size)

        return OpenModel(config, open_checkpoint(path), tokenizer)


# By model_type. LLaMA, Mistral, Qwen2, Qwen3 and SmolLM differ in their configuration only: load/config_json.py.
FAMILIES: dict[str, Family] = {}


def family_of(path: Any) -> Family | None:
    """The family of a checkpoint directory; None where it is LLaMA-like, or something else that open_model knows."""
    file = Path(path).expanduser() / "config.json" if FAMILIES and isinstance(path, str | Path) else None
    if file is None or not file.is_file():
        return None
    kind = read_json(file).get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None
