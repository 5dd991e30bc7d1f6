"""Small facts about numpy arrays' memory."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


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


def drop_mapped_pages(a: np.ndarray[Any, Any]) -> None:
    """Gives the memory behind a view of a mapped file back; the file is read again when the view is next used."""
    base: Any = a
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap) or not hasattr(base, "madvise") or a.nbytes == 0:
        return
    begin = address(a) - address(np.frombuffer(base, np.uint8))
    start = begin // mmap.PAGESIZE * mmap.PAGESIZE
    spanned = a.itemsize + sum((n - 1) * step for n, step in zip(a.shape, a.strides, strict=True))
    if 0 <= start < len(base):
        base.madvise(mmap.MADV_DONTNEED, start, min(begin + spanned, len(base)) - start)
