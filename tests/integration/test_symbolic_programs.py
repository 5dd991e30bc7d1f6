"""Random modules over arrays of any size: a plan gives what eager execution gives, or says that a size does not fit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.frontend.tensor import Tensor
from monoplan.ir.shape_constraints import SizeError
from monoplan.nn import functional as F
from tests.matrices import partly

# What becomes of z [rows, columns]; a, b are small numbers
CHANGES: dict[str, Callable[[Any, int, int], Any]] = {
    "some rows": lambda z, a, b: z[a : a + b],
    "last rows": lambda z, a, b: z[-b:],
    "every b-th row": lambda z, a, b: z[::b],
    "without first columns": lambda z, a, b: z[:, a:],
    "without last columns": lambda z, a, b: z[:, :-b],
    "a column more": lambda z, a, b: F.cat([z, z[:, :1]], 1),
    "twice": lambda z, a, b: F.cat([z, z * 2], 0),
    "rows of zeros more": lambda z, a, b: F.cat([z, F.zeros(b, z.shape[1])], 0),
    "turned": lambda z, a, b: z.transpose(0, 1),
    "sums so far": lambda z, a, b: F.cumsum(z, a % 2),
    "shares": lambda z, a, b: F.softmax(z, -1),
    "normed": lambda z, a, b: z / (1 + F.abs(z).sum(dim=-1, keepdim=True)),
    "moved": lambda z, a, b: z * b + a,
    "chosen": lambda z, a, b: F.where(z > 0.25, z, z * 0.5),
    "product": lambda z, a, b: z @ z.transpose(0, 1),
}
RESULTS: dict[str, Callable[[Any, int], Any]] = {
    "sum": lambda z, a: z.sum(dim=a % 2),
    "largest": lambda z, a: z.amax(dim=1),
    "flat": lambda z, a: z.reshape(-1) * 2,
    "one row": lambda z, a: z[a] + 1,
}
SIZES = ((5, 6), (9, 7), (1, 1), (2, 3), (3, 0), (0, 3), (17, 33), (4, 4), (5, 6))


class Program(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        names = [*CHANGES, *RESULTS]
        self.steps = [(choose.choice(names), choose.randint(0, 4), choose.randint(1, 4)) for _ in range(6)]

    def forward(self, x: Any, y: Any) -> Any:
        found = [y * 2]
        for name, a, b in self.steps:
            if name in CHANGES:
                x = CHANGES[name](x, a, b)
            else:
                found.append(RESULTS[name](x, a))
        return [x, *found]


MANY = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 120)]


@pytest.mark.parametrize("seed", [*partly(range(12), lambda seed: seed < 4), *MANY])
def test_any_size(seed: int) -> None:
    """Slices that Python would end earlier are refused; nothing else is, and nothing is computed wrong."""
    module = Program(seed)
    try:
        fast = mp.compile(module, mp.spec("n", "m"), mp.spec("m"))
    except mp.MonoplanError:
        for rows, columns in SIZES:  # then no size does
            with pytest.raises(mp.MonoplanError):
                module(Tensor(np.zeros((rows, columns), np.float32)), Tensor(np.zeros(columns, np.float32)))
        return
    ran = 0
    for rows, columns in SIZES:
        rng = np.random.default_rng(seed)
        x, y = (rng.normal(size=s).astype(np.float32) for s in ((rows, columns), columns))
        try:
            got = fast(x, y)
        except SizeError:
            continue
        ran += 1
        for a, b in zip(got, module(Tensor(x), Tensor(y)), strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-4, atol=1e-5, err_msg=str(module.steps))
    assert ran, f"no size went through {module.steps}"
