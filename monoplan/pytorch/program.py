"""A PyTorch module as a Module: its graph, by torch.export, as steps of plain data that forward runs one by one.

Nothing of PyTorch is left in the result: parameters and buffers are monoplan's, under their own names, and every step
knows the line of the user's file that it comes from.
"""

from __future__ import annotations

import ast
import copy
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.context import located
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.specs import Spec, spec
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError, MonoplanError, TraceError, in_words
from monoplan.ir.graph import Loc
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DTYPES, DType
from monoplan.pytorch.operators import PYTHON, Function, find

_DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "requires_grad")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


@dataclass(frozen=True, slots=True)
class Ref:
    """The result of an earlier step, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the graph: its result's name, its function, its arguments and where it was written."""

    name: str
    operator: str
    function: Function | None  # None: it is not covered
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loc: Loc


@dataclass(frozen=True)
class Program:
    """A captured module."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]  # the names of the steps that stand for the caller's tensors
    state: Mapping[str, str]  # names in the graph of parameters and buffers, with their paths
    outputs: Any  # their structure, of Refs and constants
    guards: tuple[str, ...] = ()  # what was decided by sizes that change when it was captured: see _check_guard

    @property
    def missing(self) -> dict[str, list[Loc]]:
        """Operators that are not covered, and where they are used."""
        found: dict[str, list[Loc]] = {}
        for step in self.steps:
            if step.function is None:
                found.setdefault(step.operator, []).append(step.loc)
        return found

    def run(self, values: dict[str, Any]) -> Any:
        """Runs all steps; `values` has the inputs and the state."""
        for step in self.steps:
            assert step.function is not None
            with located(step.loc):
                try:
                    args, kwargs = _filled(step.args, values), _filled(dict(step.kwargs), values)
                    values[step.name] = step.function(*args, **kwargs)
                except MonoplanError as error:
                    if error.where is not None:
                        raise
                    raise type(error)(error.what, where=step.loc, why=error.why, fix=error.fix) from None
                except (TypeError, ValueError, IndexError, ArithmeticError, NotImplementedError) as error:
                    what = f"{step.operator} with these arguments is not covered"
                    raise TraceError(what, where=step.loc, why=in_words(error)) from error
        return _filled(self.outputs, values)


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Arguments with results in place of Refs."""
    if isinstance(value, Ref):
        if values[value.name] is None:
            raise TraceError(f"the result {value.name} is not covered", why="of this operator there are values only")
        return values[value.name]
    if isinstance(value, tuple | list):
        return type(value)(_filled(v, values) for v in value)
    if isinstance(value, dict):
        return {k: _filled(v, values) for k, v in value.items()}
    return value


class TorchModule(Module):
    """A module that was PyTorch's."""

    def __init__(self, name: str, program: Program, state: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "specs", dict(specs))  # what compile() takes for its arguments
        known: dict[int, Any] = {}
        for path, tensor in state.items():
            _put(self, path, known.setdefault(id(tensor), tensor))
        named = dict((*self.named_parameters(), *self.named_buffers()))
        tensors = {key: named.get(path, known.get(id(state[path]))) for key, path in program.state.items()}

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            leaves = list(_tensors(bound))
            if len(leaves) != len(program.inputs):
                what = f"{name} takes {len(program.inputs)} tensors as it was captured, got {len(leaves)}"
                raise ArgumentError(what, fix="give the arguments that from_torch was given")
            for guard in program.guards:
                _check_guard(guard, bound)
            return program.run({**tensors, **dict(zip(program.inputs, leaves, strict=True))})

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(n, kind) for n in specs])
        forward.__signature__ = signature  # type: ignore[attr-defined]
        object.__setattr__(self, "forward", forward)


