"""Changes to lowered kernels: each replaced by others, or moved to other buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from monoplan.codegen.cpu.schedule_attention import FEW, on_tiles
from monoplan.codegen.cpu.schedule_linear import TILE_ROWS
from monoplan.codegen.expressions import c_dim
from monoplan.codegen.kernels import Attention, Kernel, Linear
from monoplan.codegen.lower.lowerer import Loop, Lowered
from monoplan.codegen.operands import Operand
from monoplan.codegen.target import Target
from monoplan.codegen.views import Buffer, View
from monoplan.ir.dims import Dim, equal, evaluate
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import bf16, f32

Items = Sequence[Kernel | Loop]
K = TypeVar("K", bound=Kernel)


def all_kernels(items: Items) -> Iterator[Kernel]:
    """Every kernel, those of rolled layers once."""
    for item in items:
        if isinstance(item, Loop):
            yield from all_kernels(item.items)
        else:
            yield item


def map_kernels(items: Items, change: Callable[[Kernel], Iterable[Kernel]]) -> list[Kernel | Loop]:
    """Each kernel replaced by what `change` makes of it."""
    result: list[Kernel | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            result.append(replace(item, items=tuple(map_kernels(item.items, change))))
        else:
            result += change(item)
    return result


def moved(lowered: Lowered, new: Mapping[Buffer, Buffer]) -> Lowered:
    """The same kernels with their operands in other buffers."""
    items = map_kernels(lowered.items, lambda k: [_with_buffers(k, new)])
    views = {v: _moved_view(view, new) for v, view in lowered.views.items()}
    return Lowered(items, lowered.params, lowered.outputs, views)


def _with_buffers(k: K, new: Mapping[Buffer, Buffer]) -> K:
    return replace(k, operands=tuple(o.with_view(_moved_view(o.view, new)) for o in k.operands))


def _moved_view(v: View, new: Mapping[Buffer, Buffer]) -> View:
    b = new.get(v.buffer)
    return v if b is None else View(b, v.shape, v.strides, v.offset)


# Residual streams in place: fewer buffers, less memory traffic.


def residuals(items: Items) -> dict[Buffer, Buffer]:
    """Buffers of rolled layers that may be one: each sum of a residual stream is written over the value it adds to.

    In a turn `y = x + f(…)` is followed by `x = y + g(…)`: with y in x's place a sum is read and written in one place
    of the caches, and a library's product can add into it. That holds when nobody reads x between the two, and nobody
    y after them.
    """
    new: dict[Buffer, Buffer] = {}
    for item in items:
        kernels = [k for k in item.items if isinstance(k, Kernel)] if isinstance(item, Loop) else []
        for n in range(len(kernels)):
            pair = _residual(kernels, n)
            if pair is not None and not set(pair) & {*new, *new.values()}:
                new[pair[0]] = pair[1]
    return new


def _residual(kernels: Sequence[Kernel], n: int) -> tuple[Buffer, Buffer] | None:
    """The buffer that product n writes and the one whose place it may take."""
    k = kernels[n]
    if not isinstance(k, Linear) or k.epilogue not in ("pointwise", "normed") or not k.has("e0"):
        return None
    y, x = k.operand("y").view, k.operand("e0").view
    if any(o.view.buffer is x.buffer for o in k.reads if o.name != "e0"):  # all of it is read while y is written
        return None
    same = y.is_whole and x.is_whole and x.dtype == y.dtype and len(x.strides) == len(y.strides)
    if not same or {x.buffer.kind, y.buffer.kind} != {"arena"} or x.buffer is y.buffer:
        return None
    for other in kernels[n + 1 :]:
        if any(o.view.buffer is x.buffer for o in (*other.reads, *other.scratch)):
            return None
        if any(o.view.buffer is x.buffer for o in other.writes):
            # the kernel that makes the next x reads y element by element, and is the last to do so
            last = kernels.index(other)
            reads = [o for o in other.reads if o.view.buffer is y.buffer]
            adds = isinstance(other, Linear) and all(o.name == "e0" and o.view.is_whole for o in reads)
            later = any(o.view.buffer is y.buffer for q in kernels[last + 1 :] for o in (*q.operands, *q.scratch))
            earlier = any(o.view.buffer is y.buffer for q in kernels[:n] for o in (*q.operands, *q.scratch))
            return (y.buffer, x.buffer) if adds and not later and not earlier else None
    return None


# Attention without a cache: what only it reads of a product in bf16 is stored so, for tensor cores and tile units.


def attended(items: Items, takes: Callable[[Attention], bool]) -> dict[Buffer, Buffer]:
    """f32 buffers of queries, keys and values that bf16 products make, each with one in bf16; `takes` is asked about
    attention that has them.

    A model in bf16 rounds these values; between other kernels they are kept in f32.
    """
    kernels = list(all_kernels(items))
    made: dict[Buffer, bool] = {}  # by products in bf16 only
    for k in kernels:
        for o in (*k.operands, *k.scratch):
            if o.written:
                own = isinstance(k, Linear) and o.name == "y" and o.view.buffer.of is None and k.format.x_dtype == bf16
                made[o.view.buffer.root] = own and made.get(o.view.buffer.root, True)
    new: dict[Buffer, Buffer] = {}
    for k in kernels:
        if isinstance(k, Attention):
            buffers = {k.operand(n).view.buffer for n in ("q", "k", "v")}
            narrow = {
                b: replace(b, dtype=bf16) for b in buffers if b.kind == "arena" and b.dtype == f32 and made.get(b)
            }
            if len(narrow) == len(buffers) and takes(_with_buffers(k, narrow)):
                new |= narrow
    for k in kernels:
        kept = [o for o in k.reads if not (isinstance(k, Attention) and o.name in ("q", "k", "v"))]
        for o in (*kept, *k.scratch):
            new.pop(o.view.buffer.root, None)
    return new


# Values that a kernel hands to the next one as that reads them: bf16 tiles in place of rows of f32.
#
# Tile units take x, and many queries, in bf16. Where nobody else reads what a kernel makes, it rounds its results
# itself and writes them as tiles: the kernel behind it has nothing to pack, and half as many bytes pass the caches.
# The rounding is the same. Few rows stay f32: both kernels go by the number of rows (TILE_ROWS), and where those are
# queries by that of a sequence too (FEW).


@dataclass(frozen=True)
class Matrix:
    """What would be handed over; `queries` of a sequence where attention reads its rows as such."""

    rows: Dim
    columns: int
    queries: Dim | None = None


def handed_over(items: Items, target: Target) -> dict[Buffer, Buffer]:
    """Buffers that will hold tiles, each with the one that takes its place."""
    if not target.has_tiles:
        return {}
    makers: dict[Buffer, list[Matrix | None]] = {}
    readers: dict[Buffer, list[Matrix | None]] = {}
    for k in all_kernels(items):
        for o in (*k.operands, *k.scratch):
            part = o.view.buffer.of is not None
            if o.written:
                makers.setdefault(o.view.buffer.root, []).append(None if part else _given(k, o, target))
            else:
                readers.setdefault(o.view.buffer.root, []).append(None if part else _taken(k, o, target))
    new = {}
    for b, taken in readers.items():
        given = makers.get(b, [])
        if b.kind == "arena" and b.dtype == f32 and len(given) == 1 and all(_same(t, given[0]) for t in taken):
            assert given[0] is not None
            new[b] = replace(b, tiled=given[0].columns, queries=given[0].queries)
    return new


def c_as_tiles(rows: Dim, queries: Dim | None = None) -> str:
    """The condition, in C, under which a matrix of so many rows lies as tiles; `queries` as in Matrix."""
    enough = f"{c_dim(rows)} >= {TILE_ROWS}"
    return enough if queries is None else f"{enough} && {c_dim(queries)} > {FEW}"


def lies_as_tiles(b: Buffer, elements: int, symbols: Mapping[str, int]) -> bool:
    """The same of so many elements of a buffer, in a run with these sizes."""
    enough = b.tiled > 0 and elements >= TILE_ROWS * b.tiled
    return enough and (b.queries is None or evaluate(b.queries, symbols) > FEW)


def _same(a: Matrix | None, b: Matrix | None) -> bool:
    if a is None or b is None or (a.queries is None) != (b.queries is None):
        return False
    return equal(a.rows, b.rows) and a.columns == b.columns and equal(a.queries or 0, b.queries or 0)


def _given(k: Kernel, o: Operand, target: Target) -> Matrix | None:
    """The result that its kernel can write as tiles."""
    if o.name != "y" or not o.view.is_whole:
        return None
    if isinstance(k, Linear) and (k.gated or k.epilogue == "pointwise") and _packed(k):
        fits = k.width % 32 == 0 and k.body is not None and k.body.dtype == f32
        return Matrix(k.rows, k.width) if fits else None
    if isinstance(k, Linear) and k.epilogue == "heads" and k.head_dim % 32 == 0 and _packed(k):
        return Matrix(k.rows, k.heads * k.head_dim, k.seq)
    if isinstance(k, Attention) and on_tiles(k, target):
        return Matrix(k.batch * k.seq, k.heads * k.value_dim)
    return None


def _taken(k: Kernel, o: Operand, target: Target) -> Matrix | None:
    """The x that its product, or the queries that their attention, would only round and pack."""
    if not o.view.is_whole:
        return None
    if isinstance(k, Linear) and o.name == "x" and k.norm == "none" and _packed(k):
        return Matrix(k.rows, k.depth)
    if isinstance(k, Attention) and o.name == "q" and on_tiles(k, target) and k.operand("k").dtype == bf16:
        return Matrix(k.batch * k.seq, k.heads * k.head_dim, k.seq)
    return None


def _packed(k: Linear) -> bool:
    return k.format.for_tiles
