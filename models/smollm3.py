"""SmolLM3: LLaMA whose every fourth layer does without RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from monoplan.ir.errors import LoadError
from monoplan.models.config import LlamaConfig, layer_kinds, same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaForCausalLM
from monoplan.models.load.config_json import whole


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """SmolLM3."""

    keys: ClassVar[Mapping[str, str]] = same("attention_bias mlp_bias no_rope_layers sliding_window layer_types")
    also: ClassVar[tuple[str, ...]] = ("no_rope_layer_interval", "use_sliding_window", "max_window_layers")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "pad_token_id": 128004, "bos_token_id": 128000,
        "eos_token_id": 128001, "attention_bias": False, "tie_word_embeddings": True, "rope_theta": 2000000.0,
    }  # fmt: skip
    no_rope_layers: tuple[int, ...] = ()  # for each layer 1: rotated, 0: not; none: all are

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        count = arguments["num_hidden_layers"]
        rotated = arguments.get("no_rope_layers") or _rotated(count, whole(data, "no_rope_layer_interval", 4))
        arguments["no_rope_layers"] = tuple(rotated)
        if len(rotated) != count:
            raise LoadError(f"no_rope_layers has {len(rotated)} numbers, not one for each of {count} layers")
        if arguments.get("layer_types") is None:
            windowed = bool(data.get("use_sliding_window")) and arguments.get("sliding_window") is not None
            arguments["layer_types"] = layer_kinds(windowed and not rotated[i] for i in range(count))

    def layer_has_rope(self, layer: int) -> bool:
        return not self.no_rope_layers or bool(self.no_rope_layers[layer])


def _rotated(layers: int, interval: int) -> tuple[int, ...]:
    return tuple(int((i + 1) % interval != 0) for i in range(layers))


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    arguments["no_rope_layers"] = _rotated(arguments["num_hidden_layers"], 4)  # no key says so: llama.cpp knows it


FAMILIES = {
    "smollm3": Family(
        SmolLM3Config.from_dict, LlamaForCausalLM, GGUF("smollm3", SmolLM3Config, _from_gguf, permuted=True)
    )
}
