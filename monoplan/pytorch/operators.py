"""What each operator of PyTorch's graphs is here: one small function by its name, `aten.add.Tensor` or `aten.add` for
all of its forms. Arguments come as PyTorch has them; element types are monoplan's."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from monoplan.frontend import functional as F
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import DType, bool_, f32, i64

Function = Callable[..., Any]
OPERATORS: dict[str, Function] = {}
_END = 2**63 - 1  # what PyTorch writes for the end of a slice


def aten(*names: str) -> Callable[[Function], Function]:
    """Registers a function for operators."""

    def register(function: Function) -> Function:
        OPERATORS.update({f"aten.{name}": function for name in names})
        return function

    return register


def find(name: str) -> Function | None:
    """The function of an operator: of just this form, or of all forms."""
    return OPERATORS.get(name) or OPERATORS.get(name.rpartition(".")[0])


# Operators that have the name and the arguments of a function here.
_SAME = """
    abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d all amax amin any argmax argmin argsort asin asinh atan
    atan2 atanh avg_pool1d bitwise_and bitwise_not bitwise_or bitwise_xor bmm cat ceil celu chunk clamp conv1d conv2d
    cos cosh cummax cummin cumprod cumsum diag_embed diagonal div eq erf erfc exp exp2 expm1 eye flatten flip floor
    floor_divide fmod frac full full_like gather ge gelu glu gt hardshrink hardsigmoid hardswish hardtanh index_add
    index_copy index_fill index_put index_select isfinite isinf isnan le leaky_relu lerp linspace log log10
    log1p log2 logical_and logical_not logical_or logical_xor logsigmoid logsumexp lt masked_fill matmul max maximum
    mean min minimum mish movedim mul nan_to_num narrow ne neg one_hot ones ones_like outer pad permute pow prelu prod
    reciprocal relu relu6 remainder reshape roll round rsqrt scatter scatter_add scatter_reduce select selu sigmoid
    silu sin sinh softplus softshrink sort split sqrt square squeeze stack std sum take tan tanh threshold tile
    topk tril triu trunc unbind unflatten unsqueeze var var_mean where zeros zeros_like
"""
OPERATORS.update({f"aten.{name}": getattr(F, name) for name in _SAME.split()})
_OTHER_NAMES = {
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "mm": "matmul", "view": "reshape",
    "_unsafe_view": "reshape", "clip": "clamp", "clamp_min": "clamp", "divide": "div", "true_divide": "div",
    "empty": "zeros", "split_with_sizes": "split", "concat": "cat", "absolute": "abs", "negative": "neg",
    "arctan2": "atan2", "clamp_min.Tensor": "maximum", "clamp_max.Tensor": "minimum", "multiply": "mul", "less": "lt",
    "greater": "gt", "less_equal": "le", "greater_equal": "ge", "not_equal": "ne", "special_erf": "erf",
    "min.other": "minimum", "max.other": "maximum", "special_expit": "sigmoid", "log_sigmoid": "logsigmoid",
    "__lshift__": "left_shift", "__rshift__": "right_shift", "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
}  # fmt: skip
OPERATORS.update({f"aten.{name}": getattr(F, here) for name, here in _OTHER_NAMES.items()})


# Operators that change nothing here.
@aten(
    "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "lift_fresh", "dropout", "feature_dropout", "detach_"
)
def _itself(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


@aten(
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size"
)
def _nothing(*args: Any, **kwargs: Any) -> None:
    """Checks of PyTorch's: it made them when the example ran, and a plan checks sizes itself."""


