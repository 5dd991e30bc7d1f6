"""What a call costs outside of the plan: medians of the time around a call, less that of the plan's own run.

    python benchmarks/call_cost.py                # a small model of 30 layers, and plain modules
    python benchmarks/call_cost.py path/to/model  # a decode step of a model, in bfloat16

"hot" is the same without running the plan at all, which otherwise drives Python out of the processor's caches.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import monoplan as mp
from monoplan import nn
from monoplan.models import AutoLlamaModel, LlamaConfig, LlamaForCausalLM
from monoplan.runtime.cpu.executable import CpuExecutable


class Clock:
    """Takes the place of CpuExecutable.enter, and counts the seconds spent there."""

    def __init__(self) -> None:
        self.seconds, self.enter, self.runs = 0.0, CpuExecutable.enter, True
        CpuExecutable.enter = lambda executable, args, error: self.timed(executable, args, error)  # type: ignore

    def timed(self, executable: Any, args: Any, error: Any) -> int:
        begin = time.perf_counter()
        try:
            return self.enter(executable, args, error) if self.runs else 0
        finally:
            self.seconds += time.perf_counter() - begin

    def outside(self, call: Callable[[], Any], count: int = 200) -> float:
        """Microseconds of a call outside of the plan."""
        found = []
        for _ in range(count):
            self.seconds, begin = 0.0, time.perf_counter()
            call()
            found.append(time.perf_counter() - begin - self.seconds)
        return statistics.median(found) * 1e6

    def show(self, name: str, call: Callable[[], Any], reset: Callable[[], None] = lambda: None) -> None:
        """A line with both figures."""
        call()
        figures = []
        for self.runs in (True, False):
            reset()
            figures.append(self.outside(call))
        self.runs = True
        reset()
        print(f"{name:24s} {figures[0]:8.1f} us  {figures[1]:8.1f} us hot")


class Few(nn.Module):
    def forward(self, a: Any, b: Any, c: Any) -> Any:
        return {"x": a + b, "y": b * c}


def main(path: str | None) -> None:
    clock = Clock()
    if path is None:
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=30,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=512,
            max_position_embeddings=2048,
        )
        model = LlamaForCausalLM.from_config(config)
    else:
        model = AutoLlamaModel.from_pretrained(path)
    llm = mp.compile(model, dtype="bfloat16")
    cache, ids = llm.new_cache(1, 512), np.array([[5]])
    clock.show("llm.step(ids, cache)", lambda: llm.step(ids, cache), cache.reset)
    clock.show("llm(ids, cache)", lambda: llm(ids, past_key_values=cache), cache.reset)
    stream = [0.0]

    def generate() -> None:
        stamps = []
        llm.generate_batch(
            [[1, 2, 3]], 100, eos_token_id=(), callback=lambda *_: stamps.append(time.perf_counter() - clock.seconds)
        )
        stream[0] = statistics.median(b - a for a, b in zip(stamps, stamps[1:], strict=False)) * 1e6

    generate()
    print(f"{'generate, a token':24s} {stream[0]:8.1f} us")
    few, arrays = mp.compile(Few()), [np.ones((4, 8), np.float32) for _ in range(3)]
    clock.show("three arrays", lambda: few(*arrays))
    clock.show("three new arrays", lambda: few(*[a.copy() for a in arrays]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
