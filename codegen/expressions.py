"""Dims and pointwise expressions as C: the same text serves C and CUDA; helpers are in include/."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from monoplan.ir.dims import Dim, Expr, FloorDiv, bounds
from monoplan.ir.errors import CompileError
from monoplan.ir.expr import Arg, Call, Const, Node, call_dtypes, expr_dtype
from monoplan.ir.types import DType, bool_, f32, f64, promote

C_TYPES = {
    "f64": "double", "f32": "float", "f16": "mp_f16", "bf16": "mp_bf16", "i8": "int8_t", "i16": "int16_t",
    "i32": "int32_t", "i64": "int64_t", "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t",
    "bool": "uint8_t",
}

# Pointwise ops by their C form; {s} is the suffix of the float type (f or nothing).
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
          "ge": ">=", "logical_and": "&&", "logical_or": "||"}
_CALLS = {"exp": "mp_exp{s}", "log": "log{s}", "sqrt": "sqrt{s}", "rsqrt": "mp_rsqrt{s}", "sin": "sin{s}",
          "cos": "cos{s}", "tanh": "mp_tanh{s}", "sigmoid": "mp_sigmoid{s}", "erf": "erf{s}", "pow": "pow{s}",
          "silu": "mp_silu{s}", "swiglu": "mp_swiglu{s}"}


def compute_type(dtype: DType) -> DType:
    """The type an element is computed in: half floats in f32, others as they are."""
    return f32 if dtype.is_float and dtype.bits == 16 else dtype


def c_symbol(name: str) -> str:
    """The C variable of a symbolic dimension; the prefix keeps `t` or `i` apart from a template's own names."""
    if not (name.isascii() and name.isidentifier()):
        raise CompileError(f"{name!r} is not a name for a symbolic dimension", fix="use a name such as seq")
    return f"n_{name}"


