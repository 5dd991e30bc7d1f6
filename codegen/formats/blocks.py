"""What low-bit formats have in common: codes of a few bits in blocks along k, each with scales of its own.

A format is described by data: the words of a block, what is narrower, and how a code becomes a value.
The panels of all of them are packed alike, block by block and word by word (mp_blocks.h has the picture), so that a
packed weight has the bytes of the file in another order, and no more of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from monoplan.codegen.formats.base import Array, Layout, Make, Native, WeightFormat
from monoplan.codegen.formats.tiles import TILES
from monoplan.codegen.target import Target
from monoplan.ir.dims import Dim
from monoplan.ir.types import LOW_BITS, TensorType

PANEL = 16  # columns, for every instruction set: MP_PANEL of mp_blocks.h
GROUP = 32  # numbers that a function of the header takes out of a block
X_GROUP = 80  # bytes of a group of x: mp_x_group
X_DEEP = 256  # numbers of x that have one scale on tile units, in two bytes each: mp_blocks_tiles.h


class Blocks(WeightFormat):
    """A format of GGUF files. Weights come as rows of blocks, [rows, bytes]."""

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
    ) -> None:
        self.name, self.dtype, self.header = name, LOW_BITS[name], f"mp_format_{name}.h"
        self.bits = self.dtype.bits  # without scales: `bytes` counts all
        self.places = {4: list(words), 2: list(halves), 1: list(singles)}  # where in a block its parts of n bytes are
        self.zero = zero  # the code that stands for 0, where there are no offsets
        self.signed = signed  # codes are signed bytes
        self.half_scales = half_scales  # each 16 numbers of a group have a scale (and an offset) of their own
        self.offsets = offsets
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
        return max(groups * (X_GROUP // 4), -(-depth // X_DEEP) * (X_DEEP // 2 + 1))

    def c_fields(self, panel: int, vectors: int) -> str:
        flags = {"is_signed": self.signed, "halves": self.half_scales, "offsets": self.offsets}
        unit = {"unit_bytes": self.unit_bytes, "unit": self.unit * self.dtype.block // GROUP, "zero": self.zero}
        return ", ".join(f".{name} = {int(value)}" for name, value in (unit | flags).items())

    def load_column(self, row: str, table: str, column: str, depth: int, panel: int) -> str:
        groups = self.unit * self.dtype.block // GROUP
        rest = f"mp_group_{self.name}, {self.unit_bytes}, {groups}, {self.zero}, {int(self.signed)}"
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

    def values(self, blocks: Array) -> Array:
        """What blocks [rows, bytes] mean, in float32."""
        import gguf

        codec = getattr(gguf.quants, self.name.upper())
        codec.init_grid()
        with np.errstate(all="ignore"):  # damaged scales may overflow, which is seen in the numbers
            found: Array = codec.dequantize_blocks(blocks.reshape(-1, self.dtype.block_bytes))
        return found.reshape(len(blocks), -1)


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
]
