"""DeepSeek-V2 and V2-Lite: latent attention, experts chosen by groups beside shared ones, dense layers at first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.layers import Linear
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import LoadError
from monoplan.ir.types import Array, DType, Part
from monoplan.models.config import same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaRMSNorm
from monoplan.models.load.checkpoint import Weights
from monoplan.models.load.config_json import is_size, short
from monoplan.models.load.weight_file import Origin
from monoplan.models.moe import (
    EXPERT_KEYS,
    EXPERT_NAMES,
    PLAIN_EXPERTS,
    Experts,
    Matrices,
    MixtralConfig,
    experts_from_gguf,
    weighted_sum,
)
from monoplan.models.rotary import RopeRows

_EPS = 1e-6  # of the norms of latents, whatever the configuration says of others
_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True)
class DeepseekV2Config(MixtralConfig):
    """DeepSeek-V2; head_dim is that of the rotated part."""

    rope_algo: ClassVar[str] = "gpt_j"
    latent: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {
        **same("attention_bias mlp_bias kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
               " first_k_dense_replace moe_intermediate_size num_experts_per_tok n_shared_experts n_group topk_group"
               " topk_method routed_scaling_factor"),
        "n_routed_experts": "num_experts",
    }  # fmt: skip
    also: ClassVar[tuple[str, ...]] = (*MixtralConfig.also, "num_local_experts", "num_experts")
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "norm_topk_prob": (None, False), "scoring_func": ("softmax",), "moe_layer_freq": (1,),
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "attention_bias": False, "num_experts": 64, "moe_intermediate_size": 1407,
        "q_lora_rank": 1536,
    }  # fmt: skip
    norm_topk_prob: bool = False
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    first_k_dense_replace: int = 0
    n_shared_experts: int = 2
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str = "greedy"
    routed_scaling_factor: float = 1.0

    def __post_init__(self, torch_dtype: Any) -> None:
        self._set("head_dim", self.qk_rope_head_dim)
        super().__post_init__(torch_dtype)
        if self.topk_method not in _METHODS:
            raise LoadError(f"topk_method {short(self.topk_method)} is not supported", fix=f"known: {_METHODS}")
        if self.num_key_value_heads != self.num_attention_heads:
            raise LoadError("num_key_value_heads and num_attention_heads differ", why="all heads share one latent")
        groups, kept = self.groups
        if not is_size(groups) or not is_size(kept) or self.num_experts % groups or kept > groups:
            raise LoadError(f"{kept} of {groups} groups of {self.num_experts} experts can't be kept")

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of experts, and how many of them a token chooses from."""
        return (1, 1) if self.topk_method == "greedy" else (self.n_group or 1, self.topk_group or 1)

    @property
    def cache_shape(self) -> tuple[int, int]:
        return 1, self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        rope = self.rope_scaling or {}
        scale, factor = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5, rope.get("factor", 1.0)
        if rope.get("mscale_all_dim") and factor > 1:
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0) ** 2
        return float(scale)

    def layer_has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        arguments["topk_method"] = arguments.get("topk_method") or "greedy"


