"""Pointwise expressions: text, types and values."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.errors import ParseError
from monoplan.ir.expr import (
    Arg,
    Call,
    Const,
    arg_indices,
    count_ops,
    evaluate_expr,
    expr_dtype,
    parse_expr,
    substitute_args,
)
from monoplan.ir.types import bf16, bool_, f16, f32, f64, i32, i64

TEXTS = [
    "x0",
    "add(mul(x0, 0.5), x1)",
    "where(lt(x0, 0.0), -1.0, x1)",
    "cast(x0, dtype=bf16)",
    "gelu(x0, approximate='tanh')",
    "maximum(x0, float('-inf'))",
    "mul(x0, float('nan'))",
    "logical_and(gt(x0, 1), x1)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trip(text: str) -> None:
    assert str(parse_expr(text)) == text
    assert str(parse_expr(str(parse_expr(text)))) == text


def test_defaults_are_written_out() -> None:
    assert str(parse_expr("gelu(x0)")) == "gelu(x0, approximate='none')"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "y0",
        "add(x0",
        "sum(x0)",
        "linear(x0, x1)",
        "nothing(x0)",
        "x0 + x1",
        "add(x0)",
        "add(x0, x1, x2)",
        "gelu(x0, exact=True)",
        "cast(x0)",
        "cast(x0, dtype=x1)",
        "float()",
        "float('ten')",
        "-x0",
        "'text'",
        "x0.real",
    ],
)
def test_what_does_not_parse(text: str) -> None:
    with pytest.raises(ParseError):
        parse_expr(text)


@pytest.mark.parametrize(
    ("text", "args", "wanted"),
    [
        ("add(x0, x1)", (f16, f32), f32),
        ("mul(x0, 2.0)", (bf16,), bf16),
        ("mul(x0, 2)", (f16,), f16),
        ("lt(x0, x1)", (f32, f32), bool_),
        ("cast(x0, dtype=i32)", (f64,), i32),
        ("add(x0, 1)", (i32,), i32),
        ("where(x0, x1, 0.0)", (bool_, f16), f16),
        ("add(cast(x0, dtype=f32), x1)", (i64, bf16), f32),
        ("where(gt(x0, 0), x1, x0)", (f16, f64), f64),
    ],
)
def test_types(text: str, args: tuple[object, ...], wanted: object) -> None:
    assert expr_dtype(parse_expr(text), args) is wanted  # type: ignore[arg-type]


def test_values() -> None:
    x = np.array([-2.0, 0.0, 3.0], np.float32)
    y = np.array([1.0, 5.0, -1.0], np.float32)
    got = evaluate_expr(parse_expr("where(lt(x0, 0.0), mul(x1, 10.0), add(x0, x1))"), [x, y])
    assert got.tolist() == [10.0, 5.0, 2.0] and got.dtype == np.float32
    assert evaluate_expr(parse_expr("add(x0, 1)"), [np.array([1, 2], np.int8)]).dtype == np.int8
    assert evaluate_expr(parse_expr("logical_not(x0)"), [np.array([True])]).tolist() == [False]
    assert evaluate_expr(parse_expr("maximum(x0, float('inf'))"), [x]).tolist() == [np.inf] * 3


def test_halves_are_computed_in_f32_and_rounded_by_casts() -> None:
    third = np.array([1 / 3], bf16.numpy)
    got = evaluate_expr(parse_expr("mul(x0, 3.0)"), [third])
    assert got.dtype == np.float32 and got[0] == np.float32(third[0]) * np.float32(3)
    rounded = evaluate_expr(parse_expr("cast(mul(x0, 3.0), dtype=bf16)"), [third])
    assert rounded.dtype == bf16.numpy


def test_walking() -> None:
    tree = parse_expr("add(mul(x0, 0.5), sub(x2, x0))")
    assert arg_indices(tree) == {0, 2} and count_ops(tree) == 3 and count_ops(Arg(1)) == 0
    moved = substitute_args(tree, lambda i: Arg(i + 1))
    assert str(moved) == "add(mul(x1, 0.5), sub(x3, x1))"
    nested = substitute_args(parse_expr("exp(x0)"), lambda _: tree)
    assert isinstance(nested, Call) and str(nested) == f"exp({tree})" and str(Const(True)) == "True"
