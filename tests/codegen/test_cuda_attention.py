"""Attention of many tokens on tensor cores, alone, against float64: the emulator's wgmma and mma.sync, or a GPU."""

from __future__ import annotations

import functools
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from monoplan.codegen.cuda.render import render_cuda, with_headers
from monoplan.codegen.cuda.schedule import CudaAttention, HopperSchedule
from monoplan.codegen.kernels import Attention
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cuda_target
from monoplan.ir.cache_rows import packed_rows
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import bind_symbols, interpret
from monoplan.ir.parser import parse_graph
from monoplan.runtime.cuda.executable import CudaExecutable, choose_variant
from tests.codegen import cuda_emulator
from tests.matrices import partly
from tests.needs import needs

emulated = needs("g++")
# head dimension, heads, key heads, window; constants of the schedule
SHAPES: dict[str, tuple[int, int, int, int | None, dict[str, int]]] = {
    "heads share": (64, 2, 1, None, {}),
    "queries share": (64, 1, 1, None, {"groups": 3, "keys": 96, "stages": 2}),
    "wide": (128, 2, 1, None, {}),
    "wide, window": (128, 1, 1, 70, {"keys": 64}),
    "window": (64, 2, 1, 33, {"keys": 128, "stages": 2}),
    "sinks": (64, 2, 1, 33, {}),
}
ALWAYS = ("heads share", "wide, window")
# batch, queries, keys, past of each row
CALLS: dict[str, tuple[int, int, int, list[int]]] = {
    "few": (1, 2, 70, [68]),
    "odd": (1, 131, 131, [0]),
    "unequal": (3, 70, 300, [0, 63, 230]),
}


@functools.cache
def graph_of(shape: str) -> Graph:
    dim, heads, kv_heads, window, _ = SHAPES[shape]
    q, cache = f"bf16[b, q, {heads}, {dim}]", f"bf16[b, {kv_heads}, k, {dim}]"
    attributes = f'causal=True, scale=None, softcap=None, window={window}, layout="bshd"'
    more, sinks = (f", %sinks: bf16[{heads}]", ", _, %sinks") if shape == "sinks" else ("", "")
    return parse_graph(
        f"graph attend(%q: {q}, %k: {cache}, %v: {cache}, %past: i32[b]{more}) {{\n"
        f"  %y = attention(%q, %k, %v, _, %past{sinks}) {{{attributes}}} : {q}\n  return %y\n}}\n"
    )


def device_of(capability: int) -> Any:
    """An emulated one, or for 0 the GPU that is there."""
    if capability:
        return cuda_emulator.EmulatedDevice(capability)
    from monoplan.runtime.cuda.device import gpu

    return gpu()


@functools.cache
def executable(shape: str, capability: int) -> CudaExecutable:
    device = device_of(capability)
    plan = make_plan(graph_of(shape), device.target)
    (step,) = [s.number for s, _ in plan.steps()]
    constants = SHAPES[shape][-1] if device.target.capability == 90 else {}
    return CudaExecutable(plan, render_cuda(plan, "test", {str(step): constants}), [], device)


def arguments(shape: str, call: str) -> list[Any]:
    """What lies behind a row's last key is not a number: it must not be read."""
    dim, heads, kv_heads, *_ = SHAPES[shape]
    batch, queries, keys, past = CALLS[call]
    rng = np.random.default_rng(len(shape))
    q = 2 * rng.normal(size=(batch, queries, heads, dim))
    k, v = rng.normal(size=(2, batch, kv_heads, keys, dim))
    for b, n in enumerate(past):
        v[b, :, n + queries :] = k[b, :, n + queries :] = np.nan
    sinks = [2 * rng.normal(size=heads).astype(ml_dtypes.bfloat16)] if shape == "sinks" else []
    return [*(a.astype(ml_dtypes.bfloat16) for a in (q, k, v)), np.array(past, np.int32), *sinks]


def cases() -> Iterator[Any]:
    """Shape, call and device: capability of the emulated one, or 0 for the GPU that is there."""
    for shape, call in itertools.product(SHAPES, CALLS):
        yield pytest.param(shape, call, 90, marks=[emulated, *([] if shape in ALWAYS else [pytest.mark.full])])
        short = (shape, call) in (("heads share", "unequal"), ("wide, window", "odd"), ("sinks", "few"))
        yield pytest.param(shape, call, 80, marks=[emulated] if short else [emulated, pytest.mark.nightly])
        yield pytest.param(shape, call, 0, marks=pytest.mark.cuda)


@pytest.mark.parametrize(("shape", "call", "capability"), list(cases()))
def test_attention(shape: str, call: str, capability: int) -> None:
    graph, inputs = graph_of(shape), arguments(shape, call)
    symbols = bind_symbols(graph.inputs, [a.shape for a in inputs])
    made = executable(shape, capability)
    assert {choose_variant(v, symbols).name for v in made.source.variants.values()} == {"prefill"}
    (got,) = made.run([a.copy() for a in inputs], symbols)
    clean = [np.nan_to_num(a) if a.dtype != np.int32 else a for a in inputs]
    (want,) = interpret(graph, clean, {}, exact=True)
    error = np.abs(got.astype(np.float64) - want.astype(np.float64)).max(axis=(1, 3))
    assert (error < 0.02).all(), f"error by row and head: {error}"


