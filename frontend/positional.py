"""Where a token stands: rotary embedding (RoPE), learned and sinusoidal positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.functional import RopeAlgo
from monoplan.frontend.init import check_device, check_size, checked_dtype, normal
from monoplan.frontend.module import Module
from monoplan.frontend.op_functions import write
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.dims import Dim
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import DType

Array = np.ndarray[Any, Any]


class RoPE(Module):
    """Rotates pairs of a head's dimensions by angles that grow with the position.

    The tables `sin_cache` and `cos_cache`, [max_seq_len, rotary_dim / 2], are buffers that are not saved.
    They are computed in float64 from theta, or from `inv_freq` [rotary_dim / 2] (for scaled variants; `scale`
    multiplies sine and cosine), or taken as they are from `tables` (sine, cosine).
    """

    Algo = RopeAlgo

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        theta: float = 10000.0,
        algo: RopeAlgo | str = RopeAlgo.GPT_J,
        dtype: Any = "f32",
        device: Any = None,
        *,
        rotary_dim: int | None = None,
        inv_freq: Any = None,
        scale: float = 1.0,
        tables: tuple[Any, Any] | None = None,
    ) -> None:
        super().__init__()
        check_size("RoPE", head_dim=head_dim, max_seq_len=max_seq_len)
        check_device("RoPE", device)
        rotated = head_dim if rotary_dim is None else rotary_dim
        if head_dim % 2:
            raise ArgumentError(f"RoPE: head_dim must be even, since dimensions rotate in pairs; got {head_dim}")
        if rotated % 2 or not 2 <= rotated <= head_dim:
            raise ArgumentError(f"RoPE: rotary_dim must be even and between 2 and {head_dim}, got {rotated}")
        self.head_dim, self.max_seq_len, self.theta = head_dim, max_seq_len, float(theta)
        self.rotary_dim, self.algo = rotated, RopeAlgo(algo)
        sin, cos = self._make_tables(checked_dtype("RoPE", dtype), inv_freq, scale, tables)
        self.register_buffer("sin_cache", sin, persistent=False)
        self.register_buffer("cos_cache", cos, persistent=False)

    def _make_tables(self, dtype: DType, inv_freq: Any, scale: float, tables: tuple[Any, Any] | None) -> list[Array]:
        half = self.rotary_dim // 2
        if tables is not None:
            made = [as_tensor(t).numpy() for t in tables]
            for t in made:
                if t.ndim != 2 or t.shape[0] < self.max_seq_len or t.shape[1] != half or t.shape != made[0].shape:
                    raise ArgumentError(
                        f"RoPE: tables must be [{self.max_seq_len}, {half}] (max_seq_len, rotary_dim / 2), "
                        f"got {list(t.shape)}"
                    )
        else:
            if inv_freq is None:
                inv_freq = self.theta ** (-2.0 * np.arange(half, dtype=np.float64) / self.rotary_dim)
            frequencies = np.asarray(inv_freq, np.float64)
            if frequencies.shape != (half,):
                got = list(frequencies.shape)
                raise ArgumentError(f"RoPE: inv_freq must be [{half}] (rotary_dim / 2), got {got}")
            angles = np.arange(self.max_seq_len, dtype=np.float64)[:, None] * frequencies
            made = [np.sin(angles) * scale, np.cos(angles) * scale]
        return [t.astype(dtype.numpy) for t in made]

    def forward(self, x: Any, pos: Any, in_place: Any = False) -> Tensor:
        """forward(x, pos, in_place=False), or forward(y, x, pos), which writes into y.

        x is [seq, heads, head_dim] or [batch, seq, heads, head_dim]; pos integers [seq] or [batch, seq].
        """
        if isinstance(in_place, bool):
            rotated = self._rotate(x, pos)
            return write(rotated, x if in_place else None)
        return write(self._rotate(pos, in_place), x)

    def _rotate(self, x: Any, pos: Any) -> Tensor:
        t = as_tensor(x)
        if t.ndim not in (3, 4) or t.shape[-1] != self.head_dim:
            raise ArgumentError(
                f"RoPE: x must be [(batch,) seq, heads, head_dim] with head_dim {self.head_dim}, got {t.type}"
            )
        return F.rope(t, pos, self.sin_cache, self.cos_cache, self.algo)

    def extra_repr(self) -> str:
        part = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        return (
            f"head_dim={self.head_dim}, max_seq_len={self.max_seq_len}, theta={self.theta}, algo={self.algo.name}{part}"
        )


class PositionalEmbedding(Module):
    """A vector for each position, [max_len, embed_dim]: learned, or `PositionalEmbedding.sinusoidal`."""

    def __init__(self, max_len: int, embed_dim: int, dtype: Any = "f32", device: Any = None) -> None:
        super().__init__()
        check_size("PositionalEmbedding", max_len=max_len, embed_dim=embed_dim)
        check_device("PositionalEmbedding", device)
        self.max_len, self.embed_dim, self.learned = max_len, embed_dim, True
        self.weight = Parameter(normal((max_len, embed_dim), checked_dtype("PositionalEmbedding", dtype)))

    @classmethod
    def sinusoidal(cls, max_len: int, embed_dim: int, dtype: Any = "f32", device: Any = None) -> PositionalEmbedding:
        """sin(pos / 10000**(2i / dim)) at 2i, the cosine at 2i + 1; a buffer that is not saved."""
        check_size("PositionalEmbedding", max_len=max_len, embed_dim=embed_dim)
        check_device("PositionalEmbedding", device)
        made = cls.__new__(cls)
        Module.__init__(made)
        made.max_len, made.embed_dim, made.learned = max_len, embed_dim, False
        column = np.arange(embed_dim)
        angles = np.arange(max_len)[:, None] / 10000.0 ** (2 * (column // 2) / embed_dim)
        values = np.where(column % 2 == 0, np.sin(angles), np.cos(angles))
        kind = checked_dtype("PositionalEmbedding", dtype).numpy
        made.register_buffer("weight", values.astype(kind), persistent=False)
        return made

    def forward(self, seq_len: Dim, offset: Dim = 0) -> Tensor:
        """The vectors of positions offset, offset + 1, …: [seq_len, embed_dim]."""
        if isinstance(seq_len, int) and isinstance(offset, int) and not 0 <= offset <= self.max_len - seq_len:
            raise ArgumentError(
                f"PositionalEmbedding: {seq_len} positions from {offset} on exceed max_len {self.max_len}"
            )
        return self.weight.narrow(0, offset, seq_len)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        kind = "" if self.learned else ", sinusoidal"
        return f"max_len={self.max_len}, embed_dim={self.embed_dim}{kind}"
