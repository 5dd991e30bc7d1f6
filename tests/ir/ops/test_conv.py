"""Convolutions and pools against loops over single elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from monoplan.ir.dims import as_dim
from monoplan.ir.types import FLOATS, DType, f32, tensor_type
from tests.ir.support import infer, refuses, run
from tests.tolerances import check


def loops(x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> np.ndarray:
    """A convolution one product at a time, without a padded copy."""
    images, channels, *size = x.shape
    columns, depth, *kernel = w.shape
    around = (padding[0] + padding[1], padding[2] + padding[3])
    out = [(size[i] + around[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)]
    y = np.zeros((images, columns, *out))
    for n, o, i, j in np.ndindex(y.shape):
        terms = [0.0 if bias is None else float(bias[o])]
        for c, a, b in np.ndindex(depth, *kernel):
            row, column = i * stride[0] - padding[0] + a * dilation[0], j * stride[1] - padding[2] + b * dilation[1]
            if 0 <= row < size[0] and 0 <= column < size[1]:
                terms.append(float(x[n, o // (columns // groups) * depth + c, row, column]) * float(w[o, c, a, b]))
        y[n, o, i, j] = math.fsum(terms)
    return y


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("weight", "options"),
    [
        ((4, 6, 3, 2), {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}),
        ((4, 3, 2, 3), {"stride": (2, 1), "padding": (1, 0, 2, 3), "dilation": (1, 2), "groups": 2}),
        ((12, 1, 3, 3), {"stride": (1, 3), "padding": (2, 2, 1, 1), "dilation": (2, 1), "groups": 6}),
    ],
    ids=["plain", "groups", "depthwise"],
)
def test_conv2d(dtype: DType, weight: tuple[int, ...], options: dict[str, Any], rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 6, 5, 7)).astype(dtype.numpy)
    w = rng.standard_normal(weight).astype(dtype.numpy)
    bias = rng.standard_normal(weight[0]).astype(dtype.numpy)
    for b in (None, bias):
        wanted = loops(x, w, b, *options.values())
        check(run("conv2d", x, w, b, **options), wanted, dtype, "matmul")
        tail = run("fused_conv2d", x, w, b, bias[:, None, None], **options, expr="relu(add(x0, x1))")
        check(tail, np.maximum(wanted + bias.astype(np.float64)[:, None, None], 0), dtype, "matmul")


def test_conv2d_types() -> None:
    x, w = tensor_type("f32", "n", 6, "h", "w"), tensor_type("f32", 8, 3, 3, 3)
    options = {"stride": (2, 2), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 2}
    made = infer("conv2d", x, w, None, **options)
    assert made.shape == (as_dim("n"), 8, as_dim("(h-1)//2+1"), as_dim("(w-1)//2+1"))
    refuses("takes 3", "conv2d", x, w, None, **{**options, "groups": 1})
    refuses("groups=3 does not divide the 8", "conv2d", x, w, None, **{**options, "groups": 3})
    refuses("stride must be numbers of at least 1", "conv2d", x, w, None, **{**options, "stride": (0, 1)})
    refuses("padding has four", "conv2d", x, w, None, **{**options, "padding": (1, 1)})
    refuses("bias .* does not fit", "conv2d", x, w, tensor_type("f32", 7), **options)
    refuses("four dimensions", "conv2d", tensor_type("f32", 6, 5, 5), w, None, **options)
    refuses("floating point", "conv2d", tensor_type("i32", 1, 6, 5, 5), tensor_type("i32", 8, 3, 3, 3), None, **options)
    small = tensor_type("f32", 1, 6, 5, 2)
    refuses(r"a window of 3 does not fit 2 \+ 0 \+ 0", "conv2d", small, w, None, **{**options, "padding": (0, 0, 0, 0)})


def window(x: np.ndarray, kind: str, rows: list[int], columns: list[int]) -> tuple[float, int]:
    """The sum or the maximum of those places of one image that lie in it, and how many do."""
    inside = [float(x[r, c]) for r in rows for c in columns if 0 <= r < x.shape[0] and 0 <= c < x.shape[1]]
    return (max(inside) if kind == "max" else math.fsum(inside)), len(inside)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("divisor", [None, 5])
def test_pool2d(dtype: DType, kind: str, include_pad: bool, divisor: int | None, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 7, 8)).astype(dtype.numpy)
    kernel, stride, padding, apart = (3, 2), (2, 3), (1, 2, 1, 1), (2, 1) if kind == "max" else (1, 1)
    got = run(
        "pool2d", x, kind=kind, kernel=kernel, stride=stride, padding=padding, dilation=apart,
        include_pad=include_pad, divisor=divisor,
    )  # fmt: skip
    wanted = np.empty(got.shape)
    for n, i, j in np.ndindex(got.shape):
        top, left = i * stride[0] - padding[0], j * stride[1] - padding[2]
        rows, columns = ([s + k * d for k in range(n_)] for s, n_, d in zip((top, left), kernel, apart, strict=True))
        value, count = window(x[n], kind, rows, columns)
        if kind == "avg":
            padded = [sum(p < n_ + 1 for p in places) for places, n_ in ((rows, 7), (columns, 8))]
            value /= divisor or (padded[0] * padded[1] if include_pad else count)
        wanted[n, i, j] = value
    check(got, wanted, dtype, "reduce")


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_adaptive_pool2d(kind: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 7, 5)).astype(np.float32)
    got = run("adaptive_pool2d", x, kind=kind, size=(3, 8))
    wanted = np.empty((2, 3, 8))
    for n, i, j in np.ndindex(wanted.shape):
        rows = [r for r in range(7) if math.floor(i * 7 / 3) <= r < math.ceil((i + 1) * 7 / 3)]
        columns = [c for c in range(5) if math.floor(j * 5 / 8) <= c < math.ceil((j + 1) * 5 / 8)]
        value, count = window(x[n], kind, rows, columns)
        wanted[n, i, j] = value / count if kind == "avg" else value
    check(got, wanted, f32, "reduce")


def test_pools_of_other_types() -> None:
    x = np.array([[3, -7], [2, 5]], np.int8)
    assert run("pool2d", x, kind="max", kernel=(1, 2), stride=(1, 1), padding=(0, 0, 1, 1)).tolist() == [
        [3, 3, -7],
        [2, 5, 5],
    ]
    options = {"kernel": (2, 2), "stride": (1, 1)}
    t = tensor_type("i32", 4, 4)
    refuses("avg needs floating point", "pool2d", t, kind="avg", **options)
    refuses("max needs numbers", "pool2d", tensor_type("bool", 4, 4), kind="max", **options)
    refuses("kind='sum' is not one of", "pool2d", t, kind="sum", **options)
    refuses("more than half of the kernel", "pool2d", t, kind="max", **options, padding=(2, 2, 0, 0))
    refuses("no dilation", "pool2d", tensor_type("f32", 4, 4), kind="avg", **options, dilation=(2, 1))
    refuses("must not be 0", "pool2d", tensor_type("f32", 4, 4), kind="avg", **options, divisor=0)
    refuses("has no elements", "adaptive_pool2d", tensor_type("f32", 0, 4), kind="avg", size=(1, 1))
    refuses("is negative", "adaptive_pool2d", tensor_type("f32", 4, 4), kind="avg", size=(1, -1))
