"""Products on the CPU: every way that rows and columns are shared out gives the same bits, in every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monoplan.build import build_graph_executable
from monoplan.codegen.schedule_linear import PART, TILE_PART
from monoplan.ir.builder import build_graph
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import DTYPES, tensor_type
from monoplan.runtime.cpu import host_target
from monoplan.runtime.features import detect, levels, machine, read_cpu
from tests.tolerances import check

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [isa for isa in (*levels(machine(), read_cpu()[1]), "tiles") if isa != detect().isa]
ROWS = (1, 5, 33, 2 * PART - 1, 2 * PART + 7, 2 * TILE_PART, 2 * TILE_PART + 65)  # few, columns shared, rows shared
THREADS = (1, 2, 3, 4, 6)


def check_rows(dtype: str, depth: int, columns: int) -> None:
    """For every number of rows: right, and the same bits for any number of threads; the best column as well."""
    types = {"x": tensor_type("f32", "n", depth)}

    def forward(x: Any, w: Any) -> Any:
        return [REGISTRY["linear"](x, w), REGISTRY["linear_argmax"](x, w)]

    graph = build_graph("product", forward, types, {"w": tensor_type(dtype, columns, depth)})
    rng = np.random.default_rng(depth)
    w = (rng.standard_normal((columns, depth)) * depth**-0.5).astype(DTYPES[dtype].numpy)
    run = build_graph_executable(graph, {"w": w})
    for rows in ROWS:
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        got = []
        for run.executable.threads in THREADS:
            got.append([a.copy() for a in run([x])])
            same = [a.tobytes() == b.tobytes() for a, b in zip(got[-1], got[0], strict=True)]
            assert all(same), f"{rows} rows, {run.executable.threads} threads: other bits"
        product, best = got[0]
        kept = dtype if host_target().has_tiles else "f32"  # tile units round x to bf16
        exact = interpret(graph, [x], {"w": w}, exact=True)[0]
        check(product.astype(DTYPES[kept].numpy), exact, kept, "matmul", 2.0)
        np.testing.assert_array_equal(best, product.argmax(-1))


def check_pair(depth: int, inner: int) -> None:
    """A gated product and the one behind it: what the first hands over, for few rows and for many."""
    types = {"x": tensor_type("f32", "n", depth)}
    params = {
        "both": tensor_type("bf16", 2 * inner, depth), "gamma": tensor_type("bf16", depth),
        "down": tensor_type("bf16", depth, inner),
    }  # fmt: skip

    def forward(x: Any, both: Any, gamma: Any, down: Any) -> Any:
        fused = REGISTRY["fused_linear"]
        made = fused(x, both, None, gamma, None, norm="rms", eps=1e-5, gated=True, expr="swiglu(x0, x1)")
        return fused(made, down, None, None, None, x, norm="none", eps=0.0, gated=False, expr="add(x0, x1)")

    graph = build_graph("pair", forward, types, params)
    rng = np.random.default_rng(depth)
    arrays = {
        name: (rng.standard_normal(t.shape) * t.shape[-1] ** -0.5).astype(t.dtype.numpy) for name, t in params.items()
    }
    run = build_graph_executable(graph, arrays)
    handed = [b for b in run.executable.plan.arena.slot_of if b.tiled]
    assert len(handed) == host_target().has_tiles  # as tiles where there are tile units
    for rows in (1, 12, 13, 15, 16, 17, 33, *ROWS):
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        got = []
        for run.executable.threads in THREADS:
            got.append(run([x])[0].copy())
            assert got[-1].tobytes() == got[0].tobytes(), f"{rows} rows, {run.executable.threads} threads: other bits"
        kept = "bf16" if host_target().has_tiles else "f32"
        check(got[0].astype(DTYPES[kept].numpy), interpret(graph, [x], arrays, exact=True)[0], kept, "matmul", 4.0)


def check_gated(depth: int, inner: int) -> None:
    """Gates and what they let through, of a number that fills no panel."""
    types = {"x": tensor_type("f32", "n", depth)}

    def forward(x: Any, w: Any) -> Any:
        return REGISTRY["fused_linear"](x, w, norm="none", eps=0.0, gated=True, expr="swiglu(x0, x1)")

    graph = build_graph("gated", forward, types, {"w": tensor_type("bf16", 2 * inner, depth)})
    rng = np.random.default_rng(inner)
    w = (rng.standard_normal((2 * inner, depth)) * depth**-0.5).astype(DTYPES["bf16"].numpy)
    run = build_graph_executable(graph, {"w": w})
    kept = "bf16" if host_target().has_tiles else "f32"
    for rows in ROWS:
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        exact = interpret(graph, [x], {"w": w}, exact=True)[0]
        for run.executable.threads in THREADS:
            check(run([x])[0].astype(DTYPES[kept].numpy), exact, kept, "matmul", 4.0)


def check_all() -> None:
    check_rows("f32", 40, 100)
    check_rows("bf16", 64, 100)
    check_rows("bf16", 1088, 160)  # more than one strip of k for tile units
    check_pair(64, 96)
    check_pair(96, 1120)
    check_gated(64, 36)


def test_this_instruction_set() -> None:
    check_all()


@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets(isa: str) -> None:
    program = """
        from tests.codegen.test_linear import check_all
        check_all()
    """
    env = {**os.environ, "MONOPLAN_ISA": isa, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
