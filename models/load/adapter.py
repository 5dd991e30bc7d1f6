"""LoRA adapters in PEFT's form: a directory with adapter_config.json and adapter_model.safetensors.

An adapter adds scale * B·A to matrices of a model. It is merged into the weights as they are read (MergedWeights), or
its matrices are arguments of the plan, so that one plan serves many of them (Adapter.arrays).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.ir.errors import LoadError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, DType, Part
from monoplan.models.families import family_of
from monoplan.models.load.checkpoint import Weights
from monoplan.models.load.config_json import read_json
from monoplan.models.load.hub import local_path
from monoplan.models.load.renamed import Layout
from monoplan.models.load.weight_file import Origin

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")
# Keys that change no numbers of a trained adapter, or whose effect is in its tensors' names and shapes.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "peft_type",
    "peft_version", "revision", "target_modules", "task_type", "ensure_weight_tying", "qalora_group_size",
    "fan_in_fan_out", "megatron_config", "megatron_core",
}  # fmt: skip
_READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"}


@dataclass(frozen=True)
class LowRank:
    """What is added to one matrix: scale * b·a, with a [rank, inputs] and b [outputs, rank] as float32."""

    a: Array
    b: Array
    scale: float

    @property
    def delta(self) -> Array:
        """The product."""
        made: Array = (self.b @ self.a) * np.float32(self.scale)
        return made


@dataclass(frozen=True)
class Adapter:
    """The low-rank products of an adapter, by the names of the matrices that they are added to."""

    path: Path
    products: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(len(p.a) for p in self.products.values())

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises what does not fit a model whose parameters have these shapes."""
        problems = []
        for name, p in self.products.items():
            product = (len(p.b), p.a.shape[1])
            if name not in shapes:
                problems.append(f"the model has no {name}")
            elif shapes[name] != product:
                problems.append(f"{name} is {list(shapes[name])}, the adapter's product {list(product)}")
        if problems:
            more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
            raise LoadError("the adapter does not fit the model", where=self.path, why="; ".join(problems[:6]) + more)

    def arrays(self, dtype: DType) -> dict[str, dict[str, Array]]:
        """The matrices as a plan takes them: b with its scale, and all of one rank, filled up with zeros."""
        made = {}
        for name, p in self.products.items():
            more = self.rank - len(p.a)
            a, b = np.pad(p.a, ((0, more), (0, 0))), np.pad(p.b * np.float32(p.scale), ((0, 0), (0, more)))
            made[name] = {"a": a.astype(dtype.numpy), "b": b.astype(dtype.numpy)}
        return made


def open_adapter(path: str | Path, config: Any) -> Adapter:
    """The adapter of a PEFT directory for a model of this configuration."""
    from monoplan.models.load.safetensors import open_checkpoint

    folder = local_path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        fix = "give a directory that PEFT's save_pretrained wrote"
        raise LoadError("there is no adapter in the directory", where=folder, why="no adapter_config.json", fix=fix)
    where, data = folder / "adapter_config.json", read_json(folder / "adapter_config.json")
    _check(data, where)
    tensors = folder / "adapter_model.safetensors"
    if not tensors.is_file():
        fix = "save the adapter as safetensors (safe_serialization=True)"
        raise LoadError("the adapter has no weights", where=folder, why=f"there is no {tensors.name}", fix=fix)
    stored = open_checkpoint(tensors)
    family = family_of(config.model_type)
    layout = None if family is None or family.layout is None else family.layout(config)
    parts: dict[str, dict[str, Array]] = {}
    for name in stored.names():
        match = _TENSOR.fullmatch(name)
        if match is None:
            what, fix = f"tensor {name} of the adapter is not supported", "use an adapter of linear layers alone"
            raise LoadError(what, where=tensors, fix=fix)
        parts.setdefault(match["module"], {})[match["kind"]] = stored.tensor(name).astype(np.float32)
    products = {}
    for module, found in parts.items():
        if found.keys() != {"A", "B"} or any(m.ndim != 2 for m in found.values()):
            raise LoadError(f"the adapter's {module} needs two matrices, lora_A and lora_B", where=tensors)
        rank, own = _of_module(data, "rank_pattern", module, data["r"]), f"{module}.weight"
        if not len(found["A"]) == found["B"].shape[1] == rank:
            shapes = [list(m.shape) for m in found.values()]
            raise LoadError(f"the adapter's {module} has shapes {shapes}, not rank {rank}", where=tensors)
        alpha = _of_module(data, "alpha_pattern", module, data["lora_alpha"])
        scale = alpha / (rank**0.5 if data.get("use_rslora") else rank)
        if isinstance(layout, Layout):  # a family with names of its own
            own = layout.own_name(own)
            if layout.rows(own, config) is not None:
                what, fix = f"an adapter of {module}, whose rows are reordered, is not supported", "merge it with PEFT"
                raise LoadError(what, where=tensors, fix=fix)
        products[own] = LowRank(found["A"], found["B"], float(scale))
    if not products:
        raise LoadError("the adapter has no matrices", where=tensors)
    return Adapter(folder, products)


