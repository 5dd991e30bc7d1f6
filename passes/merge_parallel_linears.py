"""linear(x, a), linear(x, b) -> split(linear(x, a|b)): one product for q, k, v and for gate, up."""

from __future__ import annotations

from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.ops.linear import linear
from monoplan.ir.ops.shape import concat, full, split
from monoplan.passes.manager import NearMiss, Notes, Pass
from monoplan.passes.pattern import param_values
from monoplan.passes.rebuild import builder_for

# Larger products gain nothing from merging, and joined weights must not double the memory of a huge head.
_LARGEST = 65536


def merge_parallel_linears(graph: Graph, notes: Notes) -> Graph:
    """Merges linears that read the same value with weights of the same type; biases are joined too."""
    fixed = param_values(graph)
    groups: dict[Any, list[Op]] = {}
    for op in graph.ops:
        if op.opdef is linear:
            x, weight, bias = op.operands
            if weight in fixed and (bias is None or bias in fixed):
                groups.setdefault((x, weight.type.dtype, weight.type.shape[1]), []).append(op)  # type: ignore[union-attr]
    uses: dict[Value, int] = {}
    for op in (*graph.setup, *graph.ops):
        for v in op.reads:
            uses[v] = uses.get(v, 0) + 1
    merged: dict[Op, list[Op]] = {}
    for members in groups.values():
        if len(members) < 2:
            continue
        reason = _refusal(members, uses)
        if reason:
            notes.misses.append(NearMiss("merge-parallel-linears", str(members[0].loc) or str(members[0]), reason))
        else:
            merged[members[0]] = members
    if not merged:
        return graph
    dropped = {op for members in merged.values() for op in members}
    builder = builder_for(graph)
    setup, ops = list(graph.setup), []
    for op in graph.ops:
        if op in merged:
            more_setup, new_ops = _merge(merged[op], builder.fresh)
            setup += more_setup
            ops += new_ops
            notes.rewrites += 1
        elif op not in dropped:
            ops.append(op)
    return graph.replace(setup=tuple(setup), ops=tuple(ops))


def _refusal(members: list[Op], uses: dict[Value, int]) -> str:
    weights = [op.operands[1] for op in members]
    if len(set(weights)) != len(weights):
        return "two of the linears share a weight"
    for w in weights:
        assert w is not None
        if uses[w] > 1:
            return f"{w} is read elsewhere too: joining it would store it twice"
        rows = w.type.shape[0]
        if not isinstance(rows, int) or rows > _LARGEST:
            return f"{w} has {rows} rows, over the limit of {_LARGEST}"
    return ""


def _merge(members: list[Op], fresh: Any) -> tuple[list[Op], list[Op]]:
    """Setup that joins weights and biases, and the one linear with its split."""
    loc = members[0].loc
    weights = [op.operands[1] for op in members]
    setup = [make_op(concat, weights, {"axis": 0}, loc=loc, fresh=fresh)]
    bias: Value | None = None
    if any(op.operands[2] is not None for op in members):
        parts = []
        for op, w in zip(members, weights, strict=True):
            part = op.operands[2]
            if part is None:
                assert w is not None
                zeros = make_op(full, [], {"shape": (w.type.shape[0],), "value": 0.0, "dtype": w.type.dtype}, fresh=fresh)
                setup.append(zeros)
                part = zeros.result
            parts.append(part)
        setup.append(make_op(concat, parts, {"axis": 0}, loc=loc, fresh=fresh))
        bias = setup[-1].result
    wide = make_op(linear, [members[0].operands[0], setup[0].result, bias], {}, loc=loc, fresh=fresh)
    sizes = tuple(op.result.type.shape[-1] for op in members)
    cut = make_op(split, [wide.result], {"sizes": sizes, "axis": -1}, loc=loc, fresh=fresh)
    pieces = Op(cut.opdef, cut.operands, cut.attrs, tuple(op.result for op in members), loc)
    return setup, [wide, pieces]


MERGE_PARALLEL_LINEARS = Pass(
    "merge-parallel-linears", "linear(x, a), linear(x, b) -> split(linear(x, a|b)); weights are joined at load",
    merge_parallel_linears,
)
