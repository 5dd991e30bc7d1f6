"""Checkpoints of families whose tensors have other names, or lie otherwise, than the parameters of our modules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np

from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, DType, Part
from monoplan.models.load.checkpoint import Weights
from monoplan.models.load.weight_file import Origin


@dataclass(frozen=True)
class Layout:
    """How a family's Hugging Face files hold its parameters.

    `names` is by our name of a module: those of a layer without their layer, `layers` what is in front of that.
    """

    names: Mapping[str, str]
    transposed: bool = False  # matrices of layers are [inputs, outputs]
    joined: str = ""  # qkv_proj has "heads" of q, k and v each in turn, or "groups" of queries and their k and v
    optional_prefix: str = ""  # some files leave it out
    ignored: str = field(default=r"\.(attn|attention)\.(masked_)?bias$")  # constants that old files have

    def own_name(self, name: str) -> str:
        """Our name of a tensor; one that has none keeps its own."""
        own = {theirs: ours for ours, theirs in self.names.items()}
        full = name if name.startswith((self.optional_prefix, "lm_head")) else self.optional_prefix + name
        match = re.fullmatch(rf"(?:{re.escape(self.names['layers'])}\.(\d+)\.)?(.+)\.(weight|bias)", full)
        if match is None or match[2] not in own:
            return name
        return f"{f'model.layers.{match[1]}.' if match[1] else ''}{own[match[2]]}.{match[3]}"

    def their_name(self, name: str) -> str:
        """The name in the files of one of our tensors."""
        match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
        assert match is not None
        prefix = f"{self.names['layers']}.{match[1]}." if match[1] else ""
        return f"{prefix}{self.names[match[2]]}.{match[3]}"

    def is_transposed(self, name: str, rank: int) -> bool:
        """Whether the files have the transpose of one of our tensors."""
        return self.transposed and ".layers." in name and rank == 2

    def rows(self, name: str, config: Any) -> Array | None:
        """Which row of the file each row of q|k|v is; None: they are the same."""
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if not self.joined or ".qkv_proj." not in name or (self.joined == "heads" and groups != heads):
            return None  # with a single head of keys q, k and v are in order
        rows = np.arange((heads + 2 * groups) * dim).reshape(groups, heads // groups + 2, dim)
        return np.concatenate([rows[:, :-2].ravel(), rows[:, -2].ravel(), rows[:, -1].ravel()])

    def open(self, weights: Weights, config: Any) -> Weights:
        """A checkpoint as our modules want it."""
        return RenamedWeights(weights, self, config)

    def stored(self, state: Mapping[str, Array], config: Any) -> dict[str, Array]:
        """Our tensors as the files have them."""
        found = {}
        for name, values in state.items():
            if (rows := self.rows(name, config)) is not None:
                values = values[np.argsort(rows)]
            turned = self.is_transposed(name, values.ndim)
            found[self.their_name(name)] = np.ascontiguousarray(values.T if turned else values)
        return found


class RenamedWeights:
    """The tensors of a checkpoint under the names, and in the layout, of our modules."""

    def __init__(self, stored: Weights, layout: Layout, config: Any) -> None:
        self.stored, self.layout, self.config, self.path = stored, layout, config, stored.path
        kept = [name for name in stored.names() if not re.search(layout.ignored, name)]
        self._names = {layout.own_name(name): name for name in kept}

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        found = self.stored.shape(self._names[name])
        return found[::-1] if self.layout.is_transposed(name, len(found)) else found

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.stored.dtype(self._names[name])

    def origin(self, name: str) -> Origin | None:
        found = self.stored.origin(self._names[name])
        if found is None or self._is_plain(name):
            return found
        return dataclasses.replace(found, name=f"{found.name} as {name}")

    def tensor(self, name: str, part: Part | None = None) -> Array:
        if self._is_plain(name):
            return self.stored.tensor(self._names[name], part)
        values, rows = self.stored.tensor(self._names[name]), self.layout.rows(name, self.config)
        values = values.T if self.layout.is_transposed(name, values.ndim) else values
        values = values if rows is None else values[rows]
        return np.ascontiguousarray(values if part is None else part.cut(values))

    def low_bit(self, name: str) -> DType | None:
        return self.stored.low_bit(self._names[name]) if self._is_plain(name) else None

    def blocks(self, name: str, part: Part | None = None) -> Array:
        return self.stored.blocks(self._names[name], part)

    def _is_plain(self, name: str) -> bool:
        rank = len(self.stored.shape(self._names[name]))
        return self.layout.rows(name, self.config) is None and not self.layout.is_transposed(name, rank)
