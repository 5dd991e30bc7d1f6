"""What a weight format is, and how a plan lays the rows of a weight out in it.

A format says what the bytes of a weight mean: how they are packed, what they are in numpy, and which functions of its
header load them. A layout says which rows of the weight lie together: kernels read panels of columns, and an epilogue
may need rows side by side that are far apart in the weight. The two do not know each other's details.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.expressions import load
from monoplan.codegen.target import Target
from monoplan.ir.dims import Dim
from monoplan.ir.graph import Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, DType, TensorType, bf16

Make = Callable[[tuple[int, ...], Any], Array]  # memory of a shape and a type, at the begin of a cache line
# A function of the C library that packs weights, with arrays and numbers as arguments; None where there is no compiler.
Native = Callable[..., int]
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Layout:
    """How a plan keeps the weight of a product: its format, and which of its rows are the columns of each panel.

    order: `plain`; `gated`, where each panel has gates in its first half and the columns they multiply in its second;
    `heads`, where a group of panels is one head; `stacked`, as plain, of several matrices [matrices, rows, depth].
    Without panels, as on a GPU, the weight is row-major, and the order says which rows become neighbours.
    """

    format: str
    panel: int = 0  # columns of a panel, 0 without panels
    panels: int = 1  # panels of a group, which one call of the epilogue finishes
    order: str = "plain"
    head_dim: int = 0

    @property
    def width(self) -> int:
        """Columns of a group, padding included."""
        return self.panel * self.panels

    def rows(self, count: int) -> Array:
        """The row of a weight of `count` rows that each column of the panels is; -1 where a group is padded."""
        if self.order == "heads":
            rows = np.full((count // self.head_dim, self.width), -1, np.int64)
            rows[:, : self.head_dim] = np.arange(count).reshape(-1, self.head_dim)
            return rows.reshape(-1)
        parts = 2 if self.order == "gated" else 1
        each, columns = count // parts, self.panel // parts
        groups = -(-each // (columns * self.panels))
        inside = np.arange(groups * self.panels * columns).reshape(-1, 1, columns)
        return np.where(inside < each, inside + np.arange(parts)[:, None] * each, -1).reshape(-1)


@dataclass(frozen=True)
class ParamUse:
    """A weight as the plan wants it: the value it comes from and how it is packed."""

    value: Value
    layout: Layout | None


class WeightFormat:
    """One way to store the numbers of a weight. Subclass it in a file of its own, and list it in `FORMATS`."""

    name: str
    dtype: DType  # of the values, as the IR and the interpreter see them
    bits: int  # of memory for each number
    c_type: str  # what pointers to packed weights point to, in C and in CUDA
    # -- C: panels
    header: str  # mp_load_row_<name> and mp_load_column_<name>, beside the format's file
    for_tiles: bool = False  # panels are made for bf16 tile units
    blocks: bool = False  # low-bit codes in blocks: products are sums of integers (mp_linear_blocks.h)
    floats: bool = False  # codes of such blocks are floats, and products sums of floats
    fixed_size: bool = True  # panels have panel_bytes, and nothing lies behind them
    native: str = ""  # the function of the C library that packs it
    # -- CUDA: either tiles, which tensor cores take once they are decoded (mp_tiles.cuh)
    tile: str = ""  # the C++ type of its tiles
    tile_bytes: int = 0
    cuda_pack: str = ""  # the kernel that packs rows into tiles, in a header of this name; "": array operations do it
    head_words: int = 0  # of 4 bytes at the end of a tile, which say whether it is kept raw: see raw_tiles
    # or rows of whole bytes, 16 of which mp_widen<c_type> makes floats
    cuda_header: str = ""  # where mp_widen (of mp_vec.cuh) and mp_weight of a type of its own are
    tensor_cores: bool = False  # rows are half precision as tensor cores and the vendor's library take it

    @property
    def x_dtype(self) -> DType:
        """The type in which a GPU's tensor cores take what a weight is multiplied with."""
        return bf16 if self.tile else self.dtype

    def takes(self, weight: TensorType, target: Target) -> bool:
        """Whether a product on this target can keep such a weight in this format."""
        raise NotImplementedError

    def panel(self, target: Target) -> int:
        """Columns of a panel."""
        raise NotImplementedError

    def panel_bytes(self, depth: int, panel: int) -> int:
        """Bytes of one panel."""
        return depth * panel * self.bits // 8

    def x_floats(self, depth: int) -> int:
        """Floats that a row of x takes when it is packed for a product by blocks."""
        raise NotImplementedError

    @property
    def x_bytes(self) -> int:
        """Bytes of a group of such a row."""
        raise NotImplementedError

    def bytes(self, elements: Dim) -> Dim:
        """Bytes that a kernel reads for so many numbers."""
        return elements * self.bits // 8

    def pack(self, w: Array, rows: Array, layout: Layout, make: Make, native: Native | None) -> Array:
        """The panels of a weight [rows, depth]: column j of all panels is row rows[j], zeros where that is -1."""
        raise NotImplementedError

    def unpack(self, packed: Array, depth: int, layout: Layout) -> Array:
        """The columns of all panels as rows [columns, depth], padding included: what the packed bytes mean."""
        raise NotImplementedError

    def pack_rows(self, w: Array) -> Array:
        """A weight [rows, depth] as a GPU keeps it: row by row, or in tiles. An array of numpy or of CuPy."""
        raise NotImplementedError

    def raw_tiles(self, w: Array, heads: Array) -> Array:
        """What stands behind all tiles: those that are kept raw. Writes their numbers into `heads` [tiles, words]."""
        raise NotImplementedError

    def pack_text(self) -> str:
        """The text of the header with the kernel `cuda_pack`."""
        return (HERE / f"{self.cuda_pack}.cuh").read_text("utf-8")

    def cuda_value(self, element: str) -> str:
        """The value of one element of rows (of tiles: expanded to bf16) as a CUDA expression."""
        return load(bf16, element) if self.tile else f"mp_weight({element})"

    def c_fields(self, panel: int, vectors: int) -> str:
        """Fields of mp_panel_format (of mp_block_format, for blocks) that the format decides."""
        return f".load = mp_load_row_{self.name}, .vectors = {vectors}, .bytes = {panel * self.bits // 8}"

    def load_column(self, row: str, table: str, column: str, depth: int, panel: int) -> str:
        """The call that unpacks a column of a table in panels into `row`: C."""
        return f"mp_load_column_{self.name}({row}, {table}, {column}, {depth}, {panel})"

    def headers(self) -> list[tuple[str, str]]:
        """Names and texts of the C headers."""
        return [(self.header, (HERE / self.header).read_text("utf-8"))]

    def cuda_text(self) -> str:
        """The text of the CUDA header."""
        return (HERE / self.cuda_header).read_text("utf-8")


