"""Ops that move or make data: reshape, transpose, slice, expand, concat, split, repeat, arange, full."""

from __future__ import annotations

import numpy as np

from monoplan.ir.dims import Dim, Expr, bounds, equal, same_dims
from monoplan.ir.errors import ArgumentError
from monoplan.ir.opdef import normalize_axis, op, require
from monoplan.ir.rules import broadcast
from monoplan.ir.types import Array, DType, TensorType, f32, i64, promote


def _reshape_type(x: TensorType, *, shape: tuple[Dim, ...]) -> TensorType:
    target = TensorType(x.dtype, shape)
    require(equal(x.size, target.size), f"reshape: {x} has {x.size} elements, {target} has {target.size}")
    return target


@op(_reshape_type, "view")
def reshape(x: Array, *, shape: tuple[Dim, ...]) -> Array:
    """The same elements in another shape, in row-major order."""
    return x.reshape(shape)


def _transpose_type(x: TensorType, *, axes: tuple[int, ...]) -> TensorType:
    require(sorted(axes) == list(range(x.rank)), f"transpose: axes {axes} are not a permutation for {x}")
    return x.with_shape(x.shape[a] for a in axes)


@op(_transpose_type, "view")
def transpose(x: Array, *, axes: tuple[int, ...]) -> Array:
    """Dimensions permuted: result dimension i is dimension axes[i] of x."""
    return np.transpose(x, axes)


def _slice_type(x: TensorType, *, axis: int, start: Dim, length: Dim, step: int) -> TensorType:
    axis = normalize_axis(axis, x.rank, "slice")
    require(step != 0, "slice: the step must not be 0")
    size = x.shape[axis]
    # An empty slice reads nothing, wherever it begins: that of a flipped empty tensor begins at -1.
    some = not equal(length, 0)
    last = start + (length - 1) * step
    for d, what in ((start, "start"), (length, "length")) if some else ():
        low, _ = bounds(d)
        require(low is None or low >= 0 or isinstance(d, Expr), f"slice: the {what} {d} is negative")
    for room in (size - 1 - (last if step > 0 else start), last if step < 0 else 0) if some else ():
        _, high = bounds(room)
        require(
            high is None or high >= 0,
            f"slice: {length} elements from {start}{f' in steps of {step}' if step != 1 else ''} go past {size}, "
            f"the size of axis {axis} of {x}",
        )
    if x.dtype.is_low_bit and axis == x.rank - 1:
        whole = step == 1 and all(isinstance(d, int) and d % x.dtype.block == 0 for d in (start, length))
        require(whole, f"slice: {length} elements from {start} are not whole blocks of {x.dtype.block} of {x}")
    return x.with_shape(length if i == axis else d for i, d in enumerate(x.shape))


@op(_slice_type, "view", bounded=True, low_bit=("x",))
def slice_(x: Array, *, axis: int, start: Dim, length: Dim, step: int = 1) -> Array:
    """`length` elements of an axis from `start`, every `step`-th; backwards where the step is negative."""
    if not length:
        return np.take(x, range(0), axis)  # type: ignore[no-any-return]
    last = start + (length - 1) * step
    if min(start, last) < 0 or max(start, last) >= x.shape[axis]:  # type: ignore[type-var, operator]
        raise ArgumentError(f"slice: {length} elements from {start} go past {x.shape[axis]}, the size of axis {axis}")
    index = [slice(None)] * x.ndim
    stop = last + (1 if step > 0 else -1)
    index[axis] = slice(start, stop if stop >= 0 else None, step)  # type: ignore[operator]
    found = x[tuple(index)]
    return found if step > 0 else found.copy()  # no view, as a flip is none in PyTorch


def _expand_type(x: TensorType, *, shape: tuple[Dim, ...]) -> TensorType:
    got = broadcast([x.shape, shape], "expand")
    require(same_dims(got, shape), f"expand: {x} does not broadcast to {TensorType(x.dtype, shape)}")
    return x.with_shape(shape)


@op(_expand_type, "view")
def expand(x: Array, *, shape: tuple[Dim, ...]) -> Array:
    """x broadcast to a larger shape."""
    return np.broadcast_to(x, shape)  # type: ignore[arg-type]


