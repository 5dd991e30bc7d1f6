"""Tensor parallelism: the graph of one rank. Weights are cut by the names of their layers, activations follow.

Each value either lies whole on every rank or divided along one axis (`Split`). Linears that the plan calls colwise
divide their output, rowwise ones read a divided input and sum their products over the ranks; what is in between works
on its part (`shard_rules`). Where no rule fits, the parts are gathered: right in any case, and noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.dims import Dim, equal
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph, Loc, Op, Value
from monoplan.ir.opdef import OpDef
from monoplan.ir.ops.collective import all_gather, all_reduce
from monoplan.ir.ops.elementwise import add, ge, logical_and, lt, sub, where
from monoplan.ir.ops.index import embedding
from monoplan.ir.ops.shape import concat, full, reshape, slice_
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import distinct_readers, param_values
from monoplan.passes.rebuild import builder_for, drop_dead
from monoplan.passes.shard.rules import Lie, Local, Rules, Split, Styles, local_attrs

_TRIES = 16  # sweeps until the pieces of all layers fit each other; two or three are usual


def shard_pass(plan: Mapping[str, str], rank: int, size: int) -> Pass:
    """The pass for one rank of a group. `plan` names layers: {"layers.*.mlp.up_proj": "colwise", …}."""
    if not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} is not a rank of a group of {size}")
    styles = Styles(plan)
    rule = f"the part of rank {rank} of {size}: divided weights, all_reduce after rowwise products"
    # Not inside of scans: ranks would exchange data in every turn. Each of them runs the whole loop.
    return Pass("shard", rule, lambda graph, notes: shard(graph, styles, rank, size, notes), bodies=False)


def shard(graph: Graph, styles: Styles, rank: int, size: int, notes: Notes) -> Graph:
    """The graph that a rank runs; its caches (inputs that are written) have the rank's heads only."""
    if size == 1:
        return graph
    lies, locals_ = _Analysis(graph, styles, size).solve()
    if not styles.used:
        if any(op.opdef.kind == "collective" for op in graph.ops):
            return graph  # forward itself speaks of ranks
        if not styles.rules:
            raise ArgumentError(
                "the model has no tp_plan: nothing says which layers the ranks divide",
                fix='give it one: options={"tp_plan": {"layers.*.up": "colwise", …}}, or an attribute',
            )
        shown = ", ".join(pattern for pattern, _, _ in styles.rules)
        raise ArgumentError(
            "the tp_plan fits no layer of this model",
            why=f"it names {shown}",
            fix="patterns are names of Linear and Embedding layers; * stands for one part of a name",
        )
    return drop_dead(_Rebuild(graph, lies, locals_, rank, size, notes).run())


class _Analysis:
    """How every value lies: sweeps over the graph until the layers' pieces fit all that reads them."""

    def __init__(self, graph: Graph, styles: Styles, size: int) -> None:
        self.graph = graph
        self.rules = Rules(styles, size, {p.value: p.path for p in graph.params})
        self.states = {graph.inputs[i] for i, _ in graph.writes}
        self.inputs: dict[Value, Split] = {}  # caches that are divided

    def solve(self) -> tuple[dict[Value, Lie], dict[Op, Local]]:
        for _ in range(_TRIES):
            lies, found, settled = self._sweep()
            if settled:
                return lies, found
        raise ArgumentError("the tp_plan can't be applied: layers ask for different parts of the same values")

    def _sweep(self) -> tuple[dict[Value, Lie], dict[Op, Local], bool]:
        lies: dict[Value, Lie] = dict(self.inputs)
        found: dict[Op, Local] = {}
        settled = True
        for op in self.graph.ops:
            given = [None if v is None else lies.get(v) for v in op.operands]
            local = found[op] = self.rules.local(op, given)
            for name, pieces in local.wants.items():
                settled = settled and self.rules.pieces.get(name) == pieces
                self.rules.pieces[name] = pieces
            for v, wanted in zip(op.operands, local.operands, strict=True):
                if v in self.states and wanted is not None and self.inputs.get(v) != wanted:
                    self.inputs[v] = wanted
                    settled = False
            for r, lie in zip(op.results, local.results, strict=True):
                lies[r] = None if local.then else lie
        return lies, found, settled


