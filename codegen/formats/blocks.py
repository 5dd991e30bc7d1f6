"""What low-bit formats have in common: codes of a few bits in blocks along k, each with scales of its own.

A format is described by data: the words of a block, what is narrower, and how a code becomes a value.
The panels of all of them are packed alike, block by block and word by word (mp_blocks.h has the picture), so that a
packed weight has the bytes of the file in another order, and no more of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from monoplan.codegen.formats.base import Layout, Make, Native, WeightFormat
from monoplan.codegen.formats.tiles import TILES
from monoplan.codegen.target import Target
from monoplan.ir.dims import Dim
from monoplan.ir.types import DTYPES, LOW_BITS, Array, DType, TensorType

PANEL = 16  # columns, for every instruction set: MP_PANEL of mp_blocks.h
GROUP = 32  # numbers that a function of the header takes out of a block
X_GROUP, X_FLOATS = 80, 144  # bytes of a group of x: mp_x_group, mp_x_floats
X_DEEP = 256  # numbers of x that have one scale on tile units, in two bytes each: mp_blocks_tiles.h


class Blocks(WeightFormat):
    """A format of files. Weights come as rows of blocks, [rows, bytes]."""

    blocks, c_type, native = True, "uint8_t", "mp_pack_blocks"

    def __init__(
        self,
        name: str,
        words: Iterable[int],
        halves: Iterable[int] = (),
        singles: Iterable[int] = (),
        *,
        zero: int = 0,
        signed: bool = False,
        half_scales: bool = False,
        offsets: bool = False,
        zeros: bool = False,
        floats: bool = False,
        header: str = "",
        scales: tuple[int, Any] | None = None,
    ) -> None:
        self.name, self.dtype, self.header = name, LOW_BITS[name], f"mp_format_{header or name}.h"
        self.bits = self.dtype.bits  # without scales: `bytes` counts all
        self.places = {4: list(words), 2: list(halves), 1: list(singles)}  # where in a block its parts of n bytes are
        self.zero = zero  # the code that stands for 0, where there are no offsets
        self.signed = signed  # codes are signed bytes
        self.half_scales = half_scales  # each 16 numbers of a group have a scale (and an offset) of their own
        self.offsets = offsets
        self.zeros = zeros  # each block has a zero point of its own
        self.floats = floats  # codes are floats of 8 bits: products are sums of floats
        # Where scales that are one number each stand in a block, and their type; in others they are the halves.
        self.scales = [scales] if scales else [(place, np.float16) for place in self.places[2]]
        self.tile, self.tile_bytes = TILES[name].c_type, TILES[name].bytes

    @property
    def unit(self) -> int:
        """Blocks that lie together in a panel: of those of 32 numbers as many as make whole cache lines."""
        return 1 if self.dtype.block > GROUP else max(2, 64 // math.gcd(64, self.dtype.block_bytes * PANEL))

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of all columns of a panel."""
        return self.unit * self.dtype.block_bytes * PANEL

    def units(self, depth: int) -> int:
        return -(-depth // (self.unit * self.dtype.block))

    def x_floats(self, depth: int) -> int:
        """Floats that a row of x takes, as integers with their scales, on tile units or elsewhere."""
        groups = self.units(depth) * self.unit * self.dtype.block // GROUP
        return max(groups * (self.x_bytes // 4), -(-depth // X_DEEP) * (X_DEEP // 2 + 1))

    @property
    def x_bytes(self) -> int:
        """Bytes of a group of x."""
        return X_FLOATS if self.floats else X_GROUP

    @property
    def _kind(self) -> str:
        return "MP_FLOATS" if self.floats else "MP_SIGNED" if self.signed else "MP_UNSIGNED"

    def c_fields(self, panel: int, vectors: int) -> str:
        flags = {"halves": self.half_scales, "offsets": self.offsets, "zeros": self.zeros, "x_bytes": self.x_bytes}
        unit = {"unit_bytes": self.unit_bytes, "unit": self.unit * self.dtype.block // GROUP, "zero": self.zero}
        unit["largest"] = 0 if self.signed or self.floats else (1 << TILES[self.name].code_bits) - 1
        return (
            ", ".join(f".{name} = {int(value)}" for name, value in (unit | flags).items()) + f", .kind = {self._kind}"
        )

    def load_column(self, row: str, table: str, column: str, depth: int, panel: int) -> str:
        groups = self.unit * self.dtype.block // GROUP
        rest = f"mp_group_{self.name}, {self.unit_bytes}, {groups}, {self.zero}, {int(self.zeros)}, {self._kind}"
        return f"mp_block_column({row}, {table}, {column}, {depth}, {rest})"

    def takes(self, weight: TensorType, target: Target) -> bool:
        return weight.dtype == self.dtype and (target.is_cpu or target.capability >= 80)

    def pack_rows(self, w: Array) -> Array:
        return TILES[self.name].pack(w)

    def panel(self, target: Target) -> int:
        return PANEL

    def panel_bytes(self, depth: int, panel: int) -> int:
        return self.units(depth) * self.unit_bytes

    def bytes(self, elements: Dim) -> Dim:
        return elements * self.dtype.block_bytes // self.dtype.block

    def _rows(self) -> Iterator[tuple[int, int, int]]:
        """The rows of a unit of a panel: bytes of each column, where the row begins, where in the blocks they are."""
        at = 0
        for n, places in self.places.items():
            for place in (b * self.dtype.block_bytes + p for b in range(self.unit) for p in places):
                yield n, at, place
                at += n * PANEL

    def pack(self, w: Array, rows: Array, layout: Layout, make: Make, native: Native | None) -> Array:
        size, table = self.unit * self.dtype.block_bytes, list(self._rows())
        units = -(-w.shape[1] // size)
        if units * size != w.shape[1]:  # blocks that the last unit lacks are zeros
            w = np.concatenate([w, np.zeros((len(w), units * size - w.shape[1]), np.uint8)], axis=1)
        panels = np.ascontiguousarray(rows.reshape(-1, PANEL), np.int64)
        out = make((len(panels), units * size * PANEL), np.uint8)
        if native is not None:
            if (panels < 0).any():
                out[:] = 0
            places = np.array([place for _, _, place in table], np.int64)
            counts = [self.unit * len(found) for found in self.places.values()]
            native(np.require(w, None, ["C", "A"]), out, panels, len(panels), units, size, places, *counts)
            return out
        blocks = np.concatenate([w, np.zeros((1, w.shape[1]), np.uint8)])[panels].reshape(-1, PANEL, units, size)
        for n, at, place in table:
            found = blocks[..., place : place + n].swapaxes(1, 2)
            out.reshape(-1, units, size * PANEL)[..., at : at + n * PANEL] = found.reshape(len(panels), units, -1)
        return out

    def unpack(self, packed: Array, depth: int, layout: Layout) -> Array:
        """The blocks of all columns, [columns, bytes]."""
        size = self.unit * self.dtype.block_bytes
        units = packed.reshape(-1, self.units(depth), size * PANEL)
        made = np.empty((len(units), PANEL, units.shape[1], size), np.uint8)
        for n, at, place in self._rows():
            found = units[..., at : at + n * PANEL].reshape(*units.shape[:2], PANEL, n)
            made[..., place : place + n] = found.swapaxes(1, 2)
        return made.reshape(len(units) * PANEL, -1)[:, : depth // self.dtype.block * self.dtype.block_bytes]

    def join(self, codes: Array, scales: Array, zeros: Array | None = None) -> Array:
        """Blocks [rows, bytes] of bytes [rows, columns], each with one of scales and of zero points [rows, blocks]."""
        each, ((place, dtype),) = codes.reshape(*scales.shape, self.dtype.block), self.scales
        if self.floats:
            scales = np.where((each & 127 == 127).any(axis=2), np.float32(np.nan), scales)
        if self.dtype.block_bytes < self.dtype.block:  # two codes in a byte
            pairs = each.reshape(*scales.shape, -1, 2, GROUP // 2)
            each = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*scales.shape, -1)
        parts = [each, np.ascontiguousarray(scales[..., None], dtype).view(np.uint8)]
        parts = parts if place else parts[::-1]
        if zeros is not None:
            parts.append(zeros[..., None].view(np.uint8))
        return np.concatenate(parts, axis=2).reshape(len(codes), -1)

    def values(self, blocks: Array) -> Array:
        """What blocks [rows, bytes] mean, in float32."""
        if self.floats or self.zeros:
            codes, words, *zeros = TILES[self.name].cut(blocks)
            numbers = FLOAT8[codes] if self.floats else codes.view(np.int8).astype(np.float32)
            each = numbers.reshape(*words.shape, -1)
            with np.errstate(all="ignore"):
                scales = words.view(self.scales[0][1]).astype(np.float32)[..., None]
                made = (each - zeros[0].view(np.int8).astype(np.float32)[..., None] if zeros else each) * scales
            return made.reshape(len(blocks), -1)
        import gguf

        codec = getattr(gguf.quants, self.name.upper())
        codec.init_grid()
        with np.errstate(all="ignore"):  # damaged scales may overflow, which is seen in the numbers
            found: Array = codec.dequantize_blocks(blocks.reshape(-1, self.dtype.block_bytes))
        return found.reshape(len(blocks), -1)


# What codes of fp8 are. The last of each sign is no NaN here: blocks with one have a scale that is.
FLOAT8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FLOAT8[[127, 255]] = 480.0, -480.0


def _groups(bits: int, block: int, scale: str) -> Blocks:
    """Codes, then the scale, then the zero point."""
    end, dtype = block * bits // 8, DTYPES[scale]
    words, halves = [*range(0, end, 4), *[end] * (dtype.bits == 32)], [end] * (dtype.bits == 16)
    return Blocks(
        f"int{bits}_{block}_{scale}", words, halves, [end + dtype.itemsize],
        signed=bits == 8, zeros=True, header="groups", scales=(end, dtype.numpy),
    )  # fmt: skip


BLOCK_FORMATS: list[Blocks] = [
    Blocks("q4_0", range(2, 18, 4), [0], zero=8),
    Blocks("q4_1", range(4, 20, 4), [0, 2], offsets=True),
    Blocks("q5_0", range(2, 22, 4), [0], zero=16),
    Blocks("q5_1", range(4, 24, 4), [0, 2], offsets=True),
    Blocks("q8_0", range(2, 34, 4), [0], signed=True),
    Blocks("q2_k", range(0, 80, 4), [80, 82], half_scales=True, offsets=True),
    Blocks("q3_k", range(0, 108, 4), [108], zero=4, half_scales=True),
    Blocks("q4_k", range(4, 144, 4), [0, 2], offsets=True),
    Blocks("q5_k", range(4, 176, 4), [0, 2], offsets=True),
    Blocks("q6_k", range(0, 208, 4), [208], zero=32, half_scales=True),
    Blocks("iq4_nl", range(2, 18, 4), [0], signed=True),
    Blocks("iq4_xs", range(4, 136, 4), [0], [2, 3], signed=True),
    Blocks("mxfp4", range(1, 17, 4), (), [0], signed=True),
    *(Blocks(f"fp8_{n}", [n], (), range(n), floats=True, header="fp8", scales=(n, np.float32)) for n in (128, 32)),
    *(_groups(4, n, scale) for n in (128, 64, 32) for scale in ("f16", "bf16", "f32")),
    *(_groups(8, n, "f32") for n in (128, 64, 32)),
]


def block_format(dtype: DType) -> Blocks:
    """The format of a low-bit type."""
    return next(f for f in BLOCK_FORMATS if f.dtype == dtype)
