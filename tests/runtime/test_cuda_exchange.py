"""Ranks of CUDA plans that meet on the host: the same logits as one rank, on the emulator and on one GPU for two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.codegen.plan_cuda import make_cuda_plan
from monoplan.codegen.render_cuda import render_cuda
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import PlanError
from monoplan.ir.interpreter import bind_symbols
from monoplan.ir.types import bf16
from monoplan.models import LlamaForCausalLM
from monoplan.models.generation import step_specs
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from monoplan.passes.shard import shard_pass
from monoplan.runtime.comm import Communicator, run_ranks, threads
from monoplan.runtime.cuda import CudaExecutable
from monoplan.runtime.cuda_exchange import ExchangeSpec, exchange
from monoplan.runtime.cuda_weights import upload_params
from tests.codegen import cuda_emulator
from tests.models.support import tiny_config

Array = np.ndarray[Any, Any]
IDS = np.array([[5, 9, 40, 7, 11, 3]])


@pytest.mark.parametrize("dtype", [np.float32, bf16.numpy])
def test_sums_and_gathers(dtype: Any) -> None:
    """Memory of the emulated device is the host's: addresses are those of arrays."""
    parts = [np.random.default_rng(r).standard_normal((3, 5)).astype(dtype) for r in range(2)]

    def work(c: Communicator) -> tuple[Array, Array]:
        device = cuda_emulator.EmulatedDevice()
        x, y, z = parts[c.rank].copy(), np.zeros((3, 5), dtype), np.zeros((3, 2, 5), dtype)
        place = [a.__array_interface__["data"][0] for a in (x, y, z)]
        exchange(device, c, ExchangeSpec(place[0], place[1], 3, 5, False, x.dtype))
        exchange(device, c, ExchangeSpec(place[0], place[2], 3, 5, True, x.dtype))
        return y, z

    for total, joined in run_ranks(threads(2), work):
        wide = parts[0].astype(np.float32) + parts[1].astype(np.float32)
        assert np.array_equal(total, wide.astype(dtype))
        assert np.array_equal(joined, np.stack(parts, axis=1))
    with pytest.raises(PlanError, match="has no communicator"):
        exchange(cuda_emulator.EmulatedDevice(), None, ExchangeSpec(0, 0, 1, 1, False, np.dtype(np.float32)))


@pytest.mark.skipif(not cuda_emulator.available(), reason="no g++")
def test_a_divided_llama_on_the_emulator() -> None:
    model = LlamaForCausalLM.from_config(tiny_config(), seed=1)
    traced = trace(model.generation_step(), **step_specs(model.config, model.dtype))
    graph = traced.graph.replace(writes=traced.mutated)
    arguments = mp.compile(model).step_arguments(IDS)
    given = [a.numpy() if isinstance(a, mp.Tensor) else np.asarray(a) for a in _leaves(arguments)]
    wanted = mp.compile(model, options={"threads": 1})(IDS)

    def work(c: Communicator) -> Array:
        final = run_passes(graph, [shard_pass(model.tp_plan, c.rank, c.size), *PIPELINE])[-1].graph
        device = cuda_emulator.EmulatedDevice()
        plan = make_cuda_plan(final, device.target)
        params = upload_params(plan, lambda path: traced.params[path].numpy(), device)
        made = CudaExecutable(plan, render_cuda(plan, "test"), params, device)
        made.comm = c
        assert not made.graphs and "exchange of" in made.source.text
        local = [a[:, : v.type.shape[1]].copy() if a.ndim == 4 else a for a, v in zip(given, final.inputs, strict=True)]
        symbols = bind_symbols(final.inputs, [a.shape for a in local])
        return made.run(local, symbols)[2]

    for logits in run_ranks(threads(2), work):
        np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def _leaves(arguments: dict[str, Any]) -> list[Any]:
    from monoplan.frontend.pytree import flatten

    return [leaf for _, leaf in flatten(arguments)[0]]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_on_one_gpu(dtype: str) -> None:
    model = LlamaForCausalLM.from_config(tiny_config(hidden_size=128, intermediate_size=256, dtype=dtype), seed=1)
    alone = mp.compile(model, target="cuda")
    wanted, text = alone(IDS), alone.generate_ids(IDS[0], 16, eos_token_id=())

    def work(c: Communicator) -> Any:
        llm = mp.compile(model, target="cuda", tp=c)
        return llm(IDS), llm.generate_ids(IDS[0], 16, eos_token_id=())

    results = run_ranks(threads(2), work)
    limit = (1e-5 if dtype == "float32" else 2e-2) * np.abs(wanted).max()
    for logits, ids in results:
        assert np.abs(logits - wanted).max() <= limit and logits.tobytes() == results[0][0].tobytes()
        assert dtype != "float32" or ids == text
