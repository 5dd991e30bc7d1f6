"""Small tools to make a changed graph from an old one. Ops that did not change are kept as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monoplan.ir.builder import Builder, make_op
from monoplan.ir.errors import VerifyError
from monoplan.ir.graph import Graph, Op, Param, Value, definitions, to_networkx
from monoplan.ir.printer import print_op


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


def change_bodies(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """The graph with the bodies of its scans changed.

    To `change`, weights are params of the body, so that it may move ops to a setup: they become setup ops of the graph.
    """
    fixed = {p.value for p in graph.params} | {r for op in graph.setup for r in op.results}
    fresh = builder_for(graph).fresh
    setup, ops = list(graph.setup), []
    for op in graph.ops:
        if op.opdef.kind != "loop":
            ops.append(op)
            continue
        old: Graph = op.attrs["body"]
        outside: dict[Value, Value | None] = dict(zip(old.inputs, op.operands, strict=True))
        first = op.attrs["state"] + op.attrs["slices"]
        weights = [v for v in old.inputs[first:] if outside[v] in fixed]
        params = tuple(Param(v, v.name) for v in weights)
        opened = old.replace(inputs=tuple(v for v in old.inputs if v not in weights), params=params)
        new = change(opened)
        if new is opened:
            ops.append(op)
            continue
        for o in new.setup:
            operands = [None if v is None else outside[v] for v in o.operands]
            setup.append(make_op(o.opdef, operands, o.attrs, loc=o.loc, fresh=fresh))
            outside.update(zip(o.results, setup[-1].results, strict=True))
        read = {v for o in new.ops for v in o.reads} | set(new.outputs)
        made = (*(p.value for p in new.params), *(r for o in new.setup for r in o.results))
        shared = [v for v in (*new.inputs[first:], *made) if v in read]
        body = Graph(old.name, (*new.inputs[:first], *shared), (), new.ops, new.outputs)
        operands = [outside[v] for v in body.inputs]
        loop = make_op(op.opdef, operands, {**op.attrs, "body": body}, loc=op.loc, fresh=fresh)
        ops.append(Op(loop.opdef, loop.operands, loop.attrs, op.results, op.loc))
    same = len(ops) == len(graph.ops) and all(a is b for a, b in zip(ops, graph.ops, strict=True))
    return graph if same else graph.replace(setup=tuple(setup), ops=tuple(ops))


# Checks fusions by graph theory: a group of ops may become one kernel only if no path leaves it and comes back.


def is_convex(graph: Graph, group: set[Op], dag: Any = None) -> bool:
    """Whether no path leaves a group of ops and comes back: only then can one kernel take its place."""
    import networkx as nx

    dag = to_networkx(graph) if dag is None else dag
    after = set().union(*(nx.descendants(dag, op) for op in group)) - group
    before = set().union(*(nx.ancestors(dag, op) for op in group)) - group
    return not after & before


def fused_groups(before: Graph, after: Graph) -> list[tuple[Op, set[Op]]]:
    """Each op that a pass made, with the ops whose work it does: from its results back to what it reads."""
    defs, made = definitions(before), definitions(after)
    known = {*before.inputs, *(p.value for p in before.params), *defs}
    found = []
    for new in after.ops:
        if new is defs.get(new.results[0]) or new.results[0] not in known:
            continue  # as it was, or a helper of a new op
        reads, helpers = set[Value](), [new]
        while helpers:  # what helpers read counts as read by the op itself
            for v in helpers.pop().reads:
                if v not in known and v not in reads:
                    helpers.append(made[v])
                reads.add(v)
        group: set[Op] = set()
        todo: list[Value] = list(new.results)
        while todo:
            v = todo.pop()
            op = defs.get(v)
            if op is None or op in group or v in reads or op.opdef.kind == "generate":  # constants are copied
                continue
            group.add(op)
            todo += op.reads
        found.append((new, group - set(before.setup)))
    return found


def check_fusions(before: Graph, after: Graph, name: str) -> None:
    """Raises VerifyError unless each new op stands for a convex group of old ones, whose inner values nobody misses."""
    made = {r for op in after.ops for r in op.results}
    read = {v for op in after.ops for v in op.reads} | set(after.outputs)
    groups = fused_groups(before, after)
    dag = to_networkx(before) if groups else None
    for new, group in groups:
        if not is_convex(before, group, dag):
            raise VerifyError(f"pass {name}: a path leaves the group and comes back", where=print_op(new))
        inner = {r for op in group for r in op.results} - set(new.results)
        if lost := [v for v in inner & read if v not in made]:
            raise VerifyError(f"pass {name}: {lost[0]} is still read, but nothing makes it", where=print_op(new))
