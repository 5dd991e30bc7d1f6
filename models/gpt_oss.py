"""gpt-oss: experts with biases in MXFP4, attention with sinks, a window in every other layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from monoplan.ir.errors import LoadError
from monoplan.ir.types import LOW_BITS, Array, DType, Part
from monoplan.models.config import same, windows_but_every
from monoplan.models.families import GGUF, Family
from monoplan.models.load.checkpoint import Weights
from monoplan.models.load.gguf import EXPERT_COLUMNS, dequantized
from monoplan.models.load.weight_file import Origin
from monoplan.models.moe import EXPERT_KEYS, EXPERT_NAMES, MixtralConfig, MoeForCausalLM, experts_from_gguf

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
}  # fmt: skip
_MXFP4 = LOW_BITS["mxfp4"]


@dataclass(frozen=True)
class GptOssConfig(MixtralConfig):
    """gpt-oss."""

    sinks: ClassVar[bool] = True
    expert_bias: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {
        **same("num_experts_per_tok sliding_window layer_types attention_bias swiglu_alpha swiglu_limit"),
        "num_local_experts": "num_experts",
    }
    # What files of the first release say beside it.
    also: ClassVar[tuple[str, ...]] = (*MixtralConfig.also, "experts_per_token", "initial_context_length")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0, "sliding_window": 128, "num_experts": 128, "num_experts_per_tok": 4,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self, torch_dtype: Any) -> None:
        super().__post_init__(torch_dtype)
        for name in ("swiglu_alpha", "swiglu_limit"):
            self._set(name, float(getattr(self, name)))

    @property
    def expert_gate(self) -> str:
        gate, up = f"minimum(x0, {self.swiglu_limit!r})", f"minimum(x1, {self.swiglu_limit!r})"
        swish = f"mul({gate}, sigmoid(mul({gate}, {self.swiglu_alpha!r})))"
        return f"mul({swish}, add(maximum({up}, -{self.swiglu_limit!r}), 1.0))"

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        if not data.get("rope_parameters") and not data.get("rope_scaling"):
            arguments["rope_scaling"] = {**_YARN, **(arguments["rope_scaling"] or {})}
        if data.get("experts_per_token", arguments["num_experts_per_tok"]) != arguments["num_experts_per_tok"]:
            raise LoadError("experts_per_token and num_experts_per_tok differ")
        if arguments.get("layer_types") is None:
            arguments["layer_types"] = windows_but_every(2, arguments["num_hidden_layers"])


class GptOssForCausalLM(MoeForCausalLM):
    """gpt-oss."""


class _Stored(NamedTuple):
    """Where a file has one of our tensors."""

    name: str
    kind: str = ""  # of experts: matrices, [experts, in, out], blocks, or biases
    first: int = 0  # of rows of gate and up in turn
    step: int = 1


class GptOssLayout:
    """Files with gate and up in turn in one tensor, and matrices of experts transposed or in blocks."""

    def open(self, weights: Weights, config: Any) -> Weights:
        return SplitExperts(weights)  # type: ignore[return-value]

    def stored(self, state: Mapping[str, Array], config: Any) -> dict[str, Array]:
        """Our tensors as the files have them."""
        found: dict[str, Array] = {}
        for name, values in state.items():
            head, _, tail = name.partition(".mlp.experts.")
            if tail.startswith("gate_proj."):
                both = np.stack([values, state[name.replace("gate_proj", "up_proj")]], 2)
                values, tail = both.reshape(len(values), -1, *values.shape[2:]), f"gate_up_proj.{tail[10:]}"
            if tail.endswith(".weight"):
                values = np.ascontiguousarray(values.swapaxes(1, 2))
            if tail:
                name = f"{head}.mlp.experts.{tail.replace('.weight', '').replace('.', '_')}"
            if not tail.startswith("up_proj."):
                found[name.replace(".mlp.gate.", ".mlp.router.").replace(".sinks.weight", ".sinks")] = values
        return found


class SplitExperts:
    """The tensors of a gpt-oss checkpoint as our modules want them."""

    def __init__(self, stored: Weights) -> None:
        self.stored, self.path = stored, stored.path
        self._names: dict[str, _Stored] = {}
        for name in stored.names():
            head, _, tail = name.partition(".mlp.experts.")
            own = name.replace(".mlp.router.", ".mlp.gate.").replace(".self_attn.sinks", ".self_attn.sinks.weight")
            base = tail.removesuffix("_bias").removesuffix("_blocks").removesuffix("_scales")
            if tail.endswith("_scales") and f"{head}.mlp.experts.{base}_blocks" in stored.names():
                continue
            if base not in ("gate_up_proj", "down_proj"):
                self._names[own] = _Stored(name)
                continue
            kind = tail.removeprefix(base).removeprefix("_") or "matrices"
            parts = ("gate_proj", "up_proj") if base == "gate_up_proj" else (base,)
            rank = {"matrices": 3, "blocks": 4, "bias": 2}[kind]
            if len(shape := stored.shape(name)) != rank or (rank == 4 and shape[3] * 2 != _MXFP4.block):
                raise LoadError(f"tensor {name!r} can't be {list(shape)}", where=self.path)
            for i, part in enumerate(parts):
                ours = f"{head}.mlp.experts.{part}.{'bias' if kind == 'bias' else 'weight'}"
                self._names[ours] = _Stored(name, kind, i, len(parts))

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        at = self._names[name]
        shape = self.stored.shape(at.name)
        if at.kind == "matrices":
            return shape[0], shape[2] // at.step, shape[1]
        if at.kind == "blocks":
            return shape[0], shape[1] // at.step, shape[2] * _MXFP4.block
        return (shape[0], shape[1] // at.step) if at.kind else shape

    def dtype(self, name: str) -> np.dtype[Any]:
        at = self._names[name]
        return np.dtype(np.float32) if at.kind == "blocks" else self.stored.dtype(at.name)

    def tensor(self, name: str, part: Part | None = None) -> Array:
        at = self._names[name]
        if not at.kind:
            return self.stored.tensor(at.name, part)
        some = part if part is not None and part.axis == 0 else None
        if at.kind == "blocks":
            shape = self.shape(name) if some is None else some.of(self.shape(name))
            values = dequantized("MXFP4", shape, self.blocks(name, some))
        else:
            values = self.stored.tensor(at.name, some)
            values = (values.swapaxes(1, 2) if at.kind == "matrices" else values)[:, at.first :: at.step]
        return np.ascontiguousarray(values if part is None or some is not None else part.cut(values))

    def origin(self, name: str) -> Origin | None:
        at = self._names[name]
        found = self.stored.origin(at.name)
        if found is None or not at.kind:
            return found
        scales = self.stored.origin(_scales(at)) if at.kind == "blocks" else found
        same_file = scales is not None and scales.file is found.file
        return dataclasses.replace(found, name=f"{found.name} as {name}") if same_file else None

    def low_bit(self, name: str) -> DType | None:
        kept = self._names[name].kind == "blocks" and self.shape(name)[1] % EXPERT_COLUMNS == 0
        return _MXFP4 if kept else None

    def blocks(self, name: str, part: Part | None = None) -> Array:
        """The rows of each expert as blocks of a GGUF file: the scale, then elements i and i + 16 in byte i. The files
        have elements 2 i and 2 i + 1 there, and the scales apart."""
        at = self._names[name]
        if part is not None and part.axis:
            raise LoadError(f"{name} can't be cut into parts of its matrices", where=self.path)
        codes = self.stored.tensor(at.name, part)[:, at.first :: at.step]
        scales = self.stored.tensor(_scales(at), part)[:, at.first :: at.step]
        if scales.shape != codes.shape[:3] or {scales.dtype, codes.dtype} != {np.dtype(np.uint8)}:
            raise LoadError(f"tensor {_scales(at)!r} does not fit {at.name!r}", where=self.path)
        halves = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:3], 2, _MXFP4.block // 2)
        blocks = np.concatenate([scales[..., None], halves[..., 0, :] | halves[..., 1, :] << 4], -1)
        return blocks.reshape(len(blocks), -1)


def _scales(at: _Stored) -> str:
    return at.name.removesuffix("blocks") + "scales"


def _from_gguf(keys: Any, arguments: dict[str, Any]) -> None:
    experts_from_gguf(keys, arguments)
    arguments["intermediate_size"] = arguments.pop("moe_intermediate_size") or arguments["intermediate_size"]
    windows = windows_but_every(2, arguments["num_hidden_layers"])
    arguments["layer_types"] = windows if arguments["sliding_window"] else None
    if (arguments["rope_scaling"] or {}).get("rope_type") == "yarn":
        arguments["rope_scaling"]["truncate"] = False  # files do not say so, the model is


_LAYOUT = GptOssLayout()
_NAMES = {**EXPERT_NAMES, "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"}
FAMILIES = {
    "gpt_oss": Family(
        GptOssConfig.from_dict,
        GptOssForCausalLM,
        GGUF("gpt-oss", GptOssConfig, _from_gguf, EXPERT_KEYS, lambda config: _NAMES),
        lambda config: _LAYOUT,
    )
}
