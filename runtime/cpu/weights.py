"""Weights as a plan wants them: setup ops run once, then each param is packed for its kernel."""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.formats import Array, Layout, Make, Native, ParamUse, format_of
from monoplan.ir.errors import CompileError, MonoplanError
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.interpreter import run_op
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Part, TensorType, address, aligned, bf16
from monoplan.runtime.build import toolchain
from monoplan.runtime.build.background import side_by_side
from monoplan.runtime.build.facts import Once
from monoplan.runtime.build.processes import CompileTimeout
from monoplan.runtime.build.toolchain import declared
from monoplan.runtime.machine import features
from monoplan.runtime.machine.threads import default_threads

Progress = Callable[[int, int], None]
WORKERS = 4
PIECE = 4 << 20  # bytes of a large low-bit weight that are read at a time


@dataclass(frozen=True)
class Source:
    """Tensors by their paths, to make weights of."""

    read: Callable[[str, Part | None], Array]  # a tensor, or a part of it
    gives_away: Callable[[str], bool]  # whether what is read is new each time; else a plan that keeps it keeps a copy
    origin: Callable[[str], Any] = lambda path: None  # which file it comes from, where that is known (see packed.py)
    # A weight of a low-bit type as rows of bytes, or a part of it.
    blocks: Callable[[str, Part | None], Array] | None = None

    @classmethod
    def of(cls, get: Callable[[str], Array]) -> Source:
        """Arrays that are somebody's."""
        return cls(lambda path, part: get(path) if part is None else part.cut(get(path)), lambda path: False)


def prepare(
    graph: Graph,
    uses: Sequence[ParamUse],
    source: Source | Callable[[str], Array],
    progress: Progress | None = None,
    *,
    keep: bool = True,
) -> list[Array]:
    """The plan's params in order, in memory of their own (keep=False: some may be memory of the source's).

    `source` gives a tensor by its path; only what few params need is held at a time.
    """
    tensors = source if isinstance(source, Source) else Source.of(source)
    paths = {p.value: p.path for p in graph.params}
    types = {p.value: p.value.type for p in graph.params}
    made = {r: op for op in graph.setup for r in op.results}
    shared: dict[Value, Array] = {}

    def get_blocks(value: Value, part: Part | None = None) -> Array:
        if value in paths:
            if tensors.blocks is None:
                raise CompileError(f"{paths[value]} is {types[value]}, and only its values are known here")
            return tensors.blocks(paths[value], part)
        op = made[value]
        if (cut := _slice_of(op)) is not None:
            return get_blocks(op.reads[0], cut)
        if op.name != "concat":
            raise CompileError(f"{op.name} of low-bit weights can't be computed at load")
        return np.concatenate([get_blocks(v) for v in op.reads])

    def get(value: Value, lent: list[Array], part: Part | None = None) -> Array:
        if value.type.dtype.is_low_bit:
            return _as_rows(get_blocks(value, part), value)
        if value in paths:
            array = tensors.read(paths[value], part)
            if not tensors.gives_away(paths[value]):
                lent.append(array)
            return converted(array, types[value].dtype.numpy)
        if value in shared:
            return shared[value]
        op = made[value]
        if (part := _slice_of(op)) is not None and op.reads[0] in paths:
            return get(op.reads[0], lent, part)  # only that part is read
        env: dict[Value, Array] = {v: get(v, lent) for v in op.reads}
        run_op(op, env, {}, exact=False)
        return env[value]

    counts: dict[Value, int] = {}
    for u in uses:
        counts[u.value] = counts.get(u.value, 0) + 1
    one_at_a_time = threading.Lock()
    pages = Pages(sum(_stored_bytes(u) for u in uses))

    def pack_one(u: ParamUse) -> Array:
        lent: list[Array] = []
        if u.layout is not None and _in_pieces(u, u.value in paths):
            return _packed_in_pieces(u, u.layout, partial(get_blocks, u.value), pages.take)
        if counts[u.value] > 1 and u.value in made:
            with one_at_a_time:  # several params are packed from it: made once
                if u.value not in shared:
                    shared[u.value] = _owned(get(u.value, lent), lent, pages) if keep else get(u.value, lent)
                array = shared[u.value]
        else:
            array = get(u.value, lent)
        packed = pack(array, u.layout, pages.take)
        return _owned(packed, lent, pages) if keep else packed

    # Reading, converting and transposing let go of Python's lock. Few at a time: each holds a tensor meanwhile.
    return side_by_side(pack_one, uses, min(WORKERS, default_threads().count), progress)


def _in_pieces(u: ParamUse, is_tensor: bool) -> bool:
    """Whether a weight is read a few rows at a time: a large one in blocks, whose rows keep their order."""
    plain = is_tensor and u.layout is not None and u.layout.order in ("plain", "stacked") and u.layout.panel > 0
    return plain and u.value.type.dtype.is_low_bit and _stored_bytes(u) > 2 * PIECE


