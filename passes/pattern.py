"""Declarative rewrites: `find` and `make` are plain functions over the ops, `when` may refuse a match with a reason.

Positional parameters of `find` are wildcards for values (an absent optional operand matches too), keyword-only ones
for attributes. Values inside a match must have no reader outside of it. Bindings are never changed in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monoplan.ir.builder import Builder
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.opdef import OpDef
from monoplan.ir.printer import print_op
from monoplan.ir.types import TensorType, f32
from monoplan.passes.manager import NearMiss, Notes, Pass
from monoplan.passes.rebuild import builder_for, drop_dead

COMMUTATIVE = {"add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or"}
Bindings = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Wild:
    """Stands for any attribute value in a pattern."""

    name: str


@dataclass(frozen=True)
class Match:
    """What a match bound: wildcards by name, and facts about the graph for `when` and `make`."""

    values: Mapping[str, Any]
    graph: Graph
    defs: Mapping[Value, Op]
    root: Op

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def op(self, name: str) -> Op | None:
        """The op that defines a bound value."""
        v = self.values[name]
        return self.defs.get(v) if isinstance(v, Value) else None

    def is_param(self, name: str) -> bool:
        """Whether a bound value is a weight (a parameter, or made from parameters at load)."""
        return self.values[name] in param_values(self.graph)

    def scalar(self, name: str) -> float | None:
        """The number behind a bound scalar constant."""
        op = self.op(name)
        return op.attrs["value"] if op is not None and op.name == "full" and not op.attrs["shape"] else None


@dataclass(frozen=True)
class Rewrite:
    """A rule. `when(match)` gives True, or False, or the reason for refusing."""

    name: str
    rule: str
    find: Callable[..., Value]
    make: Callable[..., Value]
    when: Callable[[Match], bool | str] = lambda match: True

    def as_pass(self) -> Pass:
        return rewrite_pass(self.name, self.rule, self)


def rewrite_pass(name: str, rule: str, *rewrites: Rewrite) -> Pass:
    """A pass that applies rewrites until none fires."""

    def run(graph: Graph, notes: Notes) -> Graph:
        changed = True
        while changed:
            changed = False
            for rw in rewrites:
                new, count = apply_rewrite(rw, graph, notes)
                notes.rewrites += count
                changed = changed or count > 0
                graph = new
        return graph

    return Pass(name, rule, run)


def param_values(graph: Graph) -> set[Value]:
    """Values that are fixed when the weights are loaded."""
    return {p.value for p in graph.params} | {r for op in graph.setup for r in op.results}


class _PatternBuilder(Builder):
    """Records a pattern: no type rules, unnamed attributes match anything."""

    def emit(self, opdef: OpDef, operands: Sequence[Value | None], attrs: Mapping[str, Any], **_: Any) -> Any:
        full, rest = opdef.complete_operands(list(operands), attrs)
        wanted = {k: rest.get(k, Wild("_")) for k in opdef.attr_defaults}
        result = Value(TensorType(f32, ()), self.fresh(opdef.name))
        self.ops.append(Op(opdef, tuple(full), wanted, (result,)))
        return result


@dataclass(frozen=True)
class _Pattern:
    wildcards: Mapping[Value, str]
    ops: Mapping[Value, Op]
    root: Value


def _pattern(rw: Rewrite) -> _Pattern:
    params = inspect.signature(rw.find).parameters.values()
    values = {p.name: Value(TensorType(f32, ()), p.name) for p in params if p.kind is p.POSITIONAL_OR_KEYWORD}
    wild = {p.name: Wild(p.name) for p in params if p.kind is p.KEYWORD_ONLY}
    with _PatternBuilder(taken=values) as b:
        root = rw.find(**values, **wild)
    return _Pattern({v: n for n, v in values.items()}, {o.results[0]: o for o in b.ops}, root)


def _match(p: _Pattern, pv: Value | None, v: Value | None, defs: Mapping[Value, Op], m: Bindings) -> Iterator[Bindings]:
    """Every binding that makes pattern value `pv` equal graph value `v`."""
    if pv is None:
        if v is None:
            yield m
        return
    if pv in m:
        if m[pv] is v:
            yield m
        return
    pop = p.ops.get(pv)
    if pop is None:
        yield {**m, pv: v, p.wildcards[pv]: v}
        return
    op = defs.get(v) if v is not None else None
    if op is None or op.opdef is not pop.opdef or len(op.results) != 1 or len(op.operands) != len(pop.operands):
        return
    start = _match_attrs(pop, op, {**m, pv: v})
    if start is None:
        return
    orders = [op.operands]
    if op.name in COMMUTATIVE:
        orders.append((op.operands[1], op.operands[0]))
    for order in orders:
        yield from _match_all(p, list(zip(pop.operands, order, strict=True)), defs, start)


def _match_attrs(pop: Op, op: Op, m: dict[Any, Any]) -> dict[Any, Any] | None:
    for name, want in pop.attrs.items():
        have = op.attrs[name]
        if isinstance(want, Wild):
            if want.name == "_":
                continue
            if want.name in m and m[want.name] != have:
                return None
            m = {**m, want.name: have}
        elif want != have:
            return None
    return m


def _match_all(
    p: _Pattern, pairs: list[tuple[Value | None, Value | None]], defs: Mapping[Value, Op], m: Bindings
) -> Iterator[Bindings]:
    if not pairs:
        yield m
        return
    for partial in _match(p, *pairs[0], defs, m):
        yield from _match_all(p, pairs[1:], defs, partial)


def apply_rewrite(rw: Rewrite, graph: Graph, notes: Notes) -> tuple[Graph, int]:
    """One sweep over the graph; gives the new graph and the number of rewrites."""
    pattern = _pattern(rw)
    root_def = pattern.ops[pattern.root].opdef
    if not any(op.opdef is root_def for op in graph.ops):
        return graph, 0
    defs = dict(definitions(graph))
    users = _distinct_readers(graph)
    builder = builder_for(graph)
    ops: list[Op] = []
    consumed: set[Op] = set()
    count = 0
    names = inspect.signature(rw.make).parameters
    setup: set[Op] = set(graph.setup)
    for op in graph.ops:
        found = _accept(rw, pattern, op, graph, defs, users, consumed, notes, setup) if op.opdef is root_def else None
        if found is None:
            ops.append(op)
            continue
        match, inner = found
        first = len(builder.ops)
        builder.loc = op.loc
        with builder:
            result = rw.make(**{k: (match if k == "match" else match.values[k]) for k in names})
        made = _take_name(builder.ops[first:], result, op.results[0], rw)
        consumed.update(inner)
        for new in made:
            defs.update(dict.fromkeys(new.results, new))
            for v in new.reads:
                users.setdefault(v, set()).discard(op)
                users[v].add(new)
        ops += made
        count += 1
    if not count:
        return graph, 0
    return drop_dead(graph.replace(ops=tuple(ops))), count


def _accept(
    rw: Rewrite, pattern: _Pattern, op: Op, graph: Graph, defs: Mapping[Value, Op], users: Mapping[Value, set[Op | None]],
    consumed: set[Op], notes: Notes, setup: set[Op],
) -> tuple[Match, set[Op]] | None:
    """The first match at `op` that breaks no rule; otherwise notes why the nearest one was refused."""
    reason = ""
    for m in _match(pattern, pattern.root, op.results[0], defs, {}):
        inner = {defs[m[pv]] for pv in pattern.ops if pv is not pattern.root}
        if inner & consumed or inner & setup:
            continue
        shared = [m[pv] for pv in pattern.ops if pv is not pattern.root and len(users.get(m[pv], ())) != 1]
        if shared:
            reason = reason or f"{shared[0]} has {len(users[shared[0]])} readers, it must have one"
            continue
        match = Match({k: v for k, v in m.items() if isinstance(k, str)}, graph, defs, op)
        verdict = rw.when(match)
        if verdict is True:
            return match, inner
        reason = reason or (verdict if isinstance(verdict, str) else "its condition does not hold")
    if reason:
        notes.misses.append(NearMiss(rw.name, f"{print_op(op)} ({op.loc})" if str(op.loc) else print_op(op), reason))
    return None


def _take_name(made: list[Op], result: Value, old: Value, rw: Rewrite) -> list[Op]:
    """The new ops, with the last result being the old value itself, so that readers need no change."""
    if result.type != old.type:
        raise TypeError(f"{rw.name}: the replacement of {old}: {old.type} has type {result.type}")
    out = []
    for new in made:
        if result in new.results:
            new = Op(new.opdef, new.operands, new.attrs, tuple(old if r is result else r for r in new.results), new.loc)
        out.append(new)
    if not any(old in o.results for o in out):
        raise TypeError(f"{rw.name}: make() must end in a new op")
    return out


def _distinct_readers(graph: Graph) -> dict[Value, set[Op | None]]:
    """The ops that read each value, each once however often it reads it; None for the outputs."""
    found: dict[Value, set[Op | None]] = {}
    for op in (*graph.setup, *graph.ops):
        for v in op.reads:
            found.setdefault(v, set()).add(op)
    for v in graph.outputs:
        found.setdefault(v, set()).add(None)
    return found


distinct_readers = _distinct_readers
