"""Where the time of a call goes: each step's time, bytes and flops, against what the machine was measured to do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.kernels import Attention, Experts, Gather, Heads, Kernel, Latent, Linear, Rope
from monoplan.codegen.operands import stored_bytes
from monoplan.inspect.verify import Subject, aligned
from monoplan.inspect.walk import rolled_layers
from monoplan.ir.dims import Dim, evaluate
from monoplan.ir.errors import ArgumentError, printable, writing
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.printer import print_op
from monoplan.ir.types import Array, product
from monoplan.runtime.machine.limits import Limits, measure_target

REPEAT = 10
ABOVE = (
    "faster than the limit: what it read was in a cache closer by, or the limits were measured while the machine was "
    "busy; `monoplan bench --limits` measures them again"
)


@dataclass(frozen=True)
class StepProfile:
    """One step of the plan; inside rolled layers and scans all its turns together."""

    number: int
    runs: int
    family: str
    function: str
    ir: str
    module: str
    where: str
    nanoseconds: float  # of all runs
    bytes: int  # of all runs
    flops: int
    roof: float  # seconds that the machine needs at least
    bound: str  # "memory", "cache" or "compute": which roof that is

    @property
    def gbps(self) -> float:
        return self.bytes / self.nanoseconds if self.nanoseconds else 0.0

    @property
    def gflops(self) -> float:
        return self.flops / self.nanoseconds if self.nanoseconds else 0.0

    @property
    def share(self) -> float:
        """How much of the roof it reaches: 1 is as fast as the machine allows."""
        return self.roof * 1e9 / self.nanoseconds if self.nanoseconds else 0.0


@dataclass(frozen=True)
class Profile:
    """A profiled call; prints as a table."""

    name: str
    target: str
    sizes: str
    threads: int
    steps: tuple[StepProfile, ...]
    events: tuple[tuple[int, int | None, float], ...]  # step, turn, nanoseconds: in the order of execution
    plain: float  # nanoseconds of a call of the plan that nobody looks into
    probed: float  # and of the instrumented one
    limits: Limits

    @property
    def total(self) -> float:
        """Nanoseconds of all steps."""
        return sum(s.nanoseconds for s in self.steps)

    @property
    def overhead(self) -> float:
        """What the instrumented call costs above the plain one, as a share of that."""
        return self.probed / self.plain - 1 if self.plain else 0.0

    def top(self, count: int | None = None) -> list[StepProfile]:
        """Steps by time, the slowest first."""
        return sorted(self.steps, key=lambda s: -s.nanoseconds)[:count]

    def __str__(self) -> str:
        head = ("step", "runs", "kernel", "time", "share", "GB/s", "GFLOP/s", "of limit", "module", "ir")
        rows = [head]
        for s in self.steps:
            rows.append(
                (
                    str(s.number),
                    str(s.runs),
                    s.family,
                    f"{s.nanoseconds / 1e3:.1f} µs",
                    f"{s.nanoseconds / max(self.total, 1):.1%}",
                    f"{s.gbps:.2f}",
                    f"{s.gflops:.2f}",
                    f"{s.share:.0%} {s.bound}" if s.share <= 1 else f">100% {s.bound}",
                    s.module or "-",
                    s.ir,
                )
            )
        lines = aligned(rows, right=(0, 1, 3, 4, 5, 6))
        about = f" at {self.sizes}" if self.sizes else ""
        return (
            "\n".join([f"profile of {self.name} on {self.target}, {self.threads} threads{about}", *lines, self.summary])
            + "\n"
        )

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """Sums, overhead and limits, and what is not obvious about them."""
        m = self.limits
        moved, runs = sum(s.bytes for s in self.steps), sum(s.runs for s in self.steps)
        head = f"{len(self.steps)} kernels in {runs} runs: {_time(self.total)}, {moved / max(self.total, 1):.2f} GB/s"
        if self.alone:
            lines = [f"{head}; a call takes {_time(self.plain)}: each was timed alone, in a call launches overlap"]
        else:
            lines = [
                f"{head}; {_time(self.probed - self.total)} outside them (arguments, results, starting threads); "
                f"together {_time(self.probed)}, an instrumented call",
                f"a call takes {_time(self.plain)}: looking costs {self.overhead:+.1%}",
            ]
        lines.append(
            f"limits: memory {m.memory / 1e9:.1f} GB/s, cache {m.cache / 1e9:.1f} GB/s ({m.cache_bytes >> 20} MiB), "
            f"{m.flops / 1e9:.1f} GFLOP/s f32"
        )
        if any(s.share > 1 for s in self.steps):
            lines.append(f">100%: {ABOVE}")
        return "\n".join(lines)

    @property
    def alone(self) -> bool:
        """Whether each kernel was timed by itself, as on a GPU; else inside an instrumented call."""
        return self.target == "cuda"

    def chrome_trace(self) -> dict[str, Any]:
        """The events in Chrome's trace format: opens in Perfetto and chrome://tracing."""
        by_number = {s.number: s for s in self.steps}
        found: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"monoplan {self.name} ({self.target})"}},
            {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "plan"}},
        ]
        at = 0.0
        for number, turn, nanoseconds in self.events:
            s = by_number[number]
            label = s.function if turn is None else f"{s.function} [{turn}]"
            found.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": 1,
                    "name": label,
                    "cat": s.family,
                    "ts": round(at / 1e3, 3),
                    "dur": round(nanoseconds / 1e3, 3),
                    "args": {
                        "step": number,
                        "turn": turn,
                        "ir": s.ir,
                        "where": s.where,
                        "bytes": s.bytes // s.runs,
                        "flops": s.flops // s.runs,
                        "gbps": round(s.bytes / s.runs / nanoseconds, 3) if nanoseconds else 0.0,
                    },
                }
            )
            at += nanoseconds
        return {
            "traceEvents": found,
            "displayTimeUnit": "ns",
            "otherData": {"sizes": self.sizes, "threads": self.threads},
        }

    def save(self, path: str | Path) -> Path:
        """Writes the Chrome trace."""
        with writing("the trace", path):
            Path(path).write_text(json.dumps(self.chrome_trace()), "utf-8")
        return Path(path)


