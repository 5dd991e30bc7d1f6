"""What a module is made of, as text: modules of one structure trace to one graph."""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any

from monoplan.frontend.module import Module

_LIBRARY = "monoplan."


class _Unknown(Exception):
    """Something whose part in forward can't be read off it."""


def structure(module: Module) -> str | None:
    """Classes, attributes and tensor types of a module and all below it.

    None where forward may depend on more than that: a class or function that is not the library's own, or an attribute
    that is not plain data. Such a module must be traced to know its graph.
    """
    seen: dict[int, int] = {}
    try:
        return "\n".join(_lines(module, seen))
    except _Unknown:
        return None


def _lines(module: Module, seen: dict[int, int]) -> list[str]:
    if id(module) in seen:
        return [f"module {seen[id(module)]}"]
    seen[id(module)] = len(seen)
    kind = type(module)
    if not _is_own(kind) or not _is_own(kind.forward) or "forward" in vars(module):
        raise _Unknown
    found = [f"{kind.__module__}.{kind.__qualname__}"]
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            found += [f"{key}: {None if t is None else _tensor(t, seen)}" for key, t in value.items()]
        elif name == "_modules":
            for key, child in value.items():
                found += [f"{key}:", *_lines(child, seen)]
        elif isinstance(value, Module):
            found += [f"{name}:", *_lines(value, seen)]
        elif not name.startswith("_"):
            found.append(f"{name} = {_plain(value)}")
    return found


def _tensor(t: Any, seen: dict[int, int]) -> str:
    return f"{t.type} {seen.setdefault(id(t), len(seen))}"


def _is_own(x: Any) -> bool:
    return bool(x.__module__.startswith(_LIBRARY))


def _plain(x: Any) -> str:
    """Data by its value, the library's functions by their names."""
    if x is None or type(x) in (bool, int, float, str):
        return repr(x)
    if type(x) in (tuple, list, set):
        return f"{type(x).__name__}({', '.join(map(_plain, sorted(x) if type(x) is set else x))})"
    if type(x) is dict:
        return f"{{{', '.join(f'{_plain(k)}: {_plain(v)}' for k, v in x.items())}}}"
    if isinstance(x, enum.Enum):
        return str(x)
    if isinstance(x, types.FunctionType) and _is_own(x) and x.__closure__ is None:
        return f"{x.__module__}.{x.__qualname__}"
    if dataclasses.is_dataclass(x) and not isinstance(x, type) and _is_own(type(x)):
        return f"{type(x).__qualname__}{_plain(vars(x) if hasattr(x, '__dict__') else str(x))}"
    raise _Unknown
