"""Decisions for the GPU: block sizes, grids, rings and splits of every kernel, by shape and device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TypeVar

from monoplan.codegen.kernels import Attention, Kernel, Linear, Reduce, Sample, Scan, Sort
from monoplan.codegen.target import Target
from monoplan.ir.dims import Dim
from monoplan.ir.types import DType, bf16, f16, f32
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
    """How a product with one row runs: see linear_row. `pad` shared memory only keeps other blocks off the SM."""

    grid: int
    warps: int = 8
    slices: int = 8  # parts of K, one for each warp of a group
    batch: int = 8  # rows of w that are reduced together
    ring: int = 2  # batches in flight
    early: int = 2  # of them requested before the dependency
    gentle: int = 0  # and in flight at most until then; 0: all of them
    blocks: int = 1  # on one SM, that the register budget must allow
    late: int = 0  # batches a warp has left when it lets the next kernel start; 0: from the beginning
    pad: int = 0

    def shared(self, row_bytes: int, columns: int) -> int:
        """Bytes of dynamic shared memory: the rings of all warps, the sums of all slices, and padding."""
        pairs = (columns + 1) // 2
        rows = 2 * -(-pairs // self.grid)
        sums = self.slices * -(-rows // self.batch) * self.batch * 4
        return self.warps * self.ring * self.batch * self.vectors(row_bytes) * 512 + sums + self.pad

    def vectors(self, row_bytes: int) -> int:
        """16-byte pieces of a row that one lane reads."""
        slice_ = -(-(row_bytes // 16) // self.slices)
        return -(-slice_ // 32)


@dataclass(frozen=True, slots=True)
class FewSchedule:
    """How a product with 2 to 8 `tiles` rows runs: see linear_few."""

    tiles: int
    splits: int
    grid: int  # blocks of each split
    warps: int = 8
    ring: int = 8
    gentle: int = 0  # steps of the ring in flight at most before the dependency; 0: all of them
    pad: int = 64  # bytes behind a row of x in shared memory: rows start in different banks

    def shared(self, depth: int) -> int:
        """Bytes of dynamic shared memory."""
        return self.warps * self.ring * 2048 + self.tiles * 8 * (depth // self.splits * 2 + self.pad)


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """The ways a product can run, by the number of rows; None: not at all."""

    row: RowSchedule | None
    few: tuple[FewSchedule, ...]
    library: bool  # many rows by the vendor's matrix product


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """Attention of one new token: `splits` blocks of a cluster share a key head's cache; see attention_decode.

    Caches of more than `long` positions are spread over more blocks than a cluster has, when there are few sequences.
    """

    full: int  # blocks that fill the device
    splits: int = 8
    warps: int = 8
    long: int = 4096
    spread: int = 16
    long_warps: int = 8
    blocks: int = 1  # on one SM, that the register budget must allow
    pad: int = 0  # shared memory that only keeps other blocks off the SM


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
    """Attention of many tokens by warpgroups: see attention_hopper. `groups` of them, 64 queries each, share a block's
    `stages` pieces of `keys` keys; as many of them as `heads` take the same queries of different heads.
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
    return CudaLinear(_row(k, target), _few(k, target), target.library and _library_takes(k, target))


def attention(k: Attention, target: Target) -> CudaAttention:
    """The ways attention may run."""
    return CudaAttention(_decode(k, target), _prefill(k, target), _hopper(k, target))


def _library_takes(k: Linear, target: Target) -> bool:
    """Whether the vendor's library multiplies by weights in their format."""
    if not k.format.tensor_cores:
        return k.format.c_type == "float"
    return k.operand("w").dtype != bf16 or target.capability >= 80


T = TypeVar("T", RowSchedule, DecodeSchedule, PrefillSchedule, HopperSchedule)


def tuned(schedule: T, constants: Mapping[str, int]) -> T:
    """A schedule with some constants replaced; names that it does not have are ignored."""
    known = {f.name for f in fields(schedule)}
    return replace(schedule, **{name: value for name, value in constants.items() if name in known})


def _aligned(offset: Dim, elements: int) -> bool:
    return isinstance(offset, int) and offset % elements == 0


def _row(k: Linear, target: Target) -> RowSchedule | None:
    """The constants that served every shape well without tuning; None where rows are not whole 16-byte pieces."""
    w, x = k.operand("w"), k.operand("x")
    bits = k.format.bits
    each = 128 // bits
    gamma = k.operand("norm_weight").dtype if k.has("norm_weight") else w.dtype
    if k.depth % each or not _aligned(x.view.offset, each) or not _vector_types(bits, x.dtype, gamma):
        return None
    if k.has("q_norm") or k.has("k_norm") or not (isinstance(x.view.strides[1], int) and x.view.strides[1] == 1):
        return None
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
    # A large matrix keeps 160 KB in flight on each SM; a small one less, and what it asks for in vain keeps the next
    # kernel's blocks away until its own are gone: measured, that beats both of them at once. Weights that are asked for
    # early delay what the kernels before still read: only `calm` of them are in flight until the dependency.
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


