"""Values that a kernel hands to the next product as that reads them: bf16 tiles in place of rows of f32.

Tile units take x in bf16. Where nobody else reads what a kernel makes, it rounds its results itself and writes them as
tiles: the product behind it has nothing to pack, and half as many bytes pass the caches. The rounding is the same. Few
rows stay f32: both kernels go by the number of rows (TILE_ROWS).
"""

from __future__ import annotations

from dataclasses import replace

from monoplan.codegen.kernels import Attention, Kernel, Linear
from monoplan.codegen.moves import Items, all_kernels
from monoplan.codegen.operands import Operand
from monoplan.codegen.schedule_attention import on_tiles
from monoplan.codegen.target import Target
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import Dim, equal
from monoplan.ir.types import f32

Matrix = tuple[Dim, int]  # rows and columns


def handed_over(items: Items, target: Target) -> dict[Buffer, Buffer]:
    """Buffers that will hold tiles, each with the one that takes its place."""
    if not target.has_tiles:
        return {}
    makers: dict[Buffer, list[Matrix | None]] = {}
    readers: dict[Buffer, list[Matrix | None]] = {}
    for k in all_kernels(items):
        for o in (*k.operands, *k.scratch):
            if o.written:
                makers.setdefault(o.view.buffer, []).append(_given(k, o, target))
            else:
                readers.setdefault(o.view.buffer, []).append(_taken(k, o))
    new = {}
    for b, taken in readers.items():
        given = makers.get(b, [])
        if b.kind == "arena" and b.dtype == f32 and len(given) == 1 and all(_same(t, given[0]) for t in taken):
            assert given[0] is not None
            new[b] = replace(b, tiled=given[0][1])
    return new


def _same(a: Matrix | None, b: Matrix | None) -> bool:
    return a is not None and b is not None and equal(a[0], b[0]) and a[1] == b[1]


def _given(k: Kernel, o: Operand, target: Target) -> Matrix | None:
    """The result that its kernel can write as tiles."""
    if o.name != "y" or not o.view.is_whole:
        return None
    if isinstance(k, Linear) and k.epilogue in ("pointwise", "gated") and _packed(k):
        columns = k.columns // (2 if k.epilogue == "gated" else 1)
        return (k.rows, columns) if columns % 32 == 0 and k.body is not None and k.body.dtype == f32 else None
    if isinstance(k, Attention) and on_tiles(k, target):
        return k.batch * k.seq, k.heads * k.value_dim
    return None


def _taken(k: Kernel, o: Operand) -> Matrix | None:
    """The x that its product would only round and pack."""
    if isinstance(k, Linear) and o.name == "x" and k.norm == "none" and _packed(k) and o.view.is_whole:
        return k.rows, k.depth
    return None


def _packed(k: Linear) -> bool:
    return k.operand("w").view.buffer.layout.startswith("tiles")
