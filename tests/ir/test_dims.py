"""Dims: the algebra agrees with evaluation, text round-trips, comparisons decide only what is certain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monoplan.ir.dims import (
    Dim,
    Expr,
    as_dim,
    bounds,
    comparisons_raise,
    divide_exactly,
    equal,
    evaluate,
    format_dim,
    parse_dim,
    possible,
    substitute,
    symbol,
    symbols_of,
)
from monoplan.ir.errors import ParseError

NAMES = ("batch", "seq", "n")
VALUES = st.fixed_dictionaries({name: st.integers(1, 50) for name in NAMES})


def dims(with_division: bool = True) -> st.SearchStrategy[Dim]:
    """Random dims, by the operations that shapes need."""
    leaf = st.one_of(st.integers(-6, 12), st.sampled_from(NAMES).map(symbol))

    def more(inner: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
        sums = st.tuples(inner, inner, st.sampled_from("+-*")).map(_combine)
        return (
            st.one_of(sums, st.tuples(inner, st.integers(1, 7)).map(lambda p: p[0] // p[1])) if with_division else sums
        )

    return st.recursive(leaf, more, max_leaves=6)


def _combine(p: Any) -> Dim:
    a, b, sign = p
    return a + b if sign == "+" else a - b if sign == "-" else a * b


@given(dims(), dims(), VALUES)
def test_algebra_agrees_with_evaluation(a: Dim, b: Dim, values: dict[str, int]) -> None:
    x, y = evaluate(a, values), evaluate(b, values)
    assert evaluate(a + b, values) == x + y
    assert evaluate(a - b, values) == x - y
    assert evaluate(a * b, values) == x * y
    assert evaluate(-a, values) == -x
    assert evaluate(a // 3, values) == x // 3
    assert evaluate(a % 4, values) == x % 4


@given(dims())
def test_text_round_trip(d: Dim) -> None:
    text = format_dim(d)
    assert equal(parse_dim(text), d), text
    assert format_dim(parse_dim(text)) == text


@given(dims(with_division=False), dims(with_division=False), dims(with_division=False))
def test_polynomials_have_one_form(a: Dim, b: Dim, c: Dim) -> None:
    assert equal((a + b) * c, c * b + a * c)
    assert equal((a - b) + b, a)
    assert equal(a * b * c, c * (b * a))


@given(dims(), VALUES)
def test_bounds_hold(d: Dim, values: dict[str, int]) -> None:
    low, high = bounds(d)
    x = evaluate(d, values)
    assert low is None or low <= x
    assert high is None or x <= high


@given(dims(), dims(), VALUES)
def test_comparisons_never_lie(a: Dim, b: Dim, values: dict[str, int]) -> None:
    x, y = evaluate(a, values), evaluate(b, values)
    if equal(a, b):
        assert x == y
    if not possible(a, b):
        assert x != y
    for decide, truth in (
        (lambda: a < b, x < y),
        (lambda: a <= b, x <= y),
        (lambda: a > b, x > y),
        (lambda: a >= b, x >= y),
    ):
        try:
            assert decide() == truth
        except TypeError:
            pass  # not decided, which is always allowed


@given(dims(with_division=False), dims(with_division=False), VALUES)
def test_exact_division(a: Dim, b: Dim, values: dict[str, int]) -> None:
    product = a * b
    quotient = divide_exactly(product, b)
    if quotient is not None:
        assert evaluate(quotient, values) * evaluate(b, values) == evaluate(product, values)
    if isinstance(b, int) and b != 0:
        assert quotient is not None and equal(quotient, a)


@given(dims(), VALUES)
def test_substitution_agrees_with_evaluation(d: Dim, values: dict[str, int]) -> None:
    assert substitute(d, values) == evaluate(d, values)
    half = {"batch": values["batch"]}
    assert evaluate(substitute(d, half), values) == evaluate(d, values)
    assert symbols_of(substitute(d, half)) <= set(NAMES) - {"batch"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("seq*batch", "batch*seq"),
        ("1+seq+seq", "2*seq+1"),
        ("seq - seq + 3", "3"),
        ("(2*n+2)//2", "n+1"),
        ("2*((n+1)//2)", "2*((n+1)//2)"),
        ("-((n+1)//2)", "-((n+1)//2)"),
        ("seq-((n+1)//2)", "-((n+1)//2)+seq"),
        ("6//2", "3"),
        ("-n", "-n"),
        ("(n*n-1)//(n-1)", "n+1"),
    ],
)
def test_canonical_text(text: str, shown: str) -> None:
    assert format_dim(parse_dim(text)) == shown


@pytest.mark.parametrize(
    "text", ["", "1.5", "n+", "n/2", "n//0", "5//n", "n**2", "f(n)", "n//(n+1)", "n//-2", "'a'", "n m"]
)
def test_what_is_not_a_dimension(text: str) -> None:
    with pytest.raises(ParseError):
        parse_dim(text)


@pytest.mark.parametrize(
    "text",
    [
        "(a+b+c+d)*" * 40 + "a",
        "+".join(f"s{i}" for i in range(100_000)),
        "*".join(["a"] * 100_000),
        "//3".join(["a"] + [""] * 5000),
        "9223372036854775807*" * 300 + "a",
        "9223372036854775807*" * 300 + "1",
        "((a+b+c+d+e+f)//3+a+b+c+d)*((a+b+c+d+e+f)//5+a+b+c+d)*((a+b+c+d+e+f)//7+a+b+c+d)",
    ],
    ids=lambda text: text[:20],
)
def test_dimensions_that_are_too_large(text: str) -> None:
    with pytest.raises(ParseError, match="too large|larger than|nested too deeply"):
        parse_dim(text)


@pytest.mark.parametrize("name", ["", "2n", "a b", "f32", "inf", "nan", "bool", "for", "naïve"])
def test_what_can_not_name_a_symbol(name: str) -> None:
    with pytest.raises(ParseError, match="not a name"):
        symbol(name)


def test_decided_comparisons() -> None:
    n = symbol("n")
    assert n > 0 and n >= 1 and not n < 1 and n + 1 > n and 2 * n >= n
    assert bool(n) and not equal(n, 1) and possible(n, 1) and not possible(n, 0)
    assert as_dim("n") == n and as_dim(4) == 4 and as_dim(n) is n
    with pytest.raises(TypeError, match="n > 5 is not decided"):
        assert n > 5
    with pytest.raises(TypeError, match="symbolic"):
        int(n)
    # At n = 1 these hold with equality, so they are neither true nor false.
    for undecided in (lambda: 1 - n >= 0, lambda: n - 1 > 0, lambda: n - 1 <= 0, lambda: 1 - n < 0):
        with pytest.raises(TypeError):
            undecided()
    # Without knowing n - 5 is not negative, its half has no sign either.
    with pytest.raises(TypeError):
        assert (n - 5) // 2 >= 0


def test_comparisons_raise_while_tracing() -> None:
    n = symbol("n")
    with comparisons_raise(lambda text, as_number: RuntimeError(f"{text}, {as_number}")):
        with pytest.raises(RuntimeError, match="n, True"):
            range(n)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="n == 3, False"):
            assert n == 3
        with pytest.raises(RuntimeError, match="n > 3, False"):
            assert n > 3
        assert (n == 0) is False and n != n + 1  # decided, so no error
        with comparisons_raise(None):
            assert (n == 3) is False
    assert (n == 3) is False


def test_dims_are_hashable() -> None:
    table: dict[Any, str] = {symbol("n") + 1: "a"}
    assert table[1 + symbol("n")] == "a"
    assert isinstance(symbol("n"), Expr) and (symbol("n") == "n") is False