# Operators that are one expression here, by their names.
_SHORT: dict[str, Function] = {
    "type_as to.other": lambda x, other, *args, **kwargs: as_tensor(x).to(as_tensor(other).dtype),
    "scalar_tensor": lambda value, *, dtype=None: F.full((), value, dtype=dtype or f32),
    "new_zeros new_empty": lambda x, size, **kwargs: _new_full(x, size, 0, **kwargs),
    "new_ones": lambda x, size, **kwargs: _new_full(x, size, 1, **kwargs),
    "add add_": lambda a, b, *, alpha=1: F.add(a, b if alpha == 1 else F.mul(b, alpha)),
    "sub subtract": lambda a, b, *, alpha=1: F.sub(a, b if alpha == 1 else F.mul(b, alpha)),
    "rsub": lambda a, b, *, alpha=1: F.sub(b, a if alpha == 1 else F.mul(a, alpha)),
    "dist": lambda x, y, p=2: _norm(F.sub(x, y), p),
    "ldexp": lambda x, power: F.mul(x, F.pow(2.0, power)),
    "pow.Scalar": lambda base, exponent: F.pow(as_tensor(base), exponent),
    "addcmul": lambda x, a, b, *, value=1: F.add(x, F.mul(F.mul(a, b), value)),
    "clamp_max": lambda x, most: F.clamp(x, None, most),
    "embedding": lambda weight, ids, *args: F.embedding(ids, weight),
    "einsum": lambda equation, operands, **kwargs: F.einsum(equation, *operands),
    "repeat_interleave": lambda x, repeats, dim=None, *, output_size=None: F.repeat_interleave(x, repeats, dim),
    "t numpy_T": lambda x: x if x.ndim < 2 else x.transpose(0, 1),
    "transpose swapaxes": lambda x, a, b: x if x.ndim == 0 else x.transpose(a, b),
    "expand": lambda x, size, *, implicit=False: x.expand(*size),
    "expand_as": lambda x, other: x.expand(*other.shape),
    "repeat": lambda x, sizes: x.repeat(*sizes),
    "view_as reshape_as": lambda x, other: x.reshape(*other.shape),
    "index _unsafe_index": lambda x, indices: x[tuple(slice(None) if i is None else i for i in indices)],
    "copy": lambda x, source, *args: source.to(x.dtype).expand(*x.shape),
    "constant_pad_nd": lambda x, pad, value=0: F.pad(x, pad, "constant", value),
    "reflection_pad1d reflection_pad2d": lambda x, pad: F.pad(x, pad, "reflect"),
    "replication_pad1d replication_pad2d": lambda x, pad: F.pad(x, pad, "replicate"),
    "adaptive_max_pool1d": lambda x, size: (F.adaptive_max_pool1d(x, size), None),
    "adaptive_max_pool2d": lambda x, size: (F.adaptive_max_pool2d(x, size), None),
    "sym_size": lambda x, dim: x.shape[dim],
    "sym_numel": lambda x: x.numel(),
}
for _names, _function in _SHORT.items():
    aten(*_names.split())(_function)


# -- element types and new tensors -----------------------------------------------------------------------


@aten("_to_copy", "to.dtype_layout")
def _to_copy(x: Any, *, dtype: DType | None = None, **kwargs: Any) -> Any:
    return x if dtype is None else as_tensor(x).to(dtype)


@aten("to.dtype", "to.device")
def _to(x: Any, *args: Any, dtype: DType | None = None, **kwargs: Any) -> Any:
    dtype = next((a for a in args if isinstance(a, DType)), dtype)
    return x if dtype is None else as_tensor(x).to(dtype)


@aten("new_full")
def _new_full(x: Any, size: Any, value: Any, *, dtype: DType | None = None, **kwargs: Any) -> Any:
    return F.full(tuple(size), value, dtype=dtype or as_tensor(x).dtype)


@aten("arange")
def _arange(start: Any, end: Any = None, step: Any = 1, *, dtype: DType | None = None, **kwargs: Any) -> Any:
    dtype = dtype or (f32 if any(isinstance(x, float) for x in (start, end, step)) else i64)
    return F.arange(int(start) if isinstance(start, bool) else start, end, step, dtype=dtype)


# -- arithmetic -------------------------------------------------------------------------------------------


@aten("addmm", "baddbmm", "addmv")
def _addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if as_tensor(a).dtype.is_integer:
        beta, alpha = int(beta), int(alpha)
    product = F.matmul(a, b) if alpha == 1 else F.mul(F.matmul(a, b), alpha)
    if beta == 0:  # what is NaN there does not count
        return product.to(as_tensor(a).dtype)
    return F.add(product, bias if beta == 1 else F.mul(bias, beta)).to(as_tensor(a).dtype)


