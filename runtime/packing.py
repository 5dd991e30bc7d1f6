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
ABI = 4
CDEF = """
void mp_transpose_16(const void *, void *, const int32_t *, int64_t, int64_t, int64_t);
void mp_transpose_32(const void *, void *, const int32_t *, int64_t, int64_t, int64_t);
void mp_cut_tiles(const void *, void *, int64_t, int64_t);
void mp_round_bf16(const void *, void *, int64_t);
"""


def transpose_panels(panels: Array, into: Array, layout: str) -> None:
    """Panels [columns, depth] transposed to [depth, columns]; `tiles`: see _cut_tiles."""
    if layout.startswith("tiles"):
        _cut_tiles(panels, into)
        return
    count, columns, _ = panels.shape
    order = np.arange(columns, dtype=np.int32)
    if panels.dtype == bf16.numpy:
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


def _cut_tiles(panels: Array, into: Array) -> None:
    """Panels of 32 bf16 columns as [depth / 32][2][16 pairs of k][16 columns][2]: what two tile loads read."""
    count, _, depth = panels.shape
    source = np.ascontiguousarray(panels).view(np.uint32)  # pairs of k
    native = _library()
    if native is not None and into.flags.c_contiguous:
        ffi, library = native
        library.mp_cut_tiles(_pointer(ffi, source), _pointer(ffi, into), count, depth // 2)
        return
    out = into.reshape(-1).view(np.uint32).reshape(count, depth // 32, 2, 16, 16)
    out[:] = source.reshape(count, 2, 16, depth // 32, 16).transpose(0, 3, 1, 4, 2)


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
        source = (Path(__file__).resolve().parent / "packing.c").read_text("utf-8")
        key, build = toolchain.plan_build(source, features.compile_flags(found), target=found.key, abi=ABI)
        library, _ = toolchain.load(key, build, ffi.dlopen)
    except MonoplanError:
        return None
    return ffi, library
