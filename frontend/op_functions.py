"""Pointwise ops and reductions as functions and as methods of Tensor, made from the registry.

Every op of these kinds gets both as soon as it is defined, with PyTorch's argument names. A few functions are written
out in functional.py, where they take more than their op does. For type checkers the same names stand in
op_functions.pyi, which is `stub()`: tests/frontend/test_op_functions.py compares them, and with
MONOPLAN_GOLDEN_UPDATE=1 writes the file.
"""

from __future__ import annotations

import builtins
import inspect
import json
from collections.abc import Callable
from typing import Any

from monoplan.frontend.tensor import Tensor, as_tensor, axes_of, binary, call, floating, pointwise
from monoplan.ir.opdef import REGISTRY, REQUIRED, OpDef, watch
from monoplan.ir.types import bool_

# In functional.py: with inplace=, with other argument names, or for other operands as well.
WRITTEN_OUT = ("cast", "div", "logical_and", "logical_not", "logical_or", "pow", "relu", "round", "silu", "where")
_NO_METHODS = ("cast", "integer_pow", "where")  # Tensor.to, Tensor.pow; where has its arguments in another order
# PyTorch's max and min have indices beside their values: functional.py writes them out, and the ops have other names.
_NAMES = {"max": "amax", "min": "amin"}
_NOT_ALL = ("any", "all")  # an empty list of dimensions means none to them, and all to the other reductions
METHODS: dict[str, Callable[..., Any]] = {}  # functions of functional.py that are methods of Tensor too

__all__: list[str] = []
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def write(result: Tensor, out: Any, inplace_of: Any = None) -> Tensor:
    """The result, or the tensor that took it over: `inplace` wins over `out`."""
    target = out if inplace_of is None else inplace_of
    return result if target is None else as_tensor(target).assign(result)


def _parameter(name: str, annotation: str, default: Any = REQUIRED, *, keyword: bool = False) -> inspect.Parameter:
    return inspect.Parameter(name, _KINDS[keyword], default=default, annotation=annotation)


def signature_of(opdef: OpDef, *, method: bool = False) -> inspect.Signature:
    """The signature of an op's function or method, with annotations as text."""
    attrs = [
        _parameter(name, opdef.attr_types[name], default)
        for name, default in opdef.attr_defaults.items()
        if opdef.kind == "pointwise" or name not in ("axes", "axis", "keepdims")
    ]
    if opdef.kind == "pointwise":
        names = ["input", "other"][: len(opdef.operand_names)] if len(opdef.operand_names) < 3 else opdef.operand_names
        parameters = [*(_parameter(n, "Any") for n in names), *attrs]
        if not method:
            parameters.append(_parameter("out", "Tensor | None", None, keyword=True))
    else:
        dim = "int | None" if "axis" in opdef.attr_defaults else "Any"
        parameters = [
            _parameter("input", "Any"),
            _parameter("dim", dim, None),
            _parameter("keepdim", "bool", False),
            *attrs,
            _parameter("dtype", "Any", None, keyword=True),
        ]
    if method:
        parameters[0] = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature(parameters, return_annotation="Tensor")


def _function(opdef: OpDef, *, method: bool) -> Callable[..., Any]:
    signature = signature_of(opdef, method=method)
    run = _apply if opdef.kind == "pointwise" else _reduce
    # Operands alone are the common case, and binding a signature takes longer than a small op.
    defaults = dict(opdef.attr_defaults)
    operands = len(opdef.operand_names) if run is _apply and REQUIRED not in defaults.values() else -1

    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) == operands and not kwargs:
            return _operation(opdef)(opdef.name, *args, **defaults)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{opdef.name}{signature}: {error}") from None
        bound.apply_defaults()
        return run(opdef, **{("input" if k == "self" else k): v for k, v in bound.arguments.items()})

    function.__name__ = public_name(opdef)
    function.__qualname__ = f"Tensor.{function.__name__}" if method else function.__name__
    function.__doc__ = opdef.doc
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def public_name(opdef: OpDef) -> str:
    """The name of an op's function and method."""
    return _NAMES.get(opdef.name, opdef.name)


def _apply(opdef: OpDef, *, out: Any = None, **given: Any) -> Tensor:
    """A pointwise op over the arguments of its function."""
    attrs = {name: given.pop(name) for name in opdef.attr_defaults}
    return write(_operation(opdef)(opdef.name, *given.values(), **attrs), out)


