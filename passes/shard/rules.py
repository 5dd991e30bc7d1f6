"""How each op runs on parts of its operands. What has no rule here runs on whole values, gathered first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from fractions import Fraction
from typing import Any

from monoplan.ir.dims import Dim, equal
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Op, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.rules import normalized_axes
from monoplan.ir.types import TensorType, product

# How a value lies on the ranks, and the names of a tensor-parallel plan: what the rules of sharding talk about.


Piece = tuple[Fraction, Fraction]  # begin and end of a rank's part, as fractions of the axis
# What a plan may say of a layer. The names are those of transformers; *_rep are its words for what follows them.
STYLES = {
    "colwise": "colwise", "rowwise": "rowwise", "vocab": "vocab", "colwise_gather": "colwise_gather",
    "colwise_rep": "colwise_gather", "colwise_gather_output": "colwise_gather", "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise", "embedding_rowwise": "vocab", "vocab_parallel_rowwise": "vocab",
    "replicated": "replicated", "experts": "experts",
}  # fmt: skip


@dataclass(frozen=True)
class Split:
    """A value whose `axis` is divided: rank r holds `pieces[r]` of it. Pieces of several ranks may be the same.

    `families` names the layers whose outputs these pieces are: where pieces must change, theirs change.
    """

    axis: int
    pieces: tuple[Piece, ...]
    families: frozenset[str] = field(default=frozenset(), compare=False)

    def at(self, axis: int) -> Split:
        """The same pieces along another axis."""
        return Split(axis, self.pieces, self.families)

    def bounds(self, rank: int, size: Dim) -> tuple[int, int]:
        """Where a rank's part of an axis of that size begins and ends; raises where an element would be cut."""
        begin, end = self.pieces[rank]
        if isinstance(size, int) and (begin * size).denominator == (end * size).denominator == 1:
            return int(begin * size), int(end * size)
        raise ArgumentError(f"an axis of {size} can't be cut at {begin} and {end} of it")

    def local(self, t: TensorType, rank: int) -> TensorType:
        """The type of a rank's part."""
        begin, end = self.bounds(rank, t.shape[self.axis])
        return t.with_shape(end - begin if i == self.axis else d for i, d in enumerate(t.shape))

    def covers(self, other: Split) -> bool:
        """Whether every rank's part of `other` lies inside its part of this."""
        inside = zip(self.pieces, other.pieces, strict=True)
        return self.axis == other.axis and all(a <= c and d <= b for (a, b), (c, d) in inside)


