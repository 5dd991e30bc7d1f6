"""Random expression graphs: compiled equals interpreted, and their text reads back as itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from monoplan.driver import build_graph_executable
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.verifier import verify
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from tests.codegen.random_graphs import Grower

BATCH = 10  # graphs that share one compiler run
SIZES = ({"b": 2, "s": 4}, {"b": 1, "s": 1})
QUICK = settings(
    max_examples=10,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
)
LONG = settings(QUICK, max_examples=100, derandomize=False)


@st.composite
def growers(draw: Any, count: int) -> Grower:
    g = Grower(lambda options: options[draw(st.integers(0, len(options) - 1))] if len(options) > 1 else options[0])
    for _ in range(count):
        g.graph(steps=draw(st.integers(1, 12)))
    return g


def check(g: Grower, compiled: Graph, original: Graph) -> None:
    """Runs the graph at several sizes; every output within the bound that the grower derived."""
    rng = np.random.default_rng(7)
    params = {v.name: g.array(v, {}, rng) for v in g.params}
    run = build_graph_executable(compiled, params)
    for sizes in SIZES:
        inputs = [g.array(v, sizes, rng) for v in g.inputs]
        got, want = run(inputs), interpret(original, inputs, params, exact=True)
        for n, a, b in zip(g.outputs, got, want, strict=True):
            assert a.dtype == n.dtype.numpy and a.shape == b.shape
            if not n.dtype.is_float:
                assert np.array_equal(a, b), f"{n.value}: got\n{a}\nexpected\n{b}\n{part(original, n.value)}"
                continue
            with np.errstate(all="ignore"):
                off = np.abs(a.astype(np.float64) - b)
            bad = ~((off <= 4 * n.error) | (a == b) | (np.isnan(a.astype(np.float64)) & np.isnan(b)))
            assert not bad.any(), (
                f"{n.value} at {sizes}: off by {np.max(off)}, allowed {4 * n.error}\n"
                f"got {a[bad][:4]}, expected {b[bad][:4]}\n{part(original, n.value)}"
            )


def part(graph: Graph, value: Any) -> str:
    """The ops that make one value, for the message of a failure."""
    wanted, kept = {value}, []
    for op in reversed(graph.ops):
        if wanted.intersection(op.results):
            wanted.update(op.reads)
            kept.append(op)
    inputs = tuple(v for v in graph.inputs if v in wanted)
    params = tuple(p for p in graph.params if p.value in wanted)
    return print_graph(graph.replace(inputs=inputs, params=params, ops=tuple(reversed(kept)), outputs=(value,)))


def roundtrip(graph: Graph) -> None:
    verify(graph)
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text


def unfused(g: Grower) -> None:
    graph = g.finish()
    roundtrip(graph)
    check(g, graph, graph)


def fused(g: Grower) -> None:
    graph = g.finish()
    final = run_passes(graph, PIPELINE)[-1].graph
    roundtrip(final)
    check(g, final, graph)


@settings(QUICK, max_examples=2)
@given(growers(BATCH))
def test_graphs(g: Grower) -> None:
    unfused(g)


@settings(QUICK, max_examples=2)
@given(growers(BATCH))
def test_fused_graphs(g: Grower) -> None:
    fused(g)


@pytest.mark.full
@QUICK
@given(growers(BATCH))
def test_more_graphs(g: Grower) -> None:
    unfused(g)


@pytest.mark.full
@settings(QUICK, max_examples=5)
@given(growers(BATCH))
def test_more_fused_graphs(g: Grower) -> None:
    fused(g)


@pytest.mark.nightly
@LONG
@given(growers(BATCH))
def test_many_graphs(g: Grower) -> None:
    unfused(g)


@pytest.mark.nightly
@LONG
@given(growers(BATCH))
def test_many_fused_graphs(g: Grower) -> None:
    fused(g)
