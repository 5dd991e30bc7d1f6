"""Runs ONNX's node tests through monoplan: each graph by functions of monoplan.nn.functional, compiled, many to a plan.

    python -m tests.integration.onnx_nodes                all tests
    python -m tests.integration.onnx_nodes Pad Scatter    those of some ops, with the reason of each that is left out

Needs the package onnx. A test is left out where an op, an attribute or an element type has no equivalent; a test that
runs must give ONNX's results. Inputs that decide shapes (axes, pads, starts) are constants of the plan.
"""

from __future__ import annotations

import argparse
import collections
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import MonoplanError
from monoplan.ir.types import as_dtype

OPS: dict[str, Callable[..., Any]] = {}


class LeftOut(Exception):
    """What has no equivalent."""


def op(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of a node's attributes and inputs."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OPS[name] = fn
        return fn

    return register


def ints(x: Any) -> list[int]:
    """The values of an input that decides shapes."""
    if isinstance(x, Tensor):
        if x.is_traced:
            raise LeftOut("a shape depends on values")
        x = x.numpy()
    return [int(v) for v in np.asarray(x).reshape(-1)]


def number(x: Any, default: Any = None) -> Any:
    if x is None:
        return default
    if isinstance(x, Tensor) and x.is_traced:
        return x
    return np.asarray(x.numpy() if isinstance(x, Tensor) else x).reshape(-1)[0].item()


def element_type(number: int) -> Any:
    import onnx

    try:
        return as_dtype(onnx.helper.tensor_dtype_to_np_dtype(number))
    except Exception as error:
        raise LeftOut(f"element type {number}") from error


for _name in (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Log",
    "Neg",
    "Reciprocal", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "Mish",
):  # fmt: skip

    def _unary(a: dict[str, Any], x: Any, name: str = _name.lower()) -> Any:
        if name not in F.__all__:
            raise LeftOut(f"no F.{name}")
        return getattr(F, name)(x)

    OPS[_name] = _unary

_BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt",
    "LessOrEqual": "le", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor", "MatMul": "matmul", "Outer": "outer",
}  # fmt: skip
for _name, _own in _BINARY.items():
    OPS[_name] = lambda a, x, y, own=_own: getattr(F, own)(x, y)
OPS["Not"] = lambda a, x: F.logical_not(x)
OPS["BitwiseNot"] = lambda a, x: F.bitwise_not(x)
OPS["Identity"] = lambda a, x: x
OPS["Where"] = lambda a, c, x, y: F.where(c, x, y)
OPS["IsNaN"] = lambda a, x: F.isnan(x)
OPS["Relu"] = lambda a, x: F.relu(x)
OPS["HardSwish"] = lambda a, x: F.hardswish(x)
OPS["Elu"] = lambda a, x: F.elu(x, a.get("alpha", 1.0))
OPS["Celu"] = lambda a, x: F.celu(x, a.get("alpha", 1.0))
OPS["LeakyRelu"] = lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01))
OPS["ThresholdedRelu"] = lambda a, x: F.threshold(x, a.get("alpha", 1.0), 0.0)
OPS["HardSigmoid"] = lambda a, x: F.clamp(x * a.get("alpha", 0.2) + a.get("beta", 0.5), 0, 1)
OPS["Swish"] = lambda a, x: x * F.sigmoid(x * a.get("alpha", 1.0))
OPS["Gelu"] = lambda a, x: F.gelu(x, a.get("approximate", "none"))
OPS["PRelu"] = lambda a, x, slope: F.where(x < 0, x * slope, x)
OPS["Size"] = lambda a, x: Tensor(np.int64(math.prod(x.shape)))
OPS["Transpose"] = lambda a, x: x.permute(*a.get("perm", range(x.ndim)[::-1]))
OPS["Expand"] = lambda a, x, shape: F.expand(x, np.broadcast_shapes(x.shape, tuple(ints(shape))))
OPS["Tile"] = lambda a, x, n: F.tile(x, ints(n))
OPS["Softmax"] = lambda a, x: F.softmax(x, a.get("axis", -1))
OPS["LogSoftmax"] = lambda a, x: F.log_softmax(x, a.get("axis", -1))
OPS["Einsum"] = lambda a, *xs: F.einsum(a["equation"], *xs)
OPS["Constant"] = lambda a: next(Tensor(np.asarray(v)) for k, v in a.items() if k.startswith("value"))
OPS["Dropout"] = lambda a, x, ratio=None, training=None: _no_training(a, x, training)
OPS["Concat"] = lambda a, *xs: F.cat(list(xs), a["axis"])
OPS["CumSum"] = lambda a, x, axis: _running(a, x, ints(axis)[0], "cumsum")
OPS["CumProd"] = lambda a, x, axis: _running(a, x, ints(axis)[0], "cumprod")
OPS["EyeLike"] = lambda a, x: (
    F.eye(*x.shape, dtype=element_type(a["dtype"]) if "dtype" in a else x.dtype)
    if not a.get("k")
    else F.diag_embed(F.ones(10), a["k"])[: x.shape[0], : x.shape[1]].to(
        element_type(a["dtype"]) if "dtype" in a else x.dtype
    )
)
OPS["Sum"] = lambda a, *xs: _join(F.add, xs)
OPS["Max"] = lambda a, *xs: _join(F.maximum, xs)
OPS["Min"] = lambda a, *xs: _join(F.minimum, xs)
OPS["Mean"] = lambda a, *xs: _join(F.add, xs) / len(xs)
OPS["GlobalAveragePool"] = lambda a, x: F.mean(x, tuple(range(2, x.ndim)), True)
OPS["GlobalMaxPool"] = lambda a, x: F.amax(x, tuple(range(2, x.ndim)), True)
OPS["CastLike"] = lambda a, x, y: _cast(x, y.dtype)
OPS["Cast"] = lambda a, x: _cast(x, element_type(a["to"]))


def _no_training(a: dict[str, Any], x: Any, training: Any) -> Any:
    if training is not None and number(training):
        raise LeftOut("training")
    return [x, F.ones(x.shape, dtype="bool")]


def _cast(x: Any, dtype: Any) -> Any:
    return F.cast(x, dtype)


def _join(by: Any, xs: Any) -> Any:
    result = xs[0]
    for x in xs[1:]:
        result = by(result, x)
    return result


def _running(a: dict[str, Any], x: Any, axis: int, name: str) -> Any:
    if a.get("reverse"):
        x = F.flip(x, axis)
    y = getattr(F, name)(x, axis, dtype=x.dtype)
    if a.get("exclusive"):
        n = x.shape[axis]
        first = F.full_like(F.narrow(y, axis, 0, 1), 0 if name == "cumsum" else 1)
        y = F.cat([first, F.narrow(y, axis, 0, n - 1)], axis)
    return F.flip(y, axis) if a.get("reverse") else y


