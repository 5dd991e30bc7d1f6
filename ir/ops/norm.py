"""Normalizations over trailing dimensions."""

from __future__ import annotations

import numpy as np

from monoplan.ir.opdef import Array, op
from monoplan.ir.rules import norm_type
from monoplan.ir.types import TensorType


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
