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
void mp_pack_16(const void *, const void *, void *, const int64_t *, int64_t, int64_t, int64_t);
void mp_pack_32(const void *, const void *, void *, const int64_t *, int64_t, int64_t, int64_t);
void mp_pack_tiles(const void *, const void *, void *, const int64_t *, int64_t, int64_t);
void mp_round_bf16(const void *, void *, int64_t);
"""


def pack_rows(w: Array, rows: Array, into: Array, tiles: bool) -> None:
    """Panels [depth, columns] into `into`, whose columns are these rows of w [rows, depth], in order; -1: zeros.

    `tiles`: panels of 32 bf16 columns as [depth / 32][2][16 pairs of k][16 columns][2], which two tile loads read.
    """
    assert into.flags.c_contiguous and rows.size * w.shape[1] == into.size
    depth, columns = w.shape[1], into.shape[-1]
    rows = rows.reshape(-1, columns)
    if w.dtype == bf16.numpy and not tiles:
        # Columns lie beside those half a panel away, so that one load, a shift and a mask give two vectors.
        rows = rows.reshape(-1, 2, columns // 2).swapaxes(1, 2).reshape(-1, columns)
    native = _library()
    if native is None or w.dtype.itemsize not in (2, 4):
        _pack_slowly(w, rows, into, tiles)
        return
    ffi, library = native
    source, rows, none = np.require(w, None, ["C", "A"]), np.ascontiguousarray(rows, np.int64), np.zeros(depth, w.dtype)
    places = *(_pointer(ffi, a) for a in (source, none, into)), ffi.cast("int64_t *", address(rows)), len(rows)
    if tiles:
        library.mp_pack_tiles(*places, depth // 2)
    else:
        (library.mp_pack_16 if w.dtype.itemsize == 2 else library.mp_pack_32)(*places, columns, depth)


def _pack_slowly(w: Array, rows: Array, into: Array, tiles: bool) -> None:
    """The same without a compiler."""
    panels = np.concatenate([w, np.zeros((1, w.shape[1]), w.dtype)])[rows]  # -1 is the last one
    if not tiles:
        into.reshape(len(rows), *into.shape[-2:])[:] = panels.swapaxes(1, 2)
        return
    count, depth = len(rows), w.shape[1]
    out = into.reshape(-1).view(np.uint32).reshape(count, depth // 32, 2, 16, 16)
    out[:] = panels.view(np.uint32).reshape(count, 2, 16, depth // 32, 16).transpose(0, 3, 1, 4, 2)


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
