"""Checks fusions by graph theory: a group of ops may become one kernel only if no path leaves it and comes back."""

from __future__ import annotations

from typing import Any

from monoplan.ir.errors import VerifyError
from monoplan.ir.graph import Graph, Op, Value, definitions, to_networkx
from monoplan.ir.printer import print_op


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
