"""Text that is not a graph: every error is a ParseError that names line and column."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monoplan.ir.dims import symbol
from monoplan.ir.errors import ParseError
from monoplan.ir.parser import _closing, _pieces, parse_graph
from monoplan.ir.printer import print_graph

GOOD = """\
graph g(%x: f32[n, 4], %ids: i64[n]) {
  param %w: f32[8, 4] = "w"
  %embedding = embedding(%ids, %w) : f32[n, 4]
  %add = add(%x, %embedding) : f32[n, 4]
  %sum = sum(%add) {axes=(1,), keepdims=False} : f32[n]
  %gelu = gelu(%sum) {approximate="tanh"} : f32[n]
  %pointwise = pointwise(%gelu) {expr="mul(x0, 2.0)"} : f32[n]
  %reshape = reshape(%add) {shape=(2*n, 2)} : f32[2*n, 2]
  return %pointwise, %reshape
}
"""

# (what to replace, by what, line, column, message)
BAD = [
    ("graph g(", "grph g(", 1, 1, "expected `graph name"),
    ("%x: f32[n, 4], ", "%x f32[n, 4], ", 1, 9, "inputs are written"),
    ("%x: f32[n, 4]", "%x: f33[n, 4]", 1, 13, "is not a tensor type"),
    ("%x: f32[n, 4]", "%x: f32[n+, 4]", 1, 17, "is not a dimension"),
    ("%ids: i64[n]", "%x: i64[n]", 1, 9, "%x is defined twice"),
    ('param %w: f32[8, 4] = "w"', "param %w: f32[8, 4] = w", 2, 3, "expected `param"),
    ('param %w: f32[8, 4] = "w"', 'param %w: f32[8, 4] = "\\q"', 2, 25, "is not a string"),
    ("embedding(%ids, %w)", "embeding(%ids, %w)", 3, 16, "there is no op named embeding"),
    ("embedding(%ids, %w)", "embedding(%ids)", 3, 3, "operand weight is missing"),
    ("embedding(%ids, %w)", "embedding(%ids, %w, %x)", 3, 3, "got 3 operands"),
    ("embedding(%ids, %w)", "embedding(%ids, w)", 3, 32, "expected a value such as %x, found 'w'"),
    ("embedding(%ids, %w)", "embedding(%ids, %v)", 3, 32, "%v is not defined before this line"),
    ("embedding(%ids, %w)", "embedding(%x, %w)", 3, 3, "ids must be integers"),
    ("add(%x, %embedding) : f32[n, 4]", "add(%x, %embedding) : f32[n, 5]", 4, 32, "the type rule of add gives"),
    ("add(%x, %embedding) : f32[n, 4]", "add(%x, %embedding)", 4, 3, "expected `: type`"),
    ("add(%x, %embedding) : f32[n, 4]", "add(%x, %embedding) : f32[n, 4], f32[1]", 4, 3, "2 types are written"),
    ("%add = add", "%add, %more = add", 4, 3, "2 names are written"),
    ("%add = add", "%x = add", 4, 3, "%x is defined twice"),
    ("%x: f32[n, 4]", "%x: f32[n, -4]", 1, 13, "a size is negative"),
    ("%x: f32[n, 4]", f"%x: f32[n, {2**63}]", 1, 20, "is larger than"),
    ("%x: f32[n, 4]", f"%x: f32[n, {'9' * 5000}]", 1, 20, "is larger than"),
    ("%x: f32[n, 4]", f"%x: f32[0, {2**62}]", 1, 13, "it is larger than"),
    ("%x: f32[n, 4]", "%x: f32[n, 2**4]", 1, 20, "is not a dimension"),
    ("%x: f32[n, 4]", f"%x: f32[{'1, ' * 40}4]", 1, 13, "it has 41 dimensions, more than 32"),
    ("axes=(1,)", f"axes={'(' * 400}1{',)' * 400}", 5, 42, "tuples are nested too deeply"),
    ("axes=(1,)", f"axes=({'9' * 5000},)", 5, 27, "is larger than"),
    ("mul(x0, 2.0)", "mul(x0, x\u00b2)", 7, 3, "is not a pointwise expression"),
    ("mul(x0, 2.0)", f"mul(x0, {'9' * 5000})", 7, 3, "is not a pointwise expression"),
    ("%add = add", "add = add", 4, 3, "expected `%result = op"),
    ("axes=(1,)", "axes=(7,)", 5, 3, "axis 7 is out of range"),
    ("axes=(1,)", "axis=(1,)", 5, 3, "unknown attributes axis"),
    ("axes=(1,)", "axes=1 2", 5, 26, "is not a dimension"),
    ("axes=(1,)", "axes=(1", 5, 26, "is not closed"),
    ("keepdims=False}", "keepdims=False", 5, 20, "is not closed"),
    ("{axes=(1,), keepdims=False}", "{axes}", 5, 21, "attributes are written"),
    ('approximate="tanh"', 'approximate="tan"', 6, 3, "approximate='tan' is not one of"),
    ('approximate="tanh"', "approximate=tanh", 6, 3, "approximate=tanh is not one of"),
    ('expr="mul(x0, 2.0)"', 'expr="mul(x0"', 7, 3, "is not a pointwise expression"),
    ('expr="mul(x0, 2.0)"', 'expr="mul(x0, 2.0, 3.0)"', 7, 3, "got 3 operands"),
    ("shape=(2*n, 2)", "shape=(n, 2)", 8, 3, "has 4*n elements"),
    ("shape=(2*n, 2)", "shape=2", 8, 3, "do not fit"),
    ("  return %pointwise, %reshape\n", "", 9, 1, "expected `%result = op"),
    ("  return %pointwise, %reshape\n}\n", "", 9, 1, "`}` is missing"),
    ("return %pointwise", "return %nothing", 9, 10, "%nothing is not defined"),
    ("return %pointwise", "return %pointwise -> %w", 9, 24, "%w is not an input"),
    ("}\n", "}\ngraph h() {", 11, 1, "text after the end"),
    ("%reshape\n}", "%reshape\n]", 10, 1, "expected `}` after return"),
]


def test_the_text_itself_is_good() -> None:
    assert print_graph(parse_graph(GOOD)) == GOOD


@pytest.mark.parametrize(("old", "new", "line", "column", "message"), BAD, ids=[f"{b[4]}|{b[1]:.60}" for b in BAD])
def test_errors_name_line_and_column(old: str, new: str, line: int, column: int, message: str) -> None:
    place = GOOD.rindex(old) if old == "}\n" else GOOD.index(old)
    text = GOOD[:place] + new + GOOD[place + len(old) :]
    with pytest.raises(ParseError, match=re.escape(message)) as caught:
        parse_graph(text)
    assert caught.value.what.startswith(f"line {line}, column {column}: "), caught.value.what
    shown = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else "end of text"
    assert caught.value.where == shown


def test_sizes_in_brackets_are_no_tuples() -> None:
    n = symbol("n")
    for size in ((n + 1) // 2, ((n + 1) // 2) * ((n + 2) // 3), (n + 1) // 2 + 3):
        line = f"%y = arange() {{length={size}, start={size}, dtype=i64}} : i64[{size}]"
        text = f"graph g() {{\n  {line}\n  return %y\n}}\n"
        assert print_graph(parse_graph(text)) == text


def test_strings_may_end_with_a_backslash() -> None:
    """JSON writes it twice: the quote behind it ends the string."""
    assert _pieces(r'a="\\", b="\",", c=(1, 2)') == [r'a="\\"', r'b="\","', "c=(1, 2)"]
    assert _closing(r'{a="\\"} {') == 7


@pytest.mark.parametrize("text", ["", "\n\n", "// only a comment\n"])
def test_nothing_to_parse(text: str) -> None:
    with pytest.raises(ParseError, match="`}` is missing"):
        parse_graph(text)


SNIPPETS = st.sampled_from(list('%,()[]{}=:"_ \\') + ["->", "None", "inf", "f32", "//", "@", "b''", "1e999", "\n", "é"])


@given(st.data())
def test_damaged_text_never_fails_otherwise(data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 4))
        text = text[:at] + data.draw(SNIPPETS) + text[at + gone :]
    try:
        graph = parse_graph(text)
    except ParseError as error:
        assert re.match(r"line \d+, column \d+: ", error.what), error.what
    else:
        assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)
