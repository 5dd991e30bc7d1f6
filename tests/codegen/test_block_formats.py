"""Low-bit formats of GGUF files: packing, lookups that give the file's values, products by every instruction set."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.cpu.schedule_linear import BLOCK_TILED, PAIR_CHUNK
from monoplan.codegen.formats import Layout
from monoplan.codegen.formats.blocks import BLOCK_FORMATS
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target, cuda_target
from monoplan.frontend.parameter import Parameter, low_bit_part
from monoplan.frontend.tensor import Tensor
from monoplan.ir.builder import build_graph
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.tolerances import LOW_BIT_EPSILON, compare
from monoplan.ir.types import LOW_BITS, TensorType, tensor_type
from monoplan.nn import functional as F
from monoplan.runtime.cpu import weights
from monoplan.runtime.cpu.executable import flags_for, host_target
from monoplan.runtime.machine.features import (
    CpuFeatures,
    compile_flags,
    detect,
    levels,
    machine,
    read_cpu,
    vector_bytes,
)
from tests.codegen.test_source import compile_strictly
from tests.matrices import partly
from tests.needs import COMPILERS, needs

FORMATS = {f.name: f for f in BLOCK_FORMATS}
ISAS = [isa for isa in levels(machine(), read_cpu()[1]) if isa != "amx"]  # whose few rows are avx512's
ROWS = BLOCK_TILED + 13  # enough for tile units, when the first are left out
USUAL, WILD = 40, 16  # rows of a weight: with scales of a usual size, and of any bits
QUICK = ("q4_k", "mxfp4", "fp8_128")  # scales and minima of one block; a table, scales of a byte; floats
MATRIX = partly(
    [(name, isa) for name in FORMATS for isa in ISAS], lambda pair: pair[0] in QUICK and pair[1] == detect().isa
)


def depth_of(name: str) -> int:
    """Blocks of 32 are odd in number: the last unit is not full."""
    return 11 * 32 if FORMATS[name].dtype.block == 32 else 2 * 256


def blocks_of(name: str, seed: int = 0) -> Any:
    """Random blocks: rows of usual scales, then rows of random bits, with scales that are infinite or no numbers. The
    last of the usual rows has codes whose bits are all set."""
    f, rng = FORMATS[name], np.random.default_rng(seed)
    shape = USUAL + WILD, depth_of(name) // f.dtype.block
    raw = rng.integers(0, 256, (*shape, f.dtype.block_bytes), np.uint8)
    raw[USUAL - 1] = 254 if f.floats else 255  # 255 is no number
    for place, dtype in f.scales:
        scales = rng.standard_normal((USUAL, shape[1], 1)).astype(dtype).view(np.uint8)
        raw[:USUAL, :, place : place + scales.shape[2]] = scales
    if f.zeros and not f.signed:
        raw[..., -1] &= 15
    if name == "mxfp4":  # whose exponents are single bytes
        raw[:USUAL, :, 0] = rng.integers(120, 131, (USUAL, shape[1]))
    return raw.reshape(len(raw), -1)


class Table(nn.Module):
    """A product with a low-bit weight, and a lookup of its rows."""

    def __init__(self, name: str, raw: Any) -> None:
        super().__init__()
        values, dtype = FORMATS[name].values(raw), LOW_BITS[name]
        self.weight = Parameter.empty(values.shape)
        self.weight.defer(
            lambda part=None: values if part is None else part.cut(values),
            None,
            dtype,
            lambda part=None: low_bit_part(raw, part, dtype),
        )

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.weight), F.embedding(ids, self.weight)


@functools.cache
def plan_of(name: str, isa: str, threads: int, columns: int = USUAL + WILD) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONOPLAN_ISA", isa)
        sizes = mp.spec("rows", depth_of(name)), mp.spec("ids", dtype="i64")
        fast = mp.compile(Table(name, blocks_of(name)[:columns]), *sizes, options={"threads": threads})
        fast(np.zeros((1, depth_of(name)), np.float32), np.zeros(1, np.int64))  # it is built here
        assert f"mp_group_{name}" in fast.source()
        return fast


def product(name: str, isa: str, x: Any, threads: int = 1) -> Any:
    """Any NaN is as good as another: which one a sum of two of them is, is up to the compiler's order."""
    found = np.asarray(plan_of(name, isa, threads)(x, np.zeros(1, np.int64))[0])
    return np.where(np.isnan(found), np.float32(np.nan), found)


