"""Captures `forward` as a Graph: runs it once on traced tensors and records every op with its user location.

What forward writes into its arguments (a KV cache, `out=`) becomes further outputs of the graph, paired with
the inputs they replace: `Graph.writes`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from monoplan.frontend.context import activate, current, deactivate, is_internal, user_location
from monoplan.frontend.guards import Guards, Watch, watching
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.pytree import Tree, flatten, unflatten, with_constants
from monoplan.frontend.specs import Spec
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.builder import Builder
from monoplan.ir.dims import comparisons_raise
from monoplan.ir.errors import MonoplanError, TraceError, in_words
from monoplan.ir.graph import Graph, Loc, Op, Param, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import REGISTRY, OpDef
from monoplan.ir.ops.shape import full
from monoplan.ir.types import TensorType
from monoplan.ir.verifier import verify


@dataclass(frozen=True, slots=True)
class Trace:
    """A captured call: the graph, the tensors behind its params, the structure of arguments and results.

    Results are the first outputs of the graph; the others are the new contents of inputs that forward wrote
    into: `mutated` pairs (number of the input, number of the output).
    """

    graph: Graph
    params: Mapping[str, Tensor]
    in_tree: Tree
    out_tree: Tree
    mutated: tuple[tuple[int, int], ...] = ()
    guards: Guards = field(default_factory=Guards)  # plain values that forward read


@dataclass(frozen=True, slots=True)
class _Write:
    """A concrete tensor that was written while tracing, and what it held before."""

    tensor: weakref.ref[Tensor]
    before: np.ndarray[Any, Any]
    was_read: bool
    where: Loc


class Tracer:
    """Emits ops while forward runs. Parameters and buffers become params by identity, arrays constants."""

    def __init__(self, root: Module) -> None:
        self.root = root
        self.watch = Watch(root)
        self.builder = Builder()
        self.own: set[Value] = set()  # what traced tensors of this trace stand for
        self.params: dict[int, tuple[Param, Tensor]] = {}  # by id of the tensor, or of a constant's array
        self.modules = {id(m): path for path, m in root.named_modules()}
        self.stack: list[str] = []
        self.failure: tuple[Exception, str] | None = None  # the error on its way out, and the module it left
        self.named: dict[int, str] = {}
        for path, t in (*root.named_parameters(), *root.named_buffers()):
            self.named.setdefault(id(t), path)
        self.cells: list[set[Value]] = []  # the values of each loop whose cell is being traced
        self.closed: set[Value] = set()  # those of cells that were traced before
        self.writes: dict[int, _Write] = {}
        self.read: dict[int, object] = {}  # ids of arrays that were read; the arrays, so that ids stay theirs

    def is_graph_value(self, tensor: Tensor) -> bool:
        return tensor.is_traced or id(tensor) in self.named

    def value_of(self, tensor: Tensor, where: Loc | None = None) -> Value:
        if tensor._stale is not None:
            raise TraceError(
                "a traced tensor was read after a view that shares its storage was written in place",
                where=where or user_location(),
                why=f"the write at {tensor._stale} would change it too, but the graph has no aliases",
                fix="drop inplace=/out= there, or take the view after the write",
            )
        if tensor._value is not None:
            if tensor._value in self.closed:
                raise TraceError(
                    f"a tensor {tensor.type} of a scan's cell is used outside of it",
                    where=where or user_location(),
                    why="the cell kept it (in an attribute, a list or a variable), but each step has another one",
                    fix="return it from the cell: as part of the state, or as y",
                )
            if tensor._value not in self.own:
                raise TraceError(
                    f"a tensor {tensor.type} belongs to another trace",
                    where=where or user_location(),
                    why="a forward that was traced before kept it, and it has no value outside of that graph",
                    fix="do not keep tensors of a forward (`self.last = x`): return them, and pass them as arguments",
                )
            return tensor._value
        path = self.named.get(id(tensor))
        if path is not None and isinstance(tensor, Parameter) and tensor.is_deferred:  # its values are not wanted yet
            known = self.params.get(id(tensor))
            return known[0].value if known is not None else self._add_param(id(tensor), path, tensor)
        self.note_read(tensor)
        array = tensor.numpy()
        known = self.params.get(id(array) if path is None else id(tensor))
        if known is not None:
            return known[0].value
        if path is not None:
            return self._add_param(id(tensor), path, tensor)
        if tensor.ndim == 0:
            value = self.emit(full, [], {"value": array.item(), "dtype": tensor.dtype})
            assert isinstance(value, Value)
            return value
        # A new Tensor: the graph's constant must not change when forward later writes into the user's.
        return self._add_param(id(array), f"constant_{len(self.params)}", Tensor(array))

    def _add_param(self, key: int, path: str, tensor: Tensor) -> Value:
        value = Value(tensor.type, self.builder.fresh(_value_name(path)))  # the path stands beside it, as it is
        self.params[key] = (Param(value, path), tensor)
        return value

    def emit(
        self, opdef: OpDef, operands: Sequence[Value | None], attrs: Mapping[str, Any]
    ) -> Value | tuple[Value, ...]:
        results = self.builder.emit(opdef, operands, attrs, loc=user_location())
        self._own((results,) if isinstance(results, Value) else results)
        return results

    def _own(self, values: Sequence[Value]) -> None:
        self.own.update(values)
        if self.cells:
            self.cells[-1].update(values)

    def emit_loop(
        self,
        op: str,
        operands: Sequence[Value],
        attrs: Mapping[str, Any],
        types: Sequence[tuple[str, TensorType]],
        run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> tuple[Value, ...]:
        """Appends an op with a body: what `run` does to tensors of these names and types. What it reads from outside
        becomes further operands."""
        where, outer = user_location(), self.builder
        self.builder, cell = outer.nested(), set[Value]()
        self.cells.append(cell)
        inputs = [Value(t, self.builder.fresh(_value_name(n))) for n, t in types]
        self._own(inputs)
        try:
            outputs = [self.value_of(t) for t in run(list(map(Tensor.traced, inputs)))]
            ops = self.builder.ops
        finally:
            self.builder = outer
            self.cells.pop()
            self.own -= cell
            self.closed |= cell
        captured: dict[Value, Value] = {}

        def inside(v: Value | None) -> Value | None:
            if v is None or v in cell:
                return v
            if v not in captured:
                captured[v] = Value(v.type, outer.fresh(v.name))
            return captured[v]

        ops = [Op(o.opdef, tuple(map(inside, o.operands)), o.attrs, o.results, o.loc) for o in ops]
        results = tuple(inside(v) for v in outputs)
        body = Graph("cell", (*inputs, *captured.values()), (), tuple(ops), results)  # type: ignore[arg-type]
        made = outer.emit(REGISTRY[op], [*operands, *captured], {**attrs, "body": body}, loc=where)
        found = (made,) if isinstance(made, Value) else made
        self._own(found)
        return found

    def note_read(self, tensor: Tensor) -> None:
        array = tensor.numpy()
        self.read[id(array)] = array

    def overwrite(self, tensor: Tensor) -> None:
        """Before a tensor gets new contents: its aliases become stale, concrete contents are remembered."""
        where = user_location()
        if self.cells and tensor._value is not None and tensor._value not in self.cells[-1]:
            raise TraceError(
                f"a scan's cell writes into a tensor {tensor.type} from outside",
                where=where,
                why="what a step changes must be part of the state",
                fix="pass the tensor in the state, and return its new contents",
            )
        others = [other for ref in tensor._aliases if (other := ref()) is not None and other is not tensor]
        for other in others:
            if id(other) in self.named:
                raise TraceError(
                    f"forward writes into a view of {self.named[id(other)]}",
                    where=where,
                    why="weights and buffers are constants of a plan: the next call would start from the old contents",
                    fix="write into a copy of it, or pass it to forward as an argument, which may be written",
                )
            other._stale = where
        tensor._stale = None
        known = self.writes.get(id(tensor))
        if tensor._array is not None and (known is None or known.tensor() is not tensor):
            before = tensor._array
            self.writes[id(tensor)] = _Write(weakref.ref(tensor), before, id(before) in self.read, where)

    def undo_writes(self) -> Loc | None:
        """Gives concrete tensors back what they held; tells where one that lives on carried state."""
        state = None
        for w in self.writes.values():
            tensor = w.tensor()
            if tensor is not None:
                tensor._array, tensor._value, tensor._stale = w.before, None, None
                # Written before it is read, it is scratch space; read first, its contents matter next time.
                state = w.where if w.was_read and state is None else state
        return state

    def module_path(self) -> str:
        return self.stack[-1] if self.stack else ""

    def enter_module(self, module: object) -> None:
        self.stack.append(self.modules.get(id(module), self.module_path()))

    def leave_module(self) -> None:
        self.stack.pop()

    def failed(self, error: Exception) -> None:
        if self.failure is None or self.failure[0] is not error:
            self.failure = (error, self.module_path())

    def place_of(self, error: Exception) -> Loc:
        """The innermost line of user code in an error's traceback, and the module where it was raised."""
        path = self.failure[1] if self.failure is not None and self.failure[0] is error else ""
        place = Loc(path)
        tb = error.__traceback__
        while tb is not None:
            if not is_internal(tb.tb_frame.f_code.co_filename):
                place = Loc(path, tb.tb_frame.f_code.co_filename, tb.tb_lineno)
            tb = tb.tb_next
        return place


