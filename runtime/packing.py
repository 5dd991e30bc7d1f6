"""Weights into their kernels' layouts by a small C library; by numpy where there is no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.schedule_linear import coded_panel_bytes
from monoplan.ir.arrays import address, aligned
from monoplan.ir.errors import MonoplanError
from monoplan.ir.types import bf16
from monoplan.runtime import features, toolchain
from monoplan.runtime.ffi import declared
from monoplan.runtime.once import Once

Array = np.ndarray[Any, Any]
Make = Callable[[tuple[int, ...], Any], Array]  # of a shape and a type, at the begin of a cache line
ABI = 7
CDEF = """
void mp_pack_16(const void *, const void *, void *, const int64_t *, int64_t, int64_t, int64_t);
void mp_pack_32(const void *, const void *, void *, const int64_t *, int64_t, int64_t, int64_t);
int64_t mp_pack_coded(const void *, const void *, void *, const int64_t *, int64_t, int64_t, void *, int64_t);
void mp_round_bf16(const void *, void *, int64_t);
"""


def pack_rows(w: Array, rows: Array, into: Array) -> None:
    """Panels [depth, columns] into `into`, whose columns are these rows of w [rows, depth], in order; -1: zeros."""
    assert into.flags.c_contiguous and rows.size * w.shape[1] == into.size
    depth, columns = w.shape[1], into.shape[-1]
    rows = rows.reshape(-1, columns)
    if w.dtype == bf16.numpy:
        # Columns lie beside those half a panel away, so that one load, a shift and a mask give two vectors.
        rows = rows.reshape(-1, 2, columns // 2).swapaxes(1, 2).reshape(-1, columns)
    native = native_library()
    if native is None or w.dtype.itemsize not in (2, 4):
        panels = np.concatenate([w, np.zeros((1, depth), w.dtype)])[rows]  # -1 is the last one
        into.reshape(len(rows), depth, columns)[:] = panels.swapaxes(1, 2)
        return
    ffi, library = native
    w, rows, none = _ready(w, rows)
    places = _places(ffi, w, none, into, rows)
    (library.mp_pack_16 if w.dtype.itemsize == 2 else library.mp_pack_32)(*places, columns, depth)


def pack_coded(w: Array, rows: Array, make: Make = aligned) -> Array:
    """Panels of 32 columns of bf16 for tile units, in 12 bits and without loss: mp_coded.h says how."""
    depth, rows = w.shape[1], rows.reshape(-1, 32)
    assert depth % 32 == 0 and w.dtype == bf16.numpy
    native = native_library()
    if native is None:
        return _pack_coded_slowly(w, rows)
    ffi, library = native
    w, rows, none = _ready(w, rows)
    tiles = aligned((depth * 32,), np.uint16)

    def put(rows: Array, out: Array, room: int) -> int:
        return int(library.mp_pack_coded(*_places(ffi, w, none, out, rows), depth, _pointer(ffi, tiles), room))

    # Memory that `make` gave is not given back: one or two panels say how long the list will be.
    panels, few = len(rows), np.ascontiguousarray(rows[:: -(-len(rows) // 2)])
    found = put(few, aligned((len(few) * coded_panel_bytes(depth),), np.uint8), 0)
    room = 2 * found * panels // len(few) + rows.size * depth // 2048
    while True:
        out = make((panels * coded_panel_bytes(depth) + 8 * room,), np.uint8)
        needed = put(rows, out, room)
        if needed <= room:
            return out[: out.size - 8 * (room - needed)]
        del out
        room = needed  # panels that are not like those


def _pack_coded_slowly(w: Array, rows: Array) -> Array:
    """The same without a compiler."""
    count, depth = len(rows), w.shape[1]
    panels = np.concatenate([w, np.zeros((1, depth), w.dtype)])[rows].view(np.uint32)  # -1 is the last one
    cut = panels.reshape(count, 2, 16, depth // 32, 16).transpose(0, 3, 1, 4, 2)  # [panel][k / 32][half][pair][column]
    tiles = np.ascontiguousarray(cut).view(np.uint16).reshape(count, -1)
    out = np.zeros((count, coded_panel_bytes(depth)), np.uint8)
    lists: list[Array] = []
    for p, w16 in enumerate(tiles):
        upper = _usual_bytes(w16)
        known = w16[:, None] >> 8 & 127 == upper  # of each number, by codes
        odd = np.flatnonzero(~known.any(1))
        code = known.argmax(1) | w16 >> 12 & 8  # 0 where there is none; and the sign
        # Two rows of a tile lie together, eight numbers of the one and eight of the other.
        both = np.stack([code, w16 & 255]).reshape(2, -1, 2, 4, 8).swapaxes(2, 3).astype(np.uint8)
        codes, lower = both[0].reshape(-1, 2, 64), both[1].reshape(-1, 128)
        begins = (count - p) * out.shape[1] - 64 + 8 * sum(map(len, lists))
        out[p, 64:] = np.concatenate([codes[:, 0] | codes[:, 1] << 4, lower], axis=1).reshape(-1)
        out[p, :16], out[p, 16:24] = np.concatenate([upper, upper | 0x80]), np.array([begins], np.int64).view(np.uint8)
        lists.append(np.array([*zip(odd, w16[odd], strict=True), (0xFFFFFFFF, 0)], np.uint32))
    return np.concatenate([out.reshape(-1), *(one.reshape(-1).view(np.uint8) for one in lists)])


def _usual_bytes(numbers: Array) -> Array:
    """Upper bytes without sign that most of them have, by a sample; below those that were seen, a quarter as many."""
    rows = numbers.reshape(-1, 32)[:: numbers.size // 4096 | 1]
    guess = np.bincount(rows.reshape(-1) >> 8 & 127, minlength=128).astype(np.float64)
    for b in range(126, -1, -1):
        guess[b] = max(guess[b], guess[b + 1] / 4)
    return np.argsort(-guess, kind="stable")[:8].astype(np.uint8)


def _ready(w: Array, rows: Array) -> tuple[Array, Array, Array]:
    """A weight and the rows of its panels as C takes them, and a row of zeros."""
    return np.require(w, None, ["C", "A"]), np.ascontiguousarray(rows, np.int64), np.zeros(w.shape[1], w.dtype)


def _places(ffi: Any, w: Array, none: Array, into: Array, rows: Array) -> tuple[Any, ...]:
    """What the functions that pack take first."""
    return *(_pointer(ffi, a) for a in (w, none, into)), ffi.cast("int64_t *", address(rows)), len(rows)


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
    except MonoplanError:
        return None
    return ffi, library
