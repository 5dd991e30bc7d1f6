"""Plain values that forward read from modules while it was traced: a plan is right only as long as they stay.

Numbers, strings and containers of them become part of the graph, as constants or as the branch that was taken. Whoever
runs the plan asks `Guards.hold()` first: one comparison of integers where all of them are immutable, since a module
notes when an attribute is bound to something else; lists, dicts, arrays and objects may change in place, and are
compared with what they were. What can't be guarded is an error of the trace: a value that forward reads and changes,
and random numbers. The time is mentioned.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import numpy as np

from monoplan.frontend.context import current, is_internal, user_location
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, changes
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import TraceError
from monoplan.ir.graph import Loc
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import exactly

_TABLES = frozenset(("_parameters", "_buffers", "_modules", "_transient"))
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, type, FunctionType)
_DEPTH, _OBJECTS = 6, 2  # of containers in containers, of objects in objects; below that identity counts
_ABSENT = object()
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")


@dataclass(frozen=True, slots=True)
class Read:
    """A value that forward read: an attribute of a module, or of its class."""

    path: str  # of the module in the one that was traced
    module: Module
    name: str
    kept: Any  # what it was
    fixed: bool  # nothing but another binding changes it, which the module notes
    where: Loc

    @classmethod
    def of(cls, path: str, module: Module, name: str, where: Loc) -> Read:
        value = _value(module, name)
        kept, immutable = snapshot(value)
        return cls(path, module, name, kept, immutable and name in vars(module), where)

    def holds(self) -> bool:
        return same(self.kept, _value(self.module, self.name))

    @property
    def what(self) -> str:
        return f"{type(self.module).__name__}.{self.name}"


class Guards:
    """The values that one or several plans depend on."""

    def __init__(self, reads: Iterable[Read] = ()) -> None:
        self.reads = tuple(reads)
        self._loose = tuple(r for r in self.reads if not r.fixed)
        self.settled = -1  # changes() when all that the plans depend on was found to hold; see settle
        self._changes = changes()

    def hold(self) -> bool:
        """Whether all of them are what they were. Asked at every call."""
        if (now := changes()) != self._changes:
            if not all(r.holds() for r in self.reads):
                return False
            self._changes = now
            return True
        return not self._loose or all(r.holds() for r in self._loose)

    def settle(self, now: int) -> None:
        """Notes that nothing has to be asked again before the next change, unless a value may change in place."""
        if not self._loose:
            self.settled = now

    def joined(self, others: Guards) -> Guards:
        """These and others, each value once."""
        return Guards({(id(r.module), r.name): r for r in (*self.reads, *others.reads)}.values())

    def names(self) -> tuple[tuple[str, str], ...]:
        """Paths of modules, and attributes: what another module of the same structure reads."""
        return tuple((r.path, r.name) for r in self.reads)

    @classmethod
    def of(cls, module: Module, names: Iterable[tuple[str, str]]) -> Guards:
        """The guards of a module that was not traced, from the names of one that was."""
        parts = dict(module.named_modules())
        return cls(Read.of(path, parts[path], name, Loc()) for path, name in names)


def _value(module: Module, name: str) -> Any:
    found = vars(module).get(name, _ABSENT)
    return found if found is not _ABSENT else getattr(type(module), name, _ABSENT)


def snapshot(value: Any, depth: int = 0, objects: int = 0) -> tuple[Any, bool]:
    """What `same` compares a value with later, and whether it can't change in place."""
    if isinstance(value, _IMMUTABLE) or depth > _DEPTH:
        return value, True
    if isinstance(value, Tensor):
        array = None if value.is_traced else value._array
        return _Kept(value, None if array is None else array.copy()), False
    if isinstance(value, np.ndarray):
        return _Kept(value, value.copy()), False
    if type(value) in (tuple, frozenset):
        parts = [snapshot(v, depth + 1, objects) for v in value]
        return _Kept(value, [p for p, _ in parts] if type(value) is tuple else value), all(fixed for _, fixed in parts)
    if type(value) is list:
        return _Kept(value, [snapshot(v, depth + 1, objects)[0] for v in value]), False
    if type(value) is dict:
        return _Kept(value, {k: snapshot(v, depth + 1, objects)[0] for k, v in value.items()}), False
    if type(value) is set:
        return _Kept(value, set(value)), False
    if (state := _random_state(value)) is not None:
        return _Kept(value, state), False
    if isinstance(value, Module) or callable(value) or objects == _OBJECTS or not hasattr(value, "__dict__"):
        return value, True
    frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    if frozen and type(value).__module__.startswith("monoplan."):
        return value, True  # a configuration: what is in it is not changed either
    inside = {k: snapshot(v, depth + 1, objects + 1) for k, v in _fields(value).items()}
    return _Kept(value, {k: kept for k, (kept, _) in inside.items()}), frozen and all(f for _, f in inside.values())


