"""Declarative rewrites: `find` and `make` are plain functions over the ops, `when` may refuse a match with a reason.

Positional parameters of `find` are wildcards for values (an absent optional operand matches too), keyword-only ones
for attributes. Values inside a match must have no reader outside of it. Bindings are never changed in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from monoplan.ir.builder import Builder
from monoplan.ir.errors import TypeRuleError, VerifyError
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import OpDef
from monoplan.ir.types import TensorType, f32
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.rebuild import Overwrites, builder_for, drop_dead

_SWEEPS = 100
Bindings = Mapping[Any, Any]
Readers = Mapping[Value, set[Op | None]]


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
    params: set[Value]
    root: Op

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def op(self, name: str) -> Op | None:
        """The op that defines a bound value."""
        v = self.values[name]
        return self.defs.get(v) if isinstance(v, Value) else None

    def is_param(self, name: str) -> bool:
        """Whether a bound value is a weight (a parameter, or made from parameters at load)."""
        return self.values[name] in self.params

    def scalar(self, name: str) -> float | None:
        """The number behind a bound scalar constant."""
        op = self.op(name)
        return op.attrs["value"] if op is not None and op.name == "full" and not op.attrs["shape"] else None


@dataclass(frozen=True)
class Rewrite:
    """A rule. `when(match)` gives True, or the reason for refusing, or False where the match is not even near."""

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
        facts = Facts(graph)
        for _ in range(_SWEEPS):
            sweep = Notes()
            for rw in rewrites:
                graph, count = apply_rewrite(rw, graph, sweep, facts)
                facts = Facts(graph) if count else facts
            notes.rewrites += sweep.rewrites
            notes.done += sweep.done
            if not sweep.rewrites:
                notes.misses += sweep.misses  # those of earlier sweeps are out of date
                return graph
        last = ", ".join(sorted({f.rule for f in sweep.done}))
        raise VerifyError(f"{last} still fires after {_SWEEPS} sweeps: what it makes, it finds again")

    return Pass(name, rule, run)


def param_values(graph: Graph) -> set[Value]:
    """Values that are fixed when the weights are loaded."""
    return {p.value for p in graph.params} | {r for op in graph.setup for r in op.results}


def distinct_readers(graph: Graph) -> dict[Value, set[Op | None]]:
    """The ops that read each value, each once however often it reads it; None for the outputs."""
    found: dict[Value, set[Op | None]] = {}
    for op in (*graph.setup, *graph.ops):
        for v in op.operands:
            if v is not None:
                found.setdefault(v, set()).add(op)
    for v in graph.outputs:
        found.setdefault(v, set()).add(None)
    return found


def too_many(value: Value, readers: Readers) -> str:
    """The reason for refusing a value that several ops read."""
    return f"{value} has {len(readers.get(value, ()))} readers, it must have one"


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
    opdefs: frozenset[OpDef]


@cache
def _pattern(rw: Rewrite) -> _Pattern:
    params = inspect.signature(rw.find).parameters.values()
    values = {p.name: Value(TensorType(f32, ()), p.name) for p in params if p.kind is p.POSITIONAL_OR_KEYWORD}
    wild = {p.name: Wild(p.name) for p in params if p.kind is p.KEYWORD_ONLY}
    with _PatternBuilder(taken=values) as b:
        root = rw.find(**values, **wild)
    ops = {o.results[0]: o for o in b.ops}
    return _Pattern({v: n for n, v in values.items()}, ops, root, frozenset(o.opdef for o in b.ops))


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
    if op.opdef.commutative:
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


class Facts:
    """What rules ask about a graph, each found out once; a rule that fires keeps it up to date while it sweeps."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds = {op.opdef for op in graph.ops}

    @cached_property
    def defs(self) -> dict[Value, Op]:
        return definitions(self.graph)

    @cached_property
    def readers(self) -> dict[Value, set[Op | None]]:
        return distinct_readers(self.graph)

    @cached_property
    def overwrites(self) -> Overwrites:
        return Overwrites(self.graph)

    @cached_property
    def params(self) -> set[Value]:
        return param_values(self.graph)

    @cached_property
    def setup(self) -> set[Op]:
        return set(self.graph.setup)


