"""Every op alone, compiled for CUDA, against the float64 interpreter: on the emulator here, on a GPU with -m cuda."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.kernels import Norm
from monoplan.codegen.plan import make_plan
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import bind_symbols, interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import DTYPES, bf16
from monoplan.runtime.cuda.executable import CudaExecutable
from monoplan.runtime.cuda.weights import upload_params
from tests.codegen import cuda_emulator
from tests.codegen.cases import CASES, SIZES, Case
from tests.codegen.test_ops import KINDS, PAIRS, arrays_of, check_case, graph_of
from tests.matrices import partly
from tests.needs import needs

PRODUCTS = ("linear", "fused_linear", "linear_argmax", "linear_norm", "linear_route", "qkv_rope_cache", "attention")
EMULATED = ("f32", "bf16")  # those that models use; a GPU takes them all
SHORT = [p for p in PAIRS if p[0] in EMULATED]


def make_device(name: str) -> Any:
    if name.startswith("emulator"):
        # Hundreds of kernels that run for moments: the compiler takes longer than they do, in the full run, too.
        return cuda_emulator.EmulatedDevice(library="library" in name, level="-O0")
    from monoplan.runtime.cuda.device import gpu

    return gpu()


def executable(graph: Graph, params: dict[str, Any], device: Any) -> CudaExecutable:
    """A graph as it is, without passes, on a device."""
    plan = make_plan(graph, device.target)
    source = render_cuda(plan, "test")
    return CudaExecutable(plan, source, upload_params(plan, lambda path: np.asarray(params[path]), device), device)


Calls = list[tuple[Case, list[tuple[dict[str, int], list[Any], list[Any]]]]]


@functools.cache
def results(device_name: str, dtype: str) -> Calls:
    """For each case of an element type: the sizes, compiled and exact results of each call."""
    cases = [c for c in CASES if c.accepts(DTYPES[dtype])]
    graph, counts = graph_of(cases, dtype)
    params = arrays_of(cases, dtype, SIZES[0], param=True)
    made = executable(graph, params, make_device(device_name))
    found: Calls = [(c, []) for c in cases]
    for sizes in SIZES:
        inputs = list(arrays_of(cases, dtype, sizes, param=False).values())
        symbols = bind_symbols(graph.inputs, [a.shape for a in inputs])
        got = made.run([a.copy() for a in inputs], symbols)
        want = interpret(graph, inputs, params, exact=True)
        at = 0
        for (_, calls), n in zip(found, counts, strict=True):
            calls.append((sizes, got[at : at + n], want[at : at + n]))
            at += n
    return found


@pytest.fixture(scope="module", autouse=True)
def built(request: pytest.FixtureRequest) -> None:
    """On a GPU the element types are made side by side: NVRTC leaves the interpreter to the others meanwhile."""
    items = [i for i in request.session.items if i.path == request.path and i.name.startswith("test_op_on_gpu")]
    wanted = dict.fromkeys(i.callspec.params["dtype"] for i in items)  # type: ignore[attr-defined]

    def make(dtype: str) -> None:
        with contextlib.suppress(Exception):  # the tests of that type make it again, and show what is wrong
            results("gpu", dtype)

    if wanted:
        make_device("gpu")  # once, before threads ask for it
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, wanted))


def check_op(device_name: str, dtype: str, op: str) -> None:
    for c, calls in results(device_name, dtype):
        for sizes, got, want in calls if c.op == op else ():
            for a, b in zip(got, want, strict=True):
                if mixed(c, dtype) and a.dtype == np.float32:
                    # Tensor cores take both sides in the weights' type: f32 beside half precision is rounded to it.
                    half = DTYPES[dtype].numpy
                    check_case(a.astype(half), b, "matmul", c, dtype, sizes)
                else:
                    check_case(a, b, KINDS.get(REGISTRY[op].kind, "matmul"), c, dtype, sizes)


def mixed(c: Case, dtype: str) -> bool:
    """Whether a product has half-precision weights and other operands or results in f32."""
    f32 = c.op == "linear_route" or any(a is not None and a.text.startswith("f32") for a in c.operands)
    return dtype in ("bf16", "f16") and c.op in PRODUCTS and f32


@needs("g++")
@pytest.mark.parametrize(
    ("dtype", "op"), partly(SHORT, lambda pair: pair[0] == "f32"), ids=[f"{d}-{op}" for d, op in SHORT]
)
def test_op_emulated(dtype: str, op: str) -> None:
    check_op("emulator", dtype, op)


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=[f"{d}-{op}" for d, op in PAIRS])
def test_op_on_gpu(dtype: str, op: str) -> None:
    check_op("gpu", dtype, op)


@needs("g++")
def test_a_norm_for_a_product_and_a_sum() -> None:
    """A product reads the norm in bf16, a residual in f32: it is written in both; a GELU that is rounded is short."""
    attrs = """{norm="none", eps=0.0, gated=False, expr="gelu(x0, approximate='none')"}"""
    text = f"""graph g(%x: f32[rows, 64]) {{
      param %w: bf16[96, 64] = "w"
      param %v: bf16[64, 96] = "v"
      param %c: bf16[96] = "c"
      %n = layer_norm(%x) {{eps=1e-5, dims=1}} : f32[rows, 64]
      %up = fused_linear(%n, %w, %c) {attrs} : f32[rows, 96]
      %down = linear(%up, %v) : f32[rows, 64]
      %y = add(%down, %n) : f32[rows, 64]
      return %y
    }}"""
    graph, rng = parse_graph(text), np.random.default_rng(0)
    shapes = {"w": (96, 64), "v": (64, 96), "c": (96,)}
    params = {n: (0.3 * rng.normal(size=s)).astype(bf16.numpy) for n, s in shapes.items()}
    made = executable(graph, params, make_device("emulator with library"))
    (norm,) = [s.kernel for s, _ in made.plan.steps() if isinstance(s.kernel, Norm)]
    assert [o.dtype.name for o in norm.writes] == ["f32", "bf16"] and "mp_fast_gelu(" in made.text
    x = rng.normal(size=(40, 64)).astype(np.float32)
    (got,), (want,) = made.run([x], {"rows": 40}), interpret(graph, [x], params, exact=True)
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