def trace(module: Module, *specs: Any, **kwargs: Any) -> Trace:
    """The graph of module(*specs, **kwargs); leaves that are Specs become inputs, others constants."""
    if not isinstance(module, Module):
        got = type(module).__name__
        raise TraceError(f"trace needs a Module, got {got}", fix="subclass monoplan.nn.Module")
    if current() is not None:
        raise TraceError("trace was called while another trace is running", where=user_location())
    tracer = Tracer(module)
    leaves, in_tree = flatten(module.bind_arguments(specs, kwargs))
    filled = [leaf for _, leaf in leaves]
    places: list[int] = []  # leaf number of each input
    for at, (name, leaf) in enumerate(leaves):
        if isinstance(leaf, Spec):
            filled[at] = Tensor.traced(Value(leaf.type, tracer.builder.fresh(_value_name(name))))
            places.append(at)
    inputs = [filled[at]._value for at in places]
    tracer.own.update(inputs)
    arguments = unflatten(in_tree, filled)
    token = activate(tracer)
    try:
        with watching():
            outputs, out_tree, mutated = _capture(module, tracer, arguments, in_tree, places, inputs)
    finally:
        deactivate(token)
        filled.clear()
        state = tracer.undo_writes()
    if state is not None:
        raise TraceError(
            "forward reads and then overwrites a tensor that it keeps between calls",
            where=state,
            why="a plan has no memory of its own: the next call would start from the old contents again",
            fix="pass it to forward as an argument (a KVCache, a dict of tensors), which may be written",
        )
    guards = tracer.watch.finish()
    params = tuple(p for p, _ in tracer.params.values())
    name = _value_name(type(module).__name__)
    graph = Graph(name, tuple(inputs), params, tuple(tracer.builder.ops), outputs, writes=mutated)
    verify(graph, set(graph.ops))  # their types were inferred a moment ago
    return Trace(graph, {p.path: t for p, t in tracer.params.values()}, in_tree, out_tree, mutated, guards)


