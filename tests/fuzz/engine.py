"""Runs mutated inputs through a loader and judges each: loaded, refused with a MonoplanError, or a failure.

A case is its target, a seed number and its own number: the same three give the same input. Cases run in forked
workers, thousands in each. A case fails when it raises anything but a MonoplanError, ends its worker by a signal,
computes for longer than `SECONDS`, or wants more than `BYTES` of memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from monoplan.ir.errors import MonoplanError

SECONDS = 5.0  # of CPU time: neighbours on a busy machine make no failure
STUCK = 120.0  # of wall time, for a case that waits and does not compute
BYTES = 2 << 30
BATCH = 5000  # cases of one worker: what caches keep of them does not add up
NOTE = 4  # failures of one kind whose inputs are kept

Files = dict[str, bytes]


@dataclass(frozen=True)
class Target:
    """One loader: valid inputs as files of a directory, how to damage them, and how to load them.

    `mutate` gives the files that differ from those of its seed. `load` gets the directory.
    """

    seeds: Callable[[], list[Files]]
    mutate: Callable[[Random, Files], Files]
    load: Callable[[Path], object]


@dataclass
class Failure:
    """Cases that failed in the same way at the same place."""

    kind: str
    detail: str
    cases: list[int] = field(default_factory=list)
    count: int = 0


@dataclass
class Result:
    """What became of the cases of one target."""

    target: str
    seed: int
    ran: int
    loaded: int
    refused: int
    seconds: float
    slowest: float  # seconds of one case
    slowest_case: int
    failures: list[Failure]
    kept: Path | None  # where inputs that failed are

    def __str__(self) -> str:
        lines = [
            f"{self.target}: seed {self.seed}, {self.ran} cases in {self.seconds:.1f} s "
            f"({self.ran / max(self.seconds, 1e-9):.0f} a second), {self.loaded} loaded, {self.refused} refused, "
            f"{sum(f.count for f in self.failures)} failed, slowest {self.slowest * 1e3:.0f} ms "
            f"(case {self.slowest_case})"
        ]
        for f in self.failures:
            lines += [
                f"  {f.count} x {f.kind}, cases {f.cases}",
                *(f"    {line}" for line in f.detail.rstrip().splitlines()[-12:]),
                f"    again: python -m tests.fuzz {self.target} --seed {self.seed} --case {f.cases[0]}",
            ]
        if self.kept is not None:
            lines.append(f"  inputs that failed: {self.kept}")
        return "\n".join(lines)


def target_names() -> list[str]:
    """The targets: one file each."""
    return sorted(p.stem for p in (Path(__file__).parent / "targets").glob("*.py"))


def find_target(name: str) -> Target:
    return importlib.import_module(f"tests.fuzz.targets.{name}").TARGET  # type: ignore[no-any-return]


def make_case(name: str, target: Target, seeds: list[Files], seed: int, number: int) -> tuple[int, Files]:
    """The seed that a case begins with, and the files that it changes."""
    random = Random(f"{name}/{seed}/{number}")
    chosen = random.randrange(len(seeds))
    return chosen, target.mutate(random, seeds[chosen])


def write(directory: Path, files: Files) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def fuzz(
    name: str, cases: int, seed: int = 0, first: int = 0, keep: Path | None = None, target: Target | None = None
) -> Result:
    """Runs cases `first` to `first + cases - 1` of a target."""
    target = target or find_target(name)
    seeds = target.seeds()
    begin = time.perf_counter()
    with scratch() as folder, mmap.mmap(-1, _State.FORM.size) as shared:
        state = _State(shared)
        problems: dict[tuple[str, str], Failure] = {}

        def note(number: int, kind: str, place: str, detail: str) -> None:
            nonlocal keep
            found = problems.setdefault((kind, place), Failure(kind, detail))
            found.count += 1
            if found.count <= NOTE:
                found.cases.append(number)
                keep = keep or Path(tempfile.mkdtemp(prefix="monoplan-fuzz-"))
                chosen, changed = make_case(name, target, seeds, seed, number)
                write(keep / f"{name}-{seed}-{number}", {**seeds[chosen], **changed})

        at, end = first, first + cases
        while at < end:
            last = min(at + BATCH, end)
            log, errors = folder / "log", folder / "errors"
            ended = _in_a_worker(partial(_work, name, target, seeds, seed, range(at, last), folder, state), log)
            state.read()
            for line in errors.read_text().splitlines() if errors.exists() else ():
                note(*json.loads(line))
            errors.unlink(missing_ok=True)
            if ended == 0:
                at = last
                continue
            number = state.number
            kind = {signal.SIGPROF: "hang", signal.SIGALRM: "stuck"}.get(ended, f"signal {ended}")  # type: ignore[call-overload]
            text = log.read_text(errors="replace")
            note(number, kind, _place(text), text)
            at = number + 1
        took = time.perf_counter() - begin
        return Result(
            name,
            seed,
            cases,
            state.loaded,
            state.refused,
            took,
            state.slowest,
            state.slowest_case,
            list(problems.values()),
            keep,
        )


class _State:
    """Numbers that a worker leaves for its parent, who reads them after its end."""

    FORM = struct.Struct("qqqqd")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.read()

    def read(self) -> None:
        self.number, self.loaded, self.refused, self.slowest_case, self.slowest = self.FORM.unpack_from(self.memory)

    def save(self) -> None:
        self.FORM.pack_into(self.memory, 0, self.number, self.loaded, self.refused, self.slowest_case, self.slowest)


def _in_a_worker(work: Callable[[], None], log: Path) -> int:
    """Forks, and gives the number of the signal that ended the child; 0 where its work is done."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)  # panics of other libraries are many lines each
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    if os.WEXITSTATUS(status):
        raise RuntimeError(f"a worker of the fuzzer failed by itself:\n{log.read_text(errors='replace')}")
    return 0


