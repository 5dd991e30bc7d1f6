"""A GRU over a long sequence beside torch: its cell in a Python loop, and its own layer; build time and time of a step.

Runs take turns, and the least time of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import monoplan as mp
from monoplan import nn
from monoplan.runtime.machine.threads import default_threads


class Recurrent(nn.Module):
    """The cell under mp.scan, as a user writes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(size, size)

    def forward(self, x: Any, h: Any) -> Any:
        return mp.scan(lambda state, now: (self.cell(now, state),) * 2, h, x)


def peers(module: Recurrent, x: np.ndarray[Any, Any]) -> dict[str, Callable[[], Any]]:
    """torch's ways to run the same weights, where it is installed."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(default_threads().count)
    size = module.cell.hidden_size
    cell, layer = torch.nn.GRUCell(size, size), torch.nn.GRU(size, size)
    weights = {name: torch.from_numpy(p.numpy()) for name, p in module.cell.named_parameters()}
    cell.load_state_dict(weights)
    layer.load_state_dict({f"{name}_l0": w for name, w in weights.items()})
    xs, first = torch.from_numpy(x), torch.zeros(x.shape[1], size)

    @torch.inference_mode()
    def loop() -> Any:
        h, ys = first, []
        for now in xs:
            h = cell(now, h)
            ys.append(h)
        return torch.stack(ys)

    @torch.inference_mode()
    def whole() -> Any:
        return layer(xs)[0]

    return {"torch, GRUCell in a loop": loop, "torch, nn.GRU": whole}


def compare(module: Recurrent, fast: Any, batch: int, length: int, repeats: int) -> None:
    """Prints the time of a step of each, and how far its results are from the plan's."""
    size = module.cell.hidden_size
    x = np.random.default_rng(0).normal(size=(length, batch, size)).astype(np.float32)
    h = np.zeros((batch, size), np.float32)
    runs: dict[str, Callable[[], Any]] = {"monoplan": lambda: fast(x, h)[1], **peers(module, x)}
    results = {name: np.asarray(run()) for name, run in runs.items()}
    times = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - begin)
    for name, seconds in times.items():
        far = float(np.abs(results[name] - results["monoplan"]).max())
        step, ratio = seconds / length * 1e6, seconds / times["monoplan"]
        print(f"  batch {batch}  {name:<26} {step:9.2f} µs a step {ratio:6.2f} x  (differs by {far:.0e})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for size in args.sizes:
        module = Recurrent(size)
        begin = time.perf_counter()
        fast = mp.compile(module, mp.spec("seq", "batch", size), mp.spec("batch", size))
        print(f"size {size}: compiled in {time.perf_counter() - begin:.2f} s", flush=True)
        for batch in args.batch:
            compare(module, fast, batch, args.length, args.repeats)


if __name__ == "__main__":
    main()