@aten("addbmm")
def _addbmm(bias: Any, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _addmm(bias, a.transpose(0, 1).flatten(1), b.flatten(0, 1), beta=beta, alpha=alpha)


@aten("linear")
def _linear(x: Tensor, weight: Tensor, bias: Any = None) -> Any:
    if weight.ndim > 1:
        return F.linear(x, weight, bias)
    return F.matmul(x, weight) if bias is None else F.add(F.matmul(x, weight), bias)


@aten("bilinear")
def _bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Any = None) -> Any:
    y = F.einsum("...i,oij,...j->...o", a, weight, b)
    return y if bias is None else F.add(y, bias)


_ON_BOOLS = {
    "add": F.logical_or, "mul": F.logical_and, "maximum": F.logical_or, "minimum": F.logical_and,
    "max.other": F.logical_or, "min.other": F.logical_and, "clamp_min.Tensor": F.logical_or,
    "clamp_max.Tensor": F.logical_and,
}  # fmt: skip


def _on_bools(numbers: Function, bools: Function) -> Function:
    """A function of two that is another of two tensors of bools."""

    def either(a: Any, b: Any, **kwargs: Any) -> Any:
        are_bools = all(isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype == bool_) for x in (a, b))
        return bools(a, b) if are_bools and not kwargs else numbers(a, b, **kwargs)

    return either


OPERATORS.update({f"aten.{name}": _on_bools(OPERATORS[f"aten.{name}"], here) for name, here in _ON_BOOLS.items()})


@aten("sign", "sgn")
def _sign(x: Tensor) -> Any:
    return x if x.dtype == bool_ else F.sign(x)


@aten("signbit")
def _signbit(x: Tensor) -> Any:
    """Whether a number is negative, -0.0 included; of NaN it is not known."""
    negative = F.zeros_like(x) if x.dtype == bool_ else F.lt(x, 0)
    if not x.dtype.is_float:
        return negative
    return F.logical_or(negative, F.logical_and(F.eq(x, 0), F.lt(F.reciprocal(x), 0)))


@aten("copysign")
def _copysign(x: Any, sign: Any) -> Any:
    size, negative = F.abs(_floats(x)), _signbit(as_tensor(sign))
    return F.where(negative, F.neg(size), size)


@aten("hypot")
def _hypot(a: Tensor, b: Tensor) -> Any:
    """sqrt(a * a + b * b), where the squares may be too large for the type."""
    a, b = F.abs(a), F.abs(b)
    large, small = F.maximum(a, b), F.minimum(a, b)
    ratio = F.div(small, F.where(F.eq(large, 0), 1.0, large))
    size = F.mul(large, F.sqrt(F.add(F.square(ratio), 1.0)))
    return F.where(F.logical_or(F.isinf(a), F.isinf(b)), math.inf, size)


@aten("fmax")
def _fmax(a: Tensor, b: Tensor) -> Any:
    return _without_nan(F.maximum, a, b)


@aten("fmin")
def _fmin(a: Tensor, b: Tensor) -> Any:
    return _without_nan(F.minimum, a, b)


def _without_nan(function: Function, a: Tensor, b: Tensor) -> Any:
    """Of a number and NaN the number."""
    if not (a.dtype.is_float or b.dtype.is_float):
        return _on_bools(function, F.logical_or if function is F.maximum else F.logical_and)(a, b)
    return F.where(F.isnan(a), b, F.where(F.isnan(b), a, function(a, b)))


def _floats(x: Any) -> Tensor:
    x = as_tensor(x)
    return x if x.dtype.is_float else x.to(f32)


@aten("elu")
def _elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    y = F.elu(x if input_scale == 1 else F.mul(x, input_scale), alpha)
    return y if scale == 1 else F.mul(y, scale)


@aten("isin")
def _isin(x: Any, values: Any, **kwargs: Any) -> Any:
    flat = as_tensor(values).reshape(-1)
    return F.any(F.eq(as_tensor(x).unsqueeze(-1), flat), -1)


# -- shapes and places ------------------------------------------------------------------------------------


