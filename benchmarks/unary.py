"""Unary functions and linear + GELU on one thread, beside torch eager in the same run, calls alternating.

    python benchmarks/unary.py [--repeats 41] [--only exp gelu]

Needs torch. Times are medians in microseconds; the last column is torch's time over monoplan's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # libraries below torch take all cores otherwise
os.environ.setdefault("MONOPLAN_NUM_THREADS", "1")

import numpy as np
import torch

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn

SHAPES = ((130, 768), (1000, 1000))
SAME_NAME = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "log10", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "erfc",
    "atan", "sinh", "cosh", "asin", "acos", "sqrt", "rsqrt",
)  # fmt: skip
Function = Callable[[Any], Any]


def functions() -> dict[str, tuple[Function, Function]]:
    """By name: monoplan's and torch's."""
    found: dict[str, tuple[Function, Function]] = {n: (getattr(F, n), getattr(torch, n)) for n in SAME_NAME}
    theirs = torch.nn.functional
    found |= {n: (getattr(F, n), getattr(theirs, n)) for n in ("gelu", "silu", "softplus")}
    found["gelu tanh"] = (lambda x: F.gelu(x, "tanh"), lambda x: theirs.gelu(x, approximate="tanh"))
    found["pow 2.5"] = (lambda x: x**2.5, lambda x: x**2.5)
    return found


class Apply(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class LinearGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(768, 3072)

    def forward(self, x: Any) -> Any:
        return F.gelu(self.linear(x))


def compare(name: str, ours: Function, theirs: Function, x: np.ndarray[Any, Any], repeats: int) -> None:
    given, times = torch.from_numpy(x), ([], [])  # type: tuple[Any, tuple[list[float], list[float]]]
    calls = (lambda: ours(x), lambda: theirs(given))
    for call in calls:
        call()
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    a, b = map(statistics.median, times)
    print(f"{name:12} {'x'.join(map(str, x.shape)):>10} {a * 1e6:10.1f} {b * 1e6:10.1f} {b / a:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    print(f"{'':12} {'':10} {'monoplan':>10} {'torch':>10} {'times':>8}")
    for name, (ours, theirs) in functions().items():
        if args.only and name not in args.only:
            continue
        fast = mp.compile(Apply(ours))
        for shape in SHAPES:
            compare(name, fast, theirs, rng.uniform(0.05, 0.95, shape).astype(np.float32), args.repeats)
    if not args.only or "linear+gelu" in args.only:
        module = LinearGelu()
        other = torch.nn.Linear(768, 3072)
        compare(
            "linear+gelu", mp.compile(module), lambda x: torch.nn.functional.gelu(other(x)),
            rng.standard_normal((130, 768)).astype(np.float32), args.repeats,
        )  # fmt: skip


if __name__ == "__main__":
    with torch.inference_mode():
        main()
