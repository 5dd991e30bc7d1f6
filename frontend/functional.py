"""monoplan.nn.functional: functions over tensors with PyTorch's names and signatures, eager and traced alike.

Pointwise ops and reductions come from the op registry (op_functions.py); what is written out here takes more than its
op does, or is made of several ops. `out=` takes the result over; `inplace=True` (which wins over `out=`) writes it into
the input.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.frontend import arrays, op_functions, windows
from monoplan.frontend.arrays import *  # noqa: F403
from monoplan.frontend.arrays import Sorted, arange, cast, full, where, zeros_like
from monoplan.frontend.op_functions import *  # noqa: F403
from monoplan.frontend.op_functions import (
    amax,
    amin,
    argmax,
    argmin,
    exp,
    floor_divide,
    fmod,
    gelu,
    isinf,
    isnan,
    log,
    mean,
    sigmoid,
    sqrt,
    sum,
    tanh,
    trunc,
    write,
)
from monoplan.frontend.tensor import Tensor, adapted, as_tensor, axes_of, binary, call, floating, full_axis, pointwise
from monoplan.frontend.tensor import matmul as _matmul
from monoplan.frontend.windows import *  # noqa: F403
from monoplan.ir.dims import Expr, equal, same_dims
from monoplan.ir.errors import ArgumentError
from monoplan.ir.tolerances import LARGEST
from monoplan.ir.types import bool_, i64, product

BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


class RopeAlgo(enum.Enum):
    """Which dimensions of a head rotate together."""

    GPT_J = "gpt_j"  # neighbours: (2i, 2i + 1)
    GPT_NEOX = "gpt_neox"  # halves: (i, i + half), as LLaMA does


# -- pointwise, reductions -----------------------------------------------------------------------------


def div(input: Any, other: Any, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
    """a / b; with rounding_mode "floor" or "trunc" a whole number, of integers an integer."""
    if rounding_mode is None:
        return write(pointwise("div", input, other), out)
    if rounding_mode not in ("floor", "trunc"):
        raise ArgumentError(f"div: rounding_mode={rounding_mode!r} is not one of None, floor, trunc")
    a, b = adapted(input, other)
    if rounding_mode == "floor":
        return write(floor_divide(a, b), out)
    if a.dtype.is_float or b.dtype.is_float:
        return write(trunc(pointwise("div", a, b)), out)
    return write(floor_divide(a - fmod(a, b), b), out)


def pow(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a to the power b; of integers an integer, which wraps around as products do."""
    return write(binary("pow", input, other), out)


