"""The source of four small plans, word for word, so that a change of generated code shows in a diff.

`pytest tests/codegen/test_golden_source.py --golden-update` records all of them anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target, cuda_target
from monoplan.frontend.tracer import Trace, trace
from monoplan.ir.graph import Graph
from monoplan.models import LlamaForCausalLM
from monoplan.models.generate.generation import step_specs
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from tests import golden_text
from tests.integration.support import small_config
from tests.modules import Block, GPT2Block

# Targets that are the same on every machine.
AVX2, H200 = cpu_target("avx2", 32), cuda_target(90, 132, 232448, library=True)


class Variance(nn.Module):
    """A reduction with something before and behind it."""

    def forward(self, x: mp.Tensor) -> mp.Tensor:
        return F.sqrt(((x - x.mean(dim=-1, keepdim=True)) ** 2).mean(dim=-1) + 1e-5)


def llama() -> Trace:
    config = small_config(layers=2)
    model = LlamaForCausalLM.from_config(config, seed=0)
    return trace(model.generation_step(), **step_specs(config, model.dtype))


PLANS: dict[str, Callable[[], Trace]] = {
    "block": lambda: trace(Block(256, 1024), mp.spec("batch", "seq", 256)),
    "gpt2_block": lambda: trace(GPT2Block(64, 4), mp.spec("batch", "seq", 64)),
    "llama": llama,
    "reduction": lambda: trace(Variance(), mp.spec("rows", 100)),
}


def graph_of(name: str) -> Graph:
    """After all passes. Numbers of lines are left out: they change with every edit above them."""
    graph = PLANS[name]().graph
    ops = tuple(dataclasses.replace(op, loc=dataclasses.replace(op.loc, line=0)) for op in graph.ops)
    return run_passes(graph.replace(ops=ops), PIPELINE)[-1].graph


@pytest.mark.parametrize("name", PLANS)
def test_c(name: str, request: pytest.FixtureRequest) -> None:
    source = render_cpu(make_plan(graph_of(name), AVX2), "test")
    golden_text.compare(request, golden_text.FOLDER / "source" / f"{name}.c", source.text)
    assert all(len(line) <= 120 for line in (source.head + source.tail).splitlines())


@pytest.mark.parametrize("name", PLANS)
def test_cuda(name: str, request: pytest.FixtureRequest) -> None:
    """The steps with their variants, and the kernels; not the headers, which lie in codegen/cuda/include."""
    source = render_cuda(make_plan(graph_of(name), H200), "test")
    head = source.text[: source.text.index("*/") + 3]
    kernels = "\n".join(f"{f.comment}\n{f.text}" for f in source.functions)
    text = f"{head}\n{kernels}"
    golden_text.compare(request, golden_text.FOLDER / "source" / f"{name}.cu", text)
    assert all(len(line) <= 120 for line in text.splitlines())
