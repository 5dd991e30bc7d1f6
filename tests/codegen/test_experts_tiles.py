"""Experts in panels: few rows; pairs of one low-bit matrix on tile units, which are emulated here."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.codegen.cpu.schedule_linear import BLOCK_TILED
from monoplan.frontend.parameter import Parameter, low_bit_part
from monoplan.frontend.tensor import Tensor
from monoplan.ir.ops.linear import expert_linear
from monoplan.ir.tolerances import LOW_BIT_EPSILON, compare
from monoplan.ir.types import LOW_BITS
from monoplan.nn import functional as F
from tests.codegen.test_cuda_experts import CHOICES, depth_of, matrices
from tests.matrices import partly

NAMES = partly(["q8_0", "q4_k", "mxfp4", "fp8_128", "int4_64_bf16"], lambda name: False)  # building takes long


class Experts(nn.Module):
    """A gated product by chosen matrices, and one by the first of them alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        dtype = LOW_BITS[name]
        for seed, path in enumerate(("gate", "up")):
            raw, values = matrices(name, seed)
            parameter = Parameter.empty(values.shape)
            blocks = functools.partial(lambda part=None, raw=None: low_bit_part(raw, part, dtype), raw=raw)
            parameter.defer(lambda part=None, values=values: values, None, dtype, blocks)
            setattr(self, path, parameter)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return F.expert_linear(x, self.gate, ids, self.up, gate="silu"), F.expert_linear(x, self.gate, ids)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_of_one_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few, enough for tile units, and more than they take at a time; their bits depend on no thread."""
    monkeypatch.setenv("MONOPLAN_ISA", "tiles")
    sizes = mp.spec("rows", depth_of(name)), mp.spec("rows", CHOICES, dtype="i64")
    one, two = (mp.compile(Experts(name), *sizes, options={"threads": n}) for n in (1, 2))
    weights = [np.asarray(matrices(name, seed)[1], np.float64) for seed in range(2)]
    for rows in (3, 70, 210):
        rng = np.random.default_rng(rows)
        x, ids = rng.standard_normal((rows, depth_of(name)), np.float32), rng.choice([0, 2, 2, 2, 4], (rows, CHOICES))
        got = [np.asarray(a) for a in one(x, ids)]
        assert [np.asarray(a).tobytes() for a in two(x, ids)] == [a.tobytes() for a in got]
        wide = x.astype(np.float64)
        exact: list[Any] = [expert_linear.reference(wide, weights[0], ids, weights[1], gate="silu")]
        exact.append(expert_linear.reference(wide, weights[0], ids))
        for a, b in zip(got, exact, strict=True):
            difference = compare(a, b, "f32", "matmul", scale=float(np.abs(b).max()), epsilon=LOW_BIT_EPSILON)
            assert difference.ok, difference
    assert f".tiled_from = {BLOCK_TILED}" in one.source()
    alone = np.concatenate([np.asarray(one(x[i : i + 1], ids[i : i + 1])[1]) for i in range(20)])
    assert not np.array_equal(alone, got[1][:20])  # tile units have scales of 256 numbers: other bits


class FewExperts(nn.Module):
    """A gated product, whose choices share a row, and one that has a row for each of them. Columns are whole panels
    of every instruction set."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.gate, self.up = (Parameter(rng.standard_normal((9, 288, 48), np.float32)) for _ in range(2))
        self.down = Parameter(rng.standard_normal((9, 160, 288), np.float32))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.expert_linear(F.expert_linear(x, self.gate, ids, self.up, gate="silu"), self.down, ids)


def test_few_rows() -> None:
    """Rows that choices share are packed once, up to a block of them; three threads have parts of a matrix each."""
    sizes = mp.spec("rows", 48), mp.spec("rows", 4, dtype="i64")
    module = FewExperts()
    one, three = (mp.compile(module, *sizes, options={"threads": n}) for n in (1, 3))
    assert ".shared = 1" in one.source() and ".shared = 0" in one.source()
    gate, up, down = (np.asarray(w.numpy(), np.float64) for w in (module.gate, module.up, module.down))
    for rows in (1, 2, 4, 9, 40):
        rng = np.random.default_rng(rows)
        x, ids = rng.standard_normal((rows, 48), np.float32), rng.integers(0, 9, (rows, 4))
        ids[0] = 7  # one matrix four times
        got = np.asarray(one(x, ids))
        assert np.asarray(three(x, ids)).tobytes() == got.tobytes()
        alone = [np.asarray(three(x[i : i + 1], ids[i : i + 1])) for i in range(rows)]
        assert np.concatenate(alone).tobytes() == got.tobytes()
        inner = expert_linear.reference(x.astype(np.float64), gate, ids, up, gate="silu")
        exact = expert_linear.reference(inner, down, ids)
        difference = compare(got, exact, "f32", "matmul", scale=float(np.abs(exact).max()))
        assert difference.ok, difference
