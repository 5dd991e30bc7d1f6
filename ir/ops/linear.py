"""Products: linear layers and batched matrix multiplication."""

from __future__ import annotations

import numpy as np

from monoplan.ir.dims import equal
from monoplan.ir.opdef import Array, op, require
from monoplan.ir.rules import broadcast, linear_type
from monoplan.ir.types import TensorType, promote


def _linear_rule(x: TensorType, weight: TensorType, bias: TensorType | None) -> TensorType:
    return linear_type(x, weight, bias)


@op(_linear_rule, "linear", low_bit=("weight",))
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x @ weight.T + bias, with weight stored [out, in]."""
    y = np.matmul(x, weight.T)
    return y if bias is None else y + bias


def _matmul_type(a: TensorType, b: TensorType) -> TensorType:
    require(a.rank >= 2 and b.rank >= 2, f"matmul needs operands of rank 2 or more, got {a} and {b}")
    require(equal(a.shape[-1], b.shape[-2]), f"matmul: {a} has {a.shape[-1]} columns, {b} has {b.shape[-2]} rows")
    batch = broadcast([a.shape[:-2], b.shape[:-2]], "matmul")
    dtype = promote(a.dtype, b.dtype)
    require(dtype.is_float or dtype.is_integer, f"matmul needs numbers, got {a} and {b}")
    return TensorType(dtype, (*batch, a.shape[-2], b.shape[-1]))


@op(_matmul_type, "matmul")
def matmul(a: Array, b: Array) -> Array:
    """a @ b over the last two dimensions; leading ones broadcast."""
    return np.matmul(a, b)
