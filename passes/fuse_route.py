"""A router beside a gated product of the same rows (an expert that all tokens have) is part of that product."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from monoplan.ir.builder import make_op
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.ops.fused import fused_linear, linear_route
from monoplan.ir.ops.linear import linear, route
from monoplan.ir.ops.shape import concat, slice_
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Readers, distinct_readers, param_values, too_many
from monoplan.passes.rebuild import builder_for, drop_dead

NAME = "fuse-route"


def fuse_route(graph: Graph, notes: Notes) -> Graph:
    """Finds route(linear(norm(x), a)) and swiglu(linear(norm(x), b)): one product with the rows of both weights."""
    defs, readers, fixed = definitions(graph), distinct_readers(graph), param_values(graph)
    fresh, setup = builder_for(graph).fresh, list(graph.setup)
    replaced: dict[Op, Op] = {}
    taken: set[Op] = set()
    for choice in graph.ops:
        scores = _product(choice.operands[0], defs) if choice.opdef is route else None
        if scores is None:
            continue
        beside = [op for op in graph.ops if op not in taken and _is_gated(op) and _front(op) == _front(scores)]
        if not beside:
            continue
        gated = beside[0]
        reason = _refusal(choice, scores, gated, readers, fixed)
        found = None if reason else _made(choice, scores, gated, defs, fresh)
        if found is None:
            notes.missed(NAME, choice, reason or "the fused op would have other types")
            continue
        more, made = found
        setup += more
        first = min(scores, gated, key=graph.ops.index)
        replaced[first] = made
        taken |= {scores, gated, choice}
        notes.fired(NAME, made)
    if not replaced:
        return graph
    ops = (replaced.get(op, op) for op in graph.ops if op in replaced or op not in taken)
    return drop_dead(graph.replace(setup=tuple(setup), ops=tuple(ops)))


def _product(v: Value | None, defs: Mapping[Value, Op]) -> Op | None:
    """The product that scores are, perhaps in another shape."""
    op = None if v is None else defs.get(v)
    if op is not None and op.name == "reshape":
        op = defs.get(op.given(0))
    return op if op is not None and op.opdef in (linear, fused_linear) else None


def _is_gated(op: Op) -> bool:
    return op.opdef is fused_linear and op.attrs["gated"]


def _front(op: Op) -> tuple[object, ...]:
    """What a product multiplies: x, and the norm in front of it."""
    if op.opdef is linear:
        return (op.operands[0], "none", None, None)
    norm = op.attrs["norm"]
    return (op.operands[0], norm, None if norm == "none" else op.attrs["eps"], *op.operands[3:4])


def _refusal(choice: Op, scores: Op, gated: Op, readers: Readers, fixed: set[Value]) -> str:
    if choice.operands[1:] != () and choice.operands[1] is not None:
        return "the choice has a bias"
    if scores.opdef is fused_linear and (scores.attrs["gated"] or scores.attrs["expr"] != "x0"):
        return "the scores' product has another epilogue already"
    if any(v is not None for op in (scores, gated) for v in (op.operand("bias"), *op.operands[5:])):
        return "the products have biases, or read more behind them"
    if gated.attrs["norm"] == "layer":
        return "a layer norm stands in front of the products"
    weights = [op.given(1) for op in (scores, gated)]
    if weights[0].type.dtype != weights[1].type.dtype or weights[0].type.dtype.is_low_bit:
        return f"the weights are {weights[0].type.dtype} and {weights[1].type.dtype}: they have no common rows"
    for w in weights:
        if w not in fixed:
            return f"{w} is no constant weight"
        if len(readers[w]) > 1:
            return f"{w} is read elsewhere too: joining it would store it twice"
    rows = weights[0].type.shape[0]
    if not isinstance(rows, int) or rows % 2:
        return f"{rows} scores have no two halves"
    for v in (scores.result, choice.given(0)):
        if len(readers[v]) != 1:
            return too_many(v, readers)
    return ""


def _made(
    choice: Op, scores: Op, gated: Op, defs: Mapping[Value, Op], fresh: Callable[[str], str]
) -> tuple[list[Op], Op] | None:
    """Setup that joins the weights, and the op that takes the place of all three."""
    router, both = scores.given(1), gated.given(1)
    setup: list[Op] = []

    def halves(weight: Value) -> list[Value]:
        joined, rows = defs.get(weight), int(weight.type.shape[0]) // 2  # type: ignore[call-overload]
        if joined is not None and joined.opdef is concat and joined.attrs["axis"] == 0 and len(joined.operands) == 2:
            if all(v.type.shape[0] == rows for v in joined.reads):
                return list(joined.reads)
        for start in (0, rows):
            attrs = {"axis": 0, "start": start, "length": rows, "step": 1}
            setup.append(make_op(slice_, [weight], attrs, loc=choice.loc, fresh=fresh))
        return [op.result for op in setup[-2:]]

    pieces = [piece for pair in zip(halves(both), halves(router), strict=True) for piece in pair]
    setup.append(make_op(concat, pieces, {"axis": 0}, loc=gated.loc, fresh=fresh))
    attrs = {key: value for key, value in choice.attrs.items()} | {
        "scores": router.type.shape[0],
        "norm": gated.attrs["norm"],
        "eps": gated.attrs["eps"],
        "expr": gated.attrs["expr"],
    }
    results = (gated.result, *choice.results)
    try:
        made = make_op(
            linear_route, [gated.operands[0], setup[-1].result, gated.operands[3]], attrs, loc=gated.loc, fresh=str
        )
    except TypeRuleError:
        return None
    if tuple(r.type for r in made.results) != tuple(r.type for r in results):
        return None
    return setup, Op(made.opdef, made.operands, made.attrs, results, gated.loc)


FUSE_ROUTE = Pass(NAME, "a router and a gated product of the same rows are one product with both epilogues", fuse_route)
