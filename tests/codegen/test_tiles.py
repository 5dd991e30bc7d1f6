"""Weights in tiles on an emulated GPU: lookups that give the values, products of one row, of a few and of many."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.formats import choose_format
from monoplan.codegen.formats.blocks import BLOCK_FORMATS
from monoplan.codegen.formats.tiles import TILES
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target, cuda_target
from monoplan.frontend.parameter import Parameter, low_bit_part
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.types import LOW_BITS, TensorType, bf16
from monoplan.nn import functional as F
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from monoplan.runtime.cpu.weights import Source
from monoplan.runtime.cuda.executable import CudaExecutable
from monoplan.runtime.cuda.weights import Packer, upload_params
from tests.codegen import cuda_emulator
from tests.matrices import partly
from tests.needs import needs

FORMATS = {f.name: f for f in BLOCK_FORMATS}
COLUMNS, QUICK = 40, ("q4_k", "q6_k", "bf16_12", "fp8_128")  # rows of a weight: two strips and a half
NAMES = partly([*FORMATS, "bf16_12"], lambda name: name in QUICK)


def depth_of(name: str) -> int:
    """Blocks of 32 do not fill the last tile."""
    block = 256 if name == "bf16_12" else LOW_BITS[name].block
    return (544 + block - 1) // block * block


def bf16_weight() -> Any:
    """Numbers that fit 12 bits and some that do not; a tile of zeros, and one with too many exceptions."""
    rng = np.random.default_rng(3)
    w = rng.standard_normal((COLUMNS, depth_of("bf16_12"))).astype(np.float32)
    w[3, 5], w[4, 300], w[20, 7], w[39, 767], w[21, 700] = 0.0, -0.0, 1e-30, 200.0, -1e-6
    w[16:32, 256:512] = 0.0
    w[0, 512:520] = 0.0
    w[9, 520] = 1e38
    return w.astype(ml_dtypes.bfloat16)


@functools.cache
def weight(name: str) -> tuple[Any, Any]:
    """What the format keeps, and its values."""
    if name == "bf16_12":
        return bf16_weight(), bf16_weight().astype(np.float32)
    f, rng = FORMATS[name], np.random.default_rng(0)
    shape = COLUMNS, depth_of(name) // f.dtype.block, f.dtype.block_bytes
    raw = rng.integers(0, 256, shape, np.uint8)
    if f.floats:
        raw[raw & 127 == 127] ^= 1  # no number: a block that has one has such a scale too
    for place, dtype in f.scales:
        scales = rng.standard_normal((*shape[:2], 1)).astype(dtype).view(np.uint8)
        raw[..., place : place + scales.shape[2]] = scales
    if f.zeros and not f.signed:
        raw[..., -1] &= 15
    if name == "mxfp4":
        raw[..., 0] = rng.integers(120, 131, shape[:2])
        raw[0, :2, 0] = 0, 1  # whose powers are no normal numbers
    raw = raw.reshape(COLUMNS, -1)
    return raw, f.values(raw)


class Table(nn.Module):
    """A product behind a norm, one without, and a lookup of rows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        raw, values = weight(name)
        self.norm = nn.RMSNorm(depth_of(name), dtype="bfloat16")
        self.norm.weight.load(np.linspace(0.5, 1.5, depth_of(name)).astype(ml_dtypes.bfloat16))
        self.weight = Parameter.empty(values.shape, "bfloat16")
        if name == "bf16_12":
            self.weight.load(raw)
            return
        dtype = LOW_BITS[name]
        self.weight.defer(
            lambda part=None: values if part is None else part.cut(values),
            None,
            dtype,
            lambda part=None: low_bit_part(raw, part, dtype),
        )

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (F.linear(self.norm(x), self.weight), F.linear(x, self.weight), F.embedding(ids, self.weight))


@functools.cache
def executable(name: str, library: bool) -> CudaExecutable:
    device = cuda_emulator.EmulatedDevice(library=library)
    device.target = replace(device.target, compact=True)
    sizes = mp.spec("rows", depth_of(name), dtype="bfloat16"), mp.spec("ids", dtype="i64")
    traced = trace(Table(name), *sizes)
    plan = make_plan(run_passes(traced.graph, PIPELINE)[-1].graph, device.target)
    source = render_cuda(plan, "test")
    assert "mp_linear_tiles_row<" in source.text and "mp_tile_fetch<" in source.text
    read = Source(
        lambda path, part: np.asarray(traced.params[path].numpy()),
        lambda path: False,
        blocks=lambda path, part: traced.params[path].read_blocks(part),
    )
    return CudaExecutable(plan, source, upload_params(plan, read, device), device)


