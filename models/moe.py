"""Mixtures of experts: Mixtral, Qwen2-MoE and Qwen3-MoE. A router chooses a few MLPs for each token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from monoplan.frontend import functional as F
from monoplan.frontend.layers import Linear
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, normal
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import LoadError
from monoplan.ir.ops.linear import GATES
from monoplan.ir.types import DType, Part, as_dtype
from monoplan.models.config import LlamaConfig, layer_kinds, same
from monoplan.models.families import GGUF, Family
from monoplan.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from monoplan.models.load.checkpoint import Weights
from monoplan.models.load.config_json import short
from monoplan.models.load.weight_file import Origin

Array = NDArray[Any]


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Mixtral."""

    keys: ClassVar[Mapping[str, str]] = {
        **same("num_experts_per_tok sliding_window"), "num_local_experts": "num_experts"
    }  # fmt: skip
    base_model_tp_plan: ClassVar[Mapping[str, str]] = {
        **LlamaConfig.base_model_tp_plan,
        **{f"layers.*.mlp.experts.{name}": "experts" for name in ("gate_proj", "up_proj", "down_proj")},
        **{f"layers.*.mlp.{shared}.{name}": style
           for shared in ("shared_expert", "shared_experts")
           for name, style in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise"))},
    }  # fmt: skip
    also: ClassVar[tuple[str, ...]] = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    defaults: ClassVar[Mapping[str, Any]] = {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "attention_bias": False, "rope_theta": 1e6,
    }  # fmt: skip
    expert_bias: ClassVar[bool] = False  # of experts and of the router
    num_experts: int = 8
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    moe_intermediate_size: int | None = None  # None: intermediate_size
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self, torch_dtype: Any) -> None:
        super().__post_init__(torch_dtype)
        self._set("mlp_only_layers", tuple(self.mlp_only_layers or ()))
        if not 0 < self.num_experts_per_tok <= self.num_experts:
            raise LoadError(f"{self.num_experts_per_tok} of {self.num_experts} experts can't be chosen")
        if self.activation not in GATES:
            raise LoadError(f"hidden_act {self.hidden_act!r} is not supported in experts")

    @property
    def expert_gate(self) -> str:
        """What experts make of their first two products: see F.expert_linear."""
        return self.activation

    def layer_has_experts(self, layer: int) -> bool:
        """Say whether a layer has experts in place of one MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True)
class Qwen3MoeConfig(MixtralConfig):
    """Qwen3-MoE."""

    keys: ClassVar[Mapping[str, str]] = same(
        "attention_bias num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step"
        " mlp_only_layers sliding_window use_sliding_window"
    )
    also: ClassVar[tuple[str, ...]] = (
        *MixtralConfig.also, "max_window_layers", "num_local_experts",
    )  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "attention_bias": False, "bos_token_id": None,
        "eos_token_id": None, "qk_norm": True, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False, "sliding_window": 4096,
    }  # fmt: skip

    @property
    def use_sliding_window(self) -> bool:
        """A key of config.json."""
        return self.sliding_window is not None

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        if not arguments.pop("use_sliding_window", False):
            arguments["sliding_window"] = None
        if "num_experts" not in data and "num_local_experts" in data:  # the name that transformers 5 writes
            arguments["num_experts"] = data["num_local_experts"]


@dataclass(frozen=True)
class Qwen2MoeConfig(Qwen3MoeConfig):
    """Qwen2-MoE: beside the experts there is one for all tokens, with a gate of its own."""

    keys: ClassVar[Mapping[str, str]] = {
        **same("num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step"
               " mlp_only_layers shared_expert_intermediate_size sliding_window use_sliding_window layer_types"),
        "qkv_bias": "attention_bias",
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3MoeConfig.defaults, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
        "attention_bias": True, "attention_out_bias": False, "qk_norm": False, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    }  # fmt: skip
    shared_expert_intermediate_size: int = 0  # 0: there is none

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        windowed = bool(arguments.get("use_sliding_window"))
        super().complete(arguments, data)
        count, last = arguments["num_hidden_layers"], data.get("max_window_layers", 28)
        if type(last) is not int:
            raise LoadError(f"max_window_layers must be an integer, got {short(last)}")
        if not windowed:
            arguments["layer_types"] = None
        elif arguments.get("layer_types") is None:
            arguments["layer_types"] = layer_kinds(i % 2 == 0 and i < last for i in range(count))


class Matrices(Module):
    """A matrix for each expert."""

    def __init__(self, experts: int, inputs: int, outputs: int, dtype: str, bias: bool = False) -> None:
        super().__init__()
        self.weight = Parameter(normal((experts, outputs, inputs), as_dtype(dtype)))
        self.bias = Parameter(normal((experts, outputs), as_dtype(dtype))) if bias else None


class Experts(Module):
    """The MLPs of a layer."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        count, hidden = config.num_experts, config.hidden_size
        inner = config.moe_intermediate_size or config.intermediate_size
        self.gate_proj = Matrices(count, hidden, inner, config.dtype, config.expert_bias)
        self.up_proj = Matrices(count, hidden, inner, config.dtype, config.expert_bias)
        self.down_proj = Matrices(count, inner, hidden, config.dtype, config.expert_bias)
        self.act = config.expert_gate

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        y = F.expert_linear(x, gate.weight, ids, up.weight, gate.bias, up.bias, gate=self.act)
        return F.expert_linear(y, down.weight, ids, bias=down.bias)


