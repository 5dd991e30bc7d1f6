"""Parts of a concat are written to their places in it where nobody else reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn


class Parts(nn.Module):
    def __init__(self, read_twice: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.read_twice = nn.RMSNorm(8), nn.RMSNorm(12), read_twice

    def forward(self, x: Any, y: Any) -> Any:
        first, second = self.a(x), self.b(y)
        batch, seq, _ = x.shape
        joined = F.cat([first.view(batch, seq, 1, 8), second.view(batch, seq, 1, 12)], -1)
        return (joined, F.exp(first)) if self.read_twice else joined


def test_parts_are_written_in_place() -> None:
    rng = np.random.default_rng(0)
    for twice, families in ((False, ["norm", "norm"]), (True, ["norm", "norm", "pointwise", "pointwise"])):
        module = Parts(twice)
        fast = mp.compile(module, mp.spec("batch", "seq", 8), mp.spec("batch", "seq", 12))
        for batch, seq in ((1, 1), (3, 5)):
            given = [rng.standard_normal((batch, seq, n), np.float32) for n in (8, 12)]
            got, want = fast(*given), module(*given)
            for a, b in zip(got, want, strict=True) if twice else [(got, want)]:
                np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-5)
        assert sorted(step.kernel.family for step, _ in fast.plan.steps()) == families
