"""What low-bit formats have in common: codes of a few bits in blocks along k, each with scales of its own.

A format is described by data: the words of a block, the numbers of 16 bits behind them, and how a code becomes a value.
The panels of all of them are packed alike, block by block and word by word (mp_blocks.h has the picture), so that a
packed weight has the bytes of the file in another order, and no more of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from monoplan.codegen.formats.base import Array, Layout, Make, Native, WeightFormat
from monoplan.codegen.target import Target
from monoplan.ir.dims import Dim
from monoplan.ir.types import LOW_BITS, TensorType

PANEL = 16  # columns, for every instruction set: MP_PANEL of mp_blocks.h
GROUP = 32  # numbers that a function of the header takes out of a block
X_GROUP = 80  # bytes of a group of x: mp_x_group


class Blocks(WeightFormat):
    """A format of GGUF files. Weights come as rows of blocks, [rows, bytes]."""

    blocks, c_type, native = True, "uint8_t", "mp_pack_blocks"

    def __init__(
        self,
        name: str,
        words: Iterable[int],
        halves: Iterable[int],
        *,
        zero: int = 0,
        signed: bool = False,
        half_scales: bool = False,
        offsets: bool = False,
    ) -> None:
        self.name, self.dtype, self.header = name, LOW_BITS[name], f"mp_format_{name}.h"
        self.bits = self.dtype.bits  # without scales: `bytes` counts all
        self.words, self.halves = list(words), list(halves)  # where in a block its parts of 32 and of 16 bits are
        self.zero = zero  # the code that stands for 0, where there are no offsets
        self.signed = signed  # codes are signed bytes
        self.half_scales = half_scales  # each 16 numbers of a group have a scale (and an offset) of their own
        self.offsets = offsets

    @property
    def unit(self) -> int:
        """Blocks that lie together in a panel: two of those of 32 numbers, which makes whole cache lines."""
        return max(1, 64 // self.dtype.block)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of all columns of a panel."""
        return self.unit * self.dtype.block_bytes * PANEL

    def units(self, depth: int) -> int:
        return -(-depth // (self.unit * self.dtype.block))

    def x_floats(self, depth: int) -> int:
        """Floats that a row of x takes, as integers with their scales."""
        return self.units(depth) * self.unit * self.dtype.block // GROUP * (X_GROUP // 4)

    @property
    def c_constants(self) -> str:
        """Fields of mp_linear_blocks that the format decides."""
        flags = {"is_signed": self.signed, "halves": self.half_scales, "offsets": self.offsets}
        unit = {"unit_bytes": self.unit_bytes, "unit": self.unit * self.dtype.block // GROUP, "zero": self.zero}
        return ", ".join(f".{name} = {int(value)}" for name, value in (unit | flags).items())

    def load_column(self, row: str, table: str, column: str, depth: int, panel: int) -> str:
        groups = self.unit * self.dtype.block // GROUP
        rest = f"mp_group_{self.name}, {self.unit_bytes}, {groups}, {self.zero}, {int(self.signed)}"
        return f"mp_block_column({row}, {table}, {column}, {depth}, {rest})"

    def takes(self, weight: TensorType, target: Target) -> bool:
        return weight.dtype == self.dtype and target.is_cpu

    def panel(self, target: Target) -> int:
        return PANEL

    def panel_bytes(self, depth: int, panel: int) -> int:
        return self.units(depth) * self.unit_bytes

    def bytes(self, elements: Dim) -> Dim:
        return elements * self.dtype.block_bytes // self.dtype.block

    def _places(self) -> tuple[list[int], list[int]]:
        """Words and halves of a unit."""
        begins = [b * self.dtype.block_bytes for b in range(self.unit)]
        return [b + w for b in begins for w in self.words], [b + h for b in begins for h in self.halves]

    def pack(self, w: Array, rows: Array, layout: Layout, make: Make, native: Native | None) -> Array:
        words, halves = self._places()
        size = self.unit * self.dtype.block_bytes
        units = -(-w.shape[1] // size)
        if units * size != w.shape[1]:  # the last unit has one block: the other one is zeros
            w = np.concatenate([w, np.zeros((len(w), units * size - w.shape[1]), np.uint8)], axis=1)
        panels = np.ascontiguousarray(rows.reshape(-1, PANEL), np.int64)
        out = make((len(panels), units * size * PANEL), np.uint8)
        if (panels < 0).any():
            out[:] = 0
        if native is not None:
            places = np.array([*words, *halves], np.int64)
            source = np.require(w, None, ["C", "A"])
            native(source, out, panels, len(panels), units, size, places, len(words), len(halves))
            return out
        blocks = np.concatenate([w, np.zeros((1, w.shape[1]), np.uint8)])[panels].reshape(
            len(panels), PANEL, units, size
        )
        wide, narrow = (
            np.stack([blocks[..., p : p + n] for p in places], axis=2) if places else None
            for places, n in ((words, 4), (halves, 2))
        )
        parts = [p.transpose(0, 3, 2, 1, 4).reshape(len(panels), units, -1) for p in (wide, narrow) if p is not None]
        out[:] = np.concatenate(parts, axis=2).reshape(len(panels), -1)
        return out

    def unpack(self, packed: Array, depth: int, layout: Layout) -> Array:
        """The blocks of all columns, [columns, bytes]."""
        words, halves = self._places()
        size = self.unit * self.dtype.block_bytes
        units = packed.reshape(-1, self.units(depth), size * PANEL)
        made = np.empty((len(units), PANEL, units.shape[1], size), np.uint8)
        at = 0
        for places, n in ((words, 4), (halves, 2)):
            for p in places:
                made[..., p : p + n] = (
                    units[..., at : at + n * PANEL].reshape(*units.shape[:2], PANEL, n).swapaxes(1, 2)
                )
                at += n * PANEL
        return made.reshape(len(units) * PANEL, -1)[:, : depth // self.dtype.block * self.dtype.block_bytes]

    def values(self, blocks: Array) -> Array:
        """What blocks [rows, bytes] mean, in float32."""
        import gguf

        codec = getattr(gguf.quants, self.name.upper())
        codec.init_grid()
        with np.errstate(all="ignore"):  # damaged scales may overflow, which is seen in the numbers
            found: Array = codec.dequantize_blocks(blocks.reshape(-1, self.dtype.block_bytes))
        return found.reshape(len(blocks), -1)


BLOCK_FORMATS: list[WeightFormat] = [
    Blocks("q4_0", range(2, 18, 4), [0], zero=8),
    Blocks("q8_0", range(2, 34, 4), [0], signed=True),
    Blocks("q4_k", range(4, 144, 4), [0, 2], offsets=True),
    Blocks("q6_k", range(0, 208, 4), [208], zero=32, half_scales=True),
]
