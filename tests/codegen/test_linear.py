"""Products on the CPU: every way that rows and columns are shared out gives the same bits, in every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

import monoplan as mp
import monoplan.frontend.functional as F
from monoplan import nn
from monoplan.codegen.cpu.schedule_linear import PART, TILE_FEW, TILE_PART
from monoplan.codegen.source import headers
from monoplan.driver import build_graph_executable
from monoplan.ir.builder import build_graph
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import DTYPES, bf16, tensor_type
from monoplan.models import LlamaConfig, LlamaForCausalLM
from monoplan.runtime.build import toolchain
from monoplan.runtime.cpu.executable import host_target
from monoplan.runtime.machine.features import detect, levels, machine, read_cpu
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
        kept = dtype if host_target().has_tiles and rows > TILE_FEW[-1] else "f32"  # tile units round many rows to bf16
        exact = interpret(graph, [x], {"w": w}, exact=True)[0]
        check(product.astype(DTYPES[kept].numpy), exact, kept, "matmul", 2.0)
        np.testing.assert_array_equal(best, product.argmax(-1))


def check_few(dtype: str, depth: int, columns: int) -> None:
    """A few rows lose nothing of x: each has the bits that it has by itself; inf and NaN reach what they should."""
    types, params = {"x": tensor_type("f32", "n", depth)}, {"w": tensor_type(dtype, columns, depth)}
    graph = build_graph("few", lambda x, w: REGISTRY["linear"](x, w), types, params)
    rng = np.random.default_rng(columns)
    w = (rng.standard_normal((columns, depth)) * depth**-0.5).astype(DTYPES[dtype].numpy)
    w[3, 5], w[17, 0], w[columns - 1, depth - 1] = np.inf, -np.inf, np.nan
    x = rng.standard_normal((8, depth)).astype(np.float32)
    x[:, 0], x[:, 5], x[5] = 1.0, -2.5, 2.0 ** rng.integers(-20, 20, depth)  # numbers that are whole in bf16
    x[1, 7], x[4, 7], x[6, 7], x[7] = np.inf, np.nan, np.finfo(np.float32).max, 1e-30 * x[7]
    x.view(np.uint32)[4, 7] = 0x7F800001  # its last bit alone says that it is none
    run = build_graph_executable(graph, {"w": w})
    alone = []
    with np.errstate(invalid="ignore"):
        for row in x:
            alone.append(run([row[None]])[0].copy())
            exact = interpret(graph, [row[None]], {"w": w}, exact=True)[0]
            known = np.isfinite(exact)
            np.testing.assert_array_equal(alone[-1][~known], exact[~known].astype(np.float32))
            size = np.linalg.norm(np.nan_to_num(row.astype(np.float64), posinf=0.0)) * depth**-0.5
            check(alone[-1][known], exact[known], "f32", "matmul", 2.0 * size)
    for count in range(2, len(x) + 1):
        for first in range(len(x) - count + 1):
            got, want = run([x[first : first + count]])[0], np.concatenate(alone[first : first + count])
            got[np.isnan(got)] = want[np.isnan(want)] = np.nan  # of two NaN an x86 core keeps the first
            assert got.tobytes() == want.tobytes(), (first, count)


def check_whole(dtype: str, depth: int, columns: int) -> None:
    """Weights keep every bit, whatever their exponents: a row that is 1 at one place gives them, so does a lookup."""
    types = {"x": tensor_type("f32", "n", depth), "ids": tensor_type("i64", columns)}

    def forward(x: Any, ids: Any, w: Any) -> Any:
        return [REGISTRY["linear"](x, w), REGISTRY["embedding"](ids, w)]

    graph = build_graph("whole", forward, types, {"w": tensor_type(dtype, columns, depth)})
    rng = np.random.default_rng(depth)
    w = rng.standard_normal((columns, depth)).astype(DTYPES[dtype].numpy)
    wild = rng.integers(0, 256, (columns // 2, depth * w.itemsize), np.uint8).view(w.dtype)
    with np.errstate(invalid="ignore"):
        w[: columns // 2] = np.where(np.isfinite(wild), wild, w.dtype.type(0))  # every exponent
    w[-1], w[-2, 1::2], w[-40, 7], w[-40, -1] = -0.0, 0.0, 1e30, -1e-30
    run = build_graph_executable(graph, {"w": w})
    packed = run.executable.params
    assert len(packed) == 1 and (packed[0].dtype == np.uint8) == (host_target().has_tiles and dtype == "bf16")
    eye, ids = np.eye(depth, dtype=np.float32), np.arange(columns)[::-1]
    want, least = w.T.astype(np.float32), np.finfo(np.float32).tiny
    for rows in (1, 3, 8, 9, depth):
        for first in range(0, depth - rows + 1, max(rows, depth // 5)):
            product, found = run([eye[first : first + rows], ids])
            part = want[first : first + rows]
            np.testing.assert_array_equal(product, np.where((np.abs(part) < least) & (product == 0), product, part))
            assert found.tobytes() == w[::-1].tobytes()


def check_pair(depth: int, inner: int, expr: str = "swiglu(x0, x1)") -> None:
    """A gated product and the one behind it: what the first hands over, for few rows and for many."""
    types = {"x": tensor_type("f32", "n", depth)}
    params = {
        "both": tensor_type("bf16", 2 * inner, depth),
        "gamma": tensor_type("bf16", depth),
        "down": tensor_type("bf16", depth, inner),
    }

    def forward(x: Any, both: Any, gamma: Any, down: Any) -> Any:
        fused = REGISTRY["fused_linear"]
        made = fused(x, both, None, gamma, None, norm="rms", eps=1e-5, gated=True, expr=expr)
        return fused(made, down, None, None, None, x, norm="none", eps=0.0, gated=False, expr="add(x0, x1)")

    graph = build_graph("pair", forward, types, params)
    rng = np.random.default_rng(depth)
    arrays = {
        name: (rng.standard_normal(t.shape) * t.shape[-1] ** -0.5).astype(t.dtype.numpy) for name, t in params.items()
    }
    run = build_graph_executable(graph, arrays)
    handed = [b for b in run.executable.plan.arena.slot_of if b.tiled]
    assert len(handed) == host_target().has_tiles  # as tiles where there are tile units
    for rows in (1, 8, 9, 12, 15, 16, 17, 33, *ROWS):
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


def check_strips(depth: int, columns: int) -> None:
    """On tile units: more k than a strip has, and more panels than sums wait for."""
    types, params = {"x": tensor_type("f32", "n", depth)}, {"w": tensor_type("bf16", columns, depth)}
    graph = build_graph("strips", lambda x, w: REGISTRY["linear"](x, w), types, params)
    rng = np.random.default_rng(depth)
    w = (rng.standard_normal((columns, depth)) * depth**-0.5).astype(DTYPES["bf16"].numpy)
    run = build_graph_executable(graph, {"w": w})
    (step,) = (s for s, _ in run.executable.plan.steps() if s.kernel.family == "linear")
    nest = step.schedule.blocking
    assert nest.strip < depth and columns > 32 * nest.slots
    for rows in (20, 2 * TILE_PART + 1):
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        exact = interpret(graph, [x], {"w": w}, exact=True)[0]
        for run.executable.threads in (1, 2, 3):
            check(run([x])[0].astype(DTYPES["bf16"].numpy), exact, "bf16", "matmul", 2.0)


def check_heads() -> None:
    """On tile units: q, k and v of several sequences with rotation and caches, by the whole model."""
    c = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        attention_bias=False,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM.from_config(c, seed=1)
    rng = np.random.default_rng(0)
    for threads in (1, 2, 3):
        lm, exact = mp.compile(model, options={"threads": threads}), mp.compile(model, target="reference")
        for batch, count in ((1, 16), (1, 100), (3, 33), (6, 3), (9, 2), (20, 1)):  # tiles of queries but for two
            ids = rng.integers(0, 96, (batch, count))
            got, want = (np.asarray(m(ids), np.float64) for m in (lm, exact))
            assert np.abs(got - want).max() < 0.03 * np.abs(want).max(), (threads, batch, count)


def check_wide_heads(depth: int, heads: int, kv_heads: int, dim: int, rows: int) -> None:
    """On tile units: more k than a strip has, a last piece of one head, and another piece after it."""
    types = {
        "x": tensor_type("f32", "b", "s", depth),
        "positions": tensor_type("i64", "b", "s"),
        "k": tensor_type("bf16", "b", kv_heads, rows, dim),
        "v": tensor_type("bf16", "b", kv_heads, rows, dim),
        "lengths": tensor_type("i32", "b"),
    }
    params = {
        "w": tensor_type("bf16", (heads + 2 * kv_heads) * dim, depth),
        "sin": tensor_type("f32", rows, dim // 2),
        "cos": tensor_type("f32", rows, dim // 2),
    }

    def forward(x: Any, positions: Any, k: Any, v: Any, lengths: Any, w: Any, sin: Any, cos: Any) -> Any:
        op = REGISTRY["qkv_rope_cache"]
        return list(op(x, w, positions, sin, cos, k, v, lengths, heads=heads, kv_heads=kv_heads, algo="gpt_neox"))

    graph, rng = build_graph("heads", forward, types, params), np.random.default_rng(dim)
    angles = rng.standard_normal((rows, dim // 2))
    arrays = {
        "w": (rng.standard_normal(((heads + 2 * kv_heads) * dim, depth)) * depth**-0.5).astype(bf16.numpy),
        "sin": np.sin(angles).astype(np.float32),
        "cos": np.cos(angles).astype(np.float32),
    }
    run = build_graph_executable(graph, arrays)
    (step,) = (s for s, _ in run.executable.plan.steps() if s.kernel.family == "linear")
    nest = step.schedule.blocking
    assert nest.strip < depth and heads + 2 * kv_heads > nest.piece > 1
    cache = np.zeros((1, kv_heads, rows, dim), bf16.numpy)
    x = rng.standard_normal((1, rows, depth)).astype(bf16.numpy).astype(np.float32)
    inputs = [x, np.arange(rows)[None], cache, cache.copy(), np.zeros(1, np.int32)]
    exact = interpret(graph, inputs, arrays, exact=True)
    for run.executable.threads in (1, 2, 3):
        for got, want in zip(run([a.copy() for a in inputs]), exact, strict=True):
            check(np.asarray(got).astype(bf16.numpy), want, "bf16", "matmul", 4.0)


def check_all() -> None:
    jobs: list[Callable[[], None]] = [
        lambda: check_pair(96, 1120),
        lambda: check_pair(64, 96),
        lambda: check_rows("bf16", 1088, 160),  # more than one slice of k for tile units
        lambda: check_rows("bf16", 64, 100),
        lambda: check_rows("f32", 40, 100),
        lambda: check_rows("f16", 41, 100),
        lambda: check_few("bf16", 96, 100),
        lambda: check_few("f32", 41, 100),
        lambda: check_whole("bf16", 608, 130),  # two slices of k for tile units
        lambda: check_whole("f32", 40, 100),
        lambda: check_gated(64, 36),
    ]
    if host_target().has_tiles:
        jobs = [check_heads, lambda: check_pair(64, 96, "mul(tanh(x0), x1)"), *jobs]
        jobs += [lambda: check_strips(2304, 1700), lambda: check_strips(2560, 800)]
        jobs += [lambda: check_wide_heads(2176, 11, 1, 64, 288), lambda: check_wide_heads(2112, 5, 1, 128, 330)]
    with ThreadPoolExecutor(2) as threads:  # compilers side by side
        list(threads.map(lambda job: job(), jobs))


def test_this_instruction_set() -> None:
    check_all()


@pytest.mark.full
@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets(isa: str) -> None:
    program = """
        from tests.codegen.test_linear import check_all
        check_all()
    """
    env = {**os.environ, "MONOPLAN_ISA": isa, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


class Scaled(nn.Module):
    """A product whose epilogue depends on a length, and reads what some rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6, bias=False)

    def forward(self, x: Any, by_batch: Any, by_place: Any) -> Any:
        seq = x.shape[1]
        return self.linear(x) * F.arange(seq, seq + 6, dtype="float32") * by_batch + by_place


