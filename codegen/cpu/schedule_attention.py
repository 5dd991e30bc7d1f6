"""Decisions for attention on the CPU: which variants a kernel has, and the sizes of their blocks."""

from __future__ import annotations

from monoplan.codegen.cpu.schedule_linear import TILE_PART
from monoplan.codegen.kernels import Attention
from monoplan.codegen.target import Target
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import bf16, bool_, f16, f32, i8

# Queries that read the cache key by key and have the bits of one alone; more share a pass over blocks of keys. On NEON
# products have these bits for any number of rows, and drafts gain by more of them.
FEW, NEON_FEW = 8, 24
LEAST, CHUNK = 256, 1024  # keys of one task when queries are few: enough tasks to share out, little done once for each
NEAR_BYTES, FAR_BYTES = 1024, 16384  # of keys or values, before they are read: measured on a Xeon
TILES_NEAR_BYTES = 4096  # the same where tile units read 32 rows at a time
NEON_NEAR_BYTES = 2048  # and on Neoverse-N1 cores
COLUMNS, NEON_COLUMNS = 48, 96  # of a strip, about; Neoverse-N1: more read keys and values less often, from L2
TILE_KEYS = 128  # keys of a block on tile units: the scores of two blocks, the sums and the queries fit into L1


def few_queries(target: Target) -> int:
    """Queries whose bits are those of one alone."""
    return NEON_FEW if target.isa == "neon" else FEW


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """The variants of an attention kernel.

    Few queries: tasks of `least` to `chunk` keys; `rows` keys meet the group's queries at a time, values are summed
    `wide` vectors at a time. Many queries: strips of `columns` (query, head) pairs against blocks of `keys`, in
    register tiles of `block` rows and `vectors` vectors; or, on bf16 tile units, strips of 32.
    """

    simple: bool  # f64: one plain loop for everything
    has_few: bool  # whether there may be few queries
    has_many: bool
    lanes: int
    tiles: bool  # many queries run on bf16 tile units
    parts: int  # bf16 numbers there of which a query, a key or a value is the sum
    part: int  # queries, or more, that a thread may have for itself there: as products have it
    takes_tiles: bool  # q comes as bf16 tiles when rows are many: see hand_over
    gives_tiles: bool  # y is made so
    few: int
    few_tiles: bool  # few queries run on tile units as well
    few_heads: int  # heads that a row of scores has room for there
    least: int
    chunk: int
    rows: int
    wide: int
    pairs: bool  # few queries: words of two bf16 are split by a shift and a mask
    ahead: int  # keys by which a row is prefetched into L1 before it is read
    far: int  # and into L2
    prefetch_keys: bool  # few queries: whether keys are prefetched as values are
    columns: int
    keys: int
    block: int
    vectors: int


def choose_attention(k: Attention, target: Target) -> AttentionSchedule:
    """The schedule of an attention kernel on a CPU."""
    q, keys, values = (k.operand(n) for n in ("q", "k", "v"))
    simple = any(o.dtype.bits > 32 for o in (q, keys, values))
    count = k.seq if isinstance(k.seq, int) else None
    group = k.heads // k.kv_heads
    many = target.lanes == 16 or target.isa == "neon"  # 32 vector registers, else 16
    # Sums of rows x group vectors stay in registers, and hide the latency of a multiply-add.
    rows = 1
    while rows * 2 * group <= (16 if many else 8) and rows * 2 <= min(target.lanes, 8):
        rows *= 2
    lines = -(-k.value_dim // target.lanes)
    wide = max(n for n in range(1, lines + 1) if lines % n == 0 and (n == 1 or n * group <= (20 if many else 10)))
    row = k.head_dim * keys.dtype.itemsize
    near = NEON_NEAR_BYTES if target.isa == "neon" else NEAR_BYTES
    tiles, few = on_tiles(k, target), few_queries(target)
    few_tiles = tiles and few_on_tiles(k)
    ahead, far = max(1, near // row), max(1, FAR_BYTES // row)
    if few_tiles:  # whole blocks of 32 rows
        ahead, far = (max(n, size // row // 32) * 32 for n, size in ((1, TILES_NEAR_BYTES), (2, FAR_BYTES)))
    block, vectors = {16: (8, 3), 8: (4, 3)}.get(target.lanes, (4, 4 if many else 2))
    most = NEON_COLUMNS if target.isa == "neon" else COLUMNS
    columns = -(-most // (vectors * target.lanes)) * vectors * target.lanes
    return AttentionSchedule(
        simple=simple,
        has_few=count is None or count <= few,
        has_many=count is None or count > few,
        lanes=target.lanes,
        tiles=tiles,
        parts=1 if keys.dtype == bf16 else 2,
        part=TILE_PART,
        takes_tiles=q.view.buffer.tiled > 0,
        gives_tiles=k.operand("y").view.buffer.tiled > 0,
        few=few,
        few_tiles=few_tiles,
        few_heads=4 if group <= 4 else 8,
        least=LEAST,
        chunk=CHUNK if group <= 8 else LEAST,
        rows=rows,
        wide=wide,
        pairs=target.isa != "neon" and target.lanes > 1,
        ahead=ahead,
        far=far,
        prefetch_keys=target.isa != "neon",  # Neoverse-N1 cores see whole rows coming; in f32 it is 20 % faster so
        columns=32 if tiles else columns,
        keys=TILE_KEYS if tiles else 64,
        block=block,
        vectors=vectors,
    )


def on_tiles(k: Attention, target: Target) -> bool:
    """Whether many queries run on bf16 tile units: whole tiles, scores that need a scale at most, a mask of bools."""
    q, keys, values = (k.operand(n) for n in ("q", "k", "v"))
    mask = k.operand("mask") if k.has("mask") else None
    plain = k.softcap is None and k.scale > 0 and (mask is None or mask.dtype == bool_ and not mask.view.is_virtual)
    whole = k.head_dim % 32 == 0 and k.value_dim % 32 == 0
    queries = (bf16, f32) if keys.dtype == bf16 else (bf16, f16, f32)  # in one part f16 would lose bits
    types = q.dtype in queries and keys.dtype == values.dtype and keys.dtype in (bf16, f16, i8)
    stored = not keys.view.is_virtual and not values.view.is_virtual
    return target.has_tiles and plain and whole and types and stored


def few_on_tiles(k: Attention) -> bool:
    """Whether few queries do so too: rows of the cache that lie as tiles can load them, enough heads that share a key
    (with one or two of them vectors have as little to do), and not more than the rows of a tile can take twice."""
    dense = all(k.operand(n).view.strides[3] == 1 and k.operand(n).view.table is None for n in ("k", "v"))
    dense = dense and k.operand("k").dtype == bf16
    return dense and not k.has("mask") and 3 <= k.heads // k.kv_heads <= 8 and k.head_dim <= 128 and k.value_dim <= 128
