"""Latent attention: the norm of the latent, rotations, the cache write and the queries' product are one op."""

from __future__ import annotations

from collections.abc import Mapping

from monoplan.ir.builder import make_op
from monoplan.ir.dims import Dim
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.ops.fused import latent_rope_cache
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Readers, distinct_readers, too_many
from monoplan.passes.rebuild import Overwrites, drop_dead

NAME = "fuse-latent"
_NAMES = latent_rope_cache.operand_names


def fuse_latent(graph: Graph, notes: Notes) -> Graph:
    """Finds kv_update(cache, concat(rms_norm(latent), rope(key))), and the rope of the queries that attend to it.

    Where the other part of these queries is a product by a matrix for each head, the op makes whole queries.
    """
    if not any(op.name == "kv_update" for op in graph.ops):
        return graph
    defs, readers, overwrites = definitions(graph), distinct_readers(graph), Overwrites(graph)
    place = {op: i for i, op in enumerate(graph.ops)}
    replaced: dict[Op, Op] = {}
    for write in graph.ops:
        found = _parts(write, defs) if write.name == "kv_update" else None
        if found is None:
            continue
        norm, key, query, joined = found
        reason = _refusal(write, norm, key, query, defs, readers, place)
        reason = reason or overwrites.refusal([norm, key, query], place[write])
        made = None if reason else _make(write, norm, key, query)
        reason = reason or ("the fused op would have other types" if made is None else _late(made, write, defs, place))
        if made is None or reason:
            notes.missed(NAME, write, reason)
            continue
        product, why = _product(write, joined, query, defs, readers, place)
        if product is not None:
            why = overwrites.refusal([product], place[write])
            whole = _with_product(made, product, joined, defs)
            if whole is None:
                why = why or "queries with their product would have other types"
            elif not (why := why or _late(whole, write, defs, place)):
                made = whole
        if why:
            notes.missed(NAME, joined, why)
        replaced[write] = made
        notes.fired(NAME, made)
    taken = {op.results[0] for op in replaced.values()}
    ops = [replaced.get(op, op) for op in graph.ops if op in replaced or not taken.intersection(op.results)]
    return drop_dead(graph.replace(ops=tuple(ops))) if replaced else graph


def _parts(write: Op, defs: Mapping[Value, Op]) -> tuple[Op, Op, Op, Op] | None:
    """The norm of the latent and the rotation of the key that a cache takes, that of the queries, and their concat."""
    rows = _source(write.operands[1], defs, "concat")
    if rows is None or len(rows.operands) != 2 or rows.attrs["axis"] not in (-1, 3):
        return None
    shaped, key = _source(rows.operands[0], defs, "reshape"), _source(rows.operands[1], defs, "rope")
    norm = None if shaped is None else _source(shaped.operands[0], defs, "rms_norm")
    for reader in defs.values():
        if reader.name == "attention" and reader.operands[1] is write.result:
            joined = _source(reader.operands[0], defs, "concat")
            turned = [] if joined is None else [op for v in joined.operands if (op := _source(v, defs, "rope"))]
            if norm is not None and key is not None and joined is not None and len(turned) == 1:
                return norm, key, turned[0], joined
    return None


def _late(made: Op, write: Op, defs: Mapping[Value, Op], place: Mapping[Op, int]) -> str:
    """Why an op can't stand where the cache is written, or ""."""
    for v in made.reads:
        if v in defs and place.get(defs[v], -1) > place[write]:
            return f"{v} is made after the cache is written"
    return ""


def _product(
    write: Op, joined: Op, query: Op, defs: Mapping[Value, Op], readers: Readers, place: Mapping[Op, int]
) -> tuple[Op | None, str]:
    """The product that is the first part of the queries, by a matrix for each head; or why it stays by itself."""
    first = joined.operands[0]
    shaped = _source(first, defs, "reshape")
    product = _source(None if shaped is None else shaped.operands[0], defs, "expert_linear")
    if shaped is None or product is None or len(joined.operands) != 2 or joined.operands[1] is not query.result:
        return None, ""
    heads = query.result.type.shape[2]
    rows, weight, ids, *others = product.operands
    if any(v is not None for v in others) or rows is None or rows.type.rank != 3 or joined.attrs["axis"] not in (-1, 3):
        return None, "the queries' product has more than a matrix for each head"
    if ids is None or not _counts(ids, heads, defs) or weight is None or weight.type.shape[0] != heads:
        return None, "the matrices of the queries' product are chosen: they are not one for each head"
    for v in (shaped.result, product.result, query.result):
        if len(readers[v]) != 1:
            return None, too_many(v, readers)
    for reader in readers[joined.result]:
        if reader is None or place[reader] <= place[write]:
            return None, f"{joined.result} is read before the cache is written"
    return product, ""


def _counts(ids: Value, heads: Dim, defs: Mapping[Value, Op]) -> bool:
    """Whether each row of ids is 0, 1, … up to the number of heads."""
    wide = _source(ids, defs, "expand")
    flat = _source(None if wide is None else wide.operands[0], defs, "reshape")
    ramp = _source(None if flat is None else flat.operands[0], defs, "arange")
    if flat is None or ramp is None or flat.result.type.shape != (1, heads):
        return False
    return ramp.attrs["start"] == 0 and ramp.attrs["length"] == heads


def _with_product(made: Op, product: Op, joined: Op, defs: Mapping[Value, Op]) -> Op | None:
    """The fused op that makes whole queries."""
    flat = _source(product.operands[0], defs, "reshape")
    operands = [*made.operands, *[None] * (len(_NAMES) - len(made.operands))]
    operands[_NAMES.index("plain")] = None if flat is None else flat.operands[0]
    operands[_NAMES.index("matrices")] = product.operands[1]
    results = (joined.result, made.results[1])
    try:
        found = make_op(latent_rope_cache, operands, made.attrs, loc=made.loc, fresh=str)
    except TypeRuleError:
        return None
    if tuple(r.type for r in found.results) != tuple(r.type for r in results):
        return None
    return Op(found.opdef, found.operands, found.attrs, results, made.loc)


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
