"""GPT-NeoX and Pythia: attention and MLP side by side, each behind a LayerNorm, a part of a head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from monoplan.models.config import LlamaConfig, same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaForCausalLM
from monoplan.models.load.renamed import Layout


@dataclass(frozen=True)
class GPTNeoXConfig(LlamaConfig):
    """GPT-NeoX."""

    norm: ClassVar[str] = "layer"
    joined: ClassVar[bool] = True
    gated: ClassVar[bool] = False
    partial: ClassVar[float | None] = 0.25
    keys: ClassVar[Mapping[str, str]] = {
        **same("attention_bias use_parallel_residual"), "layer_norm_eps": "rms_norm_eps"
    }  # fmt: skip
    also: ClassVar[tuple[str, ...]] = ("rotary_pct", "rotary_emb_base")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
        "num_attention_heads": 64, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "bos_token_id": 0, "mlp_bias": True,
    }  # fmt: skip
    use_parallel_residual: bool = True

    @property
    def parallel(self) -> int:  # type: ignore[override]
        return 2 if self.use_parallel_residual else 0

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        rope = arguments["rope_scaling"]
        given = {**(data.get("rope_scaling") or data.get("rope_parameters") or {}), **data}
        for name, old in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
            if isinstance(rope, dict) and given.get(name) is None and given.get(old) is not None:
                rope[name] = given[old]


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    arguments["use_parallel_residual"] = keys.flag("use_parallel_residual", True)


_LAYOUT = Layout(
    {
        "layers": "gpt_neox.layers", "model.embed_tokens": "gpt_neox.embed_in", "lm_head": "embed_out",
        "model.norm": "gpt_neox.final_layer_norm", "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm", "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    joined="heads",
)  # fmt: skip
FAMILIES = {
    "gpt_neox": Family(
        GPTNeoXConfig.from_dict,
        LlamaForCausalLM,
        GGUF("gptneox", GPTNeoXConfig, _from_gguf, ("use_parallel_residual",)),
        lambda config: _LAYOUT,
    )
}
