"""Layers with PyTorch's names, state-dict keys, initial values and printed form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.functional import RopeAlgo
from monoplan.frontend.module import Module
from monoplan.frontend.op_functions import write
from monoplan.frontend.parameter import Parameter, check_size, layer_dtype, linear_bound, normal, uniform
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.dims import Dim
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import Array, DType

# Low-rank products that layers add to their own, by the layer's id.
_ADDED: ContextVar[Mapping[int, tuple[Any, Any]]] = ContextVar("_ADDED", default=MappingProxyType({}))


@contextlib.contextmanager
def with_low_rank(matrices: Mapping[Linear, tuple[Any, Any]]) -> Iterator[None]:
    """Inside, these layers also add input @ a.T @ b.T: a is [rank, in_features], b [out_features, rank]."""
    token = _ADDED.set({id(layer): both for layer, both in matrices.items()})
    try:
        yield
    finally:
        _ADDED.reset(token)


class Linear(Module):
    """input @ weight.T + bias (+ residual), with weight [out_features, in_features]."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: Any = "f32", device: Any = None
    ) -> None:
        super().__init__()
        kind = layer_dtype("Linear", dtype, device, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        bound = linear_bound(in_features)
        self.weight = Parameter(uniform((out_features, in_features), bound, kind))
        self.register_parameter("bias", Parameter(uniform((out_features,), bound, kind)) if bias else None)

    def forward(self, input: Any, residual: Any = None) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        if (added := _ADDED.get().get(id(self))) is not None:
            y = y + F.linear(F.linear(input, added[0]), added[1])
        return y if residual is None else y + residual

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Embedding(Module):
    """Rows of weight [num_embeddings, embedding_dim] by id; the row of padding_idx starts as zeros."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: Any = "f32",
        device: Any = None,
    ) -> None:
        super().__init__()
        kind = layer_dtype("Embedding", dtype, device, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(f"Embedding: padding_idx {padding_idx} is not one of {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        values = normal((num_embeddings, embedding_dim), kind)
        if self.padding_idx is not None:
            values[self.padding_idx] = 0
        self.weight = Parameter(values)

    def forward(self, input: Any) -> Tensor:
        return F.embedding(input, self.weight)

    def extra_repr(self) -> str:
        tail = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}{tail}"


def _shape(name: str, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = normalized_shape if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
    for n in sizes:
        check_size(name, normalized_shape=n)
    return tuple(sizes)


class RMSNorm(Module):
    """x / sqrt(mean(x**2) + eps) * weight, over the trailing dimensions `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        dtype: Any = "f32",
        device: Any = None,
        *,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        kind = layer_dtype("RMSNorm", dtype, device).numpy
        self.normalized_shape, self.eps = _shape("RMSNorm", normalized_shape), float(eps)
        self.elementwise_affine = elementwise_affine
        weight = Parameter(np.ones(self.normalized_shape, kind)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x: Any) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the trailing dimensions `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: Any = "f32",
        device: Any = None,
    ) -> None:
        super().__init__()
        kind = layer_dtype("LayerNorm", dtype, device).numpy
        self.normalized_shape, self.eps = _shape("LayerNorm", normalized_shape), float(eps)
        self.elementwise_affine = elementwise_affine
        weight = Parameter(np.ones(self.normalized_shape, kind)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        shift = Parameter(np.zeros(self.normalized_shape, kind)) if elementwise_affine and bias else None
        self.register_parameter("bias", shift)

    def forward(self, x: Any) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class Dropout(Module):
    """The input itself: inference drops nothing."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ArgumentError(f"Dropout: p must be a probability, got {p}")
        self.p, self.inplace = p, inplace

    def forward(self, x: Any) -> Tensor:
        return as_tensor(x)

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}"


class Identity(Module):
    """The input itself; arguments of the constructor are taken and ignored, as in PyTorch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any) -> Any:
        return x


class Sequential(Module):
    """Modules applied one after the other; a dict gives them names."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        named = modules[0].items() if len(modules) == 1 and isinstance(modules[0], Mapping) else None
        for name, module in enumerate(modules) if named is None else named:
            self.add_module(str(name), module)

    def forward(self, x: Any) -> Any:
        for module in self._modules.values():
            x = module(x)
        return x

    def append(self, module: Module) -> Sequential:
        self.add_module(str(len(self._modules)), module)
        return self

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Sequential(dict(list(self._modules.items())[index]))
        return list(self._modules.values())[index]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())


# Where a token stands: rotary embedding (RoPE), learned and sinusoidal positions.


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
        kind = layer_dtype("RoPE", dtype, device, head_dim=head_dim, max_seq_len=max_seq_len)
        rotated = head_dim if rotary_dim is None else rotary_dim
        if head_dim % 2:
            raise ArgumentError(f"RoPE: head_dim must be even, since dimensions rotate in pairs; got {head_dim}")
        if rotated % 2 or not 2 <= rotated <= head_dim:
            raise ArgumentError(f"RoPE: rotary_dim must be even and between 2 and {head_dim}, got {rotated}")
        self.head_dim, self.max_seq_len, self.theta = head_dim, max_seq_len, float(theta)
        self.rotary_dim, self.algo = rotated, RopeAlgo(algo)
        sin, cos = self._make_tables(kind, inv_freq, scale, tables)
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
        kind = layer_dtype("PositionalEmbedding", dtype, device, max_len=max_len, embed_dim=embed_dim)
        self.max_len, self.embed_dim, self.learned = max_len, embed_dim, True
        self.weight = Parameter(normal((max_len, embed_dim), kind))

    @classmethod
    def sinusoidal(cls, max_len: int, embed_dim: int, dtype: Any = "f32", device: Any = None) -> PositionalEmbedding:
        """sin(pos / 10000**(2i / dim)) at 2i, the cosine at 2i + 1; a buffer that is not saved."""
        kind = layer_dtype("PositionalEmbedding", dtype, device, max_len=max_len, embed_dim=embed_dim)
        made = cls.__new__(cls)
        Module.__init__(made)
        made.max_len, made.embed_dim, made.learned = max_len, embed_dim, False
        column = np.arange(embed_dim)
        angles = np.arange(max_len)[:, None] / 10000.0 ** (2 * (column // 2) / embed_dim)
        values = np.where(column % 2 == 0, np.sin(angles), np.cos(angles))
        made.register_buffer("weight", values.astype(kind.numpy), persistent=False)
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
