"""Peers without a model, for the tests of the runner: one that answers, one that is not there, one that breaks."""

from __future__ import annotations

from cpu_peers.engine import Ids, Job, StepEngine, Unavailable


class FakeEngine(StepEngine):
    about = "no model"

    def __init__(self, vocabulary: int, failing: bool) -> None:
        self.vocabulary, self.failing, self.sum, self.settled = vocabulary, failing, 0, False

    def reset(self, capacity: int) -> None:
        self.sum = 0

    def step(self, ids: Ids) -> int:
        if self.failing and self.settled:
            raise RuntimeError("broken on purpose")
        self.sum += int(ids.sum())
        return self.sum % self.vocabulary

    def settle(self) -> None:
        self.settled = True


def open_engine(job: Job, variant: str) -> FakeEngine:
    if variant == "missing":
        raise Unavailable("this peer is never installed")
    print("a line that must not reach the runner")
    return FakeEngine(job.work.shape["vocab_size"], variant == "failing")