def run(name: str, x: Any, ids: Any, library: bool = False) -> Any:
    return executable(name, library).run([x, ids], {"rows": len(x), "ids": len(ids)})


def test_every_block_format_has_tiles_of_its_size() -> None:
    assert FORMATS.keys() == TILES.keys()
    for name, f in FORMATS.items():
        packed = f.pack_rows(weight(name)[0][:16, : f.dtype.stored_bytes(256)])
        assert packed.nbytes == f.tile_bytes
        assert packed.nbytes <= 1.04 * f.dtype.stored_bytes(16 * 256)  # a scale of q3_k is a byte


def test_what_does_not_fit_is_kept_otherwise() -> None:
    gpu = cuda_target(90, 132, 232448, True)
    compact = replace(gpu, compact=True)
    found = choose_format(TensorType(bf16, (40, 512)), compact), choose_format(TensorType(bf16, (40, 500)), compact)
    assert [f.name for f in found if f is not None] == ["bf16_12", "bf16"]
    for target in (gpu, replace(cuda_target(75, 40, 65536, True), compact=True), cpu_target("avx2", 32)):
        kept = choose_format(TensorType(bf16, (40, 512)), target)
        assert kept is not None and kept.name == "bf16"


@needs("g++")
def test_the_kernel_that_packs_makes_the_tiles_of_numpy() -> None:
    """Any bits: with raw tiles, numbers below the normal ones, infinities among zeros, rows that fill no strip."""
    rng = np.random.default_rng(5)
    w = rng.integers(0, 1 << 16, (72, 768), np.uint16)
    w[:16] = (
        (rng.standard_normal((16, 768)) * 10.0 ** rng.integers(-3, 3, (16, 768))).astype(bf16.numpy).view(np.uint16)
    )
    w[16:32, :256] = rng.standard_normal((16, 256)).astype(bf16.numpy).view(np.uint16)
    w[20, :5], w[16:32, 256:512], w[32:48, :512] = 0, 0x8000, 0
    w[17, 300], w[40, 7], w[41, 300] = 1, 0x7F80, 0xFFFF
    kept = choose_format(TensorType(bf16, (72, 768)), replace(cuda_target(90, 132, 232448), compact=True))
    assert kept is not None and kept.cuda_pack
    made = Packer(cuda_emulator.EmulatedDevice()).packed(w.view(bf16.numpy), kept)
    assert np.array_equal(made.array[: made.nbytes], kept.pack_rows(w.view(bf16.numpy)))
    heads = made.array[: 15 * kept.tile_bytes].reshape(15, -1)[:, -32:].copy().view(np.uint32)[:, 0]
    assert 0 < np.count_nonzero(heads >> 16) < 15 and any(heads >> 8 & 15)
    assert heads[6] >> 16  # the infinity among zeros


@needs("g++")
@pytest.mark.parametrize("name", NAMES)
def test_a_lookup_gives_the_values(name: str) -> None:
    ids = np.arange(COLUMNS)[::-1].copy()
    got = np.asarray(run(name, np.zeros((1, depth_of(name)), ml_dtypes.bfloat16), ids)[2]).astype(np.float32)
    want = weight(name)[1][ids]
    assert np.array_equal(got, want.astype(got.dtype)), np.argwhere(got != want)[:10]


@needs("g++")
@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_products(name: str, library: bool) -> None:
    """One row is exact but for sums in f32; of more rows the norm's result is rounded to bf16."""
    rng, values = np.random.default_rng(1), weight(name)[1].astype(np.float64)
    if name == "bf16_12":
        values[9, 520] = 0.0  # its products hide all others
    gamma = np.linspace(0.5, 1.5, depth_of(name)).astype(ml_dtypes.bfloat16).astype(np.float64)
    for rows in (1, 2, 9, 40):
        x = rng.standard_normal((rows, depth_of(name))).astype(ml_dtypes.bfloat16)
        x[:, 520] = 0.0
        wide = x.astype(np.float64)
        normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * gamma
        got = run(name, x, np.zeros(1, np.int64), library)
        for one, given, rounded in zip(got[:2], (normed, wide), (rows > 1, False), strict=True):
            want = given @ values.T
            size = np.abs(given) @ np.abs(values).T
            # Results are bf16, and so are the values of an expanded weight.
            slack = 2.0**-8 * np.abs(want) + size * ((2.0**-9 if rounded else 0) + (2.0**-9 if rows > 32 else 2.0**-17))
            assert (np.abs(np.asarray(one).astype(np.float64) - want) <= slack).all(), (rows, name)