def _check(data: Mapping[str, Any], where: Path) -> None:
    """Refuses what is no plain LoRA: an unknown key that may change numbers is never ignored."""
    if data.get("peft_type") != "LORA":
        raise LoadError(f"an adapter of type {data.get('peft_type')!r} is not supported", where=where, fix="use LoRA")
    for key, value in data.items():
        if key == "bias" and value != "none":
            raise LoadError("an adapter with biases is not supported", where=where, why=f"bias is {value!r}")
        if key not in _IGNORED | _READ and value not in (None, False, [], {}):
            fix = "merge it with PEFT (merge_and_unload) and load the result"
            raise LoadError(f"{key} of the adapter is not supported", where=where, why=f"it is {value!r:.60}", fix=fix)
    number = (int, float)
    for key, kind in (("r", int), ("lora_alpha", number)):
        if not isinstance(data.get(key), kind) or isinstance(data[key], bool) or data[key] <= 0:
            raise LoadError(
                f"{key} of the adapter must be a number above 0", where=where, why=f"it is {data.get(key)!r}"
            )
    for key, kind in (("rank_pattern", int), ("alpha_pattern", number)):
        found = data.get(key) or {}
        if not isinstance(found, dict) or not all(isinstance(v, kind) and v > 0 for v in found.values()):
            raise LoadError(f"{key} of the adapter must have a number for each pattern", where=where)


def _of_module(data: Mapping[str, Any], key: str, module: str, otherwise: Any) -> Any:
    """What a table of patterns says of a module: PEFT matches the end of its name. Only plain names are supported."""
    for pattern, value in (data.get(key) or {}).items():
        plain = pattern.removeprefix("^")
        if not re.fullmatch(r"[\w.]+", plain):
            raise LoadError(
                f"pattern {pattern!r:.60} in {key} of the adapter is not supported", fix="use names of modules"
            )
        if module == plain or (plain == pattern and module.endswith(f".{plain}")):
            return value
    return otherwise


class MergedWeights:
    """The tensors of a checkpoint with an adapter's products added, as they are read."""

    def __init__(self, stored: Weights, adapter: Adapter) -> None:
        adapter.check({name: stored.shape(name) for name in stored.names()})
        self.stored, self.adapter, self.path = stored, adapter, stored.path
        self.names, self.shape, self.blocks = stored.names, stored.shape, stored.blocks

    def _product(self, name: str) -> LowRank | None:
        return self.adapter.products.get(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """float32 where something was added: that is rounded once, to the model's own type."""
        return self.stored.dtype(name) if self._product(name) is None else np.dtype(np.float32)

    def tensor(self, name: str, part: Part | None = None) -> Array:
        values, product = self.stored.tensor(name, part), self._product(name)
        if product is None:
            return values
        delta = product.delta
        return values.astype(np.float32) + (delta if part is None else part.cut(delta))

    def origin(self, name: str) -> Origin | None:
        return self.stored.origin(name) if self._product(name) is None else None

    def low_bit(self, name: str) -> DType | None:
        return self.stored.low_bit(name) if self._product(name) is None else None