class LatentAttention(Module):
    """Attention over latents: a cache has kv_lora_rank numbers for each token, and the rotated part of its key.

    Keys and values of all heads are products of the latent. They are never made: a query is multiplied by the matrix of
    its head's keys first, the sum of latents by that of its values (the absorbed form). So all heads share one key.
    """

    def __init__(self, config: DeepseekV2Config, layer_idx: int) -> None:
        super().__init__()
        c, hidden, bias, dtype = config, config.hidden_size, config.attention_bias, config.dtype
        self.layer_idx, self.heads, self.scaling = layer_idx, c.num_attention_heads, c.layer_scale(layer_idx)
        self.rank, self.sizes, self.value_dim = c.kv_lora_rank, (c.qk_nope_head_dim, c.qk_rope_head_dim), c.v_head_dim
        queries = self.heads * sum(self.sizes)
        self.is_low_rank = c.q_lora_rank is not None
        if c.q_lora_rank is not None:
            self.q_a_proj = Linear(hidden, c.q_lora_rank, bias=bias, dtype=dtype)
            self.q_a_layernorm = LlamaRMSNorm(c.q_lora_rank, eps=_EPS, dtype=dtype)
            self.q_b_proj = Linear(c.q_lora_rank, queries, bias=False, dtype=dtype)
        else:
            self.q_proj = Linear(hidden, queries, bias=False, dtype=dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, self.rank + c.qk_rope_head_dim, bias=bias, dtype=dtype)
        self.kv_a_layernorm = LlamaRMSNorm(self.rank, eps=_EPS, dtype=dtype)
        self.k_b_proj = Matrices(self.heads, c.qk_nope_head_dim, self.rank, dtype)
        self.v_b_proj = Matrices(self.heads, self.rank, c.v_head_dim, dtype)
        self.o_proj = Linear(self.heads * c.v_head_dim, hidden, bias=bias, dtype=dtype)

    def forward(
        self,
        hidden_states: Tensor,
        rope: RopeRows | None,
        past_key_values: KVCache | None = None,
        num_valid: Tensor | None = None,
    ) -> Tensor:
        assert rope is not None
        batch, seq, _ = hidden_states.shape
        rows, each = batch * seq, (batch, seq, self.heads)
        low = self.is_low_rank
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states))) if low else self.q_proj(hidden_states)
        q = q.view(*each, sum(self.sizes))
        plain, turned = q.split(self.sizes, -1)
        latent, key = self.kv_a_proj_with_mqa(hidden_states).split((self.rank, self.sizes[1]), -1)
        positions, sin, cos = rope
        turned, key = (
            F.rope(t, positions, sin, cos, "gpt_j") for t in (turned, key.view(batch, seq, 1, self.sizes[1]))
        )
        k = F.cat([self.kv_a_layernorm(latent).view(batch, seq, 1, self.rank), key], -1)
        heads = F.arange(self.heads).unsqueeze(0).expand(rows, self.heads)
        absorbed = F.expert_linear(plain.reshape(rows, self.heads, self.sizes[0]), self.k_b_proj.weight, heads)
        past = table = None
        if past_key_values is None:
            k = k.transpose(1, 2)
        else:
            past, table = past_key_values.past(self.layer_idx), past_key_values.table
            k, _ = past_key_values.update(self.layer_idx, k, None, num_valid)
        q = F.cat([absorbed.view(*each, self.rank), turned], -1)  # behind the cache: one kernel rotates q and writes k
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, k.narrow(-1, 0, self.rank), is_causal=True, scale=self.scaling, past=past, table=table
        )
        y = y.transpose(1, 2).reshape(rows, self.heads, self.rank)
        y = F.expert_linear(y, self.v_b_proj.weight, heads)
        return self.o_proj(y.reshape(batch, seq, self.heads * self.value_dim))


