"""Weights into their kernels' layouts by a small C library; by numpy where there is no compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.formats import Array, Layout, Make, Native, format_of
from monoplan.ir.arrays import address, aligned
from monoplan.ir.errors import MonoplanError
from monoplan.ir.types import bf16
from monoplan.runtime.build import toolchain
from monoplan.runtime.build.ffi import declared
from monoplan.runtime.build.once import Once
from monoplan.runtime.build.processes import CompileTimeout
from monoplan.runtime.machine import features

ABI = 7
CDEF = """
void mp_pack_16(const void *, const void *, void *, const void *, int64_t, int64_t, int64_t);
void mp_pack_32(const void *, const void *, void *, const void *, int64_t, int64_t, int64_t);
int64_t mp_pack_coded(const void *, const void *, void *, const void *, int64_t, int64_t, void *, int64_t);
void mp_round_bf16(const void *, void *, int64_t);
"""


def pack(w: Array, layout: Layout | None, make: Make = aligned) -> Array:
    """A weight [rows, depth] as its kernel reads it; without panels it stays row-major."""
    if layout is None or not layout.panel:
        return np.require(w, None, ["C", "A"])  # aligned: a file mapped at an odd offset is not
    packed = format_of(layout)
    return packed.pack(w, layout.rows(len(w)), layout, make, _native(packed.native))


def _native(name: str) -> Native | None:
    """A function of the C library that takes arrays for pointers."""
    native = native_library() if name else None
    if native is None:
        return None
    ffi, library = native
    function = getattr(library, name)

    def call(*args: Array | int) -> int:
        return int(function(*(_pointer(ffi, a) if isinstance(a, np.ndarray) else a for a in args)) or 0)

    return call


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """An array in another element type."""
    if array.dtype == dtype:
        return array
    native = native_library() if array.dtype == np.float32 and dtype == bf16.numpy else None
    if native is None:
        return array.astype(dtype)
    ffi, library = native
    source = np.ascontiguousarray(array)
    out = np.empty(source.shape, dtype)
    library.mp_round_bf16(_pointer(ffi, source), _pointer(ffi, out), source.size)
    return out


def _pointer(ffi: Any, a: Array) -> Any:
    return ffi.cast("void *", address(a))


@Once
def native_library() -> tuple[Any, Any] | None:
    """The C library, or None where nothing can be compiled (a machine that only has a GPU)."""
    ffi = declared(CDEF)
    try:
        found = features.detect()
        source = (Path(__file__).resolve().parent / "packing.c").read_text("utf-8")
        key, build = toolchain.plan_build(source, features.compile_flags(found), target=found.key, abi=ABI)
        library, _ = toolchain.load(key, build, ffi.dlopen)
    except CompileTimeout:
        raise  # a compiler that hangs is not one that is missing
    except MonoplanError:
        return None
    return ffi, library
