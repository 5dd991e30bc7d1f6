"""The compiler that GPUs' sources are given to at run time takes them: nvcc and the emulator take more than it does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from monoplan.codegen.cuda.launches import Launch
from monoplan.codegen.cuda.render import render_cuda, with_headers
from monoplan.codegen.formats import FORMATS, WeightFormat
from monoplan.codegen.formats.blocks import BLOCK_FORMATS, Blocks
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import Target, cuda_target
from monoplan.ir.builder import build_graph
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import DTYPES, TensorType, tensor_type
from tests import nvrtc
from tests.codegen.cases import CASES
from tests.codegen.test_cuda_llama import MODELS, model
from tests.codegen.test_ops import graph_of
from tests.matrices import partly
from tests.needs import needs

H200, T4 = cuda_target(90, 132, 232448, library=True), cuda_target(75, 40, 65536)
# Intermediate code only, without its optimization: what is refused is refused before.
FLAGS = ("--std=c++17", "-diag-suppress=177,550", "--Ofast-compile=max")


def refused(source: str, arch: str) -> str:
    return nvrtc.refusal(source, (*FLAGS, f"--gpu-architecture=compute_{arch}"))


@needs("nvrtc")
def test_a_wrong_source_is_refused() -> None:
    assert "error" in refused('extern "C" __global__ void f() { undefined(); }', "90a")


@needs("nvrtc")
@pytest.mark.parametrize(("dtype", "arch"), [("bf16", "90a"), ("f32", "90a"), ("f16", "75")])
def test_every_op_is_taken(dtype: str, arch: str) -> None:
    target: Target = H200 if arch == "90a" else T4
    cases = [c for c in CASES if c.accepts(DTYPES[dtype])]
    plan = make_plan(graph_of(cases, dtype)[0], target)
    assert refused(render_cuda(plan, "test").text, arch) == ""


@pytest.mark.parametrize("kind", ["every op", *partly(MODELS, lambda kind: kind == "bf16")])
def test_only_kernels_that_say_so_report_errors(kind: str) -> None:
    """A host that does not wait for the end of a run relies on it."""
    cases = [c for c in CASES if c.accepts(DTYPES["f32"])]
    plan = make_plan(graph_of(cases, "f32")[0] if kind == "every op" else model(kind)[0], H200)
    source = render_cuda(plan, "test")
    texts = {f.name: f.text for f in source.functions}
    reporting = set()
    for step, _ in plan.steps():
        launches = [a for v in source.variants[step.number] for a in v.actions if isinstance(a, Launch)]
        if any(re.search(r"\berror\b(?!,\s*const int64_t step)", texts[a.function]) for a in launches):
            assert step.kernel.reports, step.kernel.op
            reporting.add(step.kernel.family)
    assert "gather" in reporting


@needs("nvrtc")
@pytest.mark.parametrize("kept", [f for f in FORMATS if f.cuda_pack], ids=lambda f: f.name)
def test_kernels_that_pack_are_taken(kept: WeightFormat) -> None:
    assert refused(with_headers([], kept.pack_text()), "90a") == ""


@needs("nvrtc")
@pytest.mark.parametrize("kind", partly(MODELS, lambda kind: kind == "bf16"))
def test_language_models_are_taken(kind: str) -> None:
    assert refused(render_cuda(make_plan(model(kind)[0], H200), "test").text, "90a") == ""


@needs("nvrtc")
@pytest.mark.parametrize("f", partly(BLOCK_FORMATS, lambda f: f.name == "fp8_128"), ids=lambda f: f.name)
def test_products_and_lookups_of_blocks_are_taken(f: Blocks) -> None:
    def forward(x: Any, ids: Any, w: Any) -> Any:
        return REGISTRY["linear"](x, w), REGISTRY["embedding"](ids, w)

    inputs = {"x": tensor_type("bf16", "n", 512), "ids": tensor_type("i64", "m")}
    graph = build_graph("table", forward, inputs, {"w": TensorType(f.dtype, (40, 512))})
    assert refused(render_cuda(make_plan(graph, H200), "test").text, "90a") == ""
