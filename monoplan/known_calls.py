"""Calls like earlier ones: recognised by structure and types alone, without matching them to a plan again.

Nothing is taken on trust: shape, dtype and flags of every array are read at every call, since arrays can be changed in
place. What is saved is finding the names of the arguments, their tree and the plan that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, attrgetter, eq, is_, itemgetter
from typing import Any

import numpy as np

from monoplan.built import Built
from monoplan.frontend.module import Module
from monoplan.frontend.pytree import NoOutline, outline, unflattener
from monoplan.ir.errors import ArgumentError

KEPT = 1024  # calls of different sizes that are remembered
_SHAPE, _DTYPE, _FLAGS = attrgetter("shape"), attrgetter("dtype"), attrgetter("flags.num")
_ARRAYS = frozenset((np.ndarray, np.memmap))
_DENSE, _WRITEABLE = 0x0101, 0x0400  # C_CONTIGUOUS and ALIGNED, WRITEABLE: bits of numpy's flags.num


@dataclass(frozen=True, slots=True)
class KnownCall:
    """What was found out about a call: it holds for every call of the same structure, shapes and dtypes."""

    built: Built
    symbols: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    written: Callable[[Sequence[Any]], Sequence[Any]] | None  # picks the arrays that forward writes into
    copied: tuple[tuple[int, int], ...]  # those whose new contents are an output of their own, and that output
    result: Callable[[Sequence[Any]], Any]  # forward's result from the outputs

    @classmethod
    def of(cls, built: Built, symbols: dict[str, int], arrays: Sequence[Any]) -> KnownCall:
        """A call of a plan whose arrays can go to it as they are."""
        writes = built.graph.writes
        returned, whole = len(built.graph.outputs) - len(writes), unflattener(built.out_tree)
        places = built.executable.plan.outputs if built.executable is not None else ()
        copied = tuple((i, j) for i, j in writes if not places or places[j] != i)
        # The first twice, since itemgetter gives a tuple for two or more.
        written = itemgetter(writes[0][0], *[i for i, _ in writes]) if writes else None
        # Equal shapes as one object: comparing those of a cache with itself then touches little memory.
        one: dict[tuple[int, ...], tuple[int, ...]] = {}
        shapes = tuple(one.setdefault(a.shape, a.shape) for a in arrays)
        dtypes = tuple(map(_DTYPE, arrays))
        return cls(built, symbols, shapes, dtypes, written, copied, lambda outputs: whole(outputs[:returned]))

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Whether arrays in the same structure are of the same shapes and dtypes."""
        return (
            len(arrays) == len(self.shapes)
            and all(map(eq, map(_SHAPE, arrays), self.shapes))
            and all(map(is_, map(_DTYPE, arrays), self.dtypes))
        )

    def check_writeable(self, arrays: Sequence[Any]) -> None:
        """Raises if forward writes into an array that is read-only."""
        if self.written is None or reduce(and_, set(map(_FLAGS, self.written(arrays)))) & _WRITEABLE:
            return
        for number, _ in self.built.graph.writes:
            if not arrays[number].flags.writeable:
                raise read_only(self.built.graph.inputs[number].name)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that nothing is known about yet, whose arrays may be fit for a plan as they are."""

    structure: Any
    arrays: Sequence[Any]


class KnownCalls:
    """The calls of one Compiled. Two Python threads may use it at once: its tables only gain or lose entries."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._orders: dict[Any, Callable[[Sequence[Any]], Sequence[Any]] | None] = {}
        self._latest: dict[Any, KnownCall] = {}  # by structure alone: a decode loop has the same shapes every time
        self._calls: dict[Any, KnownCall] = {}

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[KnownCall | None, Any]:
        """What is known about a call like this one, with the arrays to run on; or None, with the Call to remember.

        Raises if the plan would write into an array that is read-only.
        """
        forward = self.module.forward
        form = (getattr(forward, "__func__", forward), len(args), *kwargs)
        try:
            order = self._orders[form]
        except KeyError:
            order = self._orders[form] = self._order(len(args), tuple(kwargs))
        if order is None:
            return None, None
        arrays: list[Any] = []
        try:
            structure = (form, *[outline(x, arrays) for x in order((*args, *kwargs.values()))])
        except NoOutline:
            return None, None
        if not _ARRAYS.issuperset(map(type, arrays)):  # a traced tensor, a parameter that is not loaded
            return None, None
        flags = reduce(and_, set(map(_FLAGS, arrays)), -1)
        if flags & _DENSE != _DENSE:
            return None, None
        known = self._latest.get(structure)
        if known is None or not known.fits(arrays):
            known = self._calls.get(_key(structure, arrays))
            if known is None:
                return None, Call(structure, arrays)
            self._latest[structure] = known
        if not flags & _WRITEABLE:
            known.check_writeable(arrays)
        if known.written is not None and len(set(map(id, arrays))) < len(arrays):
            check_shared(known.built, arrays)
        return known, arrays

    def remember(self, call: Call, built: Built, symbols: dict[str, int], arrays: Sequence[Any]) -> None:
        """Notes which plan a call went to, if it went with these very arrays."""
        if len(arrays) != len(call.arrays) or not all(map(is_, arrays, call.arrays)):
            return
        if len(self._calls) >= KEPT:
            self._calls.clear()
            self._latest.clear()
        self._calls[_key(call.structure, arrays)] = KnownCall.of(built, symbols, arrays)

    def _order(self, count: int, names: tuple[str, ...]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        """Brings the values of a call into the order of forward's parameters; None where that can't be said."""
        marks = range(count + len(names))
        try:
            bound = self.module.signature().bind(*marks[:count], **dict(zip(names, marks[count:], strict=True)))
        except TypeError:
            return None
        places = list(bound.arguments.values())
        if not all(isinstance(i, int) for i in places) or sorted(places) != list(marks):  # forward takes *args, **kw
            return None
        if places == list(marks):
            return tuple
        return itemgetter(*places)


def _key(structure: Any, arrays: Sequence[Any]) -> Any:
    return structure, tuple(map(_SHAPE, arrays)), tuple(map(_DTYPE, arrays))


def check_shared(built: Built, arrays: Sequence[Any]) -> None:
    """Raises if forward writes into memory that another argument has too: the plan would read it before or after."""
    names = [v.name for v in built.graph.inputs]
    for number, _ in built.graph.writes:
        for other, array in enumerate(arrays):
            if other != number and _overlap(arrays[number], array):
                both = f"{names[number]} and {names[other]}"
                raise ArgumentError(
                    f"arguments {both} share memory, and forward writes into {names[number]}",
                    why="a plan has no order in which it reads one and writes the other",
                    fix="pass a copy of one of them",
                )


def _overlap(a: Any, b: Any) -> bool:
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b)):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=10_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:  # strange strides: nobody meant them to meet
        return False


def read_only(name: str) -> ArgumentError:
    """The error for an array that forward would write into."""
    return ArgumentError(
        f"argument {name}: forward writes into it, but the array is read-only", fix="pass a copy of it"
    )
