"""Layers with PyTorch's names, state-dict keys, initial values and printed form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.init import check_device, check_size, checked_dtype, linear_bound, normal, uniform
from monoplan.frontend.module import Module, ModuleList
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.positional import PositionalEmbedding, RoPE
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.errors import ArgumentError


class Linear(Module):
    """input @ weight.T + bias (+ residual), with weight [out_features, in_features]."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: Any = "f32", device: Any = None
    ) -> None:
        super().__init__()
        check_size("Linear", in_features=in_features, out_features=out_features)
        check_device("Linear", device)
        kind = checked_dtype("Linear", dtype)
        self.in_features, self.out_features = in_features, out_features
        bound = linear_bound(in_features)
        self.weight = Parameter(uniform((out_features, in_features), bound, kind))
        self.register_parameter("bias", Parameter(uniform((out_features,), bound, kind)) if bias else None)

    def forward(self, input: Any, residual: Any = None) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
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
        check_size("Embedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        check_device("Embedding", device)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(f"Embedding: padding_idx {padding_idx} is not one of {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        values = normal((num_embeddings, embedding_dim), checked_dtype("Embedding", dtype))
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
        check_device("RMSNorm", device)
        self.normalized_shape, self.eps = _shape("RMSNorm", normalized_shape), float(eps)
        self.elementwise_affine = elementwise_affine
        ones = np.ones(self.normalized_shape, checked_dtype("RMSNorm", dtype).numpy)
        self.register_parameter("weight", Parameter(ones) if elementwise_affine else None)

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
        check_device("LayerNorm", device)
        self.normalized_shape, self.eps = _shape("LayerNorm", normalized_shape), float(eps)
        self.elementwise_affine = elementwise_affine
        kind = checked_dtype("LayerNorm", dtype).numpy
        weight = Parameter(np.ones(self.normalized_shape, kind)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        shift = Parameter(np.zeros(self.normalized_shape, kind)) if elementwise_affine and bias else None
        self.register_parameter("bias", shift)

    def forward(self, x: Any) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GELU(Module):
    """x * Phi(x); `approximate` is "none", "tanh", "fast" or "fast_tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Any) -> Tensor:
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class _Inplace(Module):
    """An activation that may write into its input."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""


class SiLU(_Inplace):
    """x * sigmoid(x)."""

    def forward(self, x: Any) -> Tensor:
        return F.silu(x, self.inplace)


class ReLU(_Inplace):
    """max(x, 0)."""

    def forward(self, x: Any) -> Tensor:
        return F.relu(x, self.inplace)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Any) -> Tensor:
        return F.tanh(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Any) -> Tensor:
        return F.sigmoid(x)


class Softmax(Module):
    """exp(x) / sum(exp(x)) along a dimension."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Any) -> Tensor:
        return F.softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


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


__all__ = [
    "Dropout", "Embedding", "GELU", "Identity", "LayerNorm", "Linear", "Module", "ModuleList", "Parameter",
    "PositionalEmbedding", "RMSNorm", "ReLU", "RoPE", "Sequential", "SiLU", "Sigmoid", "Softmax", "Tanh",
]  # fmt: skip
