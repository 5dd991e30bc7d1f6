"""Small facts about numpy arrays' memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from typing import Any

import numpy as np

HUGE_PAGE, BLOCK = 2 << 20, 64 << 20  # bytes
HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


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


class Pages:
    """Makes arrays that live together, in huge pages where the system has them: a core that reads all of a model looks
    up one page in 2 MB, not one in 4 KB. (numpy asks for them too, but for no array of less than 4 MB.)"""

    def __init__(self, expected: int) -> None:
        """For about so many bytes in all."""
        self._block = min(-(-expected // HUGE_PAGE) * HUGE_PAGE, BLOCK) if HAS_HUGE_PAGES else 0
        self._rest = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """An array of zeros that begins with a cache line."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        whole = -(-nbytes // 64) * 64
        if self._block <= HUGE_PAGE:  # little in all
            return aligned(shape, dtype, zero=True)
        if 2 * whole > self._block:
            return _huge(whole)[:nbytes].view(dtype).reshape(shape)
        with self._lock:
            if whole > self._rest.size:
                self._rest = _huge(self._block)
            made, self._rest = self._rest[:nbytes], self._rest[whole:]
        return made.view(dtype).reshape(shape)


class _Anonymous(mmap.mmap):
    """Memory of no file."""


def _huge(nbytes: int) -> np.ndarray[Any, Any]:
    mapped = _Anonymous(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapped, np.uint8)
    start = -address(raw) % HUGE_PAGE
    return raw[start : start + nbytes]


def drop_mapped_pages(a: np.ndarray[Any, Any]) -> None:
    """Gives the memory behind a view of a mapped file back; the file is read again when the view is next used."""
    base: Any = a
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap) or isinstance(base, _Anonymous) or not hasattr(base, "madvise") or a.nbytes == 0:
        return
    begin = address(a) - address(np.frombuffer(base, np.uint8))
    start = begin // mmap.PAGESIZE * mmap.PAGESIZE
    spanned = a.itemsize + sum((n - 1) * step for n, step in zip(a.shape, a.strides, strict=True))
    if 0 <= start < len(base):
        base.madvise(mmap.MADV_DONTNEED, start, min(begin + spanned, len(base)) - start)
