"""monoplan as its users run it: a folder, `mp.compile`, calls with a cache; a variant is an instruction set."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from cpu_peers.engine import Ids, Job, StepEngine
from cpu_peers.workload import DTYPES


class MonoplanEngine(StepEngine):
    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.cache: Any = None
        self.caches: dict[int, Any] = {}
        self.about = f"{llm.target}, {llm.dtype}"

    def reset(self, capacity: int) -> None:
        if capacity not in self.caches:
            self.caches[capacity] = self.llm.new_cache(1, capacity)
        self.cache = self.caches[capacity]
        self.cache.reset()

    def step(self, ids: Ids) -> int:
        return int(self.llm.step(ids, self.cache)["token"][0])

    def growth(self, prompts: list[list[int]], steps: int, capacities: list[int]) -> list[list[float]]:
        """A step of each in turn, with a cache of its own: what others do on the machine touches all alike."""
        tokens: list[int] = []
        for ids, capacity in zip(prompts, capacities, strict=True):
            self.reset(capacity)
            tokens.append(self.step(np.asarray([ids], np.int64)))
        seconds: list[list[float]] = [[] for _ in prompts]
        for _ in range(steps):
            for i, capacity in enumerate(capacities):
                self.cache = self.caches[capacity]
                begin = time.perf_counter()
                tokens[i] = self.step(np.array([[tokens[i]]], np.int64))
                seconds[i].append(time.perf_counter() - begin)
        return seconds


def open_engine(job: Job, variant: str) -> MonoplanEngine:
    if variant:
        os.environ["MONOPLAN_ISA"] = variant  # before the plan's target is chosen
    import monoplan as mp
    from monoplan.models import AutoLlamaModel

    path = job.file or (job.work.gguf if job.work.low_bit else job.work.checkpoint)
    model = AutoLlamaModel.from_pretrained(path, dtype=DTYPES.get(job.work.dtype), progress=False)
    return MonoplanEngine(mp.compile(model, options={"threads": job.threads}).prepare())
