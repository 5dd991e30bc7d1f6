"""monoplan.nn.functional: layers as functions, with PyTorch's names and signatures, eager and traced alike.

`out=` takes the result over; `inplace=True` (which wins over `out=`) writes it into the input.
"""

from __future__ import annotations

import builtins
import enum
import math
from typing import Any

import numpy as np

from monoplan.frontend.functions import (
    Sorted,
    abs,
    add,
    all_gather,
    all_reduce,
    amax,
    amin,
    arange,
    argmax,
    argsort,
    bmm,
    cast,
    cat,
    chunk,
    clamp,
    concat,
    concatenate,
    cos,
    cumsum,
    div,
    eq,
    erf,
    exp,
    expand,
    flatten,
    full,
    full_like,
    gather,
    ge,
    gt,
    index_select,
    le,
    log,
    logical_and,
    logical_not,
    logical_or,
    lt,
    masked_fill,
    matmul,
    max,
    maximum,
    mean,
    min,
    minimum,
    mul,
    narrow,
    ne,
    neg,
    ones,
    ones_like,
    permute,
    pow,
    repeat_interleave,
    repeat_kv,
    reshape,
    rsqrt,
    select_rows,
    sigmoid,
    sin,
    sort,
    split,
    sqrt,
    squeeze,
    stack,
    sub,
    sum,
    take_along,
    tanh,
    topk,
    transpose,
    tril,
    triu,
    unsqueeze,
    where,
    write,
    zeros,
    zeros_like,
)
from monoplan.frontend.tensor import Tensor, as_tensor, call, floating
from monoplan.ir.dims import Expr, equal
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import i64

BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


class RopeAlgo(enum.Enum):
    """Which dimensions of a head rotate together."""

    GPT_J = "gpt_j"  # neighbours: (2i, 2i + 1)
    GPT_NEOX = "gpt_neox"  # halves: (i, i + half), as LLaMA does


# -- activations ---------------------------------------------------------------------------------------


def relu(input: Any, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
    """max(input, 0)."""
    return write(call("relu", input), out, input if inplace else None)


def silu(input: Any, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
    """input * sigmoid(input)."""
    return write(call("silu", floating(as_tensor(input))), out, input if inplace else None)


def gelu(input: Any, approximate: str = "none", *, out: Tensor | None = None) -> Tensor:
    """input * Phi(input): "none" is exact, "tanh" as in GPT-2, "fast" and "fast_tanh" use 1.702 input."""
    return write(call("gelu", floating(as_tensor(input)), approximate=approximate), out)


def gelu_tanh(input: Any, *, out: Tensor | None = None) -> Tensor:
    """gelu with the tanh approximation."""
    return gelu(input, "tanh", out=out)


def swiglu(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """silu(input) * other."""
    return write(call("swiglu", floating(as_tensor(input)), floating(as_tensor(other))), out)


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


__all__ = [
    "RopeAlgo", "Sorted", "abs", "add", "all_gather", "all_reduce", "amax", "amin", "arange", "argmax",
    "argsort", "bmm", "cast", "cat", "causal_softmax", "chunk", "clamp", "concat", "concatenate", "cos",
    "cumsum", "div", "dropout", "embedding", "eq", "erf", "exp", "expand", "flatten", "full", "full_like",
    "gather", "ge", "gelu", "gelu_tanh", "gt", "index_select", "kv_update", "layer_norm", "le", "linear",
    "log", "log_softmax", "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "matmul",
    "max", "maximum", "mean", "min", "minimum", "mul", "narrow", "ne", "neg", "ones", "ones_like",
    "permute", "pow", "random_sample", "relu", "repeat_interleave", "repeat_kv", "repetition_penalty",
    "reshape", "rms_norm", "rope", "rsqrt", "scaled_dot_product_attention", "select_rows", "sigmoid",
    "silu", "sin", "softmax", "sort", "split", "sqrt", "squeeze", "stack", "sub", "sum", "swiglu",
    "take_along", "tanh", "topk", "transpose", "tril", "triu", "unsqueeze", "where", "zeros",
    "zeros_like",
]  # fmt: skip
