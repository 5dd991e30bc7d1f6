"""GPT-2: learned positions, LayerNorm, an MLP without a gate; matrices of its files are [inputs, outputs]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from monoplan.frontend.layers import Embedding
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor
from monoplan.models.config import LlamaConfig, same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaForCausalLM, LlamaModel
from monoplan.models.load.renamed import Layout


@dataclass(frozen=True)
class GPT2Config(LlamaConfig):
    """GPT-2."""

    norm: ClassVar[str] = "layer"
    joined: ClassVar[bool] = True
    gated: ClassVar[bool] = False
    keys: ClassVar[Mapping[str, str]] = {
        **same("scale_attn_weights scale_attn_by_inverse_layer_idx"), "n_embd": "hidden_size", "n_head":
        "num_attention_heads", "n_layer": "num_hidden_layers", "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size", "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps",
    }  # fmt: skip
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"add_cross_attention": (False,)}
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50257, "hidden_size": 768, "intermediate_size": None, "num_hidden_layers": 12,
        "num_attention_heads": 12, "hidden_act": "gelu_new", "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "bos_token_id": 50256, "eos_token_id": 50256, "tie_word_embeddings": True, "mlp_bias": True,
    }  # fmt: skip
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        arguments["intermediate_size"] = arguments["intermediate_size"] or 4 * arguments["hidden_size"]

    def layer_scale(self, layer: int) -> float:
        scale = self.attention_scale if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    def layer_has_rope(self, layer: int) -> bool:
        return False


class GPT2Model(LlamaModel):
    """LLaMA's with an embedding of positions."""

    def __init__(self, config: LlamaConfig, layer_class: Callable[..., Module]) -> None:
        super().__init__(config, layer_class)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size, dtype=config.dtype)

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return super().embed(input_ids, position_ids) + self.embed_positions(position_ids)


class GPT2ForCausalLM(LlamaForCausalLM):
    """GPT-2."""

    model_class = GPT2Model


_LAYOUT = Layout(
    {
        "layers": "transformer.h", "model.embed_tokens": "transformer.wte",
        "model.embed_positions": "transformer.wpe", "model.norm": "transformer.ln_f", "lm_head": "lm_head",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
    },
    transposed=True,
    optional_prefix="transformer.",
)  # fmt: skip
FAMILIES = {
    "gpt2": Family(
        GPT2Config.from_dict,
        GPT2ForCausalLM,
        GGUF("gpt2", GPT2Config, names=lambda config: {"position_embd": "model.embed_positions"}),
        lambda config: _LAYOUT,
    )
}
