"""Dims and pointwise expressions as C. The same text serves C and CUDA: ops have it, helpers are in include/."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.ir.dims import Dim, Expr, FloorDiv, bounds
from monoplan.ir.errors import CompileError
from monoplan.ir.expr import Arg, Const, Node, call_dtypes, expr_dtype
from monoplan.ir.opdef import REGISTRY, CForm, OpDef
from monoplan.ir.types import DType, bool_, f32, f64, promote

C_TYPES = {
    "f64": "double",
    "f32": "float",
    "f16": "mp_f16",
    "bf16": "mp_bf16",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "u8": "uint8_t",
    "u16": "uint16_t",
    "u32": "uint32_t",
    "u64": "uint64_t",
    "bool": "uint8_t",
}

_ATOM = re.compile(r"[\w.]+")  # a name or a number: as cheap to repeat as to name


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
            parts.append(
                f"{index} * ({text})" if isinstance(stride, Expr) and len(stride.terms) > 1 else f"{index} * {text}"
            )
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
    opdef = REGISTRY[node.op]
    wanted = call_dtypes(node, types)
    result = compute_type(expr_dtype(node, types))
    common = compute_type(promote(*opdef.promoted(wanted)))
    operands: list[tuple[str, DType]] = []
    for name, a, t in zip(opdef.operand_names, node.args, wanted, strict=True):
        text = c_expr(a, args, types, common)
        own = compute_type(t)
        if name in opdef.own_type or own == common:
            operands.append((text, own))
        else:
            operands.append((f"({C_TYPES[common.name]})({text})", common))
    attrs = dict(node.attrs)
    text = _filled(opdef, opdef.c, operands, attrs, common, result)
    if opdef.cuda is not None:
        text = f"MP_C_OR_CUDA({text}, {_filled(opdef, opdef.cuda, operands, attrs, common, result)})"
    # C computes narrow integers as int: what does not fit must wrap before anyone looks at it.
    wrap = f"({C_TYPES[result.name]})" if result.is_integer and result.bits < 32 else ""
    return text if text.startswith(wrap) else wrap + text


def _filled(
    opdef: OpDef,
    form: CForm | None,
    operands: Sequence[tuple[str, DType]],
    attrs: Mapping[str, Any],
    t: DType,
    result: DType,
) -> str:
    """An op's C over operands whose common type is t. An operand that occurs several times is computed once."""
    form = form(t, attrs) if callable(form) else form
    if isinstance(form, Mapping):
        sort = {"u": "unsigned", "i": "signed"}.get(t.kind, "")
        kinds = [t.name, sort, "integer" if t.is_integer else "float" if t.is_float else "bool", "any"]
        form = next((form[k] for k in kinds if k in form), None)
    if form is None:
        raise CompileError(f"{opdef.name} has no C expression for {t.name}", fix="add one to its definition, in c=")
    fields = [field for _, field, _, _ in string.Formatter().parse(form)]
    texts, bound = [], []
    for i, (text, own) in enumerate(operands):
        if fields.count(str(i)) > 1 and not _ATOM.fullmatch(text):
            bound.append((f"mp_{i}", text, C_TYPES[own.name]))
            text = f"mp_{i}"
        texts.append(text)
    # Numbers become literals of its type, words stay as they are.
    names = {name: c_literal(v, t) if isinstance(v, bool | int | float) else str(v) for name, v in attrs.items()}
    filled = form.format(*texts, **names, f="f" if t == f32 else "", t=t.name, type=C_TYPES[result.name])
    for name, text, ctype in bound:
        filled = f"MP_LET({ctype}, {name}, {text}, {filled})"
    return filled