def profile(subject: Subject, *, repeat: int = REPEAT) -> Profile:
    """Runs the plan plain and instrumented, several times each, and takes the median."""

    if subject.executable is None:
        raise ArgumentError("target='reference' has no kernels to profile", fix="compile for cpu or cuda")
    if repeat < 1:
        raise ArgumentError(f"repeat must be 1 or more, got {repeat}")
    events, marks, plain, probed = subject.probe.profile_times(subject.fresh_inputs(), subject.symbols, repeat)
    plan, threads = subject.executable.plan, getattr(subject.executable, "threads", 1)
    limits = measure_target(subject.target, threads)
    params = sum(a.nbytes for a in getattr(subject.executable, "params", []))
    bandwidth = (limits.memory, "memory") if params > limits.cache_bytes else (limits.cache, "cache")
    sizes = {**subject.symbols, "threads": threads}
    per_event = np.median(marks, axis=0)
    times: dict[int, float] = {}
    for (number, _), value in zip(events, per_event, strict=True):
        times[number] = times.get(number, 0.0) + float(value)
    functions = subject.executable.source.step_functions
    rolled = rolled_layers(subject.final)
    steps = []
    for step, count in plan.steps():
        k, runs = step.kernel, _number(count, sizes)
        moved, flops = kernel_cost(k, sizes, subject.inputs)
        roof, bound = _roof(k, moved * runs, flops * runs, limits, bandwidth)
        steps.append(
            StepProfile(
                step.number,
                runs,
                k.family,
                functions[step.number],
                print_op(k.op),
                printable(rolled[k.op].path if k.op in rolled else k.op.loc.path),
                str(k.op.loc.short),
                times.get(step.number, 0.0),  # a scan of no turns runs none
                moved * runs,
                flops * runs,
                roof,
                bound,
            )
        )
    timeline = tuple((number, turn, float(t)) for (number, turn), t in zip(events, per_event, strict=True))
    return Profile(subject.name, subject.target, subject.sizes, threads, tuple(steps), timeline, plain, probed, limits)


