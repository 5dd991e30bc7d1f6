"""Module: a tree of parameters, buffers and submodules with PyTorch's names and manners."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

from monoplan.frontend.context import current, shortened
from monoplan.frontend.parameter import Parameter, changes, from_blob, note_change
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.errors import ArgumentError, LoadError, MonoplanError
from monoplan.ir.graph import Loc
from monoplan.ir.types import as_weight_dtype, bf16, plain_array

M = TypeVar("M", bound="Module")
# By the function that a class has as forward: reading a signature takes longer than many a small plan.
_signatures: weakref.WeakKeyDictionary[Any, inspect.Signature] = weakref.WeakKeyDictionary()


class Module:
    """Base of all layers and models. Assigning a Parameter or a Module to an attribute registers it."""

    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module]
    _transient: set[str]  # buffers that are not saved

    def __init__(self) -> None:
        for name in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(self, name, {})
        object.__setattr__(self, "_transient", set())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # forward sees tensors, eager as traced: x.view and x.transpose of an array mean something else.
        args, kwargs = _as_tensors(args), _as_tensors(kwargs)
        tracing = current()
        if tracing is None:
            try:
                return self.forward(*args, **kwargs)
            except MonoplanError as error:
                raise shortened(error) from error.__cause__
        tracing.enter_module(self)
        try:
            return self.forward(*args, **kwargs)
        except Exception as error:
            tracing.failed(error)
            raise
        finally:
            tracing.leave_module()

    # -- registration -------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Parameter | Module):
            if "_parameters" not in self.__dict__:
                raise AttributeError(f"call super().__init__() before setting {name} in {type(self).__name__}")
            table: dict[str, Any] = self._parameters if isinstance(value, Parameter) else self._modules
            self._forget(name, keep=table)
            table[name] = value
        elif name in self.__dict__.get("_parameters", {}):
            if value is not None:
                raise TypeError(f"{name} is a parameter, which can't become a {type(value).__name__}")
            self._parameters[name] = None
        elif name in self.__dict__.get("_buffers", {}):
            self._buffers[name] = value if value is None or isinstance(value, Tensor) else Tensor(value)
        else:
            tracing = current()
            if tracing is not None:
                tracing.watch.note_binding(self, name)
            same = self.__dict__.get(name, self) is value
            self.__dict__.get("_modules", {}).pop(name, None)
            object.__setattr__(self, name, value)
            if same:
                return
        note_change()

    def __delattr__(self, name: str) -> None:
        if name not in self.__dict__ and not any(name in t for t in self._tables()):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._forget(name)
        note_change()

    def _tables(self) -> tuple[dict[str, Any], ...]:
        return self._parameters, self._buffers, self._modules

    def _forget(self, name: str, keep: Mapping[str, Any] | None = None) -> None:
        """Drops what has this name, except from the table where it is replaced in place (order is kept)."""
        self.__dict__.pop(name, None)
        self._transient.discard(name)
        for table in self._tables():
            if table is not keep:
                table.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        for table in ("_parameters", "_buffers", "_modules"):
            found = self.__dict__.get(table, {})
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def register_parameter(self, name: str, parameter: Parameter | None) -> Parameter | None:
        """Adds a parameter under a name; None reserves the name."""
        self._check_name(name, self._parameters)
        if parameter is not None and not isinstance(parameter, Parameter):
            raise TypeError(f"{name}: expected a Parameter or None, got {type(parameter).__name__}")
        self._parameters[name] = parameter
        note_change()
        return parameter

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> Tensor | None:
        """Adds a tensor that is not learned; a non-persistent one is not part of the state dict."""
        self._check_name(name, self._buffers)
        self._buffers[name] = None if tensor is None else as_tensor(tensor)
        self._transient.discard(name)
        if not persistent:
            self._transient.add(name)
        note_change()
        return self._buffers[name]

    def add_module(self, name: str, module: M) -> M:
        """Adds an existing submodule."""
        self._check_name(name, self._modules)
        if not isinstance(module, Module):
            raise TypeError(f"{name}: expected a Module, got {type(module).__name__}")
        self._modules[name] = module
        note_change()
        return module

    def register_module(self, name: str, module: type[M] | M, *args: Any, **kwargs: Any) -> M:
        """Creates module(*args, **kwargs) (or takes an existing one) and adds it."""
        made = module(*args, **kwargs) if isinstance(module, type) else module
        return self.add_module(name, made)

    def register_modules(self, count: int, name: str, module: type[M], *args: Any, **kwargs: Any) -> list[M]:
        """Creates `count` submodules named name.0, name.1, …"""
        made = [module(*args, **kwargs) for _ in range(count)]
        self.add_module(name, ModuleList(made))
        return made

    def _check_name(self, name: str, table: Mapping[str, Any]) -> None:
        if not name or "." in name:
            raise KeyError(f"{name!r} can't name a parameter, buffer or module: it is empty or has a dot")
        if name not in table and hasattr(self, name):
            raise KeyError(f"{type(self).__name__} already has an attribute {name!r}")

    # -- walking ------------------------------------------------------------------------------------------

    def named_children(self) -> Iterator[tuple[str, Module]]:
        yield from self._modules.items()

    def children(self) -> Iterator[Module]:
        yield from self._modules.values()

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, by dotted path; a shared one is named once."""
        seen: set[int] = set()

        def walk(module: Module, path: str) -> Iterator[tuple[str, Module]]:
            if id(module) in seen:
                return
            seen.add(id(module))
            yield path, module
            for name, child in module._modules.items():
                yield from walk(child, f"{path}.{name}" if path else name)

        yield from walk(self, prefix)

    def modules(self) -> Iterator[Module]:
        yield from (m for _, m in self.named_modules())

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Parameters by dotted path; a shared one is named once."""
        seen: set[int] = set()
        for path, p in self._named("_parameters", prefix):
            if id(p) not in seen:
                seen.add(id(p))
                yield path, p  # type: ignore[misc]

    def parameters(self) -> Iterator[Parameter]:
        yield from (p for _, p in self.named_parameters())

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        yield from self._named("_buffers", prefix)

    def buffers(self) -> Iterator[Tensor]:
        yield from (b for _, b in self.named_buffers())

    def _named(self, table: str, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        for path, module in self.named_modules(prefix):
            for name, t in getattr(module, table).items():
                if t is not None:
                    yield (f"{path}.{name}" if path else name), t

    # -- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer by dotted path, as PyTorch names them."""
        found: dict[str, Tensor] = {}

        def walk(module: Module, prefix: str) -> None:  # a shared module appears under each of its names
            for name, t in (*module._parameters.items(), *module._buffers.items()):
                if t is not None and name not in module._transient:
                    found[prefix + name] = t
            for name, child in module._modules.items():
                walk(child, f"{prefix}{name}.")

        walk(self, "")
        return found

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Copies tensors in by name; gives (missing, unexpected), which strict loading refuses.

        Nothing is changed unless every shape fits. A name whose tensor is shared and comes under another name
        (tied embeddings) is not missing.
        """
        own = self.state_dict()
        covered = {id(t) for k, t in own.items() if k in state}
        missing = [k for k, t in own.items() if k not in state and id(t) not in covered]
        unexpected = [k for k in state if k not in own]
        wrong = [text for k, t in own.items() if k in state and (text := _misfit(k, t, state[k]))]
        problems = []
        if strict and missing:
            problems.append("missing: " + ", ".join(missing))
        if strict and unexpected:
            problems.append("unexpected: " + ", ".join(unexpected))
        if wrong:
            problems.append("wrong shape: " + "; ".join(wrong))
        if problems:
            raise LoadError(f"the state dict does not fit {type(self).__name__}", why="; ".join(problems))
        for k, t in own.items():
            if k in state:
                _load(t, state[k])
        return missing, unexpected

    def load_parameter(self, name: str, data: Any) -> None:
        """Loads one parameter or buffer (its shard, if it is a sharded Parameter) from a full tensor."""
        t = self._state_tensor(name)
        if text := _misfit(name, t, data):
            raise LoadError(f"{text}")
        _load(t, data)

    def load_parameter_from_blob(self, name: str, blob: Any) -> None:
        """Loads one parameter from raw bytes of its own dtype and shape."""
        t = self._state_tensor(name)
        replace_values(t, from_blob(blob, t, name))

    def _state_tensor(self, name: str) -> Tensor:
        own = self.state_dict()
        if name not in own:
            raise LoadError(
                f"{type(self).__name__} has no parameter named {name}",
                fix="names are: " + ", ".join(list(own)[:8]) + (" …" if len(own) > 8 else ""),
            )
        return own[name]

    def to(self: M, dtype: Any) -> M:
        """Floating point parameters and persistent buffers in another element type, in place."""
        if isinstance(dtype, str) and dtype == "cpu":
            return self
        target = as_weight_dtype(dtype)
        for module in self.modules():
            for table in (module._parameters, module._buffers):
                for name, t in table.items():
                    if t is not None and t.dtype.values.is_float and name not in module._transient:
                        replace_values(t, t.numpy().astype(target.numpy))
        return self

    def eval(self: M) -> M:
        """Inference is all there is: returns the module itself."""
        return self

    # -- the arguments of forward by their names, and back ---------------------------------------------

    def bind_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call by the names that forward gives them."""
        signature = self.signature()
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            problem, fix = str(error), "give one spec or value for each argument of forward that has no default"
            # `bind` tells of a missing argument first, though a misspelt one is why it is missing.
            unknown = [k for k in kwargs if k not in signature.parameters]
            if unknown and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
                problem = f"got an unexpected keyword argument {unknown[0]!r}"
                fix = f"its arguments are {', '.join(signature.parameters) or 'none'}"
            what = f"{type(self).__name__}.forward{signature}: {problem}"
            raise ArgumentError(what, where=self.forward_place(), fix=fix) from None
        return dict(bound.arguments)

    def signature(self) -> inspect.Signature:
        """forward's parameters, without self."""
        function = getattr(self.forward, "__func__", None)
        if not isinstance(function, FunctionType):  # set on this module alone, or wrapped
            return inspect.signature(self.forward)
        found = _signatures.get(function)
        if found is None:
            found = _signatures[function] = inspect.signature(self.forward)
        return found

    def forward_place(self) -> Loc:
        """The file and line where forward is written."""
        code = getattr(self.forward, "__code__", None)
        return Loc(type(self).__name__, code.co_filename, code.co_firstlineno) if code else Loc()

    def unbind_arguments(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inverse of bind_arguments."""
        bound = self.signature().bind_partial()
        bound.arguments.update(arguments)
        return bound.args, bound.kwargs

    # -- printing ---------------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """What stands between the parentheses of this module's own line."""
        return ""

    def __repr__(self) -> str:
        lines = []
        for name, child in self._modules.items():
            lines.append(f"({name}): " + repr(child).replace("\n", "\n  "))
        extra = self.extra_repr()
        if not lines:
            return f"{type(self).__name__}({extra})"
        head = [extra] if extra else []
        return f"{type(self).__name__}(\n  " + "\n  ".join(head + lines) + "\n)"


class ModuleList(Module):
    """A list of modules, registered as 0, 1, …"""

    def __init__(self, modules: Sequence[Module] = ()) -> None:
        super().__init__()
        for m in modules:
            self.append(m)

    def append(self, module: Module) -> ModuleList:
        self.add_module(str(len(self._modules)), module)
        return self

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        for m in modules:
            self.append(m)
        return self

    def __setitem__(self, index: int, module: Module) -> None:
        self._modules[list(self._modules)[index]] = module

    def __repr__(self) -> str:
        """Like PyTorch's: neighbours that print alike share a line, `(0-11): 12 x Block(…)`."""
        runs: list[tuple[int, int, str]] = []
        for i, child in enumerate(self):
            text = repr(child)
            if runs and runs[-1][2] == text:
                runs[-1] = (runs[-1][0], i, text)
            else:
                runs.append((i, i, text))
        lines = [
            (f"({a}): " if a == b else f"({a}-{b}): {b - a + 1} x ") + text.replace("\n", "\n  ") for a, b, text in runs
        ]
        return "ModuleList(\n  " + "\n  ".join(lines) + "\n)" if lines else "ModuleList()"

    def __getitem__(self, index: int | slice) -> Any:
        found = list(self._modules.values())[index]
        return ModuleList(found) if isinstance(found, list) else found

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())