def _packed_in_pieces(u: ParamUse, layout: Layout, read: Callable[[Part], Array], make: Make) -> Array:
    """The panels of a weight of which never more than a piece (rows, or matrices) is in memory as the file has it."""
    *lead, depth = (int(n) for n in u.value.type.shape)
    count, each = math.prod(lead), math.prod(lead[1:])
    rows, packed = layout.rows(count), format_of(layout)
    out = make((rows.size // layout.panel, packed.panel_bytes(depth, layout.panel)), np.uint8)
    unit = math.lcm(layout.panel, each)
    step = max(1, PIECE * layout.panel // out.shape[1] // unit) * unit  # rows
    for first in range(0, count, step):
        part = Part(0, first // each, min(step, count - first) // each)
        here = rows[first : first + step] if first + step < count else rows[first:]
        own = out[first // layout.panel : first // layout.panel + here.size // layout.panel]
        moved = np.where(here < 0, -1, here - first)
        packed.pack(_as_rows(read(part), u.value), moved, layout, partial(_here, own), _native(packed.native))
    return out


def _as_rows(blocks: Array, value: Value) -> Array:
    """Blocks of a low-bit weight as [rows, bytes], where it is several matrices as well."""
    depth = value.type.dtype.stored_bytes(int(value.type.shape[-1]))  # type: ignore[call-overload]
    return blocks.reshape(-1, depth)


def _here(place: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory for a part of what is made: its place."""
    return place.reshape(shape)


def _stored_bytes(u: ParamUse) -> int:
    """About the bytes of a param."""
    return u.value.type.dtype.stored_bytes(int(u.value.type.size))


def _slice_of(op: Op) -> Part | None:
    """The part of its operand that an op takes, where it does nothing else."""
    if op.name != "slice" or op.attrs["step"] != 1:
        return None
    axis, start, length = (op.attrs[name] for name in ("axis", "start", "length"))
    return Part(axis % op.reads[0].type.rank, start, length)


def _owned(array: Array, lent: Sequence[Array], pages: Pages) -> Array:
    """The array, or a copy if it is memory of one that was lent."""
    if not any(np.may_share_memory(array, a) for a in lent):
        return array
    copy = pages.take(array.shape, array.dtype)
    copy[...] = array
    return copy


# Weights into their kernels' layouts by a small C library; by numpy where there is no compiler.


ABI = 9
CDEF = """
void mp_pack_16(const void *, const void *, void *, const void *, int64_t, int64_t, int64_t);
void mp_pack_32(const void *, const void *, void *, const void *, int64_t, int64_t, int64_t);
int64_t mp_pack_coded(const void *, const void *, void *, const void *, int64_t, int64_t, void *, int64_t);
void mp_pack_blocks(
    const void *, void *, const void *, int64_t, int64_t, int64_t, const void *, int64_t, int64_t, int64_t);
void mp_round_bf16(const void *, void *, int64_t);
"""


def pack(w: Array, layout: Layout | None, make: Make = aligned) -> Array:
    """A weight [rows, depth…] as its kernel reads it; without panels it stays row-major."""
    if layout is None or not layout.panel:
        return np.require(w, None, ["C", "A"])  # aligned: a file mapped at an odd offset is not
    packed = format_of(layout)
    w = w.reshape((-1, w.shape[-1]) if layout.order == "stacked" else (len(w), -1))
    return packed.pack(w, layout.rows(len(w)), layout, make, _native(packed.native))


def unpack(packed: Array, layout: Layout | None, kind: TensorType) -> Array:
    """The weight of that type which `pack` made panels of: its values, or rows of blocks of a low-bit type."""
    if layout is None or not layout.panel:
        return packed
    shape = tuple(int(n) for n in kind.shape)  # type: ignore[call-overload]
    count, *rest = (math.prod(shape[:-1]), shape[-1]) if layout.order == "stacked" else shape
    rows = layout.rows(count)
    columns = format_of(layout).unpack(packed, math.prod(rest), layout)
    if len(columns) != len(rows):
        raise ValueError(f"panels have {len(columns)} columns, not {len(rows)}")
    out = np.empty((count, *columns.shape[1:]), columns.dtype)
    out[rows[rows >= 0]] = columns[rows >= 0]
    return out if kind.dtype.is_low_bit else out.reshape(shape)


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


# Memory for weights: in huge pages, where the system has them.


HUGE_PAGE, BLOCK = 2 << 20, 64 << 20  # bytes
HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


class Pages:
    """Makes arrays that live together, in huge pages where the system has them: a core that reads all of a model looks
    up one page in 2 MB, not one in 4 KB. (numpy requests them too, but for no array of less than 4 MB.)"""

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


# Weights that several plans of one model have in common: in device memory once.


_STORE: ContextVar[dict[str, Any] | None] = ContextVar("weights", default=None)


@contextmanager
def sharing(store: dict[str, Any]) -> Iterator[None]:
    """Plans that are made inside take the weights they have in common from the store, and put new ones there.

    They must be plans of the same parameters: a store knows these by their paths.
    """
    token = _STORE.set(store)
    try:
        yield
    finally:
        _STORE.reset(token)


def shared_weights() -> dict[str, Any]:
    """The store of the plan that is being made; an empty one of its own if nothing is shared."""
    store = _STORE.get()
    return {} if store is None else store


def weight_key(graph: Graph, value: Value, order: bytes, layout: object) -> str:
    """The name of a weight: the parameters it is made of, how, its type and layout, and the order of its rows."""
    paths = {p.value: p.path for p in graph.params}
    made = {result: op for op in graph.setup for result in op.results}

    def describe(v: Value) -> str:
        if v in paths:
            return f"{paths[v]}: {v.type}"
        op = made[v]
        parts = ", ".join(map(describe, op.reads))
        return f"{op.name}[{op.results.index(v)}]({parts}) {sorted(map(str, op.attrs.items()))}: {v.type}"

    return f"{describe(value)} {layout} {hashlib.sha256(order).hexdigest() if order else ''}"
