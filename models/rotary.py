"""Rotary position embeddings of a model: sine and cosine of every token's angles, from tables or computed."""

from __future__ import annotations

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor
from monoplan.models.config import LlamaConfig
from monoplan.models.rope_scaling import context_length, inverse_frequencies, rope_tables, table_key

RopeRows = tuple[Tensor, Tensor, Tensor]  # the row of each token in the tables, sine table, cosine table
TABLE_POSITIONS = 2**18  # the longest context with tables: those of 128 values a head take 128 MiB then


class LlamaRotaryEmbedding(Module):
    """Sine and cosine tables of RoPE, and the row of each token in them.

    longrope and dynamic depend on the length of the sequence: a row's largest position plus one. longrope has
    two tables, one below the other, and a row that is longer than the original context reads the lower one.
    dynamic has frequencies of its own for each length beyond the trained one, so they are computed in the
    graph. So are the angles of a context that is too long for a table: a configuration may name any length, and
    most prompts are short. What lies in a KV cache keeps the rotation it got. transformers takes one length for
    the whole batch; here each row counts for itself, and so gives what it gives alone. A prompt is not cut into
    pieces where they would get other angles (see decoding.pieces).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        rope = config.rope_scaling or {"rope_type": "default"}
        self.is_dynamic = rope["rope_type"] == "dynamic"
        self.trained, self.theta, self.dim = config.max_position_embeddings, config.rope_theta, config.rotary_dim
        self.positions, self.scale = context_length(config), 1.0
        two = not self.is_dynamic and table_key(config, 2**31) != 0
        self.original = rope["original_max_position_embeddings"] if two else 0  # the second holds from there on
        self.has_tables = not self.is_dynamic and self.positions <= TABLE_POSITIONS
        lengths = (None, 2**31) if two else (None,)
        if self.is_dynamic:
            self.factor = rope["factor"]
            exponents = np.arange(0, self.dim, 2).astype(np.float32) / np.float32(self.dim)
            self.register_buffer("exponents", exponents.astype(np.float64), persistent=False)
        elif self.has_tables:
            tables = [rope_tables(config, self.positions, seq_len=n) for n in lengths]
            for name, parts in zip(("sin", "cos"), zip(*tables, strict=True), strict=True):
                self.register_buffer(name, np.concatenate(parts), persistent=False)
        else:
            found = [inverse_frequencies(config, n, np.float32) for n in lengths]
            self.scale = found[0][1]
            for name, (values, _) in zip(("frequencies", "longer"), found, strict=False):
                self.register_buffer(name, values.astype(np.float32)[None], persistent=False)  # [1, dim / 2]

    def forward(self, position_ids: Tensor) -> RopeRows:
        if not self.has_tables:
            return self._computed(position_ids)
        if self.original:
            length = position_ids.amax(dim=-1, keepdim=True) + 1
            position_ids = position_ids + (length > self.original).to("int64") * self.positions
        return position_ids, self.sin, self.cos

    def _computed(self, position_ids: Tensor) -> RopeRows:
        batch, seq = position_ids.shape
        frequencies = self._frequencies(position_ids).unsqueeze(1)
        angles = position_ids.float().unsqueeze(-1) * frequencies  # [batch, seq, dim / 2]
        angles = angles.to("float64").reshape(batch * seq, self.dim // 2)
        rows = F.arange(batch * seq).reshape(batch, seq)
        sin, cos = F.sin(angles), F.cos(angles)
        if self.scale != 1.0:
            sin, cos = sin * self.scale, cos * self.scale
        return rows, sin.float(), cos.float()

    def _frequencies(self, position_ids: Tensor) -> Tensor:
        """float32 [batch, dim / 2], or [1, dim / 2] where all rows have the same."""
        if not self.is_dynamic and not self.original:
            return self.frequencies  # type: ignore[no-any-return]
        length = position_ids.amax(dim=-1, keepdim=True) + 1  # [batch, 1]
        if not self.is_dynamic:
            return F.where(length > self.original, self.longer, self.frequencies)
        # The float32 steps of transformers, one by one: at position 20,000 the last bit of a frequency is
        # a thousandth of a radian.
        stretch = length.float() * self.factor / float(self.trained) - (self.factor - 1.0)
        grown = (stretch.to("float64") ** (self.dim / (self.dim - 2))).float() * self.theta
        base = F.where(length > self.trained, grown, self.theta)
        return 1.0 / (base.to("float64") ** self.exponents).float()