def _operation(opdef: OpDef) -> Callable[..., Any]:
    return binary if opdef.name == "pow" else pointwise


def _reduce(opdef: OpDef, *, input: Any, dim: Any, keepdim: bool, dtype: Any, **attrs: Any) -> Any:
    """A reduction over the arguments of its function."""
    x = as_tensor(input) if dtype is None else as_tensor(input).to(dtype)
    axes = axes_of(dim, x.ndim)
    if "axis" in opdef.attr_defaults:
        over = {"axis": None if axes is None else dim}
    else:
        over = {"axes": None if axes == () and opdef.name not in _NOT_ALL else axes}
    if x.dtype == bool_ and opdef.name in ("max", "min"):
        opdef = REGISTRY["any" if opdef.name == "max" else "all"]
    found = call(opdef, floating(x) if opdef.floats else x, **over, keepdims=keepdim, **attrs)
    return found if dtype is None else found.to(dtype)  # sums of small integers are i64 unless asked otherwise


def _publish(opdef: OpDef) -> None:
    if opdef.kind not in ("pointwise", "reduce"):
        return
    name = public_name(opdef)
    if name not in WRITTEN_OUT:
        globals()[name] = _function(opdef, method=False)
        __all__.append(name)
    if name not in _NO_METHODS and name not in WRITTEN_OUT:
        setattr(Tensor, name, _function(opdef, method=True))


watch(_publish)


def publish_methods(functions: dict[str, Callable[..., Any]]) -> None:
    """Makes functions methods of Tensor, where it has none of that name."""
    for name, function in functions.items():
        if name not in Tensor.__dict__:
            METHODS[name] = function
            setattr(Tensor, name, function)


def stub() -> str:
    """The text of op_functions.pyi."""
    ops = [o for o in REGISTRY.values() if o.kind in ("pointwise", "reduce")]
    lines = [
        '"""Made from the op registry by op_functions.stub(). Do not edit."""',
        "",
        "from collections.abc import Callable, Sequence",
        "from typing import Any",
        "",
        "from monoplan.frontend.arrays import Sorted",
        "from monoplan.frontend.tensor import Tensor",
        "from monoplan.ir.dims import Dim",
        "",
        "__all__ = [",
        *(f'    "{name}",' for name in __all__),
        "]",
        "",
        "METHODS: dict[str, Callable[..., Any]]",
        "WRITTEN_OUT: tuple[str, ...]",
        "",
        "def write(result: Tensor, out: Any, inplace_of: Any = None) -> Tensor: ...",
        "def publish_methods(functions: dict[str, Callable[..., Any]]) -> None: ...",
        "def stub() -> str: ...",
    ]
    for o in ops:
        if public_name(o) not in WRITTEN_OUT:
            lines += [f"def {public_name(o)}{signature_text(signature_of(o))}:", f'    """{o.doc}"""', ""]
    lines += ["class OpMethods:", '    """The methods of Tensor that follow from the registry."""', ""]
    for o in ops:
        if o.name not in _NO_METHODS and public_name(o) not in WRITTEN_OUT:
            text = signature_text(signature_of(o, method=True))
            lines += [f"    def {public_name(o)}{text}:", f'        """{o.doc}"""', ""]
    for name, function in METHODS.items():
        signature = inspect.signature(function)
        first, *rest = signature.parameters.values()
        own = first.replace(name="self", annotation=first.empty)
        text = signature_text(signature.replace(parameters=[own, *rest]))
        lines += [
            f"    def {name}{text}:",
            f'        """{inspect.cleandoc(function.__doc__ or "").splitlines()[0]}"""',
            "",
        ]
    return "\n".join(lines)


def signature_text(signature: inspect.Signature) -> str:
    """A signature as source."""
    shown: list[str] = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not builtins.any(text.startswith("*") for text in shown):
            shown.append("*")
        annotation = "" if p.annotation is p.empty else f": {p.annotation}"
        default = "" if p.default is p.empty else f" = {_literal(p.default)}"
        shown.append(f"{'*' if p.kind is p.VAR_POSITIONAL else ''}{p.name}{annotation}{default}")
    return f"({', '.join(shown)}) -> {signature.return_annotation}"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
