"""Convolutions, pools and resampling with PyTorch's names, arguments and meaning; part of monoplan.nn.functional.

Images are [(batch,) channels, height, width], sequences [(batch,) channels, length]: images of height 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from monoplan.frontend.tensor import Tensor, as_tensor, call, floating
from monoplan.ir.dims import Dim, Expr, divide_exactly, equal
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import f32, f64, i64


def numbers(name: str, what: str, given: Any, count: int) -> tuple[Any, ...]:
    """A number for each spatial axis; one stands for all."""
    found = tuple(given) if isinstance(given, tuple | list) else (given,)
    found = found * count if len(found) == 1 else found
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in found)
    if len(found) != count or not whole:
        raise ArgumentError(f"{name}: {what} must be a whole number or {count} of them, got {given!r}")
    return tuple(int(n) for n in found)


def _batched(name: str, input: Any, spatial: int) -> tuple[Tensor, bool]:
    """The input with a batch, and whether it had one."""
    x = as_tensor(input)
    if x.ndim not in (spatial + 1, spatial + 2):
        axes = "height, width" if spatial == 2 else "length"
        raise ArgumentError(f"{name}: the input must be [(batch,) channels, {axes}], got {x.type}")
    return (x, True) if x.ndim == spatial + 2 else (x.unsqueeze(0), False)


def _conv(name: str, spatial: int, input: Any, weight: Any, bias: Any, *window: Any) -> Tensor:
    stride_, padding_, dilation_, groups = window
    x, batched = _batched(name, input, spatial)
    x, w = floating(x), as_tensor(weight)
    if w.ndim != spatial + 2:
        sizes = "height, width" if spatial == 2 else "length"
        raise ArgumentError(f"{name}: the weight must be [out, in / groups, {sizes}], got {w.type}")
    stride, dilation = (numbers(name, n, v, spatial) for n, v in (("stride", stride_), ("dilation", dilation_)))
    padding = _padding(name, padding_, w.shape[2:], stride, dilation)
    if spatial == 1:
        x, w = x.unsqueeze(2), w.unsqueeze(2)
        stride, dilation, padding = (1, *stride), (1, *dilation), (0, 0, *padding)
    y = call("conv2d", x, w, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)
    y = y.squeeze(2) if spatial == 1 else y
    return y if batched else y.squeeze(0)  # type: ignore[no-any-return]


def _padding(
    name: str, given: Any, kernel: Sequence[Any], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Padding before and after each axis."""
    if not isinstance(given, str):
        return tuple(n for n in numbers(name, "padding", given, len(kernel)) for _ in range(2))
    if given not in ("same", "valid"):
        raise ArgumentError(f"{name}: padding={given!r} is neither numbers nor 'same' nor 'valid'")
    if given == "valid":
        return (0, 0) * len(kernel)
    if any(n != 1 for n in stride):
        raise ArgumentError(f"{name}: padding='same' needs a stride of 1, got {tuple(stride)}", fix="give numbers")
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple(n for total in totals for n in (total // 2, total - total // 2))


def conv1d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """The products of a weight [out, in / groups, size] with each window of a sequence."""
    return _conv("conv1d", 1, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """The products of a weight [out, in / groups, height, width] with each window of an image."""
    return _conv("conv2d", 2, input, weight, bias, stride, padding, dilation, groups)


def _conv_transpose(name: str, spatial: int, input: Any, weight: Any, bias: Any, groups: int, *window: Any) -> Tensor:
    """Outputs whose places leave the same remainder by the stride are one convolution over the input; these are joined
    as channels of one convolution, and sorted afterwards.
    """
    x, batched = _batched(name, input, spatial)
    w = as_tensor(weight)
    if w.ndim != spatial + 2 or w.shape[0] % groups:
        sizes = "height, width" if spatial == 2 else "length"
        raise ArgumentError(
            f"{name}: the weight must be [in, out / groups, {sizes}] with groups={groups}, got {w.type}"
        )
    names = ("stride", "padding", "output_padding", "dilation")
    given = [numbers(name, what, v, spatial) for what, v in zip(names, window, strict=True)]
    for step, before, more, apart in zip(*given, strict=True):
        if min(step, apart) < 1 or min(before, more) < 0 or more >= max(step, apart):
            raise ArgumentError(
                f"{name}: stride={step}, padding={before}, output_padding={more}, dilation={apart} do not fit",
                why="output_padding must be smaller than the stride or the dilation; none may be negative",
            )
    if spatial == 1:
        x, w, given = x.unsqueeze(2), w.unsqueeze(2), [(n, *v) for n, v in zip((1, 0, 0, 1), given, strict=True)]
    channels, columns = w.shape[:2]
    padding: list[int] = []
    cut: list[tuple[int, int, Dim]] = []
    sizes_: list[int] = []
    for axis, (step, before, more, apart) in enumerate(zip(*given, strict=True), 2):
        reach = apart * (w.shape[axis] - 1) + 1
        taps = -(-reach // step)  # of each remainder
        beyond = max(0, -(-(more - before - (taps * step - reach)) // step))  # whole steps that no window reaches
        padding += [taps - 1, taps - 1 + beyond]
        cut.append((axis, before, (x.shape[axis] - 1) * step - 2 * before + reach + more))
        places = [(taps - 1 - u) * step + m for m in range(step) for u in range(taps)]
        shape = (*w.shape[:axis], 1, *w.shape[axis + 1 :])
        zeros = call("full", shape=shape, value=0, dtype=w.dtype)
        parts = [zeros if p % apart or p >= reach else w.narrow(axis, p // apart, 1) for p in places]
        w, sizes_ = call("concat", *parts, axis=axis), [*sizes_, step, taps]
    (high, rows, wide, taps), steps = sizes_, sizes_[0] * sizes_[2]
    joined = w.reshape(groups, channels // groups, columns, high, rows, wide, taps).permute(0, 2, 3, 5, 1, 4, 6)
    joined = joined.reshape(groups * columns * steps, channels // groups, rows, taps)
    shift = None if bias is None else call("repeat", bias, repeats=steps, axis=0)
    y = call("conv2d", floating(x), joined, shift, padding=tuple(padding), groups=groups)
    images, _, lines, places_ = y.shape
    y = y.reshape(images, groups * columns, high, wide, lines, places_).permute(0, 1, 4, 2, 5, 3)
    y = y.reshape(images, groups * columns, lines * high, places_ * wide)
    for axis, start, length in cut:
        y = y.narrow(axis, start, length)
    y = y.squeeze(2) if spatial == 1 else y
    return y if batched else y.squeeze(0)  # type: ignore[no-any-return]


def conv_transpose1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """The transpose of conv1d: each element of a sequence adds its multiple of a weight [in, out / groups, size]."""
    window = stride, padding, output_padding, dilation
    return _conv_transpose("conv_transpose1d", 1, input, weight, bias, groups, *window)


def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """The transpose of conv2d: each element of an image adds its multiple of a weight [in, out / groups, h, w]."""
    window = stride, padding, output_padding, dilation
    return _conv_transpose("conv_transpose2d", 2, input, weight, bias, groups, *window)


# -- pools ---------------------------------------------------------------------------------------------


def _pool(
    name: str,
    kind: str,
    spatial: int,
    input: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: bool,
    **more: Any,
) -> Tensor:
    x, batched = _batched(name, input, spatial)
    size = numbers(name, "kernel_size", kernel, spatial)
    step = size if stride is None or stride == () else numbers(name, "stride", stride, spatial)
    apart, before = (numbers(name, n, v, spatial) for n, v in (("dilation", dilation), ("padding", padding)))
    if any(s < 1 for s in step):
        raise ArgumentError(f"{name}: the stride must be 1 or more, got {stride!r}")
    around: list[int] = []
    for axis in range(spatial):
        n, reach = x.shape[axis - spatial], apart[axis] * (size[axis] - 1) + 1
        after = _ceiled(name, n, reach, step[axis], before[axis]) if ceil else before[axis]
        around += [before[axis], after]
    if spatial == 1:
        x, size, step, apart, around = x.unsqueeze(-2), (1, *size), (1, *step), (1, *apart), [0, 0, *around]
    y = call("pool2d", x, kind=kind, kernel=size, stride=step, padding=tuple(around), dilation=apart, **more)
    y = y.squeeze(-2) if spatial == 1 else y
    return y if batched else y.squeeze(0)  # type: ignore[no-any-return]


def _ceiled(name: str, size: Dim, reach: int, step: int, before: int) -> int:
    """The padding at the end with which a last window that is not whole counts too; it must begin before the end."""
    if isinstance(size, Expr):
        if before + step - 1 >= reach:
            raise ArgumentError(
                f"{name}: ceil_mode with stride {step} and padding {before} over a symbolic size {size}",
                why="whether the last window counts depends on the size",
                fix="give a fixed size, or a kernel of at least stride + padding",
            )
        return before + step - 1
    windows = -(-(size + 2 * before - reach) // step) + 1
    windows -= (windows - 1) * step >= size + before
    return max(0, (windows - 1) * step + reach - size - before)


def _no_indices(name: str, return_indices: bool) -> None:
    if return_indices:
        raise ArgumentError(f"{name}: return_indices=True is not supported", why="a pool gives values only")


def max_pool1d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """The largest value of each window of a sequence."""
    _no_indices("max_pool1d", return_indices)
    return _pool("max_pool1d", "max", 1, input, kernel_size, stride, padding, dilation, ceil_mode)


def max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """The largest value of each window of an image."""
    _no_indices("max_pool2d", return_indices)
    return _pool("max_pool2d", "max", 2, input, kernel_size, stride, padding, dilation, ceil_mode)


def avg_pool1d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The average of each window of a sequence."""
    x = floating(as_tensor(input))
    return _pool("avg_pool1d", "avg", 1, x, kernel_size, stride, padding, 1, ceil_mode, include_pad=count_include_pad)


def avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The average of each window of an image; `divisor_override` divides in place of the number of elements."""
    if divisor_override == 0:
        raise ArgumentError("avg_pool2d: divisor_override must not be 0")
    x, more = floating(as_tensor(input)), {"include_pad": count_include_pad, "divisor": divisor_override}
    return _pool("avg_pool2d", "avg", 2, x, kernel_size, stride, padding, 1, ceil_mode, **more)


def _adaptive(name: str, kind: str, spatial: int, input: Any, output_size: Any) -> Tensor:
    x, batched = _batched(name, input, spatial)
    given = tuple(output_size) if isinstance(output_size, tuple | list) else (output_size,)
    given = given * spatial if len(given) == 1 else given
    if len(given) != spatial:
        raise ArgumentError(f"{name}: output_size must be a size or {spatial} of them, got {output_size!r}")
    size = tuple(x.shape[i - spatial] if n is None else n for i, n in enumerate(given))
    x = x.unsqueeze(-2) if spatial == 1 else x
    y = call("adaptive_pool2d", x, kind=kind, size=(1, *size) if spatial == 1 else size)
    y = y.squeeze(-2) if spatial == 1 else y
    return y if batched else y.squeeze(0)  # type: ignore[no-any-return]


def adaptive_avg_pool1d(input: Any, output_size: Any) -> Tensor:
    """The averages of so many windows that cover a sequence evenly."""
    return _adaptive("adaptive_avg_pool1d", "avg", 1, floating(as_tensor(input)), output_size)


def adaptive_avg_pool2d(input: Any, output_size: Any) -> Tensor:
    """The averages of so many windows that cover an image evenly."""
    return _adaptive("adaptive_avg_pool2d", "avg", 2, floating(as_tensor(input)), output_size)


def adaptive_max_pool1d(input: Any, output_size: Any, return_indices: bool = False) -> Tensor:
    """The largest values of so many windows that cover a sequence evenly."""
    _no_indices("adaptive_max_pool1d", return_indices)
    return _adaptive("adaptive_max_pool1d", "max", 1, input, output_size)


def adaptive_max_pool2d(input: Any, output_size: Any, return_indices: bool = False) -> Tensor:
    """The largest values of so many windows that cover an image evenly."""
    _no_indices("adaptive_max_pool2d", return_indices)
    return _adaptive("adaptive_max_pool2d", "max", 2, input, output_size)


# -- resampling ----------------------------------------------------------------------------------------

_MODES = {"nearest": (1, 2), "nearest-exact": (1, 2), "linear": (1,), "bilinear": (2,), "area": (1, 2)}


def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """A sequence or an image [batch, channels, …] in another size: by the nearest element, linearly, or by averages."""
    x = as_tensor(input)
    spatial = x.ndim - 2
    if spatial not in _MODES.get(mode, ()):
        known = ", ".join(m for m, ranks in _MODES.items() if spatial in ranks) or "none"
        raise ArgumentError(f"interpolate: mode={mode!r} does not fit an input {x.type}; those that do: {known}")
    if antialias:
        raise ArgumentError("interpolate: antialias=True is not supported")
    if align_corners is not None and "linear" not in mode:
        raise ArgumentError(f"interpolate: align_corners is for linear modes, not for mode={mode!r}")
    if (size is None) == (scale_factor is None):
        raise ArgumentError("interpolate: give either size or scale_factor")
    axes = range(2, x.ndim)
    if size is not None:
        sizes = tuple(size) if isinstance(size, tuple | list) else (size,) * spatial
        factors: tuple[float | None, ...] = (None,) * spatial
    else:
        factors = tuple(scale_factor) if isinstance(scale_factor, tuple | list) else (scale_factor,) * spatial
        sizes = tuple(_scaled(x.shape[a], float(f)) for a, f in zip(axes, factors, strict=False) if f is not None)
        factors = (None,) * spatial if recompute_scale_factor else factors
    if len(sizes) != spatial or len(factors) != spatial:
        raise ArgumentError(
            f"interpolate: an input {x.type} takes {spatial} sizes or factors, got {size or scale_factor}"
        )
    if mode == "area":
        return (adaptive_avg_pool2d if spatial == 2 else adaptive_avg_pool1d)(x, sizes)
    changed = [(a, n, f) for a, n, f in zip(axes, sizes, factors, strict=True) if not equal(n, x.shape[a])]
    if "linear" not in mode:
        for axis, n, factor in changed:
            x = _nearest(x, axis, n, factor, 0.5 if mode == "nearest-exact" else 0.0)
        return x
    x = floating(x)
    y = x if x.dtype == f64 or not changed else x.to(f32)
    for axis, n, factor in changed:
        y = _linear(y, axis, n, factor, bool(align_corners))
    return y.to(x.dtype)  # type: ignore[no-any-return]


def _scaled(size: Dim, factor: float) -> Dim:
    if isinstance(size, int):
        return math.floor(size * factor)
    if factor >= 1 and factor == int(factor):
        return size * int(factor)
    if 0 < factor < 1 and 1 / factor == int(1 / factor):
        return size // int(1 / factor)
    raise ArgumentError(
        f"interpolate: scale_factor={factor} of a symbolic size {size}",
        why="sizes are polynomials of symbols with whole numbers",
        fix="give a whole factor, or one over a whole number, or a size",
    )


def _ratio(size: int, wanted: int, factor: float | None, kind: Any) -> Any:
    """Elements of the input for one of the output, as PyTorch rounds it."""
    return kind(1.0 / factor) if factor else kind(size) / kind(wanted)


def _nearest(x: Tensor, axis: int, wanted: Dim, factor: float | None, shift: float) -> Tensor:
    size = x.shape[axis]
    if isinstance(size, int) and isinstance(wanted, int):
        ratio = _ratio(size, wanted, factor, np.float32)
        places = np.floor((np.arange(wanted, dtype=np.float32) + np.float32(shift)) * ratio).astype(np.int64)
        if not shift and wanted == 2 * size:
            places = np.arange(wanted) // 2
        return call("gather", x, np.minimum(places, size - 1), axis=axis)  # type: ignore[no-any-return]
    times = divide_exactly(wanted, size)  # copies of each
    if isinstance(times, int):
        return call("repeat", x, repeats=times, axis=axis)  # type: ignore[no-any-return]
    if factor and factor < 1 and not shift:
        step = round(1 / factor)
        return call("slice", x, axis=axis, start=0, length=wanted, step=step)  # type: ignore[no-any-return]
    raise ArgumentError(
        f"interpolate: the nearest of {size} elements for {wanted} places",
        why="their ratio is not known before a call",
        fix="give a whole scale_factor, or fixed sizes",
    )


def _linear(x: Tensor, axis: int, wanted: Dim, factor: float | None, corners: bool) -> Tensor:
    size = x.shape[axis]
    wide, kind = x.dtype, x.dtype.numpy.type
    shape = (-1,) + (1,) * (x.ndim - 1 - axis)
    if isinstance(size, int) and isinstance(wanted, int):
        places = np.arange(wanted, dtype=kind)
        if corners:
            at = places * (kind(size - 1) / kind(wanted - 1) if wanted > 1 else kind(0))
        else:
            at = np.maximum(_ratio(size, wanted, factor, kind) * (places + kind(0.5)) - kind(0.5), kind(0))
        first = np.minimum(at.astype(np.int64), size - 1)
        low, high = first, np.minimum(first + 1, size - 1)
        part: Any = np.clip(at - first.astype(kind), 0, 1).reshape(shape).astype(kind)
    else:
        count = call("arange", length=wanted, dtype=wide)
        whole, target = (call("arange", length=1, start=n, dtype=wide) for n in (size, wanted))
        if corners:
            at_ = count * ((whole - 1) / call("maximum", target - 1, call("full", shape=(), value=1, dtype=wide)))
        else:
            ratio = kind(1.0 / factor).item() if factor else whole / target
            at_ = call("maximum", (count + 0.5) * ratio - 0.5, call("full", shape=(), value=0, dtype=wide))
        last = call("arange", length=1, start=size - 1, dtype=i64)
        low = call("minimum", at_.to(i64), last)
        high = call("minimum", low + 1, last)
        zero, one = (call("full", shape=(), value=v, dtype=wide) for v in (0, 1))
        part = call("minimum", call("maximum", at_ - low.to(wide), zero), one).reshape(wanted, *shape[1:])
    a, b = (call("gather", x, places_, axis=axis) for places_ in (low, high))
    part = as_tensor(part)
    return a * (1 - part) + b * part  # type: ignore[no-any-return]


__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "avg_pool1d",
    "avg_pool2d", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "interpolate", "max_pool1d", "max_pool2d",
]  # fmt: skip
