"""Compiler processes: started, counted, waited for side by side, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from monoplan.ir.errors import ArgumentError, CompileError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.runtime.build.background import Work, stoppable

PROGRESS_AFTER = 1.0  # seconds
INTERVAL = 0.1  # between looks at the clock
DEFAULT_TIME_LIMIT = 600.0

_counter_lock = threading.Lock()
_started = 0


class CompileTimeout(CompileError):
    """A compiler took too long: worth no second wait with other flags."""

    def __init__(self, command: Sequence[str], folder: Path, limit: float, source: Path | None = None) -> None:
        self.command, self.limit = command, limit
        super().__init__(
            f"{command[0]} did not end within {limit:g} s and was killed",
            where=source,
            why=f"cd {shlex.quote(str(folder))} && {shlex.join(command)}",
            fix="set CC to another compiler, or MONOPLAN_COMPILE_TIMEOUT to more seconds if it only needs longer",
        )


@dataclass(frozen=True, slots=True)
class BuildLog:
    """One finished compiler process."""

    command: tuple[str, ...]
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        """As written to build.log."""
        return f"$ {shlex.join(self.command)}\n{self.stdout}{self.stderr}# {self.seconds:.2f} s\n"


def compiler_runs() -> int:
    """How many compiler processes this process has started, probes and --version included."""
    return _started


def time_limit() -> float:
    """Seconds that a compiler may take: MONOPLAN_COMPILE_TIMEOUT, or ten minutes."""
    text = os.environ.get("MONOPLAN_COMPILE_TIMEOUT", "").strip()
    if text and not (re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text) and float(text) > 0):
        raise ArgumentError(
            f"MONOPLAN_COMPILE_TIMEOUT={text!r} is not a number of seconds", fix="give a number above 0, such as 600"
        )
    return float(text) if text else DEFAULT_TIME_LIMIT


def run(
    command: Sequence[str], cwd: Path, temporary: Path | None, *, progress: bool = False, timeout: float | None = None
) -> tuple[int, BuildLog]:
    """Runs and counts one compiler process; its own temporary files go to `temporary`."""
    return run_all([command], cwd, temporary, progress=progress, timeout=timeout)[0]


def run_all(
    commands: Sequence[Sequence[str]],
    cwd: Path,
    temporary: Path | None,
    *,
    progress: bool = False,
    timeout: float | None = None,
) -> list[tuple[int, BuildLog]]:
    """Several of them side by side; CompileTimeout after `timeout` seconds (None: time_limit())."""
    limit = time_limit() if timeout is None else timeout
    show = progress and sys.stderr is not None and sys.stderr.isatty()
    # Started and watched by another thread: no Ctrl-C comes between the start of a process and the note of it.
    with stoppable() as work:
        return work.begin(lambda: _run_all(work, commands, cwd, temporary, show, limit)).result()


def _run_all(
    work: Work, commands: Sequence[Sequence[str]], cwd: Path, temporary: Path | None, show: bool, limit: float
) -> list[tuple[int, BuildLog]]:
    import subprocess

    global _started
    # English messages: the cache looks for "No space left on device" in them.
    environ = {**os.environ, "LC_ALL": "C"} | ({"TMPDIR": str(temporary)} if temporary else {})
    found = []
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        update = stack.enter_context(_shown())
        processes: list[subprocess.Popen[str]] = []
        for command in commands:
            with _counter_lock:
                _started += 1
            started = work.process(
                command,
                cwd=cwd,
                env=environ,
                text=True,
                encoding="utf-8",
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            processes.append(stack.enter_context(started))
        for command, process in zip(commands, processes, strict=True):
            while process.returncode is None:
                try:
                    out, err = process.communicate(timeout=INTERVAL)
                except subprocess.TimeoutExpired:
                    work.check()
                    if time.monotonic() - begin > limit:
                        raise CompileTimeout(command, cwd, limit) from None
                    if show:
                        update()
            work.check()  # else its failure may be that it was killed
            found.append((process.returncode, BuildLog(tuple(command), out, err, time.monotonic() - begin)))
    return found


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[], None]]:
    """A progress line on the terminal; the function that it gives updates the line."""
    begin, shown = time.perf_counter(), False

    def update() -> None:
        nonlocal shown
        if (passed := time.perf_counter() - begin) > PROGRESS_AFTER:
            sys.stderr.write(f"\rcompiling plan … {passed:.1f} s")
            sys.stderr.flush()
            shown = True

    try:
        yield update
    finally:
        if shown:
            sys.stderr.write("\n")
