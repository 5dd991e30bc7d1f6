"""Weights into their kernels' layouts by a small C library; by numpy where there is no compiler."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.ir.arrays import address
from monoplan.ir.errors import MonoplanError
from monoplan.ir.types import bf16
from monoplan.runtime import features, toolchain
from monoplan.runtime.ffi import declared

Array = np.ndarray[Any, Any]
ABI = 1
CDEF = """
void mp_transpose_16(const void *, void *, const int32_t *, int64_t, int64_t, int64_t);
void mp_transpose_32(const void *, void *, const int32_t *, int64_t, int64_t, int64_t);
void mp_round_bf16(const void *, void *, int64_t);
"""


def transpose_panels(panels: Array, into: Array, layout: str) -> None:
    """Panels [columns, depth] transposed to [depth, columns]; `pairs` keeps two of k side by side."""
    count, columns, _ = panels.shape
    order = np.arange(columns, dtype=np.int32)
    if layout.startswith("pairs"):  # a transposition of pairs
        panels = np.ascontiguousarray(panels).view(np.uint32)
        into = into.reshape(-1).view(np.uint32).reshape(count, panels.shape[2], columns)
    elif panels.dtype == bf16.numpy:
        # Columns lie beside those half a panel away, so that one load, a shift and a mask give two vectors.
        order = order.reshape(2, -1).T.reshape(-1).copy()
    native = _library()
    if native is None or panels.dtype.itemsize not in (2, 4) or not into.flags.c_contiguous:
        into[:] = panels[:, order].swapaxes(1, 2)
        return
    ffi, library = native
    source = np.ascontiguousarray(panels)
    run = library.mp_transpose_16 if source.dtype.itemsize == 2 else library.mp_transpose_32
    places = _pointer(ffi, source), _pointer(ffi, into), ffi.cast("int32_t *", address(order))
    run(*places, count, columns, source.shape[2])


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """An array in another element type."""
    if array.dtype == dtype:
        return array
    native = _library() if array.dtype == np.float32 and dtype == bf16.numpy else None
    if native is None:
        return array.astype(dtype)
    ffi, library = native
    source = np.ascontiguousarray(array)
    out = np.empty(source.shape, dtype)
    library.mp_round_bf16(_pointer(ffi, source), _pointer(ffi, out), source.size)
    return out


def _pointer(ffi: Any, a: Array) -> Any:
    return ffi.cast("void *", address(a))


@functools.cache
def _library() -> tuple[Any, Any] | None:
    """The C library, or None where nothing can be compiled (a machine that only has a GPU)."""
    ffi = declared(CDEF)
    try:
        found = features.detect()
        source = (Path(__file__).resolve().parent / "packing.c").read_text()
        key, build = toolchain.plan_build(source, features.compile_flags(found), target=found.key, abi=ABI)
        library, _ = toolchain.load(key, build, ffi.dlopen)
    except MonoplanError:
        return None
    return ffi, library
