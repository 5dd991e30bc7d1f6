"""Ranks of CUDA plans that meet on the host: the same logits as one rank, on the emulator and on one GPU for two."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.plan import make_plan
from monoplan.frontend.tracer import trace
from monoplan.ir.builder import build_graph
from monoplan.ir.errors import PlanError
from monoplan.ir.interpreter import bind_symbols
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import address, as_dtype, tensor_type
from monoplan.models import LlamaForCausalLM
from monoplan.models.generate.generation import step_specs
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from monoplan.passes.shard.rewrite import shard_pass
from monoplan.runtime.cuda.executable import CudaExecutable, ExchangeSpec, exchange
from monoplan.runtime.cuda.weights import upload_params
from monoplan.runtime.ranks.comm import Communicator, threads
from tests.codegen import cuda_emulator
from tests.models.support import tiny_config
from tests.needs import needs
from tests.ranks import run_ranks
from tests.tolerances import check

Array = np.ndarray[Any, Any]
IDS = np.array([[5, 9, 40, 7, 11, 3]])


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_rank_gets_all_rows(rows: int) -> None:
    """Memory of the emulated device is the host's: addresses are those of arrays."""
    parts = [np.random.default_rng(r).standard_normal((rows, 5)).astype(np.float32) for r in range(2)]

    def work(c: Communicator) -> Array:
        x, y = parts[c.rank].copy(), np.zeros((rows, 2, 5), np.float32)
        spec = ExchangeSpec(address(x), address(y), rows, 5 * x.itemsize)
        exchange(cuda_emulator.EmulatedDevice(), c, spec)
        return y

    for joined in run_ranks(threads(2), work):
        assert np.array_equal(joined, np.stack(parts, axis=1))
    with pytest.raises(PlanError, match="has no communicator"):
        exchange(cuda_emulator.EmulatedDevice(), None, ExchangeSpec(0, 0, 1, 4))


class FakeNccl(Communicator):
    """Two ranks that have the same bytes, as NCCL would put them on the device: ranks first."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def gather_bytes(self, x: int, y: int, nbytes: int, stream: int) -> None:
        assert stream == 7
        for rank in range(2):
            cuda_emulator.EmulatedDevice().copy(y + rank * nbytes, x, nbytes)


class FakeStream:
    ptr = 7

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_put_together_on_the_device(rows: int) -> None:
    """The NCCL transport, with numpy in CuPy's place: it has the same calls, but for those that wrap an address."""
    x = np.random.default_rng(0).standard_normal((rows, 5)).astype(np.float32)
    y = np.zeros((rows, 2, 5), np.float32)

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        made = np.empty(shape, dtype)
        found = types.SimpleNamespace(data=types.SimpleNamespace(ptr=address(made)), swapaxes=made.swapaxes)
        return found

    memory = types.SimpleNamespace(UnownedMemory=lambda place, n, owner: (place, n), MemoryPointer=lambda m, at: m)
    cupy = types.SimpleNamespace(empty=empty, cuda=memory, ndarray=lambda shape, dtype, m: y.view(np.uint8))
    device = types.SimpleNamespace(cupy=cupy, stream=FakeStream())
    exchange(device, FakeNccl(), ExchangeSpec(address(x), address(y), rows, 20))
    assert np.array_equal(y, np.stack([x, x], axis=1))


@needs("g++")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_kernels(dtype: str) -> None:
    """Sums in rank order with a residual and a factor, and gathers along two axes, in each element type."""

    def forward(x: Any, r: Any, b: Any) -> Any:
        total = REGISTRY["fused_all_reduce"](x, r, b, world=3, expr="add(mul(x0, x2), x1)")
        return (
            REGISTRY["all_reduce"](x, world=3),
            total,
            REGISTRY["all_gather"](x, axis=-1, world=3),
            REGISTRY["all_gather"](x, axis=1, world=3),
        )

    kinds = {"x": tensor_type(dtype, "n", 3, 10), "r": tensor_type(dtype, "n", 3, 10), "b": tensor_type(dtype, 10)}
    graph = build_graph("exchange", forward, kinds)
    made = [np.random.default_rng(i).standard_normal((5, 3, 10)).astype(as_dtype(dtype).numpy) for i in range(4)]
    factor = made[3][0, 0]

    plan = make_plan(graph, cuda_emulator.EmulatedDevice().target)
    source = render_cuda(plan, "test")

    def work(c: Communicator) -> list[Array]:
        executable = CudaExecutable(plan, source, [], cuda_emulator.EmulatedDevice())
        executable.comm = c
        return executable.run([made[c.rank], made[3], factor], {"n": 5})

    results = run_ranks(threads(3), work)
    wide = [m.astype(np.float32) for m in made]
    total = (wide[0] + wide[1]) + wide[2]
    for got in results:
        check(got[0], total, dtype, "pointwise")
        tail = total * factor.astype(np.float32)
        check(got[1], tail + wide[3], dtype, "pointwise", scale=np.abs(tail) + np.abs(wide[3]))
        assert np.array_equal(got[2], np.concatenate(made[:3], -1))
        assert np.array_equal(got[3], np.concatenate(made[:3], 1))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, results[0], strict=True))


@needs("g++")
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
        plan = make_plan(final, device.target)
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


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3])
def test_nccl_carries_the_bytes_of_a_plan(rows: int) -> None:
    """A group of one: what comes back is what was given, in the order of the plan's own stream."""
    from monoplan.runtime.cuda.device import gpu
    from monoplan.runtime.ranks.comm import nccl

    comm, device = nccl(), gpu()
    x = np.random.default_rng(rows).standard_normal((rows, 5)).astype(as_dtype("bf16").numpy)
    y = np.zeros_like(x)
    given, got = device.allocate(x.nbytes), device.allocate(x.nbytes)
    device.upload(given.address, x)
    exchange(device, comm, ExchangeSpec(given.address, got.address, rows, x.nbytes // rows))
    device.download(y, got.address)
    device.synchronize()
    assert y.tobytes() == x.tobytes()
    comm.close()
