"""RoPE on q and k and the cache writes become the epilogue of the QKV product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.dims import same_dims
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.graph import Graph, Loc, Op, Value, definitions
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import OpDef
from monoplan.ir.ops.fused import heads_rope_cache, qkv_rope_cache
from monoplan.ir.types import bf16, f16, f32
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Readers, distinct_readers, param_values, too_many
from monoplan.passes.rebuild import Overwrites, drop_dead

_FAST = (f32, bf16, f16)


@dataclass(frozen=True)
class _Head:
    """One of q, k and v on its way from the split: its reshape, its norm and its rotation."""

    heads: int
    norm: Op | None
    rope: Op | None
    result: Value


@dataclass(frozen=True)
class _Facts:
    """What the pass knows about the whole graph."""

    readers: Readers
    fixed: set[Value]
    place: Mapping[Op, int]
    overwrites: Overwrites


class _Refused(Exception):
    """Why a QKV product can't take the epilogue."""


def fuse_qkv(graph: Graph, notes: Notes) -> Graph:
    """Finds split(linear) whose three parts are reshaped to heads, rotated and written to two caches.

    Or two parts, with v from a linear beside it, whose low-bit weight has another format.
    """
    if not any(op.name == "kv_update" for op in graph.ops):
        return graph
    defs = definitions(graph)
    place = {op: i for i, op in enumerate(graph.ops)}
    facts = _Facts(distinct_readers(graph), param_values(graph), place, Overwrites(graph))
    replaced: dict[Op, Op] = {}
    for cut in graph.ops:
        if cut.name != "split" or len(cut.results) not in (2, 3):
            continue
        source = defs.get(cut.operands[0]) if cut.operands[0] is not None else None
        if source is None or source.name not in ("linear", "fused_linear"):
            continue
        beside = _value_product(source, facts) if len(cut.results) == 2 else None
        if len(cut.results) == 2 and beside is None:
            continue
        try:
            last, made = _fuse(cut, source, beside, defs, facts)
        except _Refused as reason:
            try:
                last, made = _fuse_behind(cut, facts)
            except _Refused as other:
                notes.missed("fuse-qkv", source, f"{reason}; behind the product: {other}")
                continue
        replaced[last] = made
        notes.fired("fuse-qkv", made)
    if not replaced:
        return graph
    taken = {r for op in replaced.values() for r in op.results}
    ops = []
    for op in graph.ops:
        if op in replaced:
            ops.append(replaced[op])
        elif not taken.intersection(op.results):
            ops.append(op)
    return drop_dead(graph.replace(ops=tuple(ops)))


def _value_product(source: Op, facts: _Facts) -> Op | None:
    """The product of v beside that of q and k: of the same x, with a low-bit weight in another format."""
    x, weight, bias = source.operands[:3]
    if source.name != "linear" or x is None or weight is None or bias is not None or not weight.type.dtype.is_low_bit:
        return None
    for op in facts.readers.get(x, ()):
        if op is not None and op is not source and op.name == "linear" and op.operands[2] is None:
            other = op.operands[1]
            if other in facts.fixed and other.type.dtype.is_low_bit and other.type.dtype != weight.type.dtype:
                return op
    return None


def _norm_before(source: Op, beside: Op, defs: Mapping[Value, Op], facts: _Facts) -> Op | None:
    """The norm that only these two products read: merged, they would have taken it."""
    x = source.operands[0]
    norm = defs.get(x) if x is not None else None
    fits = norm is not None and norm.name == "rms_norm" and norm.attrs["dims"] == 1 and norm.operands[1] in facts.fixed
    return norm if fits and x is not None and facts.readers[x] == {source, beside} else None


