"""The machine's own limits, measured beside the peers: a plain read loop, multiply-adds, tiles."""

from __future__ import annotations

from statistics import median
from typing import Any

from cpu_peers.engine import Engine, Job

TRIES = 3  # their median counts


class LimitsEngine(Engine):
    about = "monoplan.runtime.machine.limits"

    def __init__(self, threads: int, nbytes: int) -> None:
        """The loop reads as many bytes as a token does, or far more than the last-level cache holds: of fewer, a larger
        part than of the weights could stay there."""
        from monoplan.runtime.machine.limits import Probes, past_cache

        self.probes = Probes(threads, max(past_cache(), nbytes))

    def measure(self) -> dict[str, Any]:
        """Bytes and operations per second at this moment; tiles is None without such a unit."""
        probes = self.probes
        tiles = [probes.tiles() for _ in range(TRIES)]
        return {  # of the two ways to read, the faster one
            "read": max(median(probes.read(streams) for _ in range(TRIES)) for streams in (1, 4)),
            "multiply": median(probes.multiply() for _ in range(TRIES)),
            "tiles": None if None in tiles else median(t for t in tiles if t is not None),
        }


def open_engine(job: Job, variant: str) -> LimitsEngine:
    return LimitsEngine(job.threads, job.work.weight_bytes)