def cut(units: int, size: int) -> tuple[Piece, ...]:
    """`units` things divided between ranks in runs as equal as can be."""
    if units < size:
        raise ArgumentError(f"{units} can't be divided between {size} ranks", fix=f"use at most {units} ranks")
    edges = [Fraction(r * units // size, units) for r in range(size + 1)]
    return tuple(zip(edges, edges[1:], strict=False))


def cut_ceil(units: int, size: int) -> tuple[Piece, ...]:
    """The same, where only the last ranks have less: joined parts need no closing up."""
    each = -(-units // size)
    if each * (size - 1) >= units:
        return cut(units, size)
    edges = [Fraction(min(r * each, units), units) for r in range(size + 1)]
    return tuple(zip(edges, edges[1:], strict=False))


def cut_shared(units: int, size: int) -> tuple[Piece, ...]:
    """The same, where ranks share a unit if there are too few."""
    if units >= size:
        return cut(units, size)
    mine = [r * units // size for r in range(size)]
    return tuple((Fraction(g, units), Fraction(g + 1, units)) for g in mine)


def cut_heads(heads: int, kv_heads: int, size: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Pieces of query heads and of the key/value heads that they read.

    With fewer key/value heads than ranks, ranks that work on the same group hold the same head.
    """
    if kv_heads >= size:
        pieces = cut(kv_heads, size)
        return pieces, pieces
    if heads < size:
        raise ArgumentError(
            f"{heads} query heads can't be divided between {size} ranks", fix=f"use at most {heads} ranks"
        )
    group = heads // kv_heads
    mine = [r * kv_heads // size for r in range(size)]
    queries, keys = [], []
    for r, g in enumerate(mine):
        sharers = mine.count(g)
        if group < sharers:
            raise ArgumentError(
                f"{heads} query heads in {kv_heads} groups can't be divided between {size} ranks",
                why=f"{sharers} ranks would share a group of {group}",
            )
        at = r - mine.index(g)
        begin, end = (g * group + i * group // sharers for i in (at, at + 1))
        queries.append((Fraction(begin, heads), Fraction(end, heads)))
        keys.append((Fraction(g, kv_heads), Fraction(g + 1, kv_heads)))
    return tuple(queries), tuple(keys)


class Styles:
    """The tensor-parallel plan of a model: patterns of layer names (`*` is one part of a name) and their styles."""

    def __init__(self, plan: Mapping[str, str]) -> None:
        self.rules: list[tuple[str, re.Pattern[str], str]] = []
        self.used: set[str] = set()
        for pattern, style in plan.items():
            if style not in STYLES:
                raise ArgumentError(
                    f"tp_plan: unknown style {style!r} of {pattern!r}", fix="use one of " + ", ".join(STYLES)
                )
            parts = ("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
            self.rules.append((pattern, re.compile(r"(?:.*\.)?" + r"\.".join(parts)), STYLES[style]))

    def of(self, op: Op, paths: Sequence[str]) -> str | None:
        """The style of an op over a param, by the param's path and by the module that the op stands in."""
        names = [*(path.rpartition(".")[0] for path in paths), op.loc.path]
        for pattern, regex, style in self.rules:
            if any(regex.fullmatch(name) for name in names):
                self.used.add(pattern)
                return style
        return None


Lie = Split | None  # None: the whole value is on every rank


@dataclass(frozen=True)
class Local:
    """An op on parts: how its operands must lie, how its results lie, and what happens to the first of them."""

    operands: tuple[Lie, ...]
    results: tuple[Lie, ...]
    then: str = ""  # reduce: summed over the ranks; gather: made whole; lookup: vocabulary-parallel; experts: see there
    shape: bool = False  # the attribute `shape` is the result's local one
    wants: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)  # families that must be cut otherwise
    whole: bool = False  # no rule fits: operands are gathered


class Rules:
    """The rules for one plan and number of ranks; `pieces` of a family are as asked for, else as even as can be."""

    def __init__(self, styles: Styles, size: int, paths: Mapping[Value, str]) -> None:
        self.styles, self.size, self.paths = styles, size, paths
        self.pieces: dict[str, tuple[Piece, ...]] = {}

    def local(self, op: Op, lies: Sequence[Lie]) -> Local:
        """How an op runs when its operands lie so."""
        rule = _BY_NAME.get(op.name) or _BY_KIND.get(op.opdef.kind)
        found = rule(self, op, lies) if rule is not None else None
        if found is not None:
            return found
        return Local((None,) * len(lies), (None,) * len(op.results), whole=any(x is not None for x in lies))

    def style(self, op: Op) -> str | None:
        """What the plan says of a linear or embedding."""
        path = self.paths.get(op.operands[1])  # type: ignore[arg-type]
        return self.styles.of(op, [path] if path is not None else [])

    def family(self, op: Op, axis: int, size: Dim, *, ceil: bool = False) -> Split:
        """The pieces of the layer that an op stands for, on an axis of that size."""
        name = op.result.name
        if name not in self.pieces:
            if not isinstance(size, int):
                raise ArgumentError(f"an axis of {size} can't be divided", where=op.loc)
            try:
                self.pieces[name] = (cut_ceil if ceil else cut)(size, self.size)
            except ArgumentError as error:
                what = f"{op.loc.path or op.name}: {error.what}"
                raise ArgumentError(what, where=op.loc, fix=error.fix) from None
        return Split(axis, self.pieces[name], frozenset([name]))

    def fitting(self, split: Split, size: Dim) -> dict[str, tuple[Piece, ...]]:
        """What the families of a split must change to where its pieces would cut an element of an axis."""
        if not isinstance(size, int) or all((edge * size).denominator == 1 for piece in split.pieces for edge in piece):
            return {}
        return dict.fromkeys(split.families, cut_shared(size, self.size))


Rule = Callable[[Rules, Op, Sequence[Lie]], Local | None]


def _rank(op: Op, operand: int = 0) -> int:
    return op.given(operand).type.rank


def _linear(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    x, weight, bias = lies[0], op.given(1), op.operands[2]
    style, last = rules.style(op), _rank(op) - 1
    if style in ("colwise", "colwise_gather", "vocab"):
        split = rules.family(op, 0, weight.type.shape[0], ceil=style != "colwise")
        then = "" if style == "colwise" else "gather"
        return Local((None, split, None if bias is None else split), (split.at(last),), then)
    if style == "rowwise":
        split = x if x is not None and x.axis == last else rules.family(op, last, weight.type.shape[1])
        return Local((split, split.at(1), None), (None,), "reduce")
    if x is None or x.axis == last:
        return None
    return Local((x, None, None), (x,))


def _embedding(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    table = op.given(1)
    if rules.style(op) not in ("vocab", "colwise", "colwise_gather", "rowwise"):
        return None
    return Local((None, rules.family(op, 0, table.type.shape[0], ceil=True)), (None,), "lookup")


def _experts(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    """Each rank has some of the matrices, and their biases."""
    if rules.style(op) != "experts":
        return None
    split = rules.family(op, 0, op.operands[1].type.shape[0])  # type: ignore[union-attr]
    parts = (None, split, None, *(None if v is None else split for v in op.operands[3:]))
    return Local(parts, (None,), "experts")


def _aligned(split: Split, rank: int, result: int) -> Split:
    return split.at(split.axis + result - rank)


def _pointwise(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    rank = op.result.type.rank
    given = [(x, _aligned(x, _rank(op, i), rank)) for i, x in enumerate(lies) if x is not None]
    if not given:
        return None
    first = given[0][1]
    families = frozenset().union(*(s.families for _, s in given if s == first))
    chosen = Split(first.axis, first.pieces, families)
    wanted = [_part_of(v, chosen, rank, op.result.type.shape) for v in op.operands]
    return Local(tuple(wanted), (chosen,))


def _part_of(v: Value | None, split: Split, rank: int, shape: Sequence[Dim]) -> Lie:
    """How an operand that broadcasts to a result split so must lie: whole where it is stretched."""
    if v is None:
        return None
    axis = split.axis - (rank - v.type.rank)
    if axis < 0 or not equal(v.type.shape[axis], shape[split.axis]) or equal(shape[split.axis], 1):
        return None
    return split.at(axis)


def _matmul(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    a, b = lies
    rank = op.result.type.rank
    ra, rb = _rank(op, 0), _rank(op, 1)
    if ra < 2 or rb < 2 or (a is None and b is None):
        return None
    if a is not None and b is not None and a.axis == ra - 1 and b.axis == rb - 2:
        return Local((a, a.at(rb - 2)), (None,), "reduce")
    if a is not None and a.axis < ra - 1:
        chosen = _aligned(a, ra, rank)
        other = op.operands[1]
        right = None if chosen.axis >= rank - 2 else _part_of(other, chosen, rank, op.result.type.shape)
        return Local((a, right), (chosen,))
    if b is not None and b.axis != rb - 2:
        chosen = _aligned(b, rb, rank)
        left = None if chosen.axis >= rank - 2 else _part_of(op.operands[0], chosen, rank, op.result.type.shape)
        return Local((left, b), (chosen,))
    return None


def _norm(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    x = lies[0]
    if x is None or x.axis >= _rank(op) - op.attrs["dims"]:
        return None
    return Local((x, *(None for _ in lies[1:])), (x,))


def _along(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    """Ops along one axis (softmax, cumsum, sort): parts of another axis stay apart."""
    x = lies[0]
    axis = op.attrs.get("axis", -1) % _rank(op)
    if x is None or x.axis == axis or (op.name == "causal_softmax" and x.axis == _rank(op) - 2):
        return None
    return Local((x,), (x,) * len(op.results))


def _reduce(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    x = lies[0]
    axes = normalized_axes(op.attrs.get("axes", op.attrs.get("axis")), _rank(op), op.name)
    if x is None:
        return None
    if x.axis in axes:
        return Local((x,), (None,), "reduce") if op.name == "sum" else None
    shift = 0 if op.attrs["keepdims"] else sum(a < x.axis for a in axes)
    return Local((x,), (x.at(x.axis - shift),))


def _reshape(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    x, source = lies[0], op.given(0)
    if x is None:
        return None
    axis = reshaped_axis(source.type, op.result.type, x.axis)
    if axis is None:
        return None
    wants = rules.fitting(x, op.result.type.shape[axis])
    return Local((x,), (x.at(axis),), shape=True, wants=wants)


def reshaped_axis(old: TensorType, new: TensorType, axis: int) -> int | None:
    """The axis of the result where a run of `axis` is still one run of whole rows; None if there is none."""
    before, last = product(old.shape[:axis]), new.rank - 1
    found = [i for i in range(new.rank) if equal(product(new.shape[:i]), before)]
    sizes = [new.shape[i] for i in found]
    # [batch, seq, dim] to [batch, seq, 1, dim] is one head, not a divided one.
    if len(found) > 1 and new.rank == 4 == old.rank + 1 and found[-2:] == [last - 1, last] and axis == old.rank - 1:
        return last - 1
    same = next((i for i, n in zip(found, sizes, strict=True) if equal(n, old.shape[axis])), None)
    return same if same is not None else next((i for i, n in zip(found, sizes, strict=True) if not equal(n, 1)), None)


def _transpose(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    x = lies[0]
    return None if x is None else Local((x,), (x.at(tuple(op.attrs["axes"]).index(x.axis)),))


def _off_axis(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    """slice and split along another axis."""
    x = lies[0]
    if x is None or op.attrs["axis"] % _rank(op) == x.axis:
        return None
    return Local((x,), (x,) * len(op.results))


def _expand(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    x = lies[0]
    if x is None:
        return None
    return Local((x,), (_aligned(x, _rank(op), op.result.type.rank),), shape=True)


def _concat(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    first = next((x for x in lies if x is not None), None)
    if first is None or op.attrs["axis"] % _rank(op) == first.axis:
        return None
    return Local((first,) * len(lies), (first,))


def _repeat(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    """Repeated heads: a rank's part of them is its part of the few, repeated."""
    x = lies[0]
    return None if x is None else Local((x,), (x,))


def _rope(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    x = lies[0]
    return Local((x, None, None, None), (x,)) if x is not None and x.axis == _rank(op) - 2 else None


def _kv_update(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    """Rows [batch, seq, heads, dim] into a cache [batch, heads, capacity, dim]."""
    cache, rows = lies[0], lies[1]
    if rows is None or rows.axis != 2:
        return None
    wanted = rows.at(1)
    families = wanted.families | (cache.families if cache is not None else frozenset())
    wanted = Split(1, wanted.pieces, families)
    return Local((wanted, rows, None, *(None for _ in lies[3:])), (wanted,))


def _attention(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    """Query heads with the key/value heads that they read; heads stay whole."""
    q, k = op.given(0), op.given(1)
    at = q.type.rank - (3 if op.attrs["layout"] == "bhsd" else 2)
    at_kv = k.type.rank - 3
    parts = [
        lies[0] if lies[0] is not None and lies[0].axis == at else None,
        *(x if x is not None and x.axis == at_kv else None for x in lies[1:3]),
    ]
    if all(p is None for p in parts):
        return None
    heads, kv_heads = q.type.shape[at], k.type.shape[at_kv]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    try:
        queries, keys = cut_heads(heads, kv_heads, rules.size)
    except ArgumentError as error:
        raise ArgumentError(f"{op.loc.path}: {error.what}", where=op.loc, why=error.why, fix=error.fix) from None
    wants: dict[str, tuple[Piece, ...]] = {}
    made = []
    for part, pieces, axis in zip(parts, (queries, keys, keys), (at, at_kv, at_kv), strict=True):
        families = part.families if part is not None else frozenset()
        if part is not None and part.pieces != pieces:
            wants.update(dict.fromkeys(families, pieces))
        made.append(Split(axis, pieces, families))
    mask: Lie = None
    if len(op.operands) > 3 and (m := op.operands[3]) is not None:
        rank = q.type.rank
        mask = _part_of(m, Split(rank - 3, queries), rank, [*q.type.shape[: rank - 3], heads, 0, 0])
    tail: list[Lie] = [mask, *(None for _ in lies[4:])] if len(lies) > 3 else []
    if op.operand("sinks") is not None:
        tail[-1] = Split(0, queries)
    return Local((*made, *tail), (made[0],), wants=wants)


def _select_rows(rules: Rules, op: Op, lies: Sequence[Lie]) -> Local | None:
    x = lies[0]
    return Local((x, None), (x,)) if x is not None and x.axis >= 2 else None


_BY_NAME: dict[str, Rule] = {
    "linear": _linear, "embedding": _embedding, "matmul": _matmul, "reshape": _reshape, "transpose": _transpose,
    "slice": _off_axis, "split": _off_axis, "expand": _expand, "concat": _concat, "repeat": _repeat, "rope": _rope,
    "kv_update": _kv_update, "attention": _attention, "select_rows": _select_rows, "expert_linear": _experts,
}  # fmt: skip
_BY_KIND: dict[str, Rule] = {
    "pointwise": _pointwise, "fused_pointwise": _pointwise, "norm": _norm, "softmax": _along, "scan": _along,
    "sort": _along, "reduce": _reduce,
}  # fmt: skip


def local_attrs(op: Op, local: Local, rank: int) -> dict[str, Any]:
    """The attributes of an op on a rank's part."""
    attrs = dict(op.attrs)
    split = local.results[0]
    if local.shape and split is not None:
        attrs["shape"] = split.local(op.result.type, rank).shape
    return attrs