def _vector_types(bits: int, x: DType, gamma: DType) -> bool:
    """Whether what 16 bytes of weights multiply is whole pieces of 16 bytes too."""
    return all(t in (f32, *HALF) and t.bits >= bits for t in (x, gamma))


def _few(k: Linear, target: Target) -> tuple[FewSchedule, ...]:
    """One schedule for up to 8 rows and one for up to 32: the split of K that keeps all warps equally busy."""
    if not k.format.tensor_cores or k.depth % 64 or target.capability < 80:
        return ()
    # A kernel that starts early and has nearly all shared memory keeps away the blocks that it waits for.
    room = target.shared - SPARE if target.capability >= 90 else target.shared
    sizes = (1, FEW_ROWS // 8)
    found = [_few_of(k, tiles, target, room, 40) or _few_of(k, tiles, target, target.shared, 32) for tiles in sizes]
    return tuple(f for f in found if f is not None)


def _few_of(k: Linear, tiles: int, target: Target, most: int, least: int) -> FewSchedule | None:
    """The one for 8 `tiles` rows that fits `most` bytes of shared memory, with `least` or more times 2 KB in flight."""
    best: tuple[float, FewSchedule] | None = None
    strips = -(-k.columns // 16)
    for splits, warps in product((1, 2, 3, 4, 5, 6, 7, 8, 12, 16), (8, 4)):
        if k.depth % (splits * 64) or k.depth // splits < 256 and splits > 1:
            continue
        grid = max(1, target.cores // splits)
        gentle = 16 // warps if target.capability >= 90 else 0  # 32 KB
        full = (64 if tiles == 1 else 48) // warps  # 128 or 96 KB in flight
        schedule = FewSchedule(tiles, splits, min(grid, -(-strips // warps)), warps, full, gentle)
        while schedule.shared(k.depth) > most and schedule.ring > least // warps:
            schedule = replace(schedule, ring=schedule.ring - 1)
        if schedule.shared(k.depth) > most:
            continue
        busy = strips / (grid * warps) / -(-strips // (grid * warps)) * (grid * splits / target.cores)
        # Partial sums are written and read again; a short ring streams less well.
        used = busy / (1 + splits * tiles * 24 / k.depth) * (1 - 0.02 * (full - schedule.ring) * warps / 8)
        if best is None or used > best[0]:
            best = (used, schedule)
    return None if best is None else best[1]


def _decode(k: Attention, target: Target) -> DecodeSchedule | None:
    group = k.heads // k.kv_heads
    if target.capability < 90 or group > 8 or not _tensor_attention(k) or not k.has("past"):
        return None
    if group * k.head_dim > 1024:
        return None
    small = k.head_dim <= 64  # more warps fit an SM: long caches need the loads in flight
    return DecodeSchedule(target.cores, blocks=2 if small else 1, long_warps=16 if small else 8)


def _tensor_attention(k: Attention) -> bool:
    """Whether the tensor-core kernels take this attention: bf16, causal, no mask or cap, whole 16-byte pieces."""
    views = [k.operand(n).view for n in ("q", "k", "v")]
    plain = k.causal and k.softcap is None and not k.has("mask") and k.head_dim == k.value_dim
    dense = all(v.strides[3] == 1 and v.dtype == bf16 and _rows_aligned(v.strides, v.offset) for v in views)
    return plain and dense and k.head_dim in (32, 64, 96, 128)


def _rows_aligned(strides: tuple[Dim, ...], offset: Dim) -> bool:
    """Whether every row starts at a multiple of 8 elements, whatever the symbols are."""
    dims = (*strides[:3], offset)
    return all(d % 8 == 0 if isinstance(d, int) else all(c % 8 == 0 for _, c in d.terms) for d in dims)


def _prefill(k: Attention, target: Target) -> PrefillSchedule | None:
    if target.capability < 80 or not _tensor_attention(k) or k.head_dim not in (64, 128):
        return None
    return PrefillSchedule(stages=3, blocks=3) if k.head_dim == 64 else PrefillSchedule(stages=2, blocks=2)


def _hopper(k: Attention, target: Target) -> HopperSchedule | None:
    """Only sm_90 has these instructions: later devices have others in their place."""
    if target.capability != 90 or _prefill(k, target) is None:
        return None
    # Measured on an H200, 2048 tokens: 53 and 88 us a layer. Two small blocks on an SM hide each other's softmax.
    if k.head_dim == 64:
        return HopperSchedule(heads=2 if k.heads // k.kv_heads % 2 == 0 else 1, keys=64, stages=4, resident=2)
    return HopperSchedule(groups=1, heads=1, keys=64, stages=2, resident=2)