class DeepseekMoe(Module):
    """The sum of the chosen experts' results, times the router's probabilities, and of the shared experts'."""

    def __init__(self, config: DeepseekV2Config) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False, dtype=config.dtype)
        self.experts, self.choices = Experts(config), config.num_experts_per_tok
        self.scale, (self.groups, self.kept) = float(config.routed_scaling_factor), config.groups
        size = (config.moe_intermediate_size or 0) * config.n_shared_experts
        self.shared_experts = LlamaMLP(replace(config, intermediate_size=size))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        rows, groups = x.reshape(batch * seq, hidden), self.groups
        scores = self.gate(rows).float()
        share, ids = F.route(
            scores, k=self.choices, normalize=False, groups=groups, kept_groups=self.kept, scale=self.scale
        )
        y = self.experts(rows, ids).view(batch, seq, self.choices, hidden)
        y = weighted_sum(y, share.view(batch, seq, self.choices, 1)) + self.shared_experts(x)
        return y.to(x.dtype)  # type: ignore[no-any-return]


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """LLaMA's with latent attention, and experts behind the first layers."""

    attention_class = LatentAttention

    def __init__(self, config: DeepseekV2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.layer_has_experts(layer_idx):
            self.mlp = DeepseekMoe(config)  # type: ignore[assignment]


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """DeepSeek-V2 and V2-Lite."""

    layer_class = DeepseekDecoderLayer


class LatentLayout:
    """Files with the matrices of keys and values of all heads in one, kv_b_proj, and a tensor for each expert."""

    def open(self, weights: Weights, config: Any) -> Weights:
        return SplitLatents(PLAIN_EXPERTS.open(weights, config), config)  # type: ignore[return-value]

    def stored(self, state: Mapping[str, Array], config: Any) -> dict[str, Array]:
        """Our tensors as the files have them."""
        found = {}
        for name, values in state.items():
            if ".k_b_proj." in name:
                both = [values.swapaxes(1, 2), state[name.replace(".k_b_proj.", ".v_b_proj.")]]
                found[name.replace(".k_b_proj.", ".kv_b_proj.")] = np.concatenate(both, 1).reshape(-1, values.shape[1])
            elif ".v_b_proj." not in name:
                found[name] = values
        return PLAIN_EXPERTS.stored(found, config)


class SplitLatents:
    """The tensors of a checkpoint with kv_b_proj as a matrix of keys and one of values for each head."""

    def __init__(self, stored: Weights, config: DeepseekV2Config) -> None:
        self.stored, self.path, self.config = stored, stored.path, config

    def names(self) -> list[str]:
        found = []
        for name in self.stored.names():
            halves = [name.replace(".kv_b_proj.", f".{half}_b_proj.") for half in "kv"]
            found += halves if halves[0] != name else [name]
        return found

    def _half(self, name: str) -> str | None:
        """The name in the files of what one of our tensors is a half of."""
        found = name.replace(".k_b_proj.", ".kv_b_proj.").replace(".v_b_proj.", ".kv_b_proj.")
        return None if found == name else found

    def shape(self, name: str) -> tuple[int, ...]:
        c, whole = self.config, self._half(name)
        if whole is None:
            return self.stored.shape(name)
        wanted = (c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        if self.stored.shape(whole) != wanted:
            raise LoadError(f"{whole} is {list(self.stored.shape(whole))}, not {list(wanted)}", where=self.path)
        sizes = (c.kv_lora_rank, c.qk_nope_head_dim) if ".k_b_proj." in name else (c.v_head_dim, c.kv_lora_rank)
        return c.num_attention_heads, *sizes

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.stored.dtype(self._half(name) or name)

    def tensor(self, name: str, part: Part | None = None) -> Array:
        if (whole := self._half(name)) is None:
            return self.stored.tensor(name, part)
        c = self.config
        both = self.stored.tensor(whole).reshape(c.num_attention_heads, -1, c.kv_lora_rank)
        keys, values = np.split(both, [c.qk_nope_head_dim], 1)
        found = keys.swapaxes(1, 2) if ".k_b_proj." in name else values
        return np.ascontiguousarray(found if part is None else part.cut(found))

    def origin(self, name: str) -> Origin | None:
        found = self.stored.origin(self._half(name) or name)
        if found is None or self._half(name) is None:
            return found
        return dataclasses.replace(found, name=f"{found.name} as {name}")

    def low_bit(self, name: str) -> DType | None:
        return self.stored.low_bit(name) if self._half(name) is None else None

    def blocks(self, name: str, part: Part | None = None) -> Array:
        return self.stored.blocks(name, part)


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    experts_from_gguf(keys, arguments)
    if keys.flag("expert_weights_norm", False) or keys.size("expert_gating_func", 1) != 1:
        raise LoadError("normalised or sigmoid probabilities of experts are not those of DeepSeek-V2")
    rank, turned = keys.size("attention.kv_lora_rank"), keys.size("rope.dimension_count")
    whole, values = keys.size("attention.key_length_mla"), keys.size("attention.value_length_mla")
    if None in (rank, turned, whole, values):
        raise LoadError("the file has no attn_k_b and attn_v_b", why="old converters left them in one matrix",
                        fix="convert the model again")  # fmt: skip
    groups = {"n_group": keys.size("expert_group_count"), "topk_group": keys.size("expert_group_used_count")}
    arguments |= {
        "norm_topk_prob": False,
        "num_key_value_heads": arguments["num_attention_heads"],
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.size("attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": whole - turned,
        "v_head_dim": values,
        "first_k_dense_replace": keys.size("leading_dense_block_count", 0),
        "n_shared_experts": keys.size("expert_shared_count", 1),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "topk_method": _METHODS[(groups["n_group"] or 1) > 1],
        **groups,
    }
    rope, log = arguments["rope_scaling"], keys.number("rope.scaling.yarn_log_multiplier")
    if rope is not None and rope.get("rope_type") == "yarn" and log is not None:
        rope |= {"mscale": 10 * log, "mscale_all_dim": 10 * log}  # llama.cpp knows models with equal ones


_LAYOUT = LatentLayout()
_KEYS = (
    *EXPERT_KEYS, "attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla",
    "attention.value_length_mla", "leading_dense_block_count", "expert_shared_count", "expert_weights_scale",
    "expert_weights_norm", "expert_gating_func", "expert_group_count", "expert_group_used_count",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
_NAMES = {
    **EXPERT_NAMES, "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
}  # fmt: skip
FAMILIES = {
    "deepseek_v2": Family(
        DeepseekV2Config.from_dict,
        DeepseekV2ForCausalLM,
        GGUF("deepseek2", DeepseekV2Config, _from_gguf, _KEYS, lambda config: _NAMES),
        lambda config: _LAYOUT,
    )
}
