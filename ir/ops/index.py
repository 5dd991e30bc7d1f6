"""Lookups by index. An index out of range is an error that names its position and value."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.dims import equal
from monoplan.ir.errors import ArgumentError
from monoplan.ir.opdef import Array, normalize_axis, op, require
from monoplan.ir.types import TensorType, i64


def check_range(index: Array, size: int, what: str) -> None:
    """Raises ArgumentError at the first index outside of [0, size)."""
    bad = np.argwhere((index < 0) | (index >= size))
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        raise ArgumentError(f"{what}: index {int(index[place])} at position {list(place)} is out of range [0, {size})")


def _embedding_type(ids: TensorType, weight: TensorType) -> TensorType:
    require(ids.dtype.is_integer, f"embedding: ids must be integers, got {ids}")
    require(weight.rank == 2, f"embedding: the weight must be [vocabulary, features], got {weight}")
    return TensorType(weight.dtype, (*ids.shape, weight.shape[1]))


@op(_embedding_type, "gather")
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


def _topk_type(x: TensorType, *, k: int, axis: int) -> tuple[TensorType, TensorType]:
    axis = normalize_axis(axis, x.rank, "topk")
    size: Any = x.shape[axis]
    require(isinstance(size, int) and 1 <= k <= size, f"topk: k={k} does not fit axis {axis} of {x}")
    t = x.with_shape(k if i == axis else d for i, d in enumerate(x.shape))
    return t, t.with_dtype(i64)


@op(_topk_type, "sort")
def topk(x: Array, *, k: int, axis: int = -1) -> tuple[Array, Array]:
    """The k largest values and their indices, largest first; ties go to the lowest index."""
    order = np.take(_stable_order(x, axis, True), np.arange(k), axis=axis)
    return np.take_along_axis(x, order, axis=axis), order


def _stable_order(x: Array, axis: int, descending: bool) -> Array:
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    flipped = np.flip(x, axis)
    order = np.flip(np.argsort(flipped, axis=axis, kind="stable"), axis)
    return x.shape[axis] - 1 - order  # type: ignore[no-any-return]