def weighted_sum(y: Tensor, share: Tensor) -> Tensor:
    """(y * share).sum(2) as pointwise ops: a product beside the experts then adds them as it is stored."""
    choices = range(int(y.shape[2]))
    products = [y.narrow(2, j, 1).squeeze(2) * share.narrow(2, j, 1).squeeze(2) for j in choices]
    return sum(products[1:], products[0])


class SparseMLP(Module):
    """The sum of the chosen experts' results, times the router's probabilities."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.num_experts, bias=config.expert_bias, dtype=config.dtype)
        self.experts, self.count, self.choices = Experts(config), config.num_experts, config.num_experts_per_tok
        self.normalized = config.norm_topk_prob
        self.has_shared = isinstance(config, Qwen2MoeConfig) and config.shared_expert_intermediate_size > 0
        if isinstance(config, Qwen2MoeConfig) and self.has_shared:
            shared = replace(config, intermediate_size=config.shared_expert_intermediate_size)
            self.shared_expert = LlamaMLP(shared)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        rows = x.reshape(batch * seq, hidden)
        shared = int(self.has_shared)
        if shared:  # the gate of the shared expert is one more score: one product for both
            scores = F.linear(rows, F.cat([self.gate.weight, self.shared_expert_gate.weight], 0)).float()
        else:
            scores = self.gate(rows).float()
        share, ids = F.route(scores, k=self.choices, normalize=self.normalized, gates=shared)
        y = self.experts(rows, ids).view(batch, seq, self.choices, hidden)
        share = share.view(batch, seq, self.choices + shared, 1)
        if not shared:
            return (y * share).sum(2).to(x.dtype)  # type: ignore[no-any-return]
        share, gate = share.split([self.choices, 1], 2)
        return (weighted_sum(y, share) + gate.squeeze(2) * self.shared_expert(x)).to(x.dtype)  # type: ignore[no-any-return]


class MoeDecoderLayer(LlamaDecoderLayer):
    """LLaMA's with experts."""

    def __init__(self, config: MixtralConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.layer_has_experts(layer_idx):
            self.mlp = SparseMLP(config)  # type: ignore[assignment]


class MoeForCausalLM(LlamaForCausalLM):
    """Mixtral, Qwen2-MoE and Qwen3-MoE."""

    layer_class = MoeDecoderLayer


@dataclass(frozen=True)
class ExpertsLayout:
    """Files with a tensor for each expert; `names` of its matrices by ours, `block` the name of the MLP."""

    names: Mapping[str, str]
    block: str = "mlp"

    def open(self, weights: Weights, config: Any) -> Weights:
        return StackedExperts(weights, self)  # type: ignore[return-value]

    def stored(self, state: Mapping[str, Array], config: Any) -> dict[str, Array]:
        """Our tensors as the files have them."""
        found: dict[str, Array] = {}
        for name, values in state.items():
            head, _, tail = name.partition(".mlp.experts.")
            if tail:
                theirs = self.names[tail.removesuffix(".weight")]
                found |= {f"{head}.{self.block}.experts.{e}.{theirs}.weight": v for e, v in enumerate(values)}
            else:
                found[name.replace(".mlp.gate.", f".{self.block}.gate.")] = values
        return found


class StackedExperts:
    """The tensors of a checkpoint with those of all experts as one."""

    def __init__(self, stored: Weights, layout: ExpertsLayout) -> None:
        self.stored, self.path = stored, stored.path
        own = {theirs: ours for ours, theirs in layout.names.items()}
        self._names: dict[str, list[str]] = {}
        for name in stored.names():
            match = re.fullmatch(rf"(.*)\.{layout.block}\.experts\.(\d+)\.(\w+)\.weight", name)
            if match is None or match[3] not in own:
                self._names[name.replace(f".{layout.block}.gate.", ".mlp.gate.")] = [name]
            else:
                self._names.setdefault(f"{match[1]}.mlp.experts.{own[match[3]]}.weight", []).append(name)
        for names in self._names.values():
            names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")])

    def names(self) -> list[str]:
        return list(self._names)

    def _is_stack(self, name: str) -> bool:
        return ".mlp.experts." in name

    def shape(self, name: str) -> tuple[int, ...]:
        found = self.stored.shape(self._names[name][0])
        return (len(self._names[name]), *found) if self._is_stack(name) else found

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.stored.dtype(self._names[name][0])

    def tensor(self, name: str, part: Part | None = None) -> Array:
        if not self._is_stack(name):
            return self.stored.tensor(self._names[name][0], part)
        values = np.stack([self.stored.tensor(one) for one in self._names[name]])
        return values if part is None else np.ascontiguousarray(part.cut(values))

    def origin(self, name: str) -> Origin | None:
        return None if self._is_stack(name) else self.stored.origin(self._names[name][0])

    def low_bit(self, name: str) -> DType | None:
        first, *others = (self.stored.low_bit(one) for one in self._names[name])
        return first if all(other == first for other in others) else None

    def blocks(self, name: str, part: Part | None = None) -> Array:
        names = self._names[name]
        if not self._is_stack(name):
            return self.stored.blocks(names[0], part)
        if part is not None and part.axis == 0:
            names, part = names[part.start : part.start + part.length], None
        inside = None if part is None else part._replace(axis=part.axis - 1)
        return np.stack([self.stored.blocks(one, inside) for one in names])


def experts_from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    if keys.size("expert_used_count") is None:
        raise LoadError("a mixture-of-experts model without expert_used_count")
    arguments["num_experts"] = keys.size("expert_count")
    arguments["num_experts_per_tok"] = keys.size("expert_used_count")
    arguments["moe_intermediate_size"] = keys.size("expert_feed_forward_length")
    arguments["norm_topk_prob"] = True  # llama.cpp always does


def _from_gguf_shared(keys: Any, arguments: dict[str, Any]) -> None:
    experts_from_gguf(keys, arguments)
    arguments["norm_topk_prob"] = False  # llama.cpp never does for these
    shared = keys.size("expert_shared_feed_forward_length")
    if shared is None:
        raise LoadError("a qwen2moe model without expert_shared_feed_forward_length")
    arguments["shared_expert_intermediate_size"] = shared


EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_SHARED_NAMES = {
    **EXPERT_NAMES, "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_MIXTRAL = ExpertsLayout({"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}, "block_sparse_moe")
PLAIN_EXPERTS = ExpertsLayout({name: name for name in ("gate_proj", "up_proj", "down_proj")})
FAMILIES = {
    "mixtral": Family(
        MixtralConfig.from_dict,
        MoeForCausalLM,
        GGUF("llama", MixtralConfig, experts_from_gguf, EXPERT_KEYS, lambda config: EXPERT_NAMES, permuted=True),
        lambda config: _MIXTRAL,
    ),
    "qwen2_moe": Family(
        Qwen2MoeConfig.from_dict,
        MoeForCausalLM,
        GGUF(
            "qwen2moe",
            Qwen2MoeConfig,
            _from_gguf_shared,
            (*EXPERT_KEYS, "expert_shared_feed_forward_length"),
            lambda config: _SHARED_NAMES,
        ),
        lambda config: PLAIN_EXPERTS,
    ),
    "qwen3_moe": Family(
        Qwen3MoeConfig.from_dict,
        MoeForCausalLM,
        GGUF("qwen3moe", Qwen3MoeConfig, experts_from_gguf, EXPERT_KEYS, lambda config: EXPERT_NAMES),
        lambda config: PLAIN_EXPERTS,
    ),
}
