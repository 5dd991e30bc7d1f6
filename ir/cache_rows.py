"""Rows of a key/value cache in 8 bits: codes of one byte for each number, and behind them the scale of the row, f32.

A row is what one head keeps of one token. Bytes of the type i8 hold both, so that a cache is one tensor all the same:
[batch, heads, capacity, dim + 4].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.types import Array, DType, i8

SCALE_BYTES = 4
LARGEST = 127  # of the codes, which are symmetric


def row_width(dim: Any, dtype: DType) -> Any:
    """Elements of a row in a cache of an element type for `dim` numbers."""
    return dim + SCALE_BYTES if dtype == i8 else dim


def row_numbers(width: Any, dtype: DType) -> Any:
    """How many numbers the rows of a cache hold, by their width."""
    return width - SCALE_BYTES if dtype == i8 else width


def packed_rows(rows: Array) -> Array:
    """Rows [..., dim] as bytes [..., dim + 4]. A row that is not finite has a scale of NaN."""
    with np.errstate(all="ignore"):
        top = np.max(np.abs(rows), axis=-1, initial=0.0, keepdims=True)
        scale = np.where(np.isfinite(top), top / LARGEST, np.nan).astype(np.float32)
        wide = scale.astype(np.float64)
        codes = np.where(wide > 0, np.rint(rows / np.where(wide > 0, wide, 1)), 0)
    codes = np.clip(codes, -LARGEST, LARGEST).astype(np.int8)
    return np.concatenate([codes, np.ascontiguousarray(scale).view(np.int8)], axis=-1)


def unpacked_rows(cache: Array) -> Array:
    """The numbers [..., dim] that bytes [..., dim + 4] mean, in f64."""
    scale = np.ascontiguousarray(cache[..., -SCALE_BYTES:]).view(np.float32)
    numbers: Array = cache[..., :-SCALE_BYTES] * scale.astype(np.float64)
    return numbers
