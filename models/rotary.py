"""Rotary position embeddings of a model: sine and cosine of every token's angles, from tables or computed."""

from __future__ import annotations

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor
from monoplan.models.config import LlamaConfig
from monoplan.models.rope_scaling import context_length, rope_tables, table_key

RopeRows = tuple[Tensor, Tensor, Tensor]  # the row of each token in the tables, sine table, cosine table


class LlamaRotaryEmbedding(Module):
    """Sine and cosine tables of RoPE, and the row of each token in them.

    longrope and dynamic depend on the length of the sequence: a row's largest position plus one. longrope has
    two tables, one below the other, and a row that is longer than the original context reads the lower one.
    dynamic has frequencies of its own for each length beyond the trained one, so they are computed in the
    graph. What lies in a KV cache keeps the rotation it got. transformers takes one length for the whole
    batch; here each row counts for itself, and so gives what it gives alone. A prompt is not cut into pieces
    where they would get other angles (see decoding.pieces).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.rope_type = (config.rope_scaling or {"rope_type": "default"})["rope_type"]
        self.trained, self.theta, self.dim = config.max_position_embeddings, config.rope_theta, config.rotary_dim
        self.positions = context_length(config)
        self.original = 0  # with two tables: the length from which the second holds
        if self.rope_type == "dynamic":
            self.factor = config.rope_scaling["factor"]  # type: ignore[index]
            exponents = np.arange(0, self.dim, 2).astype(np.float32) / np.float32(self.dim)
            self.register_buffer("exponents", exponents.astype(np.float64), persistent=False)
            return
        sin, cos = rope_tables(config, self.positions)
        if table_key(config, 2**31) != 0:
            self.original = config.rope_scaling["original_max_position_embeddings"]  # type: ignore[index]
            longer = rope_tables(config, self.positions, seq_len=2**31)
            sin, cos = (np.concatenate(pair) for pair in zip((sin, cos), longer, strict=True))
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("cos", cos, persistent=False)

    def forward(self, position_ids: Tensor) -> RopeRows:
        if self.rope_type == "dynamic":
            return self._computed(position_ids)
        if self.original:
            length = position_ids.max(dim=-1, keepdim=True) + 1
            position_ids = position_ids + (length > self.original).to("int64") * self.positions
        return position_ids, self.sin, self.cos

    def _computed(self, position_ids: Tensor) -> RopeRows:
        # The float32 steps of transformers, one by one: at position 20,000 the last bit of a frequency is
        # a thousandth of a radian.
        batch, seq = position_ids.shape
        length = position_ids.max(dim=-1, keepdim=True) + 1  # [batch, 1]
        stretch = length.float() * self.factor / float(self.trained) - (self.factor - 1.0)
        grown = (stretch.to("float64") ** (self.dim / (self.dim - 2))).float() * self.theta
        base = F.where(length > self.trained, grown, self.theta)
        turns = (base.to("float64") ** self.exponents).float()  # [batch, dim / 2]
        angles = position_ids.float().unsqueeze(-1) * (1.0 / turns).unsqueeze(1)  # [batch, seq, dim / 2]
        angles = angles.to("float64").reshape(batch * seq, self.dim // 2)
        rows = F.arange(batch * seq).reshape(batch, seq)
        return rows, F.sin(angles).float(), F.cos(angles).float()
