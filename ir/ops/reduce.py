"""Reductions over any axes, cumulative sums, and softmax."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.opdef import normalize_axis, op, require
from monoplan.ir.rules import norm_type, normalized_axes, reduced_shape, reduction, require_some
from monoplan.ir.types import Array, DType, TensorType, bool_, i64, u64


def _axes(x: Array, axes: Any) -> tuple[int, ...]:
    return normalized_axes(axes, x.ndim, "reduce")


def _sum_dtype(dtype: DType) -> DType:
    return dtype if dtype.is_float else u64 if dtype.kind == "u" else i64


@reduction(result=_sum_dtype)
def sum_(x: Array, *, axes: tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """The sum over axes (None: all); integers and bools are summed in 64 bits."""
    return np.sum(x, axis=_axes(x, axes), keepdims=keepdims)


@reduction(floats=True)
def mean(x: Array, *, axes: tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """The mean over axes (None: all)."""
    return np.mean(x, axis=_axes(x, axes), keepdims=keepdims)


@reduction(numbers=True, some=True)
def max_(x: Array, *, axes: tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """The largest element over axes (None: all); NaN wins."""
    return np.max(x, axis=_axes(x, axes), keepdims=keepdims)


@reduction(numbers=True, some=True)
def min_(x: Array, *, axes: tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """The smallest element over axes (None: all); NaN wins."""
    return np.min(x, axis=_axes(x, axes), keepdims=keepdims)


@reduction(result=_sum_dtype)
def prod(x: Array, *, axes: tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """The product over axes (None: all); of integers and bools in 64 bits."""
    return np.prod(x, axis=_axes(x, axes), keepdims=keepdims)


@reduction(result=lambda dtype: bool_)
def any_(x: Array, *, axes: tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """Whether one element over axes (None: all) is not 0."""
    return np.any(x != 0, axis=_axes(x, axes), keepdims=keepdims)


@reduction(result=lambda dtype: bool_)
def all_(x: Array, *, axes: tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """Whether no element over axes (None: all) is 0."""
    return np.all(x != 0, axis=_axes(x, axes), keepdims=keepdims)


def _place_type(name: str) -> Any:
    def rule(x: TensorType, *, axis: int | None, keepdims: bool) -> TensorType:
        require(x.dtype != bool_, f"{name} needs numbers, got {x}")
        axes = normalized_axes(axis, x.rank, name)
        require_some(name, x, axes)
        return TensorType(i64, reduced_shape(x, axes, keepdims))

    return rule


@op(_place_type("argmin"), "reduce", bounded=True)
def argmin(x: Array, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The index of the smallest element along an axis (None: of all elements); ties go to the lowest."""
    return np.argmin(x, axis=axis, keepdims=keepdims)


@op(_place_type("argmax"), "reduce", bounded=True)
def argmax(x: Array, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The index of the largest element along an axis (None: of all elements); ties go to the lowest."""
    return np.argmax(x, axis=axis, keepdims=keepdims)


def _float_axis_type(name: str) -> Any:
    def rule(x: TensorType, *, axis: int) -> TensorType:
        require(x.dtype.is_float, f"{name} needs floating point operands, got {x}")
        require_some(name, x, (normalize_axis(axis, x.rank, name),))
        return x

    return rule


@op(_float_axis_type("softmax"), "softmax", bounded=True)
def softmax(x: Array, *, axis: int = -1) -> Array:
    """exp(x - max) / sum(exp(x - max)) along an axis."""
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def _causal_type(x: TensorType) -> TensorType:
    require(x.dtype.is_float and x.rank >= 2, f"causal_softmax needs floating point scores [..., query, key], got {x}")
    require_some("causal_softmax", x, (x.rank - 1,))
    return x


@op(_causal_type, "softmax", bounded=True)
def causal_softmax(x: Array) -> Array:
    """softmax over the last axis, where query i of S sees keys up to i + (T - S)."""
    rows, columns = x.shape[-2:]
    visible = np.arange(columns) <= np.arange(rows)[:, None] + (columns - rows)
    masked = np.where(visible, x, -np.inf)
    top = np.max(masked, axis=-1, keepdims=True)
    e = np.where(visible, np.exp(masked - np.where(np.isneginf(top), 0, top)), 0)
    total = np.maximum(np.sum(e, axis=-1, keepdims=True), np.finfo(x.dtype).tiny)
    return np.where(visible, e / total, 0)  # also beside a NaN


def _running_type(name: str) -> Any:
    def rule(x: TensorType, *, axis: int) -> TensorType:
        require(x.dtype != bool_, f"{name} needs numbers, got {x}")
        normalize_axis(axis, x.rank, name)
        return x

    return rule


def _running(x: Array) -> Any:
    return np.float64 if x.dtype.kind == "f" else x.dtype


@op(_running_type("cumsum"), "scan")
def cumsum(x: Array, *, axis: int = -1) -> Array:
    """Running sums along an axis; of floats in f64, rounded once each."""
    return np.cumsum(x, axis=axis, dtype=_running(x)).astype(x.dtype, copy=False)


@op(_running_type("cumprod"), "scan")
def cumprod(x: Array, *, axis: int = -1) -> Array:
    """Running products along an axis; of floats in f64, rounded once each."""
    return np.cumprod(x, axis=axis, dtype=_running(x)).astype(x.dtype, copy=False)


@op(_running_type("cummax"), "scan")
def cummax(x: Array, *, axis: int = -1) -> Array:
    """The largest element so far along an axis; NaN wins."""
    return np.maximum.accumulate(x, axis=axis)


@op(_running_type("cummin"), "scan")
def cummin(x: Array, *, axis: int = -1) -> Array:
    """The smallest element so far along an axis; NaN wins."""
    return np.minimum.accumulate(x, axis=axis)


# Normalizations over trailing dimensions.


def _rms_type(x: TensorType, weight: TensorType | None, *, eps: float, dims: int) -> TensorType:
    return norm_type(x, weight, None, dims, "rms_norm")


@op(_rms_type, "norm")
def rms_norm(x: Array, weight: Array | None = None, *, eps: float = 1e-5, dims: int = 1) -> Array:
    """x / sqrt(mean(x**2) + eps) * weight, over the last `dims` dimensions."""
    axes = tuple(range(x.ndim - dims, x.ndim))
    y = x / np.sqrt(np.mean(x * x, axis=axes, keepdims=True) + eps)
    return y if weight is None else y * weight


def _layer_type(
    x: TensorType, weight: TensorType | None, bias: TensorType | None, *, eps: float, dims: int
) -> TensorType:
    return norm_type(x, weight, bias, dims, "layer_norm")


@op(_layer_type, "norm")
def layer_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float = 1e-5, dims: int = 1
) -> Array:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last `dims` dimensions."""
    axes = tuple(range(x.ndim - dims, x.ndim))
    centred = x - np.mean(x, axis=axes, keepdims=True)
    y = centred / np.sqrt(np.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
