"""Collectives between the ranks of a tensor-parallel group; identity when there is one rank.

The references ask the communicator of `among(ranks)`: so the interpreter runs a sharded graph, too, if every rank
runs its own.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from monoplan.ir.errors import ArgumentError
from monoplan.ir.opdef import normalize_axis, op, require
from monoplan.ir.types import Array, TensorType


class Ranks(Protocol):
    """What the references need of a communicator."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def gather(self, x: Array) -> Sequence[Array]:
        """x of every rank, in rank order; all have the same type."""
        ...


_ranks: contextvars.ContextVar[Ranks | None] = contextvars.ContextVar("ranks", default=None)


@contextlib.contextmanager
def among(ranks: Ranks | None) -> Iterator[None]:
    """Within it, references of collectives exchange their operands with these ranks."""
    token = _ranks.set(ranks)
    try:
        yield
    finally:
        _ranks.reset(token)


def _reduce_type(x: TensorType, *, world: int) -> TensorType:
    require(world >= 1, f"all_reduce: world must be 1 or more, got {world}")
    return x


@op(_reduce_type, "collective")
def all_reduce(x: Array, *, world: int = 1) -> Array:
    """The sum of x over all ranks, in rank order, on every rank."""
    first, *others = _parts(x, world, "all_reduce")
    for part in others:
        first = first + part
    return first


def _gather_type(x: TensorType, *, axis: int, world: int) -> TensorType:
    require(world >= 1, f"all_gather: world must be 1 or more, got {world}")
    axis = normalize_axis(axis, x.rank, "all_gather")
    return x.with_shape(d * world if i == axis else d for i, d in enumerate(x.shape))


@op(_gather_type, "collective")
def all_gather(x: Array, *, axis: int = -1, world: int = 1) -> Array:
    """x of every rank, joined along an axis in rank order."""
    parts = _parts(x, world, "all_gather")
    return np.concatenate(parts, axis=axis) if world > 1 else x


def _parts(x: Array, world: int, name: str) -> Sequence[Array]:
    if world == 1:
        return [x]
    ranks = _ranks.get()
    if ranks is None or ranks.size != world:
        have = "there is none" if ranks is None else f"there is one of {ranks.size}"
        raise ArgumentError(
            f"{name} over {world} ranks needs a communicator", why=have, fix="compile with tp= on every rank"
        )
    return ranks.gather(x)
