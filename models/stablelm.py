"""StableLM 3B and StableLM 2: LLaMA with LayerNorm, a quarter of a head rotated, perhaps attention beside the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from monoplan.models.config import LlamaConfig, same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaForCausalLM


@dataclass(frozen=True)
class StableLmConfig(LlamaConfig):
    """StableLM."""

    norm: ClassVar[str] = "layer"
    partial: ClassVar[float | None] = 0.25
    keys: ClassVar[Mapping[str, str]] = {
        **same("use_parallel_residual"), "layer_norm_eps": "rms_norm_eps", "use_qkv_bias": "attention_bias"
    }  # fmt: skip
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"qk_layernorm": (False,)}
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0,
        "attention_bias": False, "attention_out_bias": False,
    }  # fmt: skip
    use_parallel_residual: bool = False

    @property
    def parallel(self) -> int:  # type: ignore[override]
        return 1 if self.use_parallel_residual else 0


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    arguments["use_parallel_residual"] = keys.flag("use_parallel_residual", False)


FAMILIES = {
    "stablelm": Family(
        StableLmConfig.from_dict,
        LlamaForCausalLM,
        GGUF("stablelm", StableLmConfig, _from_gguf, ("use_parallel_residual",)),
    )
}
