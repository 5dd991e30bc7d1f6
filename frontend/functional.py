"""monoplan.nn.functional: functions over tensors with PyTorch's names and signatures, eager and traced alike.

Pointwise ops and reductions come from the op registry (op_functions.py); what is written out here takes more than its
op does, or is made of several ops. `out=` takes the result over; `inplace=True` (which wins over `out=`) writes it into
the input.
"""

from __future__ import annotations

import builtins
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from monoplan.frontend import op_functions, windows
from monoplan.frontend.op_functions import *  # noqa: F403
from monoplan.frontend.op_functions import exp, gelu, log, max, min, write
from monoplan.frontend.tensor import Tensor, adapted, as_tensor, binary, call, floating, full_axis, scalar_like
from monoplan.frontend.tensor import matmul as _matmul
from monoplan.frontend.windows import *  # noqa: F403
from monoplan.ir.dims import Dim, Expr, equal
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import as_dtype, bool_, f32, i64

BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


class RopeAlgo(enum.Enum):
    """Which dimensions of a head rotate together."""

    GPT_J = "gpt_j"  # neighbours: (2i, 2i + 1)
    GPT_NEOX = "gpt_neox"  # halves: (i, i + half), as LLaMA does


class Sorted(NamedTuple):
    """Values and the indices they came from."""

    values: Tensor
    indices: Tensor


# -- pointwise, reductions -----------------------------------------------------------------------------

amax, amin = max, min


