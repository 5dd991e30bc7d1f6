"""Collectives between the ranks of a tensor-parallel group; identity when there is one rank."""

from __future__ import annotations

from monoplan.ir.errors import ArgumentError
from monoplan.ir.opdef import Array, normalize_axis, op, require
from monoplan.ir.types import TensorType


def _reduce_type(x: TensorType, *, world: int) -> TensorType:
    require(world >= 1, f"all_reduce: world must be 1 or more, got {world}")
    return x


@op(_reduce_type, "collective")
def all_reduce(x: Array, *, world: int = 1) -> Array:
    """The sum of x over all ranks, in rank order, on every rank."""
    _one_rank(world, "all_reduce")
    return x


def _gather_type(x: TensorType, *, axis: int, world: int) -> TensorType:
    axis = normalize_axis(axis, x.rank, "all_gather")
    return x.with_shape(d * world if i == axis else d for i, d in enumerate(x.shape))


@op(_gather_type, "collective")
def all_gather(x: Array, *, axis: int = -1, world: int = 1) -> Array:
    """x of every rank, joined along an axis in rank order."""
    _one_rank(world, "all_gather")
    return x


def _one_rank(world: int, name: str) -> None:
    if world != 1:
        raise ArgumentError(
            f"{name} over {world} ranks needs a communicator", fix="run it in a plan compiled with tp="
        )