@pytest.mark.parametrize(
    "capability", [*(pytest.param(c, marks=emulated) for c in (90, 80)), pytest.param(0, marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("mask", ["", "b, 1, 1, 131", "1, 1, 131, 131"])
def test_attention_of_whole_sequences(mask: str, capability: int) -> None:
    """Every query sees all keys that its mask shows; one that sees none gives 0."""
    kind, more = "bf16[b, 131, 2, 64]", f", %mask: bool[{mask}]" if mask else ""
    attributes = 'causal=False, scale=None, softcap=None, window=None, layout="bshd"'
    graph = parse_graph(
        f"graph attend(%q: {kind}, %k: bf16[b, 2, 131, 64], %v: bf16[b, 2, 131, 64]{more}) {{\n"
        f"  %y = attention(%q, %k, %v{', %mask' if mask else ''}) {{{attributes}}} : {kind}\n  return %y\n}}\n"
    )
    device = device_of(capability)
    plan = make_plan(graph, device.target)
    made, rng = CudaExecutable(plan, render_cuda(plan, "test"), [], device), np.random.default_rng(0)
    inputs = [rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((2, 131, 2, 64), *2 * [(2, 2, 131, 64)])]
    if mask:
        shown = rng.random([2 if n == "b" else int(n) for n in mask.split(", ")]) < 0.5
        shown[-1, :, -1] = False
        inputs.append(shown)
    assert {choose_variant(v, {"b": 2}).name for v in made.source.variants.values()} == {"prefill"}
    (got,), (want,) = made.run([a.copy() for a in inputs], {"b": 2}), interpret(graph, inputs, {}, exact=True)
    assert np.abs(got.astype(np.float64) - want.astype(np.float64)).max() < 0.02


PAGE = 32
# kinds of kernels, and calls that take them
PAGED = {
    "decode": ("bf16", (3, 1, 300, [0, 63, 230])),
    "hopper": ("bf16", (3, 70, 300, [0, 63, 230])),
    "prefill": ("bf16", (3, 70, 300, [0, 63, 230])),
    "general": ("f32", (2, 3, 100, [0, 90])),
}


@pytest.mark.parametrize(
    ("kind", "window", "capability"),
    [
        pytest.param(kind, window, capability, marks=[emulated] if capability else pytest.mark.cuda)
        for kind in PAGED
        for window in (None, 33)
        for capability in (80 if kind == "prefill" else 90, 0)
    ],
)
def test_a_cache_in_pages(kind: str, window: int | None, capability: int) -> None:
    """The same bits as over a cache in one piece; behind a text its table may hold anything."""
    from tests.codegen.attention_cases import in_pages

    dtype, (batch, queries, keys, past) = PAGED[kind]
    heads, kv_heads, dim = 4, 2, 64
    q_type = f"{dtype}[b, q, {heads}, {dim}]"
    attributes = f'causal=True, scale=None, softcap=None, window={window}, layout="bshd"'

    def run(cache: str, table: str, arrays: list[Any]) -> Any:
        graph = parse_graph(
            f"graph attend(%q: {q_type}, %k: {cache}, %v: {cache}, %past: i32[b]{table}) {{\n"
            f"  %y = attention(%q, %k, %v, _, %past{', %t' if table else ''}) {{{attributes}}} : {q_type}\n"
            "  return %y\n}\n"
        )
        device = device_of(capability)
        plan = make_plan(graph, device.target)
        made = CudaExecutable(plan, render_cuda(plan, "test"), [], device)
        symbols = bind_symbols(graph.inputs, [a.shape for a in arrays])
        (found,) = [choose_variant(v, symbols).name for v in made.source.variants.values()]
        assert found.startswith({"hopper": "prefill", "general": "attention"}.get(kind, kind))
        return made.run([a.copy() for a in arrays], symbols)[0]

    rng = np.random.default_rng(7)
    number = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    q = rng.normal(size=(batch, queries, heads, dim)).astype(number)
    k, v = (a.astype(number) for a in rng.normal(size=(2, batch, kv_heads, keys, dim)))
    lengths = np.array(past, np.int32)
    whole = run(f"{dtype}[b, {kv_heads}, k, {dim}]", "", [q, k, v, lengths])
    (pk, pv), table = in_pages([k, v], PAGE, rng)
    for row, n in zip(table, past, strict=True):
        row[-(-(n + queries) // PAGE) :] = 10**6
    pages = run(f"{dtype}[n, {kv_heads}, {PAGE}, {dim}]", ", %t: i32[b, w]", [q, pk, pv, lengths, table])
    np.testing.assert_array_equal(pages.view(np.uint8), whole.view(np.uint8))


# head dimension, heads, key heads, positions of a page (0: one piece), window, keys, past of each row
BYTES: dict[str, tuple[int, int, int, int, int | None, int, list[int]]] = {
    "rows anywhere": (64, 6, 2, 0, None, 301, [0, 63, 230]),
    "long": (64, 4, 1, 0, None, 4203, [4202]),
    "pages": (64, 4, 2, 64, None, 300, [0, 63, 299]),
    "small pages, window": (128, 8, 1, 20, 33, 300, [0, 64, 230]),
    "many": (32, 8, 8, 0, 70, 99, [98, 5, 31, 32]),
    "wide": (96, 2, 2, 0, None, 130, [129, 128]),
}


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        pytest.param(kind, capability, marks=marks)
        for kind in BYTES
        for capability, marks in (
            (90, [emulated, *([] if kind in ("rows anywhere", "small pages, window") else [pytest.mark.full])]),
            (0, [pytest.mark.cuda]),
        )
    ],
)
def test_a_cache_in_8_bits(kind: str, capability: int) -> None:
    """One token by tensor cores, against float64; rows behind a text have scales that are no numbers."""
    from tests.codegen.attention_cases import in_pages

    dim, heads, kv_heads, page, window, keys, past = BYTES[kind]
    batch, rng = len(past), np.random.default_rng(3)
    q = 2 * rng.normal(size=(batch, 1, heads, dim))
    caches = [packed_rows(rng.normal(size=(batch, kv_heads, keys, dim)) * rng.random((keys, 1))) for _ in "kv"]
    for cache, (row, n) in itertools.product(caches, enumerate(past)):
        cache[row, :, n + 1 :] = -1
    inputs = [q.astype(ml_dtypes.bfloat16), *caches, np.array(past, np.int32)]
    cache_type, table_type, table = f"i8[b, {kv_heads}, k, {dim + 4}]", "", ""
    if page:
        inputs[1:3], pages = in_pages(caches, page, rng)
        inputs.append(pages)
        cache_type, table_type, table = f"i8[n, {kv_heads}, {page}, {dim + 4}]", ", %t: i32[b, w]", ", %t"
    q_type = f"bf16[b, q, {heads}, {dim}]"
    attributes = f'causal=True, scale=None, softcap=None, window={window}, layout="bshd"'
    graph = parse_graph(
        f"graph attend(%q: {q_type}, %k: {cache_type}, %v: {cache_type}, %past: i32[b]{table_type}) {{\n"
        f"  %y = attention(%q, %k, %v, _, %past{table}) {{{attributes}}} : {q_type}\n  return %y\n}}\n"
    )
    device = device_of(capability)
    plan = make_plan(graph, device.target)
    made = CudaExecutable(plan, render_cuda(plan, "test"), [], device)
    symbols = bind_symbols(graph.inputs, [a.shape for a in inputs])
    (variant,) = [choose_variant(v, symbols).name for v in made.source.variants.values()]
    assert variant.startswith("decode") and "mp_attention_bytes" in made.source.text
    (got,) = made.run([a.copy() for a in inputs], symbols)
    (want,) = interpret(graph, inputs, {}, exact=True)
    assert np.abs(got.astype(np.float64) - want.astype(np.float64)).max() < 0.01


def test_only_sm_90_has_warpgroup_products() -> None:
    """Its successors have other instructions in their place."""
    for capability, there in ((80, False), (89, False), (90, True), (100, False), (120, False)):
        plan = make_plan(graph_of("wide"), cuda_target(capability, 100, 101376))
        for step, _ in plan.steps():
            assert isinstance(step.kernel, Attention) and isinstance(step.schedule, CudaAttention)
            assert (step.schedule.hopper is not None) is there
        assert ("wgmma" in render_cuda(plan, "test").text) is there


@pytest.mark.parametrize("shape", SHAPES)
def test_schedules_fit(shape: str) -> None:
    plan = make_plan(graph_of(shape), cuda_target(90, 132, 232448))
    dim, heads, kv_heads, *_ = SHAPES[shape]
    for step, _ in plan.steps():
        s = step.schedule
        assert isinstance(s, CudaAttention) and isinstance(s.hopper, HopperSchedule)
        assert s.hopper.resident * (s.hopper.shared(dim) + 1024) <= 233472  # what an SM has
        assert s.hopper.groups % s.hopper.heads == 0 and heads // kv_heads % s.hopper.heads == 0


@needs("nvcc")
@pytest.mark.parametrize("shape", partly(["heads share", "wide", "wide, window"], lambda shape: shape == "wide"))
def test_products_run_beside_softmax(shape: str, tmp_path: Path) -> None:
    """The assembler neither spills nor makes the products wait for each other, of which it tells in words alone."""
    source = render_cuda(make_plan(graph_of(shape), cuda_target(90, 132, 232448)), "test")
    text = with_headers([f for f in source.functions if "hopper" in f.name])
    (tmp_path / "plan.cu").write_text(text)
    command = ["nvcc", "-std=c++17", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-diag-suppress=177,550", "plan.cu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "0 bytes spill stores" in done.stderr, done.stderr[:2000]
    assert "serialized" not in done.stderr, done.stderr[:2000]
