"""Looking into a plan for a GPU: on the emulator everywhere, on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monoplan.codegen import source
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.plan import make_plan
from monoplan.inspect.bisect import bisect
from monoplan.inspect.verify import Subject, verify
from monoplan.inspect.walk import example_inputs, example_params
from monoplan.ir.parser import parse_graph
from monoplan.runtime.cuda.executable import CudaExecutable
from monoplan.runtime.cuda.weights import upload_params
from tests.codegen import cuda_emulator
from tests.needs import needs
from tests.runtime.subjects import graph_subject
from tests.runtime.test_bisect import CASES, mutated

TEMPLATES = source.HERE / "cuda" / "templates"
DEVICES = [pytest.param("emulator", marks=needs("g++")), pytest.param("gpu", marks=pytest.mark.cuda)]
TEXT = """graph g(%x: f32[5, 24], %z: f32[5, 40]) {
  param %w: f32[40, 24] = "w"
  %a = linear(%x, %w, _) : f32[5, 40]
  %b = pointwise(%a, %z) {expr="add(silu(x0), x1)"} : f32[5, 40]
  %y = softmax(%b) {axis=-1} : f32[5, 40]
  return %y
}"""


def device(name: str) -> Any:
    if name == "gpu":
        from monoplan.runtime.cuda.device import gpu

        return gpu()
    return cuda_emulator.EmulatedDevice(90, library=True)


def subject(text: str, name: str) -> Subject:
    graph = parse_graph(text)
    inputs, params = example_inputs(graph), example_params(graph)
    for v, a in zip(graph.inputs, inputs, strict=True):
        if v.name == "l":
            a[...] = 2
    where = device(name)
    plan = make_plan(graph, where.target)
    weights = upload_params(plan, lambda path: params[path], where)
    return graph_subject(graph, inputs, params, CudaExecutable(plan, render_cuda(plan, "test"), weights, where))


@pytest.mark.parametrize("name", DEVICES)
def test_every_step_is_compared(name: str) -> None:
    found = verify(subject(TEXT, name), nodes=True)
    assert found.ok and [r.name for r in found.nodes] == ["%a", "%b", "%y"], str(found)
    assert all(r.difference.ok for r in found.nodes), str(found)


@pytest.mark.parametrize("name", DEVICES)
def test_state_that_is_written_in_place(name: str, tmp_path: Path) -> None:
    examined = subject(CASES["_epilogue_heads"][1], name)
    before = [a.copy() for a in examined.inputs]
    assert bisect(examined, tmp_path / "found").ok
    assert all(np.array_equal(a, b) for a, b in zip(before, examined.inputs, strict=True))


PLANTED = [
    "softmax",
    "gather",
    "kv_update",
    "matmul",
    "norm_short",
    "pointwise",
    "reduce",
    "rope",
    "scan",
    "sort",
    "sample",
]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    "template", [pytest.param(t, marks=[pytest.mark.nightly] if i else []) for i, t in enumerate(PLANTED)]
)
def test_a_wrong_kernel_is_named(name: str, template: str, templates: dict[str, str], tmp_path: Path) -> None:
    family, text = CASES[{"norm_short": "_norm_row", "reduce": "_reduce_rows"}.get(template, template)]
    templates[f"cuda/{template}.cu.j2"] = mutated(template, (TEMPLATES / f"{template}.cu.j2").read_text())
    found = bisect(subject(text, name), tmp_path / "found")
    assert (found.kind, found.name) == ("kernel", family), found
    assert found.folder is not None
    assert '"cuda"' in (found.folder / "repro.py").read_text()
    assert found.summary.split(", ")[1].split("(")[0] in (found.folder / "plan.cu").read_text()


@pytest.mark.parametrize("name", DEVICES)
def test_times_of_each_step(name: str) -> None:
    examined = subject(TEXT, name)
    order, times, plain, together = examined.probe.profile_times(examined.fresh_inputs(), examined.symbols, 3)
    assert [number for number, _ in order] == [0, 1, 2]
    assert times.shape == (1, 3) and together == pytest.approx(times.sum())
    assert name == "emulator" or ((times > 0).all() and plain > 0)  # the emulator's clock stands still
