"""Layers whose weight is divided between the ranks of a tensor-parallel group.

For models that are written for it; `mp.compile(model, tp=…)` divides a plain model by itself. Eagerly, and in a plan,
the layers talk to each other through their communicator (one of monoplan.runtime.ranks.comm).
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.context import current
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, check_size, layer_dtype, linear_bound, normal, uniform
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.ops.collective import among


class _Parallel(Module):
    """What all of them share: the group, and the communicator of eager calls and of the plan."""

    def __init__(self, dtype: Any, device: Any, tp_rank: int, tp_size: int, communicator: Any, **divided: int) -> None:
        super().__init__()
        name = type(self).__name__
        self._dtype = layer_dtype(name, dtype, device, tp_size=tp_size, **divided)
        if not 0 <= tp_rank < tp_size:
            raise ArgumentError(f"{name}: tp_rank {tp_rank} is not a rank of a group of {tp_size}")
        for what, whole in divided.items():
            if whole % tp_size:
                raise ArgumentError(
                    f"{name}: {what} {whole} can't be divided evenly between {tp_size} ranks",
                    fix=f"choose a tp_size that divides {whole}",
                )
        self.tp_rank, self.tp_size, self.communicator = tp_rank, tp_size, communicator

    def _shard(self, full: np.ndarray[Any, Any], tp_dim: int | None) -> Parameter:
        """A parameter that is cut along tp_dim (None: whole on each rank)."""
        if tp_dim is None or self.tp_size == 1:
            return Parameter(full, tp_dim=tp_dim or 0)
        piece = np.split(full, self.tp_size, axis=tp_dim)[self.tp_rank]
        return Parameter(piece.copy(), tp_dim=tp_dim, tp_rank=self.tp_rank, tp_size=self.tp_size)

    def _among(self) -> contextlib.AbstractContextManager[None]:
        """Eager collectives go to the communicator; a plan has its own way to it."""
        eager = current() is None and hasattr(self.communicator, "all_gather")
        return among(self.communicator) if eager else contextlib.nullcontext()


class _ParallelLinear(_Parallel):
    """A linear layer whose shards are of values that every rank draws alike."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: Any,
        device: Any,
        tp_rank: int,
        tp_size: int,
        communicator: Any,
        divided: str,
    ) -> None:
        check_size(type(self).__name__, in_features=in_features, out_features=out_features)
        whole = {"in_features": in_features, "out_features": out_features}[divided]
        super().__init__(dtype, device, tp_rank, tp_size, communicator, **{divided: whole})
        self.in_features, self.out_features = in_features, out_features

    def _draw(self, shape: tuple[int, ...], tp_dim: int | None) -> Parameter:
        return self._shard(uniform(shape, linear_bound(self.in_features), self._dtype), tp_dim)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Each rank holds out_features / tp_size rows of the weight and gives that part of the output.

    gather_output: every rank gets all of it, as a vocabulary-parallel head wants.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = "f32",
        device: Any = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        communicator: Any = None,
        *,
        gather_output: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, dtype, device, tp_rank, tp_size, communicator, "out_features")
        self.gather_output = gather_output
        self.weight = self._draw((out_features, in_features), 0)
        self.register_parameter("bias", self._draw((out_features,), 0) if bias else None)

    def forward(self, input: Any, residual: Any = None) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        if self.gather_output and self.tp_size > 1:
            with self._among():
                y = F.all_gather(y, dim=-1, world=self.tp_size)
        return y if residual is None else y + residual


class RowParallelLinear(_ParallelLinear):
    """Each rank holds in_features / tp_size columns of the weight; the outputs are summed over the ranks.

    The input is this rank's part, as a ColumnParallelLinear before it gives.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = "f32",
        device: Any = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        communicator: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype, device, tp_rank, tp_size, communicator, "in_features")
        self.weight = self._draw((out_features, in_features), 1)
        self.register_parameter("bias", self._draw((out_features,), None) if bias else None)

    def forward(self, input: Any, residual: Any = None) -> Tensor:
        if self.tp_size == 1:  # nothing to sum: the plain layer, which passes can fuse
            y = F.linear(input, self.weight, self.bias)
        else:
            with self._among():
                y = F.all_reduce(F.linear(input, self.weight), world=self.tp_size)
            y = y if self.bias is None else y + self.bias  # once, not once for each rank
        return y if residual is None else y + residual


class VocabParallelEmbedding(_Parallel):
    """Each rank holds num_embeddings / tp_size rows of the table and gives zeros for ids that others have; the ranks
    add up."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: Any = "f32",
        device: Any = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        communicator: Any = None,
    ) -> None:
        check_size("VocabParallelEmbedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        super().__init__(dtype, device, tp_rank, tp_size, communicator, num_embeddings=num_embeddings)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = self._shard(normal((num_embeddings, embedding_dim), self._dtype), 0)

    def forward(self, input: Any) -> Tensor:
        if self.tp_size == 1:
            return F.embedding(input, self.weight)
        ids = as_tensor(input)
        rows = self.num_embeddings // self.tp_size
        first = self.tp_rank * rows
        mine = F.logical_and(ids >= first, ids < first + rows)
        known = F.logical_and(ids >= 0, ids < self.num_embeddings)
        # An id that nobody has stays as it is, so that the lookup reports it.
        found = F.embedding(F.where(mine, ids - first, F.where(known, 0, ids)), self.weight)
        with self._among():
            return F.all_reduce(F.where(mine.unsqueeze(-1), found, 0.0), world=self.tp_size)

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, "
            f"tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        )
