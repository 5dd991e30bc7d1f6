"""Falcon 7B, 40B and 180B: attention and MLP side by side, one or a few heads of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from monoplan.models.config import LlamaConfig, same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaForCausalLM
from monoplan.models.load.renamed import Layout


@dataclass(frozen=True)
class FalconConfig(LlamaConfig):
    """Falcon; without ALiBi."""

    norm: ClassVar[str] = "layer"
    joined: ClassVar[bool] = True
    gated: ClassVar[bool] = False
    keys: ClassVar[Mapping[str, str]] = {
        **same("new_decoder_architecture parallel_attn"), "num_ln_in_parallel_attn": "norms",
        "layer_norm_epsilon": "rms_norm_eps", "num_kv_heads": "num_key_value_heads", "bias": "mlp_bias",
        "ffn_hidden_size": "intermediate_size", "activation": "hidden_act",
    }  # fmt: skip
    also: ClassVar[tuple[str, ...]] = ("multi_query",)
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "alibi": (False, None), "apply_residual_connection_post_layernorm": (False,)
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 65024, "hidden_size": 4544, "intermediate_size": None, "num_attention_heads": 71,
        "hidden_act": "gelu", "rms_norm_eps": 1e-5, "bos_token_id": 11, "eos_token_id": 11,
        "tie_word_embeddings": True, "mlp_bias": False,
    }  # fmt: skip
    new_decoder_architecture: bool = False
    parallel_attn: bool = True
    norms: int | None = None

    @property
    def parallel(self) -> int:  # type: ignore[override]
        if not self.parallel_attn:
            return 0
        return 2 if self.new_decoder_architecture and self.norms in (None, 2) else 1

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        arguments["intermediate_size"] = arguments["intermediate_size"] or 4 * arguments["hidden_size"]
        arguments["attention_bias"] = arguments["mlp_bias"]
        if arguments.get("new_decoder_architecture"):
            arguments["parallel_attn"] = True
        elif data.get("multi_query", True):
            arguments["num_key_value_heads"] = 1


def _layout(config: FalconConfig) -> Layout:
    norms = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
    if config.parallel == 2:
        norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    names = {
        "layers": "transformer.h", "model.embed_tokens": "transformer.word_embeddings",
        "model.norm": "transformer.ln_f", "lm_head": "lm_head", "self_attn.qkv_proj": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h", **norms,
    }  # fmt: skip
    return Layout(names, joined="groups" if config.new_decoder_architecture else "heads")


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    arguments["new_decoder_architecture"] = "blk.0.attn_norm_2.weight" in keys.tensors
    arguments["norms"] = 2 if arguments["new_decoder_architecture"] else 1


def _names(config: FalconConfig) -> Mapping[str, str]:
    # Of two norms, the one of the MLP has the name that the only one has else.
    return {"attn_norm_2": "input_layernorm", "attn_norm": "post_attention_layernorm"} if config.parallel == 2 else {}


FAMILIES = {
    "falcon": Family(
        FalconConfig.from_dict, LlamaForCausalLM, GGUF("falcon", FalconConfig, _from_gguf, names=_names), _layout
    )
}