def apply_rewrite(rw: Rewrite, graph: Graph, notes: Notes, facts: Facts | None = None) -> tuple[Graph, int]:
    """One sweep over the graph; gives the new graph and the number of rewrites."""
    facts = Facts(graph) if facts is None else facts
    pattern = _pattern(rw)
    if not pattern.opdefs <= facts.kinds:
        return graph, 0
    sweep = _Sweep(rw, pattern, facts, notes)
    root_def = pattern.ops[pattern.root].opdef
    ops: list[Op] = []
    count = 0
    for at, op in enumerate(graph.ops):
        made = sweep.rewrite(op, at) if op.opdef is root_def else None
        ops += made or (op,)
        count += made is not None
    return (drop_dead(graph.replace(ops=tuple(ops))), count) if count else (graph, 0)


_FAR = "not a near miss"


class _Sweep:
    """One rule going over one graph."""

    def __init__(self, rw: Rewrite, pattern: _Pattern, facts: Facts, notes: Notes) -> None:
        self.rw, self.pattern, self.facts, self.notes = rw, pattern, facts, notes
        self.consumed: set[Op] = set()
        self.names = tuple(inspect.signature(rw.make).parameters)

    @cached_property
    def builder(self) -> Builder:
        return builder_for(self.facts.graph)

    def rewrite(self, op: Op, at: int) -> list[Op] | None:
        """The ops in place of `op` by the first match that breaks no rule; else the reason is noted."""
        reasons = []
        facts = self.facts
        for m in _match(self.pattern, self.pattern.root, op.results[0], facts.defs, {}):
            inner = [pv for pv in self.pattern.ops if pv is not self.pattern.root]
            group = {facts.defs[m[pv]] for pv in inner}
            if group & self.consumed or group & facts.setup:
                continue
            values = {k: v for k, v in m.items() if isinstance(k, str)}
            match = Match(values, facts.graph, facts.defs, facts.params, op)
            made = self._refusal([m[pv] for pv in inner], group, match, at) or self._make(match)
            if not isinstance(made, str):
                self._replace(op, group, made)
                return made
            reasons.append(made)
        if reason := next((r for r in reasons if r != _FAR), None):
            self.notes.missed(self.rw.name, op, reason)
        return None

    def _refusal(self, inner: list[Value], group: set[Op], match: Match, at: int) -> str:
        verdict = self.rw.when(match)
        if verdict is not True:
            return verdict if isinstance(verdict, str) else _FAR
        whole = group | {match.root}
        for v in inner:
            if not self.facts.readers.get(v, set()) <= whole:
                return too_many(v, self.facts.readers)
        return self.facts.overwrites.refusal(group, at)

    def _make(self, match: Match) -> list[Op] | str:
        """The new ops, the last result being the old value itself, so that readers need no change; or a refusal."""
        old, first = match.root.results[0], len(self.builder.ops)
        self.builder.loc = match.root.loc
        try:
            with self.builder:
                result = self.rw.make(**{k: (match if k == "match" else match.values[k]) for k in self.names})
        except TypeRuleError as error:
            return error.what
        if result.type != old.type:
            return f"the result would be {result.type} in place of {old.type}"
        made = [
            Op(o.opdef, o.operands, o.attrs, tuple(old if r is result else r for r in o.results), o.loc)
            for o in self.builder.ops[first:]
        ]
        if not any(old in o.results for o in made):
            raise TypeError(f"{self.rw.name}: make() must end in a new op")
        return made

    def _replace(self, op: Op, group: set[Op], made: list[Op]) -> None:
        """Brings readers and definitions up to date: the matched ops are gone, the new ones are there."""
        self.consumed |= group
        for gone in (op, *group):
            for v in gone.reads:
                self.facts.readers[v].discard(gone)
        for new in made:
            self.facts.defs.update(dict.fromkeys(new.results, new))
            for v in new.reads:
                self.facts.readers.setdefault(v, set()).add(new)
        self.notes.fired(self.rw.name, made[-1])