class Plain(WeightFormat):
    """Numbers of an element type as they are: a panel is [depth][columns]."""

    def takes(self, weight: TensorType, target: Target) -> bool:
        return weight.dtype == self.dtype

    def panel(self, target: Target) -> int:
        return target.panel_16 if self.bits == 16 else target.panel

    def pack_rows(self, w: Array) -> Array:
        return np.ascontiguousarray(w)

    def cuda_value(self, element: str) -> str:
        return load(self.dtype, element)

    def columns(self, rows: Array) -> Array:
        """Rows in the order in which the columns of a panel lie: [panels, columns]."""
        return rows

    def pack(self, w: Array, rows: Array, layout: Layout, make: Make, native: Native | None) -> Array:
        depth, panel = w.shape[1], layout.panel
        out = make((rows.size // layout.width, layout.panels, depth, panel), w.dtype)
        rows = np.ascontiguousarray(self.columns(rows.reshape(-1, panel)), np.int64)
        none = np.zeros(depth, w.dtype)  # what rows of number -1 are
        if native is not None:
            native(np.require(w, None, ["C", "A"]), none, out, rows, len(rows), panel, depth)
        else:
            out.reshape(len(rows), depth, panel)[:] = np.concatenate([w, none[None]])[rows].swapaxes(1, 2)
        return out

    def unpack(self, packed: Array, depth: int, layout: Layout) -> Array:
        panels = packed.reshape(-1, depth, layout.panel).swapaxes(1, 2)
        order = self.columns(np.arange(layout.panel)[None])[0]
        rows = np.empty_like(panels)
        rows[:, order] = panels
        return rows.reshape(-1, depth)