def _limit() -> None:
    """Limits of a worker: memory beyond what it has now, no core files; timers end it by their signals."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # only Linux says how much is mapped
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.enable(file=2)  # whatever sys.stderr is by now
    for number in (signal.SIGPROF, signal.SIGALRM):
        faulthandler.register(number, file=2, chain=True)  # says where, and then ends the process


def _work(
    name: str, target: Target, seeds: list[Files], seed: int, numbers: range, folder: Path, state: _State
) -> None:
    gc.freeze()
    _limit()
    places = [write(folder / f"seed{i}", files) for i, files in enumerate(seeds)]
    for number in numbers:
        state.number = number
        state.save()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, STUCK)
        chosen, changed = make_case(name, target, seeds, seed, number)
        write(places[chosen], changed)
        begin = time.process_time()
        try:
            target.load(places[chosen])
            state.loaded += 1
        except MonoplanError as error:
            str(error).encode("utf-8", "backslashreplace")
            state.refused += 1
        except BaseException as error:
            trace = traceback.format_exc()
            line = json.dumps([number, type(error).__name__, _place(trace), trace[-3000:]])
            with (folder / "errors").open("a") as file:
                file.write(line + "\n")
        took = time.process_time() - begin
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if took > state.slowest:
            state.slowest, state.slowest_case = took, number
        for file_name in changed:
            if file_name in seeds[chosen]:
                (places[chosen] / file_name).write_bytes(seeds[chosen][file_name])
            else:
                (places[chosen] / file_name).unlink(missing_ok=True)
    state.save()


def _place(trace: str) -> str:
    """The innermost line of this project in a traceback: failures that share it are one."""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    own = [
        line for line in lines if "site-packages" not in line and "/lib/python" not in line and "engine.py" not in line
    ]
    innermost_first = "most recent call first" in trace  # as faulthandler writes it
    return (own[0] if innermost_first else own[-1]) if own else trace[-80:]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: each case writes a file."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="monoplan-fuzz-", dir=shared if os.access(shared, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
