"""The runner's end of a worker: starts it, asks it, stops it while others are timed, and watches its memory."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cffi

from cpu_peers.engine import Job

SAMPLE = 0.02  # seconds between two looks at a worker's memory while it loads


def environment() -> dict[str, str]:
    """For processes of this package: it and the repository are found, and nothing is looked for elsewhere."""
    here = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(here), str(here.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


_FFI = cffi.FFI()
_FFI.cdef("int prctl(int, unsigned long, unsigned long, unsigned long, unsigned long);")
_LIBC = _FFI.dlopen(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Asks the system to end this process with the runner: one that is stopped would never see that it has gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class PeerError(Exception):
    """A worker that could not start (`missing`) or failed; the text says why."""

    def __init__(self, why: str, missing: bool = False) -> None:
        super().__init__(why)
        self.missing = missing


class Worker:
    """A running worker. `ask` sends a command and waits; between commands the process is stopped."""

    def __init__(self, job: Job, timeout: float, log: Path | None = None) -> None:
        self.job, self.timeout = job, timeout
        self.anonymous = 0  # most bytes of memory of its own that were seen while it was watched
        threads = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MONOPLAN_NUM_THREADS")}
        caches = {"MONOPLAN_CACHE_DIR": job.cache / "monoplan", "TORCHINDUCTOR_CACHE_DIR": job.cache / "inductor"}
        # Python's own cache is apart from those: an installed package comes with it.
        caches["PYTHONPYCACHEPREFIX"] = job.work.folder / "bytecode"
        env = {**environment(), **threads, **{name: str(path) for name, path in caches.items()}}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        self.begin = time.perf_counter()
        with open(log or os.devnull, "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cpu_peers.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                bufsize=0,
                preexec_fn=_die_with_parent,
            )
        self.stopped = False
        try:
            self.about: str = self._ask(job.to_json(), watch=True).get("about", "")
        except PeerError:
            self.close()
            raise

    def ask(self, do: str, *, watch: bool = False, **values: Any) -> dict[str, Any]:
        """The answer to a command; `watch` follows the memory, which a timed command must not have."""
        self._wake()
        try:
            return self._ask({"do": do, **values}, watch)
        finally:
            self._stop()

    def memory(self) -> dict[str, int]:
        """Bytes: the peak of all pages (with those of mapped files), and of memory of its own while watched."""
        return {"peak": self._status("VmHWM"), "anonymous": self.anonymous}

    def close(self) -> None:
        """Ends the process and waits until its memory is free."""
        if self.process.poll() is None:
            self._wake()
            try:
                self._send({"do": "end"})
                self.process.wait(5)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, message: dict[str, Any], watch: bool) -> dict[str, Any]:
        try:
            self._send(message)
        except OSError:
            raise PeerError(self._death()) from None
        out = self.process.stdout
        assert out is not None
        end = time.monotonic() + self.timeout
        while not select.select([out], [], [], SAMPLE if watch else max(end - time.monotonic(), 0))[0]:
            if watch:
                self.anonymous = max(self.anonymous, self._status("RssAnon"))
            if time.monotonic() > end:
                self.process.kill()
                raise PeerError(f"no answer to {message.get('do', 'start')!r} in {self.timeout:.0f} s")
        line = out.readline()
        if not line:
            raise PeerError(self._death())
        answer: dict[str, Any] = json.loads(line)
        self.anonymous = max(self.anonymous, self._status("RssAnon") if watch else 0)
        if not answer["ok"]:
            raise PeerError(answer["why"], missing=answer["kind"] == "unavailable")
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def _stop(self) -> None:
        """No thread of a worker may spin or clean up while another one is timed."""
        if self.process.poll() is None and not self.stopped:
            self.process.send_signal(signal.SIGSTOP)
            self.stopped = True

    def _wake(self) -> None:
        if self.process.poll() is None and self.stopped:
            self.process.send_signal(signal.SIGCONT)
            self.stopped = False

    def _death(self) -> str:
        code = self.process.wait()
        return f"the worker ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def _status(self, name: str) -> int:
        try:
            text = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return 0
        found = [line.split()[1] for line in text.splitlines() if line.startswith(name + ":")]
        return int(found[0]) * 1024 if found else 0