def _as_tensors(x: Any) -> Any:
    """Tensors in place of arrays, also within lists, tuples and dicts; anything else as it is."""
    if isinstance(x, np.ndarray):
        return Tensor(x) if x.dtype.kind in "fiub" or x.dtype == bf16.numpy else x
    if type(x) in (list, tuple):
        items = [_as_tensors(i) for i in x]
        return x if all(a is b for a, b in zip(items, x, strict=True)) else type(x)(items)
    if type(x) is dict:
        found = {k: _as_tensors(v) for k, v in x.items()}
        return x if all(found[k] is x[k] for k in x) else found
    return x


def _misfit(name: str, t: Tensor, data: Any) -> str:
    shape = tuple(np.shape(data) if not isinstance(data, Tensor) else data.shape)
    wanted = t.full_shape if isinstance(t, Parameter) else t.shape
    return "" if shape == tuple(wanted) or shape == tuple(t.shape) else f"{name} is {list(wanted)}, got {list(shape)}"


def _load(t: Tensor, data: Any) -> None:
    if isinstance(t, Parameter):
        t.load(data)
    else:
        replace_values(t, (data.numpy() if isinstance(data, Tensor) else plain_array(data)).astype(t.dtype.numpy))


def replace_values(t: Tensor, array: np.ndarray[Any, Any]) -> None:
    """A tensor's values are another array from now on; plans that hold the old one will know."""
    t._array = array
    note_change()


class HeldWeights:
    """The weights of a module as they are now: plans copy them, and must be made anew when it gets others.

    A change in place is not noticed.
    """

    def __init__(self, module: Module) -> None:
        self.module, self._changes, self._held = module, changes(), _held_by(module)

    def are_replaced(self) -> bool:
        """Whether the module has others since. Asked at every call: as a rule one comparison says no."""
        if (now := changes()) == self._changes:
            return False
        held = _held_by(self.module)
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            return True
        self._changes = now  # it was some other module's
        return False


def _held_by(module: Module) -> list[Any]:
    """All that plans copy: parameters and persistent buffers, each with what its values are in."""
    found: list[Any] = []
    for part in module.modules():
        for name, t in (*part._parameters.items(), *part._buffers.items()):
            if t is not None and name not in part._transient:
                found += [t, _values_in(t)]
    return found


def _values_in(t: Tensor) -> Any:
    """Another object when the tensor gets other values, but not when a deferred one is read."""
    return t._source or t._stored if isinstance(t, Parameter) else t._array


# What a module is made of, as text: modules of one structure trace to one graph.


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