def pow(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a to the power b: of floats, and of integers to a constant whole power of 0 or more; else in f32."""
    return write(binary("pow", input, other), out)


def matmul(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """Matrix product; one-dimensional operands are treated as in numpy."""
    return write(_matmul(*adapted(input, other)), out)


bmm = matmul


def where(condition: Any, input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """input where the condition holds, else other; numbers take the other's element type."""
    numbers = (bool, int, float, Expr, np.generic)
    if isinstance(input, numbers):
        input = scalar_like(input, as_tensor(other))
    a = as_tensor(input)
    b = scalar_like(other, a) if isinstance(other, numbers) else as_tensor(other)
    return write(call("where", condition, a, b), out)


def masked_fill(input: Any, mask: Any, value: Any) -> Tensor:
    """The input with `value` where the mask holds."""
    x = as_tensor(input)
    return where(mask, scalar_like(value, x) if not isinstance(value, Tensor) else value, x)


def clamp(input: Any, min: Any = None, max: Any = None, *, out: Tensor | None = None) -> Tensor:
    """The input held between min and max."""
    x = as_tensor(input)
    x = x if min is None else binary("maximum", x, min)
    return write(x if max is None else binary("minimum", x, max), out)


def cast(input: Any, dtype: Any) -> Tensor:
    """The input in another element type; floats to integers truncate."""
    return as_tensor(input).to(dtype)  # type: ignore[no-any-return]


def cumsum(input: Any, dim: int, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
    """Running sums along a dimension."""
    return write(call("cumsum", input if dtype is None else cast(input, dtype), axis=dim), out)


def sort(input: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Sorted:
    """Values in order along a dimension, with their indices; always stable."""
    return Sorted(*call("sort", input, axis=dim, descending=descending))


def argsort(input: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The indices that sort a dimension."""
    return sort(input, dim, descending).indices


def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Sorted:
    """The k largest values along a dimension, with their indices, largest first; ties go to the lowest."""
    if not largest:
        raise ArgumentError("topk gives the largest values only", fix="use F.sort, or F.topk of -input")
    return Sorted(*call("topk", input, k=k, axis=dim))


# -- shapes --------------------------------------------------------------------------------------------


def reshape(input: Any, shape: Sequence[Dim]) -> Tensor:
    """The same elements in another shape; one size may be -1."""
    return as_tensor(input).reshape(tuple(shape))


def transpose(input: Any, dim0: int, dim1: int) -> Tensor:
    """Two dimensions swapped."""
    return as_tensor(input).transpose(dim0, dim1)


def permute(input: Any, dims: Sequence[int]) -> Tensor:
    """Dimensions in another order."""
    return as_tensor(input).permute(tuple(dims))


def narrow(input: Any, dim: int, start: Dim, length: Dim) -> Tensor:
    """`length` elements of a dimension from `start`."""
    return as_tensor(input).narrow(dim, start, length)


def expand(input: Any, shape: Sequence[Dim]) -> Tensor:
    """Broadcast to a larger shape; -1 keeps a size."""
    return as_tensor(input).expand(tuple(shape))


def split(input: Any, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of the given size or sizes along a dimension."""
    return as_tensor(input).split(split_size, dim)


def chunk(input: Any, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """`chunks` pieces along a dimension."""
    return as_tensor(input).chunk(chunks, dim)


def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """A range of dimensions as one."""
    return as_tensor(input).flatten(start_dim, end_dim)


def squeeze(input: Any, dim: int) -> Tensor:
    """Without a dimension of size 1."""
    return as_tensor(input).squeeze(dim)


def unsqueeze(input: Any, dim: int) -> Tensor:
    """With a new dimension of size 1."""
    return as_tensor(input).unsqueeze(dim)


def cat(tensors: Sequence[Any], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along a dimension."""
    if not tensors:
        raise ArgumentError("cat needs at least one tensor")
    return write(call("concat", *tensors, axis=dim), out)


concat = concatenate = cat


def stack(tensors: Sequence[Any], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors of one shape joined along a new dimension."""
    return cat([as_tensor(t).unsqueeze(dim) for t in tensors], dim, out=out)


def repeat_interleave(input: Any, repeats: int, dim: int) -> Tensor:
    """Each element of a dimension `repeats` times in a row."""
    return call("repeat", input, repeats=repeats, axis=dim)  # type: ignore[no-any-return]


def repeat_kv(hidden_states: Any, n_rep: int, dim: int = -3) -> Tensor:
    """Each head n_rep times in a row: [batch, heads, seq, dim] to [batch, heads * n_rep, seq, dim]."""
    return as_tensor(hidden_states) if n_rep == 1 else repeat_interleave(hidden_states, n_rep, dim)


# -- lookups -------------------------------------------------------------------------------------------


def gather(input: Any, dim: int, index: Any) -> Tensor:
    """input[…, index[…], …] element by element, as torch.gather; shapes agree except along `dim`."""
    return call("take_along", input, index, axis=dim)  # type: ignore[no-any-return]


def take_along(input: Any, index: Any, dim: int = -1) -> Tensor:
    """The same as gather, with the index first."""
    return gather(input, dim, index)


def index_select(input: Any, dim: int, index: Any) -> Tensor:
    """Slices of the input along a dimension, by an index of any rank (numpy's take)."""
    return call("gather", input, index, axis=dim)  # type: ignore[no-any-return]


def select_rows(input: Any, rows: Any) -> Tensor:
    """input[b, rows[b]] for each b, the dimension kept: the last valid token of each sequence."""
    return call("select_rows", input, rows)  # type: ignore[no-any-return]


# -- new tensors ---------------------------------------------------------------------------------------


def full(size: Any, fill_value: float | int | bool, *, dtype: Any = None) -> Tensor:
    """One value everywhere; the element type is that of the value unless given."""
    shape = tuple(size) if isinstance(size, tuple | list) else (size,)
    kind = bool_ if isinstance(fill_value, bool) else i64 if isinstance(fill_value, int) else f32
    chosen = kind if dtype is None else as_dtype(dtype)
    return call("full", shape=shape, value=fill_value, dtype=chosen)  # type: ignore[no-any-return]


def zeros(*size: Any, dtype: Any = f32) -> Tensor:
    """Zeros, of f32 unless said otherwise."""
    return full(_shape(size), 0, dtype=dtype)


def ones(*size: Any, dtype: Any = f32) -> Tensor:
    """Ones, of f32 unless said otherwise."""
    return full(_shape(size), 1, dtype=dtype)


def full_like(input: Any, fill_value: float | int | bool, *, dtype: Any = None) -> Tensor:
    """One value in the shape and element type of another tensor."""
    x = as_tensor(input)
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype)


def zeros_like(input: Any, *, dtype: Any = None) -> Tensor:
    """Zeros in the shape and element type of another tensor."""
    return full_like(input, 0, dtype=dtype)


def ones_like(input: Any, *, dtype: Any = None) -> Tensor:
    """Ones in the shape and element type of another tensor."""
    return full_like(input, 1, dtype=dtype)


def arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None) -> Tensor:
    """start, start + step, … below end; one argument is the end. Ends may be symbolic sizes."""
    start, end = (0, start) if end is None else (start, end)
    whole = all(isinstance(v, int | Expr | np.integer) for v in (start, end))
    if whole and isinstance(step, int) and step > 0:
        length = end - start if step == 1 else (end - start + (step - 1)) // step
        length = length if isinstance(length, Expr) else np.maximum(length, 0).item()
        kind = i64 if dtype is None else as_dtype(dtype)
        if step == 1:
            return call("arange", length=length, start=start, dtype=kind)  # type: ignore[no-any-return]
        return (call("arange", length=length) * step + start).to(kind)  # type: ignore[no-any-return]
    if any(isinstance(v, Expr) for v in (start, end, step)):
        raise ArgumentError("arange over symbolic sizes needs ints and a positive step")
    values = np.arange(start, end, step)
    return Tensor(values, dtype if dtype is not None else f32 if values.dtype.kind == "f" else i64)


def tril(input: Any, diagonal: int = 0) -> Tensor:
    """The lower triangle of the last two dimensions; zero elsewhere."""
    x = as_tensor(input)
    return where(_row_minus_column(x) >= -diagonal, x, zeros_like(x))


def triu(input: Any, diagonal: int = 0) -> Tensor:
    """The upper triangle of the last two dimensions; zero elsewhere."""
    x = as_tensor(input)
    return where(_row_minus_column(x) <= -diagonal, x, zeros_like(x))


def _row_minus_column(x: Tensor) -> Tensor:
    rows, columns = x.shape[full_axis(-2, x.ndim)], x.shape[-1]
    return arange(rows).unsqueeze(1) - arange(columns)


def _shape(size: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], tuple | list) else size


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


def softmax(input: Any, dim: int = -1, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
    """exp(input) / sum(exp(input)) along a dimension."""
    x = as_tensor(input) if dtype is None else cast(input, dtype)
    return write(call("softmax", floating(x), axis=dim), out)


def log_softmax(input: Any, dim: int = -1) -> Tensor:
    """The logarithm of softmax, without its underflow."""
    x = floating(as_tensor(input))
    shifted = x - x.max(dim, keepdim=True)
    return shifted - log(exp(shifted).sum(dim, keepdim=True))


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
    """input @ weight.T + bias, with weight [out_features, in_features]."""
    return write(call("linear", floating(as_tensor(input)), weight, bias), out)


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


def _normalized(name: str, input: Any, normalized_shape: Any, *parameters: Any) -> tuple[Tensor, int]:
    x = floating(as_tensor(input))
    shape = tuple(normalized_shape) if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
    n = len(shape)
    parts = [("weight", as_tensor(p).shape) for p in parameters if p is not None]
    for what, found in (("input", x.shape[-n:] if n else ()), *parts):
        if len(found) != n or not n or not all(equal(a, b) for a, b in zip(found, shape, strict=True)):
            side = "ends with" if what == "input" else "has"
            raise ArgumentError(
                f"{name}: normalized_shape is {list(shape)}, the {what} {side} the shape {list(found)}",
                fix="normalized_shape must be the last dimensions of the input and the shape of the weight",
            )
    return x, n


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
) -> Tensor:
    """softmax(query key' * scale) value, on [batch, heads, seq, dim]; the batch may be missing.

    Heads of key and value may be shared by groups of query heads. The last query stands at the last key
    (PyTorch puts the first at the first); with `past` [batch], query i of row b stands at past[b] + i, and
    keys from past[b] + queries on are not seen. `window` hides keys that lie that far back; `softcap` makes a
    score c * tanh(score / c).
    """
    if dropout_p:
        raise ArgumentError(f"attention: dropout_p={dropout_p} is not supported", why="inference only")
    q, k, v = (as_tensor(t) for t in (query, key, value))
    attrs = {"causal": is_causal, "scale": scale, "softcap": softcap, "window": window}
    if q.ndim == 2:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        return call("attention", q, k, v, attn_mask, past, **attrs).squeeze(0)  # type: ignore[no-any-return]
    return call("attention", q, k, v, attn_mask, past, **attrs)  # type: ignore[no-any-return]


def kv_update(cache: Any, rows: Any, lengths: Any, valid: Any = None) -> Tensor:
    """The cache [batch, heads, capacity, dim] with rows [batch, seq, heads, dim] from lengths[b] on."""
    return call("kv_update", cache, rows, lengths, valid)  # type: ignore[no-any-return]


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
    "RopeAlgo", "Sorted", "all_gather", "all_reduce", "amax", "amin", "arange", "argsort", "bmm", "cast", "cat",
    "causal_softmax", "chunk", "clamp", "concat", "concatenate", "cumsum", "dropout", "embedding", "expand",
    "flatten", "full", "full_like", "gather", "gelu_tanh", "index_select", "kv_update", "layer_norm", "linear",
    "log_softmax", "masked_fill", "matmul", "narrow", "ones", "ones_like", "permute", "pow", "random_sample",
    "relu", "repeat_interleave", "repeat_kv", "repetition_penalty", "reshape", "rms_norm", "rope",
    "scaled_dot_product_attention", "select_rows", "silu", "softmax", "sort", "split", "squeeze", "stack",
    "take_along", "topk", "transpose", "tril", "triu", "unsqueeze", "where", "zeros", "zeros_like",
]  # fmt: skip
__all__ += op_functions.__all__ + windows.__all__
