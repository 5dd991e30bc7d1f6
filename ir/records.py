"""Frozen dataclasses as JSON and back: how graphs and plans are kept on disk. Data only, no code.

A document is a table of records. A record is a plain JSON scalar, or a list: the number of a class among `classes`, or
the word for a container, and then the places in the table of what it is made from, which come before it. Objects
that were shared are shared again, so identity keeps its meaning. Reading calls nothing but the constructors of the
classes that the reader names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monoplan.ir.opdef import REGISTRY, OpDef
from monoplan.ir.types import ALL_TYPES, DType

_SCALARS = (str, int, float, bool, type(None))
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "set": frozenset,
    "dict": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "dtype": lambda parts: ALL_TYPES[parts[0]],
    "op": lambda parts: REGISTRY[parts[0]],
}


class RecordError(ValueError):
    """A value that can't be written, or a document that can't be read."""


def dump(value: Any, classes: Sequence[type]) -> list[Any]:
    """The table of records of a value; the last record is the value itself."""
    writer = _Writer({cls: i for i, cls in enumerate(classes)})
    writer.place(value)
    return writer.table


def load(table: Any, classes: Sequence[type]) -> Any:
    """The value that a table of records stands for; RecordError if it stands for none."""
    made: list[Any] = []
    at, makers = made.__getitem__, [_maker(cls) for cls in classes]
    try:
        for record in table:
            if type(record) is not list:
                made.append(record)
                continue
            kind, *places = record
            make = makers[kind] if type(kind) is int else _CONTAINERS[kind]
            made.append(make(list(map(at, places))))
        return made[-1]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise RecordError(f"record {len(made)}: {error}") from error


def _maker(cls: Any) -> Callable[[list[Any]], Any]:
    """The constructor of a class, for the values of its fields in order."""
    fields = [f for f in dataclasses.fields(cls) if f.init]
    if any(f.kw_only for f in fields):
        names = [f.name for f in fields]
        return lambda parts: cls(**dict(zip(names, parts, strict=True)))
    return lambda parts: cls(*parts)


class _Writer:
    def __init__(self, numbers: Mapping[type, int]) -> None:
        self.numbers = numbers
        self.table: list[Any] = []
        self.places: dict[Any, int] = {}
        self.kept: list[Any] = []  # an object must live as long as its id stands for it

    def place(self, value: Any) -> int:
        """Where a value is in the table; it is written first if it is not there yet."""
        scalar = type(value) in _SCALARS
        key = (type(value), repr(value)) if scalar else id(value)
        if key not in self.places:
            record = value if scalar else self._record(value)
            self.places[key] = len(self.table)
            self.table.append(record)
            self.kept.append(value)
        return self.places[key]

    def _record(self, value: Any) -> list[Any]:
        kind, parts = self._parts(value)
        return [kind, *map(self.place, parts)]

    def _parts(self, value: Any) -> tuple[Any, Sequence[Any]]:
        if type(value) in self.numbers:
            fields = [f for f in dataclasses.fields(value) if f.init]
            return self.numbers[type(value)], [getattr(value, f.name) for f in fields]
        if isinstance(value, DType):
            return "dtype", [value.name]
        if isinstance(value, OpDef):
            return "op", [value.name]
        if isinstance(value, tuple | list):
            return ("list" if isinstance(value, list) else "tuple"), value
        if isinstance(value, frozenset | set):
            return "set", sorted(value)
        if isinstance(value, Mapping):
            return "dict", [part for item in value.items() for part in item]
        raise RecordError(f"a {type(value).__qualname__} can't be kept: {str(value)[:80]}")
