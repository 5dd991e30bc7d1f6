"""Calls like earlier ones: recognised by structure and types alone, without matching them to a plan again.

Nothing is taken on trust: shape, dtype and flags of every array are read at every call, since arrays can be changed in
place. What is saved is finding the names of the arguments, their tree and the plan that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, attrgetter, is_, itemgetter
from typing import Any

import numpy as np

from monoplan.build import Built
from monoplan.frontend.module import Module
from monoplan.frontend.pytree import NoOutline, outline, unflattener
from monoplan.ir.errors import ArgumentError

KEPT = 1024  # calls of different sizes that are remembered
_SHAPE, _DTYPE, _FLAGS = attrgetter("shape"), attrgetter("dtype"), attrgetter("flags.num")
_ARRAYS = frozenset((np.ndarray, np.memmap))
_DENSE, _WRITEABLE = 0x0101, 0x0400  # C_CONTIGUOUS and ALIGNED, WRITEABLE: bits of numpy's flags.num


@dataclass(frozen=True, slots=True)
class Call:
    """The arrays of a call that can go to a plan as they are, and what to look the call up by."""

    key: Any
    arrays: list[Any]
    flags: list[int]
    writeable: bool  # all of them


@dataclass(frozen=True, slots=True)
class KnownCall:
    """What was found out about a call: it holds for every call of the same key."""

    built: Built
    symbols: dict[str, int]
    written: Callable[[Sequence[int]], Any]  # picks the flags of the arrays that forward writes into
    copied: tuple[tuple[int, int], ...]  # those whose new contents are an output of their own, and that output
    result: Callable[[Sequence[Any]], Any]  # forward's result from the outputs

    @classmethod
    def of(cls, built: Built, symbols: dict[str, int]) -> KnownCall:
        """A call of a plan whose arrays can go to it as they are."""
        writes = built.graph.writes
        returned, whole = len(built.graph.outputs) - len(writes), unflattener(built.out_tree)
        places = built.executable.plan.outputs if built.executable is not None else ()
        copied = tuple((i, j) for i, j in writes if not places or places[j] != i)
        numbers = [i for i, _ in writes]
        return cls(
            built, symbols, lambda flags: [flags[i] for i in numbers], copied,
            lambda outputs: whole(outputs[:returned]),
        )  # fmt: skip

    def check_writeable(self, call: Call) -> None:
        """Raises if forward writes into an array that is read-only."""
        for (number, _), flags in zip(self.built.graph.writes, self.written(call.flags), strict=True):
            if not flags & _WRITEABLE:
                raise read_only(self.built.graph.inputs[number].name)


class KnownCalls:
    """The calls of one Compiled. Two Python threads may use it at once: its tables only ever gain or lose entries."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._orders: dict[Any, Callable[[Sequence[Any]], Sequence[Any]] | None] = {}
        self._calls: dict[Any, KnownCall] = {}

    def recognise(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        """The call as something to look up; None if it must go the long way."""
        forward = self.module.forward
        form = (getattr(forward, "__func__", forward), len(args), *kwargs)
        try:
            order = self._orders[form]
        except KeyError:
            order = self._orders[form] = self._order(len(args), tuple(kwargs))
        if order is None:
            return None
        arrays: list[Any] = []
        try:
            outlines = [outline(x, arrays) for x in order((*args, *kwargs.values()))]
        except NoOutline:
            return None
        if not _ARRAYS.issuperset(map(type, arrays)):  # a traced tensor, a parameter that is not loaded
            return None
        flags = list(map(_FLAGS, arrays))
        common = reduce(and_, flags, -1)
        if common & _DENSE != _DENSE:
            return None
        key = (form, tuple(outlines), tuple(map(_SHAPE, arrays)), tuple(map(_DTYPE, arrays)))
        return Call(key, arrays, flags, bool(common & _WRITEABLE))

    def get(self, call: Call) -> KnownCall | None:
        """What is known about a call like this one."""
        return self._calls.get(call.key)

    def remember(self, call: Call, built: Built, symbols: dict[str, int], arrays: Sequence[Any]) -> None:
        """Notes which plan a call went to, if it went with these very arrays."""
        if len(arrays) != len(call.arrays) or not all(map(is_, arrays, call.arrays)):
            return
        if len(self._calls) >= KEPT:
            self._calls.clear()
        self._calls[call.key] = KnownCall.of(built, symbols)

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


def read_only(name: str) -> ArgumentError:
    """The error for an array that forward would write into."""
    return ArgumentError(
        f"argument {name}: forward writes into it, but the array is read-only", fix="pass a copy of it"
    )