@op("Div")
def _div(a: dict[str, Any], x: Any, y: Any) -> Any:
    return F.div(x, y) if x.dtype.is_float else F.div(x, y, rounding_mode="trunc")


@op("Pow")
def _pow(a: dict[str, Any], x: Any, y: Any) -> Any:
    if not x.dtype.is_float and y.dtype.is_float:
        return F.trunc(x.float() ** y).to(x.dtype)
    return (x**y).to(x.dtype)


@op("Mod")
def _mod(a: dict[str, Any], x: Any, y: Any) -> Any:
    return F.fmod(x, y) if a.get("fmod") else F.remainder(x, y)


@op("BitShift")
def _shift(a: dict[str, Any], x: Any, y: Any) -> Any:
    return x << y if a["direction"] == "LEFT" else x >> y


@op("IsInf")
def _is_inf(a: dict[str, Any], x: Any) -> Any:
    up, down = a.get("detect_positive", 1), a.get("detect_negative", 1)
    found = F.isinf(x)
    return found if up and down else found & (x > 0) if up else found & (x < 0) if down else found & False


@op("Clip")
def _clip(a: dict[str, Any], x: Any, low: Any = None, high: Any = None) -> Any:
    low, high = (a.get(n) if v is None else v for n, v in (("min", low), ("max", high)))
    return x if low is None and high is None else F.clamp(x, low, high)


@op("Selu")
def _selu(a: dict[str, Any], x: Any) -> Any:
    alpha, gamma = a.get("alpha", 1.67326319217681884765625), a.get("gamma", 1.05070102214813232421875)
    return F.elu(x, alpha) * gamma


@op("Shrink")
def _shrink(a: dict[str, Any], x: Any) -> Any:
    lambd, bias = a.get("lambd", 0.5), a.get("bias", 0.0)
    return F.where(x < -lambd, x + bias, F.where(x > lambd, x - bias, F.zeros_like(x))).to(x.dtype)


@op("Hardmax")
def _hardmax(a: dict[str, Any], x: Any) -> Any:
    axis = a.get("axis", -1) % x.ndim
    return F.movedim(F.one_hot(F.argmax(x, axis), x.shape[axis]), -1, axis).to(x.dtype)


_REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceSum": lambda x, d, k: F.sum(x, d, k), "ReduceMean": lambda x, d, k: F.mean(x, d, k),
    "ReduceMax": lambda x, d, k: F.amax(x, d, k), "ReduceMin": lambda x, d, k: F.amin(x, d, k),
    "ReduceProd": lambda x, d, k: F.prod(x, d, k), "ReduceL1": lambda x, d, k: F.sum(F.abs(x), d, k),
    "ReduceL2": lambda x, d, k: F.sqrt(F.sum(x * x, d, k)), "ReduceSumSquare": lambda x, d, k: F.sum(x * x, d, k),
    "ReduceLogSum": lambda x, d, k: F.log(F.sum(x, d, k)), "ReduceLogSumExp": lambda x, d, k: _logsumexp(x, d, k),
}  # fmt: skip


def _logsumexp(x: Any, dims: Any, keep: bool) -> Any:
    return F.log(F.sum(F.exp(x), dims, keep)) if 0 in x.shape else F.logsumexp(x, dims, keep)


for _name, _own in _REDUCE.items():

    def _reduce(a: dict[str, Any], x: Any, axes: Any = None, own: Any = _own) -> Any:
        dims = a.get("axes") if axes is None else ints(axes)
        if not dims and a.get("noop_with_empty_axes"):
            return _pointwise_part(own, x)
        dims = tuple(dims) if dims else tuple(range(x.ndim))
        if 0 in x.shape and a["op_type"] in ("ReduceMax", "ReduceMin"):  # PyTorch and we have no answer
            shape = [1 if d in dims or d - x.ndim in dims else n for d, n in enumerate(x.shape)]
            least = a["op_type"] == "ReduceMax"
            value = not least if x.dtype.name == "bool" else -math.inf if least else math.inf
            return F.full(shape, value, dtype=x.dtype)
        return own(x, dims, bool(a.get("keepdims", 1))).to(x.dtype)

    OPS[_name] = _reduce


def _pointwise_part(own: Any, x: Any) -> Any:
    """A reduction over no axes: each element by itself."""
    return own(x.unsqueeze(-1), (-1,), False).to(x.dtype)


@op("ArgMax", "ArgMin")
def _arg(a: dict[str, Any], x: Any, largest: bool = True) -> Any:
    axis, keep = a.get("axis", 0) % x.ndim, bool(a.get("keepdims", 1))
    by = F.argmax if a["op_type"] == "ArgMax" else F.argmin
    if not a.get("select_last_index"):
        return by(x, axis, keep)
    return x.shape[axis] - 1 - by(F.flip(x, axis), axis, keep)


@op("TopK")
def _topk(a: dict[str, Any], x: Any, k: Any) -> Any:
    return list(F.topk(x, ints(k)[0], a.get("axis", -1), bool(a.get("largest", 1))))


@op("Reshape")
def _reshape(a: dict[str, Any], x: Any, shape: Any) -> Any:
    sizes = ints(shape)
    if not a.get("allowzero"):
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(tuple(sizes))