def test_every_low_bit_type_has_a_format() -> None:
    assert FORMATS.keys() == LOW_BITS.keys()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("native", [False, True])
def test_packed_blocks_are_the_blocks(name: str, native: bool) -> None:
    """Also where a panel is not full and the last unit is not: the memory that was given is not zeros."""
    f, raw = FORMATS[name], blocks_of(name)
    for layout in (Layout(name, 16, 3), Layout(name, 16, 1, "heads", 7), Layout(name, 16, 2, "gated")):
        rows = layout.rows(len(raw))
        assert (rows < 0).any()
        if native:
            packed = weights.pack(raw, layout, lambda shape, dtype: np.full(shape, 165, dtype))
        else:
            packed = f.pack(raw, rows, layout, lambda shape, dtype: np.full(shape, 165, dtype), None)
        assert packed.nbytes == rows.size // 16 * f.panel_bytes(depth_of(name), 16)
        found = f.unpack(packed, depth_of(name), layout)
        assert np.array_equal(found[rows >= 0], raw[rows[rows >= 0]])
        assert not found[rows < 0].any()


@pytest.mark.parametrize(("name", "isa"), MATRIX)
def test_a_lookup_gives_the_values_of_the_file(name: str, isa: str) -> None:
    """Bit for bit, signs of zeros and all; any NaN is as good as another."""
    ids, x = np.arange(USUAL + WILD)[::-1].copy(), np.zeros((1, depth_of(name)), np.float32)
    got = np.asarray(plan_of(name, isa, 1)(x, ids)[1])
    want = FORMATS[name].values(blocks_of(name))[ids]
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), np.argwhere(~same)[:10]


@pytest.mark.parametrize(("name", "isa"), MATRIX)
def test_a_product_is_close_and_its_bits_depend_on_nothing_else(name: str, isa: str) -> None:
    rng = np.random.default_rng(1)
    exact = FORMATS[name].values(blocks_of(name))[:USUAL].astype(np.float64)
    for rows in (1, 3, 7, 9):
        x = (rng.standard_normal((rows, depth_of(name))) * np.geomspace(1e-3, 1e3, rows)[:, None]).astype(np.float32)
        got = product(name, isa, x)
        for one, row in zip(got[:, :USUAL], x.astype(np.float64) @ exact.T, strict=True):
            difference = compare(one, row, "f32", "matmul", epsilon=LOW_BIT_EPSILON)
            assert difference.ok, difference
        assert product(name, isa, x, threads=2).tobytes() == got.tobytes()
        assert np.concatenate([product(name, isa, row[None]) for row in x]).tobytes() == got.tobytes()


@pytest.mark.parametrize(("name", "isa"), MATRIX)
def test_the_largest_codes_and_numbers_overflow_no_sum(name: str, isa: str) -> None:
    """Numbers whose planes of bytes are 127 and 0, 127 and -64, 126 and 63, and the same with the other sign."""
    numbers = np.array([127 * 128, 127 * 128 - 64, 126 * 128 + 63])
    x = np.repeat(np.concatenate([numbers, -numbers])[:, None], depth_of(name), axis=1).astype(np.float32)
    x[:, ::32] = 127 * 128  # by which the numbers of a group are scaled
    exact = x.astype(np.float64) @ FORMATS[name].values(blocks_of(name))[:USUAL].astype(np.float64).T
    got = product(name, isa, np.concatenate([x, x]))[: len(x)]
    for row, many, want in zip(x, got, exact, strict=True):
        difference = compare(many[:USUAL], want, "f32", "matmul", epsilon=LOW_BIT_EPSILON)
        assert difference.ok, difference
        assert product(name, isa, row[None])[0].tobytes() == many.tobytes()