def matmul(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """Matrix product; one-dimensional operands are treated as in numpy."""
    return write(_matmul(*adapted(input, other)), out)


bmm = matmul


def clamp(input: Any, min: Any = None, max: Any = None, *, out: Tensor | None = None) -> Tensor:
    """The input held between min and max."""
    x = as_tensor(input)
    x = x if min is None else binary("maximum", x, min)
    return write(x if max is None else binary("minimum", x, max), out)


clip = clamp


def round(input: Any, decimals: int = 0, *, out: Tensor | None = None) -> Tensor:
    """The nearest number of so many decimals; halves go to the even one."""
    x = as_tensor(input)
    if not decimals or not x.dtype.is_float:
        return write(call("round", x), out)
    scale = float(10 ** abs(decimals))
    y = call("round", x * scale) / scale if decimals > 0 else call("round", x / scale) * scale
    return write(y, out)


def frac(input: Any, *, out: Tensor | None = None) -> Tensor:
    """What follows the point, with the sign of the input."""
    x = as_tensor(input)
    return write(x - trunc(x), out)


def reciprocal(input: Any, *, out: Tensor | None = None) -> Tensor:
    """1 / input."""
    return write(1 / floating(as_tensor(input)), out)


def square(input: Any, *, out: Tensor | None = None) -> Tensor:
    """input * input."""
    x = as_tensor(input)
    return write(x * x if x.dtype != bool_ else x.to(i64), out)


def lerp(input: Any, end: Any, weight: Any, *, out: Tensor | None = None) -> Tensor:
    """input + weight * (end - input)."""
    x = as_tensor(input)
    return write(x + weight * (as_tensor(end) - x), out)


def logical_and(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a and b; what is not 0 counts as true."""
    return write(call("logical_and", *map(_truth, adapted(input, other))), out)


def logical_or(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a or b; what is not 0 counts as true."""
    return write(call("logical_or", *map(_truth, adapted(input, other))), out)


def logical_xor(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """Either a or b; what is not 0 counts as true."""
    return write(call("ne", *map(_truth, adapted(input, other))), out)


def logical_not(input: Any, *, out: Tensor | None = None) -> Tensor:
    """not x; what is not 0 counts as true."""
    return write(call("logical_not", _truth(as_tensor(input))), out)


def _truth(x: Tensor) -> Tensor:
    return x.to(bool_)  # type: ignore[no-any-return]


def nan_to_num(
    input: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The input with other numbers for NaN and infinities (those of largest size where none are given)."""
    x = as_tensor(input)
    if not x.dtype.is_float:
        return write(x, out)
    largest = LARGEST[x.dtype.name]
    y = where(isnan(x), nan, x)
    y = where(x == math.inf, largest if posinf is None else posinf, y)
    return write(where(x == -math.inf, -largest if neginf is None else neginf, y), out)


# -- reductions ----------------------------------------------------------------------------------------


def max(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest element; along a dimension with its index, the first of equals; or the larger of two tensors."""
    return _extreme(input, dim, keepdim, amax, argmax, "maximum")


def min(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The smallest element; along a dimension with its index, the first of equals; or the smaller of two tensors."""
    return _extreme(input, dim, keepdim, amin, argmin, "minimum")


def _extreme(input: Any, dim: Any, keepdim: bool, reduce: Any, place: Any, pair: str) -> Any:
    x = as_tensor(input)
    if dim is None:
        return reduce(x)
    if not isinstance(dim, int):
        if isinstance(dim, tuple | list):
            raise ArgumentError(f"{reduce.__name__[1:]} takes one dimension", fix=f"use F.{reduce.__name__} for {dim}")
        return pointwise(pair, x, dim)
    whole = x.to("u8") if x.dtype == bool_ else x
    return Sorted(reduce(x, dim, keepdim), place(whole, dim, keepdim))


def var(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None
) -> Tensor:
    """The variance over dimensions: squares of distances from the mean, divided by their number less `correction`."""
    return _moments(input, dim, unbiased, keepdim, correction)[0]


def std(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None
) -> Tensor:
    """The square root of the variance."""
    return sqrt(var(input, dim, unbiased, keepdim, correction=correction))


def var_mean(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None
) -> tuple[Tensor, Tensor]:
    """The variance and the mean over dimensions."""
    return _moments(input, dim, unbiased, keepdim, correction)


def std_mean(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None
) -> tuple[Tensor, Tensor]:
    """The square root of the variance, and the mean, over dimensions."""
    squares, middle = _moments(input, dim, unbiased, keepdim, correction)
    return sqrt(squares), middle


def _moments(
    input: Any, dim: Any, unbiased: bool | None, keepdim: bool, correction: float | None
) -> tuple[Tensor, Tensor]:
    x = as_tensor(input)
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    less = float(unbiased) if unbiased is not None else 1.0 if correction is None else float(correction)
    if not x.dtype.is_float:
        raise ArgumentError(f"var and std need floating point numbers, got {x.type}", fix="cast to f32 first")
    axes = axes_of(dim, x.ndim) or None
    over = range(x.ndim) if axes is None else {full_axis(a, x.ndim) for a in axes}
    count = product(x.shape[a] for a in over)
    wide = x.float() if x.dtype.bits == 16 else x  # the mean is not rounded before it is taken away
    middle = mean(wide, axes, True)
    squares = sum((wide - middle) * (wide - middle), axes, keepdim)
    room = count - less if isinstance(count, int) else _less(count, less)
    found = squares / (builtins.max(room, 0.0) if isinstance(room, float) else room)
    middle = middle if keepdim else middle.reshape(found.shape)
    return found.to(x.dtype), middle.to(x.dtype)


def _less(count: Expr, less: float) -> Tensor:
    """A symbolic number of elements less a number, as a tensor: 0 rather than negative."""
    t: Tensor = call("arange", length=1, start=count, dtype=i64).reshape(())
    return pointwise("maximum", t.float() - less, 0.0)  # type: ignore[no-any-return]


def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Tensor:
    """The logarithm of the sum of exponentials over dimensions, without their overflow."""
    x = floating(as_tensor(input))
    axes = axes_of(dim, x.ndim)
    top = amax(x, axes, True)
    top = where(isinf(top), 0.0, top)  # nothing to scale by, and inf - inf is NaN
    total = sum(exp(x - top), axes, keepdim)
    return log(total) + (top if keepdim else top.reshape(total.shape))


def count_nonzero(input: Any, dim: Any = None) -> Tensor:
    """How many elements over dimensions are not 0."""
    return sum(_truth(as_tensor(input)), dim)


def norm(input: Any, p: Any = 2.0, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The p-norm of the elements over dimensions: (sum |x|**p)**(1/p)."""
    x = abs(floating(as_tensor(input)))
    if isinstance(p, str) and p != "fro":
        raise ArgumentError(f"norm: p={p!r} is neither a number nor 'fro'")
    if p == math.inf or p == -math.inf:
        return (amax if p > 0 else amin)(x, dim, keepdim)
    if p in ("fro", 2):
        return sqrt(sum(x * x, dim, keepdim))
    if p == 0:
        return sum(where(x != 0, 1.0, zeros_like(x)), dim, keepdim)
    return sum(x**p, dim, keepdim) ** (1.0 / p) if p != 1 else sum(x, dim, keepdim)


# -- running and sorted --------------------------------------------------------------------------------


def cumsum(input: Any, dim: int, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
    """Running sums along a dimension; of integers and bools in 64 bits."""
    return write(_running("cumsum", _counted(input, dtype), dim), out)


def cumprod(input: Any, dim: int, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
    """Running products along a dimension; of integers and bools in 64 bits."""
    return write(_running("cumprod", _counted(input, dtype), dim), out)


def _counted(input: Any, dtype: Any) -> Tensor:
    x = as_tensor(input)
    return cast(x, dtype) if dtype is not None else x if x.dtype.is_float else cast(x, i64)


def _running(op: str, x: Tensor, dim: int) -> Tensor:
    return call(op, x, axis=dim) if x.ndim else call(op, x.reshape(1), axis=dim).reshape(())  # type: ignore[no-any-return]


def cummax(input: Any, dim: int) -> Sorted:
    """The largest element so far along a dimension, with the index of the last one that is."""
    return _cumulative("cummax", input, dim)


def cummin(input: Any, dim: int) -> Sorted:
    """The smallest element so far along a dimension, with the index of the last one that is."""
    return _cumulative("cummin", input, dim)


def _cumulative(op: str, input: Any, dim: int) -> Sorted:
    x = as_tensor(input)
    if not x.ndim:
        return Sorted(x, full((), 0, dtype=i64))
    axis = full_axis(dim, x.ndim)
    numbers = x.to("u8") if x.dtype == bool_ else x
    values: Tensor = call(op, numbers, axis=axis)
    here = (numbers == values) | isnan(numbers)  # where an element is the extreme so far, its own place is the index
    places = arange(x.shape[axis]).reshape((x.shape[axis], *[1] * (x.ndim - axis - 1)))
    indices: Tensor = call("cummax", where(here, places, full((), 0, dtype=i64)), axis=axis)
    return Sorted(values.to(x.dtype), indices)


def sort(input: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Sorted:
    """Values in order along a dimension, with their indices; always stable."""
    x = as_tensor(input)
    if not x.ndim:
        return Sorted(x, full((), 0, dtype=i64))
    return Sorted(*call("sort", x, axis=dim, descending=descending))


def argsort(input: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The indices that sort a dimension."""
    return sort(input, dim, descending).indices


def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Sorted:
    """The k largest (or smallest) values along a dimension, in order, with their indices; ties go to the lowest."""
    x = as_tensor(input)
    if not x.ndim:
        values, indices = topk(x.reshape(1), k, 0, largest)
        return Sorted(values.reshape(()), indices.reshape(())) if k == 1 else Sorted(values, indices)
    if k == 0:
        nothing = x.narrow(dim, 0, 0)
        return Sorted(nothing, nothing.to(i64))
    return Sorted(*call("topk", x, k=k, axis=dim, largest=largest))


# -- between ranks -------------------------------------------------------------------------------------


def all_reduce(input: Any, world: int = 1) -> Tensor:
    """The sum over all ranks of a tensor-parallel group; the input itself when there is one."""
    return call("all_reduce", input, world=world)  # type: ignore[no-any-return]


def all_gather(input: Any, dim: int = -1, world: int = 1) -> Tensor:
    """The tensors of all ranks joined along a dimension; the input itself when there is one rank."""
    return call("all_gather", input, axis=dim, world=world)  # type: ignore[no-any-return]


# -- activations ---------------------------------------------------------------------------------------


def relu(input: Any, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
    """max(input, 0)."""
    return write(call("relu", input), out, input if inplace else None)


def silu(input: Any, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
    """input * sigmoid(input)."""
    return write(call("silu", floating(as_tensor(input))), out, input if inplace else None)


def gelu_tanh(input: Any, *, out: Tensor | None = None) -> Tensor:
    """gelu with the tanh approximation."""
    return gelu(input, "tanh", out=out)


def _has_none(x: Tensor) -> bool:
    """Whether there are certainly no elements."""
    return 0 in [n for n in x.shape if not isinstance(n, Expr)]


def softmax(input: Any, dim: int = -1, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
    """exp(input) / sum(exp(input)) along a dimension."""
    x = floating(as_tensor(input) if dtype is None else cast(input, dtype))
    if x.ndim == 0 and dim in (0, -1):
        return write(call("softmax", x.reshape(1), axis=0).reshape(()), out)
    return write(x if _has_none(x) else call("softmax", x, axis=dim), out)


def log_softmax(input: Any, dim: int = -1, *, dtype: Any = None) -> Tensor:
    """The logarithm of softmax, without its underflow."""
    x = floating(as_tensor(input) if dtype is None else cast(input, dtype))
    if _has_none(x):
        return x
    shifted = x - amax(x, dim, True)
    return shifted - log(exp(shifted).sum(dim, keepdim=True))


def softmin(input: Any, dim: int = -1, *, dtype: Any = None) -> Tensor:
    """softmax of -input."""
    return softmax(-as_tensor(input), dim, dtype=dtype)


def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """The input, negative_slope times it where it is negative."""
    x = as_tensor(input)
    return _activated(where(x > 0, x, x * negative_slope), input, inplace)


def prelu(input: Any, weight: Any) -> Tensor:
    """The input, weight times it where it is negative; one weight, or one for each channel (dimension 1)."""
    x, w = as_tensor(input), as_tensor(weight)
    if w.ndim == 1:
        w = w.reshape(() if equal(w.shape[0], 1) else (w.shape[0], *[1] * builtins.max(x.ndim - 2, 0)))
    return where(x > 0, x, x * w)


def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """The input, alpha * (exp(input) - 1) where it is negative."""
    x = floating(as_tensor(input))
    return _activated(where(x > 0, x, _less_one(x) * alpha), input, inplace)


def celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """The input, alpha * (exp(input / alpha) - 1) where it is negative."""
    x = floating(as_tensor(input))
    return _activated(where(x > 0, x, _less_one(x / alpha) * alpha), input, inplace)


def selu(input: Any, inplace: bool = False) -> Tensor:
    """elu with the slopes that keep mean 0 and variance 1."""
    x = floating(as_tensor(input))
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return _activated(where(x > 0, x * scale, _less_one(x) * (alpha * scale)), input, inplace)


def _less_one(x: Tensor) -> Tensor:
    """exp(x) - 1 of negative x: by tanh, which loses nothing near 0."""
    half = tanh(x * 0.5)
    return half * 2 / (1 - half)


def mish(input: Any, inplace: bool = False) -> Tensor:
    """input * tanh(log(1 + exp(input)))."""
    x = floating(as_tensor(input))
    wide = x.float() if x.dtype.bits == 16 else x  # n is beyond the range of f16
    # tanh(log(1 + e)) is n / (n + 2) with n = e (e + 2); from 20 on it is 1.
    e = exp(pointwise("minimum", wide, 20.0))
    n = e * (e + 2)
    return _activated((wide * (n / (n + 2))).to(x.dtype), input, inplace)


def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """The input held between min_val and max_val, in its own element type."""
    x = as_tensor(input)
    return _activated(clamp(x, min_val, max_val).to(x.dtype), input, inplace)


def relu6(input: Any, inplace: bool = False) -> Tensor:
    """The input held between 0 and 6."""
    return _activated(clamp(input, 0, 6), input, inplace)


def hardsigmoid(input: Any, inplace: bool = False) -> Tensor:
    """input / 6 + 0.5, held between 0 and 1."""
    x = floating(as_tensor(input))
    return _activated(clamp(x + 3, 0, 6) / 6, input, inplace)


def hardswish(input: Any, inplace: bool = False) -> Tensor:
    """input * hardsigmoid(input)."""
    x = floating(as_tensor(input))
    return _activated(x * clamp(x + 3, 0, 6) / 6, input, inplace)


def threshold(input: Any, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """The input where it is above the threshold, else a value."""
    x = as_tensor(input)
    return _activated(where(x <= threshold, value, x), input, inplace)


def logsigmoid(input: Any) -> Tensor:
    """log(sigmoid(input)), without its underflow."""
    return -pointwise("softplus", -floating(as_tensor(input)), beta=1.0, threshold=20.0)  # type: ignore[no-any-return]


def softsign(input: Any) -> Tensor:
    """input / (1 + |input|)."""
    x = floating(as_tensor(input))
    return x / (1 + abs(x))


def tanhshrink(input: Any) -> Tensor:
    """input - tanh(input)."""
    x = floating(as_tensor(input))
    return x - tanh(x)


def hardshrink(input: Any, lambd: float = 0.5) -> Tensor:
    """The input, 0 where it is not farther than lambd from 0."""
    x = as_tensor(input)
    return where((x >= -lambd) & (x <= lambd), zeros_like(x), x)


def softshrink(input: Any, lambd: float = 0.5) -> Tensor:
    """The input moved towards 0 by lambd."""
    x = as_tensor(input)
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, x * 0))


def glu(input: Any, dim: int = -1) -> Tensor:
    """The first half of a dimension times the sigmoid of the second."""
    x = floating(as_tensor(input))
    size = x.shape[full_axis(dim, x.ndim)]
    if isinstance(size, int) and size % 2:
        raise ArgumentError(f"glu: dimension {dim} of {x.type} must have an even size")
    half = size // 2
    first, second = x.split([half, size - half], dim)
    return first * sigmoid(second)


def _activated(result: Tensor, input: Any, inplace: bool) -> Tensor:
    return write(result, None, input if inplace else None)


def causal_softmax(input: Any, out: Tensor | None = None) -> Tensor:
    """softmax over the last axis of scores [..., queries, keys], where a query sees no later key."""
    return write(call("causal_softmax", floating(as_tensor(input))), out)


def dropout(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """The input itself: inference drops nothing."""
    if not 0.0 <= p <= 1.0:
        raise ArgumentError(f"dropout: p must be a probability, got {p}")
    return as_tensor(input)


# -- layers --------------------------------------------------------------------------------------------


def linear(input: Any, weight: Any, bias: Any = None, *, out: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias, with weight [out_features, in_features]; of integers exact, in their own type."""
    x, w = as_tensor(input), as_tensor(weight)
    if x.dtype.is_integer and w.dtype.is_integer:
        y = matmul(x, w.T)
        return write(y if bias is None else y + as_tensor(bias), out)
    if w.dtype.is_float or x.dtype.is_float:
        x = floating(x)
    return write(call("linear", x, w, bias), out)


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rows of the weight [vocabulary, features] by token id; the options of training are refused."""
    for name, given, only in (
        ("padding_idx", padding_idx, None),
        ("max_norm", max_norm, None),
        ("norm_type", norm_type, 2.0),
        ("scale_grad_by_freq", scale_grad_by_freq, False),
        ("sparse", sparse, False),
    ):
        if given != only:
            fix = "nn.Embedding(padding_idx=…) keeps a row of zeros" if name == "padding_idx" else ""
            why = "it matters for training only" if name != "max_norm" else "rows are not renormalized here"
            raise ArgumentError(f"embedding: {name}={given!r} is not supported", why=why, fix=fix)
    return write(call("embedding", input, weight), out)


def rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """input / sqrt(mean(input**2) + eps) * weight, over the trailing dimensions `normalized_shape`."""
    x, dims = _normalized("rms_norm", input, normalized_shape, weight)
    return write(call("rms_norm", x, weight, eps=eps, dims=dims), out)


def layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias, over the trailing dimensions `normalized_shape`."""
    x, dims = _normalized("layer_norm", input, normalized_shape, weight, bias)
    return write(call("layer_norm", x, weight, bias, eps=eps, dims=dims), out)


def group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """Groups of channels (dimension 1) with mean 0 and variance 1, then weight and bias for each channel."""
    x = floating(as_tensor(input))
    if x.ndim < 2 or not isinstance(x.shape[1], int) or num_groups < 1 or x.shape[1] % num_groups:
        raise ArgumentError(f"group_norm: {num_groups} groups do not divide the channels (dimension 1) of {x.type}")
    apart = x.reshape((x.shape[0], num_groups, product(x.shape[1:]) // num_groups))
    y: Tensor = call("layer_norm", apart, eps=eps, dims=1).reshape(x.shape)
    return write(_per_channel(y, weight, bias), out)


def _per_channel(x: Tensor, weight: Any, bias: Any) -> Tensor:
    """x * weight + bias, with one of each for a channel (dimension 1)."""
    for op, p in (("mul", weight), ("add", bias)):
        if p is not None:
            p = as_tensor(p)
            if p.ndim != 1 or not equal(p.shape[0], x.shape[1]):
                raise ArgumentError(f"{p.type} is not one number for each channel (dimension 1) of {x.type}")
            x = pointwise(op, x, p.reshape((p.shape[0], *[1] * (x.ndim - 2))))
    return x


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(input - running_mean) / sqrt(running_var + eps) * weight + bias for each channel (dimension 1)."""
    if training or running_mean is None or running_var is None:
        raise ArgumentError(
            "batch_norm computes no statistics of the batch",
            why="inference only",
            fix="give running_mean and running_var, and training=False",
        )
    x = floating(as_tensor(input))
    if x.ndim < 2:
        raise ArgumentError(f"batch_norm takes [batch, channels, …], got {x.type}")
    # What depends on weights alone is computed once: the plan has one product and one sum.
    scale = 1 / sqrt(as_tensor(running_var) + eps)
    scale = scale if weight is None else scale * as_tensor(weight)
    shift = -as_tensor(running_mean) * scale
    shift = shift if bias is None else shift + as_tensor(bias)
    return _per_channel(x, scale, shift).to(x.dtype)  # type: ignore[no-any-return]


def instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each channel (dimension 1) of each sample with mean 0 and variance 1, then weight and bias for each channel."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x = floating(as_tensor(input))
    if x.ndim < 3 or not isinstance(x.shape[1], int):
        raise ArgumentError(f"instance_norm takes [batch, channels, …], got {x.type}")
    return group_norm(x, x.shape[1], weight, bias, eps)


def normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, *, out: Tensor | None = None) -> Tensor:
    """The input divided by its p-norm over dimensions (by eps where that is smaller)."""
    x = floating(as_tensor(input))
    return write(x / clamp(norm(x, p, dim, True), eps), out)


def _normalized(name: str, input: Any, normalized_shape: Any, *parameters: Any) -> tuple[Tensor, int]:
    x = floating(as_tensor(input))
    shape = tuple(normalized_shape) if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
    n = len(shape)
    parts = [("weight", as_tensor(p).shape) for p in parameters if p is not None]
    for what, found in (("input", x.shape[-n:] if n else ()), *parts):
        if not n or not same_dims(found, shape):
            side = "ends with" if what == "input" else "has"
            raise ArgumentError(
                f"{name}: normalized_shape is {list(shape)}, the {what} {side} the shape {list(found)}",
                fix="normalized_shape must be the last dimensions of the input and the shape of the weight",
            )
    return x, n


def route(
    scores: Any,
    bias: Any = None,
    *,
    k: int,
    score: str = "softmax",
    normalize: bool = True,
    groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.0,
    gates: int = 0,
) -> tuple[Tensor, Tensor]:
    """The k best experts of each row of scores [rows, experts]: shares f32 and numbers i64, [rows, k] each.

    Shares are a softmax of the scores or each one's sigmoid, divided by their sum if `normalize`, times `scale`. A bias
    counts for the choice alone; of `groups` of experts the kept_groups with the best one are chosen from. The last
    `gates` scores are those of shared experts: their sigmoids are shares behind the others, [rows, k + gates].
    """
    given = {"k": k, "score": score, "normalize": normalize, "groups": groups, "kept_groups": kept_groups}
    given["gates"] = gates
    share, ids = call("route", scores, bias, **given, scale=float(scale))
    return share, ids


def expert_linear(
    x: Any, weight: Any, ids: Any, up: Any = None, bias: Any = None, up_bias: Any = None, *, gate: str = ""
) -> Tensor:
    """Products of rows [rows, in] with the matrices of weight [experts, out, in] that ids [rows, choices] name.

    The result is [rows, choices, out]; rows may be [rows, choices, in] as well. Biases [experts, out] are added to the
    products. With a gate (silu, gelu or relu) the result is gate(product) times the product by `up`; or it is an
    expression of both, such as "mul(silu(x0), x1)". Only the matrices that ids name are read.
    """
    return call("expert_linear", x, weight, ids, up, bias, up_bias, gate=gate)  # type: ignore[no-any-return]


def rope(
    x: Any,
    pos_ids: Any,
    sin_table: Any,
    cos_table: Any,
    algo: RopeAlgo | str = RopeAlgo.GPT_NEOX,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates x [(batch,) seq, heads, dim] by the angles of positions [seq] or [batch, seq]."""
    kind = algo.value if isinstance(algo, RopeAlgo) else algo
    return write(call("rope", x, pos_ids, sin_table, cos_table, algo=kind), out)


# -- attention -----------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    window: int | None = None,
    past: Any = None,
    table: Any = None,
    sinks: Any = None,
    causal_alignment: str = "lower_right",
) -> Tensor:
    """softmax(query key' * scale) value, on [batch, heads, seq, dim]; the batch may be missing.

    Heads of key and value may be shared by groups of query heads. The last query stands at the last key;
    causal_alignment="upper_left" puts the first at the first, as PyTorch does. With `past` [batch], query i of row b
    stands at past[b] + i, and keys from past[b] + queries on are not seen. With a `table` [batch, pages] as well, key
    and value are pages [number, heads, size, dim], and row b has those that table[b] names, in that order. `window`
    hides keys that lie that far back; `softcap` makes a score c * tanh(score / c); `sinks` [heads] are scores of a key
    more, which every query sees and whose value is 0.
    """
    if dropout_p:
        raise ArgumentError(f"attention: dropout_p={dropout_p} is not supported", why="inference only")
    q, k, v = (as_tensor(t) for t in (query, key, value))
    attrs = {"causal": is_causal, "scale": scale, "softcap": softcap, "window": window}
    if causal_alignment not in ("lower_right", "upper_left"):
        raise ArgumentError(f"attention: causal_alignment={causal_alignment!r} is not one of lower_right, upper_left")
    if causal_alignment == "upper_left" and is_causal and past is None:
        if q.ndim < 4:  # positions belong to sequences of a batch
            q, k, v = (t.reshape((*[1] * (4 - t.ndim), *t.shape)) for t in (q, k, v))
            y = call("attention", q, k, v, attn_mask, full((1,), 0, dtype=i64), None, sinks, **attrs)
            return y.reshape(y.shape[4 - as_tensor(query).ndim :])  # type: ignore[no-any-return]
        past = full((q.shape[0],), 0, dtype=i64)
    if q.ndim == 2:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        return call("attention", q, k, v, attn_mask, past, None, sinks, **attrs).squeeze(0)  # type: ignore[no-any-return]
    return call("attention", q, k, v, attn_mask, past, table, sinks, **attrs)  # type: ignore[no-any-return]


def kv_update(cache: Any, rows: Any, lengths: Any, valid: Any = None, table: Any = None) -> Tensor:
    """The cache [batch, heads, capacity, dim] with rows [batch, seq, heads, dim] from lengths[b] on; with a `table`
    the cache is pages [number, heads, size, dim], as in scaled_dot_product_attention."""
    return call("kv_update", cache, rows, lengths, valid, table)  # type: ignore[no-any-return]


# -- sampling ------------------------------------------------------------------------------------------


def random_sample(
    logits: Any,
    random_val: Any,
    topp: Any,
    topk: Any,
    temperature: Any,
    *,
    min_p: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """A token id for each row of logits [..., vocabulary], drawn by random_val in [0, 1).

    Logits are divided by the temperature (0: the best id); then the topk best are kept (0: all), the smallest
    set that reaches topp, and those of at least min_p times the best. Controls are numbers, or tensors with
    one value for each row.
    """
    given = {"random_val": random_val, "topp": topp, "topk": topk, "temperature": temperature, "min_p": min_p}
    controls = [None if v is None else _control(name, v) for name, v in given.items()]
    return write(call("random_sample", floating(as_tensor(logits)), *controls), out)


def _control(name: str, v: Any) -> Tensor:
    """A control of the sampler as a tensor of the type that the op wants."""
    if isinstance(v, Tensor | np.ndarray | Expr):
        t = as_tensor(v)
        return t if name == "topk" else floating(t)
    if name == "topk":
        return Tensor(v, i64)
    number = float(v)
    if math.isnan(number) or (name == "random_val" and not 0 <= number < 1):
        raise ArgumentError(f"random_sample: {name} must be a number, random_val one in [0, 1); got {v}")
    # A float64 just below 1 would round up to 1 in f32, and could draw a token of probability zero.
    return Tensor(np.float32(builtins.min(number, BELOW_ONE) if name == "random_val" else number))


def repetition_penalty(logits: Any, history: Any, counts: Any, penalty: Any) -> Tensor:
    """Logits [batch, vocabulary] of ids in history[b, :counts[b]] made less likely by penalty[b]."""
    x = floating(as_tensor(logits))
    p = as_tensor(penalty)
    p = p.expand((x.shape[0],)) if p.ndim == 0 else p
    return call("repetition_penalty", x, history, counts, floating(p))  # type: ignore[no-any-return]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The function of an op that was defined after this module was imported."""
        return getattr(op_functions, name)


__all__ = [
    "RopeAlgo", "all_gather", "all_reduce", "argsort", "batch_norm", "bmm", "causal_softmax", "celu", "clamp", "clip",
    "count_nonzero", "cummax", "cummin", "cumprod", "cumsum", "div", "dropout", "elu", "embedding", "expert_linear",
    "frac", "gelu_tanh", "glu", "group_norm", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "instance_norm",
    "kv_update", "layer_norm", "leaky_relu", "lerp", "linear", "log_softmax", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logsigmoid", "logsumexp", "matmul", "max", "min", "mish", "nan_to_num", "norm",
    "normalize", "pow", "prelu", "random_sample", "reciprocal", "relu", "relu6", "repetition_penalty", "rms_norm",
    "rope", "round", "route", "scaled_dot_product_attention", "selu", "silu", "softmax", "softmin", "softshrink",
    "softsign", "sort", "square", "std", "std_mean", "tanhshrink", "threshold", "topk", "var", "var_mean",
]  # fmt: skip
__all__ += arrays.__all__
__all__ += op_functions.__all__ + windows.__all__

# Layers and exchanges between ranks are no methods; all other functions of one tensor are.
_NO_METHODS = ("batch_norm", "dropout", "embedding", "group_norm", "instance_norm", "layer_norm", "linear", "rms_norm",
               "all_gather", "all_reduce")  # fmt: skip
op_functions.publish_methods(
    {
        name: globals()[name]
        for name in __all__
        if name not in (*_NO_METHODS, *windows.__all__)
        and next(iter(inspect.signature(globals()[name]).parameters), "") == "input"
    }
)