def c_dim(d: Dim) -> str:
    """A dim as a C expression over symbol variables."""
    if isinstance(d, int):
        return str(d)
    parts: list[str] = []
    for monomial, coefficient in d.terms:
        factors = [c_symbol(a) if isinstance(a, str) else _c_floordiv(a) for a in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.append(str(abs(coefficient)))
        sign = "-" if coefficient < 0 else "+" if parts else ""
        parts.append(f"{sign} {' * '.join(factors)}" if parts else f"{sign}{' * '.join(factors)}")
    return " ".join(parts)


def _c_floordiv(a: FloorDiv) -> str:
    low, _ = bounds(a.numerator)
    if low is None or low < 0:  # C rounds towards zero
        return f"mp_floordiv({c_dim(a.numerator)}, {a.denominator})"
    return f"(({c_dim(a.numerator)}) / {a.denominator})"


def c_index(terms: Sequence[tuple[str, Dim]], offset: Dim = 0) -> str:
    """offset + sum(index * stride) as C, leaving out what is zero."""
    parts = []
    for index, stride in terms:
        if isinstance(stride, int) and stride == 0 or index == "0":
            continue
        if isinstance(stride, int) and stride == 1:
            parts.append(index)
        else:
            text = c_dim(stride)
            parts.append(f"{index} * ({text})" if isinstance(stride, Expr) and len(stride.terms) > 1
                         else f"{index} * {text}")
    if not (isinstance(offset, int) and offset == 0):
        parts.append(c_dim(offset))
    return " + ".join(parts) if parts else "0"


def c_literal(value: float | int | bool, dtype: DType) -> str:
    """A literal of an element type (f16 and bf16: its value as f32); negative ones in parentheses."""
    text = _c_number(value, dtype)
    return f"({text})" if text[0] == "-" else text


def _c_number(value: float | int | bool, dtype: DType) -> str:
    if dtype.is_float:
        if dtype != f64:  # rounded as the element type does: 1e39 is infinite in f32
            with np.errstate(over="ignore"):
                value = float(np.asarray(value, np.float64).astype(dtype.numpy))
        x = float(value)
        if math.isnan(x):
            return "NAN"
        if math.isinf(x):
            return "-INFINITY" if x < 0 else "INFINITY"
        return repr(x) if dtype == f64 else f"{x!r}f"
    if dtype == bool_:
        return "1" if value else "0"
    if int(value) == -(2 ** (dtype.bits - 1)) and dtype.bits >= 32:
        return f"INT{dtype.bits}_MIN"
    suffix = {"u32": "u", "i64": "LL", "u64": "ULL"}.get(dtype.name, "")
    return f"{int(value)}{suffix}"


def load(dtype: DType, place: str) -> str:
    """An element read and widened to its compute type."""
    return f"mp_load_{dtype.name}({place})" if dtype.is_float and dtype.bits == 16 else place


def store(dtype: DType, place: str, value: str, value_type: DType) -> str:
    """A statement that rounds a value to the element type and stores it."""
    return f"{place} = {convert(value, value_type, dtype)};"


def convert(value: str, source: DType, target: DType) -> str:
    """A value of compute type as an element of another type."""
    if target.is_float and target.bits == 16:
        return f"mp_to_{target.name}({convert(value, source, f32)})"
    if compute_type(source) == target:
        return value
    if target == bool_:
        return f"({value} != 0)"
    return f"({C_TYPES[target.name]})({value})"


def c_expr(node: Node, args: Sequence[str], types: Sequence[DType], hint: DType | None = None) -> str:
    """An expression over C operands (already in their compute types)."""
    if isinstance(node, Arg):
        return args[node.index]
    if isinstance(node, Const):
        return c_literal(node.value, compute_type(expr_dtype(node, types, hint)))
    wanted = call_dtypes(node, types)
    result = compute_type(expr_dtype(node, types))
    if node.op == "cast":
        return _c_cast(c_expr(node.args[0], args, types), wanted[0], dict(node.attrs)["dtype"])
    common = compute_type(_common(node, wanted, result))
    inner = []
    for i, (a, t) in enumerate(zip(node.args, wanted, strict=True)):
        text = c_expr(a, args, types, common)
        keep = (node.op == "where" and i == 0) or compute_type(t) == common
        inner.append(text if keep else f"({C_TYPES[common.name]})({text})")
    return _c_call(node, inner, common)


def _common(node: Call, wanted: Sequence[DType], result: DType) -> DType:
    """The type both sides are brought to: the operands' for comparisons, else the result's."""
    return promote(*wanted) if node.op in ("eq", "ne", "lt", "le", "gt", "ge") else result


def _c_cast(value: str, source: DType, target: DType) -> str:
    if target.is_float and target.bits == 16:
        return f"mp_load_{target.name}({convert(value, source, target)})"  # rounds as the cast says
    if target == bool_:
        return f"({value} != 0)"
    return f"({C_TYPES[target.name]})({value})"


def _c_call(node: Call, a: Sequence[str], t: DType) -> str:
    s = "f" if t == f32 else ""
    if node.op in _INFIX:
        text = f"({a[0]} {_INFIX[node.op]} {a[1]})"
        # C computes narrow integers as int: what does not fit must wrap before anyone looks at it.
        return f"({C_TYPES[t.name]}){text}" if node.op in ("add", "sub", "mul") and _is_narrow(t) else text
    if node.op in _CALLS:
        return f"{_CALLS[node.op].format(s=s)}({', '.join(a)})"
    if node.op in ("maximum", "minimum"):
        return f"mp_{node.op}_{t.name}({a[0]}, {a[1]})"
    if node.op == "relu":
        return f"mp_maximum_{t.name}({a[0]}, 0)"
    if node.op == "neg":
        return f"({C_TYPES[t.name]})(-{a[0]})" if _is_narrow(t) else f"(-{a[0]})"
    if node.op == "abs":
        if t.kind == "u":
            return a[0]
        return f"fabs{s}({a[0]})" if t.is_float else f"mp_abs_{t.name}({a[0]})"
    if node.op == "where":
        return f"({a[0]} ? {a[1]} : {a[2]})"
    if node.op == "logical_not":
        return f"(!{a[0]})"
    if node.op == "gelu":
        return f"mp_gelu_{dict(node.attrs)['approximate']}{s}({a[0]})"
    raise KeyError(f"pointwise op {node.op} has no C form")


def _is_narrow(t: DType) -> bool:
    return t.is_integer and t.bits < 32