@dataclass(frozen=True, slots=True)
class _Kept:
    """A value that may change in place, and what it held."""

    value: Any
    held: Any


def same(kept: Any, now: Any) -> bool:
    """Whether a value is what it was: 1, 1.0 and True differ, and so do 0.0 and -0.0; NaN is NaN."""
    if not isinstance(kept, _Kept):
        return kept is now or (type(kept) is type(now) and _equal(kept, now))
    if type(kept.value) is not type(now):
        return False
    held = kept.held
    if isinstance(now, Tensor):
        array = None if now.is_traced else now._array
        return array is held if held is None or array is None else _same_array(held, array)
    if isinstance(now, np.ndarray):
        return _same_array(held, now)
    if isinstance(now, list | tuple):
        return len(held) == len(now) and all(map(same, held, now))
    if isinstance(now, dict):
        return list(held) == list(now) and all(same(held[k], v) for k, v in now.items())
    if isinstance(now, set | frozenset):
        return bool(held == now)
    if (state := _random_state(now)) is not None:
        return kept.value is now and _equal_states(held, state)
    inside = _fields(now)
    return held.keys() == inside.keys() and all(same(held[k], v) for k, v in inside.items())


def _fields(value: Any) -> dict[str, Any]:
    """What an object shows: what it keeps to itself (the cache of a logger) may change without a meaning."""
    return {k: v for k, v in vars(value).items() if not k.startswith("_")}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    try:
        return bool(exactly(a) == exactly(b))
    except (TypeError, ValueError):
        return False


def _same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.hasobject:
        return bool(np.array_equal(a, b))
    return a.tobytes() == b.tobytes() if a.nbytes < 4096 else bool((_bytes(a) == _bytes(b)).all())