def _fuse(cut: Op, source: Op, beside: Op | None, defs: Mapping[Value, Op], facts: _Facts) -> tuple[Op, Op]:
    """The last op of the group and the fused op that takes its place."""
    x, weight = source.given(0), source.given(1)
    before = None if beside is None else _norm_before(source, beside, defs, facts)
    if source.name == "fused_linear" and (source.attrs["gated"] or source.attrs["expr"] != "x0"):
        raise _Refused("the product has another epilogue already")
    if weight not in facts.fixed or weight.type.dtype.values not in _FAST or x.type.dtype not in _FAST:
        raise _Refused("the packed product takes a constant weight and floats up to f32")
    _only(source.result, facts.readers)
    parts = cut.results if beside is None else (*cut.results, beside.result)
    q, k, v = (_follow(part, facts.readers) for part in parts)
    rope, k_write, v_write = _ends(q, k, v, facts.readers)
    eps = {h.norm.attrs["eps"] for h in (q, k) if h.norm is not None}
    if len(eps) > 1:
        raise _Refused("the norms of q and k differ in eps")
    last = max((rope, k_write, v_write), key=lambda op: facts.place[op])
    results = (rope.result, k_write.result, v_write.result)
    _check_order(last, [op for op in (source, beside, before) if op is not None], results, facts)
    head = [*source.operands, None, None] if source.name == "linear" else list(source.operands)
    if before is not None:
        head[3] = before.operands[1]
    operands = [
        x if before is None else before.operands[0],
        weight,
        *rope.operands[1:4],
        k_write.operands[0],
        v_write.operands[0],
        *k_write.operands[2:4],
        *head[2:5],
        q.norm.operands[1] if q.norm else None,
        k.norm.operands[1] if k.norm else None,
        None if beside is None else beside.operands[1],
        k_write.operand("table"),
    ]
    attrs: dict[str, Any] = {
        "heads": q.heads,
        "kv_heads": k.heads,
        "algo": rope.attrs["algo"],
        "norm": source.attrs.get("norm", "none") if before is None else "rms",
        "eps": source.attrs.get("eps", 0.0) if before is None else before.attrs["eps"],
        "qk_eps": eps.pop() if eps else 0.0,
    }
    return last, _made(qkv_rope_cache, operands, attrs, source.loc, results)


def _fuse_behind(cut: Op, facts: _Facts) -> tuple[Op, Op]:
    """Norms that the product can't have, over all heads or with a weight for each: all but the product is one op."""
    x = cut.operands[0]
    if x is None or len(cut.results) != 3:
        raise _Refused("the product has not all of q, k and v")
    (q, q_norm), (k, k_norm) = (_follow_norm(part, facts) for part in cut.results[:2])
    v = _follow(cut.results[2], facts.readers)
    rope, k_write, v_write = _ends(q, k, v, facts.readers)
    assert q.norm is not None and k.norm is not None
    kinds = [(n.name, n.attrs["eps"], n.result.type.rank) for n in (q.norm, k.norm)]
    if kinds[0] != kinds[1]:
        raise _Refused("the norms of q and k differ")
    last = max((rope, k_write, v_write), key=lambda op: facts.place[op])
    results = (rope.result, k_write.result, v_write.result)
    _check_order(last, [cut], results, facts)
    operands = [
        x,
        *rope.operands[1:4],
        k_write.operands[0],
        v_write.operands[0],
        k_write.operands[2],
        q_norm,
        k_norm,
        *k_write.operands[3:],
    ]
    attrs = {
        "heads": q.heads,
        "kv_heads": k.heads,
        "algo": rope.attrs["algo"],
        "norm": "rms" if kinds[0][0] == "rms_norm" else "layer",
        "whole": kinds[0][2] == 3,
        "eps": kinds[0][1],
    }
    return last, _made(heads_rope_cache, operands, attrs, q.norm.loc, results)


def _follow_norm(part: Value, facts: _Facts) -> tuple[_Head, Value]:
    """From a part of the split through a norm over all heads, or one of each with weights [heads, dim], to its
    rotation; and the weight of the norm."""
    readers = facts.readers
    first = _only(part, readers)
    if first.name in ("rms_norm", "layer_norm") and first.attrs["dims"] == 1:
        weight = first.operands[1]
        head = _follow(first.result, readers)
        if head.norm is not None:
            raise _Refused(f"{part} has two norms")
        found = _Head(head.heads, first, head.rope, head.result)
    else:
        shaped = _only(part, readers)
        norm = _only(shaped.result, readers)
        if shaped.name != "reshape" or norm.name != "layer_norm" or norm.attrs["dims"] != 1 or norm.operands[1]:
            raise _Refused(f"{part} is not normed in a way that is known")
        times = _only(norm.result, readers)
        weight = next((v for v in times.reads if v is not norm.result), None) if times.name == "mul" else None
        rope = _only(times.result, readers)
        heads = shaped.result.type.shape[2] if shaped.result.type.rank == 4 else None
        if rope.name != "rope" or rope.operands[0] is not times.result or not isinstance(heads, int):
            raise _Refused(f"{part} is not rotated")
        found = _Head(heads, norm, rope, rope.result)
    assert found.norm is not None
    if len(found.norm.operands) > 2 and found.norm.operands[2] is not None:
        raise _Refused("the norm has a bias")
    if weight is None or weight not in facts.fixed:
        raise _Refused("the norm has no constant weight")
    return found, weight


