"""GPT-J: attention and MLP side by side behind one LayerNorm, pairs of RoPE that lie side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from monoplan.models.config import LlamaConfig
from monoplan.models.families import Family
from monoplan.models.llama import LlamaForCausalLM
from monoplan.models.load.config_json import whole
from monoplan.models.load.renamed import Layout


@dataclass(frozen=True)
class GPTJConfig(LlamaConfig):
    """GPT-J."""

    norm: ClassVar[str] = "layer"
    gated: ClassVar[bool] = False
    parallel: ClassVar[int] = 1
    head_bias: ClassVar[bool] = True
    rope_algo: ClassVar[str] = "gpt_j"
    partial: ClassVar[float | None] = 1.0
    keys: ClassVar[Mapping[str, str]] = {
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps", "rotary_dim": "rotary_dim",
    }  # fmt: skip
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rotary": (True,), "scale_attn_weights": (True,)}
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50400, "hidden_size": 4096, "intermediate_size": None, "num_hidden_layers": 28,
        "num_attention_heads": 16, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "bos_token_id": 50256,
        "eos_token_id": 50256, "attention_bias": False, "mlp_bias": True,
    }  # fmt: skip

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        arguments["intermediate_size"] = arguments["intermediate_size"] or 4 * arguments["hidden_size"]
        dim = arguments["hidden_size"] // arguments["num_attention_heads"]
        arguments.pop("rotary_dim", None)
        turned = dim if data.get("rotary_dim", 64) is None else whole(data, "rotary_dim", 64)
        arguments["rope_scaling"]["partial_rotary_factor"] = turned / dim


_LAYOUT = Layout(
    {
        "layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
        "lm_head": "lm_head", "input_layernorm": "ln_1", "mlp.up_proj": "mlp.fc_in", "mlp.down_proj": "mlp.fc_out",
        "self_attn.q_proj": "attn.q_proj", "self_attn.k_proj": "attn.k_proj", "self_attn.v_proj": "attn.v_proj",
        "self_attn.o_proj": "attn.out_proj",
    }
)  # fmt: skip
FAMILIES = {"gptj": Family(GPTJConfig.from_dict, LlamaForCausalLM, layout=lambda config: _LAYOUT)}