def _put(module: Module, path: str, tensor: Any) -> None:
    """Registers a tensor under a dotted path, in modules that are made for it."""
    *scopes, name = path.split(".")
    for scope in scopes:
        if scope not in module._modules:
            module.add_module(scope, Module())
        module = module._modules[scope]
    if isinstance(tensor, Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tensors(v)
    elif value is not None and not isinstance(value, bool | int | float | str):
        yield value


# -- what was decided by sizes -----------------------------------------------------------------------------

_ORDER = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def _guards(code: Sequence[str]) -> tuple[str, ...]:
    """The comparisons of sizes in the guards of an exported program: `L['x'].size()[0] > 4`.

    Others are on constants, which compile() compares, and on strides, which results do not depend on.
    """
    return tuple(text for text in code if ".size()" in text and ".stride()" not in text)


def _check_guard(text: str, arguments: Mapping[str, Any]) -> None:
    """Raises unless sizes are such as a guard says; where they are symbols, each call of the plan is checked.

    forward went another way for other sizes, which the captured program does not have.
    """
    shown = re.sub(r"L\['(\w+)'\]", r"\1", text)
    try:
        differences = list(_differences(ast.parse(text, mode="eval").body, arguments))
    except (NotImplementedError, TypeError, ZeroDivisionError, MonoplanError) as error:
        why = f"it decides by sizes that change: {shown}; {in_words(error)}"
        raise ArgumentError(
            "forward can't be captured for all sizes", why=why, fix="leave one of the sizes out of `dynamic`"
        ) from None
    for difference in differences:
        if not isinstance(difference, int):
            with located(Loc(f"forward, captured where {shown}")):
                F.zeros((difference,))  # an error unless it is 0 or more
        elif difference < 0:
            why = "it decides by these sizes, and goes another way for others"
            raise ArgumentError(f"forward was captured where {shown}", why=why, fix="give sizes that fit")


def _differences(node: Any, arguments: Mapping[str, Any]) -> Iterator[Any]:
    """What must not be negative for a guard to hold."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for part in node.values:
            yield from _differences(part, arguments)
        return
    if not isinstance(node, ast.Compare) or any(type(op) not in _ORDER for op in node.ops):
        raise NotImplementedError("it is no comparison of sizes")
    sides = [_size(side, arguments) for side in (node.left, *node.comparators)]
    for sign, a, b in zip((_ORDER[type(op)] for op in node.ops), sides[:-1], sides[1:], strict=True):
        if sign in (">", ">=", "=="):
            yield a - b - (sign == ">")
        if sign in ("<", "<=", "=="):
            yield b - a - (sign == "<")
        if sign == "!=":
            yield (a - b) * (a - b) - 1


def _size(node: Any, arguments: Mapping[str, Any]) -> Any:
    """A number that a guard computes from the sizes of arguments."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_size(node.left, arguments), _size(node.right, arguments))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_size(node.operand, arguments)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) and not node.value.args:
        called = node.value.func
        if isinstance(called, ast.Attribute) and called.attr == "size":
            return _argument(called.value, arguments).shape[ast.literal_eval(node.slice)]
    raise NotImplementedError(f"{ast.unparse(node)} is not covered")


def _argument(node: Any, arguments: Mapping[str, Any]) -> Any:
    """What `L['x']` or `L['x'][0]` is."""
    if isinstance(node, ast.Subscript):
        return _argument(node.value, arguments)[ast.literal_eval(node.slice)]
    if isinstance(node, ast.Name) and node.id == "L":
        return arguments
    raise NotImplementedError(f"{ast.unparse(node)} is not covered")


# -- reading torch.export's programs -----------------------------------------------------------------------


def from_torch(module: Any, *examples: Any, dynamic: Mapping[str, Any] | None = None, **named: Any) -> TorchModule:
    """A PyTorch module in inference as a Module, captured with example arguments; compile() makes it a plan.

    Sizes are those of the examples. `dynamic` names those that may change: {"input_ids": {0: "batch", 1: "seq"}}. An
    operator that is not covered is an error that names all of them, with the lines of your files.
    """
    program, made, arguments, specs = _capture(module, examples, named, dynamic)
    if program.missing:
        raise _not_covered(type(module).__name__, program.missing)
    return TorchModule(type(module).__name__, program, made, specs)


def coverage(module: Any, *examples: Any, dynamic: Mapping[str, Any] | None = None, **named: Any) -> str:
    """A table of a PyTorch module's operators: how often each is used, whether it is covered, and where it is not."""
    program = _capture(module, examples, named, dynamic)[0]
    counts: dict[str, int] = {}
    for step in program.steps:
        counts[step.operator] = counts.get(step.operator, 0) + 1
    missing, width = program.missing, max(map(len, counts), default=0)
    lines = [f"{type(module).__name__}: {len(counts) - len(missing)} of {len(counts)} operators are covered"]
    for name, count in sorted(counts.items()):
        places = ", ".join(dict.fromkeys(str(loc) for loc in missing.get(name, ())))
        lines.append(f"  {name:{width}} {count:5}  {'no: ' + places if name in missing else 'yes'}")
    return "\n".join(lines)


def _not_covered(name: str, missing: Mapping[str, Sequence[Loc]]) -> ArgumentError:
    lines = [f"{op} at {', '.join(dict.fromkeys(str(loc) for loc in locs))}" for op, locs in sorted(missing.items())]
    what = f"{name} uses {len(lines)} operators that are not covered:\n    " + "\n    ".join(lines)
    return ArgumentError(
        what, fix="write these parts with covered operators; mp.coverage(module, ...) lists all of them"
    )


def _capture(
    module: Any, examples: Sequence[Any], named: Mapping[str, Any], dynamic: Mapping[str, Any] | None
) -> tuple[Program, dict[str, Any], dict[str, Any], dict[str, Any]]:
    torch = _import_torch()
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"from_torch needs a torch.nn.Module, got {type(module).__name__}")
    training = [path for path, m in module.named_modules() if m.training]
    if training:
        why = f"{training[0] or type(module).__name__} is in training mode, where dropout and batch norms differ"
        raise ArgumentError("from_torch takes modules for inference", why=why, fix="call module.eval() first")
    try:
        arguments = dict(inspect.signature(module.forward).bind(*examples, **named).arguments)
    except TypeError as error:
        raise ArgumentError(
            f"{type(module).__name__}.forward: {error}", fix="give one example of each argument"
        ) from None
    arguments = _joined(module.forward, arguments)
    shapes = _dynamic_shapes(torch, module.forward, arguments, dynamic)
    try:
        with torch.no_grad():
            exported = torch.export.export(module, (), arguments, dynamic_shapes=shapes, strict=False)
            guards = _guards(getattr(exported, "_guards_code", ()))  # older releases note none
            exported = exported if _is_plain(exported) else _decomposed(torch, exported)
    except MonoplanError:
        raise
    except Exception as error:  # torch.export raises whatever the module does
        what = f"torch.export could not capture {type(module).__name__} as one graph"
        raise ArgumentError(what, where=_where(error), why=_first_words(error), fix=_advice(error)) from error
    program, state = _Reader(torch, exported, guards).read()
    specs = _specs(torch, arguments, dynamic)
    return program, state, arguments, specs


