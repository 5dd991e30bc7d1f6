"""Work beside the caller: threads and the processes that they start, all of which end with the call that began them.

Nobody waits for such a thread against his will: an exception in the caller (Ctrl-C too) kills the processes and goes
out, and so does the end of the interpreter, which would join the threads of a ThreadPoolExecutor.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from monoplan.runtime.warn import context_of_caller

if TYPE_CHECKING:  # slow to import, and a plan that is there needs neither
    import subprocess
    from concurrent.futures import Future

T = TypeVar("T")
R = TypeVar("R")
PATIENCE = 0.5  # seconds for threads to clean up after their processes were killed


class Stopped(BaseException):
    """The caller does not want the result any more. No Exception: nothing is to be concluded from it."""


class Work:
    """Threads and processes that are stopped together, with those of the works begun inside."""

    def __init__(self, outer: Work | None = None) -> None:
        self._chain: tuple[Work, ...] = (self, *(outer._chain if outer is not None else ()))
        self._owner = os.getpid()
        self._processes: set[subprocess.Popen[Any]] = set()
        self._threads: set[threading.Thread] = set()
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether this work, or one around it, was stopped."""
        return any(work._ended for work in self._chain)

    def check(self) -> None:
        """Ends the thread's work if nobody wants it."""
        if self.stopped:
            raise Stopped

    @contextlib.contextmanager
    def process(self, command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """A process that does not outlive the block; it leads a session, so that its children end with it."""
        import subprocess

        process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            for work in self._chain:
                work._processes.add(process)
            self.check()  # after it was added: who stops the work kills it, or it is seen here
            yield process
        finally:
            _kill(process)
            for work in self._chain:
                work._processes.discard(process)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)

    def begin(self, function: Callable[[], T], *, daemon: bool = True) -> Future[T]:
        """Runs a function in a thread of its own; the interpreter's end waits for it unless it is a daemon."""
        from concurrent.futures import Future

        future: Future[T] = Future()
        context = context_of_caller()

        def run() -> None:
            try:
                future.set_result(context.run(function))
            except BaseException as error:
                future.set_exception(error)
            finally:
                for work in self._chain:
                    work._threads.discard(thread)

        thread = threading.Thread(target=run, name="monoplan", daemon=daemon)
        for work in self._chain:
            work._threads.add(thread)
        thread.start()
        return future

    def stop(self) -> None:
        """Kills the processes, lets no other begin, and gives the threads a moment."""
        if os.getpid() != self._owner:
            return  # a forked child: they are its parent's
        self._ended = True
        for process in tuple(self._processes):
            _kill(process)
        end = time.monotonic() + PATIENCE
        for thread in tuple(self._threads):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kills a process that has not been waited for, and its group: gcc is only the driver of cc1, as and ld."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: no permission to kill the dead
            os.killpg(process.pid, signal.SIGKILL)


_current: contextvars.ContextVar[Work | None] = contextvars.ContextVar("work", default=None)
_all = Work()


def _renew() -> None:
    global _all
    _all = Work()


def current() -> Work:
    """The work that the caller is part of."""
    work = _current.get()
    return work if work is not None and work._owner == os.getpid() else _all


@contextlib.contextmanager
def stoppable() -> Iterator[Work]:
    """Where this block ends by an exception, nothing that was begun in it goes on."""
    work = Work(current())
    token = _current.set(work)
    try:
        yield work
    except BaseException:
        work.stop()
        raise
    finally:
        _current.reset(token)


def begin(function: Callable[[], T]) -> Future[T]:
    """Works out an answer in a thread of its own: who asks for it later waits, or finds it."""
    return current().begin(function)


def side_by_side(
    function: Callable[[T], R],
    items: Sequence[T],
    workers: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    daemon: bool = True,
) -> list[R]:
    """[function(item) for item in items] by several threads. After an exception no further item is begun."""
    from concurrent.futures import Future

    futures: list[Future[R]] = [Future() for _ in items]
    waiting = iter(list(zip(items, futures, strict=True)))  # a list's iterator gives each item to one thread
    results: list[R] = []
    with stoppable() as work:

        def work_off() -> None:
            for item, future in waiting:
                try:
                    work.check()
                    future.set_result(function(item))
                except BaseException as error:
                    future.set_exception(error)

        for _ in range(min(workers, len(items))):
            work.begin(work_off, daemon=daemon)
        for future in futures:
            results.append(future.result())
            if progress is not None:
                progress(len(results), len(items))
    return results


atexit.register(lambda: _all.stop())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
