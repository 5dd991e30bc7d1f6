"""How packed linears run: the layout of their weights, and the blocks in which rows, columns and k pass the caches."""

from __future__ import annotations

from monoplan.codegen.formats import FORMATS, Layout, WeightFormat, choose_format, format_of, tiles
from monoplan.codegen.kernels import Experts, Linear
from monoplan.codegen.target import Target
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import TensorType

CHUNK, TILE_CHUNK = 512, 256  # rows that share a pass over the weights
SLICE_BYTES, NEON_SLICE_BYTES = 24 << 10, 32 << 10  # of panels, in f32: stay in L1 (32 KB or more; NEON: 64 KB)
STRIP_BYTES = 800 << 10  # of a chunk of x: the larger part of L2
TILE_SLICE = 512  # k of a panel for tile units: 32 KB of bf16, which stay in L1
TILE_STRIP = 2048  # k of x that stays in L2, 1 MB of a chunk, if that is all; else a slice, while the next one comes
TILE_ROWS = 16  # from so many rows on, tiles of bf16 in blocks of 32 rows fit where the rows were in f32
GROUP_BYTES = 1 << 20  # of a group's weights, where it has a choice: threads share the last groups of one row
PART, TILE_PART = 96, 192  # rows for which it pays that a thread reads all weights, and shares no row with others
WAITING, TILE_WAITING = 16, 24  # panels whose sums wait between strips: with a strip of x they fill half of L2
NEAR_BYTES, FAR_BYTES = 4096, 32768  # few rows: how far ahead weights are prefetched into L1 and into L2
NEON_NEAR_BYTES, NEON_FAR_BYTES = 512, 0  # Neoverse-N1 cores look ahead themselves; 0: not into L2
TILE_PIECE = 8  # panels that a thread takes at a time, so that it knows which one to prefetch next
TILE_LEAST = 4  # panels that a thread takes at a time in the end where x passes in strips, which come from far away
BLOCK_ROWS, WIDE_BLOCK_ROWS = 4, 8  # rows that a pass over low-bit blocks serves at most; with vectors of 512 bits
BLOCK_NEAR_BYTES, BLOCK_FAR_BYTES = 2048, 8192  # the same of low-bit blocks
WIDE_NEAR_BYTES, WIDE_FAR_BYTES = 4096, 16384  # of them on AVX-512 without tile units
BLOCK_PANELS = 4  # panels of such blocks that are finished at once: small pieces of work for many threads
BLOCK_TILED = 40  # tile units: rows of low-bit blocks from which on they pay: measured beside passes of 8 rows
THIRDS_ROWS, THIRDS_BLOCK = 48, 32  # tile units: rows of f32 from which on they pay, in blocks of so many
BLOCK_CHUNK, BLOCK_STRIP = 512, 1024  # tile units: rows that share expanded weights, and k of them in L2, 1 MB
PAIR_ISAS = ("avx2", "avx512", "amx")  # multiply pairs of 16-bit integers fast: mp_blocks_pairs.h
PAIR_CHUNK = 384  # rows that share codes as pairs: with 256 k of x and the sums of four panels 340 KB, in L2
TILE_FEW = (1, 4, 8)  # rows whose three parts are rows of one or two tiles
TILE_SOME = 2  # rows of heads that are finished at a time between tile steps
TILE_EVERY = 4  # steps after which the rows of all of them are finished, of other products: in pauses, not in each step


