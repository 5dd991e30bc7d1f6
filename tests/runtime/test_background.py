"""Threads beside the caller: they end with him."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from monoplan.runtime.build import background
from monoplan.runtime.build.background import Stopped, Work, begin, side_by_side, stoppable
from tests.interrupts import DEADLINE, assert_gone, interrupted


def hang(work: Work, pids: Path) -> None:
    """Starts a process with a child, both of which sleep, and watches it."""
    command = ["sh", "-c", f"sleep 60 & echo $$ $! >> {pids}; wait"]
    with work.process(command, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            work.check()
            time.sleep(0.01)
    work.check()


def written(pids: Path) -> bool:
    return pids.is_file() and pids.read_text().endswith("\n")


def test_an_interrupt_ends_what_was_begun(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with interrupted(lambda: written(pids)), stoppable() as work:
        begun = work.begin(lambda: hang(work, pids))
        begun.result()
    assert_gone(pids)
    with pytest.raises(Stopped):
        begun.result(DEADLINE)


def test_a_work_ends_with_the_one_around_it(tmp_path: Path) -> None:
    def inner() -> None:
        with stoppable() as work:
            hang(work, tmp_path / "pids")

    with pytest.raises(ValueError), stoppable():
        begun = begin(inner)
        while not written(tmp_path / "pids"):
            time.sleep(0.01)
        raise ValueError
    assert_gone(tmp_path / "pids")
    with pytest.raises(Stopped):
        begun.result(DEADLINE)


def test_another_work_goes_on(tmp_path: Path) -> None:
    go = threading.Event()
    with stoppable():
        other = begin(lambda: go.wait(60) and not background.current().stopped)
        with pytest.raises(ValueError), stoppable():
            raise ValueError
        go.set()
        assert other.result(DEADLINE)


def test_no_process_lives_on_for_a_work_that_was_stopped(tmp_path: Path) -> None:
    work = Work()
    work.stop()
    with pytest.raises(Stopped):
        hang(work, tmp_path / "pids")
    if written(tmp_path / "pids"):  # it was killed at once
        assert_gone(tmp_path / "pids")


def test_side_by_side() -> None:
    seen: list[tuple[int, int]] = []
    assert side_by_side(lambda n: n * n, range(5), 3, lambda *at: seen.append(at)) == [0, 1, 4, 9, 16]
    assert seen == [(n, 5) for n in range(1, 6)] and side_by_side(str, [], 3) == []
    begun: list[int] = []

    def fail(n: int) -> None:
        begun.append(n)
        if n == 2:
            raise ValueError("two")
        time.sleep(0.05)

    with pytest.raises(ValueError, match="two"):
        side_by_side(fail, range(1000), 2)
    time.sleep(0.1)
    count = len(begun)
    time.sleep(0.1)
    assert count == len(begun) < 100


def test_a_forked_child_stops_nothing_of_its_parents(tmp_path: Path) -> None:
    work = Work()
    process = subprocess.Popen(["sleep", "60"])
    work._processes.add(process)
    child = os.fork()
    if child == 0:
        work.stop()
        background._all.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert process.poll() is None and not work.stopped
    process.kill()
    process.wait()


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise ValueError"])
def test_the_end_of_the_program_waits_for_nothing(tmp_path: Path, end: str) -> None:
    pids = tmp_path / "pids"
    code = f"""
        import os, sys, time
        from pathlib import Path
        from monoplan.runtime.build.background import begin
        from monoplan.runtime.build.processes import run
        begun = begin(lambda: run(["sh", "-c", "sleep 60 & echo $$ $! >> {pids}; wait"], Path("."), None))
        stuck = begin(lambda: time.sleep(60))
        while not (os.path.exists({str(pids)!r}) and open({str(pids)!r}).read().endswith(chr(10))):
            time.sleep(0.01)
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == {"pass": 0, "sys.exit(3)": 3, "raise ValueError": 1}[end], done.stderr
    assert "Stopped" not in done.stderr
    assert_gone(pids)
