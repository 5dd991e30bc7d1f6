"""Decisions for the GPU: block sizes, grids, rings and splits of every kernel, by shape and device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeVar

from monoplan.codegen.cuda.launches import ceil_div
from monoplan.codegen.kernels import Attention, Experts, Kernel, Linear, Norm, Reduce, Sample, Scan, Sort
from monoplan.codegen.operands import Operand
from monoplan.codegen.target import Target
from monoplan.codegen.views import View
from monoplan.ir.cache_rows import SCALE_BYTES
from monoplan.ir.dims import Dim, equal
from monoplan.ir.expr import Arg, Call
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, bf16, bool_, f16, f32, f64, i8
from monoplan.ir.types import product as size_of

FEW_ROWS = 32  # up to this many rows of x a product streams the weights once through tensor cores
SPARE = 32 << 10  # bytes of shared memory that a product with few rows leaves to other blocks on its SM
HALF = (bf16, f16)


@dataclass(frozen=True, slots=True)
class CudaSchedule:
    """A block of `threads`; `team` of them share one output of a reduction."""

    threads: int = 256
    team: int = 1


@dataclass(frozen=True, slots=True)
class RowSchedule:
    """How a product with one row runs: mp_linear_row.cuh, or mp_linear_tiles.cuh where the batches are of tiles.

    `pad` shared memory only keeps other blocks off the SM.
    """

    grid: int
    warps: int = 8
    slices: int = 8  # parts of K, one for each warp of a group
    batch: int = 8  # rows of w that are reduced together; tiles in a slot of the ring
    ring: int = 2  # batches in flight
    early: int = 2  # of them before the dependency
    gentle: int = 0  # and in flight at most until then; 0: all of them
    blocks: int = 1  # on one SM, that the register budget must allow
    late: int = 0  # batches a warp has left when it lets the next kernel start; 0: from the beginning, -1: see its loop
    pad: int = 0

    def vectors(self, row_bytes: int) -> int:
        """16-byte pieces of a row that one lane reads."""
        slice_ = -(-(row_bytes // 16) // self.slices)
        return -(-slice_ // 32)


@dataclass(frozen=True, slots=True)
class FewSchedule:
    """How a product with 2 to 8 `tiles` rows runs: mp_linear_few.cuh."""

    tiles: int
    splits: int
    grid: int  # blocks of each split
    warps: int = 8
    slices: int = 1  # parts of K, one for each warp of a group
    ring: int = 8
    gentle: int = 0  # steps of the ring in flight at most before the dependency; 0: all of them
    pad: int = 64  # bytes behind a row of x in shared memory: rows start in different banks


def row_shared(k: Linear, s: RowSchedule) -> int:
    """Bytes of dynamic shared memory: the rings of all warps, the sums of all slices, and padding."""
    if k.format.tile:
        slice_ = -(-_tiles(k)[1] // s.slices)
        rows = 16 * -(-_tiles(k)[0] // s.grid)
        own = s.ring * s.batch * k.format.tile_bytes + slice_ * _x_bytes(k)
        return s.warps * own + s.slices * rows * 4 + s.pad
    pairs = (k.columns + 1) // 2
    rows = 2 * -(-pairs // s.grid)
    sums = s.slices * -(-rows // s.batch) * s.batch * 4
    return s.warps * s.ring * s.batch * s.vectors(k.depth * k.format.bits // 8) * 512 + sums + s.pad


def few_shared(k: Linear | Experts, s: FewSchedule) -> int:
    """Bytes of dynamic shared memory: the rings of all warps, x, the sums of its groups, the warps' parts of sums."""
    columns, slot = _unit(k)
    whole = -(-k.depth // columns)
    x = -(-whole // s.splits) * (columns * 2 + (_GROUP_SUMS if k.format.tile else 0)) + s.pad
    return s.warps * s.ring * slot + s.tiles * 8 * (x + (s.warps * 80 if s.slices > 1 else 0))


def _unit(k: Linear | Experts) -> tuple[int, int]:
    """Columns and bytes of what a warp copies of a strip at a time."""
    return (256, k.format.tile_bytes) if k.format.tile else (64, 2048)


def _x_bytes(k: Linear | Experts) -> int:
    """Bytes of a tile's columns of a row of x: in two bytes each, with sums and scales, at most; in two bf16 or, with
    scales, two f16 each."""
    return 512 + 96 if k.format.blocks and not k.format.floats else 1024 + 32 * k.format.floats


_GROUP_SUMS = 64  # of the sums of a row of x over the groups of a tile, at most


def _tiles(k: Linear | Experts) -> tuple[int, int]:
    """Strips of 16 columns, and tiles of a strip."""
    return -(-k.columns // 16), -(-k.depth // 256)


@dataclass(frozen=True, slots=True)
class FinishSchedule:
    """How the epilogue over sums in memory runs: the function mp_finish_<loop> of mp_linear_finish.cuh.

    Blocks of 256 threads: `blocks` of them for the columns of `rows` rows, `each` pairs of columns for a thread.
    """

    loop: str  # pairs, row, gated, heads, whole_heads, normed
    blocks: int = 1
    each: int = 1
    rows: int = 1

    def grid(self, rows: Dim) -> tuple[Dim, Dim, Dim]:
        if self.loop == "whole_heads":  # a warp for each of `each` heads
            return (ceil_div(rows * (self.each * 32), 256), 1, 1)
        if self.loop in ("heads", "normed"):
            return (rows, 1, 1)
        return (self.blocks, rows if self.rows == 1 else ceil_div(rows, self.rows), 1)


@dataclass(frozen=True, slots=True)
class WgmmaSchedule:
    """How a product with many rows runs on Hopper: mp_linear_wgmma.cuh."""

    wide: str  # the epilogue where a thread has four blocks of columns: words, gated, heads, pairs
    groups: int = 2  # warpgroups that multiply, 64 rows each
    columns: int = 256  # of a tile
    stages: int = 4
    splits: int = 1  # blocks of a cluster that share a tile, with a part of K each
    band: int = 16  # tiles of rows that take turns
    least: int = 1  # rows of x

    @property
    def loop(self) -> str:
        """The epilogue mp_wgmma_<loop>."""
        return self.wide if self.columns // 8 // self.splits % 4 == 0 else "pairs"

    @property
    def threads(self) -> int:
        return self.groups * 128 + 128

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory; the ring begins at a multiple of 1024."""
        return self.stages * (self.groups * 64 + self.columns) * 128 + 1024

    def grid(self, rows: Dim, columns: int, cores: int) -> Dim:
        """Blocks: so many for each tile, or as many as the device holds."""
        tiles = ceil_div(rows, self.groups * 64) * -(-columns // self.columns)
        if self.splits > 1:
            return tiles * self.splits
        return min(tiles, cores) if isinstance(tiles, int) else cores


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """The ways a product can run, by the number of rows; None: not at all."""

    row: RowSchedule | None
    few: tuple[FewSchedule, ...]
    many: WgmmaSchedule | None
    library: bool  # many rows by the vendor's matrix product
    # How tensor cores get x: none (as it lies), vectors (normed and rounded, eight elements at a time), each
    prepare: str
    # Where the library's product goes: y (straight into place), add (e0 is added to it), finish (an epilogue follows)
    result: str
    finish: FinishSchedule  # over sums in f32
    finish_half: FinishSchedule  # over the library's sums in the weights' type


@dataclass(frozen=True, slots=True)
class ExpertRowSchedule:
    """How products with chosen matrices in tiles run for few pairs of a row and a choice: mp_experts_tiles.cuh."""

    slices: int  # parts of K, one for each warp of a group
    groups: int  # of warps, with columns of their own
    steps: int  # of a block: strips of 16 columns of each group
    ring: int = 1  # tiles of each matrix in flight
    shared: int = 0

    @property
    def warps(self) -> int:
        return self.slices * self.groups

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.groups * 16 * self.steps


@dataclass(frozen=True, slots=True)
class CudaExperts:
    """The ways products with chosen matrices can run; None: not at all. The general kernel takes what lies in rows."""

    row: RowSchedule | ExpertRowSchedule | None
    few: FewSchedule | None


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """One way of attention of one new token (mp_attention_decode.cuh), for `batch` sequences at most; 0: any number."""

    name: str
    splits: int  # blocks that share a key head's cache
    warps: int
    blocks: int  # on one SM, that the register budget must allow
    batch: int = 0
    most: int = (
        0  # splits that the kernel has room for, where their number is known at run time only; 0: it is `splits`
    )
    spread: bool = False  # the blocks are no cluster
    pad: int = 0  # shared memory that only keeps other blocks off the SM
    pieces: int = 0  # of a cache in 8 bits: runs of 32 rows in flight for each warp; 0: it is in bf16

    def shared(self, head_dim: int) -> int:
        """Bytes of dynamic shared memory."""
        return self.pieces * self.warps * _piece(head_dim) + self.pad


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """Attention of one new token: `splits` blocks of a cluster share a key head's cache.

    More sequences than `few` need fewer blocks for each, more than `some` one. Caches of more than `long` positions are
    spread over more blocks than a cluster has, when there are few sequences.
    """

    few: int
    some: int
    splits: int = 8
    warps: int = 8
    long: int = 4096
    spread: int = 16
    long_warps: int = 8
    blocks: int = 1  # on one SM, that the register budget must allow
    pad: int = 0
    pieces: int = 0

    @property
    def variants(self) -> tuple[DecodeVariant, ...]:
        """In order of preference; the first is for long caches."""
        size = (self.warps, self.blocks)
        found = (
            DecodeVariant("decode_long", self.spread, self.long_warps, 1, self.few, spread=True),
            DecodeVariant("decode", self.splits, *size, self.few, pad=self.pad),
            DecodeVariant("decode_some", 2, *size, self.some, most=self.splits),
            DecodeVariant("decode_many", 1, *size, most=self.splits),
        )
        return tuple(replace(v, pieces=self.pieces) for v in found)


@dataclass(frozen=True, slots=True)
class PrefillSchedule:
    """Attention of many tokens: 16 queries for each warp, `keys` keys in each of `stages` pieces of shared memory."""

    warps: int = 4
    keys: int = 64
    stages: int = 2
    blocks: int = 1  # on one SM, that the register budget must allow

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.warps * 16

    def shared(self, head_dim: int) -> int:
        """Bytes of shared memory."""
        return self.stages * 2 * self.keys * head_dim * 2


@dataclass(frozen=True, slots=True)
class HopperSchedule:
    """Attention of many tokens by warpgroups: mp_attention_hopper.cuh.

    `groups` of them, 64 queries each, share a block's `stages` pieces of `keys` keys; as many of them as `heads` take
    the same queries of different heads.
    """

    groups: int = 2  # 0: PrefillSchedule's kernel instead
    heads: int = 1  # divides both the groups and the heads of a key head
    keys: int = 64  # 64, 96 or 128
    stages: int = 3
    resident: int = 1  # blocks on one SM, that the register budget must allow

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.groups // self.heads * 64

    def shared(self, head_dim: int) -> int:
        """Bytes of shared memory; the tiles begin at a multiple of 1024."""
        return self.stages * 2 * self.keys * head_dim * 2 + 1024


@dataclass(frozen=True, slots=True)
class CudaAttention:
    """The fast kernels that fit; the general one always does. `hopper` goes before `prefill`."""

    decode: DecodeSchedule | None
    prefill: PrefillSchedule | None
    hopper: HopperSchedule | None = None
    threads: int = 256  # of a block of the general one


Tuning = Mapping[str, Mapping[str, int]]  # constants by the name of a kernel, see tuned()


def plain(k: Kernel) -> CudaSchedule:
    """Most families: a thread for each element, or a block for each row."""
    return CudaSchedule()


def reduce(k: Reduce) -> CudaSchedule:
    """A thread, a warp or a block for each output, by the length of what is reduced."""
    inner = size_of(k.inner)
    if not isinstance(inner, int):
        return CudaSchedule(256, 32)
    if inner <= 16:
        return CudaSchedule(256, 1)
    return CudaSchedule(256, 32) if inner <= 2048 else CudaSchedule(1024, 1024)


def norm(k: Norm) -> CudaSchedule:
    """A warp for each row that its registers can keep, else a block."""
    short = isinstance(k.inner, int) and k.inner <= 1536 and k.operand("x").dtype != f64
    return CudaSchedule(128, 32) if short else CudaSchedule(256, 256)


def scan(k: Scan) -> CudaSchedule:
    """A warp for each row."""
    return CudaSchedule(32)


def sort(k: Sort) -> CudaSchedule:
    """A block for each row, as large as the row is."""
    return CudaSchedule(1024 if not isinstance(k.inner, int) or k.inner > 512 else 256)


def sample(k: Sample) -> CudaSchedule:
    """A large block for each row of logits; a penalty is a thread for each of them."""
    return CudaSchedule(1024 if k.mode == "sample" else 256)


def linear(k: Linear, target: Target) -> CudaLinear:
    """The ways a product may run."""
    library = target.library and _library_takes(k, target)
    ways = (_row(k, target), _few(k, target), _many(k, target, library), library)
    return CudaLinear(*ways, _prepare(k), _result(k), _finish(k, half=False), _finish(k, half=True))


def experts(k: Experts, target: Target) -> CudaExperts:
    """The ways products with chosen matrices may run."""
    if k.layout is None:
        return CudaExperts(None, None)
    return CudaExperts(_expert_row(k, target), _expert_few(k, target))


def attention(k: Attention, target: Target) -> CudaAttention:
    """The ways attention may run."""
    threads = 512 if k.value_dim > 256 else 256  # a dimension of the values each, as far as it goes
    return CudaAttention(_decode(k, target), _prefill(k, target), _hopper(k, target), threads)


def _library_takes(k: Linear, target: Target) -> bool:
    """Whether the vendor's library multiplies by weights in their format."""
    if not k.format.tensor_cores and not k.format.tile:
        return k.format.c_type == "float"
    return k.format.x_dtype != bf16 or target.capability >= 80


T = TypeVar("T", RowSchedule, WgmmaSchedule, DecodeSchedule, PrefillSchedule, HopperSchedule)


def tuned(schedule: T, constants: Mapping[str, int]) -> T:
    """A schedule with some constants replaced; names that it does not have are ignored."""
    known = {f.name for f in fields(schedule)}
    given: dict[str, Any] = {name: value for name, value in constants.items() if name in known}
    return replace(schedule, **given)


def _aligned(offset: Dim, elements: int) -> bool:
    return isinstance(offset, int) and offset % elements == 0


def rows_aligned(v: View, elements: int) -> bool:
    """Whether the last dimension is dense and starts at a multiple of so many elements, whatever the symbols are."""
    dims = (*v.strides[:-1], v.offset)
    whole = all(all(n % elements == 0 for n in ([d] if isinstance(d, int) else [c for _, c in d.terms])) for d in dims)
    return whole and equal(v.strides[-1], 1)


def _dense(o: Operand, columns: int) -> bool:
    """Whether an operand is a dense matrix that begins at a fixed place."""
    return all(map(equal, o.view.strides, (columns, 1))) and isinstance(o.view.offset, int)


def _prepare(k: Linear) -> str:
    x, half = k.operand("x"), k.format.x_dtype
    if k.norm == "none" and x.dtype == half and _dense(x, k.depth):
        return "none"
    types = [x.dtype, *([k.operand("norm_weight").dtype] if k.norm == "rms" and k.has("norm_weight") else [])]
    plain = all(t in (f32, *HALF) for t in types) and half.itemsize == 2
    return "vectors" if plain and k.depth % 8 == 0 and k.depth <= 16384 and rows_aligned(x.view, 8) else "each"


def _result(k: Linear) -> str:
    y, extras = k.operand("y"), k.group("e")
    if k.epilogue != "pointwise" or k.body is None or not _dense(y, k.columns):
        return "finish"
    if k.has("bias") and not (k.operand("bias").dtype == y.dtype and rows_aligned(k.operand("bias").view, 8)):
        return "finish"
    if y.dtype not in (k.format.x_dtype, f32):
        return "finish"
    if not extras and k.body.node == Arg(0):
        return "y"
    adds = (Call("add", (Arg(0), Arg(1))), Call("add", (Arg(1), Arg(0))))
    if len(extras) == 1 and k.body.node in adds and extras[0].dtype == y.dtype and _dense(extras[0], k.columns):
        return "add"
    return "finish"


def _finish(k: Linear, half: bool) -> FinishSchedule:
    """The epilogue over sums in f32; or in half precision, which many rows have: more work for a thread and a block."""
    pairs = -(-k.columns // 2)
    if k.epilogue == "argmax":
        return FinishSchedule("row", max(1, min(64, pairs // 512)))
    if k.epilogue == "normed":  # a block for a row
        return FinishSchedule("normed")
    if whole_heads(k):
        return FinishSchedule("whole_heads", each=k.heads + 2 * k.kv_heads)
    if half and k.epilogue == "heads" and _wide_heads(k):
        return FinishSchedule("heads")
    rows = 4 if half else 1
    if half and k.epilogue == "gated" and _wide_gated(k):  # scores are not kept in half precision
        return FinishSchedule("gated", -(-pairs // 1024), rows=rows)
    each = 1 if not half else 2 if k.epilogue == "heads" else 4
    return FinishSchedule("pairs", -(-pairs // (256 * each)), each, rows)


def whole_heads(k: Linear) -> bool:
    """Whether the epilogue needs all of a head at once: for its norm, or the scale of its row in a cache in 8 bits."""
    return k.has("q_norm") or k.has("k_norm") or k.has("k_cache") and k.operand("k_cache").dtype == i8


def _wide_gated(k: Linear) -> bool:
    """Whether a gated product's results can be written four at a time, in half precision."""
    y = k.operand("y").view
    plain = not k.group("e") and not k.has("bias") and k.body is not None and k.body.dtype in (f32, *HALF)
    return plain and y.dtype.itemsize == 2 and k.columns % 8 == 0 and rows_aligned(y, 4)


def _wide_heads(k: Linear) -> bool:
    """Whether q and both caches take four dimensions at a time: half precision, all dimensions rotate, rows aligned."""
    places = [k.operand(n).view for n in ("y", "k_cache", "v_cache")]
    tables = [k.operand(n).view for n in ("sin", "cos")]
    half = all(v.dtype.itemsize == 2 and rows_aligned(v, 8) for v in places)
    floats = all(v.dtype == f32 and rows_aligned(v, 4) for v in tables)
    plain = not k.has("bias") and k.algo != "gpt_j" and k.rotary == k.head_dim and k.head_dim % 8 == 0
    plain = plain and k.columns == (k.heads + 2 * k.kv_heads) * k.head_dim
    return plain and half and floats and places[1].dtype == places[2].dtype


def _row(k: Linear, target: Target) -> RowSchedule | None:
    """The constants that served every shape well without tuning; None where rows are not whole 16-byte pieces."""
    x = k.operand("x")
    bits = 16 if k.format.tile else k.format.bits
    each = 128 // bits
    gamma = k.operand("norm_weight").dtype if k.has("norm_weight") else k.format.x_dtype
    if k.depth % each or not _aligned(x.view.offset, each) or not _vector_types(bits, x.dtype, gamma):
        return None
    if not (isinstance(x.view.strides[1], int) and x.view.strides[1] == 1):
        return None
    if k.format.tile:
        return _tile_row(k, target)
    pieces, pairs = k.depth // each, -(-k.columns // 2)
    choices = [s for s in (8, 16, 4, 2, 1) if -(-pieces // (s * 32)) <= (2 if s < 16 else 4)]
    if not choices:
        return None
    # Few pieces for a lane, all lanes busy: a lane's x stays in registers.
    slices = max(choices, key=lambda s: pieces / (s * 32 * -(-pieces // (s * 32))))
    vectors = -(-pieces // (slices * 32))
    large, heads = k.depth * k.columns * bits // 8 > 24 << 20, k.epilogue == "heads"
    even = not large and target.cores >= 96 and target.cores % 32 <= 8
    grid = min(target.cores // 32 * 32 if even else target.cores, pairs)
    grid *= -(-slices * 8 * pairs // (grid * target.shared // 4))  # sums take a quarter of the memory at most
    most = target.shared - 1024 - slices * 4 * (2 * -(-pairs // grid) + 8)
    # A large matrix keeps 160 KB in flight on each SM; a small one less, and shared memory that it does not use keeps
    # the next kernel's blocks away until its own are gone: measured, that beats both of them at once. Weights that are
    # prefetched delay what the kernels before still read: only `calm` KB are in flight until the dependency.
    wanted, full, calm = (160, 160, 64) if large else (96, 116, 32) if heads else (64, 112, 32)
    hopper = target.capability >= 90
    for warps in (16, 8) if large or heads else (8, 16):
        batch = max(2, (8 if warps == 8 and not large else 4) // vectors)
        unit = warps * batch * vectors * 512
        if slices <= warps and unit <= most:
            ring = max(1, min(8, min(wanted << 10, most) // unit))
            gentle = max(1, min(ring - 1, (calm << 10) // unit)) if hopper else 0
            blocks = 2 if warps == 16 and vectors < 4 else 1
            pad = max(0, min((full << 10) - ring * unit, most - ring * unit)) if hopper else 0
            return RowSchedule(grid, warps, slices, batch, ring, ring, gentle, blocks, pad=pad)
    return None


# KB of an SM's shared memory that a block with weights in tiles takes at least, by its epilogue: blocks of later
# kernels that come too early would take its turns.
_TAKEN = {"heads": 144, "gated": 190, "routed": 190, "argmax": 0}


def _tile_row(k: Linear, target: Target) -> RowSchedule | None:
    """Few tiles for a warp: all that fits 200 KB of an SM is prefetched, two of each warp where it has many large ones.

    Until the dependency a warp has one tile in flight at a time, unless tiles are large and x is short. Of a small
    gated product the next kernel starts when the last tiles are in flight, of others at once.
    """
    strips, tiles = _tiles(k)
    large = strips * tiles * k.format.tile_bytes > 32 << 20
    even = not large and target.cores >= 96 and target.cores % 32 <= 8
    grid = min(target.cores // 32 * 32 if even else target.cores, strips)
    # Few warps idle, then many of them unless their tiles are large, then the fewest tiles for each. Warps of one slice
    # have x twice: that must be little.
    wide = k.format.tile_bytes > 5000
    order = (8, 16) if wide else (16, 8)
    ways = [(w, s) for w, s in product(order, (16, 8, 4, 2, 1)) if s <= w and (s == w or -(-tiles // s) <= 2)]
    idle = {s: max(-(-tiles // s) * s - tiles - tiles // 6, 0) for _, s in ways}
    ways.sort(key=lambda way: (idle[way[1]], order.index(way[0]), -way[1]))
    hopper, alone = target.capability >= 90, None  # a schedule in which a warp waits for each of its tiles
    for warps, slices in ways:
        one = RowSchedule(grid, warps, slices, 1, 1, 1)
        rest, each = row_shared(k, one), warps * k.format.tile_bytes
        units = max(1, -(-strips // grid) * slices // warps * -(-tiles // slices))  # tiles of a warp
        room = min((208 if large else 200) << 10, target.shared - 1024) - rest + each
        ring = max(1, min(8, units, room // each, 2 if wide and units > 16 else 8))
        if -(-tiles // slices) <= 8 and rest + (ring - 1) * each <= target.shared - 1024:
            calm = ring > 1 and hopper and not (large and wide and k.depth < 4096 and units <= 16)
            late = ring if calm and not large and k.gated else 0
            made = replace(one, ring=ring, early=ring, gentle=int(calm), late=late)
            if hopper:
                least = _TAKEN.get(k.epilogue, 120 if k.depth > k.columns else 76) << 10
                made = replace(made, pad=max(0, min(least, target.shared - 1024) - row_shared(k, made)))
            if ring > 1 or units == 1:
                return made
            alone = alone or made
    return alone


def _vector_types(bits: int, x: DType, gamma: DType) -> bool:
    """Whether what 16 bytes of weights multiply is whole pieces of 16 bytes too."""
    return all(t in (f32, *HALF) and t.bits >= bits for t in (x, gamma))


def _few(k: Linear, target: Target) -> tuple[FewSchedule, ...]:
    """One schedule for up to 8 rows and one for up to 32: the split of K that keeps all warps equally busy."""
    if not (k.format.tensor_cores and k.depth % 64 == 0 or k.format.tile) or target.capability < 80:
        return ()
    # A kernel that starts early and has nearly all shared memory keeps away the blocks that it waits for.
    room = target.shared - SPARE if target.capability >= 90 else target.shared
    sizes = (1, FEW_ROWS // 8)
    found = [_few_of(k, tiles, target, room, 80) or _few_of(k, tiles, target, target.shared, 32) for tiles in sizes]
    return tuple(f for f in found if f is not None)


def _few_of(k: Linear, tiles: int, target: Target, most: int, least: int) -> FewSchedule | None:
    """The one for 8 `tiles` rows that fits `most` bytes of shared memory, with `least` or more KB in flight."""
    best: tuple[float, FewSchedule] | None = None
    strips, (columns, slot) = -(-k.columns // 16), _unit(k)
    units, wanted = -(-k.depth // columns), (144 if tiles == 1 else 112) << 10  # bytes in flight
    for splits in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
        depth, per = -(-units // splits), -(-strips // max(1, target.cores // splits))  # units and strips of a block
        if splits > 1 and (depth * (splits - 1) >= units or k.depth // splits < 256):
            continue
        # Every block reads x; partial sums are written and read again.
        busy = units / (splits * depth) * strips * splits / (per * target.cores)
        busy /= 1 + tiles / (6 * per) + 48 * splits * tiles / k.depth
        for warps, slices in _few_warps(per, depth):
            early = max(1, (32 << 10) // (slot * warps)) if target.capability >= 90 else 0
            ring = max(3, wanted // (slot * warps))
            schedule = FewSchedule(tiles, splits, -(-strips // per), warps, slices, ring, early)
            while few_shared(k, schedule) > most and schedule.ring > max(2, (least << 10) // (slot * warps)):
                schedule = replace(schedule, ring=schedule.ring - 1)
            if few_shared(k, schedule) > most:
                continue
            # Warps without a strip in the last turn, few warps, slices that wait, too little in flight.
            short = max(0, 1 - (schedule.ring - 1) * slot * warps / (96 << 10))
            turns = -(-per * slices // warps)
            used = busy * per * slices / (turns * warps) * (1 - 0.01 * max(0, 8 - warps) ** 2)
            used *= (1 - 0.3 * short * short) * (0.92 if slices > 1 else 1)
            if best is None or used > best[0]:
                best = (used, replace(schedule, gentle=max(0, min(early, schedule.ring - 2))))
    return None if best is None else best[1]


def _few_warps(strips: int, units: int) -> Iterator[tuple[int, int]]:
    """Warps of a block, and slices of K among them: more than one only where groups have one strip each, since slices
    wait for each other at its end."""
    for groups in range(min(16, strips), 0, -1):
        for slices in range(1, min(16 // groups, units) + 1 if groups == strips else 2):
            yield groups * slices, slices


# Tiles: warpgroups, columns, stages.
_TILES = ((2, 256, 4), (2, 192, 5), (2, 128, 6), (1, 128, 6), (1, 64, 8))
# Fixed rows of x up to which warpgroups take any product, and one with an epilogue that the library lacks: more of them
# keep a large device busy with the library's tiles.
SOME_ROWS, MANY_ROWS = 256, 512
# Up to this depth a result in registers saves more than the library gains by its rate, 780 TFLOPS where ours has 650.
SHALLOW = 2560


def _many(k: Linear, target: Target, library: bool) -> WgmmaSchedule | None:
    """Tensor cores of sm_90 with the epilogue behind them; later devices have other instructions in their place."""
    loop, rows = _wgmma_loop(k), k.rows
    if target.capability != 90 or loop is None or (isinstance(rows, int) and rows <= FEW_ROWS):
        return None
    finish = _result(k) == "finish"
    small = isinstance(rows, int) and rows <= (MANY_ROWS if finish else SOME_ROWS)
    # What the library does at once it does faster; heads of many rows are as fast by a kernel behind it.
    if library and not small and (not finish or k.epilogue == "heads" or k.depth > SHALLOW):
        return None
    # With 256 columns, sums leave no registers to epilogues that read more.
    ways = [WgmmaSchedule(loop, *tile) for tile in _TILES if tile[1] < 256 or loop in ("gated", "heads")]
    if not isinstance(rows, int):
        return replace(ways[0], least=MANY_ROWS + 1 if library else 1)
    for splits in (2, 4):
        stages = min(8, -(-k.depth // (64 * splits)))
        ways += [replace(ways[-1], stages=stages, splits=splits)] if k.depth // splits >= 192 else []
    return min(ways, key=lambda s: _wgmma_time(k, s, rows, target))


def _wgmma_loop(k: Linear) -> str | None:
    """The epilogue over sums in registers, None where there is none, or x does not lie in whole pieces of 16 bytes."""
    x, y = k.operand("x"), k.operand("y").view
    if k.format.x_dtype != bf16 or not (k.format.tensor_cores or k.format.tile):
        return None
    if k.depth % 8 or k.depth < 64 or k.columns % 8:
        return None
    if _prepare(k) == "none" and not rows_aligned(x.view, 8):
        return None
    if k.epilogue == "heads":
        return "heads" if not whole_heads(k) and _wide_heads(k) and k.head_dim % 32 == 0 else None
    if k.gated:
        return "gated" if _wide_gated(k) and k.width % 4 == 0 else "pairs"
    if k.epilogue != "pointwise":
        return None
    return "words" if y.dtype in HALF and rows_aligned(y, 8) else "pairs"


def _wgmma_time(k: Linear, s: WgmmaSchedule, rows: int, target: Target) -> float:
    """Cycles, roughly: of turns of tiles, each with its copies or products, whichever takes longer, and an epilogue."""
    blocks = -(-rows // (s.groups * 64)) * -(-k.columns // s.columns) * s.splits
    turns = -(-blocks // target.cores)
    step = max(s.groups * s.columns * 2, (s.groups * 64 + s.columns) * 128 / 56)
    return turns * (-(-k.depth // 64) / s.splits * step + 4 * s.groups * s.columns) + (3200 if s.splits > 1 else 0)


def _expert_row(k: Experts, target: Target) -> RowSchedule | ExpertRowSchedule | None:
    """For few pairs. Of tiles about as many blocks for the choices of one row as the device holds, four on an SM."""
    x, matrices = k.operand("x"), 1 + k.has("up")
    bits = 16 if k.format.tile else k.format.bits
    if k.depth % (128 // bits) or not rows_aligned(x.view, 128 // bits) or not _vector_types(bits, x.dtype, x.dtype):
        return None
    if not k.format.tile:
        return _expert_rows(k, target)
    strips, tiles = _tiles(k)
    slices = next(n for n in (1, 2, 4, 8, 16) if -(-tiles // n) <= 2 or n == 16)
    groups, slice_ = max(1, 4 // slices), -(-tiles // slices)
    steps = max(1, -(-k.choices * -(-strips // groups) // (4 * target.cores)))
    for ring in (4, 3, 2, 1):
        own = ring * matrices * k.format.tile_bytes + slice_ * _x_bytes(k)
        shared = slices * groups * own + slices * groups * steps * 16 * matrices * 4
        if shared <= target.shared // (4 if slices < 8 else 2) or ring == 1:
            return ExpertRowSchedule(slices, groups, steps, ring, shared) if shared <= target.shared - 1024 else None
    return None


def expert_shared(k: Experts, s: RowSchedule) -> int:
    """Bytes of dynamic shared memory: the rings of all warps, and the sums of all slices."""
    rows = 2 * -(-k.columns * (1 + k.has("up")) // (2 * s.grid))
    vectors = s.vectors(k.depth * k.format.bits // 8)
    return s.warps * s.ring * s.batch * vectors * 512 + s.slices * -(-rows // s.batch) * s.batch * 4 + s.pad


def _expert_rows(k: Experts, target: Target) -> RowSchedule | None:
    """One block on each SM for the choices of a row. Matrices are known when the dependency is met, not before.

    The first product, with gates, has 128 KB in flight; the second one takes less than half of the shared memory, so
    that it prefetches beside the first one's end. More of the first gained more than both side by side.
    """
    pieces, pairs = k.depth * k.format.bits // 128, -(-k.columns * (1 + k.has("up")) // 2)
    choices = [s for s in (8, 16, 4, 2, 1) if -(-pieces // (s * 32)) <= 4]
    if not choices:
        return None
    slices = max(choices, key=lambda s: pieces / (s * 32 * -(-pieces // (s * 32))))
    vectors = -(-pieces // (slices * 32))
    grid = min(max(1, target.cores // k.choices), pairs)
    grid *= -(-slices * 8 * pairs // (grid * target.shared // 4))  # sums take a quarter of the memory at most
    wanted, most = (128 << 10, target.shared - 1024) if k.has("up") else (96 << 10, target.shared // 2 - 1024)
    for warps in (16, 8, 4, 2, 1):
        batch = max(2, 4 // vectors)
        unit = warps * batch * vectors * 512
        for ring in range(min(8, max(2, wanted // unit)), 1, -1):
            found = RowSchedule(grid, warps, slices, batch, ring, early=0, blocks=2 if warps == 16 else 1, late=-1)
            if warps >= slices and expert_shared(k, found) <= most:
                return found
    return None


EXPERT_ROWS = 32  # pairs that share a pass over a matrix, when there are many


def _expert_few(k: Experts, target: Target) -> FewSchedule | None:
    """The fewest parts of K with which a block's rows of x fit; 16 strips share them."""
    if not (k.format.tensor_cores and k.depth % 64 == 0 or k.format.tile) or target.capability < 80:
        return None
    strips, (columns, slot) = -(-k.columns // 16), _unit(k)
    whole = -(-k.depth // columns)
    for splits in (n for n in range(1, whole + 1) if whole % n == 0):
        ring = max(3, (64 << 10) // (slot * 8))
        found = FewSchedule(EXPERT_ROWS // 8, splits, -(-strips // 16), ring=ring)
        if few_shared(k, found) <= target.shared - 4096:
            return found
    return None


def _decode(k: Attention, target: Target) -> DecodeSchedule | None:
    group = k.heads // k.kv_heads
    if target.capability < 90 or group > 8 or not _tensor_attention(k, (bf16, i8)) or not k.has("past"):
        return None
    if group * k.head_dim > 1024 or not k.causal or k.has("mask"):
        return None
    small = k.head_dim <= 64  # more warps fit an SM: long caches need the loads in flight
    few, some = -(-target.cores // (8 * k.kv_heads)), 3 * target.cores // (2 * k.kv_heads)  # that fill the device
    found = DecodeSchedule(few, some, blocks=2 if small else 1, long_warps=16 if small else 8)
    return found if k.operand("k").dtype != i8 else _decode_bytes(k, found, target)


def _decode_bytes(k: Attention, s: DecodeSchedule, target: Target) -> DecodeSchedule | None:
    """Of a cache in 8 bits: as many pieces as fit beside what is merged, up to 4."""
    if not all(_rows_in_runs(k.operand(n).view) for n in ("k", "v")):
        return None
    group = k.heads // k.kv_heads
    for warps in (8, 4):
        merged = 4 * (warps * group * (k.head_dim + 2) + group * (k.head_dim + 2 * s.splits) + s.splits) + 32 * warps
        room = (target.shared + 1024) // s.blocks - 1024 - merged
        pieces = min(4, room // (warps * _piece(k.head_dim)))
        if pieces >= 2:
            return replace(s, warps=warps, long_warps=warps, pieces=pieces)
    return None


def _piece(head_dim: int) -> int:
    """Bytes that 32 rows of keys and values in 8 bits take in shared memory, wherever they begin."""
    return 2 * (32 * (head_dim + SCALE_BYTES) + 16)


def _rows_in_runs(cache: View) -> bool:
    """Whether rows of 8 bits lie side by side; of pages runs of them must be whole pieces of 16 bytes."""
    if not equal(cache.strides[2], cache.shape[3]):
        return False
    places = (cache.strides[0], cache.strides[1], cache.offset)
    return cache.table is None or cache.page % 4 == 0 and all(_aligned(d, 16) for d in places)


def _tensor_attention(k: Attention, cached: tuple[DType, ...] = (bf16,)) -> bool:
    """Whether the tensor-core kernels take this attention: bf16, no cap, a mask of bools if any, whole 16-byte pieces,
    or words of a cache in 8 bits."""
    q, *kv = (k.operand(n).view for n in ("q", "k", "v"))
    plain = k.softcap is None and k.head_dim == k.value_dim and (not k.has("mask") or k.operand("mask").dtype == bool_)
    dense = q.dtype == bf16 and rows_aligned(q, 8) and kv[0].dtype == kv[1].dtype and kv[0].dtype in cached
    dense = dense and all(rows_aligned(v, 4 if v.dtype == i8 else 8) for v in kv)
    return plain and dense and k.head_dim in (32, 64, 96, 128)


def _prefill(k: Attention, target: Target) -> PrefillSchedule | None:
    if target.capability < 80 or not _tensor_attention(k) or k.head_dim not in (64, 128):
        return None
    return PrefillSchedule(stages=3, blocks=3) if k.head_dim == 64 else PrefillSchedule(stages=2, blocks=2)


def _hopper(k: Attention, target: Target) -> HopperSchedule | None:
    """Only sm_90 has these instructions: later devices have others in their place."""
    if target.capability != 90 or _prefill(k, target) is None:
        return None
    # Measured on an H200, 2048 tokens: 53 and 88 us a layer. Two small blocks on an SM hide each other's softmax.
    blocks = k.batch * k.heads * ((k.seq + 127) // 128)
    if k.head_dim == 64 and isinstance(blocks, int) and blocks < target.cores:  # more and smaller blocks
        return HopperSchedule(groups=1, keys=64, stages=4, resident=2)
    if k.head_dim == 64:
        return HopperSchedule(heads=2 if k.heads // k.kv_heads % 2 == 0 else 1, keys=64, stages=4, resident=2)
    return HopperSchedule(groups=1, heads=1, keys=64, stages=2, resident=2)
