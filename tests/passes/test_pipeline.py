"""The whole pipeline over random graphs: numbers equal the interpreter's, text reads back, fusions are convex."""

from __future__ import annotations

import pytest

from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.verifier import verify
from monoplan.passes.manager import Notes, run_passes
from monoplan.passes.pipeline import PIPELINE, UNFUSED
from monoplan.passes.rebuild import drop_dead
from tests.matrices import partly
from tests.passes.random_graphs import random_graph
from tests.passes.support import same_numbers


def check(seed: int) -> None:
    graph = random_graph(seed)
    verify(graph)
    stages = run_passes(graph, PIPELINE, check=True)
    for stage in (s for s in stages if s.changed):
        text = print_graph(stage.graph)
        assert print_graph(parse_graph(text)) == text, f"{stage.name} does not read back"
    same_numbers(graph, stages[-1].graph, seed)
    same_numbers(graph, run_passes(graph, UNFUSED)[-1].graph, seed)


@pytest.mark.parametrize("seed", partly(range(60), lambda seed: seed % 2 == 0))
def test_random_graph(seed: int) -> None:
    check(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(60, 560))
def test_many_random_graphs(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", partly(range(0, 60, 6), lambda seed: seed % 12 == 0))
def test_every_pass_alone_is_right_and_idempotent(seed: int) -> None:
    graph = drop_dead(random_graph(seed))  # a dead op counts as a reader
    for p in PIPELINE:
        after = p.apply(graph, Notes())
        verify(after)
        same_numbers(graph, after, seed)
        again = Notes()
        assert print_graph(p.apply(after, again)) == print_graph(after), f"{p.name}: a second run changes something"
        assert again.rewrites == 0, p.name


def test_random_graphs_reach_every_pass() -> None:
    """A generator that never makes a pass fire would test nothing."""
    fired: set[str] = set()
    for seed in range(60):
        fired |= {s.name for s in run_passes(random_graph(seed), PIPELINE) if s.rewrites}
    assert fired >= {p.name for p in PIPELINE}
