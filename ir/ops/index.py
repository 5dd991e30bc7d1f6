"""Lookups by index. An index out of range is an error that names its position and value."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.dims import bounds, equal, same_dims
from monoplan.ir.errors import ArgumentError
from monoplan.ir.opdef import normalize_axis, op, require
from monoplan.ir.types import Array, TensorType, bool_, i64


def check_range(index: Array, size: int, what: str) -> None:
    """Raises ArgumentError at the first index outside of [0, size)."""
    bad = np.argwhere((index < 0) | (index >= size))
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        raise ArgumentError(f"{what}: index {int(index[place])} at position {list(place)} is out of range [0, {size})")


def _embedding_type(ids: TensorType, weight: TensorType) -> TensorType:
    require(ids.dtype.is_integer, f"embedding: ids must be integers, got {ids}")
    require(weight.rank == 2, f"embedding: the weight must be [vocabulary, features], got {weight}")
    return TensorType(weight.dtype.values, (*ids.shape, weight.shape[1]))


@op(_embedding_type, "gather", low_bit=("weight",))
def embedding(ids: Array, weight: Array) -> Array:
    """Rows of weight, by token id."""
    check_range(ids, weight.shape[0], "embedding")
    return weight[ids]


def _gather_type(x: TensorType, index: TensorType, *, axis: int) -> TensorType:
    require(index.dtype.is_integer, f"gather: the index must be integers, got {index}")
    axis = normalize_axis(axis, x.rank, "gather")
    return x.with_shape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@op(_gather_type, "gather")
def gather(x: Array, index: Array, *, axis: int = 0) -> Array:
    """Slices of x along an axis, by index (numpy's take)."""
    check_range(index, x.shape[axis], "gather")
    return np.take(x, index, axis=axis)


def _along_type(x: TensorType, index: TensorType, *, axis: int) -> TensorType:
    require(index.dtype.is_integer, f"take_along: the index must be integers, got {index}")
    axis = normalize_axis(axis, x.rank, "take_along")
    fits = x.rank == index.rank and all(
        i == axis or equal(a, b) for i, (a, b) in enumerate(zip(x.shape, index.shape, strict=True))
    )
    require(fits, f"take_along: {index} must have the shape of {x} except along axis {axis}")
    return x.with_shape(index.shape)


@op(_along_type, "gather")
def take_along(x: Array, index: Array, *, axis: int = -1) -> Array:
    """x[…, index[…], …] element by element along an axis (numpy's take_along_axis)."""
    check_range(index, x.shape[axis], "take_along")
    return np.take_along_axis(x, index.astype(np.int64), axis=axis)


def _select_type(x: TensorType, rows: TensorType) -> TensorType:
    require(rows.dtype.is_integer and rows.rank == 1, f"select_rows: rows must be integers [batch], got {rows}")
    require(x.rank >= 2 and equal(x.shape[0], rows.shape[0]), f"select_rows: {x} and {rows} differ in batch")
    return x.with_shape((x.shape[0], 1, *x.shape[2:]))


@op(_select_type, "gather")
def select_rows(x: Array, rows: Array) -> Array:
    """x[b, rows[b]] for each b, the dimension kept: the last valid token of each sequence."""
    check_range(rows, x.shape[1], "select_rows")
    return x[np.arange(x.shape[0]), rows][:, None]


def _sort_type(x: TensorType, *, axis: int, descending: bool) -> tuple[TensorType, TensorType]:
    normalize_axis(axis, x.rank, "sort")
    return x, x.with_dtype(i64)


@op(_sort_type, "sort")
def sort(x: Array, *, axis: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """Values and their indices in sorted order along an axis; equal values keep their order."""
    order = _stable_order(x, axis, descending)
    return np.take_along_axis(x, order, axis=axis), order


def _topk_type(x: TensorType, *, k: int, axis: int, largest: bool) -> tuple[TensorType, TensorType]:
    axis = normalize_axis(axis, x.rank, "topk")
    size: Any = x.shape[axis]
    require(isinstance(size, int) and 1 <= k <= size, f"topk: k={k} does not fit axis {axis} of {x}")
    t = x.with_shape(k if i == axis else d for i, d in enumerate(x.shape))
    return t, t.with_dtype(i64)


@op(_topk_type, "sort")
def topk(x: Array, *, k: int, axis: int = -1, largest: bool = True) -> tuple[Array, Array]:
    """The k largest or smallest values and their indices, in that order; ties go to the lowest index."""
    order = np.take(_stable_order(x, axis, largest), np.arange(k), axis=axis)
    return np.take_along_axis(x, order, axis=axis), order


def _stable_order(x: Array, axis: int, descending: bool) -> Array:
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    flipped = np.flip(x, axis)
    order = np.flip(np.argsort(flipped, axis=axis, kind="stable"), axis)
    return x.shape[axis] - 1 - order  # type: ignore[no-any-return]


SCATTERS = ("set", "add", "mul", "max", "min")


def _scatter_type(x: TensorType, index: TensorType, source: TensorType, *, axis: int, reduce: str) -> TensorType:
    require(reduce in SCATTERS, f"scatter: reduce={reduce!r} is not one of {', '.join(SCATTERS)}")
    require(index.dtype.is_integer, f"scatter: the index must be integers, got {index}")
    require(source.dtype == x.dtype, f"scatter: {source} must have the element type of {x}")
    require(x.dtype != bool_ or reduce == "set", f"scatter: reduce={reduce!r} needs numbers, got {x}")
    axis = normalize_axis(axis, x.rank, "scatter")
    require(
        index.rank == x.rank and same_dims(index.shape, source.shape),
        f"scatter: {index} and {source} must have one shape, of the rank of {x}",
    )
    for i, (n, room) in enumerate(zip(index.shape, x.shape, strict=True)):
        _, high = bounds(room - n)
        fits = i == axis or high is None or high >= 0
        require(fits, f"scatter: {index} is larger than {x} in dimension {i}, which is not axis {axis}")
    return x


@op(_scatter_type, "scatter", bounded=True)
def scatter(x: Array, index: Array, source: Array, *, axis: int = 0, reduce: str = "set") -> Array:
    """x with source[…, i, …] at place index[…, i, …] of an axis: set there, added, or what `reduce` says.

    Elements are taken in the order of the axis, so the last of several is the one that is set, and sums are the same
    in every run.
    """
    check_range(index, x.shape[axis], "scatter")
    out = x.copy()
    where: list[Any] = list(np.indices(index.shape, sparse=True))
    where[axis] = index.astype(np.int64)
    # One element of the axis at a time: numpy leaves open which of several assignments is the last.
    along = np.moveaxis(np.stack(np.broadcast_arrays(*where)), axis + 1 if axis >= 0 else axis, 0)
    for place, value in zip(along, np.moveaxis(source, axis, 0), strict=True):
        at = tuple(place)
        out[at] = value if reduce == "set" else _COMBINE[reduce](out[at], value)
    return out


_COMBINE: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