@dataclass(frozen=True, slots=True)
class Blocking:
    """The nest for many rows: `block` of them times a panel over `slice` of k, a chunk of rows, a strip of k."""

    block: int
    part: int  # rows, or more, that a thread may have for itself
    abreast: int  # panels that a block of rows takes at once
    chunk: int
    slice: int
    strip: int
    slots: int  # groups whose sums wait; for tile units, panels
    sums: int  # floats that each thread keeps for them
    unit: int = 1  # tile units: panels whose sums are finished together
    waits: str = ""  # what sums wait for: other `slices` of a panel, the rest of their `heads`, other `strips`
    piece: int = 1  # units that a thread takes at a time
    least: int = 1  # and in the end
    every: int = 0  # tile units: steps after which some rows are finished, of heads TILE_SOME
    tiled_from: int = 0  # rows from which on tile units multiply panels of floats or of low-bit blocks; 0: never
    pairs: bool = False  # many rows times low-bit blocks go by pairs of 16 bits: mp_blocks_pairs.h

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of the last block, ascending: fewer than the others have where that suffices."""
        third = -(-self.block // 3)
        return third, min(2 * third, self.block), self.block

    @property
    def rows(self) -> int:
        """Tile units: rows of a block for each step of a slice, so that all of them have had their turn in the end."""
        return -(-self.block * 32 // self.slice)


@dataclass(frozen=True, slots=True)
class Packed:
    """What schedules of kernels with packed weights have in common."""

    layout: Layout

    @property
    def format(self) -> WeightFormat:
        return format_of(self.layout)

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return self.layout.panel


@dataclass(frozen=True, slots=True)
class LinearSchedule(Packed):
    """How a packed product runs: groups of `panels` panels make one epilogue."""

    groups: int
    row_blocks: tuple[int, ...]  # rows that a pass over the weights serves when they are few
    vectors: int  # vectors in a panel
    line: int  # rows of a panel in a cache line, or 1
    near: int  # rows (tiles: bytes) by which a panel is prefetched into L1 before it is read, when rows of x are few
    far: int  # and into L2
    blocking: Blocking
    takes_tiles: bool = False  # x comes as bf16 tiles when rows are many: see hand_over
    gives_tiles: bool = False  # y is made so

    @property
    def tiles(self) -> bool:
        """Whether it runs on bf16 tile units."""
        return self.format.for_tiles

    @property
    def loop(self) -> str:
        """The header whose loop it is, and the template that calls it."""
        return "tiles" if self.tiles else "blocks" if self.format.blocks else "vectors"

    @property
    def panels(self) -> int:
        """Panels of a group."""
        return self.layout.panels

    @property
    def width(self) -> int:
        """Columns of a group, padding included."""
        return self.layout.width

    def group_bytes(self, depth: int) -> int:
        """Bytes of the weights of a group."""
        return self.panels * self.format.panel_bytes(depth, self.panel)

    @property
    def tail(self) -> int:
        """Groups that are not assigned to a thread beforehand when rows are few."""
        return min(self.groups // 4, 8)


def linear_layout(target: Target, weight: TensorType, epilogue: str, head_dim: int = 0) -> Layout:
    """How the weight of a product with this epilogue is kept."""
    found = choose_format(weight, target)
    assert found is not None, "lowering asks for no product of a weight that no format takes"
    order = epilogue if epilogue in ("heads", "gated") else "plain"
    if not target.is_cpu:  # row-major; rows that an epilogue needs together are neighbours
        return Layout(found.name, order=order, head_dim=head_dim)
    panel = found.panel(target)
    # Panels that are finished at once, at most: eight vectors.
    wide = BLOCK_PANELS if found.blocks else max(1, 8 * target.lanes // panel)
    if order == "heads":
        return Layout(found.name, panel, -(-head_dim // panel), order, head_dim)
    if order == "gated":
        return Layout(found.name, panel, wide, order)
    columns, depth = weight.shape
    assert isinstance(columns, int) and isinstance(depth, int)
    return Layout(found.name, panel, _group(-(-columns // panel), wide, found.panel_bytes(depth, panel)))


def _group(panels: int, wide: int, panel_bytes: int) -> int:
    """Panels in a group: the least padding, then an even number of groups (so that two threads have the same)."""
    least = max(1, wide // 2)
    choices = [n for n in range(least, wide + 1) if n * panel_bytes <= GROUP_BYTES] or [least]
    return min(choices, key=lambda n: (-(-panels // n) * n, -(-panels // n) % 2, wide - n))


def blocking(target: Target, layout: Layout, depth: int) -> Blocking:
    """The nest for many rows of a product with weights of this layout."""
    panel, panels = layout.panel, layout.panels
    if format_of(layout).for_tiles:
        return _tile_blocking(depth, panels if layout.order == "heads" else 1)
    if format_of(layout).blocks:
        rows = few_rows(target, layout)[-1]
        pairs = target.isa in PAIR_ISAS and not format_of(layout).floats
        width = -(-layout.panels // 2) * 2 * panel  # panels by twos: mp_blocks_width
        if target.has_tiles:
            sums = BLOCK_CHUNK * width
            return Blocking(rows, PART, 1, BLOCK_CHUNK, 0, BLOCK_STRIP, 1, sums, tiled_from=BLOCK_TILED, pairs=pairs)
        if pairs:
            return Blocking(rows, PART, 1, PAIR_CHUNK, 0, depth, 1, PAIR_CHUNK * width, pairs=True)
        chunk = max(1, STRIP_BYTES // (depth * 5 // 2) // rows) * rows
        return Blocking(rows, PART, 1, min(CHUNK, chunk), 0, depth, 1, 0)
    vectors = panel // target.lanes
    fitting = [n for n in range(1, panels + 1) if panels % n == 0 and n * vectors <= max(target.abreast, vectors)]
    abreast = min(fitting, key=lambda n: (abs(4 - n * vectors), -n))  # about as many as rows
    side = vectors * abreast  # registers hold the sums, and what is read side by side
    block = max(1, min(target.sums, target.sums + target.abreast - side) // side)
    chunk = -(-CHUNK // block) * block
    room = NEON_SLICE_BYTES if target.isa == "neon" else SLICE_BYTES
    slice_ = -(-depth // -(-max(depth, 1) // (room // (panel * abreast * 4))))
    strip = max(1, STRIP_BYTES // (chunk * 4) // slice_) * slice_
    slots = 1 if strip >= depth else max(2, WAITING // panels)
    sums, tiled_from = slots * panels * chunk * panel, THIRDS_ROWS if target.has_tiles else 0
    return Blocking(block, PART, abreast, chunk, slice_, strip, slots, sums, tiled_from=tiled_from)


def _tile_blocking(depth: int, unit: int) -> Blocking:
    """32 x 32 sums at a time."""
    slice_ = -(-depth // (max(1, round(depth / TILE_SLICE)) * 32)) * 32
    strip = depth if depth <= TILE_STRIP else slice_
    # Heads of whole strips: half of the slots is at work while the sums in the other half are finished. Strips: a piece
    # takes all slots, after the last sums of the piece before.
    if strip < depth:
        waits, piece, slots = "strips", max(2, TILE_WAITING // unit), max(2, TILE_WAITING // unit) * unit
    else:
        waits, piece, slots = ("heads", 1, 2 * unit) if unit > 1 else ("slices", TILE_PIECE, 1)
    waiting = 0 if slice_ >= depth and unit == 1 else slots * TILE_CHUNK * 32
    least = max(1, TILE_LEAST // unit) if waits == "strips" else 1
    final = 2 * 1024 if unit == 1 else 0
    # The next head's steps should suffice for all rows of this one; those that are left are finished then.
    every = max(1, min(2 * TILE_SOME, min(depth, strip) // 32 * unit * TILE_SOME // 32)) if unit > 1 else TILE_EVERY
    return Blocking(
        32, TILE_PART, 1, TILE_CHUNK, slice_, strip, slots, waiting + final, unit, waits, piece, least, every
    )


def few_rows(target: Target, layout: Layout) -> tuple[int, ...]:
    """Numbers of rows that a pass over the weights serves: in wider panels fewer, which have as many sums."""
    if format_of(layout).for_tiles:
        return TILE_FEW
    if format_of(layout).blocks:
        return (1, BLOCK_ROWS, WIDE_BLOCK_ROWS) if target.lanes == 16 else (1, BLOCK_ROWS)
    return tuple(max(1, rows * target.panel // layout.panel) for rows in target.row_blocks)


@dataclass(frozen=True, slots=True)
class ExpertsSchedule(Packed):
    """How products with chosen matrices in panels run: a pass serves one row or a block of them."""

    row_blocks: tuple[int, ...]
    vectors: int
    line: int
    near: int
    far: int
    tiled_from: int = 0  # rows of a matrix from which on tile units multiply them; 0: never


def experts_layout(target: Target, weight: TensorType) -> Layout | None:
    """How chosen matrices [experts, columns, depth] are kept; None: as they are, as no panel goes across matrices."""
    found, columns = next((f for f in FORMATS if f.takes(weight, target) and not f.for_tiles), None), weight.shape[1]
    if found is None or not isinstance(columns, int):
        return None
    panel = found.panel(target) if target.is_cpu else 0
    if columns % (panel or (tiles.ROWS if found.tile else 1)):
        return None
    return Layout(found.name, panel, order="stacked")


def choose_experts(k: Experts, target: Target) -> ExpertsSchedule | None:
    """The schedule of products with chosen matrices; there is none where they lie row by row."""
    layout = k.operand("w").view.buffer.layout
    if layout is None:
        return None
    rows, tiled = few_rows(target, layout)[:2], experts_tiled(target, layout)
    return ExpertsSchedule(layout, rows, *_streaming(target, layout), tiled)


def experts_tiled(target: Target, layout: Layout) -> int:
    """Rows of a matrix from which on tile units multiply them; 0: never."""
    return BLOCK_TILED if target.has_tiles and format_of(layout).blocks else 0


def _streaming(target: Target, layout: Layout) -> tuple[int, int, int, int]:
    """Of panels that pass a few rows: vectors in a row, rows in a cache line, how far ahead they are prefetched."""
    packed = format_of(layout)
    row = 1 if packed.blocks else layout.panel * packed.bits // 8
    near, far = (NEON_NEAR_BYTES, NEON_FAR_BYTES) if target.isa == "neon" else (NEAR_BYTES, FAR_BYTES)
    if packed.blocks:
        wide = target.isa == "avx512"
        near, far = (WIDE_NEAR_BYTES, WIDE_FAR_BYTES) if wide else (BLOCK_NEAR_BYTES, BLOCK_FAR_BYTES)
    ahead = 1 if packed.for_tiles else row
    return layout.panel // target.lanes, max(1, 64 // row), near // ahead, far // ahead


def choose_linear(k: Linear, target: Target) -> LinearSchedule:
    """The schedule of a packed product."""
    layout = k.layout
    panel, panels = layout.panel, layout.panels
    if k.epilogue == "heads":
        groups = k.heads + 2 * k.kv_heads
    elif k.gated:
        groups = -(-(k.columns // 2) // (panel // 2 * panels))
    else:
        groups = -(-k.columns // (panel * panels))
    return LinearSchedule(
        layout,
        groups,
        few_rows(target, layout),
        *_streaming(target, layout),
        blocking(target, layout, k.depth),
        k.operand("x").view.buffer.tiled > 0,
        k.operand("y").view.buffer.tiled > 0,
    )
