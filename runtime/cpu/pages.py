"""Memory for weights: in huge pages, where the system has them."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from typing import Any

import numpy as np

from monoplan.ir.arrays import address, aligned

Array = np.ndarray[Any, Any]
HUGE_PAGE, BLOCK = 2 << 20, 64 << 20  # bytes
HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


class Pages:
    """Makes arrays that live together, in huge pages where the system has them: a core that reads all of a model looks
    up one page in 2 MB, not one in 4 KB. (numpy asks for them too, but for no array of less than 4 MB.)"""

    def __init__(self, expected: int) -> None:
        """For about so many bytes in all."""
        self._block = min(-(-expected // HUGE_PAGE) * HUGE_PAGE, BLOCK) if HAS_HUGE_PAGES else 0
        self._rest = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
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


def _huge(nbytes: int) -> Array:
    mapped = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapped, np.uint8)
    start = -address(raw) % HUGE_PAGE
    return raw[start : start + nbytes]
