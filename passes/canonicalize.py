"""Brings equal things to one form: no-ops vanish, weights move to setup, equal ops merge, idioms become one op."""

from __future__ import annotations

from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.dims import equal
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.ops.elementwise import add, mul, sigmoid, silu, swiglu
from monoplan.ir.ops.linear import linear, matmul
from monoplan.ir.ops.norm import rms_norm
from monoplan.ir.ops.reduce import mean
from monoplan.ir.ops.shape import expand, repeat, reshape, transpose
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Match, Rewrite, param_values, rewrite_pass
from monoplan.passes.rebuild import drop_dead, replace_values, substitute


def remove_identities(graph: Graph, notes: Notes) -> Graph:
    """Drops views and casts that change nothing, and joins two reshapes or transposes in a row."""
    new: dict[Value, Value] = {}
    defs = definitions(graph)
    ops = []
    for old in graph.ops:
        op = substitute([old], new)[0]
        source = op.operands[0] if op.operands else None
        if source is not None and _is_identity(op, source):
            new[old.results[0]] = new.get(source, source)
            notes.rewrites += 1
            continue
        inner = defs.get(source) if source is not None else None
        if inner is not None and inner.name == op.name and op.name in ("reshape", "transpose"):
            attrs: dict[str, Any] = dict(op.attrs)
            if op.name == "transpose":
                attrs = {"axes": tuple(inner.attrs["axes"][a] for a in op.attrs["axes"])}
            first = inner.operands[0]
            made = make_op(op.opdef, [first], attrs, names=[op.result.name], loc=op.loc, fresh=lambda s: s)
            op = Op(made.opdef, made.operands, made.attrs, op.results, op.loc)
            notes.rewrites += 1
        defs.update(dict.fromkeys(op.results, op))
        ops.append(op)
    if not notes.rewrites:
        return graph
    return drop_dead(graph.replace(ops=tuple(ops), outputs=tuple(new.get(v, v) for v in graph.outputs)))


def _is_identity(op: Op, source: Value) -> bool:
    if len(op.results) != 1 or op.result.type != source.type:
        return False
    a = op.attrs
    if op.name in ("reshape", "expand", "cast"):
        return True
    if op.name == "transpose":
        return tuple(a["axes"]) == tuple(range(source.type.rank))
    if op.name == "slice":
        return equal(a["start"], 0) and a["step"] == 1
    return op.name == "repeat" and a["repeats"] == 1 or op.name in ("all_reduce", "all_gather") and a["world"] == 1


def hoist_setup(graph: Graph, notes: Notes) -> Graph:
    """Moves ops whose operands are all weights to setup: they run once, when the weights are loaded."""
    fixed = param_values(graph)
    setup, ops = list(graph.setup), []
    for op in graph.ops:
        movable = op.reads and fixed.issuperset(op.reads) and not op.opdef.inplace and op.opdef.kind != "repeat"
        if movable and not any(r in graph.outputs for r in op.results):
            setup.append(op)
            fixed.update(op.results)
            notes.rewrites += 1
        else:
            ops.append(op)
    return graph if not notes.rewrites else graph.replace(setup=tuple(setup), ops=tuple(ops))


def merge_equal_ops(graph: Graph, notes: Notes) -> Graph:
    """Keeps the first of several ops with the same operands and attributes."""
    new: dict[Value, Value] = {}
    seen: dict[Any, Op] = {}

    def sweep(ops: tuple[Op, ...]) -> list[Op]:
        kept = []
        for old in ops:
            op = substitute([old], new)[0]
            if op.opdef.inplace or op.opdef.kind in ("repeat", "collective"):
                kept.append(op)
                continue
            key = (op.opdef, op.operands, tuple(op.attrs.items()), tuple(r.type for r in op.results))
            first = seen.setdefault(key, op)
            if first is op:
                kept.append(op)
            else:
                new.update(zip(old.results, first.results, strict=True))
                notes.rewrites += 1
        return kept

    setup, ops = sweep(graph.setup), sweep(graph.ops)
    if not notes.rewrites:
        return graph
    outputs = tuple(new.get(v, v) for v in graph.outputs)
    return drop_dead(graph.replace(setup=tuple(setup), ops=tuple(ops), outputs=outputs))


