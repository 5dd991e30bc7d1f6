"""Communicators: the ranks of a tensor-parallel group behind one small interface.

`single()` is a group of one, `threads(n)` a group inside one process (for tests), `mpi()` that of an `mpirun`, and
`nccl()` one of GPUs. Plans call a communicator through a function pointer (`exchange`); Python uses the methods.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError, PlanError
from monoplan.ir.types import Array
from monoplan.runtime.ranks.exchange import ROOM, Exchange, shared_bytes

# Set for each rank by the launchers of Open MPI, of MPICH and Intel MPI, and by srun.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")


class Communicator:
    """One rank of a group. Every rank calls the same methods in the same order."""

    kind = "single"

    def __init__(self, rank: int = 0, size: int = 1, exchange: Exchange | None = None) -> None:
        self.rank, self.size, self.exchange = rank, size, exchange
        self.local_rank = 0  # among the processes of this host
        self.lock = threading.Lock()  # held while a plan runs: two at once would mix their exchanges

    # -- values of Python ---------------------------------------------------------------------------------------

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        return [value]

    def share(self, value: Any) -> Any:
        """Rank 0's value."""
        return self.collect(value)[0]

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.collect(None)

    # -- arrays -------------------------------------------------------------------------------------------------

    def gather(self, x: Array) -> list[Array]:
        """x of every rank, in rank order; all have the same type."""
        return [np.asarray(x)] if self.exchange is None else self.exchange.gather(x)

    def all_reduce(self, x: Array) -> Array:
        """The sum over the ranks, in rank order: the same bits on each."""
        first, *others = self.gather(x)
        for part in others:
            first = first + part
        return first

    def all_gather(self, x: Array, axis: int = -1) -> Array:
        """The ranks' parts joined along an axis."""
        return np.concatenate(self.gather(x), axis=axis)

    # -- the group ----------------------------------------------------------------------------------------------

    def failure(self) -> str:
        """What went wrong in an exchange, in words."""
        return self.exchange.failure() if self.exchange is not None else ""

    def told_elsewhere(self) -> bool:
        """Whether it is the error of another rank, which tells of it itself."""
        return self.exchange is not None and self.exchange.told_elsewhere()

    def fail(self, message: str) -> None:
        """Tells the other ranks that this one has failed, so that they don't wait for it."""
        if self.exchange is not None:
            self.exchange.leave(message)

    def abort(self, message: str = "", status: int = 1) -> None:
        """Ends the whole group; does nothing where this process is all of it."""
        self.fail(message)

    def local_threads(self, count: int) -> int:
        """How many of a machine's `count` threads are this rank's, where ranks share its cores."""
        return count

    def agree(self, facts: dict[str, Any], what: str) -> None:
        """Raises on every rank unless all have the same facts."""
        for rank, theirs in enumerate(self.collect(facts)):
            wrong = [name for name in facts if theirs.get(name) != facts[name]]
            if wrong:
                shown = "; ".join(
                    f"{n}: {_short(facts[n])} on rank {self.rank}, {_short(theirs.get(n))} on rank {rank}"
                    for n in wrong
                )
                raise ArgumentError(
                    f"the ranks do not {what}: they differ in {', '.join(wrong)}",
                    why=shown,
                    fix="start every rank with the same program, model, dtype and options",
                )

    def close(self) -> None:
        """Leaves the group."""
        if self.exchange is not None:
            self.exchange.close()

    def __repr__(self) -> str:
        return f"<{self.kind} communicator: rank {self.rank} of {self.size}>"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def single() -> Communicator:
    """A group of one rank."""
    return Communicator()


class _Meeting:
    """Where the threads of a group put values for each other."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.message = ""


class ThreadCommunicator(Communicator):
    """A rank that is a thread of this process."""

    kind = "thread"

    def __init__(self, rank: int, size: int, exchange: Exchange | None, meeting: _Meeting) -> None:
        super().__init__(rank, size, exchange)
        self._meeting = meeting

    def collect(self, value: Any) -> list[Any]:
        m = self._meeting
        try:
            m.values[self.rank] = value
            m.barrier.wait()
            found = list(m.values)
            m.barrier.wait()
        except threading.BrokenBarrierError:
            raise PlanError(f"a rank has failed: {m.message}") from None
        return found

    def fail(self, message: str) -> None:
        super().fail(message)
        self._meeting.message = self._meeting.message or message
        self._meeting.barrier.abort()

    def local_threads(self, count: int) -> int:
        return max(1, count // self.size)


def threads(size: int, room: int = ROOM) -> list[Communicator]:
    """The communicators of a group whose ranks are threads of this process, each to be used by one of them."""
    meeting = _Meeting(size)
    if size == 1:
        return [ThreadCommunicator(0, 1, None, meeting)]
    memory = np.zeros(shared_bytes(size, room) + 64, np.uint8)
    start = -int(memory.__array_interface__["data"][0]) % 64
    return [ThreadCommunicator(r, size, Exchange.shared(memory[start:], r, size, room), meeting) for r in range(size)]


def launched() -> bool:
    """Whether a launcher (mpirun, mpiexec, srun) started this process as one of several ranks."""
    sizes = [os.environ.get(name, "") for name in _SIZES]
    if "SLURM_STEP_NUM_TASKS" in os.environ and "PMIX_RANK" in os.environ:
        sizes.append(os.environ["SLURM_STEP_NUM_TASKS"])
    return any(text.isdigit() and int(text) > 1 for text in sizes)


def mpi(group: Any = None) -> Communicator:
    """The ranks of mpirun (MPI.COMM_WORLD), or those of another communicator of mpi4py."""
    from monoplan.runtime.ranks.mpi import mpi_communicator

    return mpi_communicator(group)


def nccl(control: Communicator | None = None, device: int | None = None) -> Communicator:
    """GPUs, one for each rank of `control` (default: a group of one)."""
    from monoplan.runtime.ranks.nccl import NcclCommunicator

    return NcclCommunicator(control or single(), device)


def communicator(given: Any) -> Communicator | None:
    """What `tp=` may be: None, a Communicator, "mpi", "nccl", or a communicator of mpi4py."""
    if given is None or isinstance(given, Communicator):
        return given
    if given == "mpi":
        return mpi()
    if given == "nccl":
        return nccl(mpi() if launched() else None)
    if hasattr(given, "Get_rank") and hasattr(given, "Get_size"):
        return mpi(given)
    raise ArgumentError(
        f"tp= takes a communicator, got {given!r:.60}",
        fix='use tp="mpi", tp="nccl", or one of monoplan.runtime.ranks.comm',
    )


# What ranks need to know of the machine that they are on: which one it is, its cores, and memory to share.


def host() -> str:
    """The host, as far as memory and process numbers are shared: containers have processes of their own."""
    import socket  # here: a process of one rank does without it

    about = [socket.gethostname()]
    with contextlib.suppress(OSError):
        about += [Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(about)


def cpus() -> tuple[int, ...]:
    """The cores that this process may use; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def shared_file(nbytes: int) -> str:
    """A new file of zeros, of a name that no other group has, which only this user can read."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    number, path = tempfile.mkstemp(prefix="monoplan-", dir=folder)
    try:
        os.ftruncate(number, nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, nbytes)  # now, not as a SIGBUS when the place is full
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(number)
    return path
