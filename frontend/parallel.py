"""Linear layers whose weight is divided between the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.init import check_device, check_size, checked_dtype, linear_bound, uniform
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import DType


class _ParallelLinear(Module):
    """What both kinds share: sizes, the group, and shards of values that every rank draws alike."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: Any,
        device: Any,
        tp_rank: int,
        tp_size: int,
        divided: str,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_size(name, in_features=in_features, out_features=out_features, tp_size=tp_size)
        check_device(name, device)
        if not 0 <= tp_rank < tp_size:
            raise ArgumentError(f"{name}: tp_rank {tp_rank} is not a rank of a group of {tp_size}")
        whole = {"in_features": in_features, "out_features": out_features}[divided]
        if whole % tp_size:
            raise ArgumentError(
                f"{name}: {divided} {whole} can't be divided evenly between {tp_size} ranks",
                fix=f"choose a tp_size that divides {whole}",
            )
        self.in_features, self.out_features = in_features, out_features
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self._dtype: DType = checked_dtype(name, dtype)

    def _draw(self, shape: tuple[int, ...], tp_dim: int | None) -> Parameter:
        """A parameter of the full shape, cut along tp_dim (None: whole on each rank)."""
        full = uniform(shape, linear_bound(self.in_features), self._dtype)
        if tp_dim is None or self.tp_size == 1:
            return Parameter(full, tp_dim=tp_dim or 0)
        piece = np.split(full, self.tp_size, axis=tp_dim)[self.tp_rank]
        return Parameter(piece.copy(), tp_dim=tp_dim, tp_rank=self.tp_rank, tp_size=self.tp_size)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Each rank holds out_features / tp_size rows of the weight and gives that part of the output."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = "f32",
        device: Any = None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__(in_features, out_features, dtype, device, tp_rank, tp_size, "out_features")
        self.weight = self._draw((out_features, in_features), 0)
        self.register_parameter("bias", self._draw((out_features,), 0) if bias else None)

    def forward(self, input: Any, residual: Any = None) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        return y if residual is None else y + residual


class RowParallelLinear(_ParallelLinear):
    """Each rank holds in_features / tp_size columns of the weight; the outputs are summed over the ranks.

    The input is this rank's part, as a ColumnParallelLinear before it gives. The communicator is the business
    of the plan: it is kept here for whoever runs one.
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
        super().__init__(in_features, out_features, dtype, device, tp_rank, tp_size, "in_features")
        self.communicator = communicator
        self.weight = self._draw((out_features, in_features), 1)
        self.register_parameter("bias", self._draw((out_features,), None) if bias else None)

    def forward(self, input: Any, residual: Any = None) -> Tensor:
        if self.tp_size == 1:  # nothing to sum: the plain layer, which passes can fuse
            y = F.linear(input, self.weight, self.bias)
        else:
            y = F.all_reduce(F.linear(input, self.weight), world=self.tp_size)
            y = y if self.bias is None else y + self.bias  # once, not once for each rank
        return y if residual is None else y + residual