Captured = tuple[tuple[Value, ...], Tree, tuple[tuple[int, int], ...]]


def _capture(
    module: Module, tracer: Tracer, arguments: dict[str, Any], in_tree: Tree, places: list[int], inputs: list[Any]
) -> Captured:
    """Runs forward; the values of its results and of the arguments it wrote, the structure of the results."""
    result = _run(module, tracer, arguments)
    leaves, tree = flatten(result)
    out_tree = with_constants(tree, [leaf for _, leaf in leaves], _is_tensor)
    place = module.forward_place()  # no line of it is at work any more
    outputs = [tracer.value_of(as_tensor(leaf), place) for _, leaf in leaves if _is_tensor(leaf)]
    after, tree = flatten(arguments)
    if tree != in_tree:
        raise TraceError(
            "forward changed the structure of an argument: a dict, list or object got other entries",
            where=place,
            fix="return the new entries in place of adding them to an argument",
        )
    mutated: list[tuple[int, int]] = []
    for number, (at, before) in enumerate(zip(places, inputs, strict=True)):
        name, leaf = after[at]
        if isinstance(leaf, Tensor) and leaf._value is before and leaf._stale is None:
            continue
        if not isinstance(leaf, Tensor | np.ndarray):
            what = f"forward replaced the argument {name} by a {type(leaf).__name__}"
            raise TraceError(what, where=place)
        value = tracer.value_of(as_tensor(leaf), place)
        if value.type != before.type:
            raise TraceError(
                f"forward replaced the argument {name}: {before.type} by {value.type}",
                where=place,
                why="what is written into an argument must keep its type",
                fix="return the new tensor in place of storing it in the argument",
            )
        mutated.append((number, len(outputs)))
        outputs.append(value)
    return tuple(outputs), out_tree, tuple(mutated)


