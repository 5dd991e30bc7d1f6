"""Compiler processes: started, counted, waited for side by side, and never left behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRESS_AFTER = 1.0  # seconds

_counter_lock = threading.Lock()
_started = 0


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


def run(
    command: Sequence[str],
    cwd: Path,
    temporary: Path | None,
    *,
    progress: bool = False,
    timeout: float | None = None,
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
    """Several of them side by side."""
    global _started
    # English messages: the cache looks for "No space left on device" in them.
    environ = {**os.environ, "LC_ALL": "C"} | ({"TMPDIR": str(temporary)} if temporary else {})
    show = progress and sys.stderr is not None and sys.stderr.isatty()
    found = []
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        update = stack.enter_context(_shown())
        try:
            for command in commands:
                with _counter_lock:
                    _started += 1
                process = subprocess.Popen(
                    command, cwd=cwd, env=environ, text=True, encoding="utf-8", errors="replace",
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                processes.append(stack.enter_context(process))
            for command, process in zip(commands, processes, strict=True):
                out, err = _wait(process, update if show else None, timeout)
                found.append((process.returncode, BuildLog(tuple(command), out, err, time.perf_counter() - begin)))
        except BaseException:  # Ctrl-C too: the compiler must not outlive the wish
            for process in processes:
                process.kill()
            raise
    return found


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[], None]]:
    """A line for a person who waits: the function inside brings it up to date."""
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


def _wait(process: subprocess.Popen[str], update: Callable[[], None] | None, timeout: float | None) -> tuple[str, str]:
    if update is None:
        return process.communicate(timeout=timeout)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=0.1)
        update()
