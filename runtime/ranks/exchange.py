"""How a communicator moves data, in C (mp_comm.h): built once, called by plans and from numpy."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError, PlanError
from monoplan.ir.types import Array, address
from monoplan.runtime.build import toolchain
from monoplan.runtime.machine import features

ROOM = 1 << 20  # bytes that one exchange carries for each rank; larger values go in several
PATIENCE = 600.0
TIMEOUT = "MONOPLAN_COMM_TIMEOUT"
_DIRECTLY = -1  # the tag of exchanges that no plan makes
_ABI = 2
_HEADER = Path(__file__).resolve().with_name("mp_comm.h")
_CDEF = """
typedef struct mp_comm mp_comm;
int mp_comm_exchange(void *, const void *, int64_t, int64_t, const void *const **);
int64_t mp_comm_bytes(int32_t, int64_t);
mp_comm *mp_comm_open_shared(void *, int32_t, int32_t, int64_t, double);
mp_comm *mp_comm_open_mpi(void *, int, uintptr_t, uintptr_t, int32_t, int32_t, int64_t);
void mp_comm_leave(mp_comm *, const char *);
void mp_comm_failure(const mp_comm *, int64_t *);
int mp_comm_absent(const mp_comm *, int32_t *);
const char *mp_comm_message(const mp_comm *, int32_t);
void mp_comm_close(mp_comm *);
"""
_DEAD, _LEFT, _FAILED, _MISMATCH, _TIMEOUT, _MPI = range(1, 7)


@functools.cache
def _library() -> tuple[Any, Any]:
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(_CDEF)
    key, build = toolchain.plan_build(
        '#include "mp_comm.h"\n',
        (),
        target=features.detect().key,
        abi=_ABI,
        headers=[("mp_comm.h", _HEADER.read_text("utf-8"))],
    )
    library, _ = toolchain.load(key, build, ffi.dlopen)
    return ffi, library


def patience() -> float:
    """Seconds that a rank waits for another (MONOPLAN_COMM_TIMEOUT; 0: for ever)."""
    text = os.environ.get(TIMEOUT, "").strip()
    try:
        seconds = float(text) if text else PATIENCE
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ArgumentError(f"{TIMEOUT}={text!r} is not a number of seconds")
    return seconds


def shared_bytes(size: int, room: int = ROOM) -> int:
    """The memory that a group needs."""
    _, library = _library()
    return int(library.mp_comm_bytes(size, room))


class Exchange:
    """One rank's end of a connection. `function` and `context` are what a plan calls; `room` is the most at a time."""

    def __init__(self, handle: Any, rank: int, size: int, room: int, memory: Any = None) -> None:
        ffi, library = _library()
        if handle == ffi.NULL:
            raise MemoryError("no memory for a communicator")
        self._handle, self._memory = handle, memory  # the memory lives as long as this
        self.rank, self.size, self.room = rank, size, room
        self.function = int(ffi.cast("uintptr_t", library.mp_comm_exchange))
        self.context = int(ffi.cast("uintptr_t", handle))

    @classmethod
    def shared(cls, memory: Array, rank: int, size: int, room: int = ROOM, wait: float | None = None) -> Exchange:
        """Through memory that all ranks see: bytes, zeros at first; room is a multiple of 64."""
        ffi, library = _library()
        seconds = patience() if wait is None else wait
        place = ffi.cast("void *", address(memory))
        return cls(library.mp_comm_open_shared(place, rank, size, room, seconds), rank, size, room, memory)

    @classmethod
    def mpi(
        cls, gather: int, wide: bool, byte_type: int, group: int, rank: int, size: int, room: int = ROOM
    ) -> Exchange:
        """Through MPI_Allgather at an address; `wide` where the handles of that MPI are pointers."""
        ffi, library = _library()
        function = ffi.cast("void *", gather)
        handle = library.mp_comm_open_mpi(function, wide, byte_type, group, rank, size, room)
        return cls(handle, rank, size, room)

    def gather(self, x: Array) -> list[Array]:
        """x of every rank; all give the same type. For Python: plans call `function` themselves."""
        ffi, library = _library()
        self.check()
        dense = np.ascontiguousarray(x)
        flat = dense.reshape(-1).view(np.uint8)
        whole = np.empty((self.size, flat.size), np.uint8)
        parts = ffi.new("const void *const **")
        for start in range(0, max(flat.size, 1), self.room):
            piece = flat[start : start + self.room]
            data = ffi.cast("void *", address(piece))
            if library.mp_comm_exchange(self._handle, data, piece.size, _DIRECTLY, parts):
                raise PlanError(f"the exchange between ranks failed: {self.failure()}")
            for r in range(self.size):
                whole[r, start : start + piece.size] = np.frombuffer(ffi.buffer(parts[0][r], piece.size), np.uint8)
        return [row.view(dense.dtype).reshape(dense.shape) for row in whole]

    def check(self) -> None:
        """Raises when it was closed."""
        if not self.context:
            raise PlanError("the communicator was closed", fix="close it when no plan will run any more")

    def failure(self) -> str:
        """What went wrong, in words; empty if nothing did."""
        if not self.context:
            return "the communicator was closed"
        code, rank, process, their_bytes, their_step, bytes_, step = self._facts()
        texts = {
            _DEAD: f"rank {rank} has ended (process {process})",
            _MISMATCH: f"the ranks do not do the same: rank {rank} sends {their_bytes} bytes at collective "
            f"{their_step}, this one {bytes_} at {step}",
            _TIMEOUT: f"rank {rank} did not answer for {patience():g} s ({TIMEOUT} sets how long it may take)",
            _MPI: "MPI_Allgather reported an error: ranks that do not do the same, or a connection that broke",
        }
        return texts.get(code) or self._words(code, rank)

    def told_elsewhere(self) -> bool:
        """Whether what went wrong is the error of another rank, which tells of it: one that died doesn't."""
        return bool(self.context) and (self._facts()[0] or self._absent()[0]) in (_FAILED, _MPI)

    def absent(self) -> str:
        """Whether a rank has failed, left or died, in words; empty if all are there, as far as it can be seen."""
        return self._words(*self._absent())

    def _facts(self) -> list[int]:
        ffi, library = _library()
        facts = ffi.new("int64_t[7]")
        library.mp_comm_failure(self._handle, facts)
        return [int(n) for n in facts]

    def _absent(self) -> tuple[int, int]:
        ffi, library = _library()
        rank = ffi.new("int32_t *")
        code = library.mp_comm_absent(self._handle, rank) if self.context else 0
        return code, int(rank[0])

    def _words(self, code: int, rank: int) -> str:
        if code == _FAILED:
            ffi, library = _library()
            said = ffi.string(library.mp_comm_message(self._handle, rank)).decode(errors="replace")
            return f"rank {rank} failed: {said}"
        return {
            _DEAD: f"rank {rank} has ended",
            _LEFT: f"rank {rank} has left: its program ended before this one's",
        }.get(code, "")

    def leave(self, message: str | None = None) -> None:
        """Tells the ranks that wait for this one that it won't come: for good, or because of an error."""
        ffi, library = _library()
        if self._handle != ffi.NULL:
            library.mp_comm_leave(self._handle, ffi.NULL if message is None else message.encode())

    def close(self) -> None:
        """Leaves and gives the memory back; plans must not run any more."""
        ffi, library = _library()
        if self._handle != ffi.NULL:
            self.leave()
            library.mp_comm_close(self._handle)
            self._handle, self._memory, self.function, self.context = ffi.NULL, None, 0, 0
