"""Plans of small LLaMAs, with and without a compiler."""

from __future__ import annotations

from typing import Any

from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.plan import Plan, make_plan
from monoplan.codegen.source import Source
from monoplan.codegen.target import cpu_target
from monoplan.frontend.tracer import trace
from monoplan.ir.graph import Graph
from monoplan.models import LlamaConfig, LlamaForCausalLM
from monoplan.models.generate.generation import step_specs
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE

TARGET = cpu_target("avx2", 32)


def small_config(layers: int = 3, **changes: Any) -> LlamaConfig:
    """Four heads over two, 64 tokens of context, and weights large enough for the logits to differ."""
    small: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_bias": False,
        "initializer_range": 0.3,
        "eos_token_id": None,
    }
    return LlamaConfig(**{**small, **changes})


def step_graph(config: LlamaConfig) -> Graph:
    """The graph of a generation step after all passes."""
    model = LlamaForCausalLM.from_config(config, seed=0)
    traced = trace(model.generation_step(), **step_specs(config, model.dtype))
    return run_passes(traced.graph, PIPELINE)[-1].graph


def step_plan(config: LlamaConfig) -> tuple[Plan, Source]:
    """Plan and source of a generation step, for a machine that need not be this one."""
    plan = make_plan(step_graph(config), TARGET)
    return plan, render_cpu(plan, "test")
