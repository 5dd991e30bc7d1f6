"""The order of a run: every peer loads and warms up, then they take turns; limits are measured around each turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cpu_peers.client import PeerError, Worker
from cpu_peers.engine import Job
from cpu_peers.prepare import prepare
from cpu_peers.workload import (
    CAPACITY,
    CONTEXT,
    GROWTH_STEPS,
    LONG_PROMPT,
    PROMPT,
    PROMPTS,
    START_PROMPT,
    STEPS,
    Workload,
)

Say = Callable[[str], None]
COMPARED = 8  # greedy tokens by which peers are compared
LONGEST_REASON = 400  # characters: some libraries put their whole stack into a message
PER_PEER = 2.5  # times the weights: memory that a worker may need


@dataclass
class Plan:
    """What to measure."""

    work: Workload
    peers: list[str]
    threads: int
    cpus: list[int]
    repeats: int
    cache: Path
    contexts: list[int] = field(default_factory=list)  # lengths at which decode is timed; none: not asked for
    starts: int = 0  # cold and warm starts of each peer
    file: Path | None = None  # also started from this model file
    timeout: float = 1800.0
    log: Path | None = None

    def job(self, peer: str, cache: Path | None = None, file: Path | None = None) -> Job:
        lengths = [*self.contexts, LONG_PROMPT] if self.contexts else []
        longest = max([CAPACITY, *map(capacity_for, lengths)])
        return Job(peer, self.work, self.threads, self.cpus, longest, cache or self.cache, file)

    def commands(self) -> dict[str, dict[str, Any]]:
        """The timed commands of a turn, by the name under which their seconds are kept (growth: of each context)."""
        found: dict[str, dict[str, Any]] = {
            "decode": {"do": "decode", "tokens": CONTEXT, "steps": STEPS, "capacity": CAPACITY},
            "prefill": {"do": "prefill", "tokens": PROMPT, "times": PROMPTS, "capacity": CAPACITY},
        }
        if self.contexts:
            capacities = [capacity_for(tokens) for tokens in self.contexts]
            found["growth"] = {
                "do": "growth",
                "contexts": self.contexts,
                "steps": GROWTH_STEPS,
                "capacities": capacities,
            }
            found["prefill long"] = {
                "do": "prefill",
                "tokens": LONG_PROMPT,
                "times": 1,
                "capacity": capacity_for(LONG_PROMPT),
            }
        return found


def capacity_for(tokens: int) -> int:
    """Room for a context and the steps after it."""
    return tokens + 2 * GROWTH_STEPS


@dataclass
class Outcome:
    """All that was seen: seconds per round of each command by peer, and why others have none."""

    seconds: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    starts: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    limits: dict[str, list[list[dict[str, float | None]]]] = field(default_factory=dict)  # around each turn of a peer
    skipped: dict[str, str] = field(default_factory=dict)
    resident: bool = True

    def keep_whole_rounds(self) -> int:
        """Forgets the turns of a round that was broken off; gives the number of rounds that are left."""
        seated = [peer for peer in self.about if peer not in self.skipped]
        whole = min((len(self.limits.get(peer, [])) for peer in seated), default=0)
        for peer, times in self.seconds.items():
            self.limits[peer] = self.limits.get(peer, [])[:whole]
            self.seconds[peer] = {name: rounds[:whole] for name, rounds in times.items()}
        return whole


class Seat:
    """A peer's place in the rounds: its worker is there all the time, or only for its turn."""

    def __init__(self, plan: Plan, peer: str, outcome: Outcome) -> None:
        self.plan, self.peer, self.outcome = plan, peer, outcome
        self.worker: Worker | None = None

    def sit(self) -> Worker:
        """The worker, loaded and warm: every command ran once, and from here on it compiles nothing."""
        if self.worker is None:
            self.worker = worker = Worker(self.plan.job(self.peer), self.plan.timeout, self.plan.log)
            self.outcome.about[self.peer] = worker.about
            continued = worker.ask("tokens", tokens=CONTEXT, count=COMPARED, capacity=CAPACITY, watch=True)
            self.outcome.tokens[self.peer] = continued["tokens"]
            for name, command in self.plan.commands().items():
                worker.ask(**command, watch=True)
                if name == "prefill":  # longer prompts than the usual ones are not in the figure of memory
                    self.outcome.memory.setdefault(self.peer, worker.memory())
            worker.ask("settle")
        return self.worker

    def turn(self) -> None:
        """Times every command once."""
        worker = self.sit()
        times = self.outcome.seconds.setdefault(self.peer, {})
        for name, command in self.plan.commands().items():
            found = {name: worker.ask(**command)["seconds"]}
            if name == "growth":
                names = [f"decode {tokens}" for tokens in self.plan.contexts]
                found = dict(zip(names, found[name], strict=True))
            for kept, seconds in found.items():
                times.setdefault(kept, []).append(seconds)

    def leave(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def run(plan: Plan, outcome: Outcome, say: Say) -> None:
    """Everything that the plan asks for, into `outcome`: who is interrupted has what there is."""
    ready = []
    for peer in plan.peers:
        say(f"{peer}: its files")
        why = prepare(plan.work, peer)
        if why is None:
            ready.append(peer)
        else:
            _skip(outcome, peer, why, say)
    outcome.resident = len(ready) * plan.work.weight_bytes * PER_PEER < available_memory()
    if not outcome.resident:
        say("not enough memory for all peers at once: each loads again for its turn")
    limits = Worker(plan.job("limits"), plan.timeout, plan.log)
    seats: dict[str, Seat] = {peer: Seat(plan, peer, outcome) for peer in ready}
    try:
        for peer, seat in list(seats.items()):
            say(f"{peer} loads and warms up")
            with _dropped_on_error(outcome, seats, peer, say):
                seat.sit()
            _leave_unless_resident(outcome, seat)
        for number in range(plan.repeats):
            order = list(seats)
            first = number % max(len(order), 1)
            for peer in order[first:] + order[:first]:  # who comes first has the coolest machine
                seat = seats[peer]
                with _dropped_on_error(outcome, seats, peer, say):
                    seat.sit()
                before = limits.ask("measure")
                if peer in seats:
                    with _dropped_on_error(outcome, seats, peer, say):
                        seat.turn()
                if peer in seats:
                    outcome.limits.setdefault(peer, []).append([before, limits.ask("measure")])
                _leave_unless_resident(outcome, seat)
            say(f"round {number + 1} of {plan.repeats} is done")
    finally:
        for seat in seats.values():
            seat.leave()
        limits.close()
    for peer in seats:
        _start(plan, peer, outcome, say)


def _start(plan: Plan, peer: str, outcome: Outcome, say: Say) -> None:
    """Seconds from the start of a process to its first token: with an empty cache, and with what the first one left."""
    models = {"": None} | ({" file": plan.file} if plan.file else {})
    for label, file in models.items():
        for _ in range(plan.starts):
            say(f"{peer} starts{label and ' from the file'}, cold and warm")
            with tempfile.TemporaryDirectory() as cache:
                job = replace(plan.job(peer, Path(cache), file), capacity=CAPACITY)
                try:
                    took = {kind: _first_token(job, plan) for kind in ("cold", "warm")}
                except PeerError as error:
                    _skip(outcome, f"{peer}, start{label and ' from the file'}", str(error), say)
                    break
            for kind, seconds in took.items():
                outcome.starts.setdefault(peer, {}).setdefault(kind + label, []).append(seconds)


def _first_token(job: Job, plan: Plan) -> float:
    worker = Worker(job, plan.timeout, plan.log)
    try:
        worker.ask("tokens", tokens=START_PROMPT, count=1, capacity=CAPACITY)
        return time.perf_counter() - worker.begin
    finally:
        worker.close()


def _leave_unless_resident(outcome: Outcome, seat: Seat) -> None:
    if not outcome.resident:
        seat.leave()


@contextmanager
def _dropped_on_error(outcome: Outcome, seats: dict[str, Seat], peer: str, say: Say) -> Iterator[None]:
    """A peer that fails is out of the run, with its reason; the others go on."""
    try:
        yield
    except PeerError as error:
        seats.pop(peer).leave()
        outcome.seconds.pop(peer, None)
        outcome.limits.pop(peer, None)
        _skip(outcome, peer, str(error) if error.missing else f"failed: {error}", say)


def _skip(outcome: Outcome, peer: str, why: str, say: Say) -> None:
    why = " ".join(why.split())[:LONGEST_REASON]
    outcome.skipped[peer] = why
    say(f"skipped {peer}: {why}")


def available_memory() -> int:
    """Bytes that processes may still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