@pytest.mark.parametrize(("name", "isa"), MATRIX)
def test_rows_in_chunks_have_the_bits_of_single_ones(name: str, isa: str) -> None:
    """Two full chunks of rows that share expanded weights; three panels, of which the last is alone in its slice."""
    x = np.random.default_rng(3).standard_normal((2 * PAIR_CHUNK, depth_of(name))).astype(np.float32)
    one, three = (plan_of(name, isa, threads, USUAL) for threads in (1, 3))
    got, ids = np.asarray(one(x, np.zeros(1, np.int64))[0]), np.zeros(1, np.int64)
    assert np.asarray(three(x, ids)[0]).tobytes() == got.tobytes()
    for r in (0, 5, 200, PAIR_CHUNK - 1, PAIR_CHUNK, len(x) - 1):
        assert np.asarray(one(x[r : r + 1], ids)[0]).tobytes() == got[r : r + 1].tobytes(), r


@pytest.mark.parametrize(("name", "isa"), MATRIX)
def test_rows_of_strange_numbers_harm_no_others(name: str, isa: str) -> None:
    x = np.random.default_rng(2).standard_normal((6, depth_of(name))).astype(np.float32)
    usual = product(name, isa, x)[:, :USUAL]
    x[0, 5], x[2, -1], x[3], x[4] = np.nan, -np.inf, 0.0, np.float32(1e-40)
    got = product(name, isa, x)[:, :USUAL]
    assert not np.isfinite(got[[0, 2]]).any() and not got[3].any()
    assert np.abs(got[4]).max() < 1e-30
    assert got[[1, 5]].tobytes() == usual[[1, 5]].tobytes()
    for row, one in zip(x, got, strict=True):
        assert product(name, isa, row[None])[0, :USUAL].tobytes() == one.tobytes()


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_on_tile_units(name: str) -> None:
    """Their bits depend on no thread and on no other row, in whichever block of 16 they are."""
    rng, exact = np.random.default_rng(1), FORMATS[name].values(blocks_of(name))[:USUAL].astype(np.float64)
    x = (rng.standard_normal((ROWS, depth_of(name))) * np.geomspace(1e-3, 1e3, ROWS)[:, None]).astype(np.float32)
    got = product(name, "tiles", x)
    for one, row in zip(got[:, :USUAL], x.astype(np.float64) @ exact.T, strict=True):
        difference = compare(one, row, "f32", "matmul", epsilon=LOW_BIT_EPSILON)
        assert difference.ok, difference
    assert product(name, "tiles", x, threads=2).tobytes() == got.tobytes()
    assert product(name, "tiles", x[11:]).tobytes() == got[11:].tobytes()
    x[3, 5], x[20, -1], x[21], x[22] = np.nan, -np.inf, 0.0, np.float32(1e-40)
    strange = product(name, "tiles", x)[:, :USUAL]
    assert np.isnan(strange[[3, 20]]).all() and not strange[21].any() and np.abs(strange[22]).max() < 1e-30
    others = [r for r in range(ROWS) if r not in (3, 20, 21, 22)]
    assert strange[others].tobytes() == got[others, :USUAL].tobytes()


def source_of(target: Any) -> str:
    """The plan of a product and a lookup of every format."""
    params = {f"w_{name}": TensorType(LOW_BITS[name], (USUAL, depth_of(name))) for name in FORMATS}

    def forward(short: Any, long: Any, ids: Any, **tables: Any) -> Any:
        inputs = {depth: x for x in (short, long) for depth in x.type.shape[1:]}
        products = [REGISTRY["linear"](inputs[w.type.shape[1]], w) for w in tables.values()]
        return [*products, *(REGISTRY["embedding"](ids, w) for w in tables.values())]

    types = {"short": tensor_type("f32", "n", 352), "long": tensor_type("f32", "n", 512), "ids": tensor_type("i64", 3)}
    return render_cpu(make_plan(build_graph("tables", forward, types, params), target), "test").text


