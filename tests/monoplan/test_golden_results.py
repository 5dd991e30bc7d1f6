"""The project's own golden results, by its own fixture: they were recorded once, and every machine must give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.frontend.parameter import manual_seed
from monoplan.inspect.golden import GoldenFixture
from monoplan.nn import functional as F
from tests.runtime.test_bisect import small_llama


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.gate, self.up, self.down = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return {"y": x + self.down(F.silu(self.gate(y)) * self.up(y)), "probabilities": F.softmax(x, dim=-1)}


def test_a_block(golden: GoldenFixture) -> None:
    manual_seed(3)
    fast = mp.compile(Block(), mp.spec("batch", "seq", 24))
    rng = np.random.default_rng(3)
    golden.check(fast, rng.normal(size=(2, 5, 24)).astype("f4"), seed=3)
    golden.check(fast, rng.normal(size=(1, 1, 24)).astype("f4"), seed=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_language_model(golden: GoldenFixture, dtype: str) -> None:
    llm = mp.compile(small_llama(layers=3, dtype=dtype))
    golden.check(llm.compiled, **llm.step_arguments(np.array([[1, 5, 9, 2, 44, 7]])), seed=0)