def _run(module: Module, tracer: Tracer, arguments: Mapping[str, Any]) -> Any:
    """Calls the module; every error gets the user's line, tables of buffers are left as they were."""

    def undecided(text: str, as_number: bool) -> TraceError:
        what = f"`{text}` is not decided: the size is symbolic"
        other = "write forward without this comparison"
        if as_number:
            what = f"`{text}` is a size that is known only at the call, but a plain number is needed here"
            other = "give ops the size itself (as in x * x.shape[0]), without len(), range() or a loop over it"
        why = "one graph serves every value of this dimension"
        fix = f"make the dimension a fixed number in the spec, or {other}"
        return TraceError(what, where=user_location(), why=why, fix=fix)

    tables = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    try:
        with comparisons_raise(undecided):
            args, kw = module.unbind_arguments(arguments)
            result = module(*args, **kw)
    except MonoplanError as error:
        if error.where is not None:
            raise
        raise type(error)(error.what, where=tracer.place_of(error), why=error.why, fix=error.fix) from error
    except Exception as error:  # forward is the user's: it may raise anything
        what = f"forward failed while it was traced: {in_words(error)}"
        raise TraceError(what, where=tracer.place_of(error)) from error
    finally:
        replaced = _restore(tables)
    if replaced:
        raise TraceError(
            f"forward replaced {replaced}",
            where=module.forward_place(),
            why="a plan has no memory of its own: the module would not see the new tensor",
            fix="return the new tensor, or pass the state to forward as an argument, which may be written",
        )
    return result


def _restore(tables: Sequence[tuple[Module, dict[str, Any], dict[str, Any]]]) -> str:
    """Puts parameters and buffers back that forward bound to other tensors; the name of one of them."""
    found = ""
    for m, parameters, buffers in tables:
        for now, before in ((m._parameters, parameters), (m._buffers, buffers)):
            changed = [n for n in {**now, **before} if now.get(n) is not before.get(n)]
            if changed:
                found = found or f"{changed[0]} of {type(m).__name__}"
                now.clear()
                now.update(before)  # type: ignore[arg-type]
    return found


def _value_name(name: str) -> str:
    """A user's name as one that IR text can hold: children may be called `a b`, `a[0]` or `a,b`."""
    return re.sub(r"[^\w.$-]|^$", "_", name)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray)