@op("Flatten")
def _flatten(a: dict[str, Any], x: Any) -> Any:
    axis = a.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape((math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@op("Squeeze")
def _squeeze(a: dict[str, Any], x: Any, axes: Any = None) -> Any:
    dims = a.get("axes") if axes is None else ints(axes)
    return x.squeeze(None if dims is None else tuple(dims))


@op("Unsqueeze")
def _unsqueeze(a: dict[str, Any], x: Any, axes: Any = None) -> Any:
    dims = a["axes"] if axes is None else ints(axes)
    rank = x.ndim + len(dims)
    rest = iter(x.shape)
    wanted = {d % rank for d in dims}
    return x.reshape(tuple(1 if i in wanted else next(rest) for i in range(rank)))


@op("Shape")
def _shape(a: dict[str, Any], x: Any) -> Any:
    return Tensor(np.array(x.shape[a.get("start", 0) : a.get("end", x.ndim)], np.int64))


@op("Split")
def _split(a: dict[str, Any], x: Any, sizes: Any = None) -> Any:
    axis = a.get("axis", 0)
    if sizes is None and "split" not in a:
        n = a.get("num_outputs", a["outputs"])
        size = -(-x.shape[axis] // n)
        given = [min(size, x.shape[axis] - i * size) for i in range(n)]
    else:
        given = ints(sizes) if sizes is not None else a["split"]
    return list(x.split(given, axis))


@op("Slice")
def _slice(a: dict[str, Any], x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    begin, end = ints(starts), ints(ends)
    dims = list(range(len(begin))) if axes is None else ints(axes)
    by = [1] * len(begin) if steps is None else ints(steps)
    index: list[Any] = [slice(None)] * x.ndim
    for d, s, e, k in zip(dims, begin, end, by, strict=True):
        n = x.shape[d]
        e = None if k < 0 and e < -n else e
        index[d] = slice(*slice(s, e, k).indices(n)) if k > 0 else slice(min(s, n - 1) if s >= 0 else s, e, k)
    return x[tuple(index)]


@op("Pad")
def _pad(a: dict[str, Any], x: Any, pads: Any, value: Any = None, axes: Any = None) -> Any:
    sizes = ints(pads)
    dims = list(range(x.ndim)) if axes is None else [d % x.ndim for d in ints(axes)]
    pairs = {d: (sizes[i], sizes[i + len(dims)]) for i, d in enumerate(dims)}
    flat = [n for d in reversed(range(x.ndim)) for n in pairs.get(d, (0, 0))]
    mode = {"edge": "replicate", "wrap": "circular"}.get(a.get("mode", "constant"), a.get("mode", "constant"))
    return F.pad(x, flat, mode, number(value)) if mode == "constant" else F.pad(x, flat, mode)


@op("Gather")
def _gather(a: dict[str, Any], x: Any, index: Any) -> Any:
    return x[(slice(None),) * (a.get("axis", 0) % x.ndim) + (index,)]


@op("GatherElements")
def _gather_elements(a: dict[str, Any], x: Any, index: Any) -> Any:
    axis = a.get("axis", 0)
    return F.gather(x, axis, F.where(index < 0, index + x.shape[axis], index))


@op("GatherND")
def _gather_nd(a: dict[str, Any], x: Any, index: Any) -> Any:
    batch = a.get("batch_dims", 0)
    lead = [F.arange(n).reshape((n, *[1] * (index.ndim - 2 - i))) for i, n in enumerate(x.shape[:batch])]
    return x[(*lead, *index.unbind(-1))]


@op("ScatterElements", "Scatter")
def _scatter_elements(a: dict[str, Any], x: Any, index: Any, updates: Any) -> Any:
    axis = a.get("axis", 0)
    at = F.where(index < 0, index + x.shape[axis], index)
    kind = a.get("reduction", "none")
    if kind == "none":
        return F.scatter(x, axis, at, updates)
    return F.scatter_reduce(x, axis, at, updates, {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[kind])


@op("ScatterND")
def _scatter_nd(a: dict[str, Any], x: Any, index: Any, updates: Any) -> Any:
    kind = a.get("reduction", "none")
    if kind in ("none", "add"):
        return F.index_put(x, index.unbind(-1), updates, kind == "add")
    n = index.shape[-1]
    places = F.arange(math.prod(x.shape[:n])).reshape(x.shape[:n])[tuple(index.unbind(-1))].flatten()
    rows = updates.reshape((places.shape[0], -1))
    flat = x.reshape((-1, rows.shape[1]))
    at = places.unsqueeze(1).expand(rows.shape)
    return F.scatter_reduce(flat, 0, at, rows, {"mul": "prod", "max": "amax", "min": "amin"}[kind]).reshape(x.shape)


@op("OneHot")
def _one_hot(a: dict[str, Any], index: Any, depth: Any, values: Any) -> Any:
    n, axis = ints(depth)[0], a.get("axis", -1)
    at = index.to("i64")
    hot = F.one_hot(F.where(at < 0, at + n, at), n) == 1
    return F.movedim(F.where(hot, values[1], values[0]), -1, axis)


@op("Trilu")
def _trilu(a: dict[str, Any], x: Any, k: Any = None) -> Any:
    return (F.triu if a.get("upper", 1) else F.tril)(x, 0 if k is None else ints(k)[0])


@op("Range")
def _range(a: dict[str, Any], start: Any, limit: Any, delta: Any) -> Any:
    values = [ints(t)[0] if t.dtype.is_integer else float(t.numpy()) for t in (start, limit, delta)]
    return Tensor(np.arange(*values), start.dtype)  # a constant: it may decide a shape


@op("ConstantOfShape")
def _constant_of_shape(a: dict[str, Any], shape: Any) -> Any:
    value = np.asarray(a.get("value", np.zeros(1, np.float32)))
    return Tensor(np.full(ints(shape), value.reshape(-1)[0]))  # a constant: it may decide a shape


@op("DepthToSpace")
def _depth_to_space(a: dict[str, Any], x: Any) -> Any:
    b, c, h, w = x.shape
    n = a["blocksize"]
    if a.get("mode", "DCR") == "DCR":
        return x.reshape(b, n, n, c // (n * n), h, w).permute(0, 3, 4, 1, 5, 2).reshape(b, c // (n * n), h * n, w * n)
    return x.reshape(b, c // (n * n), n, n, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // (n * n), h * n, w * n)


@op("SpaceToDepth")
def _space_to_depth(a: dict[str, Any], x: Any) -> Any:
    b, c, h, w = x.shape
    n = a["blocksize"]
    order = (0, 3, 5, 1, 2, 4) if a.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return x.reshape(b, c, h // n, n, w // n, n).permute(*order).reshape(b, c * n * n, h // n, w // n)


@op("Gemm")
def _gemm(a: dict[str, Any], x: Any, y: Any, c: Any = None) -> Any:
    x, y = x.T if a.get("transA") else x, y.T if a.get("transB") else y
    out = F.matmul(x, y) * a.get("alpha", 1.0)
    return out if c is None else out + c * a.get("beta", 1.0)


@op("BatchNormalization")
def _batch_norm(a: dict[str, Any], x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    eps, keep = a.get("epsilon", 1e-5), a.get("momentum", 0.9)
    if not a.get("training_mode"):
        return F.batch_norm(x, mean, variance, scale, bias, eps=eps)
    now = F.var_mean(x, (0, *range(2, x.ndim)), correction=0)
    running = [before * keep + new * (1 - keep) for before, new in ((mean, now[1]), (variance, now[0]))]
    return [F.batch_norm(x, now[1], now[0], scale, bias, eps=eps), *running]


@op("InstanceNormalization")
def _instance_norm(a: dict[str, Any], x: Any, scale: Any, bias: Any) -> Any:
    return F.instance_norm(x, weight=scale, bias=bias, eps=a.get("epsilon", 1e-5))


@op("GroupNormalization")
def _group_norm(a: dict[str, Any], x: Any, scale: Any, bias: Any) -> Any:
    return F.group_norm(x, a["num_groups"], scale, bias, a.get("epsilon", 1e-5))


@op("LayerNormalization")
def _layer_norm(a: dict[str, Any], x: Any, scale: Any, bias: Any = None) -> Any:
    if a["outputs"] > 1:
        axes = tuple(range(a.get("axis", -1) % x.ndim, x.ndim))
        variance, mean = F.var_mean(x, axes, keepdim=True, correction=0)
        deviation = 1 / F.sqrt(variance + a.get("epsilon", 1e-5))
        y = (x - mean) * deviation * scale
        return [y if bias is None else y + bias, mean, deviation]
    shape = x.shape[a.get("axis", -1) % x.ndim :]
    return F.layer_norm(
        x, shape, scale.expand(shape), None if bias is None else bias.expand(shape), a.get("epsilon", 1e-5)
    )


@op("RMSNormalization")
def _rms_norm(a: dict[str, Any], x: Any, scale: Any) -> Any:
    shape = x.shape[a.get("axis", -1) % x.ndim :]
    return F.rms_norm(x, shape, scale.expand(shape), a.get("epsilon", 1e-5))


@op("LpNormalization")
def _lp(a: dict[str, Any], x: Any) -> Any:
    size = F.norm(x, a.get("p", 2), a.get("axis", -1), True)
    return F.where(size == 0, F.zeros_like(x), x / size)


@op("MeanVarianceNormalization")
def _mvn(a: dict[str, Any], x: Any) -> Any:
    axes = tuple(a.get("axes", (0, 2, 3)))
    mean = F.mean(x, axes, True)
    return (x - mean) / (F.sqrt(F.mean(x * x, axes, True) - mean * mean) + 1e-9)


def _window(a: dict[str, Any], x: Any, name: str) -> tuple[Any, list[int], list[int], list[int]]:
    """A function over windows of 1 or 2 dimensions; strides, dilations and sizes before and after each dimension."""
    n = x.ndim - 2
    function = getattr(F, f"{name}{n}d", None) if n in (1, 2) else None
    if function is None:
        raise LeftOut(f"no F.{name}{n}d")
    strides, dilations = a.get("strides", [1] * n), a.get("dilations", [1] * n)
    pads, kind = a.get("pads", [0] * 2 * n), a.get("auto_pad", "NOTSET")
    if kind.startswith("SAME"):
        kernel = a["kernel_shape"]
        whole = [
            max((-(-m // s) - 1) * s + (k - 1) * d + 1 - m, 0)
            for m, s, k, d in zip(x.shape[2:], strides, kernel, dilations, strict=True)
        ]
        less, more = [w // 2 for w in whole], [w - w // 2 for w in whole]
        pads = [*less, *more] if kind == "SAME_UPPER" else [*more, *less]
    return function, strides, dilations, pads


def _padded(x: Any, pads: list[int], value: Any) -> Any:
    n = len(pads) // 2
    return F.pad(x, [p for i in reversed(range(n)) for p in (pads[i], pads[n + i])], value=value) if any(pads) else x


@op("Conv")
def _conv(a: dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
    a.setdefault("kernel_shape", list(weight.shape[2:]))
    function, strides, dilations, pads = _window(a, x, "conv")
    return function(_padded(x, pads, 0.0), weight, bias, tuple(strides), 0, tuple(dilations), a.get("group", 1))


@op("MaxPool")
def _max_pool(a: dict[str, Any], x: Any) -> Any:
    function, strides, dilations, pads = _window(a, x, "max_pool")
    if a["outputs"] > 1:
        raise LeftOut("MaxPool with indices")
    y = _padded(x.float() if x.dtype.bits == 8 else x, pads, -math.inf)
    y = function(y, tuple(a["kernel_shape"]), tuple(strides), 0, tuple(dilations), bool(a.get("ceil_mode")))
    return y.to(x.dtype)


@op("AveragePool")
def _average_pool(a: dict[str, Any], x: Any) -> Any:
    function, strides, dilations, pads = _window(a, x, "avg_pool")
    kernel, n = tuple(a["kernel_shape"]), x.ndim - 2
    if any(d != 1 for d in dilations):
        raise LeftOut("AveragePool with dilations")
    if a.get("ceil_mode") and pads[:n] == pads[n:]:
        return function(x, kernel, tuple(strides), tuple(pads[:n]), True, bool(a.get("count_include_pad")))
    y = function(_padded(x, pads, 0.0), kernel, tuple(strides))
    if any(pads) and not a.get("count_include_pad"):
        y = y / function(_padded(F.ones_like(x), pads, 0.0), kernel, tuple(strides))
    return y


@op("Attention")
def _attention(
    a: dict[str, Any],
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    filled: Any = None,
) -> Any:
    flat = q.ndim == 3
    if flat:
        heads, shared = a["q_num_heads"], a["kv_num_heads"]
        q, k, v = (
            t.reshape((*t.shape[:2], n, t.shape[2] // n)).transpose(1, 2)
            for t, n in ((q, heads), (k, shared), (v, shared))
        )
    if past_key is not None:
        k, v = F.cat([past_key, k], 2), F.cat([past_value, v], 2)
    present = [k, v]
    queries, keys = q.shape[2], k.shape[2]
    before: Any = past_key.shape[2] if past_key is not None else 0
    if past_key is None and filled is not None:
        before = filled.reshape((filled.shape[0], 1, 1, 1)) - queries
    place, key = F.arange(queries).unsqueeze(1) + before, F.arange(keys)
    left, right = a.get("left_window_size", -1), a.get("right_window_size", -1)
    visible = [key <= place] if a.get("is_causal") else []
    visible += [place - key <= left] if left >= 0 else []
    visible += [key - place <= right] if right >= 0 else []
    visible += [key < filled.reshape((filled.shape[0], 1, 1, 1))] if filled is not None else []
    if mask is not None and mask.shape[-1] < keys:
        mask = F.pad(mask, (0, keys - mask.shape[-1]), value=False if mask.dtype.name == "bool" else -math.inf)
    groups = q.shape[1] // k.shape[1]
    k, v = F.repeat_kv(k, groups), F.repeat_kv(v, groups)
    scale = math.sqrt(a.get("scale") or q.shape[3] ** -0.5)
    scores = (q * scale) @ (k * scale).mT
    if a.get("softcap"):
        scores = F.tanh(scores / a["softcap"]) * a["softcap"]
    biased = scores
    if mask is not None:
        biased = F.where(mask, biased, -math.inf) if mask.dtype.name == "bool" else biased + mask.to(biased.dtype)
    for seen in visible:
        biased = F.where(seen, biased, -math.inf)
    weights = F.softmax(biased)
    weights = F.where(F.isnan(weights), 0.0, weights)  # rows that see nothing
    y = weights @ v
    if flat:
        y = y.transpose(1, 2).flatten(2)
    return [y, *present, {2: biased, 3: weights}.get(a.get("qk_matmul_output_mode", 0), scores)]


@op("NegativeLogLikelihoodLoss")
def _nll(a: dict[str, Any], x: Any, target: Any, weight: Any = None) -> Any:
    ignored = a.get("ignore_index")
    used = F.ones_like(target, dtype="bool") if ignored is None else target != ignored
    at = F.clamp(target.to("i64"), 0, x.shape[1] - 1)
    loss = -F.gather(x, 1, at.unsqueeze(1)).squeeze(1)
    each = F.ones_like(loss) if weight is None else weight[at]
    each = F.where(used, each, 0.0)
    loss = F.where(used, loss, 0.0) * each
    kind = a.get("reduction", "mean")
    return loss.sum() / each.sum() if kind == "mean" else loss.sum() if kind == "sum" else loss


@op("SoftmaxCrossEntropyLoss")
def _cross_entropy(a: dict[str, Any], x: Any, target: Any, weight: Any = None) -> Any:
    logs = F.log_softmax(x, 1)
    return [_nll(a, logs, target, weight), logs]


@op("CenterCropPad")
def _center(a: dict[str, Any], x: Any, shape: Any) -> Any:
    sizes = ints(shape)
    axes = [d % x.ndim for d in a.get("axes", range(x.ndim))]
    for d, n in zip(axes, sizes, strict=True):
        less = x.shape[d] - n
        if less >= 0:
            x = x.narrow(d, less // 2, n)
        else:
            x = F.pad(x, [*[0] * (2 * (x.ndim - 1 - d)), -less // 2, -less - -less // 2])
    return x


def _coordinates(kind: str, n: int, m: int, scale: float, roi: list[float]) -> Any:
    """Where the elements of a resized axis lie in the given one."""
    i, width = np.arange(m, dtype=np.float64), scale * n
    if kind == "align_corners":
        return i * 0 if width == 1 else i * (n - 1) / (width - 1)
    if kind == "asymmetric":
        return i / scale
    if kind == "tf_crop_and_resize":
        part = (roi[1] - roi[0]) * (n - 1)
        return roi[0] * (n - 1) + (i * 0 + part / 2 if width == 1 else i * part / (width - 1))
    if kind == "pytorch_half_pixel" and width == 1:
        return i * 0 - 0.5
    shift = n / 2 * (1 - m / width) if kind == "half_pixel_symmetric" else 0.0
    return shift + (i + 0.5) / scale - 0.5


def _filter(a: dict[str, Any], at: Any, n: int, scale: float) -> Any:
    """What each of n elements counts for elements at some coordinates: a matrix."""
    narrow, cubic = min(scale, 1.0) if a.get("antialias") else 1.0, a["mode"] == "cubic"
    edge = int(2 / narrow) + 2
    k = np.arange(-edge, n + edge)
    d = np.abs(at[:, None] - k) * narrow
    c = a.get("cubic_coeff_a", -0.75)
    near, far = ((c + 2) * d - (c + 3)) * d * d + 1, ((c * d - 5 * c) * d + 8 * c) * d - 4 * c
    weights = np.where(d <= 1, near, np.where(d < 2, far, 0)) if cubic else np.clip(1 - d, 0, 1)
    if a.get("exclude_outside"):
        weights = weights * ((k >= 0) & (k < n))
    total = weights.sum(1, keepdims=True)
    matrix = np.zeros((len(at), n))
    for j, column in zip(np.clip(k, 0, n - 1), (weights / np.where(total == 0, 1, total)).T, strict=True):
        matrix[:, j] += column
    return matrix


@op("Resize", "Upsample")
def _resize(a: dict[str, Any], x: Any, *rest: Any) -> Any:
    """Interpolation as a lookup, or as a product with a constant matrix, along each axis."""
    roi, scales, sizes = (*rest, None, None)[:3] if a["op_type"] == "Resize" else (None, rest[0], None)
    axes = [d % x.ndim for d in a.get("axes", range(x.ndim))]
    given = [float(v) for v in scales.numpy()] if scales is not None and scales.shape[0] else None
    region = [float(v) for v in roi.numpy()] if roi is not None and roi.shape[0] else [0.0, 1.0] * len(axes)
    if given is None:
        wanted = ints(sizes)
        given = [m / x.shape[d] for m, d in zip(wanted, axes, strict=True)]
        policy = a.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            given = [(min if policy == "not_larger" else max)(given)] * len(axes)
            wanted = [int(s * x.shape[d] + 0.5) for s, d in zip(given, axes, strict=True)]
    else:
        wanted = [int(s * x.shape[d]) for s, d in zip(given, axes, strict=True)]
    kind = a.get("coordinate_transformation_mode", "half_pixel" if a["op_type"] == "Resize" else "asymmetric")
    a = {"mode": "nearest", **a}
    for i, (d, m, scale) in enumerate(zip(axes, wanted, given, strict=True)):
        n = x.shape[d]
        at = _coordinates(kind, n, m, scale, [region[i], region[i + len(axes)]] if len(region) > 2 else region)
        if m == n and np.array_equal(at, np.arange(n)):
            continue
        if a["mode"] == "nearest":
            default = "round_prefer_floor" if a["op_type"] == "Resize" else "floor"
            by = {
                "round_prefer_floor": lambda v: np.ceil(v - 0.5), "round_prefer_ceil": lambda v: np.floor(v + 0.5),
                "floor": np.floor, "ceil": np.ceil,
            }[a.get("nearest_mode", default)]  # fmt: skip
            y = F.index_select(x, d, Tensor(np.clip(by(at), 0, n - 1).astype(np.int64)))
        else:
            matrix = Tensor(_filter(a, at, n, scale).astype(np.float32))
            y = F.movedim(F.matmul(F.movedim(x, d, -1), matrix.T), -1, d)
        if kind == "tf_crop_and_resize":
            outside = Tensor((at < 0) | (at > n - 1)).reshape((m, *[1] * (x.ndim - 1 - d)))
            y = F.where(outside, a.get("extrapolation_value", 0.0), y)
        x = y
    return x


@op("RNN", "GRU", "LSTM")
def _recurrent(
    a: dict[str, Any],
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    lengths: Any = None,
    h0: Any = None,
    c0: Any = None,
    peepholes: Any = None,
) -> Any:
    if a.get("layout"):
        x = x.transpose(0, 1)
    if lengths is not None and set(ints(lengths)) != {x.shape[0]}:
        raise LeftOut("sequences of different lengths")
    kind, hidden = a["op_type"], a["hidden_size"]
    zeros = F.zeros((x.shape[1], hidden))
    outputs = []
    for d in range(w.shape[0]):
        wd, rd = w[d], r[d]
        wb, rb = (None, None) if b is None else b[d].chunk(2)
        p = None if peepholes is None else peepholes[d].chunk(3)

        def cell(state: Any, step: Any, wd: Any = wd, rd: Any = rd, wb: Any = wb, rb: Any = rb, p: Any = p) -> Any:
            h, c = state
            if kind == "RNN":
                h = F.tanh(F.linear(step, wd, wb) + F.linear(h, rd, rb))
            elif kind == "GRU":
                xz, xr, xh = F.linear(step, wd, wb).chunk(3, -1)
                hz, hr = F.linear(h, rd[: 2 * hidden], None if rb is None else rb[: 2 * hidden]).chunk(2, -1)
                z, reset = F.sigmoid(xz + hz), F.sigmoid(xr + hr)
                new = F.linear(reset * h, rd[2 * hidden :], None if rb is None else rb[2 * hidden :])
                h = (1 - z) * F.tanh(xh + new) + z * h
            else:
                i, o, f, g = (F.linear(step, wd, wb) + F.linear(h, rd, rb)).chunk(4, -1)
                i, f = (i, f) if p is None else (i + p[0] * c, f + p[2] * c)
                c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
                o = o if p is None else o + p[1] * c
                h = F.sigmoid(o) * F.tanh(c)
            return (h, c), h

        start = (zeros if h0 is None else h0[d], zeros if c0 is None else c0[d])
        (h, c), y = mp.scan(cell, start, x, reverse=d == 1 or a.get("direction") == "reverse")
        outputs.append((y, h, c))
    y, h, c = F.stack([o[0] for o in outputs], 1), *(F.stack([o[n] for o in outputs]) for n in (1, 2))
    return [y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)] if a.get("layout") else [y, h, c]


def _per_axis(a: dict[str, Any], x: Any, p: Any) -> Any:
    """A scale or a zero point, one for each index of an axis, or for each block of it, in the shape of x."""
    axis = a.get("axis", 1) % max(x.ndim, 1)
    if a.get("block_size"):
        return F.repeat_interleave(p, a["block_size"], axis)
    return p.reshape(()) if math.prod(p.shape) == 1 else p.reshape((p.shape[0], *[1] * (x.ndim - 1 - axis)))


def _saturated(x: Any, dtype: Any) -> Any:
    limits = np.iinfo(dtype.numpy)
    return F.clamp(x, float(limits.min), float(limits.max)).to(dtype)


@op("QuantizeLinear")
def _quantize(a: dict[str, Any], x: Any, scale: Any, zero: Any = None) -> Any:
    dtype = zero.dtype if zero is not None else element_type(a.get("output_dtype") or 2)
    y = F.round(x / _per_axis(a, x, scale))
    return _saturated(y if zero is None else y + _per_axis(a, x, zero).float(), dtype)


@op("DequantizeLinear")
def _dequantize(a: dict[str, Any], x: Any, scale: Any, zero: Any = None) -> Any:
    y = x.to("i32") if zero is None else x.to("i32") - _per_axis(a, x, zero).to("i32")
    return (y.float() * _per_axis(a, x, scale).float()).to(scale.dtype)


@op("DynamicQuantizeLinear")
def _dynamic_quantize(a: dict[str, Any], x: Any) -> Any:
    low, high = F.clamp(F.amin(x), max=0.0), F.clamp(F.amax(x), min=0.0)
    scale = (high - low) / 255
    zero = _saturated(F.round(-low / scale), as_dtype("u8"))
    return [_saturated(F.round(x / scale) + zero.float(), as_dtype("u8")), scale, zero]


def _less(x: Any, zero: Any) -> Any:
    return x.to("i32") if zero is None else x.to("i32") - zero.to("i32")


@op("MatMulInteger")
def _matmul_integer(a: dict[str, Any], x: Any, y: Any, x_zero: Any = None, y_zero: Any = None) -> Any:
    return F.matmul(_less(x, x_zero), _less(y, y_zero))


@op("QLinearMatMul")
def _quantized_matmul(
    a: dict[str, Any], x: Any, xs: Any, xz: Any, y: Any, ys: Any, yz: Any, scale: Any, zero: Any
) -> Any:
    product = F.matmul(_less(x, xz), _less(y, yz)).float() * (xs.float() * ys.float() / scale.float())
    return _saturated(F.round(product) + zero.float(), zero.dtype)


@op("ConvInteger")
def _conv_integer(a: dict[str, Any], x: Any, w: Any, xz: Any = None, wz: Any = None) -> Any:
    if wz is not None and wz.ndim:
        wz = wz.reshape((wz.shape[0], 1, 1, 1))
    return _conv(a, _less(x, xz).float(), _less(w, wz).float()).to("i32")


@op("QLinearConv")
def _quantized_conv(
    a: dict[str, Any], x: Any, xs: Any, xz: Any, w: Any, ws: Any, wz: Any, scale: Any, zero: Any
) -> Any:
    product = _conv_integer(a, x, w, xz, wz).float() * (xs * ws / scale).reshape((-1, 1, 1))
    return _saturated(F.round(product) + zero.float(), zero.dtype)


@op("ConvTranspose")
def _conv_transpose(a: dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
    """Without padding, then cut: ONNX has other sizes before and after."""
    kernel = weight.shape[2:]
    a.setdefault("kernel_shape", list(kernel))
    given, kind = a.get("output_shape"), a.get("auto_pad", "NOTSET")
    function, strides, dilations, pads = _window({**a, "auto_pad": "NOTSET"}, x, "conv_transpose")
    n = len(kernel)
    more = a.get("output_padding", [0] * n)
    y = function(x, weight, None, tuple(strides), 0, 0, a.get("group", 1), tuple(dilations))
    for i in range(n):
        whole = y.shape[2 + i] + more[i]
        size = given[i] if given else x.shape[2 + i] * strides[i] if kind.startswith("SAME") else None
        total = pads[i] + pads[n + i] if size is None else max(whole - size, 0)
        before = pads[i] if size is None else total // 2 if kind == "SAME_UPPER" else total - total // 2
        size = whole - total if size is None else size
        y = F.pad(y, [*[0] * (2 * (n - 1 - i)), 0, max(0, before + size - y.shape[2 + i])])
        y = y.narrow(2 + i, before, size)
    return y if bias is None else y + bias.reshape((-1, *[1] * n))


@op("LpPool")
def _lp_pool(a: dict[str, Any], x: Any) -> Any:
    function, strides, dilations, pads = _window(a, x, "avg_pool")
    if a.get("ceil_mode") or any(d != 1 for d in dilations):
        raise LeftOut("LpPool with ceil_mode or dilations")
    p, kernel = a.get("p", 2), tuple(a["kernel_shape"])
    sums = function(_padded(F.abs(x) ** p, pads, 0.0), kernel, tuple(strides)) * math.prod(kernel)
    return sums ** (1.0 / p)


@op("LRN")
def _lrn(a: dict[str, Any], x: Any) -> Any:
    size, channels = a["size"], x.shape[1]
    squares = F.pad(x * x, [*[0] * (2 * (x.ndim - 2)), (size - 1) // 2, size // 2])
    sums = _join(F.add, [squares.narrow(1, i, channels) for i in range(size)])
    return x / (a.get("bias", 1.0) + a.get("alpha", 1e-4) / size * sums) ** a.get("beta", 0.75)


@op("Col2Im")
def _col2im(a: dict[str, Any], x: Any, image: Any, block: Any) -> Any:
    size, kernel = ints(image), ints(block)
    n = len(size)
    strides, dilations, pads = a.get("strides", [1] * n), a.get("dilations", [1] * n), a.get("pads", [0] * 2 * n)
    places: Any = 0
    for i in range(n):  # the place of each element of a block in an image with padding, axis by axis
        wide = size[i] + pads[i] + pads[n + i]
        steps = (wide - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        at = np.arange(kernel[i])[:, None] * dilations[i] + np.arange(steps) * strides[i]
        shape = [1] * 2 * n
        shape[i], shape[n + i] = at.shape
        places = places * wide + at.reshape(shape)
    rows = x.reshape((x.shape[0] * x.shape[1] // math.prod(kernel), -1))
    padded = [size[i] + pads[i] + pads[n + i] for i in range(n)]
    index = Tensor(np.broadcast_to(np.asarray(places).reshape(-1), rows.shape).copy())
    y = F.scatter_add(F.zeros((rows.shape[0], math.prod(padded))), 1, index, rows)
    y = y.reshape((x.shape[0], -1, *padded))
    for i in range(n):
        y = y.narrow(2 + i, pads[i], size[i])
    return y


@op("ReverseSequence")
def _reverse(a: dict[str, Any], x: Any, lengths: Any) -> Any:
    time, batch = a.get("time_axis", 0), a.get("batch_axis", 1)
    place, shape = F.arange(x.shape[time]), [1] * x.ndim
    shape[time] = x.shape[time]
    place = place.reshape(tuple(shape))
    shape[time], shape[batch] = 1, x.shape[batch]
    last = lengths.reshape(tuple(shape))
    return F.gather(x, time, F.where(place < last, last - 1 - place, place).expand(x.shape))


@op("Compress")
def _compress(a: dict[str, Any], x: Any, condition: Any) -> Any:
    x, axis = (x, a["axis"]) if "axis" in a else (x.flatten(), 0)
    return F.index_select(x, axis, Tensor(np.flatnonzero(ints(condition))))


@op("AffineGrid")
def _affine_grid(a: dict[str, Any], theta: Any, size: Any) -> Any:
    batch, _, *sizes = ints(size)
    lines = [np.linspace(-1, 1, n) if a.get("align_corners") else (2 * np.arange(n) + 1) / n - 1 for n in sizes]
    grid = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(sizes)], -1).astype(np.float32)
    points = F.matmul(Tensor(grid.reshape(-1, len(sizes) + 1)), theta.mT)
    return points.reshape((batch, *sizes, len(sizes)))


@op("TensorScatter")
def _tensor_scatter(a: dict[str, Any], past: Any, update: Any, start: Any = None) -> Any:
    axis = a.get("axis", -2) % past.ndim
    first = F.zeros((past.shape[0],), dtype="i64") if start is None else start
    index = first.reshape((-1, *[1] * (past.ndim - 1))) + F.arange(update.shape[axis]).reshape(
        (-1, *[1] * (past.ndim - 1 - axis))
    )
    index = F.remainder(index, past.shape[axis]) if a.get("mode") == "circular" else index
    return F.scatter(past, axis, index.expand(update.shape), update)


@op("HannWindow", "HammingWindow", "BlackmanWindow")
def _wave(a: dict[str, Any], size: Any) -> Any:
    n = ints(size)[0]
    turn = F.arange(n).float() * (2 * math.pi / (n if a.get("periodic", 1) else n - 1))
    parts = {"HannWindow": (0.5, 0.5, 0.0), "HammingWindow": (25 / 46, 21 / 46, 0.0)}
    first, second, third = parts.get(a["op_type"], (0.42, 0.5, 0.08))
    return (first - second * F.cos(turn) + third * F.cos(2 * turn)).to(element_type(a.get("output_datatype", 1)))


@op("DFT")
def _dft(a: dict[str, Any], x: Any, length: Any = None, axis: Any = None) -> Any:
    """A product with a constant matrix of cosines and sines."""
    d = (a.get("axis", 1) if axis is None and "axis" in a else -2 if axis is None else ints(axis)[0]) % x.ndim
    inverse, half = a.get("inverse"), a.get("onesided")
    n = x.shape[d] if length is None else ints(length)[0]
    given = x.shape[d]
    if inverse and half and length is None:
        n = 2 * (given - 1)
    k = np.arange(n // 2 + 1 if half and not inverse else n)
    turn = 2 * math.pi / n * np.outer(k, np.arange(given)) * (1 if inverse else -1)
    both = np.ones(given)  # the other half of a spectrum of real numbers
    both[1 : (n + 1) // 2] = 2 if inverse and half else 1
    factor = both / n if inverse else both
    cos, sin = (Tensor((f(turn) * factor).astype(np.float32)).T for f in (np.cos, np.sin))
    parts = [F.movedim(p, d, -1) for p in x.unbind(-1)]
    real = parts[0] @ cos if len(parts) == 1 else parts[0] @ cos - parts[1] @ sin
    imaginary = parts[0] @ sin if len(parts) == 1 else parts[0] @ sin + parts[1] @ cos
    found = [F.movedim(p, -1, d) for p in ((real,) if inverse and half else (real, imaginary))]
    return F.stack(found, -1)


@op("RotaryEmbedding")
def _rotary(a: dict[str, Any], x: Any, cos: Any, sin: Any, places: Any = None) -> Any:
    y = x.transpose(1, 2) if x.ndim == 4 else x.reshape((*x.shape[:2], a["num_heads"], -1))
    if places is None:
        places = F.arange(y.shape[0] * y.shape[1]).reshape(y.shape[:2])
        cos, sin = (t.reshape((-1, t.shape[-1])) for t in (cos, sin))
    y = F.rope(y, places, sin, cos, "gpt_j" if a.get("interleaved") else "gpt_neox")
    return y.transpose(1, 2) if x.ndim == 4 else y.reshape(x.shape)


@op("SwiGLU")
def _swiglu(a: dict[str, Any], x: Any, y: Any) -> Any:
    return x * F.sigmoid(x * a.get("alpha", 1.0)) * y


@op("CausalConvWithState")
def _causal_conv(a: dict[str, Any], x: Any, weight: Any, bias: Any = None, past: Any = None) -> Any:
    more = weight.shape[2] - 1
    joined = F.pad(x, (more, 0)) if past is None else F.cat([past, x], 2)
    y = F.conv1d(joined, weight, bias, groups=x.shape[1])
    y = F.silu(y) if a.get("activation", "none") != "none" else y
    return [y, joined.narrow(2, joined.shape[2] - more, more)]


@op("LinearAttention")
def _linear_attention(
    a: dict[str, Any], q: Any, k: Any, v: Any, past: Any = None, decay: Any = None, beta: Any = None
) -> Any:
    """A scan over the tokens: the state is [batch, heads, key, value]."""
    heads, shared, (b, t, _) = a["q_num_heads"], a["kv_num_heads"], q.shape
    dtype, kept = q.dtype, q.dtype if past is None else past.dtype

    def split(x: Any, n: int) -> Any:
        return x.float().reshape((b, t, n, -1)).transpose(0, 1)  # tokens first

    key, value = split(k, shared), split(v, shared)
    xs = {"q": split(q, heads), "k": key, "v": value}
    xs |= {} if decay is None else {"decay": split(decay, shared)}
    xs |= {} if beta is None else {"beta": split(beta, beta.shape[-1])}
    scale = a.get("scale") or xs["q"].shape[-1] ** -0.5
    state = F.zeros((b, shared, key.shape[-1], value.shape[-1])) if past is None else past.float()

    def cell(state: Any, x: Any) -> Any:
        state = state if "decay" not in x else state * F.exp(x["decay"]).unsqueeze(-1)
        new = x["v"]
        if "beta" in x:
            new = x["beta"] * (new - (x["k"].unsqueeze(-2) @ state).squeeze(-2))
        state = state + x["k"].unsqueeze(-1) * new.unsqueeze(-2)
        read = F.repeat_interleave(state, heads // shared, 1) if heads != shared else state
        return state, (x["q"].unsqueeze(-2) @ read).squeeze(-2) * scale

    state, y = mp.scan(cell, state, xs)
    return [y.transpose(0, 1).flatten(2).to(dtype), state.to(kept)]


class Many(nn.Module):
    """The graphs of many tests in one forward."""

    def __init__(self, runs: list[Any]) -> None:
        super().__init__()
        self.runs = runs

    def forward(self, *tensors: Any) -> Any:
        rest = iter(tensors)
        return [run([next(rest) for _ in range(n)]) for run, n in self.runs]


class Run:
    """A test's graph over those of its inputs that are not constants."""

    def __init__(self, model: Any, inputs: list[Any], constant: set[int]) -> None:
        import onnx

        self.graph = model.graph
        self.names = [i.name for i in self.graph.input]
        self.inputs = [None if x is None else np.asarray(x) for x in inputs]
        self.constant = constant
        self.weights = {t.name: onnx.numpy_helper.to_array(t) for t in self.graph.initializer}

    @property
    def given(self) -> list[Any]:
        return [x for i, x in enumerate(self.inputs) if i not in self.constant]

    def __call__(self, given: list[Any]) -> Any:
        rest = iter(given)
        values: dict[str, Any] = {n: Tensor(w) for n, w in self.weights.items()}
        for i, (name, x) in enumerate(zip(self.names, self.inputs, strict=True)):
            values[name] = Tensor(x) if i in self.constant else next(rest)
        for node in self.graph.node:
            if node.op_type not in OPS or node.domain not in ("", "ai.onnx"):
                raise LeftOut(f"op {node.op_type}")
            attrs = {a.name: _attribute(a) for a in node.attribute}
            attrs |= {"op_type": node.op_type, "outputs": len(node.output)}
            xs = [values[n] if n else None for n in node.input]
            found = OPS[node.op_type](attrs, *xs)
            for name, y in zip(node.output, found if isinstance(found, list) else [found], strict=False):
                values[name] = y
        return [values[o.name] for o in self.graph.output]


def _attribute(a: Any) -> Any:
    import onnx

    value = onnx.helper.get_attribute_value(a)
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, onnx.GraphProto):
        raise LeftOut("a graph inside of a node")
    return value.decode() if isinstance(value, bytes) else list(value) if a.type in (6, 7) else value


def _is_flat(x: Any) -> bool:
    return bool(np.ndim(x) <= 1)


def prepared(case: Any, inputs: list[Any]) -> Run:
    """The test as a function; inputs that decide shapes become constants, fewest first."""
    import onnx

    if len(case.model.graph.input) != len(inputs):
        raise LeftOut("inputs that are missing")
    inputs = [onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x for x in inputs]
    for x in inputs:
        if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "fiubV":
            raise LeftOut(f"an input of type {type(x).__name__}")
        try:
            as_dtype(np.asarray(x).dtype)
        except MonoplanError as error:
            raise LeftOut(error.what) from error
    short = {i for i, x in enumerate(inputs) if np.asarray(x).dtype.kind in "iub" and np.ndim(x) <= 1}
    reason: Exception | None = None
    single, flat = ({i for i, x in enumerate(inputs) if test(x)} for test in (lambda x: np.size(x) == 1, _is_flat))
    for constant in (set(), short, short | single, flat):
        run = Run(case.model, inputs, constant)
        try:
            trace(Many([(run, len(run.given))]), *(mp.spec(*x.shape, dtype=x.dtype) for x in run.given))
            return run
        except (LeftOut, MonoplanError, TypeError, KeyError, IndexError, ValueError) as error:
            reason = error.__cause__ if isinstance(error.__cause__, LeftOut) else error
    raise LeftOut(str(reason).split("\n")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--at-once", type=int, default=100, help="tests in one plan")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    from onnx.backend.test.case.node import collect_testcases

    runs: list[tuple[Any, Run, Any]] = []
    left: collections.Counter[str] = collections.Counter()
    total = 0
    for case in collect_testcases(None):
        kinds = {n.op_type for n in case.model.graph.node}
        if args.ops and not kinds & set(args.ops):
            continue
        total += 1
        inputs, outputs = case.data_sets[0]
        try:
            runs.append((case, prepared(case, list(inputs)), outputs))
        except LeftOut as error:
            left[f"{case.name}: {error}" if args.ops else str(error)[:90]] += 1
    failed: list[str] = []
    for at in range(0, len(runs), args.at_once):
        part = runs[at : at + args.at_once]
        module = Many([(run, len(run.given)) for _, run, _ in part])
        arrays = [x for _, run, _ in part for x in run.given]
        results = module(*map(Tensor, arrays)) if args.eager else mp.compile(module)(*arrays)
        for (case, _, wanted), got in zip(part, results, strict=True):
            if wrong := difference(got, wanted, case):
                failed.append(f"{case.name}: {wrong}")
    print(*(f"{n:5} left out: {text}" for text, n in left.most_common()), sep="\n")
    print(*failed, sep="\n")
    how = "eager" if args.eager else "compiled"
    print(
        f"{len(runs) - len(failed)} of {total} tests pass {how}, {len(failed)} fail, {sum(left.values())} are left out"
    )
    return 1 if failed else 0


def difference(got: Any, wanted: Any, case: Any) -> str:
    import onnx

    for a, b in zip(got, wanted, strict=False):
        b = onnx.numpy_helper.to_array(b) if isinstance(b, onnx.TensorProto) else b
        a, b = np.asarray(a.numpy() if isinstance(a, Tensor) else a), np.asarray(b)
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
        wide = np.float64 if a.dtype.kind in "fV" else a.dtype
        # Half floats are rounded after each op, here and there after different ones.
        relative = max(case.rtol, {"float16": 4e-3, "bfloat16": 2e-2}.get(a.dtype.name, 0))
        absolute = max(case.atol, {"float16": 1e-3, "bfloat16": 1e-2}.get(a.dtype.name, 1e-6))
        close = np.isclose(a.astype(wide), b.astype(wide), relative, absolute, equal_nan=True)
        if not close.all():
            at = tuple(np.argwhere(~close)[0])
            return f"{a[at]} for {b[at]} at {list(map(int, at))}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
