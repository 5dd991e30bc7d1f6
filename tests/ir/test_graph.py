"""Graphs: readers, definitions, networkx and DOT."""

from __future__ import annotations

import dataclasses

import networkx as nx
import pytest

from monoplan.ir.builder import Builder, build_graph
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.graph import Graph, Loc, definitions, readers, to_dot, to_networkx
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.ops.elementwise import add, exp, mul
from monoplan.ir.ops.linear import linear
from monoplan.ir.types import tensor_type


def residual() -> Graph:
    def body(x, w):  # type: ignore[no-untyped-def]
        y = linear(exp(x), w)
        return add(y, x), mul(y, y)

    return build_graph("g", body, {"x": tensor_type("f32", "n", 4)}, {"w": tensor_type("f32", 4, 4)})


def test_definitions_and_readers() -> None:
    graph = residual()
    e, line, total, square = graph.ops
    x = graph.inputs[0]
    assert definitions(graph) == {op.result: op for op in graph.ops}
    found = readers(graph)
    assert found[x] == [e, total] and found[line.result] == [total, square, square]
    assert found[total.result] == [None]
    assert list(graph.values) == [x, graph.params[0].value, *(op.result for op in graph.ops)]


def test_graphs_are_frozen() -> None:
    graph = residual()
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.name = "other"  # type: ignore[misc]
    assert graph.replace(name="other").name == "other" and graph.name == "g"


def test_networkx() -> None:
    graph = residual()
    dag = to_networkx(graph)
    assert nx.is_directed_acyclic_graph(dag)
    kinds = sorted(data["kind"] for _, data in dag.nodes(data=True))
    assert kinds == ["input"] * 2 + ["op"] * 4 + ["output"] * 2
    # exp, linear, then add or mul, then the output.
    assert nx.dag_longest_path_length(dag, weight=None, default_weight=1) == 4
    assert set(nx.descendants(dag, graph.params[0].value)) >= set(graph.ops[1:])


def test_dot_is_deterministic_and_quoted() -> None:
    text = to_dot(residual())
    assert text == to_dot(residual())
    assert text.startswith('digraph "g" {\n') and text.endswith("}\n")
    assert '[label="linear", shape=box]' in text and '[label="%x : f32[n, 4]", shape=ellipse]' in text
    assert '"return %add"' in text and text.count(" -> ") == 8
    assert 'digraph "a\\"b"' in to_dot(residual().replace(name='a"b'))


def test_locations_print() -> None:
    assert str(Loc()) == "" and str(Loc("a.b")) == "a.b" and str(Loc("", "f.py", 2)) == "f.py:2"


def test_builders() -> None:
    with pytest.raises(TypeRuleError, match="outside of a Builder"):
        exp(residual().inputs[0])
    graph = residual()
    with Builder() as outer:
        exp(graph.inputs[0])
        with Builder() as inner:
            exp(graph.inputs[0])
        exp(graph.inputs[0])
    assert len(outer.ops) == 2 and len(inner.ops) == 1


def test_type_errors_carry_the_location() -> None:
    b = Builder()
    b.loc = Loc("model", "user.py", 7)
    x = residual().inputs[0]
    with pytest.raises(TypeRuleError, match="user.py:7 in model"):
        b.emit(REGISTRY["matmul"], [x, x], {})
