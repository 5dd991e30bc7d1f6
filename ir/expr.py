"""Pointwise expressions: what a fused kernel computes per element, as a small tree with a text form.

`add(mul(x0, 0.5), x1)`: xN is operand N, names are pointwise ops of the registry, literals take the type of
the operand beside them. The same tree is evaluated by numpy (the reference) and rendered to C and CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Union

import numpy as np

from monoplan.ir.dims import Scanner, number
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.printer import format_attr
from monoplan.ir.types import DTYPES, Array, DType, TensorType, bool_, f32, i64, promote

Node = Union["Arg", "Const", "Call"]


@dataclass(frozen=True, slots=True)
class Arg:
    """Operand number `index`."""

    index: int

    def __str__(self) -> str:
        return f"x{self.index}"


@dataclass(frozen=True, slots=True)
class Const:
    """A literal; takes the type of its neighbours."""

    value: float | int | bool

    def __str__(self) -> str:
        text = format_attr(self.value)
        return f"float('{text}')" if text.lstrip("-") in ("inf", "nan") else text


@dataclass(frozen=True, slots=True)
class Call:
    """A pointwise op applied to expressions."""

    op: str
    args: tuple[Node, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        attrs = [f"{k}={format_attr(v)}".replace('"', "'") for k, v in self.attrs]
        return f"{self.op}({', '.join([*map(str, self.args), *attrs])})"


@cache
def parse_expr(text: str) -> Node:
    """The tree of an expression's text."""
    scanner = Scanner(text, "a pointwise expression")
    node = _parse_node(scanner)
    scanner.end()
    return node


def _parse_node(s: Scanner) -> Node:
    negative = s.skip("-")
    if s.kind() == "number":
        value = number(s.take())
        return Const(-value if negative else value)
    if negative or s.kind() != "name":
        raise s.wrong()
    name = s.take()
    if name in ("True", "False"):
        return Const(name == "True")
    if s.peek() != "(" and name[0] == "x" and name[1:].isdecimal() and len(name) < 9:
        return Arg(int(name[1:]))
    s.expect("(")
    s.open()
    if name == "float":
        value = _special(s)
        s.close()
        return Const(value)
    opdef = REGISTRY.get(name)
    if opdef is None or opdef.kind != "pointwise":
        raise s.wrong(f"{name} is not a pointwise op")
    args: list[Node] = []
    attrs: dict[str, Any] = {}
    while s.peek() != ")":
        if s.kind() == "name" and s.peek(1) == "=":
            key = s.take()
            s.expect("=")
            attrs[key] = _parse_attr(s)
        else:
            args.append(_parse_node(s))
        if not s.skip(","):
            break
    s.close()
    try:
        opdef.check_operands(args)
        full = opdef.complete_attrs(attrs)
    except TypeRuleError as error:
        raise s.wrong(error.what) from None
    return Call(opdef.name, tuple(args), tuple(full.items()))


def _special(s: Scanner) -> float:
    """What stands in float('…'): an infinity or NaN."""
    text = s.take().strip("'")
    if text not in ("inf", "-inf", "nan"):
        raise s.wrong("float() takes 'inf', '-inf' or 'nan'")
    return float(text)


def _parse_attr(s: Scanner) -> Any:
    if s.kind() == "text":
        return s.take()[1:-1]
    negative = s.skip("-")
    if s.kind() == "number":
        value = number(s.take())
        return -value if negative else value
    word = s.take() if s.kind() == "name" and not negative else ""
    words = {"True": True, "False": False, "None": None, **DTYPES}
    if word not in words:
        raise s.wrong("an attribute is not a literal")
    return words[word]


def expr_dtype(node: Node, args: Sequence[DType], hint: DType | None = None) -> DType:
    """The element type of an expression whose operands have these types; `hint` types a bare literal."""
    if isinstance(node, Arg):
        return args[node.index]
    if isinstance(node, Const):
        return _const_dtype(node.value, hint)
    types = call_dtypes(node, args)
    return REGISTRY[node.op].infer([TensorType(t, ()) for t in types], dict(node.attrs))[0].dtype


def call_dtypes(node: Call, args: Sequence[DType]) -> list[DType]:
    """The types of a call's arguments; a literal takes the promoted type of those that have one."""
    known = [None if isinstance(a, Const) else expr_dtype(a, args) for a in node.args]
    strong = [t for t in REGISTRY[node.op].promoted(known) if t is not None]
    hint = promote(*strong) if strong else None
    return [expr_dtype(a, args, hint) if t is None else t for a, t in zip(node.args, known, strict=True)]


def _const_dtype(value: float | int | bool, hint: DType | None) -> DType:
    if isinstance(value, bool):
        return bool_ if hint is None or hint == bool_ else hint
    if isinstance(value, float):
        return hint if hint is not None and hint.is_float else f32
    return hint if hint is not None and hint != bool_ else i64


def evaluate_expr(node: Node, args: Sequence[Array]) -> Array:
    """The expression over numpy arrays, by the references of its ops."""
    if isinstance(node, Arg):
        return args[node.index]
    if isinstance(node, Const):
        raise TypeRuleError("an expression can't be a lone literal")
    opdef = REGISTRY[node.op]
    values = [None if isinstance(a, Const) else evaluate_expr(a, args) for a in node.args]
    beside = [v.dtype for v in opdef.promoted(values) if v is not None]
    filled = []
    for a, v in zip(node.args, values, strict=True):
        if v is None:
            assert isinstance(a, Const)
            v = _literal(a.value, beside)
        filled.append(v.astype(np.float32) if v.dtype.itemsize == 2 and v.dtype.kind in "fV" else v)
    return np.asarray(opdef.reference(*filled, **dict(node.attrs)))


def _literal(value: float | int | bool, beside: Sequence[np.dtype[Any]]) -> Array:
    kinds = {d.kind for d in beside}
    if isinstance(value, float):
        wide = any(d == np.float64 for d in beside)
        return np.asarray(value, np.float64 if wide else np.float32)
    if isinstance(value, bool) and (not beside or kinds == {"b"}):
        return np.asarray(value)
    return np.asarray(value, np.result_type(*beside) if beside and kinds != {"b"} else np.int64)


def substitute_args(node: Node, make: Callable[[int], Node]) -> Node:
    """The expression with every operand replaced."""
    if isinstance(node, Arg):
        return make(node.index)
    if isinstance(node, Call):
        return Call(node.op, tuple(substitute_args(a, make) for a in node.args), node.attrs)
    return node


def arg_indices(node: Node) -> set[int]:
    """The operands that occur."""
    if isinstance(node, Arg):
        return {node.index}
    return set().union(*(arg_indices(a) for a in node.args)) if isinstance(node, Call) else set()


def count_ops(node: Node) -> int:
    """The number of pointwise ops, for flop counts and limits on fusion."""
    return 1 + sum(count_ops(a) for a in node.args) if isinstance(node, Call) else 0
