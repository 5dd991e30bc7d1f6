"""`dataclass` of the standard library, for classes that are made at every start of the program.

The standard one writes the text of six methods for each class and compiles it: half of the time that importing this
package takes. Here `__init__` is compiled at the first instance, and the other methods are the same functions for all
classes. What they do is the same, `fields`, `replace` and `asdict` work as usual, and type checkers see the standard
decorator.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, repr=True, slots=False, kw_only=False):  # noqa: A002
        def made(cls):
            own = dict(vars(cls))
            cls.__doc__ = cls.__doc__ or cls.__name__  # the standard one would work out the signature
            with _thawed(cls):
                made = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
            made.__dataclass_params__.frozen = frozen
            if any("InitVar" in str(f.type) for f in made.__dataclass_fields__.values()):
                raise TypeError(f"{made.__name__}: a class with an InitVar takes the standard dataclass")
            for name, method in _methods(made, frozen, eq, repr, slots).items():
                if name not in own or name == "__hash__" and own[name] is None:
                    setattr(made, name, method)
            return made

        return made if cls is None else made(cls)


@contextmanager
def _thawed(cls: type) -> Iterator[None]:
    """The standard decorator freezes nothing here, and would refuse that below a class that is frozen."""
    found = [vars(base).get("__dataclass_params__") for base in cls.__mro__]
    frozen = [params for params in found if params is not None and params.frozen]
    for params in frozen:
        params.frozen = False
    try:
        yield
    finally:
        for params in frozen:
            params.frozen = True


def _methods(cls: type, frozen: bool, eq: bool, with_repr: bool, slots: bool) -> dict[str, Any]:
    methods: dict[str, Any] = {"__init__": _init_at_first_use(cls)}
    if with_repr:
        methods["__repr__"] = _repr
    if eq:
        compared = [f.name for f in dataclasses.fields(cls) if f.compare]
        methods |= {"__eq__": _eq, "_compared": property(_values_of(compared))}
        hashed = [f.name for f in dataclasses.fields(cls) if (f.compare if f.hash is None else f.hash)]
        methods |= {"__hash__": _hash, "_hashed": property(_values_of(hashed))} if frozen else {"__hash__": None}
    if frozen:
        methods |= {"__setattr__": _refuse_to_assign, "__delattr__": _refuse_to_delete}
    if frozen and slots:
        methods |= {"__getstate__": _state, "__setstate__": _set_state}
    return methods


def _values_of(names: list[str]) -> Callable[[Any], Any]:
    """A function that gives the tuple of these attributes."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _init_at_first_use(cls: type) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = init = _compiled_init(cls)  # type: ignore[misc]  # two threads may: the functions are alike
        init(self, *args, **kwargs)

    return __init__


def _compiled_init(cls: type) -> Callable[..., None]:
    """`__init__` of the fields; it assigns past `__setattr__`, which frozen classes refuse."""
    names: dict[str, Any] = {"assign": object.__setattr__, "MISSING": dataclasses.MISSING}
    positional, named, lines = ["self"], ["*"], []
    for f in dataclasses.fields(cls):
        value, parameter = f.name, f.name
        if f.default is not dataclasses.MISSING:
            names[f"default_{f.name}"] = f.default
            parameter = f"{f.name}=default_{f.name}"
            value = value if f.init else f"default_{f.name}"
        elif f.default_factory is not dataclasses.MISSING:
            names[f"make_{f.name}"] = f.default_factory
            parameter = f"{f.name}=MISSING"
            value = f"make_{f.name}() if {f.name} is MISSING else {f.name}" if f.init else f"make_{f.name}()"
        elif not f.init:
            continue  # `__post_init__` assigns it
        if f.init:
            (named if f.kw_only else positional).append(parameter)
        lines.append(f"    assign(self, {f.name!r}, {value})")
    lines.append("    self.__post_init__()" if hasattr(cls, "__post_init__") else "    return")
    parameters = ", ".join(positional + (named if len(named) > 1 else []))
    exec("\n".join([f"def __init__({parameters}):", *lines]), names)
    init: Callable[..., None] = names["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return init


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._compared == other._compared  # type: ignore[attr-defined]


def _hash(self: Any) -> int:
    return hash(self._hashed)


def _refuse_to_assign(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _set_state(self: Any, values: list[Any]) -> None:
    for f, value in zip(dataclasses.fields(self), values, strict=True):
        object.__setattr__(self, f.name, value)