def test_a_gpu_multiplies_values_of_another_format_by_themselves() -> None:
    """The product of q, k and v over two weights is for CPUs."""
    inputs = {
        "x": tensor_type("f32", "b", "s", 256),
        "positions": tensor_type("i64", "b", "s"),
        **{name: tensor_type("f32", "b", 2, "capacity", 32) for name in ("k_cache", "v_cache")},
        "lengths": tensor_type("i32", "b"),
    }
    params = {
        "weight": TensorType(LOW_BITS["q4_k"], (6 * 32, 256)),
        "v_weight": TensorType(LOW_BITS["q6_k"], (2 * 32, 256)),
        **{name: tensor_type("f32", 64, 16) for name in ("sin", "cos")},
    }

    def forward(**given: Any) -> Any:
        return REGISTRY["qkv_rope_cache"](**given, heads=4, kv_heads=2, algo="gpt_neox")

    graph = build_graph("mixed", forward, inputs, params)
    plans = [make_plan(graph, target) for target in (cuda_target(90, 132, 227 << 10), cpu_target("neon", 16))]
    counts = [[step.kernel.family for step, _ in plan.steps()].count("linear") for plan in plans]
    assert counts == [2, 1]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("level", partly(["-fsyntax-only", "-O2"], lambda level: level == "-fsyntax-only"))
def test_plans_build_without_warnings(compiler: str, level: str, tmp_path: Path) -> None:
    openmp = ("-fopenmp",) if compiler == "gcc" else ()
    compile_strictly(
        compiler, source_of(host_target()), tmp_path, level, *openmp, target_flags=flags_for(host_target())
    )


@pytest.mark.full
@needs("x86_64-linux-gnu-gcc")
@pytest.mark.parametrize(
    ("isa", "options", "used"),
    [
        ("avx2", (), "vpmaddwd"),
        ("avx512", (), "vpmaddwd"),
        ("avx512", ("avx512_vnni",), "vpdpbusd"),
        ("amx", ("avx512_vnni",), "tdpbssd"),
    ],
)
def test_plans_for_x86_build_without_warnings(isa: str, options: tuple[str, ...], used: str, tmp_path: Path) -> None:
    target = cpu_target(isa, vector_bytes(isa))
    flags = (*compile_flags(CpuFeatures("x86_64", isa, options)), f"-DMP_LANES={target.lanes}", "-fopenmp")
    compile_strictly("x86_64-linux-gnu-gcc", source_of(target), tmp_path, "-O1", "-S", target_flags=flags)
    text = (tmp_path / "plan.o").read_text()
    assert used in text and "vpshufb" in text


@needs("x86_64-linux-gnu-gcc")
@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_dot_products_of_vnni_take_turns_with_prefetches(name: str, tmp_path: Path) -> None:
    """Compilers would move the prefetches of a unit to its front, and the sums of a row one behind the other."""
    fields = FORMATS[name].c_fields(16, 1)
    text = "\n".join(
        [
            *(f'#include "{header}"' for header in ("mp_plan.h", "mp_linear_blocks.h", f"mp_format_{name}.h")),
            f"static const mp_block_format mp_block_{name} = {{{fields}, .group = mp_group_{name}}};",
            f"MP_BLOCK_PANEL({name}, one, 1)",
            f"mp_block_panel panel = mp_panel_{name}_one;",
        ]
    )
    flags = compile_flags(CpuFeatures("x86_64", "avx512", ("avx512_vnni",)))
    options = "-O3", "-ffp-contract=fast", "-fopenmp", "-Wno-unused-function", "-S"
    compile_strictly("x86_64-linux-gnu-gcc", text, tmp_path, *options, target_flags=(*flags, "-DMP_LANES=16"))
    body = (tmp_path / "plan.o").read_text().split(f"mp_panel_{name}_one:")[1].split(".cfi_endproc")[0]
    found = re.findall(r"\b(vpdpbusd|prefetcht[01])\s.*?(\w+)\)?$", body, re.MULTILINE)
    sums = [register for instruction, register in found if instruction == "vpdpbusd"]
    prefetches = [i for i, (instruction, _) in enumerate(found) if instruction != "vpdpbusd"]
    assert len(sums) == 2 * 256 // 4 and len(prefetches) >= FORMATS[name].unit_bytes // 64
    assert sum(i < len(found) // 2 for i in prefetches) < 0.6 * len(prefetches)
    if not FORMATS[name].half_scales:
        assert all(len(set(sums[i : i + 4])) == 4 for i in range(0, len(sums), 4))