def _is_plain(exported: Any) -> bool:
    """Whether all operators are covered and change nothing in place: capturing them once more takes as long again."""
    for node in exported.graph.nodes:
        if node.op not in ("placeholder", "output"):
            changes = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
            if node.op != "call_function" or changes or _function(_operator_name(node.target)) is None:
                return False
    return True


def _decomposed(torch: Any, exported: Any) -> Any:
    """The program without changes in place; operators that are not covered are others, as far as PyTorch says how."""
    known = torch.export.default_decompositions()

    def without(program: Any, operators: set[Any]) -> Any:
        tried: set[Any] = set()
        while rules := {op: known[op] for op in operators - tried if op in known}:
            before, tried = _missing(program), tried | rules.keys()
            program = program.run_decompositions(rules)
            operators = _missing(program) - before
        return program

    exported = exported.run_decompositions({})
    missing = _missing(exported)
    whole = without(exported, missing)
    if not _missing(whole):
        return whole
    for op in sorted(missing, key=str):  # those that are made of others that are missing stay, for the error
        one = without(exported, {op})
        exported = one if _missing(one) == _missing(exported) - {op} else exported
    return exported


def _missing(exported: Any) -> set[Any]:
    """The operators of an exported program that are not covered."""
    calls = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    return {op for op in calls if _function(_operator_name(op)) is None}


def _function(name: str) -> Function | None:
    return PYTHON.get(name.removeprefix("python.")) if name.startswith("python.") else find(name)


def _import_torch() -> Any:
    try:
        import torch
        import torch.export
    except ImportError as error:
        raise ArgumentError("from_torch needs PyTorch", why=in_words(error), fix="pip install '.[torch]'") from None
    return torch