def test_an_epilogue_that_mentions_a_length() -> None:
    fast = mp.compile(Scaled(), mp.spec("batch", "seq", 8), mp.spec("batch", 1, 6), mp.spec("seq", 1))
    rng = np.random.default_rng(0)
    for batch, seq in ((2, 3), (3, 20), (1, 1)):
        shapes = ((batch, seq, 8), (batch, 1, 6), (seq, 1))
        found = fast.verify(*(rng.normal(size=shape).astype("f4") for shape in shapes))
        assert found.ok, str(found)
    assert [op.name for op in fast._latest().stages[-1].graph.ops].count("fused_linear") == 1


def test_short_gelu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near enough for bf16 down to -7; NaN and infinities as in the long one."""
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path))
    source = """
        #include "mp_exp.h"
        void gelu(const float *x, float *y, const int64_t n)
        {
            for (int64_t i = 0; i < n; i += 16) mp_vstore(y + i, mp_vgelu_short(mp_vload_f32(x + i)));
        }
    """
    ffi = FFI()
    ffi.cdef("void gelu(const float *, float *, int64_t);")
    key, build = toolchain.plan_build(source, ("-DMP_LANES=16",), target="test", abi=1, headers=headers("cpu"))
    library, _ = toolchain.load(key, build, ffi.dlopen)

    def run(x: Any) -> Any:
        x = np.ascontiguousarray(x, np.float32)
        y = np.empty_like(x)
        library.gelu(*(ffi.cast("float *", a.ctypes.data) for a in (x, y)), y.size)
        return y

    x = np.linspace(-7, 30, 1 << 16, dtype=np.float32)
    exact = REGISTRY["gelu"].evaluate([x], {"approximate": "none"}, [tensor_type("f32")], exact=True)[0]
    np.testing.assert_allclose(run(x), exact, rtol=5e-4)
    special = run([np.nan, np.inf, -np.inf, -1e30, 0.0, -0.0, 1e30, 1e-30] * 2)[:8]
    assert np.isnan(special[0]) and special[1] == np.inf and (np.abs(special[2:4]) < 1e-10).all()
    assert special[4] == special[5] == 0 and special[6] == np.float32(1e30)
    np.testing.assert_allclose(special[7], 0.5e-30, rtol=5e-4)


def test_short_swiglu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near enough for bf16 everywhere; NaN and infinities as in the long one."""
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path))
    source = """
        #include "mp_exp.h"
        void swiglu(const float *gate, const float *up, float *y, const int64_t n)
        {
            for (int64_t i = 0; i < n; i += 16)
                mp_vstore(y + i, mp_vswiglu_short(mp_vload_f32(gate + i), mp_vload_f32(up + i)));
        }
    """
    ffi = FFI()
    ffi.cdef("void swiglu(const float *, const float *, float *, int64_t);")
    key, build = toolchain.plan_build(source, ("-DMP_LANES=16",), target="test", abi=1, headers=headers("cpu"))
    library, _ = toolchain.load(key, build, ffi.dlopen)

    def run(gate: Any, up: Any) -> Any:
        size = 16 * -(-np.size(gate) // 16)
        gate, up = (np.ascontiguousarray(np.broadcast_to(np.float32(a), (size,))) for a in (gate, up))
        y = np.empty_like(gate)
        library.swiglu(*(ffi.cast("float *", a.ctypes.data) for a in (gate, up, y)), y.size)
        return y

    rng = np.random.default_rng(0)
    gate = np.float32(np.concatenate([np.linspace(-86, 100, 4096), rng.standard_normal(4096)]))
    up = np.float32(rng.standard_normal(gate.size))
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(run(gate, up), exact, rtol=2.5e-4)
    assert np.isnan(run(np.nan, 1.0)).all() and np.isnan(run(1.0, np.nan)).all()
    assert (run(np.inf, 2.0) == np.inf).all() and (run(1e30, -2.0) == np.float32(-2e30)).all()
    assert (np.abs(run(-np.inf, 3.0)) < 1e-35).all() and (np.abs(run(-1e30, 3.0)) < 1e-35).all()
    np.testing.assert_allclose(run(-80.0, 1e37), -80 * np.exp(-80.0) * 1e37, rtol=2.5e-4)