def _concat_type(*xs: TensorType, axis: int) -> TensorType:
    require(len(xs) > 0, "concat needs at least one operand")
    axis = normalize_axis(axis, xs[0].rank, "concat")
    total: Dim = 0
    for x in xs:
        fits = x.rank == xs[0].rank and all(
            i == axis or equal(a, b) for i, (a, b) in enumerate(zip(x.shape, xs[0].shape, strict=True))
        )
        require(fits, f"concat along {axis}: {xs[0]} and {x} differ in another dimension")
        total = total + x.shape[axis]
    shape = tuple(total if i == axis else d for i, d in enumerate(xs[0].shape))
    if any(x.dtype.is_low_bit for x in xs):
        alike = axis == 0 and len({x.dtype for x in xs}) == 1
        require(alike, f"concat along {axis}: low-bit weights are joined by rows of one type, got {xs[0]} and others")
        return TensorType(xs[0].dtype, shape)
    return TensorType(promote(*(x.dtype for x in xs)), shape)


@op(_concat_type, "copy", low_bit=("xs",))
def concat(*xs: Array, axis: int = 0) -> Array:
    """Operands joined along an axis."""
    return np.concatenate(xs, axis=axis)


def _split_type(x: TensorType, *, sizes: tuple[Dim, ...], axis: int) -> tuple[TensorType, ...]:
    axis = normalize_axis(axis, x.rank, "split")
    total: Dim = 0
    for s in sizes:
        require(isinstance(s, Expr) or s >= 0, f"split: a size in {sizes} is negative")
        total = total + s
    require(equal(total, x.shape[axis]), f"split: sizes {sizes} do not add up to {x.shape[axis]}, axis {axis} of {x}")
    return tuple(x.with_shape(s if i == axis else d for i, d in enumerate(x.shape)) for s in sizes)


@op(_split_type, "view", bounded=True)
def split(x: Array, *, sizes: tuple[Dim, ...], axis: int = -1) -> tuple[Array, ...]:
    """x cut along an axis into pieces of the given sizes."""
    return tuple(np.split(x, np.cumsum(np.array(sizes, np.int64))[:-1], axis=axis))


def _repeat_type(x: TensorType, *, repeats: int, axis: int) -> TensorType:
    axis = normalize_axis(axis, x.rank, "repeat")
    require(repeats >= 1, f"repeat: repeats must be 1 or more, got {repeats}")
    return x.with_shape(d * repeats if i == axis else d for i, d in enumerate(x.shape))


@op(_repeat_type, "copy")
def repeat(x: Array, *, repeats: int, axis: int) -> Array:
    """Each element of an axis `repeats` times in a row, as grouped key and value heads are shared."""
    return np.repeat(x, repeats, axis=axis)


def _pad_type(
    x: TensorType, *, before: tuple[Dim, ...], after: tuple[Dim, ...], value: float | int | bool
) -> TensorType:
    require(
        len(before) == len(after) == x.rank, f"pad: {x} needs {x.rank} sizes before and after, got {before}, {after}"
    )
    for d in (*before, *after):
        _, high = bounds(d)
        require(high is None or high >= 0, f"pad: the size {d} is negative")
    _check_value("pad", value, x.dtype)
    return x.with_shape(b + n + a for b, n, a in zip(before, x.shape, after, strict=True))


@op(_pad_type, "copy", bounded=True)
def pad(x: Array, *, before: tuple[Dim, ...], after: tuple[Dim, ...], value: float | int | bool = 0) -> Array:
    """x with so many elements of one value before and after those of each dimension."""
    return np.pad(x, list(zip(before, after, strict=True)), constant_values=value)  # type: ignore[arg-type]


def _arange_type(*, length: Dim, start: Dim, dtype: DType) -> TensorType:
    require(isinstance(length, Expr) or length >= 0, f"arange: the length {length} is negative")
    return TensorType(dtype, (length,))


@op(_arange_type, "generate", bounded=True)
def arange(*, length: Dim, start: Dim = 0, dtype: DType = i64) -> Array:
    """start, start + 1, … (length of them)."""
    return np.arange(start, start + length).astype(dtype.numpy)  # type: ignore[arg-type]


def _full_type(*, shape: tuple[Dim, ...], value: float | int | bool, dtype: DType) -> TensorType:
    require(all(isinstance(d, Expr) or d >= 0 for d in shape), f"full: a size in {list(shape)} is negative")
    _check_value("full", value, dtype)
    return TensorType(dtype, shape)


def _check_value(name: str, value: float | int | bool, dtype: DType) -> None:
    if dtype.is_integer:
        low, high = np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max
        require(low <= value <= high, f"{name}: {value} is no {dtype}, which goes from {low} to {high}")  # nor is NaN


@op(_full_type, "generate", bounded=True)
def full(*, shape: tuple[Dim, ...] = (), value: float | int | bool, dtype: DType = f32) -> Array:
    """One value everywhere; a scalar constant when the shape is empty."""
    return np.full(shape, value, dtype.numpy)  # type: ignore[arg-type]
