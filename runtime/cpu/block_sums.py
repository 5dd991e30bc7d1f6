"""Sums over blocks of weights, by which damage is found at the speed of memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator

import numpy as np

from monoplan.ir.types import Array
from monoplan.runtime.machine.threads import default_threads

WORDS = 2048  # of 8 bytes, that have one sum: their coefficients stay in L1
BLOCK = 8 * WORDS
PIECE = 512 * BLOCK  # bytes that a thread checks or writes at a time


@functools.cache
def _coefficients() -> Array:
    """Odd and all different: any one changed bit changes the sum, and so do any two of the lower 50 of two words."""
    return np.arange(1, 2 * WORDS, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def pieces(arrays: Iterable[Array]) -> Iterator[Array]:
    """The bytes of arrays in whole blocks, zeros behind the last one of each."""
    for a in arrays:
        data = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        whole = len(data) // BLOCK * BLOCK
        for begin in range(0, whole, PIECE):
            yield data[begin : min(begin + PIECE, whole)]
        if whole < len(data):
            last = np.zeros(BLOCK, np.uint8)
            last[: len(data) - whole] = data[whole:]
            yield last


def sums(data: Array) -> Array:
    """The sums of whole blocks of bytes."""
    return data.view(np.uint64).reshape(-1, WORDS) @ _coefficients()


def blocks_are_right(data: Array, wanted: Array) -> bool:
    """Whether bytes in whole blocks have these sums."""
    if len(data) != len(wanted) * BLOCK:
        return False
    wrong: list[int] = []
    workers = min(4, default_threads().count)

    def check(first: int) -> None:
        for begin in range(first * PIECE, len(data), workers * PIECE):
            piece = data[begin : begin + PIECE]
            if not np.array_equal(sums(piece), wanted[begin // BLOCK : (begin + len(piece)) // BLOCK]):
                wrong.append(begin)

    threads = [threading.Thread(target=check, args=(i,), name="monoplan") for i in range(1, workers)]
    for thread in threads:
        thread.start()
    check(0)
    for thread in threads:
        thread.join()
    return not wrong
