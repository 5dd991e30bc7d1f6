"""Ops that only passes make: several plain ops that one kernel computes. Each reference composes theirs."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.cache_rows import row_numbers
from monoplan.ir.dims import equal, same_dims
from monoplan.ir.errors import VerifyError
from monoplan.ir.expr import evaluate_expr, expr_dtype, parse_expr
from monoplan.ir.graph import Graph
from monoplan.ir.opdef import REGISTRY, Given, op, require
from monoplan.ir.ops.attention import _kv_type, _rope_type, kv_update, rope
from monoplan.ir.ops.collective import all_reduce
from monoplan.ir.ops.conv import conv2d, conv_type
from monoplan.ir.ops.index import _embedding_type, embedding
from monoplan.ir.ops.linear import _expert_type, _matmul_type, _route_type, expert_linear, linear, matmul, route
from monoplan.ir.ops.reduce import layer_norm, rms_norm
from monoplan.ir.rules import broadcast, linear_type, norm_type, normalized_axes, reduced_shape
from monoplan.ir.types import Array, TensorType, bf16, f16, f32, f64, i64, product, promote

NORMS = ("none", "rms", "layer")


def _check_norm(norm: str, name: str) -> None:
    require(norm in NORMS, f"{name}: norm={norm!r} is not one of {', '.join(NORMS)}")


def _with_expr(first: list[TensorType], extras: tuple[TensorType, ...], expr: str, name: str) -> TensorType:
    """The type of `expr` over accumulators and extras, which must broadcast to the accumulator's shape."""
    types = [*first, *extras]
    shape = broadcast([t.shape for t in types], name)
    found = ", ".join(map(str, extras))
    require(same_dims(shape, first[0].shape), f"{name}: extra operands {found} do not broadcast to {first[0]}")
    return TensorType(expr_dtype(parse_expr(expr), [t.dtype for t in types]), shape)


def _pointwise_type(*xs: TensorType, expr: str) -> TensorType:
    return TensorType(
        expr_dtype(parse_expr(expr), [x.dtype for x in xs]), broadcast([x.shape for x in xs], "pointwise")
    )


@op(_pointwise_type, "fused_pointwise")
def pointwise(*xs: Array, expr: str) -> Array:
    """A pointwise expression over broadcast operands x0, x1, …"""
    return np.broadcast_to(evaluate_expr(parse_expr(expr), xs), np.broadcast_shapes(*(x.shape for x in xs)))


def _norm_then(x: Array, weight: Array | None, bias: Array | None, norm: str, eps: float) -> Array:
    if norm == "rms":
        return rms_norm.reference(x, weight, eps=eps)  # type: ignore[no-any-return]
    return layer_norm.reference(x, weight, bias, eps=eps) if norm == "layer" else x