def _last_two_swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _is_matrix_param(m: Match) -> bool | str:
    if not m.is_param("w"):
        return False
    a, w = m["x"], m["w"]
    return a.type.dtype.is_float and w.type.rank == 2


MATMUL_TO_LINEAR = Rewrite(
    "matmul-to-linear", "matmul(x, w) -> linear(x, w transposed) when w is a weight",
    find=lambda x, w: matmul(x, w),
    make=lambda x, w: linear(x, transpose(w, axes=(1, 0))),
    when=_is_matrix_param,
)
SILU = Rewrite(
    "silu", "x * sigmoid(x) -> silu(x)",
    find=lambda x: mul(x, sigmoid(x)),
    make=lambda x: silu(x),
)
SWIGLU = Rewrite(
    "swiglu", "silu(gate) * up -> swiglu(gate, up)",
    find=lambda gate, up: mul(silu(gate), up),
    make=lambda gate, up: swiglu(gate, up),
    when=lambda m: m["gate"].type == m["up"].type,
)
RMS_NORM = Rewrite(
    "rms-norm", "x * rsqrt(mean(x * x) + eps) * weight -> rms_norm(x, weight)",
    find=lambda x, eps, weight, *, axes: mul(mul(x, _rsqrt(add(mean(mul(x, x), axes=axes, keepdims=True), eps))), weight),
    make=lambda x, weight, match: rms_norm(x, weight, eps=float(match.scalar("eps"))),
    when=lambda m: (
        m.scalar("eps") is not None and m["axes"] in ((-1,), (m["x"].type.rank - 1,)) and m.is_param("weight")
        and m["weight"].type.rank == 1 and equal(m["weight"].type.shape[0], m["x"].type.shape[-1])
        and m["weight"].type.dtype == m["x"].type.dtype
    ),
)


def _rsqrt(x: Value) -> Any:
    from monoplan.ir.ops.elementwise import rsqrt

    return rsqrt(x)


def _repeats(m: Match) -> tuple[int, int] | None:
    """(axis, n) when x[…, d, …] was given a dimension of 1 after d, stretched to n and joined with d."""
    x, wide, out = m["x"].type.shape, m["wide"], m["out"]
    for axis in range(len(x)):
        n = wide[axis + 1] if len(wide) == len(x) + 1 else None
        if not isinstance(n, int):
            continue
        middle = (*x[: axis + 1], 1, *x[axis + 1 :])
        stretched = (*x[: axis + 1], n, *x[axis + 1 :])
        joined = (*x[:axis], x[axis] * n, *x[axis + 1 :])
        if _same(m["middle"], middle) and _same(wide, stretched) and _same(out, joined):
            return axis, n
    return None


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(equal(p, q) for p, q in zip(a, b, strict=True))


def _make_repeat(x: Value, match: Match) -> Any:
    found = _repeats(match)
    assert found is not None
    return repeat(x, repeats=found[1], axis=found[0])


REPEAT_KV = Rewrite(
    "repeat-kv", "reshape(expand(reshape(x))) that repeats a dimension's elements -> repeat(x)",
    find=lambda x, *, middle, wide, out: reshape(expand(reshape(x, shape=middle), shape=wide), shape=out),
    make=_make_repeat,
    when=lambda m: _repeats(m) is not None,
)

REMOVE_IDENTITIES = Pass("remove-identities", "drops views and casts that change nothing", remove_identities)
HOIST_SETUP = Pass("hoist-setup", "ops over weights only run once, at load", hoist_setup)
MERGE_EQUAL_OPS = Pass("merge-equal-ops", "one op where several compute the same", merge_equal_ops)
IDIOMS = rewrite_pass(
    "idioms", "silu, swiglu, rms_norm, repeat and linear written out -> the one op", RMS_NORM, SILU, SWIGLU, REPEAT_KV,
    MATMUL_TO_LINEAR,
)

__all__ = ["HOIST_SETUP", "IDIOMS", "MERGE_EQUAL_OPS", "REMOVE_IDENTITIES", "replace_values"]
