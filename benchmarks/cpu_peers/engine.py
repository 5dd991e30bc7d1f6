"""What a worker asks of a peer: a prompt from an empty cache, steps after it, greedy tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpu_peers.workload import Workload

Ids = np.ndarray[Any, Any]


class Unavailable(Exception):
    """This peer can't run here; the text is the reason that is printed."""


@dataclass(frozen=True)
class Job:
    """All that a worker is told when it starts."""

    peer: str
    work: Workload
    threads: int
    cpus: list[int]
    capacity: int  # the most tokens that any command will put into the cache
    cache: Path  # for what a peer keeps between processes: compiled code, its own form of the model
    file: Path | None = None  # a model to load in place of the workload's

    def to_json(self) -> dict[str, Any]:
        work = {"model": self.work.model, "dtype": self.work.dtype, "folder": str(self.work.folder)}
        paths = {"cache": str(self.cache), "file": None if self.file is None else str(self.file)}
        rest = {"peer": self.peer, "threads": self.threads, "cpus": self.cpus, "capacity": self.capacity}
        return {"work": work, **rest, **paths}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        work = {**data["work"], "folder": Path(data["work"]["folder"])}
        paths = {"cache": Path(data["cache"]), "file": data["file"] and Path(data["file"])}
        return cls(**{**data, **paths, "work": Workload(**work)})


class Engine:
    """A peer with its model loaded."""

    about = ""  # versions and settings, for the JSON

    def prefill(self, ids: list[int], capacity: int) -> float:
        """Seconds of a prompt from an empty cache to its first greedy token."""
        raise NotImplementedError

    def decode(self, ids: list[int], steps: int, capacity: int) -> list[float]:
        """Seconds of each step after a prompt, which is not timed; a step is a token in and a greedy token out."""
        raise NotImplementedError

    def growth(self, prompts: list[list[int]], steps: int, capacities: list[int]) -> list[list[float]]:
        """Seconds of each step after each of these prompts."""
        return [self.decode(ids, steps, capacity) for ids, capacity in zip(prompts, capacities, strict=True)]

    def tokens(self, ids: list[int], count: int, capacity: int) -> list[int]:
        """The greedy continuation, by which the runner sees that all peers run the same model."""
        raise NotImplementedError

    def settle(self) -> None:
        """Called after the warm-up: from here on nothing may be compiled."""


class StepEngine(Engine):
    """A peer that is driven token by token from Python: it has `reset` and `step`, and the loop is here."""

    def reset(self, capacity: int) -> None:
        """Empties the cache with room for `capacity` tokens."""
        raise NotImplementedError

    def step(self, ids: Ids) -> int:
        """Runs [1, seq] more tokens and gives the greedy token after them."""
        raise NotImplementedError

    def prefill(self, ids: list[int], capacity: int) -> float:
        self.reset(capacity)
        array = np.asarray([ids], np.int64)
        begin = time.perf_counter()
        self.step(array)
        return time.perf_counter() - begin

    def decode(self, ids: list[int], steps: int, capacity: int) -> list[float]:
        self.reset(capacity)
        token, seconds = self.step(np.asarray([ids], np.int64)), []
        for _ in range(steps):
            begin = time.perf_counter()
            token = self.step(np.array([[token]], np.int64))
            seconds.append(time.perf_counter() - begin)
        return seconds

    def tokens(self, ids: list[int], count: int, capacity: int) -> list[int]:
        self.reset(capacity)
        found = [self.step(np.asarray([ids], np.int64))]
        while len(found) < count:
            found.append(self.step(np.array([[found[-1]]], np.int64)))
        return found
