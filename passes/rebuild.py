"""Small tools to make a changed graph from an old one. Ops that did not change are kept as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from monoplan.ir.builder import Builder, make_op
from monoplan.ir.graph import Graph, Op, Value


def substitute(ops: Iterable[Op], new: dict[Value, Value]) -> list[Op]:
    """Ops with operands replaced by `new` (which is extended); results are inferred again where types changed."""
    result = []
    for op in ops:
        if not any(v in new for v in op.reads):
            result.append(op)
            continue
        made = rebuilt(op, [None if v is None else new.get(v, v) for v in op.operands])
        if tuple(r.type for r in made.results) == tuple(r.type for r in op.results):
            made = Op(op.opdef, made.operands, op.attrs, op.results, op.loc)  # same results: readers need no change
        else:
            new.update(zip(op.results, made.results, strict=True))
        result.append(made)
    return result


def rebuilt(op: Op, operands: Sequence[Value | None]) -> Op:
    """The op on other operands, with the names of its results."""
    names = [r.name for r in op.results]
    return make_op(op.opdef, operands, op.attrs, names=names, loc=op.loc, fresh=lambda stem: stem)


def replace_values(graph: Graph, new: Mapping[Value, Value]) -> Graph:
    """The graph with values replaced everywhere."""
    mapping = dict(new)
    setup = tuple(substitute(graph.setup, mapping))
    ops = tuple(substitute(graph.ops, mapping))
    return graph.replace(setup=setup, ops=ops, outputs=tuple(mapping.get(v, v) for v in graph.outputs))


class Overwrites:
    """Values whose storage an op takes over in place, and when: a read must not move behind that."""

    def __init__(self, graph: Graph) -> None:
        self.at: dict[Value, int] = {}
        for i, op in enumerate(graph.ops):
            for name in op.opdef.inplace.values():
                if (v := op.operand(name)) is not None:
                    self.at[v] = i

    def __contains__(self, value: Value) -> bool:
        return value in self.at

    def refusal(self, ops: Iterable[Op], to: int) -> str:
        """Why `ops` can't be computed at place `to` of the graph, or "" if they can."""
        if self.at:
            for op in ops:
                for v in op.reads:
                    if self.at.get(v, to) < to:
                        return f"{v} is overwritten in between"
        return ""


def builder_for(graph: Graph) -> Builder:
    """A builder whose fresh names do not clash with the graph's."""
    return Builder(taken=(v.name for v in graph.values))


def drop_dead(graph: Graph) -> Graph:
    """Without ops and params whose results nobody reads."""
    live = set(graph.outputs)

    def sweep(ops: Sequence[Op]) -> tuple[Op, ...]:
        kept = []
        for op in reversed(ops):
            if live.intersection(op.results):
                live.update(op.reads)
                kept.append(op)
        return tuple(reversed(kept))

    ops = sweep(graph.ops)
    setup = sweep(graph.setup)
    params = tuple(p for p in graph.params if p.value in live)
    if len(ops) == len(graph.ops) and len(setup) == len(graph.setup) and len(params) == len(graph.params):
        return graph
    return graph.replace(ops=ops, setup=setup, params=params)
