"""Residual streams in place: where they may be, where they must not, and the same numbers either way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.codegen.kernels import Linear
from monoplan.frontend import functional as F
from tests.tolerances import check


class Layer(nn.Module):
    """x + f(x), then y + g(y): f begins with a tanh, or is the product itself."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.direct = direct
        self.first, self.second, self.third = (nn.Linear(48, 48, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        y = x + self.first(x if self.direct else F.tanh(x))
        return y + self.third(F.tanh(self.second(y)))


class Stack(nn.Module):
    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(direct) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_sums_in_place(direct: bool, rows: int) -> None:
    module = Stack(direct)
    fast = mp.compile(module, mp.spec("n", 48), options={"threads": 2})
    x = np.random.default_rng(rows).standard_normal((rows, 48)).astype(np.float32)
    got = np.asarray(fast(x))
    reference = mp.compile(module, mp.spec("n", 48), target="reference")
    check(got, np.asarray(reference(x)).astype(np.float64), "f32", "matmul", 16.0)
    kernels = [step.kernel for step, count in fast.plan.steps() if count == 4]
    adds = [k for k in kernels if isinstance(k, Linear) and k.has("e0")]
    assert len(adds) == 2
    in_place = [k.operand("y").view.buffer is k.operand("e0").view.buffer for k in adds]
    assert in_place == [not direct, not direct]  # the first product reads all of x while its result is written