def _only(v: Value, readers: Readers) -> Op:
    """The one op that reads a value."""
    found = readers.get(v, set())
    if len(found) != 1:
        raise _Refused(too_many(v, readers))
    (op,) = found
    if op is None:
        raise _Refused(f"{v} is an output of the graph")
    return op


def _follow(part: Value, readers: Readers) -> _Head:
    """From a part of the split through reshape, an optional norm and an optional rotation."""
    shaped = _only(part, readers)
    if shaped.name != "reshape" or shaped.result.type.rank != 4 or part.type.rank != 3:
        raise _Refused(f"{part} is not reshaped from [batch, seq, features] to heads")
    if not same_dims(part.type.shape[:2], shaped.result.type.shape[:2]):
        raise _Refused(f"{part} is not reshaped to [batch, seq, heads, dim]")
    heads = shaped.result.type.shape[2]
    if not isinstance(heads, int):
        raise _Refused("the number of heads is symbolic")
    value, norm, rope = shaped.result, None, None
    reader = _only(value, readers)
    if reader.name == "rms_norm" and reader.attrs["dims"] == 1 and reader.operands[1] is not None:
        norm, value = reader, reader.result
        reader = _only(value, readers)
    if reader.name == "rope" and reader.operands[0] is value:
        rope, value = reader, reader.result
    return _Head(heads, norm, rope, value)


def _ends(q: _Head, k: _Head, v: _Head, readers: Readers) -> tuple[Op, Op, Op]:
    """The rotation of q, which is that of k too, and the two writes to caches."""
    if q.rope is None or k.rope is None or v.rope is not None or v.norm is not None:
        raise _Refused("q and k must be rotated, v must not")
    if q.rope.operands[1:] != k.rope.operands[1:] or dict(q.rope.attrs) != dict(k.rope.attrs):
        raise _Refused("q and k are rotated by different tables or positions")
    k_write, v_write = (_write(h.result, readers) for h in (k, v))
    if k_write.operands[2:] != v_write.operands[2:]:
        raise _Refused("k and v go to different positions of their caches")
    if k.heads != v.heads:
        raise _Refused(f"{k.heads} key heads and {v.heads} value heads differ")
    return q.rope, k_write, v_write


def _made(
    opdef: OpDef, operands: list[Value | None], attrs: dict[str, Any], loc: Loc, results: tuple[Value, ...]
) -> Op:
    """The fused op, which gives the results that the group gave."""
    try:
        made = make_op(opdef, operands, attrs, loc=loc, fresh=str)
    except TypeRuleError as error:
        raise _Refused(error.what) from None
    if tuple(r.type for r in made.results) != tuple(r.type for r in results):
        raise _Refused("the fused op would have other types")
    return Op(made.opdef, made.operands, made.attrs, results, loc)


def _write(v: Value, readers: Readers) -> Op:
    op = _only(v, readers)
    if op.name != "kv_update" or op.operands[1] is not v:
        raise _Refused(f"{v} is not written to a cache")
    return op


def _check_order(last: Op, sources: list[Op], results: tuple[Value, ...], facts: _Facts) -> None:
    """Every reader of the three results must come after the place where the fused op will stand."""
    for r in results:
        for op in facts.readers.get(r, ()):
            if op is not None and facts.place[op] <= facts.place[last]:
                raise _Refused(f"{op.results[0]} reads {r} before the whole group is ready")
    if reason := facts.overwrites.refusal(sources, facts.place[last]):
        raise _Refused(reason)


FUSE_QKV = Pass("fuse-qkv", "RoPE on q and k and the cache writes become the epilogue of the QKV product", fuse_qkv)