def _fused_linear_type(t: Given) -> TensorType:
    _check_norm(t.norm, "fused_linear")
    norm_type(t.x, t.norm_weight, t.norm_bias, 1, "fused_linear")
    full = linear_type(t.x, t.weight, t.bias, "fused_linear")
    if t.gated:
        n: Any = full.shape[-1]
        require(isinstance(n, int) and n % 2 == 0, f"fused_linear: a gated weight needs an even size, got {t.weight}")
        full = full.with_shape((*full.shape[:-1], n // 2))
    return _with_expr([full] * (2 if t.gated else 1), t.extras, t.expr, "fused_linear")


@op(_fused_linear_type, "fused_linear", low_bit=("weight",))
def fused_linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    norm_weight: Array | None = None,
    norm_bias: Array | None = None,
    *extras: Array,
    norm: str = "none",
    eps: float = 0.0,
    gated: bool = False,
    expr: str = "x0",
) -> Array:
    """expr(linear(norm(x), weight, bias), extras…); gated: the weight is gate|up, x0 and x1 its halves."""
    y = linear.reference(_norm_then(x, norm_weight, norm_bias, norm, eps), weight, bias)
    parts = np.split(y, 2, axis=-1) if gated else [y]
    return evaluate_expr(parse_expr(expr), [*parts, *extras])


def _linear_norm_type(t: Given) -> TensorType:
    require(t.norm in NORMS[1:], f"linear_norm: norm={t.norm!r} is not one of {', '.join(NORMS[1:])}")
    full = linear_type(t.x, t.weight, t.bias, "linear_norm")
    return _with_expr([norm_type(full, t.norm_weight, t.norm_bias, 1, "linear_norm")], t.extras, t.expr, "linear_norm")


@op(_linear_norm_type, "linear_norm", low_bit=("weight",))
def linear_norm(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    norm_weight: Array | None = None,
    norm_bias: Array | None = None,
    *extras: Array,
    norm: str,
    eps: float,
    expr: str = "x0",
) -> Array:
    """expr(norm(linear(x, weight, bias)), extras…): the norm is behind the product, over its whole rows."""
    y = _norm_then(linear.reference(x, weight, bias), norm_weight, norm_bias, norm, eps)
    return evaluate_expr(parse_expr(expr), [y, *extras])


def _linear_route_type(t: Given) -> tuple[TensorType, TensorType, TensorType]:
    name = "linear_route"
    require(t.norm in NORMS[:2], f"{name}: norm={t.norm!r} is not one of {', '.join(NORMS[:2])}")
    norm_type(t.x, t.norm_weight, None, 1, name)
    full = linear_type(t.x, t.weight, None, name)
    columns: Any = full.shape[-1]
    whole = isinstance(columns, int) and columns % 2 == 0 and t.scores % 2 == 0 and 0 < t.scores < columns
    require(whole, f"{name}: {t.weight} has no {t.scores} rows of scores and two equal halves of others")
    half = full.with_shape((*full.shape[:-1], (columns - t.scores) // 2))
    rows = TensorType(f32, (product(full.shape[:-1]), t.scores))
    attrs = {key: getattr(t, key) for key in ("k", "score", "normalize", "groups", "kept_groups", "scale", "gates")}
    return _with_expr([half, half], (), t.expr, name), *_route_type(rows, None, **attrs)


@op(_linear_route_type, "linear_route")
def linear_route(
    x: Array,
    weight: Array,
    norm_weight: Array | None = None,
    *,
    scores: int,
    k: int,
    norm: str = "none",
    eps: float = 0.0,
    expr: str = "mul(silu(x0), x1)",
    score: str = "softmax",
    normalize: bool = True,
    groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.0,
    gates: int = 0,
) -> tuple[Array, Array, Array]:
    """A gated product and a router's choice, of the same rows: expr(gate, up), and route(scores).

    The weight is gate | first half of the scores' rows | up | second half of them.
    """
    y = linear.reference(_norm_then(x, norm_weight, None, norm, eps), weight)
    first, second = np.split(y, 2, axis=-1)
    size = first.shape[-1] - scores // 2
    made = evaluate_expr(parse_expr(expr), [first[..., :size], second[..., :size]])
    found = np.concatenate([first[..., size:], second[..., size:]], -1).reshape(-1, scores)
    found = found if found.dtype == f64.numpy else found.astype(np.float32)
    share, ids = route.reference(
        found, k=k, score=score, normalize=normalize, groups=groups, kept_groups=kept_groups, scale=scale, gates=gates
    )
    return made, share, ids


def _fused_experts_type(t: Given) -> TensorType:
    require(t.x.rank == 2, f"fused_experts: x must be [rows, in], got {t.x}")
    norm_type(t.x, t.norm_weight, None, 1, "fused_experts")
    return _expert_type(t.x, t.weight, t.ids, t.up, t.bias, t.up_bias, gate=t.gate)


@op(_fused_experts_type, "fused_experts", low_bit=("weight", "up"))
def fused_experts(
    x: Array,
    weight: Array,
    ids: Array,
    up: Array | None = None,
    bias: Array | None = None,
    up_bias: Array | None = None,
    norm_weight: Array | None = None,
    *,
    gate: str = "",
    eps: float = 0.0,
) -> Array:
    """expert_linear(rms_norm(x, norm_weight), …)."""
    x = rms_norm.reference(x, norm_weight, eps=eps)
    return expert_linear.reference(x, weight, ids, up, bias, up_bias, gate=gate)  # type: ignore[no-any-return]


def _fused_matmul_type(a: TensorType, b: TensorType, *extras: TensorType, expr: str) -> TensorType:
    return _with_expr([_matmul_type(a, b)], extras, expr, "fused_matmul")


@op(_fused_matmul_type, "fused_matmul")
def fused_matmul(a: Array, b: Array, *extras: Array, expr: str) -> Array:
    """expr(matmul(a, b), extras…)."""
    return evaluate_expr(parse_expr(expr), [matmul.reference(a, b), *extras])


def _fused_conv_type(t: Given) -> TensorType:
    full = conv_type(t.x, t.weight, t.bias, t.stride, t.padding, t.dilation, t.groups, "fused_conv2d")
    return _with_expr([full], t.extras, t.expr, "fused_conv2d")


@op(_fused_conv_type, "fused_conv", bounded=True)
def fused_conv2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *extras: Array,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    expr: str,
) -> Array:
    """expr(conv2d(x, weight, bias), extras…)."""
    y = conv2d.reference(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return evaluate_expr(parse_expr(expr), [y, *extras])


def _fused_norm_type(t: Given) -> TensorType:
    _check_norm(t.norm, "fused_norm")
    return _with_expr([norm_type(t.x, t.weight, t.bias, t.dims, "fused_norm")], t.extras, t.expr, "fused_norm")


@op(_fused_norm_type, "fused_norm")
def fused_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *extras: Array,
    norm: str,
    eps: float,
    dims: int = 1,
    expr: str,
) -> Array:
    """expr(norm(x, weight, bias), extras…)."""
    y = (
        rms_norm.reference(x, weight, eps=eps, dims=dims)
        if norm == "rms"
        else layer_norm.reference(x, weight, bias, eps=eps, dims=dims)
    )
    return evaluate_expr(parse_expr(expr), [y, *extras])


def _fused_gather_type(ids: TensorType, weight: TensorType, *extras: TensorType, expr: str) -> TensorType:
    return _with_expr([_embedding_type(ids, weight)], extras, expr, "fused_gather")


@op(_fused_gather_type, "fused_gather", low_bit=("weight",))
def fused_gather(ids: Array, weight: Array, *extras: Array, expr: str) -> Array:
    """expr(embedding(ids, weight), extras…)."""
    return evaluate_expr(parse_expr(expr), [embedding.reference(ids, weight), *extras])


def _fused_all_reduce_type(x: TensorType, *extras: TensorType, world: int, expr: str) -> TensorType:
    require(world >= 1, f"fused_all_reduce: world must be 1 or more, got {world}")
    return _with_expr([x], extras, expr, "fused_all_reduce")


@op(_fused_all_reduce_type, "fused_collective")
def fused_all_reduce(x: Array, *extras: Array, world: int, expr: str) -> Array:
    """expr(all_reduce(x), extras…): the residual is added while the ranks' parts are summed."""
    return evaluate_expr(parse_expr(expr), [all_reduce.reference(x, world=world), *extras])


def _fused_reduce_type(
    *xs: TensorType, inputs: int, reduce: str, axes: tuple[int, ...] | None, keepdims: bool, pre: str, post: str
) -> TensorType:
    inner = _pointwise_type(*xs[:inputs], expr=pre)
    reduced = REGISTRY[reduce].infer([inner], {"axes": axes, "keepdims": keepdims})[0]
    return _with_expr([reduced], xs[inputs:], post, "fused_reduce")


@op(_fused_reduce_type, "fused_reduce")
def fused_reduce(
    *xs: Array,
    inputs: int,
    reduce: str,
    axes: tuple[int, ...] | None = None,
    keepdims: bool = False,
    pre: str = "x0",
    post: str = "x0",
) -> Array:
    """post(reduce(pre(the first `inputs` operands)), the other operands…) over axes."""
    inner = pointwise.reference(*xs[:inputs], expr=pre)
    reduced = REGISTRY[reduce].reference(inner, axes=axes, keepdims=keepdims)
    return evaluate_expr(parse_expr(post), [np.asarray(reduced), *xs[inputs:]])


def _argmax_type(t: Given) -> TensorType:
    _check_norm(t.norm, "linear_argmax")
    norm_type(t.x, t.norm_weight, t.norm_bias, 1, "linear_argmax")
    full = linear_type(t.x, t.weight, t.bias, "linear_argmax")
    return TensorType(i64, reduced_shape(full, normalized_axes(-1, full.rank, "linear_argmax"), t.keepdims))


@op(_argmax_type, "linear_argmax", low_bit=("weight",))
def linear_argmax(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    norm_weight: Array | None = None,
    norm_bias: Array | None = None,
    *,
    norm: str = "none",
    eps: float = 0.0,
    keepdims: bool = False,
) -> Array:
    """argmax(linear(norm(x), weight, bias)) over the last axis; the logits are never stored."""
    y = linear.reference(_norm_then(x, norm_weight, norm_bias, norm, eps), weight, bias)
    return np.argmax(y, axis=-1, keepdims=keepdims)


def _qkv_type(t: Given) -> tuple[TensorType, TensorType, TensorType]:
    require(t.x.rank == 3, f"qkv_rope_cache: x must be [batch, seq, features], got {t.x}")
    _check_norm(t.norm, "qkv_rope_cache")
    norm_type(t.x, t.norm_weight, t.norm_bias, 1, "qkv_rope_cache")
    full = linear_type(t.x, t.weight, t.bias, "qkv_rope_cache")
    dim: Any = row_numbers(t.k_cache.shape[-1], t.k_cache.dtype)
    columns: Any = full.shape[-1]
    if t.v_weight is not None:
        require(t.bias is None, "qkv_rope_cache: a weight of v by itself goes with no bias")
        columns = columns + linear_type(t.x, t.v_weight, None, "qkv_rope_cache").shape[-1]
    require(
        equal(columns, (t.heads + 2 * t.kv_heads) * dim),
        f"qkv_rope_cache: the weight {t.weight} is not {t.heads} + 2 x {t.kv_heads} heads of {dim}",
    )
    batch, seq = t.x.shape[:2]
    rows = full.with_shape((batch, seq, t.kv_heads, dim))
    for cache in (t.k_cache, t.v_cache):
        _kv_type(cache, rows, t.lengths, t.valid, t.table)
    q = full.with_shape((batch, seq, t.heads, dim))
    for part, weight_ in ((q, t.q_norm), (rows, t.k_norm)):
        if weight_ is not None:
            norm_type(part, weight_, None, 1, "qkv_rope_cache")
    _rope_type(q, t.positions, t.sin, t.cos, algo=t.algo)
    return q.with_dtype(promote(q.dtype)), t.k_cache, t.v_cache


@op(_qkv_type, "qkv_rope_cache", inplace={1: "k_cache", 2: "v_cache"}, low_bit=("weight", "v_weight"))
def qkv_rope_cache(
    x: Array,
    weight: Array,
    positions: Array,
    sin: Array,
    cos: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    valid: Array | None = None,
    bias: Array | None = None,
    norm_weight: Array | None = None,
    norm_bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    v_weight: Array | None = None,
    table: Array | None = None,
    *,
    heads: int,
    kv_heads: int,
    algo: str,
    norm: str = "none",
    eps: float = 0.0,
    qk_eps: float = 0.0,
) -> tuple[Array, Array, Array]:
    """linear(norm(x)) cut into heads; q and k normed (if asked) and rotated; k and v into their caches.

    The rows of v may be a weight by themselves, in another low-bit format.
    """
    normed = _norm_then(x, norm_weight, norm_bias, norm, eps)
    y = linear.reference(normed, weight, bias)
    if v_weight is not None:
        y = np.concatenate([y, linear.reference(normed, v_weight)], axis=-1)
    y = y.reshape(*y.shape[:-1], heads + 2 * kv_heads, -1)
    q, k, v = y[..., :heads, :], y[..., heads : heads + kv_heads, :], y[..., heads + kv_heads :, :]
    q = q if q_norm is None else rms_norm.reference(q, q_norm, eps=qk_eps)
    k = k if k_norm is None else rms_norm.reference(k, k_norm, eps=qk_eps)
    q, k = (rope.reference(t, positions, sin, cos, algo=algo) for t in (q, k))
    k_cache, v_cache = (kv_update.reference(c, t, lengths, valid, table) for c, t in ((k_cache, k), (v_cache, v)))
    return q, k_cache, v_cache


def _heads_type(t: Given) -> tuple[TensorType, TensorType, TensorType]:
    name, dim = "heads_rope_cache", t.k_cache.shape[-1]
    require(t.norm in ("rms", "layer"), f"{name}: norm={t.norm!r} is not one of 'rms', 'layer'")
    require(isinstance(dim, int), f"{name}: the length of a head is a constant, got {t.k_cache}")
    assert isinstance(dim, int)
    fits = t.x.rank == 3 and equal(t.x.shape[-1], (t.heads + 2 * t.kv_heads) * dim)
    require(fits, f"{name}: {t.x} is not [batch, seq, {t.heads} + 2 x {t.kv_heads} heads of {dim}]")
    require(
        all(v.dtype in (f32, bf16, f16) for v in (t.x, t.k_cache, t.v_cache)),
        f"{name} takes f32, bf16 and f16, got {t.x}",
    )
    for weight, count in ((t.q_norm, t.heads), (t.k_norm, t.kv_heads)):
        good = weight.dtype.is_float and weight.shape in ((count * dim,), (count, dim))
        require(good, f"{name}: the weight of a norm must have {count * dim} numbers, got {weight}")
    q, k = (t.x.with_shape((*t.x.shape[:2], n, dim)) for n in (t.heads, t.kv_heads))
    for cache in (t.k_cache, t.v_cache):
        _kv_type(cache, k, t.lengths, t.valid, t.table)
    _rope_type(q, t.positions, t.sin, t.cos, algo=t.algo)
    return q, t.k_cache, t.v_cache


@op(_heads_type, "heads_rope_cache", inplace={1: "k_cache", 2: "v_cache"})
def heads_rope_cache(
    x: Array,
    positions: Array,
    sin: Array,
    cos: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    q_norm: Array,
    k_norm: Array,
    valid: Array | None = None,
    table: Array | None = None,
    *,
    heads: int,
    kv_heads: int,
    algo: str,
    norm: str,
    whole: bool,
    eps: float,
) -> tuple[Array, Array, Array]:
    """x cut into heads of q, k and v: q and k are normed and rotated, k and v go into their caches.

    A norm is over each head, or over all of them (`whole`); its weight has a number for each of every head.
    """
    dim = k_cache.shape[-1]
    parts = np.split(x, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    q, k, v = (part.reshape(*x.shape[:2], -1, dim) for part in parts)

    def normed(part: Array, weight: Array) -> Array:
        axes = (-2, -1) if whole else (-1,)
        centred = part - part.mean(axes, keepdims=True) if norm == "layer" else part
        scale = 1 / np.sqrt(np.mean(centred**2, axes, keepdims=True) + eps)
        return centred * scale * weight.reshape(part.shape[-2:])

    q, k = (rope.reference(normed(t, w), positions, sin, cos, algo=algo) for t, w in ((q, q_norm), (k, k_norm)))
    k_cache, v_cache = (kv_update.reference(c, t, lengths, valid, table) for c, t in ((k_cache, k), (v_cache, v)))
    return q, k_cache, v_cache


def _latent_type(t: Given) -> tuple[TensorType, TensorType]:
    name = "latent_rope_cache"
    fits = t.latent.rank == 3 and t.key.rank == 4 and equal(t.key.shape[2], 1) and t.query.rank == 4
    require(fits, f"{name}: latent {t.latent}, key {t.key} and query {t.query} are not of one key head")
    sizes = (t.latent.shape[-1], t.key.shape[-1], t.query.shape[-2], t.query.shape[-1])
    require(
        all(isinstance(d, int) for d in sizes),
        f"{name}: features and heads are constants, got {t.latent} and {t.query}",
    )
    kinds = all(v.dtype in (f32, bf16, f16) for v in (t.latent, t.key, t.query, t.cache))
    require(kinds, f"{name} takes f32, bf16 and f16, got {t.latent} and {t.cache}")
    norm_type(t.latent, t.norm_weight, None, 1, name)
    for v in (t.key, t.query):
        _rope_type(v, t.positions, t.sin, t.cos, algo=t.algo)
    width: Any = t.latent.shape[-1] + t.key.shape[-1]
    _kv_type(t.cache, t.key.with_shape((*t.key.shape[:3], width)), t.lengths, t.valid, t.table)
    require((t.plain is None) == (t.matrices is None), f"{name}: plain queries and their matrices belong together")
    if t.plain is None:
        return t.query, t.cache
    batch, seq, heads, dim = t.query.shape
    fits = t.matrices.rank == 3 and t.plain.rank == 4 and same_dims(t.plain.shape[:3], (batch, seq, heads))
    fits = fits and same_dims(t.matrices.shape, (heads, t.latent.shape[-1], t.plain.shape[-1]))
    require(fits, f"{name}: {t.matrices} are no matrices of the latent for each head of {t.plain}")
    made = promote(t.plain.dtype, t.matrices.dtype)
    require(made == t.query.dtype, f"{name}: {t.plain} times {t.matrices} is {made}, the other queries are {t.query}")
    return t.query.with_shape((batch, seq, heads, t.latent.shape[-1] + dim)), t.cache


@op(_latent_type, "latent_rope_cache", inplace={1: "cache"}, low_bit=("matrices",))
def latent_rope_cache(
    latent: Array,
    key: Array,
    query: Array,
    positions: Array,
    sin: Array,
    cos: Array,
    cache: Array,
    lengths: Array,
    norm_weight: Array,
    valid: Array | None = None,
    table: Array | None = None,
    plain: Array | None = None,
    matrices: Array | None = None,
    *,
    algo: str,
    eps: float,
) -> tuple[Array, Array]:
    """The rotated queries, and the cache with rms_norm(latent) and the rotated key behind it as new rows.

    With plain queries [batch, seq, heads, in] and a matrix for each head [heads, rank, in], their products stand in
    front of the rotated ones: queries as long as a row of the cache.
    """
    key, query = (rope.reference(t, positions, sin, cos, algo=algo) for t in (key, query))
    normed = rms_norm.reference(latent, norm_weight, eps=eps)
    rows = np.concatenate([normed[:, :, None], key], -1)
    if plain is not None and matrices is not None:
        heads = np.broadcast_to(np.arange(query.shape[2]), (query.shape[0] * query.shape[1], query.shape[2]))
        made = expert_linear.reference(plain.reshape(*heads.shape, -1), matrices, heads)
        query = np.concatenate([made.reshape(*query.shape[:3], -1), query], -1)
    return query, kv_update.reference(cache, rows, lengths, valid, table)


# Rolled layers: one body that runs several times over a table of weights.


def _repeat_type(*xs: TensorType, count: int, carried: int, shared: int, body: Graph) -> tuple[TensorType, ...]:
    slices = len(body.inputs) - carried - shared
    require(
        len(xs) == carried + shared + slices * count,
        f"repeat_layers: {len(xs)} operands, expected {carried} carried + {shared} shared + {slices} x {count}",
    )
    first = carried + shared
    for i, t in enumerate(xs):  # every turn's operand, not only that of the first one
        v = body.inputs[i if i < first else first + (i - first) // count]
        require(v.type == t, f"repeat_layers: body input {v} is {v.type}, got {t}")
    for v, o in zip(body.inputs[:carried], body.outputs, strict=False):
        require(v.type == o.type, f"repeat_layers: carried {v} is {v.type} at the start and {o.type} at the end")
    per_turn = [o.type for o in body.outputs[carried:] for _ in range(count)]
    return (*(o.type for o in body.outputs[:carried]), *per_turn)


@op(_repeat_type, "repeat")
def repeat_layers(*xs: Any, count: int, carried: int, shared: int, body: Graph) -> Any:
    """`count` turns of body(carried…, shared…, slice of each table…); per-turn outputs follow the carried."""
    raise VerifyError("repeat_layers is run by the interpreter itself")
