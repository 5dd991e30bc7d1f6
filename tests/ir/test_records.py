"""Graphs and other frozen dataclasses as JSON: equal, shared as before, and nothing but data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monoplan.ir import records
from monoplan.ir.dims import Expr, FloorDiv, as_dim
from monoplan.ir.graph import Graph, Loc, Op, Param, Value
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.types import TensorType, bf16, tensor_type

CLASSES = (Graph, Param, Op, Value, Loc, TensorType, Expr, FloorDiv)


@dataclass(frozen=True, kw_only=True)
class Base:
    first: int
    kind: str = field(default="", init=False)


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    second: Any = None
    kind: str = field(default="derived", init=False)


def through(value: Any, classes: tuple[type, ...] = CLASSES) -> Any:
    return records.load(json.loads(json.dumps(records.dump(value, classes))), classes)


def small_graph() -> Graph:
    x, w = Value(tensor_type("f32", "n", 4), "x"), Value(tensor_type("f32", 3, 4), "w")
    from monoplan.ir.builder import Builder
    from monoplan.ir.opdef import REGISTRY
    from monoplan.ir.ops import linear  # noqa: F401

    with Builder(taken=["x", "w"]) as b:
        b.loc = Loc("a", "file.py", 3)
        y = REGISTRY["linear"](x, w)
    return Graph("g", (x,), (Param(w, "a.b"),), tuple(b.ops), (y,))


def test_a_graph_is_the_same_graph() -> None:
    graph = small_graph()
    again = through(graph)
    assert print_graph(again, locs=True) == print_graph(graph, locs=True)
    assert parse_graph(print_graph(again)).name == "g"
    (op,) = again.ops
    assert op.operands[0] is again.inputs[0] and op.results[0] is again.outputs[0] and op.loc == Loc("a", "file.py", 3)
    assert op.opdef is graph.ops[0].opdef


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_plain_values(value: Any) -> None:
    assert repr(through(value)) == repr(value)  # repr tells 1, 1.0 and True apart, and 0.0 from -0.0


def test_special_values() -> None:
    inf, nan, dims = math.inf, math.nan, (as_dim("n+3"), as_dim("(n+1)//2*seq"))
    back = through((inf, -inf, nan, bf16, frozenset({"a", "b"}), dims))
    assert back[:2] == (inf, -inf) and math.isnan(back[2]) and back[3] is bf16
    assert back[4] == {"a", "b"} and back[5] == dims


def test_keyword_fields_and_fields_that_follow_from_the_class() -> None:
    value = Derived(first=1, second=(2,))
    assert through(value, (Derived,)) == value


def test_what_is_not_on_the_list_is_refused() -> None:
    for value in (object(), Derived(first=1), len, CLASSES[0], b"bytes", 1j):
        with pytest.raises(records.RecordError, match="can't be kept"):
            records.dump(value, CLASSES)
    table = records.dump(Derived(first=1), (*CLASSES, Derived))
    with pytest.raises(records.RecordError):
        records.load(table, CLASSES)


tables = st.lists(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.text(max_size=3)
    | st.lists(st.integers(-3, 12) | st.sampled_from(["tuple", "dict", "op", "dtype", "set", "list", "add", "f32"])),
    max_size=12,
)


@given(tables)
def test_a_table_that_stands_for_nothing_raises_one_error(table: list[Any]) -> None:
    try:
        records.load(table, CLASSES)
    except records.RecordError:
        pass


@pytest.mark.parametrize("table", [None, 3, {}, [], [[]], [["call"]], [[99]], [[0, 1]], [["op", 0]], "x"])
def test_tables_that_are_no_tables(table: Any) -> None:
    try:
        value = records.load(table, CLASSES)
    except records.RecordError:
        return
    assert value == "x" == table  # the one scalar among them
