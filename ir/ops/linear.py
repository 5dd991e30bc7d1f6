"""Products: linear layers and batched matrix multiplication."""

from __future__ import annotations

import numpy as np

from monoplan.ir.dims import equal, same_dims
from monoplan.ir.errors import ArgumentError
from monoplan.ir.expr import Node, arg_indices, evaluate_expr, parse_expr
from monoplan.ir.opdef import op, require
from monoplan.ir.rules import broadcast, linear_type
from monoplan.ir.types import Array, TensorType, bf16, f16, f32, i64, promote


@op(linear_type, "linear", low_bit=("weight",))
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


GATES = ("", "silu", "gelu", "relu")


def gate_expr(gate: str) -> Node:
    """What a gate makes of x0, the product by the weight, and x1, that by `up`."""
    return parse_expr(f"mul({gate}(x0), x1)" if gate in GATES else gate)


def _expert_type(
    x: TensorType,
    weight: TensorType,
    ids: TensorType,
    up: TensorType | None,
    bias: TensorType | None,
    up_bias: TensorType | None,
    *,
    gate: str,
) -> TensorType:
    floats = (f32, bf16, f16)
    kept = weight.dtype in floats or weight.dtype.is_low_bit
    require(x.dtype in floats and kept, f"expert_linear needs f32, bf16 or f16, got {x} and {weight}")
    require(weight.rank == 3, f"expert_linear: the weight must be [experts, out, in], got {weight}")
    require(ids.dtype.is_integer and ids.rank == 2, f"expert_linear: ids must be integers [rows, choices], got {ids}")
    fixed = all(isinstance(n, int) for n in (*weight.shape, ids.shape[1]))
    require(fixed, f"expert_linear: sizes of {weight} and the number of choices are constants, got {ids}")
    lead = (ids.shape[0],) if x.rank == 2 else ids.shape
    fits = x.rank in (2, 3) and same_dims(x.shape, (*lead, weight.shape[2]))
    require(fits, f"expert_linear: x must be {list(lead)} rows of {weight.shape[2]}, got {x}")
    names = f"one of {', '.join(map(repr, GATES))} or an expression of x0 and x1"
    known = gate in GATES or (gate.endswith(")") and arg_indices(gate_expr(gate)) == {0, 1})
    require(known, f"expert_linear: gate={gate!r} is not {names}")
    require((up is not None) == bool(gate), "expert_linear: a gate and a weight `up` belong together")
    require(up is None or up == weight, f"expert_linear: up {up} differs from the weight {weight}")
    require(up_bias is None or None not in (up, bias), "expert_linear: up_bias goes with up and a bias")
    require(bias is None or up is None or up_bias is not None, "expert_linear: a bias of the gate goes with up_bias")
    for b in (bias, up_bias):
        fits = b is None or (b.dtype in floats and b.shape == weight.shape[:2])
        require(fits, f"expert_linear: biases must be [{weight.shape[0]}, {weight.shape[1]}], got {b}")
    return TensorType(promote(x.dtype, weight.dtype), (*ids.shape, weight.shape[1]))


@op(_expert_type, "experts", low_bit=("weight", "up"))
def expert_linear(
    x: Array,
    weight: Array,
    ids: Array,
    up: Array | None = None,
    bias: Array | None = None,
    up_bias: Array | None = None,
    *,
    gate: str = "",
) -> Array:
    """y[r, j] = weight[ids[r, j]] @ x[r] (or x[r, j]) + bias[ids[r, j]]; with a gate, gate(that) * the same by `up`.

    The gate is a name, or an expression of both products, x0 and x1. Only the matrices that ids name are read.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < len(weight):
        raise ArgumentError(f"expert_linear: ids are from {ids.min()} to {ids.max()}, there are {len(weight)} experts")
    rows = np.broadcast_to(x[:, None] if x.ndim == 2 else x, (*ids.shape, x.shape[-1]))
    y = np.zeros((*ids.shape, weight.shape[1]), np.result_type(x, weight))
    for e in np.unique(ids):
        mine = rows[ids == e]
        products = [np.matmul(mine, w[e].T) for w in (weight, up) if w is not None]
        products = [p if b is None else p + b[e] for p, b in zip(products, (bias, up_bias), strict=False)]
        y[ids == e] = products[0] if up is None else evaluate_expr(gate_expr(gate), products)
    return y


SCORES = ("softmax", "sigmoid")
MOST_GROUPS = 64


def _route_type(
    scores: TensorType, bias: TensorType | None, *, k: int, score: str, normalize: bool, groups: int, kept_groups: int,
    scale: float, gates: int,
) -> tuple[TensorType, TensorType]:  # fmt: skip
    require(scores.dtype == f32 and scores.rank == 2, f"route: scores must be f32 [rows, experts], got {scores}")
    columns = scores.shape[1]
    require(isinstance(columns, int), f"route: the number of experts is a constant, got {scores}")
    assert isinstance(columns, int)
    require(0 <= gates < columns, f"route: {gates} of {columns} scores can't be gates")
    experts = columns - gates
    require(bias is None or bias == TensorType(f32, (experts,)), f"route: bias must be f32 [{experts}], got {bias}")
    require(score in SCORES, f"route: score={score!r} is not one of {', '.join(map(repr, SCORES))}")
    whole = 0 < groups <= MOST_GROUPS and experts % groups == 0 and 0 < kept_groups <= groups
    require(whole, f"route: {kept_groups} of {groups} groups of {experts} experts can't be kept")
    most = experts // groups * kept_groups
    require(0 < k <= most, f"route: {k} of {most} experts can't be chosen")
    return TensorType(f32, (scores.shape[0], k + gates)), TensorType(i64, (scores.shape[0], k))


@op(_route_type, "route")
def route(
    scores: Array, bias: Array | None = None, *, k: int, score: str = "softmax", normalize: bool = True,
    groups: int = 1, kept_groups: int = 1, scale: float = 1.0, gates: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """The k experts of each row with the best probabilities, and these: the best first, ties to the lowest number.

    Probabilities are a softmax of the scores, or each one's sigmoid; with `normalize` those of the chosen are divided
    by their sum, then multiplied by `scale`. A bias counts for the choice alone. Of several groups of experts only the
    kept_groups with the best expert are chosen from. The last `gates` scores are no experts': their sigmoids follow the
    probabilities of the chosen.
    """
    scores, behind = np.split(scores, [scores.shape[1] - gates], 1)
    shifted = np.exp(scores - scores.max(1, keepdims=True))
    p = shifted / shifted.sum(1, keepdims=True) if score == "softmax" else 1 / (1 + np.exp(-scores))
    rank = p if bias is None else p + bias
    rank = np.where(np.isnan(rank), np.inf, rank)
    best = rank.reshape(len(rank), groups, -1).max(2) if rank.size else np.zeros((0, groups))
    kept = np.argsort(np.argsort(-best, axis=1, kind="stable"), axis=1) < kept_groups
    rank = np.where(np.repeat(kept, rank.shape[1] // groups, axis=1), rank, -np.inf)
    ids = np.argsort(-rank, axis=1, kind="stable")[:, :k]
    share = np.take_along_axis(p, ids, 1)
    share = share / share.sum(1, keepdims=True) if normalize else share
    return np.concatenate([share * scale, 1 / (1 + np.exp(-behind))], 1), ids