def _joined(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: those that came in **kwargs of forward, too."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = inspect.signature(function).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise ArgumentError("from_torch: forward takes any number of arguments", fix="give it named ones")
        else:
            found[name] = value
    return found


def _dynamic_shapes(
    torch: Any, forward: Callable[..., Any], arguments: Mapping[str, Any], dynamic: Mapping[str, Any] | None
) -> Any:
    """What torch.export takes: for every argument its dimensions that change."""
    unknown = sorted(set(dynamic or ()) - set(arguments))
    if unknown:
        what = f"dynamic names {', '.join(unknown)}, which is no argument of the examples"
        raise ArgumentError(what, fix=f"the arguments are {', '.join(arguments)}")
    if not dynamic:
        return None
    for name, dims in dynamic.items():
        value = arguments[name]
        if not isinstance(value, torch.Tensor) or not isinstance(dims, Mapping):
            raise ArgumentError(f"dynamic[{name!r}] must be a dictionary {{dimension: name}} for a tensor")
        for dim in dims:
            if not isinstance(dim, int) or not 0 <= dim < value.ndim:
                raise ArgumentError(f"dynamic[{name!r}]: {dim!r} is not one of {value.ndim} dimensions")
            if value.shape[dim] < 2:
                what = f"dynamic[{name!r}]: dimension {dim} of the example has size {value.shape[dim]}"
                raise ArgumentError(
                    what, why="torch.export takes such a size as fixed", fix="give an example of size 2"
                )
    shown = {n: {d: torch.export.Dim.DYNAMIC for d in dims} for n, dims in dynamic.items()}
    hidden = [n for n in arguments if n not in inspect.signature(forward).parameters]
    if hidden:
        what = f"{hidden[0]} comes in **kwargs of forward, beside sizes that change"
        raise ArgumentError(what, why="torch.export can't tell them apart", fix="wrap it in a module that names it")
    from torch.utils._pytree import tree_map

    return {n: shown.get(n) or tree_map(lambda _: None, value) for n, value in arguments.items()}


def _specs(torch: Any, arguments: Mapping[str, Any], dynamic: Mapping[str, Any] | None) -> dict[str, Any]:
    """What compile() is given: each tensor's type, with symbols where sizes change."""

    def made(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            names = (dynamic or {}).get(name, {})
            sizes = [names.get(i, int(n)) for i, n in enumerate(value.shape)]
            return spec(*sizes, dtype=_dtype(value.dtype))
        if isinstance(value, Mapping):
            return {k: made("", v) for k, v in value.items()}
        return type(value)(made("", v) for v in value) if isinstance(value, tuple | list) else value

    return {name: made(name, value) for name, value in arguments.items()}


def _dtype(dtype: Any) -> DType:
    names = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "bool": "bool"}
    text = str(dtype).removeprefix("torch.")
    short = names.get(text) or text.replace("uint", "u").replace("int", "i")
    if short not in DTYPES:
        raise ArgumentError(f"tensors of {dtype} are not covered")
    return DTYPES[short]


def as_array(tensor: Any) -> Any:
    """The contents of a torch tensor as numpy's, in its own memory where that is possible."""
    dtype = _dtype(tensor.dtype)
    tensor = tensor.detach().cpu().contiguous()
    if dtype.name == "bf16":
        import torch

        return tensor.view(torch.int16).numpy().view(dtype.numpy)
    return tensor.numpy()


def exact_outputs(module: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """What a torch module gives in float64 for arrays, in the order of a plan's outputs."""
    torch = _import_torch()
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"verify(against=...) needs a torch.nn.Module, got {type(module).__name__}")

    def wide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: wide(v) for k, v in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(wide(v) for v in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return value.double() if value.is_floating_point() else value
        array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        return torch.from_numpy(array.astype(array.dtype if array.dtype.kind in "biu" else np.float64))

    with torch.no_grad():
        result = copy.deepcopy(module).double()(**{k: wide(v) for k, v in arguments.items()})
    return [as_array(t) for t in _tensors(_plain(result))]


class _Reader:
    """Turns the graph of an exported program into steps."""

    def __init__(self, torch: Any, exported: Any, guards: tuple[str, ...]) -> None:
        self.torch, self.exported, self.guards = torch, exported, guards
        self.steps: list[Step] = []
        self.state: dict[str, str] = {}

    def read(self) -> tuple[Program, dict[str, Any]]:
        """The program, and its parameters and buffers by path."""
        signature = self.exported.graph_signature
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        if changed:
            what = f"the module changes {', '.join(sorted(set(changed)))} when it runs"
            raise ArgumentError(
                what, why="a plan of a PyTorch module has no state", fix="return the new values instead"
            )
        kinds = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        kinds |= signature.inputs_to_lifted_tensor_constants
        inputs: list[str] = []
        outputs: Any = None
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                if node.name in kinds:
                    self.state[node.name] = kinds[node.name]
                elif "val" in node.meta and isinstance(node.meta["val"], self.torch.Tensor):
                    inputs.append(node.name)
            elif node.op == "output":
                outputs = self._outputs(node)
            else:
                self._step(node, "")
        program = Program(tuple(self.steps), tuple(inputs), self.state, outputs, self.guards)
        return program, self._tensors(signature)

    def _tensors(self, signature: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        shared: dict[Any, Any] = {}
        learned = set(signature.inputs_to_parameters.values())
        for path in dict.fromkeys(self.state.values()):
            tensor = self.exported.state_dict.get(path)
            tensor = self.exported.constants[path] if tensor is None else tensor
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if tensor.numel() else path
            if key not in shared:
                array = as_array(tensor)
                shared[key] = Parameter(array) if path in learned else Tensor(np.asarray(array))
            found[path] = shared[key]
        return found

    def _step(self, node: Any, prefix: str) -> None:
        if node.op == "get_attr":
            return
        if node.op != "call_function":
            raise ArgumentError(f"{node.op} nodes in a torch graph are not covered", where=_location(node))
        name = _operator_name(node.target)
        if name.startswith("higher_order.wrap_with_"):
            self._inline(node, prefix)
            return
        function = _function(name)
        args = tuple(self._argument(a, prefix) for a in node.args)
        given = {k: v for k, v in node.kwargs.items() if k not in _DROPPED and not (k == "dtype" and v is None)}
        kwargs = {k: self._argument(v, prefix) for k, v in given.items()}
        self.steps.append(Step(prefix + node.name, name, function, args, kwargs, _location(node)))

    def _inline(self, node: Any, prefix: str) -> None:
        """The body of a context manager (no_grad, autocast), which changes nothing here."""
        place = next(i for i, a in enumerate(node.args) if getattr(a, "op", "") == "get_attr")
        body = getattr(self.exported.graph_module, node.args[place].target)
        given = iter(node.args[place + 1 :])
        inner = f"{prefix}{node.name}/"
        for part in body.graph.nodes:
            if part.op == "placeholder":
                value = self._argument(next(given), prefix)
                self.steps.append(Step(inner + part.name, "python.same", lambda x: x, (value,), {}, _location(part)))
            elif part.op == "output":
                result = self._argument(part.args[0], inner)
                self.steps.append(Step(prefix + node.name, "python.same", lambda x: x, (result,), {}, _location(node)))
            else:
                self._step(part, inner)

    def _argument(self, value: Any, prefix: str) -> Any:
        torch = self.torch
        if isinstance(value, torch.fx.Node):
            return Ref(
                value.name
                if not prefix or value.op == "placeholder" and value.name in self.state
                else prefix + value.name
            )
        if isinstance(value, tuple | list):
            return [self._argument(v, prefix) for v in value]
        if isinstance(value, torch.dtype):
            return _dtype(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None
        raise ArgumentError(f"an argument of type {type(value).__name__} in a torch graph is not covered")

    def _outputs(self, node: Any) -> Any:
        """The results in the structure that the module returns, of dicts, lists and tuples."""
        from torch.utils import _pytree

        flat = [self._argument(a, "") for a in node.args[0]]
        return _plain(_pytree.tree_unflatten(flat, self.exported.call_spec.out_spec))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, tuple | list):
        return tuple(_plain(v) for v in value) if isinstance(value, tuple) else [_plain(v) for v in value]
    return value


def _operator_name(target: Any) -> str:
    """`aten.add.Tensor`, `higher_order.name`, or `python.name` for functions of Python."""
    namespace = getattr(target, "namespace", None)
    if namespace == "aten":
        return str(target)
    if namespace is not None:
        return f"{namespace}.{target.name() if callable(getattr(target, 'name', None)) else target}".replace("::", ".")
    return f"python.{getattr(target, '__name__', str(target))}"


def _location(node: Any) -> Loc:
    """The user's line: the innermost frame that is not PyTorch's, and the path of the module."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0].replace("\\", "/")] or frames
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([p for p, _ in stack.values()]), "") if stack else ""
    path = path.removeprefix("L['self'].").removeprefix("L__self___")
    return Loc(path, own[-1][0], int(own[-1][1])) if own else Loc(path)


def _where(error: BaseException) -> Loc | None:
    """The line of the module's file where torch.export gave up."""
    found: Loc | None = None
    tb = error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" not in name and "/monoplan/" not in name:
            found = Loc("", tb.tb_frame.f_code.co_filename, tb.tb_lineno)
        tb = tb.tb_next
    return found


def _first_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(error).__name__


def _advice(error: BaseException) -> str:
    if "onstraint" in str(error):
        return "a size in `dynamic` is fixed by the module: leave it out, or change the line that fixes it"
    return "branches on values, lists of changing length and calls outside of torch can't be captured: move them out"


__all__ = ["Spec", "TorchModule", "as_array", "coverage", "from_torch"]
