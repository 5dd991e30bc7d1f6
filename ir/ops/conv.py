"""Windows over images [batch, channels, height, width]: convolution and pooling.

Sequences are images of height 1. Padding is (top, bottom, left, right).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from monoplan.ir.dims import Dim, Expr, equal
from monoplan.ir.opdef import op, require
from monoplan.ir.types import Array, TensorType, bool_, promote

POOLS = ("max", "avg")


def _window(
    name: str, kernel: Sequence[Dim], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    require(
        len(kernel) == 2 and len(stride) == 2 and len(padding) == 4 and len(dilation) == 2,
        f"{name}: kernel, stride and dilation have two numbers, padding has four; got {kernel}, {stride}, {dilation} "
        f"and {padding}",
    )
    given = {"kernel": kernel, "stride": stride, "dilation": dilation, "padding": padding}
    for what, numbers in given.items():
        least = 0 if what == "padding" else 1
        fits = all(isinstance(n, int) and n >= least for n in numbers)
        require(fits, f"{name}: the {what} must be numbers of at least {least}, got {tuple(numbers)}")


def _counts(
    name: str,
    x: TensorType,
    kernel: Sequence[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Dim, Dim]:
    found: list[Dim] = []
    for axis in range(2):
        size, (before, after) = x.shape[axis - 2], padding[2 * axis : 2 * axis + 2]
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        room = size + before + after - reach
        fits = isinstance(room, Expr) or room >= 0
        require(fits, f"{name}: a window of {reach} does not fit {size} + {before} + {after}, axis {axis - 2} of {x}")
        found.append(room // stride[axis] + 1)
    return found[0], found[1]


def conv_type(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    name: str = "conv2d",
) -> TensorType:
    """x[N, C, H, W] with weight[O, C / groups, KH, KW] and bias[O] gives [N, O, H', W']."""
    require(
        x.rank == 4 and weight.rank == 4, f"{name}: the input and the weight have four dimensions, got {x} and {weight}"
    )
    columns, depth, *kernel = weight.shape
    _window(name, kernel, stride, padding, dilation)
    require(
        isinstance(groups, int) and groups >= 1 and isinstance(columns, int) and columns % groups == 0,
        f"{name}: groups={groups} does not divide the {columns} output channels of the weight {weight}",
    )
    require(
        equal(x.shape[1], depth * groups),
        f"{name}: the input {x} has {x.shape[1]} channels, the weight {weight} with groups={groups} takes "
        f"{depth * groups}",
    )
    require(
        bias is None or (bias.rank == 1 and equal(bias.shape[0], columns)),
        f"{name}: the bias {bias} does not fit the weight {weight}",
    )
    dtype = promote(x.dtype, weight.dtype)
    require(dtype.is_float, f"{name} needs floating point operands, got {x} and {weight}")
    sizes = [n for n in kernel if isinstance(n, int)]
    return TensorType(dtype, (x.shape[0], columns, *_counts(name, x, sizes, stride, padding, dilation)))


def _patches(x: Array, kernel: Sequence[int], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Array:
    """All windows of a padded image: [..., H', W', KH, KW]."""
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, (-2, -1))
    return windows[..., :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def _padded(x: Array, padding: tuple[int, ...], value: float | int) -> Array:
    widths = [(0, 0)] * (x.ndim - 2) + [padding[:2], padding[2:]]
    return np.pad(x, widths, constant_values=value)


@op(conv_type, "conv", bounded=True)
def conv2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0, 0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> Array:
    """The products of a weight [O, C / groups, KH, KW] with each window of x [N, C, H, W]; channels in groups."""
    columns, depth, *kernel = weight.shape
    patches = _patches(_padded(x, padding, 0), kernel, stride, dilation)
    images, _, height, width = patches.shape[:4]
    taps, each = math.prod(kernel), columns // groups  # no -1: an empty batch does not say how many
    rows = patches.reshape(images, groups, depth, height, width, taps).transpose(1, 0, 3, 4, 2, 5)
    rows = rows.reshape(groups, images * height * width, depth * taps)
    y = np.matmul(rows, weight.reshape(groups, each, depth * taps).swapaxes(1, 2))
    y = y.reshape(groups, images, height, width, each).transpose(1, 0, 4, 2, 3).reshape(images, columns, height, width)
    return y if bias is None else y + bias[:, None, None]


def _pool_type(
    x: TensorType,
    *,
    kind: str,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    include_pad: bool,
    divisor: int | None,
) -> TensorType:
    _pool_kind("pool2d", x, kind)
    _window("pool2d", kernel, stride, padding, dilation)
    for axis in range(2):
        before = padding[2 * axis]
        require(
            2 * before <= dilation[axis] * (kernel[axis] - 1) + 1,
            f"pool2d: padding {before} is more than half of the kernel {kernel[axis]}",
            why="a window would hold nothing else",
        )
    require(divisor is None or divisor != 0, "pool2d: the divisor must not be 0")
    require(kind == "max" or dilation == (1, 1), f"pool2d: an average has no dilation, got {dilation}")
    return x.with_shape((*x.shape[:-2], *_counts("pool2d", x, kernel, stride, padding, dilation)))


def _pool_kind(name: str, x: TensorType, kind: str) -> None:
    require(kind in POOLS, f"{name}: kind={kind!r} is not one of {', '.join(POOLS)}")
    require(x.rank >= 2, f"{name}: the input must end in height and width, got {x}")
    wanted = x.dtype.is_float if kind == "avg" else x.dtype != bool_
    require(wanted, f"{name}: {kind} needs {'floating point numbers' if kind == 'avg' else 'numbers'}, got {x}")


@op(_pool_type, "pool", bounded=True)
def pool2d(
    x: Array,
    *,
    kind: str,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...] = (0, 0, 0, 0),
    dilation: tuple[int, ...] = (1, 1),
    include_pad: bool = True,
    divisor: int | None = None,
) -> Array:
    """The largest value or the average of each window of x [..., H, W]; the padding after the end may be any number.

    An average divides by `divisor`, or by the numbers in the window: those of the padding count with `include_pad`, but
    never what lies beyond as much padding after the end as before the begin.
    """
    if kind == "max":
        lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        return _patches(_padded(x, padding, lowest), kernel, stride, dilation).max((-2, -1))
    sums = _patches(_padded(x, padding, 0), kernel, stride, dilation).sum((-2, -1))
    if divisor is not None:
        return sums / divisor
    counts = []
    for axis in range(2):
        before, size = padding[2 * axis], x.shape[axis - 2]
        first = np.arange(sums.shape[axis - 2]) * stride[axis] - before
        last = np.minimum(first + kernel[axis], size + before)
        counts.append(last - first if include_pad else np.minimum(last, size) - np.maximum(first, 0))
    return sums / np.multiply.outer(*counts)


def _adaptive_type(x: TensorType, *, kind: str, size: tuple[Dim, ...]) -> TensorType:
    _pool_kind("adaptive_pool2d", x, kind)
    require(len(size) == 2, f"adaptive_pool2d: size has two numbers, got {size}")
    require(all(isinstance(n, Expr) or n >= 0 for n in size), f"adaptive_pool2d: a size in {size} is negative")
    for axis in (-2, -1):
        require(not equal(x.shape[axis], 0), f"adaptive_pool2d: axis {axis} of {x} has no elements")
    return x.with_shape((*x.shape[:-2], *size))


@op(_adaptive_type, "adaptive_pool", bounded=True)
def adaptive_pool2d(x: Array, *, kind: str, size: tuple[Dim, ...]) -> Array:
    """The largest value or the average of each of H' x W' windows that cover x [..., H, W] evenly."""
    height, width = (int(n) for n in size)
    y = np.empty((*x.shape[:-2], height, width), x.dtype)
    for i in range(height):
        rows = x[..., i * x.shape[-2] // height : -(-(i + 1) * x.shape[-2] // height), :]
        for j in range(width):
            part = rows[..., j * x.shape[-1] // width : -(-(j + 1) * x.shape[-1] // width)]
            y[..., i, j] = part.max((-2, -1)) if kind == "max" else part.mean((-2, -1))
    return y
