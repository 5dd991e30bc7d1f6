"""Random graphs compiled and run: fused and unfused plans against the float64 interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.driver import build_graph_executable
from monoplan.ir.interpreter import interpret
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE, UNFUSED
from tests.matrices import partly
from tests.passes.random_graphs import random_graph
from tests.passes.support import random_arguments, without_rounding
from tests.tolerances import check, check_no_worse


def check_seed(seed: int, fused: bool) -> None:
    graph = random_graph(seed)
    inputs, params = random_arguments(graph, seed)
    exact = interpret(without_rounding(graph), inputs, params, exact=True)
    plain = interpret(graph, inputs, params)
    final = run_passes(graph, PIPELINE if fused else UNFUSED)[-1].graph
    for v, got, wanted, reference in zip(
        graph.outputs, build_graph_executable(final, params)(inputs), exact, plain, strict=True
    ):
        dtype = v.type.dtype
        scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
        check(got, wanted, dtype, "model", scale)
        check_no_worse(got, reference, wanted, dtype, "matmul", scale)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("seed", partly([0, 4], lambda seed: seed == 0))
def test_random_plan(seed: int, fused: bool) -> None:
    check_seed(seed, fused)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_many_random_plans(seed: int) -> None:
    check_seed(seed, True)
