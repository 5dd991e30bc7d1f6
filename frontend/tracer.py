"""Captures `forward` as a Graph: runs it once with traced tensors and records every op with its user location."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from monoplan.frontend.context import activate, current, deactivate, user_location
from monoplan.frontend.module import Module
from monoplan.frontend.pytree import Tree, flatten, unflatten
from monoplan.frontend.tensor import Tensor
from monoplan.ir.builder import Builder
from monoplan.ir.dims import as_dim, comparisons_raise
from monoplan.ir.errors import MonoplanError, TraceError
from monoplan.ir.graph import Graph, Loc, Param, Value
from monoplan.ir.opdef import OpDef
from monoplan.ir.ops.shape import full
from monoplan.ir.types import TensorType, as_dtype, f32
from monoplan.ir.verifier import verify


@dataclass(frozen=True, slots=True)
class Spec:
    """The type of one argument, with symbolic sizes by name."""

    type: TensorType

    def __str__(self) -> str:
        return str(self.type)


def spec(*shape: Any, dtype: Any = f32) -> Spec:
    """A placeholder for an argument: `spec("batch", "seq", 256)`, `spec("batch", "seq", dtype="int64")`."""
    return Spec(TensorType(as_dtype(dtype), tuple(as_dim(d) for d in shape)))


def spec_of(x: Any) -> Any:
    """The static Spec of a concrete leaf; other leaves are constants and stay as they are."""
    if isinstance(x, Tensor):
        return Spec(x.type)
    if isinstance(x, np.ndarray):
        return Spec(TensorType(as_dtype(x.dtype), x.shape))
    return x


@dataclass(frozen=True, slots=True)
class Trace:
    """A captured call: the graph, the tensors behind its params, and the structure of arguments and results."""

    graph: Graph
    params: Mapping[str, Tensor]
    in_tree: Tree
    out_tree: Tree


class Tracer:
    """Emits ops while forward runs. Parameters and buffers become params by identity; other arrays constants."""

    def __init__(self, root: Module) -> None:
        self.root = root
        self.builder = Builder()
        self.params: dict[int, tuple[Param, Tensor]] = {}
        self.modules = {id(m): path for path, m in root.named_modules()}
        self.stack: list[str] = []
        self.named: dict[int, str] = {}
        for path, t in (*root.named_parameters(), *root.named_buffers()):
            self.named.setdefault(id(t), path)
        self.constants: list[Tensor] = []  # keeps constants alive: params are found by identity

    def is_graph_value(self, tensor: Tensor) -> bool:
        return tensor.is_traced or id(tensor) in self.named

    def value_of(self, tensor: Tensor) -> Value:
        if tensor._value is not None:
            return tensor._value
        known = self.params.get(id(tensor))
        if known is not None:
            return known[0].value
        path = self.named.get(id(tensor))
        if path is None:
            if tensor.ndim == 0:
                value = self.emit(full, [], {"value": tensor.numpy().item(), "dtype": tensor.dtype})
                assert isinstance(value, Value)
                return value
            path = f"constant_{len(self.constants)}"
            self.constants.append(tensor)
        value = Value(tensor.type, self.builder.fresh(path))
        self.params[id(tensor)] = (Param(value, path), tensor)
        return value

    def emit(
        self, opdef: OpDef, operands: Sequence[Value | None], attrs: Mapping[str, Any]
    ) -> Value | tuple[Value, ...]:
        return self.builder.emit(opdef, operands, attrs, loc=user_location())

    def module_path(self) -> str:
        return self.stack[-1] if self.stack else ""

    def enter_module(self, module: object) -> None:
        self.stack.append(self.modules.get(id(module), self.module_path()))

    def leave_module(self) -> None:
        self.stack.pop()


def trace(module: Module, *specs: Any, **kwargs: Any) -> Trace:
    """The graph of module(*specs, **kwargs); leaves that are Specs become inputs, others constants."""
    if not isinstance(module, Module):
        raise TraceError(f"trace needs a Module, got {type(module).__name__}", fix="subclass monoplan.nn.Module")
    if current() is not None:
        raise TraceError("trace was called while another trace is running", where=user_location())
    tracer = Tracer(module)
    arguments = module.bind_arguments(specs, kwargs)
    leaves, in_tree = flatten(arguments)
    inputs: list[Value] = []
    filled: list[Any] = []
    for name, leaf in leaves:
        if isinstance(leaf, Spec):
            value = Value(leaf.type, tracer.builder.fresh(name))
            inputs.append(value)
            filled.append(Tensor.traced(value))
        else:
            filled.append(leaf)
    result = _run(module, tracer, unflatten(in_tree, filled))
    out_leaves, out_tree = flatten(result)
    outputs = tuple(_output(tracer, name, leaf) for name, leaf in out_leaves if _is_tensor(leaf))
    graph = Graph(
        type(module).__name__, tuple(inputs), tuple(p for p, _ in tracer.params.values()), tuple(tracer.builder.ops),
        outputs,
    )
    verify(graph)
    return Trace(graph, {p.path: t for p, t in tracer.params.values()}, in_tree, out_tree)


def _run(module: Module, tracer: Tracer, arguments: Mapping[str, Any]) -> Any:
    def undecided(text: str) -> TraceError:
        return TraceError(
            f"`{text}` is not decided: the size is symbolic",
            where=user_location(),
            why="one graph serves every value of this dimension",
            fix="make the dimension a fixed number in the spec, or write forward without this comparison",
        )

    token = activate(tracer)
    try:
        with comparisons_raise(undecided):
            args, kw = module.unbind_arguments(arguments)
            return module(*args, **kw)
    except MonoplanError:
        raise
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError) as error:
        place = _raised_at(error, tracer)
        raise TraceError(f"forward failed while it was traced: {type(error).__name__}: {error}", where=place) from error
    finally:
        deactivate(token)


def _raised_at(error: BaseException, tracer: Tracer) -> Loc:
    """The innermost frame of user code in the error's traceback."""
    from monoplan.frontend.context import _is_internal

    place = Loc(tracer.module_path())
    tb = error.__traceback__
    while tb is not None:
        if not _is_internal(tb.tb_frame.f_code.co_filename):
            place = Loc(tracer.module_path(), tb.tb_frame.f_code.co_filename, tb.tb_lineno)
        tb = tb.tb_next
    return place


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray)


def _output(tracer: Tracer, name: str, leaf: Any) -> Value:
    return tracer.value_of(leaf if isinstance(leaf, Tensor) else Tensor(leaf))
