"""SIGINT that reaches only this process, as from Jupyter or a supervisor, and what may be left after it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE = 15.0  # seconds: far above what an interrupt takes, far below what it would else wait for


@contextlib.contextmanager
def interrupted(when: Callable[[], bool]) -> Iterator[None]:
    """The block ends by KeyboardInterrupt soon after `when` is true: this process alone gets the signal."""
    sent: list[float] = []
    given_up = threading.Event()

    def send() -> None:
        while not when():
            if given_up.wait(0.01):
                return
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    thread = threading.Thread(target=send)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            yield
        assert time.monotonic() - sent[0] < DEADLINE
    finally:
        given_up.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def assert_gone(pids: Path) -> None:
    """None of the processes whose numbers a file holds lives; one that was just killed may need a moment."""
    numbers = [int(text) for text in pids.read_text().split()]
    assert numbers
    end = time.monotonic() + DEADLINE
    while left := [n for n in numbers if _lives(n)]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A zombie whose parent is gone as well is the init process's matter, which may be slow, or missing.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return os.path.isdir("/proc/self") is False
    except ProcessLookupError:
        return False
