"""Latent attention: the norm of the latent, both rotations and the cache write are one op."""

from __future__ import annotations

from collections.abc import Mapping

from monoplan.ir.builder import make_op
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.ops.fused import latent_rope_cache
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Readers, distinct_readers, too_many
from monoplan.passes.rebuild import Overwrites, drop_dead

NAME = "fuse-latent"


def fuse_latent(graph: Graph, notes: Notes) -> Graph:
    """Finds kv_update(cache, concat(rms_norm(latent), rope(key))), and the rope of the queries that attend to it."""
    if not any(op.name == "kv_update" for op in graph.ops):
        return graph
    defs, readers, overwrites = definitions(graph), distinct_readers(graph), Overwrites(graph)
    place = {op: i for i, op in enumerate(graph.ops)}
    replaced: dict[Op, Op] = {}
    for write in graph.ops:
        found = _parts(write, defs) if write.name == "kv_update" else None
        if found is None:
            continue
        norm, key, query = found
        reason = _refusal(write, norm, key, query, defs, readers, place)
        reason = reason or overwrites.refusal([norm, key, query], place[write])
        made = None if reason else _make(write, norm, key, query)
        if made is None:
            notes.missed(NAME, write, reason or "the fused op would have other types")
            continue
        replaced[write] = made
        notes.fired(NAME, made)
    taken = {op.results[0] for op in replaced.values()}
    ops = [replaced.get(op, op) for op in graph.ops if op in replaced or not taken.intersection(op.results)]
    return drop_dead(graph.replace(ops=tuple(ops))) if replaced else graph


def _parts(write: Op, defs: Mapping[Value, Op]) -> tuple[Op, Op, Op] | None:
    """The norm of the latent and the rotation of the key that a cache takes, and that of the queries."""
    rows = _source(write.operands[1], defs, "concat")
    if rows is None or len(rows.operands) != 2 or rows.attrs["axis"] not in (-1, 3):
        return None
    shaped, key = _source(rows.operands[0], defs, "reshape"), _source(rows.operands[1], defs, "rope")
    norm = None if shaped is None else _source(shaped.operands[0], defs, "rms_norm")
    for reader in defs.values():
        if reader.name == "attention" and reader.operands[1] is write.result:
            joined = _source(reader.operands[0], defs, "concat")
            turned = [] if joined is None else [op for v in joined.operands if (op := _source(v, defs, "rope"))]
            if norm is not None and key is not None and len(turned) == 1:
                return norm, key, turned[0]
    return None


def _source(v: Value | None, defs: Mapping[Value, Op], name: str) -> Op | None:
    op = None if v is None else defs.get(v)
    return op if op is not None and op.name == name else None


def _refusal(
    write: Op, norm: Op, key: Op, query: Op, defs: Mapping[Value, Op], readers: Readers, place: Mapping[Op, int]
) -> str:
    latent, weight = norm.operands
    if norm.attrs["dims"] != 1 or weight is None or latent is None or latent.type.rank != 3:
        return "the norm is not one of [batch, seq, features] with a weight"
    if query.operands[1:] != key.operands[1:] or dict(query.attrs) != dict(key.attrs):
        return "queries and keys are rotated by different tables or positions"
    rows = write.given(1)
    for v in (norm.result, key.result, rows, defs[rows].operands[0]):
        if v is not None and len(readers[v]) != 1:
            return too_many(v, readers)
    for reader in readers[query.result]:
        if reader is None or place[reader] <= place[write]:
            return f"{query.result} is read before the cache is written"
    return ""


def _make(write: Op, norm: Op, key: Op, query: Op) -> Op | None:
    operands = [
        norm.operands[0],
        key.operands[0],
        *query.operands,
        write.operands[0],
        write.operands[2],
        norm.operands[1],
        *write.operands[3:],
    ]
    attrs = {"algo": key.attrs["algo"], "eps": norm.attrs["eps"]}
    results = (query.result, write.result)
    try:
        made = make_op(latent_rope_cache, operands, attrs, loc=write.loc, fresh=str)
    except TypeRuleError:
        return None
    if tuple(r.type for r in made.results) != tuple(r.type for r in results):
        return None
    return Op(made.opdef, made.operands, made.attrs, results, write.loc)


FUSE_LATENT = Pass(
    NAME, "the norm of a latent, rotations and the cache write of latent attention are one op", fuse_latent
)
