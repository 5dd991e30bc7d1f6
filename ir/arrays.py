"""Small facts about numpy arrays' memory."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from monoplan.ir.errors import ArgumentError


def address(a: np.ndarray[Any, Any]) -> int:
    """Where an array's data begins."""
    return int(a.__array_interface__["data"][0])


def aligned(shape: tuple[int, ...], dtype: Any, align: int = 64, zero: bool = False) -> np.ndarray[Any, Any]:
    """An array whose data begins at a multiple of `align` bytes: vectors that cross a cache line cost two. It is 0, or
    anything."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = (np.zeros if zero else np.empty)(nbytes + align, np.uint8)
    start = -address(raw) % align
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def plain_array(x: Any) -> np.ndarray[Any, Any]:
    """An array of numpy's own class in the same memory; of a masked one, whose mask would be lost, an error."""
    masked = sys.modules.get("numpy.ma")  # whoever has one has imported it
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise ArgumentError(
            "a masked array can't be used",
            why="the mask would be lost, and hidden values be computed with",
            fix="fill it, x.filled(0), and pass the mask as an array of its own",
        )
    return np.asarray(x)


class Part(NamedTuple):
    """`length` places of an axis of an array, from `start`."""

    axis: int
    start: int
    length: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of an array of that shape."""
        return (*shape[: self.axis], self.length, *shape[self.axis + 1 :])

    def cut(self, a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """This part of an array, as a view."""
        return a[(slice(None),) * self.axis + (slice(self.start, self.start + self.length),)]