def _bytes(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def _random_state(value: Any) -> Any:
    """The state of a generator of random numbers; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    drawn = sys.modules.get("numpy.random")
    if drawn is not None and isinstance(value, drawn.Generator):
        return value.bit_generator.state
    if drawn is not None and isinstance(value, drawn.RandomState):
        return value.get_state(legacy=False)
    return None


def _equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal_states(a[k], b[k]) for k in a)
    return bool(a == b if isinstance(a, tuple) else np.array_equal(a, b))


class Watch:
    """Notes what forward reads and binds while it is traced."""

    def __init__(self, root: Module) -> None:
        self.paths = {id(m): path for path, m in root.named_modules()}
        self.reads: dict[tuple[int, str], Read] = {}
        self.bound: dict[tuple[int, str], tuple[Module, Any]] = {}  # attributes that forward set, and what they were
        self.generators = [(name, g, _random_state(g)) for name, g in _generators(root)]

    def note_read(self, module: Module, name: str) -> None:
        key = (id(module), name)
        if key in self.reads or key in self.bound or id(module) not in self.paths:
            return
        value = _value(module, name)
        if not isinstance(value, Module | Parameter):
            self.reads[key] = Read.of(self.paths[id(module)], module, name, user_location())

    def note_binding(self, module: Module, name: str) -> None:
        self.bound.setdefault((id(module), name), (module, vars(module).get(name, _ABSENT)))

    def finish(self) -> Guards:
        """The guards; raises if forward changed what it had read."""
        changed = [r for r in self.reads.values() if not r.holds()]
        for key, (module, before) in self.bound.items():
            if key in self.reads and before is not _ABSENT:
                object.__setattr__(module, key[1], before)
        for name, generator, state in self.generators:
            if not _equal_states(state, _random_state(generator)):
                raise _drawn(name, Loc())
        for r in changed:
            if _random_state(r.kept.value if isinstance(r.kept, _Kept) else None) is not None:
                raise _drawn(r.what, r.where)
            raise TraceError(
                f"forward changes {r.what}, which it has read",
                where=r.where,
                why="a plan has no memory of its own: the next call would start from the old value again",
                fix="pass it to forward as an argument, and return the new value",
            )
        return Guards(self.reads.values())


def _drawn(name: str, where: Loc) -> TraceError:
    return TraceError(
        f"forward draws random numbers from {name} while it is traced",
        where=where,
        why="the plan would have the same numbers in every call",
        fix="draw them outside and pass them to forward as an argument",
    )


def _generators(root: Module) -> Iterator[tuple[str, Any]]:
    """Generators of random numbers that some forward can reach by a global name, and the libraries' own."""
    if "random" in sys.modules:
        yield "the module random", random._inst  # type: ignore[attr-defined]
    drawn = sys.modules.get("numpy.random")
    if drawn is not None:
        yield "numpy.random", drawn.mtrand._rand
    seen: set[int] = set()
    for module in root.modules():
        function = getattr(type(module).forward, "__wrapped__", type(module).forward)
        if id(function) in seen or not isinstance(function, FunctionType) or is_internal(function.__code__.co_filename):
            continue
        seen.add(id(function))
        for name in function.__code__.co_names:
            if (found := function.__globals__.get(name)) is not None and _random_state(found) is not None:
                yield name, found


_lock = threading.Lock()
_watching = 0


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Within it, modules tell the tracer which attributes are read and set, and clocks that they are asked."""
    global _watching
    with _lock:
        _watching += 1
        if _watching == 1:
            Module.__getattribute__ = _getattribute  # type: ignore[method-assign,assignment]
            for name in _CLOCKS:
                setattr(time, name, _Clock(getattr(time, name)))
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            if _watching == 0:
                del Module.__getattribute__
                for name in _CLOCKS:
                    setattr(time, name, getattr(time, name).function)


def _getattribute(module: Module, name: str) -> Any:
    value = object.__getattribute__(module, name)
    tracing: Any = current()
    if tracing is not None and name not in _TABLES and name[:2] != "__":
        if name in object.__getattribute__(module, "__dict__"):
            tracing.watch.note_read(module, name)
        elif isinstance(value, int | float | str | tuple | list | dict | np.ndarray) and _is_users(type(module), name):
            tracing.watch.note_read(module, name)
    return value


def _is_users(kind: type, name: str) -> bool:
    """Whether a class attribute is a value of a class that is not the library's."""
    owner = next((c for c in kind.__mro__ if name in vars(c)), None)
    return (
        owner is not None
        and not owner.__module__.startswith("monoplan.")
        and not isinstance(vars(owner)[name], property)
    )


class _Clock:
    """A function of the module time that says when a forward that is traced calls it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __call__(self) -> Any:
        frame = sys._getframe(1)
        if current() is not None and not is_internal(frame.f_code.co_filename):
            text = "forward reads the clock while it is traced: a plan has the time of its trace in every call"
            warnings.warn_explicit(f"monoplan: {text}", RuntimeWarning, frame.f_code.co_filename, frame.f_lineno)
        return self.function()