class _Rebuild:
    """Makes the graph of one rank by the analysis."""

    def __init__(
        self, graph: Graph, lies: Mapping[Value, Lie], found: Mapping[Op, Local], rank: int, size: int, notes: Notes
    ) -> None:
        self.graph, self.lies, self.found, self.rank, self.size, self.notes = graph, lies, found, rank, size, notes
        self.fresh = builder_for(graph).fresh
        self.fixed = param_values(graph)
        self.new: dict[Value, Value] = {}
        self.made: dict[tuple[Value, Any], Value] = {}  # parts and wholes that were made before
        self.chosen: dict[tuple[Value, Split], tuple[Value, Value]] = {}  # of experts: see _own
        self.readers = distinct_readers(graph)
        self.setup, self.ops = list(graph.setup), list[Op]()
        self.loc = Loc()

    def run(self) -> Graph:
        inputs = []
        for v in self.graph.inputs:
            lie = self.lies.get(v)
            self.new[v] = v if lie is None else Value(lie.local(v.type, self.rank), v.name)
            inputs.append(self.new[v])
        for op in self.graph.ops:
            self.loc = op.loc
            self._op(op, self.found[op])
        written = {j: i for i, j in self.graph.writes}
        outputs = []
        for j, v in enumerate(self.graph.outputs):
            state = self.lies.get(self.graph.inputs[written[j]]) if j in written else None
            outputs.append(self._as(v, state))
        return self.graph.replace(
            inputs=tuple(inputs), setup=tuple(self.setup), ops=tuple(self.ops), outputs=tuple(outputs)
        )

    def _op(self, op: Op, local: Local) -> None:
        if local.whole:
            parts = [str(v) for v in op.operands if v is not None and self.lies.get(v) is not None]
            self.notes.missed("shard", op, f"no part of it can run by itself: {', '.join(parts)} gathered")
        if local.then in ("lookup", "experts"):
            self.new[op.result] = (self._lookup if local.then == "lookup" else self._experts)(op, local)
            return
        operands = [None if v is None else self._as(v, lie) for v, lie in zip(op.operands, local.operands, strict=True)]
        bias: Value | None = None
        if local.then == "reduce" and op.name == "linear":
            bias, operands[2] = operands[2], None  # added once, not once for each rank
        same = all(a is b for a, b in zip(operands, op.operands, strict=True))
        if same and not any(local.results) and not local.then:
            self.ops.append(op)
            return
        results = self._emit(op.opdef, operands, local_attrs(op, local, self.rank), [r.name for r in op.results])
        self.new.update(zip(op.results, results, strict=True))
        if local.then == "reduce":
            total = self._emit(all_reduce, results, {"world": self.size})[0]
            self.notes.fired("shard", self.ops[-1])
            self.new[op.result] = total if bias is None else self._emit(add, [total, bias], {})[0]
        elif local.then == "gather":
            split = local.results[0]
            assert split is not None
            self.new[op.result] = self._gather(results[0], op.result, split)
            self.notes.fired("shard", self.ops[-1])

    def _emit(
        self,
        opdef: OpDef,
        operands: Sequence[Value | None],
        attrs: Mapping[str, Any],
        names: Sequence[str] = (),
        *,
        setup: bool = False,
    ) -> tuple[Value, ...]:
        op = make_op(opdef, operands, attrs, names=names, loc=self.loc, fresh=self.fresh)
        (self.setup if setup else self.ops).append(op)
        return op.results

    # -- parts and wholes ---------------------------------------------------------------------------------------

    def _as(self, v: Value, wanted: Lie) -> Value:
        """A value as an op wants it: its part, or all of it."""
        have, new = self.lies.get(v), self.new.get(v, v)
        if have == wanted:
            return new
        key = (v, wanted)
        if key not in self.made:
            if wanted is None:
                assert have is not None
                self.made[key] = self._gather(new, v, have)
            elif have is None:
                self.made[key] = self._part(v, new, wanted, 0)
            elif have.covers(wanted):
                begin, _ = have.bounds(self.rank, v.type.shape[have.axis])
                self.made[key] = self._part(v, new, wanted, begin)
            else:
                self.made[key] = self._part(v, self._as(v, None), wanted, 0)
        return self.made[key]

    def _part(self, v: Value, source: Value, wanted: Split, offset: int) -> Value:
        """This rank's piece of a value of which `source` holds all from `offset` on; of weights at load."""
        begin, end = wanted.bounds(self.rank, v.type.shape[wanted.axis])
        if begin == offset and equal(source.type.shape[wanted.axis], end - begin):
            return source
        attrs = {"axis": wanted.axis, "start": begin - offset, "length": end - begin}
        return self._emit(slice_, [source], attrs, setup=v in self.fixed)[0]

    def _gather(self, part: Value, whole: Value, split: Split) -> Value:
        """All of a value from every rank's part: parts are filled up to one size, joined, and closed up again."""
        axis, size = split.axis, whole.type.shape[split.axis]
        edges = [split.bounds(r, size) for r in range(self.size)]
        if all(edge == (0, size) for edge in edges):
            return part
        room = max(end - begin for begin, end in edges)
        if (begin_end := edges[self.rank])[1] - begin_end[0] < room:
            missing = room - (begin_end[1] - begin_end[0])
            shape = tuple(missing if i == axis else d for i, d in enumerate(part.type.shape))
            zeros = self._emit(full, [], {"shape": shape, "value": 0.0, "dtype": part.type.dtype})[0]
            part = self._emit(concat, [part, zeros], {"axis": axis})[0]
        joined = self._emit(all_gather, [part], {"axis": axis, "world": self.size})[0]
        runs: list[tuple[int, int]] = []  # start and length of what counts, in the joined value
        done = 0
        for r, (begin, end) in enumerate(edges):
            if end <= done:  # a piece that an earlier rank has, too
                continue
            start = r * room + done - begin
            if runs and runs[-1][0] + runs[-1][1] == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + end - done)
            else:
                runs.append((start, end - done))
            done = end
        if runs == [(0, room * self.size)]:
            return joined
        kept = [self._emit(slice_, [joined], {"axis": axis, "start": s, "length": n})[0] for s, n in runs]
        return kept[0] if len(kept) == 1 else self._emit(concat, kept, {"axis": axis})[0]

    def _own(self, ids: Value, begin: int, end: int, all_: Dim) -> tuple[Value, Value]:
        """Numbers of a table of which this rank has [begin, end): which are its own, and their numbers in its part.

        One that is in nobody's part stays as it is, and its reader reports it; others are 0. Where a rank's part begins
        is a number that is made at load, as its weights are: the sources of ranks with equal parts are built once.
        """
        kind = ids.type.dtype

        def number(n: Dim) -> Value:
            return self._emit(full, [], {"value": n, "dtype": kind})[0]

        def inside(number_of_row: Value, rows: Dim) -> Value:
            over = self._emit(ge, [number_of_row, number(0)], {})[0]
            under = self._emit(lt, [number_of_row, number(rows)], {})[0]
            return self._emit(logical_and, [over, under], {})[0]

        first = self._emit(full, [], {"shape": (1,), "value": begin, "dtype": kind}, setup=True)[0]
        own = self._emit(sub, [ids, first], {})[0]
        mine = inside(own, end - begin)
        other = self._emit(where, [inside(ids, all_), number(0), ids], {})[0]
        return mine, self._emit(where, [mine, own, other], {})[0]

    def _sum(self, found: Value, mine: Value) -> Value:
        """Rows that this rank has, and zeros for the others, which the ranks add up."""
        flags = self._emit(reshape, [mine], {"shape": (*mine.type.shape, 1)})[0]
        zero = self._emit(full, [], {"value": 0.0, "dtype": found.type.dtype})[0]
        kept = self._emit(where, [flags, found, zero], {})[0]
        total = self._emit(all_reduce, [kept], {"world": self.size})[0]
        self.notes.fired("shard", self.ops[-1])
        return total

    def _lookup(self, op: Op, local: Local) -> Value:
        """Rows of a divided table."""
        ids, table, split = op.given(0), op.given(1), local.operands[1]
        assert split is not None
        part = self._as(table, split)
        mine, index = self._own(self._as(ids, None), *split.bounds(self.rank, table.type.shape[0]), table.type.shape[0])
        return self._sum(self._emit(embedding, [index, part], {})[0], mine)

    def _experts(self, op: Op, local: Local) -> Value:
        """Products by divided experts. What only the next product by the same experts reads is not summed."""
        weight, ids, split = op.given(1), op.given(2), local.operands[1]
        assert split is not None
        operands = [None if v is None else self._as(v, lie) for v, lie in zip(op.operands, local.operands, strict=True)]
        key = (ids, split)
        if key not in self.chosen:
            count = weight.type.shape[0]
            self.chosen[key] = self._own(self._as(ids, None), *split.bounds(self.rank, count), count)
        mine, operands[2] = self.chosen[key]
        found = self._emit(op.opdef, operands, op.attrs, [op.result.name])[0]
        readers = self.readers.get(op.result, set())
        goes_on = all(r is not None and r.operands[0] is op.result and self._has(r, ids, split) for r in readers)
        return found if goes_on else self._sum(found, mine)

    def _has(self, op: Op, ids: Value, split: Split) -> bool:
        """Whether an op multiplies by the same experts."""
        return self.found[op].then == "experts" and op.operands[2] is ids and self.found[op].operands[1] == split