def kernel_cost(k: Kernel, sizes: Mapping[str, int], inputs: Sequence[Array]) -> tuple[int, int]:
    """Bytes that one run must move and flops that it must do, for these sizes.

    A lookup reads the rows that it takes, not the table; attention reads what the cache holds, not its capacity; a few
    rows choose a few experts.
    """
    moved, flops = _number(k.bytes, sizes), _number(k.flops, sizes)
    if isinstance(k, Gather):
        table = k.operand("x")
        rows = product(d for d in (*k.outer, *k.inner))
        taken, whole = (stored_bytes(table, n) for n in (_number(rows, sizes), _elements(table, sizes)))
        moved += _number(taken, sizes) - _number(whole, sizes)
    if isinstance(k, Experts):
        idle = max(k.experts - _number(k.rows, sizes) * k.choices, 0)
        matrices = [k.operand(n) for n in ("w", "up") if k.has(n)]
        whole = sum(_number(stored_bytes(o, _elements(o, sizes)), sizes) for o in matrices)
        moved -= whole * idle // k.experts
    if isinstance(k, Attention) and k.has("past"):
        keys, held = _number(k.keys, sizes), _held(k, sizes, inputs)
        if held is not None and keys:
            cache = sum(_elements(k.operand(n), sizes) * k.operand(n).dtype.itemsize for n in ("k", "v"))
            moved -= cache * (keys - held) // keys
            flops = flops * held // keys
    if isinstance(k, Experts) and k.latent is not None:
        k = k.latent  # what its products move is counted
    writes = isinstance(k, Heads | Latent) or (isinstance(k, Linear) and k.epilogue == "heads")
    if isinstance(k, Rope) or writes:  # the angles of the positions only
        used = _elements(k.operand("positions"), sizes)
        for o in (k.operand("sin"), k.operand("cos")):
            rows = max(_number(o.shape[0], sizes), 1)
            moved -= _elements(o, sizes) * max(rows - used, 0) // rows * o.dtype.itemsize
    if writes:  # the new rows, not the whole caches
        for o in (k.operand(name) for name in ("k_cache", "v_cache") if k.has(name)):
            capacity = max(_number(o.shape[2], sizes), 1)
            whole = _elements(o, sizes) * o.dtype.itemsize
            moved -= whole * max(capacity - _number(k.seq, sizes), 0) // capacity  # type: ignore[attr-defined]
    return max(moved, 0), flops


def _time(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:.1f} µs"


def _held(k: Attention, sizes: Mapping[str, int], inputs: Sequence[Array]) -> int | None:
    """Keys that the longest row sees."""
    buffer = k.operand("past").view.buffer
    if buffer.kind != "input":
        return None
    longest = int(inputs[buffer.index].max(initial=0)) + _number(k.seq, sizes)
    return min(longest, _number(k.keys, sizes))


def _number(d: Dim, sizes: Mapping[str, int]) -> int:
    return int(evaluate(d, sizes))


def _elements(o: Any, sizes: Mapping[str, int]) -> int:
    """Elements behind an operand; stretched dimensions count once."""
    pairs = zip(o.view.shape, o.view.strides, strict=True)
    return _number(product(n for n, s in pairs if not (isinstance(s, int) and s == 0)), sizes)


def _roof(k: Kernel, moved: int, flops: int, limits: Limits, bandwidth: tuple[float, str]) -> tuple[float, str]:
    """The least time of a kernel, and what sets it."""
    peak = limits.flops
    if isinstance(k, Linear) and limits.tile_bf16 and k.operand("w").dtype.name == "bf16":
        peak = limits.tile_bf16
    memory, compute = moved / bandwidth[0], flops / peak
    return (memory, bandwidth[1]) if memory >= compute else (compute, "compute")
