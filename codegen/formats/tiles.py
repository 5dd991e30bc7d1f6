"""Weights as a GPU keeps them for tensor cores: tiles of 16 rows x 256 columns, see mp_tiles.cuh.

Everything here is arithmetic on whole arrays, so that numpy packs on the host and CuPy on the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from monoplan.ir.lazy_dataclass import dataclass

Array = Any  # of numpy or of CuPy
ROWS, COLUMNS = 16, 256
PIECE = 1024  # rows that are packed at a time: what is between is larger than the weight


def module_of(a: Array) -> Any:
    """numpy or CuPy, whichever an array is of."""
    return sys.modules[type(a).__module__.partition(".")[0]]


@dataclass(frozen=True)
class Tile:
    """How one format lies in tiles: the C++ types of its codes and scales, and what a block of a file means.

    `cut(blocks)` gives codes [rows, columns] and the scales that `put` takes.
    """

    codes: str
    scales: str
    put: Callable[..., Array]
    cut: Callable[[Array], tuple[Array, ...]]
    zero: int = 0
    scale_bytes: int = 0

    @property
    def c_type(self) -> str:
        return f"mp_weight_tile<{self.codes}, {self.scales}, {self.zero}>"

    @property
    def bits(self) -> tuple[int, int]:
        """Of the lower part of a code and of the upper one; (8, 0): bytes, (4, -1): places in a table."""
        if self.codes.startswith("mp_codes<"):
            low, high = self.codes[9:-1].split(",")
            return int(low), int(high)
        return (8, 0) if self.codes in ("mp_codes_bytes", "mp_codes_float8") else (4, -1)

    @property
    def code_bits(self) -> int:
        low, high = self.bits
        return low + max(high, 0)

    @property
    def bytes(self) -> int:
        """Of one tile."""
        return self.code_bits * 512 + (self.scale_bytes or _SCALE_BYTES[self.scales])

    def pack(self, blocks: Array) -> Array:
        """The tiles of rows of blocks, one behind the other."""
        xp, pieces = module_of(blocks), []
        for first in range(0, len(blocks), PIECE):
            codes, *scales = self.cut(blocks[first : first + PIECE])
            low, high = self.bits
            parts = _planes(xp, byte_order(xp, codes), low, high)
            tiles = parts[0].shape[:2]
            parts.append(self.put(xp, *scales).reshape(*tiles, -1))
            pieces.append(xp.concatenate(parts, axis=2).reshape(-1))
        return xp.concatenate(pieces)


_SCALE_BYTES = {
    "mp_scales_half": 256, "mp_scales_half_low": 512, "mp_scales_six": 256, "mp_scales_byte<16>": 288,
    "mp_scales_byte<32>": 160, "mp_scales_four": 320, "mp_scales_power": 128,
}  # fmt: skip


def padded(xp: Any, a: Array, rows: int, columns: int) -> Array:
    """With zeros behind, up to whole multiples."""
    short = -a.shape[0] % rows, -a.shape[1] % columns
    return a if short == (0, 0) else xp.pad(a, ((0, short[0]), (0, short[1])))


def _cut(xp: Any, numbers: Array) -> Array:
    """[rows, columns] as [strip, upper rows, g, tile, chunk, step, t, pair of columns, column]."""
    a = padded(xp, numbers, ROWS, COLUMNS)
    return a.reshape(a.shape[0] // 16, 2, 8, a.shape[1] // 256, 4, 4, 4, 2, 2)


def byte_order(xp: Any, codes: Array) -> Array:
    """Codes [rows, columns] as [strip, tile, chunk, lane, step, row, column]."""
    cut = _cut(xp, codes).transpose(0, 3, 4, 2, 6, 5, 1, 7, 8)
    return xp.ascontiguousarray(cut).reshape(*cut.shape[:3], 32, 4, 2, 4)


def word_order(xp: Any, numbers: Array) -> Array:
    """Numbers of 16 bits [rows, columns] as [strip, tile, chunk, lane, step, word, half of the word]."""
    cut = _cut(xp, numbers).transpose(0, 3, 4, 2, 6, 5, 7, 1, 8)
    return xp.ascontiguousarray(cut).reshape(*cut.shape[:3], 32, 4, 4, 2)


def group_order(xp: Any, values: Array, groups: int) -> Array:
    """Values [rows, groups] as [strip, tile, g, t, part, row]: part's four groups are one for each t."""
    a = padded(xp, values, ROWS, groups)
    cut = a.reshape(a.shape[0] // 16, 2, 8, a.shape[1] // groups, groups // 4, 4).transpose(0, 3, 2, 5, 4, 1)
    return xp.ascontiguousarray(cut)


def row_order(xp: Any, values: Array) -> Array:
    """Values [rows, tiles] as [strip, tile, g, row]."""
    a = padded(xp, values, ROWS, 1)
    return xp.ascontiguousarray(a.reshape(a.shape[0] // 16, 2, 8, a.shape[1]).transpose(0, 3, 2, 1))


def as_bytes(a: Array) -> Array:
    """The bytes of each tile: [strip, tile, bytes]."""
    flat = a.reshape(*a.shape[:2], -1)
    return flat.view(np.uint8)


def _words(xp: Any, codes: Array, apart: int, between: int) -> Array:
    """Codes [..., n, 4] of a few bits as 32 bits: those of a row `between` bits from each other, rows `apart`."""
    made = xp.zeros(codes.shape[:-2], np.uint32)
    for row in range(codes.shape[-2]):
        for column in range(4):
            made |= codes[..., row, column].astype(np.uint32) << np.uint32(apart * row + between * column)
    return made


def _pairs(xp: Any, codes: Array) -> Array:
    """Codes of two bits: eight bytes for each lane and chunk, two chunks side by side."""
    w = _words(xp, codes.reshape(*codes.shape[:4], 2, 4, 4), 2, 8)  # two steps are a word
    return as_bytes(xp.ascontiguousarray(w.reshape(*w.shape[:2], 2, 2, 32, 2).swapaxes(3, 4)))


def _planes(xp: Any, codes: Array, low: int, high: int) -> list[Array]:
    """The pieces of codes in the order of lanes: mp_codes, mp_codes_bytes or mp_codes_table."""
    if low == 8:
        c = codes.reshape(*codes.shape[:4], 2, 16).swapaxes(3, 4)  # two steps are a piece
        return [as_bytes(xp.ascontiguousarray(c).astype(np.uint8))]
    if high < 0:
        return [as_bytes(_words(xp, codes, 16, 4))]
    lower, upper = codes & ((1 << low) - 1), codes >> low
    parts = [as_bytes(_words(xp, lower, 4, 8)) if low == 4 else _pairs(xp, lower)]
    if high == 2:
        parts.append(_pairs(xp, upper))
    if high == 1:
        w = _words(xp, upper.reshape(*upper.shape[:4], 8, 4), 1, 8)  # [strip, tile, chunk, lane]
        parts.append(as_bytes(xp.ascontiguousarray(w.swapaxes(2, 3))))
    return parts


# -- scales: bytes of each tile, [strip, tile, bytes]


def put_half(xp: Any, d: Array) -> Array:
    return as_bytes(group_order(xp, d, 8))


def put_half_low(xp: Any, d: Array, low: Array) -> Array:
    both = xp.stack([group_order(xp, d, 8), group_order(xp, low, 8)], axis=-1)
    return as_bytes(both)


def put_six(xp: Any, d: Array, dmin: Array, scale: Array, low: Array) -> Array:
    """Pairs of six bits: 48 for each lane."""
    pair = group_order(xp, scale.astype(np.uint64) | low.astype(np.uint64) << np.uint64(6), 8)
    both = sum(pair[..., p, r] << np.uint64(12 * p + 24 * r) for p in range(2) for r in range(2))
    rows = xp.stack([row_order(xp, d), row_order(xp, dmin)], axis=-1)
    first, last = (both & np.uint64(0xFFFFFFFF)).astype(np.uint32), (both >> np.uint64(32)).astype(np.uint16)
    return xp.concatenate([as_bytes(rows), as_bytes(first), as_bytes(last)], axis=2)


def put_bytes(xp: Any, d: Array, scale: Array) -> Array:
    groups = scale.shape[1] // d.shape[1]
    return xp.concatenate([as_bytes(group_order(xp, scale, groups)), as_bytes(row_order(xp, d))], axis=2)


def put_four(xp: Any, d: Array, dmin: Array, both: Array) -> Array:
    rows = xp.stack([row_order(xp, d), row_order(xp, dmin)], axis=-1)
    return xp.concatenate([as_bytes(group_order(xp, both, 16)), as_bytes(rows)], axis=2)


def put_groups(xp: Any, *parts: Array, groups: int) -> Array:
    """Scales and zero points [rows, groups], each as [strip, tile, g, group, row]."""
    made = []
    for part in parts:
        a = padded(xp, part, ROWS, groups)
        cut = a.reshape(a.shape[0] // 16, 2, 8, a.shape[1] // groups, groups).transpose(0, 3, 2, 4, 1)
        made.append(as_bytes(xp.ascontiguousarray(cut)))
    return xp.concatenate(made, axis=2)


def put_power(xp: Any, exponent: Array) -> Array:
    return as_bytes(group_order(xp, exponent, 8))


# -- blocks of GGUF files: codes [rows, columns], then scales


def _blocks(raw: Array, size: int) -> Array:
    return raw.reshape(len(raw), -1, size)


def _halves(b: Array, at: int) -> Array:
    """The f16 that stand at a place of each block."""
    return module_of(b).ascontiguousarray(b[..., at : at + 2]).view(np.float16)[..., 0]


def _flat(codes: Array) -> Array:
    return codes.reshape(len(codes), -1)


def _nibbles(xp: Any, b: Array) -> Array:
    """16 bytes with the codes of columns 0 to 15 in their lower halves."""
    return xp.concatenate([b & 15, b >> 4], axis=-1)


def _bits(xp: Any, b: Array) -> Array:
    """The bits of bytes, lowest first."""
    return (b[..., None] >> xp.arange(8, dtype=np.uint8) & 1).reshape(*b.shape[:-1], -1)


def simple(size: int, halves: Sequence[int], codes: int, bits: int = 0) -> Callable[[Array], tuple[Array, ...]]:
    """Blocks of 32 numbers: f16 at `halves`, nibbles at `codes`, and fifth bits at `bits`."""

    def cut(raw: Array) -> tuple[Array, ...]:
        xp, b = module_of(raw), _blocks(raw, size)
        q = _nibbles(xp, b[..., codes : codes + 16])
        if bits:
            q = q | _bits(xp, b[..., bits : bits + 4]) << 4
        return _flat(q), *(_halves(b, at) for at in halves)

    return cut


def cut_q8_0(raw: Array) -> tuple[Array, ...]:
    b = _blocks(raw, 34)
    return _flat(b[..., 2:]), _halves(b, 0)


def _six_bits(xp: Any, b: Array) -> tuple[Array, Array]:
    """Scales and minima of Q4_K and Q5_K: 12 bytes for eight groups."""
    first, second, third = b[..., :4], b[..., 4:8], b[..., 8:]
    scale = xp.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    low = xp.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return _flat(scale), _flat(low)


def cut_q4_k(raw: Array) -> tuple[Array, ...]:
    xp, b = module_of(raw), _blocks(raw, 144)
    q = _nibbles(xp, b[..., 16:].reshape(*b.shape[:2], 4, 32))
    return _flat(q), _halves(b, 0), _halves(b, 2), *_six_bits(xp, b[..., 4:16])


def cut_q5_k(raw: Array) -> tuple[Array, ...]:
    xp, b = module_of(raw), _blocks(raw, 176)
    q = _nibbles(xp, b[..., 48:].reshape(*b.shape[:2], 4, 32)).reshape(*b.shape[:2], 8, 32)
    fifth = b[..., 16:48][..., None, :] >> xp.arange(8, dtype=np.uint8)[:, None] & 1
    return _flat(q | fifth << 4), _halves(b, 0), _halves(b, 2), *_six_bits(xp, b[..., 4:16])


def cut_q6_k(raw: Array) -> tuple[Array, ...]:
    xp, b = module_of(raw), _blocks(raw, 210)
    low = b[..., :128].reshape(*b.shape[:2], 2, 1, 64) >> xp.array([0, 4], np.uint8)[:, None] & 15
    high = b[..., 128:192].reshape(*b.shape[:2], 2, 1, 32) >> xp.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = low.reshape(*b.shape[:2], 256) | high.reshape(*b.shape[:2], 256) << 4
    return _flat(q), _halves(b, 208), _flat(b[..., 192:208])


def cut_q3_k(raw: Array) -> tuple[Array, ...]:
    xp, b = module_of(raw), _blocks(raw, 110)
    low = b[..., 32:96].reshape(*b.shape[:2], 2, 1, 32) >> xp.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    high = b[..., :32][..., None, :] >> xp.arange(8, dtype=np.uint8)[:, None] & 1
    q = low.reshape(*b.shape[:2], 256) | high.reshape(*b.shape[:2], 256) << 2
    packed, upper = b[..., 96:104], b[..., 104:108]
    low4 = xp.concatenate([packed & 15, packed >> 4], axis=-1)
    high2 = upper[..., None, :] >> xp.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scale = (low4 | high2.reshape(*b.shape[:2], 16) << 4) - np.uint8(32)  # signed, as its bits
    return _flat(q), _halves(b, 108), _flat(scale)


def cut_q2_k(raw: Array) -> tuple[Array, ...]:
    xp, b = module_of(raw), _blocks(raw, 84)
    q = b[..., 16:80].reshape(*b.shape[:2], 2, 1, 32) >> xp.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return _flat(q), _halves(b, 80), _halves(b, 82), _flat(b[..., :16])


def cut_iq4_xs(raw: Array) -> tuple[Array, ...]:
    xp, b = module_of(raw), _blocks(raw, 136)
    q = _nibbles(xp, b[..., 8:].reshape(*b.shape[:2], 8, 16))
    low = b[..., 4:8][..., None] >> xp.array([0, 4], np.uint8) & 15
    high = b[..., 2:4][..., None] >> xp.array([0, 2, 4, 6], np.uint8) & 3
    scale = (low.reshape(*b.shape[:2], 8) | high.reshape(*b.shape[:2], 8) << 4) - np.uint8(32)
    return _flat(q), _halves(b, 0), _flat(scale)


def cut_mxfp4(raw: Array) -> tuple[Array, ...]:
    b = _blocks(raw, 17)
    return _flat(_nibbles(module_of(raw), b[..., 1:])), b[..., 0]


def in_groups(bits: int, block: int, scale: str, *, floats: bool = False) -> Tile:
    """Blocks of codes, 4 bits as in q4_0 or bytes, a scale of that C++ type, and a zero point unless codes are floats.
    Scales stay words: CuPy has no bf16."""
    end, zeros, word = block * bits // 8, int(not floats), np.dtype(np.uint32 if scale == "float" else np.uint16)
    size = word.itemsize

    def cut(raw: Array) -> tuple[Array, ...]:
        xp, b = module_of(raw), _blocks(raw, end + size + zeros)
        codes = b[..., :end]
        if bits == 4:
            codes = _nibbles(xp, codes.reshape(*b.shape[:2], -1, 16))
        scales = xp.ascontiguousarray(b[..., end : end + size]).view(word)[..., 0]
        return _flat(codes), scales, *[b[..., -1]] * zeros

    kind = "mp_codes_float8" if floats else "mp_codes_bytes" if bits == 8 else "mp_codes<4, 0>"
    put = functools.partial(put_groups, groups=COLUMNS // block)
    bytes_ = ROWS * COLUMNS // block * (size + zeros)
    return Tile(kind, f"mp_scales_of<{scale}, {block}, {zeros}>", put, cut, scale_bytes=bytes_)


def _table(values: Sequence[int]) -> str:
    words = np.array(values, np.int8).view("<u4")
    return f"mp_codes_table<{', '.join(f'{int(w)}u' for w in words)}>"


_IQ4 = _table((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_MXFP4 = _table((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))

TILES: dict[str, Tile] = {
    "q4_0": Tile("mp_codes<4, 0>", "mp_scales_half", put_half, simple(18, [0], 2), 8),
    "q4_1": Tile("mp_codes<4, 0>", "mp_scales_half_low", put_half_low, simple(20, [0, 2], 4)),
    "q5_0": Tile("mp_codes<4, 1>", "mp_scales_half", put_half, simple(22, [0], 6, 2), 16),
    "q5_1": Tile("mp_codes<4, 1>", "mp_scales_half_low", put_half_low, simple(24, [0, 2], 8, 4)),
    "q8_0": Tile("mp_codes_bytes", "mp_scales_half", put_half, cut_q8_0),
    "q2_k": Tile("mp_codes<2, 0>", "mp_scales_four", put_four, cut_q2_k),
    "q3_k": Tile("mp_codes<2, 1>", "mp_scales_byte<16>", put_bytes, cut_q3_k, 4),
    "q4_k": Tile("mp_codes<4, 0>", "mp_scales_six", put_six, cut_q4_k),
    "q5_k": Tile("mp_codes<4, 1>", "mp_scales_six", put_six, cut_q5_k),
    "q6_k": Tile("mp_codes<4, 2>", "mp_scales_byte<16>", put_bytes, cut_q6_k, 32),
    "iq4_nl": Tile(_IQ4, "mp_scales_half", put_half, simple(18, [0], 2)),
    "iq4_xs": Tile(_IQ4, "mp_scales_byte<32>", put_bytes, cut_iq4_xs),
    "mxfp4": Tile(_MXFP4, "mp_scales_power", put_power, cut_mxfp4),
    **{f"fp8_{n}": in_groups(8, n, "float", floats=True) for n in (128, 32)},
    **{f"int4_{n}_{t}": in_groups(4, n, f"mp_{t}") for n in (128, 64, 32) for t in ("f16", "bf16")},
    **{f"int{bits}_{n}_f32": in_groups(bits, n, "float") for bits in (4, 8) for n in (128, 64, 32)},
}