@aten("slice")
def _slice(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    end = None if isinstance(end, int) and end >= _END else end
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


@aten("diff")
def _diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    parts = [p for p in (prepend, x, append) if p is not None] if n else [x]
    x = x if len(parts) == 1 else F.cat(parts, dim)
    for _ in range(n):
        count = x.shape[dim] - 1
        later, earlier = x.narrow(dim, 1, count), x.narrow(dim, 0, count)
        x = F.ne(later, earlier) if x.dtype == bool_ else F.sub(later, earlier)
    return x


@aten("slice_scatter")
def _slice_scatter(x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    size = x.shape[dim]
    first = 0 if start is None else start
    last = size if end is None or (isinstance(end, int) and end >= _END) else end
    index = F.arange(first, last, step, dtype=i64)
    return F.index_copy(x, dim, index, source.to(x.dtype))


@aten("select_scatter")
def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Any:
    place = F.full((1,), index % int(x.shape[dim]), dtype=i64)
    return F.index_copy(x, dim, place, source.unsqueeze(dim).to(x.dtype))


@aten("unfold")
def _unfold(x: Tensor, dim: int, size: int, step: int) -> Any:
    if x.ndim == 0:
        return x.reshape(1)[:size]
    dim %= x.ndim
    count = (x.shape[dim] - size) // step + 1
    places = F.arange(count).unsqueeze(1) * step + F.arange(size)
    return x.movedim(dim, -1)[..., places].movedim(-2, dim)


@aten("pixel_shuffle")
def _pixel_shuffle(x: Tensor, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    parts = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return parts.permute(*order).reshape(*lead, channels // factor**2, height * factor, width * factor)


# -- reductions and norms ---------------------------------------------------------------------------------


@aten("linalg_vector_norm", "norm")
def _norm(x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Any:
    kept = dtype or x.dtype
    return F.norm(x.to(f32) if kept.bits < 32 else x.to(kept), p, dim, keepdim).to(kept)  # powers of halves overflow


@aten("cdist", "_cdist_forward")
def _cdist(a: Tensor, b: Tensor, p: float = 2.0, mode: Any = None) -> Any:
    return _norm(F.sub(a.unsqueeze(-2), b.unsqueeze(-3)), p, -1)


@aten("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Tensor, ids: Tensor, offsets: Tensor, scale: bool = False, mode: int = 0, sparse: bool = False,
    weights: Any = None, include_last: bool = False, padding: int | None = -1,
) -> Any:  # fmt: skip
    """Sums (mode 0), means or maxima of the rows in each bag; an offset says where a bag begins."""
    bags, count = offsets.shape[0] - int(include_last), ids.shape[0]
    bag = F.ge(F.arange(count).unsqueeze(1), offsets[:bags].to(i64)).sum(1) - 1
    rows = F.embedding(ids, weight)
    is_used = F.ones((count,), dtype=rows.dtype)
    if padding is not None and padding >= 0:
        is_used = F.ne(ids, padding).to(rows.dtype)
    places, wide = bag.unsqueeze(1).expand(*rows.shape), f32 if rows.dtype.bits < 32 else rows.dtype
    if mode == 2:
        rows = F.where(is_used.unsqueeze(1) != 0, rows, -math.inf)
        most = F.scatter_reduce(F.full((bags, rows.shape[1]), -math.inf, dtype=rows.dtype), 0, places, rows, "amax")
        return F.where(F.eq(most, -math.inf), 0.0, most), None, None, None
    given = is_used if weights is None else F.mul(is_used, weights)
    rows = F.mul(rows.to(wide), given.unsqueeze(1).to(wide))
    total = F.scatter_add(F.zeros((bags, rows.shape[1]), dtype=wide), 0, places, rows)
    if mode == 1:
        used = F.scatter_add(F.zeros((bags,), dtype=wide), 0, bag, is_used.to(wide))
        total = F.div(total, F.clamp(used, 1.0).unsqueeze(1))
    return total.to(weight.dtype), None, None, None


@aten("_safe_softmax")
def _safe_softmax(x: Tensor, dim: int, dtype: DType | None = None) -> Any:
    y = _softmax(x, dim, dtype)
    return F.masked_fill(y, F.all(F.eq(x, -math.inf), dim, True), 0.0)


@aten("softmax", "_softmax", "special_softmax")
def _softmax(x: Tensor, dim: int, dtype: DType | bool | None = None) -> Any:
    return F.softmax(x.to(dtype) if isinstance(dtype, DType) else x, dim)


@aten("log_softmax", "_log_softmax")
def _log_softmax(x: Tensor, dim: int, dtype: DType | bool | None = None) -> Any:
    return F.log_softmax(x.to(dtype) if isinstance(dtype, DType) else x, dim)


@aten("native_layer_norm")
def _native_layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    return F.layer_norm(x, shape, weight, bias, eps), None, None


@aten("layer_norm")
def _layer_norm(
    x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, enable: bool = True
) -> Any:
    return F.layer_norm(x, shape, weight, bias, eps)


@aten("group_norm")
def _group_norm(
    x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, enable: bool = True
) -> Any:
    return F.group_norm(x, groups, weight, bias, eps)


@aten("instance_norm")
def _instance_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, own: bool, momentum: float, eps: float, cudnn: bool
) -> Any:
    return F.instance_norm(x, mean, var, weight, bias, own, momentum, eps)


@aten("native_group_norm")
def _native_group_norm(
    x: Tensor, weight: Any, bias: Any, batch: Any, channels: Any, rest: Any, groups: int, eps: float
) -> Any:
    return F.group_norm(x, groups, weight, bias, eps), None, None


@aten("rms_norm")
def _rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    steps = {"f32": 2.0**-23, "f64": 2.0**-52, "f16": 2.0**-10, "bf16": 2.0**-7}  # what PyTorch takes without eps
    return F.rms_norm(x, shape, weight, steps[x.dtype.name] if eps is None else eps)


@aten("batch_norm")
def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool
) -> Any:
    return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)


@aten("_native_batch_norm_legit_no_training")
def _native_batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps), None, None


# -- windows ----------------------------------------------------------------------------------------------


@aten("convolution")
def _convolution(
    x: Tensor, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
    groups: int,
) -> Any:  # fmt: skip
    one = weight.ndim == 3  # x may have no batch
    if transposed:
        function = F.conv_transpose1d if one else F.conv_transpose2d
        return function(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return (F.conv1d if one else F.conv2d)(x, weight, bias, stride, padding, dilation, groups)


@aten("conv_transpose1d", "conv_transpose2d.input")
def _conv_transpose(
    x: Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    function = F.conv_transpose1d if weight.ndim == 3 else F.conv_transpose2d
    return function(x, weight, bias, stride, padding, output_padding, groups, dilation)


@aten("max_pool2d_with_indices")
def _max_pool_indices(*args: Any) -> Any:
    return _max_pool(*args), None  # there are no indices: who uses them gets an error


@aten("max_pool1d", "max_pool2d")
def _max_pool(
    x: Tensor, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    function = F.max_pool1d if len(size) == 1 else F.max_pool2d
    return function(x, size, stride or None, padding, dilation, ceil_mode)


@aten("avg_pool2d")
def _avg_pool2d(
    x: Tensor, size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, counted: bool = True,
    divisor: Any = None,
) -> Any:  # fmt: skip
    return F.avg_pool2d(x, size, stride or None, padding, ceil_mode, counted, divisor)


@aten("upsample_nearest2d.vec", "upsample_nearest1d.vec")
def _upsample_nearest(x: Tensor, size: Any, factors: Any) -> Any:
    return F.interpolate(x, size, None if size is not None else tuple(factors), "nearest")


@aten("upsample_bilinear2d.vec")
def _upsample_bilinear(x: Tensor, size: Any, align: bool, factors: Any) -> Any:
    return F.interpolate(x, size, None if size is not None else tuple(factors), "bilinear", align)


# -- attention --------------------------------------------------------------------------------------------


@aten("scaled_dot_product_attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if q.ndim > 4:
        raise ArgumentError(f"attention over tensors of rank {q.ndim} is not covered", fix="join leading dimensions")
    if q.ndim != k.ndim or q.ndim != v.ndim:
        q, k, v = (t.unsqueeze(0) if t.ndim == 3 else t for t in (q, k, v))
    batches = {t.shape[0] for t in (q, k, v) if t.ndim == 4}
    if len(batches) == 2 and 1 in batches:  # one batch of queries, or of keys, for all
        (batch,) = batches - {1}
        q, k, v = (t.expand(batch, *t.shape[1:]) for t in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, causal_alignment="upper_left"
    )


# Python's own functions, on sizes and on results that are several tensors.
_PYTHON = "getitem add sub mul floordiv mod neg eq ne lt le gt ge truediv pow"
PYTHON: dict[str, Function] = {name: getattr(operator, name) for name in _PYTHON.split()}
PYTHON |= {"sym_min": min, "sym_max": max, "sym_sqrt": math.sqrt, "sym_int": int, "sym_not": operator.not_}
