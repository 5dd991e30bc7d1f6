"""Answers that are worked out once, also where several threads ask."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from monoplan.runtime.build.background import begin
from monoplan.runtime.build.facts import Once


def test_threads_wait_for_the_one_that_is_at_work() -> None:
    asked: list[int] = []

    @Once
    def slow(n: int) -> int:
        asked.append(n)
        time.sleep(0.05)
        return n * n

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(slow, [3, 3, 3, 3])) == [9, 9, 9, 9]
    assert slow.knows(3) and not slow.knows(2)
    assert asked == [3] and slow(2) == 4 and asked == [3, 2]
    slow.cache_clear()
    assert slow(3) == 9 and asked == [3, 2, 3]


def test_exceptions_are_not_kept() -> None:
    answers = iter([ValueError("not yet"), 5])

    @Once
    def moody() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="not yet"):
        moody()
    assert moody() == 5 == moody()


def test_an_answer_may_ask_for_itself() -> None:
    @Once
    def factorial(n: int) -> int:
        return 1 if n == 0 else n * factorial(n - 1)

    assert factorial(5) == 120


def test_what_was_begun_is_found() -> None:
    workers: list[str] = []

    @Once
    def where() -> str:
        workers.append(threading.current_thread().name)
        return workers[-1]

    begun = begin(where)
    assert where() == begun.result() and len(workers) == 1


def test_a_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    code = """
        import os, threading
        from monoplan.runtime.build.background import begin
        from monoplan.runtime.build.facts import Once
        asked, go = threading.Event(), threading.Event()

        @Once
        def slow():
            asked.set()
            return go.wait(60)

        begun = begin(slow)
        asked.wait()
        child = os.fork()
        if child == 0:
            go.set()  # the parent's is another one
            os._exit(0 if slow() else 1)
        status = os.waitpid(child, 0)[1]
        go.set()
        print(os.waitstatus_to_exitcode(status), begun.result())
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50
    )
    assert done.stdout.split() == ["0", "True"], done.stderr
