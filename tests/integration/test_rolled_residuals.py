"""Rolled layers whose last product adds to the value that goes round: it is written over that value where nobody else
reads it, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn


class Parallel(nn.Module):
    """Two products side by side, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.RMSNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return x + self.a(y) + self.b(F.gelu(y))


class Direct(Parallel):
    """The last product reads all of what it adds to."""

    def forward(self, x: Any) -> Any:
        return x + self.b(F.relu(x)) + self.a(x)


class Stack(nn.Module):
    def __init__(self, kind: type[Parallel]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x) * 0.5
        return x


@pytest.mark.parametrize(("kind", "kernels"), [(Parallel, 4), (Direct, 4)])
def test_sums_are_right_wherever_they_are_written(kind: type[Parallel], kernels: int) -> None:
    module = Stack(kind)
    fast = mp.compile(module, mp.spec("n", 16))
    for rows in (1, 5, 70):
        x = np.random.default_rng(rows).standard_normal((rows, 16), np.float32)
        np.testing.assert_allclose(fast(x), module(x).numpy(), rtol=0, atol=1e-4)
    in_loop = [step.kernel.family for step, count in fast.plan.steps() if count > 1]
    assert len(in_loop) == kernels, in_loop
    assert (in_loop[-1] == "pointwise") == (kind is Direct), "a copy, where all of the value is read"
