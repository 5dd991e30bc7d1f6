"""Products with chosen matrices on an emulated GPU and on a real one: few pairs and many, in every format."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.formats.blocks import BLOCK_FORMATS
from monoplan.codegen.plan import make_plan
from monoplan.frontend.parameter import low_bit_part
from monoplan.ir.builder import build_graph
from monoplan.ir.errors import ArgumentError, CompileError
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import DTYPES, LOW_BITS, TensorType, tensor_type
from monoplan.runtime.cpu.weights import Source
from monoplan.runtime.cuda.executable import CudaExecutable, choose_variant
from monoplan.runtime.cuda.weights import upload_params
from tests.codegen import cuda_emulator
from tests.matrices import partly
from tests.needs import needs

FORMATS = {f.name: f for f in BLOCK_FORMATS}
NAMES = ("bf16", "f32", "f16", *FORMATS)
DEVICES = [pytest.param("emulator", marks=needs("g++")), pytest.param("gpu", marks=pytest.mark.cuda)]
EXPERTS, CHOICES, COLUMNS = 5, 2, 48
KINDS = {"gated": 1, "plain": 0, "normed": 1}
QUICK = ("bf16-plain", "f32-normed", "q4_k-normed")
MATRIX = partly([f"{name}-{kind}" for name in NAMES for kind in KINDS], lambda pair: pair in QUICK)
GAMMA = np.linspace(0.5, 1.5, 512, dtype=np.float32)
GATE = "mul(silu(x0), x1)"


def depth_of(name: str) -> int:
    """Blocks of 32 do not fill the last tile; rows are no whole number of warps' pieces."""
    return 512 if name in LOW_BITS and LOW_BITS[name].block > 64 else 320


@functools.cache
def matrices(name: str, seed: int) -> tuple[Any, Any]:
    """What a file has of a stack of matrices, and their values."""
    rng, shape = np.random.default_rng(seed), (EXPERTS, COLUMNS, depth_of(name))
    if name not in FORMATS:
        values = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(DTYPES[name].numpy)
        return values, values
    f = FORMATS[name]
    blocks = shape[-1] // f.dtype.block
    raw = rng.integers(0, 256, (EXPERTS * COLUMNS, blocks, f.dtype.block_bytes), np.uint8)
    if f.floats:
        raw[raw & 127 == 127] ^= 1  # no number
    for place, dtype in f.scales:
        scales = rng.uniform(0.5, 1.5, (*raw.shape[:2], 1)) / (2000 if f.dtype.block == 256 or f.floats else 100)
        raw[..., place : place + np.dtype(dtype).itemsize] = scales.astype(dtype).view(np.uint8)
    if f.zeros and not f.signed:
        raw[..., -1] &= 15
    if name == "mxfp4":
        raw[..., 0] = rng.integers(118, 124, raw.shape[:2])
    raw = raw.reshape(EXPERTS * COLUMNS, -1)
    return raw.reshape(EXPERTS, COLUMNS, -1), f.values(raw).reshape(shape)


@functools.cache
def executable(name: str, kind: str, device_name: str) -> CudaExecutable:
    """A gated product of rows, or one of rows of their own for each choice."""
    if device_name == "gpu":
        from monoplan.runtime.cuda.device import gpu

        device: Any = gpu()
    else:
        device = cuda_emulator.EmulatedDevice()
    dtype = LOW_BITS[name] if name in FORMATS else DTYPES[name]
    x = tensor_type("f32" if kind == "plain" or name == "f32" else "bf16", "rows", depth_of(name))
    if kind == "plain":
        x = tensor_type("f32", "rows", CHOICES, depth_of(name))
    params = {f"w{i}": TensorType(dtype, (EXPERTS, COLUMNS, depth_of(name))) for i in range(1 + KINDS[kind])}

    stored = {path: matrices(name, i)[0] for i, path in enumerate(params)}
    if kind == "normed":
        params["g"], stored["g"] = tensor_type("f32", depth_of(name)), GAMMA[: depth_of(name)]

    def forward(x: Any, ids: Any, **w: Any) -> Any:
        more = {"up": w["w1"], "gate": GATE} if kind != "plain" else {}
        if kind == "normed":
            return [REGISTRY["fused_experts"](x, w["w0"], ids, norm_weight=w["g"], eps=1e-3, **more)]
        return [REGISTRY["expert_linear"](x, w["w0"], ids, **more)]

    graph = build_graph("experts", forward, {"x": x, "ids": tensor_type("i64", "rows", CHOICES)}, params)
    plan = make_plan(graph, device.target)
    read = Source(
        lambda path, part: stored[path],
        lambda path: False,
        blocks=lambda path, part: low_bit_part(stored[path], part, dtype),
    )
    return CudaExecutable(plan, render_cuda(plan, "test"), upload_params(plan, read, device), device)


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("pair", MATRIX)
def test_products_with_chosen_matrices(pair: str, device_name: str) -> None:
    """One row, a few, and so many that pairs of one matrix come in several groups; nobody chooses matrix 1."""
    name, kind = pair.split("-")
    made = executable(name, kind, device_name)
    used = set()
    for rows in (1, 5, 60):
        rng = np.random.default_rng(rows)
        ids = rng.choice([0, 2, 2, 2, 3, 4], (rows, CHOICES))
        shape = (rows, depth_of(name)) if kind != "plain" else (rows, CHOICES, depth_of(name))
        x = rng.standard_normal(shape).astype(made.plan.graph.inputs[0].type.dtype.numpy)
        (got,) = made.run([x, ids], {"rows": rows})
        weights = [np.asarray(matrices(name, i)[1], np.float64) for i in range(1 + KINDS[kind])]
        call = {"up": weights[1], "gate": GATE} if kind != "plain" else {}
        wide = np.asarray(x, np.float64)
        if kind == "normed":
            wide = REGISTRY["rms_norm"].reference(wide, GAMMA[: depth_of(name)].astype(np.float64), eps=1e-3)
        want = REGISTRY["expert_linear"].reference(wide, weights[0], ids, **call)
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        assert error < (2e-6 if name == "f32" else 1e-2), error
        used |= {choose_variant(v, {"rows": rows}).name for v in made.source.variants.values()}
    assert used == ({"row", "experts"} if name == "f32" else {"row", "many"})


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("rows", [1, 60])
def test_matrices_that_are_not_there(rows: int, device_name: str) -> None:
    made = executable("q4_k", "normed", device_name)
    x, ids = (
        np.zeros((rows, depth_of("q4_k")), made.plan.graph.inputs[0].type.dtype.numpy),
        np.zeros((rows, CHOICES), np.int64),
    )
    ids[-1, 1] = EXPERTS
    with pytest.raises(ArgumentError, match=rf"index {EXPERTS} at position \[{2 * rows - 1}\] is out of range"):
        made.run([x, ids], {"rows": rows})
    ids[:] = 0
    (got,) = made.run([x, ids], {"rows": rows})
    assert not np.asarray(got, np.float32).any()


def test_columns_that_fill_no_tile_are_refused() -> None:
    types = {"x": tensor_type("bf16", "rows", 64), "ids": tensor_type("i64", "rows", 2)}
    params = {"w": TensorType(LOW_BITS["q8_0"], (3, 40, 64))}
    graph = build_graph("odd", lambda x, ids, w: [REGISTRY["expert_linear"](x, w, ids)], types, params)
    with pytest.raises(CompileError, match="experts of 40 columns in q8_0 can't be multiplied"):
        make_plan(graph, cuda_emulator.EmulatedDevice().target)
