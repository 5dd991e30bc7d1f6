"""bf16 in 12 bits, without loss, for CPUs with tile units and for GPUs.

The upper byte of a number, its sign and most of its exponent, is nearly always one of 16 that its neighbours have: a
code of 4 bits says which. The numbers whose upper byte has no code stand in exception lists. mp_format_bf16_12.h
describes the panels of a CPU, mp_tiles.cuh the tiles of a GPU.
"""

from __future__ import annotations

import numpy as np

from monoplan.codegen.formats.base import Layout, Make, Native, WeightFormat
from monoplan.codegen.formats.tiles import COLUMNS, PIECE, ROWS, as_bytes, word_order
from monoplan.codegen.target import Target
from monoplan.ir.types import Array, TensorType, aligned, bf16

_HEAD = 64  # bytes in front of a panel: the 16 upper bytes, and where its exceptions begin
HEAD_WORDS = 8  # behind the codes of a tile: see mp_tiles.cuh
_RAW = 1 << 16  # MP_RAW
_END = 0xFFFFFFFF  # the place of the last exception of a panel, which is none


class BF16In12Bits(WeightFormat):
    name, dtype, bits = "bf16_12", bf16, 12
    header, c_type, native, for_tiles = "mp_format_bf16_12.h", "mp_bf16", "mp_pack_coded", True
    fixed_size = False  # exceptions lie behind the panels

    tile, tile_bytes = "mp_weight_tile<mp_codes_12, mp_scales_tile, 0>", 12 * 512 + 4 * HEAD_WORDS
    cuda_pack, head_words = "mp_pack_bf16_12", HEAD_WORDS

    def takes(self, weight: TensorType, target: Target) -> bool:
        depth = weight.shape[-1]
        if weight.dtype != bf16 or not isinstance(depth, int):
            return False
        if target.is_cpu:
            return target.has_tiles and depth % 32 == 0
        return target.compact and target.capability >= 80 and depth % 256 == 0 and len(weight.shape) == 2

    def panel(self, target: Target) -> int:
        return 32  # two tiles

    def panel_bytes(self, depth: int, panel: int) -> int:
        return super().panel_bytes(depth, panel) + _HEAD

    def pack_rows(self, w: Array) -> Array:
        w = w.view(np.uint16)
        tiles = np.concatenate([_tiles(w[first : first + PIECE]) for first in range(0, len(w), PIECE)])
        heads = tiles[:, -HEAD_WORDS * 4 :].copy().view(np.uint32)
        raw = self.raw_tiles(w, heads)
        tiles[:, -HEAD_WORDS * 4 :] = heads.view(np.uint8)
        return np.concatenate([tiles.reshape(-1), raw])

    def raw_tiles(self, w: Array, heads: Array) -> Array:
        found = np.flatnonzero(heads[:, 0] & _RAW)
        heads[found, 1] = np.arange(len(found))
        strips, places = np.divmod(found, w.shape[1] // COLUMNS)
        rows = strips[:, None] * ROWS + np.arange(ROWS)
        columns = places[:, None, None] * COLUMNS + np.arange(COLUMNS)
        cut = w[np.minimum(rows, len(w) - 1)[:, :, None], columns].view(np.uint16) * (rows < len(w))[:, :, None]
        words = word_order(np, cut.astype(np.uint16).reshape(-1, COLUMNS)).reshape(-1, 4, 32, 4, 8).swapaxes(2, 3)
        return np.ascontiguousarray(words).reshape(-1).view(np.uint8)

    def pack(self, w: Array, rows: Array, layout: Layout, make: Make, native: Native | None) -> Array:
        depth, rows = w.shape[1], np.ascontiguousarray(rows.reshape(-1, 32), np.int64)
        assert depth % 32 == 0 and w.dtype == bf16.numpy
        if native is None:
            return self._pack_slowly(w, rows)
        w, none, tiles = np.require(w, None, ["C", "A"]), np.zeros(depth, w.dtype), aligned((depth * 32,), np.uint16)
        panels, each = len(rows), self.panel_bytes(depth, 32)
        # Memory that `make` gave is not given back: one or two panels say how long the list will be.
        few = np.ascontiguousarray(rows[:: -(-panels // 2)])
        found = native(w, none, aligned((len(few) * each,), np.uint8), few, len(few), depth, tiles, 0)
        room = 2 * found * panels // len(few) + rows.size * depth // 2048
        while True:
            out = make((panels * each + 8 * room,), np.uint8)
            needed = native(w, none, out, rows, panels, depth, tiles, room)
            if needed <= room:
                return out[: out.size - 8 * (room - needed)]
            del out
            room = needed  # panels that are not like those

    def _pack_slowly(self, w: Array, rows: Array) -> Array:
        """The same without a compiler."""
        count, depth = len(rows), w.shape[1]
        panels = np.concatenate([w, np.zeros((1, depth), w.dtype)])[rows].view(np.uint32)  # -1 is the last one
        # [panel][k / 32][half][pair][column]
        cut = panels.reshape(count, 2, 16, depth // 32, 16).transpose(0, 3, 1, 4, 2)
        tiles = np.ascontiguousarray(cut).view(np.uint16).reshape(count, -1)
        out = np.zeros((count, self.panel_bytes(depth, 32)), np.uint8)
        lists: list[Array] = []
        for p, w16 in enumerate(tiles):
            upper = _usual_bytes(w16)
            known = w16[:, None] >> 8 & 127 == upper  # of each number, by codes
            exceptions = np.flatnonzero(~known.any(1))
            code = known.argmax(1) | w16 >> 12 & 8  # 0 where there is none; and the sign
            # Two rows of a tile lie together, eight numbers of the one and eight of the other.
            both = np.stack([code, w16 & 255]).reshape(2, -1, 2, 4, 8).swapaxes(2, 3).astype(np.uint8)
            codes, lower = both[0].reshape(-1, 2, 64), both[1].reshape(-1, 128)
            begins = (count - p) * out.shape[1] - _HEAD + 8 * sum(map(len, lists))
            out[p, _HEAD:] = np.concatenate([codes[:, 0] | codes[:, 1] << 4, lower], axis=1).reshape(-1)
            out[p, :16] = np.concatenate([upper, upper | 0x80])
            out[p, 16:24] = np.array([begins], np.int64).view(np.uint8)
            lists.append(np.array([*zip(exceptions, w16[exceptions], strict=True), (_END, 0)], np.uint32))
        return np.concatenate([out.reshape(-1), *(one.reshape(-1).view(np.uint8) for one in lists)])

    def unpack(self, packed: Array, depth: int, layout: Layout) -> Array:
        each, count = self.panel_bytes(depth, 32), 0
        first = int(packed[16:24].view(np.int64)[0]) + _HEAD  # the first exceptions stand behind the last panel
        count = first // each
        made = np.empty((count, depth * 32), np.uint16)
        for p in range(count):
            head = packed[p * each : (p + 1) * each]
            quarters = head[_HEAD:].reshape(-1, 192)
            codes = np.stack([quarters[:, :64] & 15, quarters[:, :64] >> 4], axis=1).reshape(-1, 64)
            lower = quarters[:, 64:].reshape(-1, 64)
            values = head[:16].astype(np.uint16)[codes] << 8 | lower
            tiles = values.reshape(-1, 4, 2, 8).swapaxes(1, 2).reshape(-1)  # two rows of 32
            at = p * each + _HEAD + int(head[16:24].view(np.int64)[0])
            exceptions = np.ascontiguousarray(packed[at:]).view(np.uint32).reshape(-1, 2)
            exceptions = exceptions[: int(np.argmax(exceptions[:, 0] == _END))]
            tiles[exceptions[:, 0]] = exceptions[:, 1]
            made[p] = tiles
        # [panel][k / 32][half][pair][column][2] to [panel][half][column][k]
        cut = made.reshape(count, depth // 32, 2, 16, 16, 2).transpose(0, 2, 4, 1, 3, 5)
        return np.ascontiguousarray(cut).reshape(-1, depth).view(bf16.numpy)


def _usual_bytes(numbers: Array) -> Array:
    """Upper bytes without sign that most of them have, by a sample; below those that were seen, a quarter as many."""
    rows = numbers.reshape(-1, 32)[:: numbers.size // 4096 | 1]
    guess = np.bincount(rows.reshape(-1) >> 8 & 127, minlength=128).astype(np.float64)
    for b in range(126, -1, -1):
        guess[b] = max(guess[b], guess[b + 1] / 4)
    return np.argsort(-guess, kind="stable")[:8].astype(np.uint8)


# -- GPU


def _tiles(w: Array) -> Array:
    """Tiles [tiles, bytes] of rows of bf16; those that are kept raw are marked."""
    a = word_order(np, w)
    shape, flat = a.shape, a.reshape(-1, 4096)
    exponent = (flat >> 7 & 255).astype(np.int16)
    top = _best_top(exponent)
    place = exponent - top[:, None] + 15  # 0 to 15: one of the tile's 16 binades
    normal = (exponent > 0) & (exponent < 255)
    known = np.where(normal, (place >= 0) & (place < 16), (exponent == 0) & (top == 0)[:, None])
    code = np.where(known, place, 0).astype(np.uint16)
    upper, lower = (flat >> 12 & 8 | code >> 1).astype(np.uint32), ((code & 1) << 7 | flat & 127).astype(np.uint8)
    upper, lower = upper.reshape(*shape[:5], 8), lower.reshape(*shape[:4], 2, 16)
    words = np.zeros(shape[:5], np.uint32)
    for i in range(8):
        first, sign = (8 * i, 8 * i + 7) if i < 4 else (8 * i - 28, (8 * i - 21) % 32)
        words |= (upper[..., i] & 7) << np.uint32(first) | (upper[..., i] >> 3) << np.uint32(sign)
    codes = words.view(np.uint8).reshape(*shape[:4], 1, 16)
    pieces = np.concatenate([codes, lower], axis=4).swapaxes(3, 4)  # [strip, tile, chunk, piece, lane, 16]
    # Numbers without a code, whose exponent the tile's power of two has moved; 0 stays 0.
    tile, at = np.nonzero(~known)
    number = flat[tile, at]
    moved = exponent[tile, at] - top[tile] + 127
    zero = (number & 0x7FFF) == 0
    put = np.where(zero, number, number & 0x807F | moved.astype(np.uint16) << 7).astype(np.uint32)
    counts = np.bincount(tile, minlength=len(flat))
    lost = ~zero & ((moved < 1) | (moved > 254) | (exponent[tile, at] == 0) | (exponent[tile, at] == 255))
    is_raw = (counts > 7) | (np.bincount(tile[lost], minlength=len(flat)) > 0)
    rank = np.arange(len(tile)) - (np.cumsum(counts) - counts)[tile]
    kept = ~is_raw[tile]
    tile, at, put, rank = tile[kept], at[kept].astype(np.uint32), put[kept], rank[kept]
    head = np.zeros((len(flat), HEAD_WORDS), np.uint32)
    head[:, 0] = np.where(is_raw, 127 | _RAW, top.astype(np.int64) | counts << 8).astype(np.uint32)
    row = (at >> 7 & 7) + (at >> 1 & 1) * 8  # of [chunk, g, t, step, word of the row, upper rows, half]
    column = (at >> 10) * 64 + (at >> 3 & 3) * 16 + (at >> 5 & 3) * 4 + (at >> 2 & 1) * 2 + (at & 1)
    head[tile, rank + 1] = put << np.uint32(16) | row << np.uint32(8) | column
    return np.concatenate([as_bytes(np.ascontiguousarray(pieces)).reshape(len(flat), -1), head.view(np.uint8)], axis=1)


def _best_top(exponent: Array) -> Array:
    """The exponent of each tile below which its 16 binades lie, so that they miss the fewest numbers; 0: all are 0."""
    most = np.where(exponent < 255, exponent, 0).max(axis=1)
    tops = [np.maximum(most - down, np.minimum(most, 1)) for down in range(8)]
    missed = [((exponent > t[:, None]) | (exponent < t[:, None] - 15) | (exponent == 0)).sum(axis=1) for t in tops]
    return np.choose(np.argmin(missed, axis=0), tops).astype(np.int16)
