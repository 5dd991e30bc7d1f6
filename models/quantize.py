"""Rounds rows of numbers to low-bit blocks, those of GGUF files with the least squared error that a search finds.

A group of numbers is d * code, or d * code - m. Several scales around the usual one are tried, each is improved by
least squares, and the one whose error is least is kept: the result is never worse than plain rounding. The formats
with blocks of 256 round d and m of their groups once more, to a few bits of a scale of the block; codes are chosen
after that. What blocks mean is `Blocks.values` (codegen/formats/blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from monoplan.codegen.formats.blocks import Blocks, block_format
from monoplan.frontend.parameter import low_bit_part
from monoplan.ir.errors import ArgumentError, located
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import LOW_BITS, Array, DType, Part
from monoplan.models.load.weight_file import code_of
from monoplan.runtime.machine.threads import default_threads

FP8 = ("fp8_128", "fp8_32")  # of no GGUF file
CHUNK = 1 << 18  # numbers that a thread searches at a time: half as many are a sixth slower, by numpy's calls
LARGEST, SMALLEST = float(np.finfo(np.float16).max), np.float32(np.finfo(np.float16).smallest_subnormal)
_TRIES = (0.0, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9)  # added to the largest code that a group's largest number would have


@dataclass(frozen=True)
class Scheme:
    """The codes of a format, and how they lie in a block."""

    group: int  # numbers that share a scale
    low: int  # the smallest code
    high: int
    pack: Callable[..., Array]  # of codes [blocks, numbers] and what scales there are
    offset: bool = False  # a group has an m as well
    levels: tuple[int, int] | None = None  # smallest and largest code of a group's d and m; None: they are f16

    @property
    def limit(self) -> float:
        """The largest number that surely has scales in f16."""
        top = 1 if self.levels is None else self.levels[1]
        return LARGEST * top * (1 if self.offset else self.high)


def quantize(rows: Array, kind: str, importance: Array | None = None) -> Array:
    """Blocks [rows, bytes] of a format (q8_0, q4_k and so on) for a matrix [rows, depth] of floats.

    importance: how much a squared error in each column counts, such as the mean square of the activations there.
    """
    if kind not in (*SCHEMES, *FP8):
        raise ArgumentError(f"nothing is quantized to {kind!r}", fix=f"supported: {', '.join((*SCHEMES, *FP8))}")
    dtype = LOW_BITS[kind]
    if rows.ndim != 2 or rows.shape[1] % dtype.block or not rows.shape[1]:
        what = f"a matrix of the shape {list(rows.shape)} can't be of type {kind}"
        raise ArgumentError(what, why=f"its rows are not whole blocks of {dtype.block} numbers")
    if kind in FP8:
        return _rounded_floats(rows, block_format(dtype))
    scheme = SCHEMES[kind]
    blocks = rows.reshape(-1, dtype.block)
    weights = None if importance is None else _checked(importance, rows.shape[1]).reshape(-1, dtype.block)
    out = np.empty((len(blocks), dtype.block_bytes), np.uint8)
    step = CHUNK // dtype.block

    def fill(begin: int) -> None:
        x = np.asarray(blocks[begin : begin + step], np.float32)
        most = float(np.abs(x).max())
        if not most <= scheme.limit:
            row = begin * dtype.block // rows.shape[1]
            what = f"numbers near row {row} can't be of type {kind}"
            why = f"the largest is {most:.3g}, that of the format {scheme.limit:.3g}" if most > 0 else "some are NaN"
            raise ArgumentError(what, why=why, fix="keep the matrix in float16 or float32")
        w = None if weights is None else weights[np.arange(begin, begin + len(x)) % len(weights)]
        out[begin : begin + step] = _quantize(x, w, scheme)

    with ThreadPoolExecutor(default_threads().count) as pool:  # numpy works without Python's lock
        for _ in pool.map(fill, range(0, len(blocks), step)):
            pass
    return out.reshape(len(rows), -1)


def _rounded_floats(rows: Array, kept: Blocks) -> Array:
    """Blocks of fp8, the largest number of each as the largest code: errors of floats hardly depend on the scale."""
    x = np.asarray(rows, np.float32).reshape(len(rows), -1, kept.dtype.block)
    most = np.abs(x).max(axis=2)
    if not np.isfinite(most).all():
        row = np.argwhere(~np.isfinite(most))[0, 0]
        raise ArgumentError(f"numbers near row {row} can't be of type {kept.name}", why="some are infinite or NaN")
    scales = np.maximum(most / np.float32(448), np.finfo(np.float32).tiny)
    codes = np.clip(x / scales[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return kept.join(codes.reshape(len(rows), -1), scales)


def kind_for(kind: str, depth: int) -> str:
    """The type of a matrix with such rows, where `kind` is wanted: fp8 comes in blocks of two sizes."""
    return "fp8_32" if kind in FP8 and depth % LOW_BITS[kind].block else kind


def head_kind(kind: str, depth: int) -> str:
    """The type of the matrix that makes logits, where others are of type `kind`: errors there reach every choice."""
    if kind == "q8_0" or kind in FP8:
        return kind_for(kind, depth)
    return next((k for k in ("q6_k", "q8_0") if depth % LOW_BITS[k].block == 0), kind)


class Rounded:
    """A matrix in floats as a weight of a low-bit type, for `Parameter.defer`: it is rounded each time it is read."""

    def __init__(self, name: str, shape: tuple[int, ...], read: Callable[..., Array], dtype: DType) -> None:
        made = dtype.name in SCHEMES or dtype.name in FP8
        if not made or shape[-1] % dtype.block:
            what, near = f"{name} of the shape {list(shape)} can't be of type {dtype.name}", "q8_0, q5_0 or q4_0"
            why = f"its rows are not whole blocks of {dtype.block} numbers" if made else "it is only read"
            raise ArgumentError(what, why=why, fix=f"use {near if shape[-1] % 32 == 0 else 'bfloat16 or float16'}")
        self.name, self.shape, self.read, self.dtype = name, shape, read, dtype

    def blocks(self, part: Part | None = None) -> Array:
        """Its rows (of several matrices: each of these) as blocks, or a part of them."""
        with located(self.name, ArgumentError):
            if part is None or part.axis == 0:
                values = self.read() if part is None else self.read(part)
                return quantize(values.reshape(-1, self.shape[-1]), self.dtype.name).reshape(len(values), -1)
            return low_bit_part(quantize(self.read(), self.dtype.name), part, self.dtype)

    def values(self, part: Part | None = None) -> Array:
        """What the blocks mean, or a part of that."""
        codec = block_format(self.dtype)
        if part is None or part.axis == 0:
            rows = self.blocks(part).reshape(-1, self.dtype.stored_bytes(self.shape[-1]))
            return codec.values(rows).reshape(-1, *self.shape[1:])
        return part.cut(self.values())

    def origin(self, find: Callable[[], Any]) -> Any:
        """Where it comes from: other code here may round in another way."""
        found = find()
        how = f"rounded to {self.dtype.name} by {code_of(__file__)}"
        return None if found is None else replace(found, name=f"{found.name} {how}")


def _checked(importance: Array, depth: int) -> Array:
    found = np.asarray(importance, np.float64)
    if found.shape != (depth,) or not np.isfinite(found).all() or (found < 0).any() or not found.any():
        raise ArgumentError(f"importance must be {depth} numbers of 0 or more, one for each column")
    return (found / found.mean()).astype(np.float32)


def _quantize(x: Array, w: Array | None, scheme: Scheme) -> Array:
    shape, groups = x.shape, x.reshape(-1, scheme.group)
    weights = None if w is None else w.reshape(-1, scheme.group)
    fits = [_fit(groups, weights, scheme, tries, halves=scheme.levels is None) for tries in (_TRIES[:1], _TRIES)]
    if scheme.levels is None:
        d, m = fits[1]
        codes = _codes(groups, d, m, scheme)
        return scheme.pack(codes.reshape(shape), *(_bytes(part) for part in ((d, -m) if scheme.offset else (d,))))
    # Rounding the scales may do more harm to the better fit: both are tried for each block.
    count = shape[1] // scheme.group
    found = [_fit_levels(groups, weights, scheme, *fit, count) for fit in fits]
    errors = [part[-1].reshape(-1, count).sum(1) for part in found]
    better = errors[1] < errors[0]
    tops, offsets, scales, mins, d, m = (
        np.where(better if len(a) == len(better) else np.repeat(better, count), b, a)
        for a, b in zip(found[0][:-1], found[1][:-1], strict=True)
    )
    codes = _codes(groups, d, m, scheme).reshape(shape)
    levels = scales.astype(np.int16).reshape(-1, count), mins.astype(np.int16).reshape(-1, count)
    return scheme.pack(codes, _bytes(tops), _bytes(offsets), *levels)


def _bytes(numbers: Array) -> Array:
    return numbers.astype(np.float16)[:, None].view(np.uint8)


def _half(numbers: Array) -> Array:
    return np.clip(numbers, -LARGEST, LARGEST).astype(np.float16).astype(np.float32)


def _half_scale(numbers: Array) -> Array:
    """Scales in f16: none but 0 becomes 0, since multiples of the smallest one are nearer to most numbers than 0 is."""
    found = _half(numbers)
    return np.where((found == 0) & (numbers != 0), np.copysign(SMALLEST, numbers), found)


def _over(a: Array, b: Array) -> Array:
    """a / b; 0 where b is too small to divide by."""
    return np.divide(a, b, out=np.zeros_like(b), where=np.abs(b) >= np.finfo(np.float32).tiny)


def _codes(x: Array, d: Array, m: Array, scheme: Scheme) -> Array:
    """The nearest codes of groups, as floats."""
    made = (x + m[:, None]) if scheme.offset else x.copy()
    made *= _over(np.float32(1), d)[:, None]
    np.rint(made, out=made)
    return np.clip(made, scheme.low, scheme.high, out=made)


def _sum(a: Array, b: Array, w: Array | None) -> Array:
    found: Array = np.einsum("ij,ij->i", a, b if w is None else b * w)
    return found


def _errors(x: Array, w: Array | None, d: Array, m: Array, scheme: Scheme) -> tuple[Array, Array]:
    """The nearest codes of groups, and the squared errors."""
    codes = _codes(x, d, m, scheme)
    rest = codes * d[:, None]
    rest -= x
    if scheme.offset:
        rest -= m[:, None]
    return codes, _sum(rest, rest, w)


def _fit(x: Array, w: Array | None, scheme: Scheme, tries: tuple[float, ...], halves: bool) -> tuple[Array, Array]:
    """Scales d and offsets m of groups [n, group]: with one try the plain ones, else the best that is found."""
    least = x.min(1)
    if scheme.offset:
        if scheme.levels is not None:
            least = np.minimum(least, 0)  # m has no sign
        first, span = -least, x.max(1) - least
    else:
        most = x.max(1)
        first, span = np.zeros_like(least), np.where(most > -least, most, least)
    best = [np.zeros_like(span), first, np.full_like(span, np.inf)]

    def consider(d: Array, m: Array) -> Array:
        if halves:
            d, m = _half_scale(d), _half(m)
        codes, error = _errors(x, w, d, m, scheme)
        better = error < best[2]
        for i, part in enumerate((d, m, error)):
            best[i] = np.where(better, part, best[i])
        return codes

    top = scheme.high if scheme.offset or scheme.low == -scheme.high else scheme.low
    for more in tries:
        codes = consider(span / np.float32(top + (more if top > 0 else -more)), first)
        if len(tries) > 1:
            consider(*_least_squares(x, w, codes, scheme))
    return best[0], best[1]


def _least_squares(x: Array, w: Array | None, codes: Array, scheme: Scheme) -> tuple[Array, Array]:
    """The d and m that suit the codes best."""
    squares, products = _sum(codes, codes, w), _sum(codes, x, w)
    alone = _over(products, squares)
    if not scheme.offset:
        return alone, np.zeros_like(alone)
    ones = np.ones_like(x)
    count, values, total = _sum(ones, ones, w), _sum(ones, x, w), _sum(ones, codes, w)
    both = count * squares - total * total
    d, m = _over(count * products - values * total, both), _over(total * products - squares * values, both)
    if scheme.levels is not None:
        d, m = np.where(m < 0, alone, d), np.maximum(m, 0)
    return d, m


def _fit_levels(x: Array, w: Array | None, scheme: Scheme, d: Array, m: Array, count: int) -> tuple[Array, ...]:
    """d and m of blocks; of groups the codes of their d and m, what these mean, and the errors."""
    assert scheme.levels is not None
    low, high = scheme.levels
    table = d.reshape(-1, count)
    largest = np.take_along_axis(table, np.abs(table).argmax(1)[:, None], 1)[:, 0]
    tops, offsets = _half_scale(largest / (low or high)), _half_scale(m.reshape(-1, count).max(1) / high)
    wide, wide_m = np.repeat(tops, count), np.repeat(offsets, count)
    start, mins = np.clip(np.rint(_over(d, wide)), low, high), np.clip(np.rint(_over(m, wide_m)), 0, high)
    best: list[Array] = [start, mins, np.full_like(d, np.inf)]

    def consider(scales: Array, mins: Array) -> Array:
        codes, error = _errors(x, w, wide * scales, wide_m * mins, scheme)
        better = error < best[2]
        for i, part in enumerate((scales, mins, error)):
            best[i] = np.where(better, part, best[i])
        return codes

    for more in (0, -1, 1):
        scales = np.clip(start + more, low, high)
        codes = consider(scales, mins)
        if scheme.offset:  # the offset that suits the rounded scale best
            ones = np.ones_like(x)
            codes *= (wide * scales)[:, None]
            codes -= x
            mean = _over(_sum(ones, codes, w), _sum(ones, ones, w))
            consider(scales, np.clip(np.rint(_over(mean, wide_m)), 0, high))
    scales, mins, error = best
    return tops, offsets, scales, mins, wide * scales, wide_m * mins, error


# How codes lie in a block: the reverse of what the gguf library takes apart.


def _nibbles(codes: Array, span: int) -> Array:
    """The low four bits of codes: of 2 * span numbers the second half lies above the first."""
    pairs = (codes & 15).reshape(len(codes), -1, 2, span)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(codes), -1)


def _planes(bits: Array, each: int) -> Array:
    """Bits of codes, `each` of them a number: byte i has those of the numbers i, i + 32, i + 64 and so on."""
    split = bits.reshape(len(bits), -1, 8 // each, 32)
    found = np.zeros((len(bits), split.shape[1], 32), np.uint8)
    for place in range(8 // each):
        found |= split[:, :, place] << (place * each)
    return found.reshape(len(bits), -1)


def _joined(*parts: Array) -> Array:
    return np.concatenate([part.astype(np.uint8, copy=False) for part in parts], axis=1)


def _pack_4(codes: Array, *scales: Array) -> Array:
    return _joined(*scales, _nibbles(codes.astype(np.uint8), 16))


def _pack_5(codes: Array, *scales: Array) -> Array:
    found = codes.astype(np.uint8)
    return _joined(*scales, np.packbits(found >> 4, axis=1, bitorder="little"), _nibbles(found, 16))


def _pack_q2_k(codes: Array, d: Array, m: Array, scales: Array, mins: Array) -> Array:
    return _joined(scales | mins << 4, _planes(codes.astype(np.uint8), 2), d, m)


def _pack_q3_k(codes: Array, d: Array, _: Array, scales: Array, mins: Array) -> Array:
    found, levels = (codes + 4).astype(np.uint8), (scales + 32).astype(np.uint8)
    high = np.zeros((len(levels), 4), np.uint8)
    for place, part in enumerate(np.split(levels >> 4, 4, axis=1)):
        high |= part << (2 * place)
    low = levels[:, :8] & 15 | levels[:, 8:] << 4
    return _joined(_planes(found >> 2, 1), _planes(found & 3, 2), low, high, d)


def _levels_6(scales: Array, mins: Array) -> Array:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    d, m = scales.astype(np.uint8), mins.astype(np.uint8)
    first, second = d[:, :4] | d[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6
    return _joined(first, second, d[:, 4:] & 15 | m[:, 4:] << 4)


def _pack_q4_k(codes: Array, d: Array, m: Array, scales: Array, mins: Array) -> Array:
    return _joined(d, m, _levels_6(scales, mins), _nibbles(codes.astype(np.uint8), 32))


def _pack_q5_k(codes: Array, d: Array, m: Array, scales: Array, mins: Array) -> Array:
    found = codes.astype(np.uint8)
    return _joined(d, m, _levels_6(scales, mins), _planes(found >> 4, 1), _nibbles(found, 32))


def _pack_q6_k(codes: Array, d: Array, _: Array, scales: Array, mins: Array) -> Array:
    found = (codes + 32).astype(np.uint8)
    return _joined(_nibbles(found, 64), _planes(found >> 4, 2), scales.astype(np.int8).view(np.uint8), d)


SCHEMES = {
    "q8_0": Scheme(32, -127, 127, lambda codes, d: _joined(d, codes.astype(np.int8).view(np.uint8))),
    "q4_0": Scheme(32, -8, 7, lambda codes, d: _pack_4(codes + 8, d)),
    "q4_1": Scheme(32, 0, 15, _pack_4, offset=True),
    "q5_0": Scheme(32, -16, 15, lambda codes, d: _pack_5(codes + 16, d)),
    "q5_1": Scheme(32, 0, 31, _pack_5, offset=True),
    "q2_k": Scheme(16, 0, 3, _pack_q2_k, offset=True, levels=(0, 15)),
    "q3_k": Scheme(16, -4, 3, _pack_q3_k, levels=(-32, 31)),
    "q4_k": Scheme(32, 0, 15, _pack_q4_k, offset=True, levels=(0, 63)),
    "q5_k": Scheme(32, 0, 31, _pack_q5_k, offset=True, levels=(0, 63)),
    "q6_k": Scheme(16, -32, 31, _pack_q6_k, levels=(-128, 127)),
}
