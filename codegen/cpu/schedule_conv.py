"""How packed convolutions run: the layout of their weights, and the blocks in which positions, columns and k pass."""

from __future__ import annotations

from monoplan.codegen.cpu.schedule_linear import Packed
from monoplan.codegen.formats import FORMATS, Layout
from monoplan.codegen.target import Target
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import TensorType, product

WIDE = 3  # vectors of positions of a register tile: with 8 columns 24 sums, which read 11 numbers for each k
SLICE_BYTES, NEON_SLICE_BYTES = 20 << 10, 32 << 10  # of a panel of weights and one of patches: with sums in L1
LOADED = 128 * 32  # floats of a slice that is converted, see MP_CONV_LOADED
STRIP_BYTES = 512 << 10  # of patches: half of L2, while weights pass
FEWEST, MOST = 4, 16  # panels of patches that share a pass over the weights
LEAST_COLUMNS = 4  # of a group: fewer would leave most of a register tile unused


@dataclass(frozen=True, slots=True)
class ConvSchedule(Packed):
    """The nest of a convolution: `rows` columns of weights by WIDE vectors of positions, over slices of k."""

    vectors: int  # of a row of a panel of weights
    lanes: int
    rows: int
    slice: int
    strip: int
    chunk: int
    patch_floats: int  # of scratch memory for each thread
    sum_floats: int


def conv_layout(target: Target, weight: TensorType, groups: int) -> Layout | None:
    """How the weight of a convolution is kept; None where its kernel reads it as it is."""
    found = next((f for f in FORMATS if not f.for_tiles and f.takes(weight, target)), None)
    columns = weight.shape[0]
    assert isinstance(columns, int)
    if not target.is_cpu or found is None or columns // groups < LEAST_COLUMNS:
        return None
    return Layout(found.name, found.panel(target))


def choose_conv(target: Target, layout: Layout, weight: TensorType, groups: int) -> ConvSchedule:
    """The schedule of a convolution with this weight [columns, channels, rows, columns of the kernel]."""
    columns, *inner = weight.shape
    depth = product(inner)
    assert isinstance(columns, int) and isinstance(depth, int)
    positions, panel = WIDE * target.lanes, layout.panel
    room = NEON_SLICE_BYTES if target.isa == "neon" else SLICE_BYTES
    most = max(1, min(room // (4 * (positions + panel)), LOADED // panel))
    slice_ = -(-depth // -(-depth // most))
    room = STRIP_BYTES // (4 * positions)  # k of one panel
    strip = depth if depth * FEWEST <= room else max(1, room // FEWEST // slice_) * slice_
    chunk = max(FEWEST, min(MOST, room // strip))
    panels = -(-(columns // groups) // panel) + (groups > 1)  # a group may begin inside of one
    sums = positions * panel * chunk * (panels if strip < depth else 1)
    rows = 8 if target.sums >= 8 * WIDE else 4
    return ConvSchedule(
        layout, panel // target.lanes, target.lanes, rows, slice_, strip, chunk, chunk * positions * strip + 64, sums
    )
