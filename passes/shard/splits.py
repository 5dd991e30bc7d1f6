"""How a value lies on the ranks, and the names of a tensor-parallel plan: what the rules of sharding talk about."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from monoplan.ir.dims import Dim
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Op
from monoplan.ir.types import TensorType

Piece = tuple[Fraction, Fraction]  # begin and end of a rank's part, as fractions of the axis
# What a plan may say of a layer. The names are those of transformers; *_rep are its words for what follows them.
STYLES = {
    "colwise": "colwise", "rowwise": "rowwise", "vocab": "vocab", "colwise_gather": "colwise_gather",
    "colwise_rep": "colwise_gather", "colwise_gather_output": "colwise_gather", "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise", "embedding_rowwise": "vocab", "vocab_parallel_rowwise": "vocab",
    "replicated": "replicated",
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
    """`units` things dealt out to ranks in runs as equal as can be."""
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
