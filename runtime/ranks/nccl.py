"""GPUs that talk through NCCL, one for each rank, by CuPy. Sums are made in rank order, so that all ranks agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.errors import CompileError, PlanError, install_extra
from monoplan.runtime.cuda.device import gpu
from monoplan.runtime.ranks.comm import Communicator, host


class NcclCommunicator(Communicator):
    """A rank with a GPU. `control` has the same ranks: it carries Python's values, and the first greeting of NCCL.

    Arrays are gathered and then summed in rank order: ncclAllReduce promises no order, and the values that plans
    exchange are small.
    """

    kind = "nccl"

    def __init__(self, control: Communicator, device: int | None = None) -> None:
        super().__init__(control.rank, control.size, control.exchange)
        self.control = control
        self._cupy, self._nccl = _import()
        count = self._cupy.cuda.runtime.getDeviceCount()
        self.device = control.local_rank % count if device is None else device
        self.local_rank = control.local_rank
        places = control.collect((host(), self.device))
        if len(set(places)) < control.size:
            raise PlanError(
                "two ranks of an NCCL group share a GPU, which NCCL does not allow",
                why=f"rank and GPU: {list(enumerate(d for _, d in places))}",
                fix='use tp="mpi", which goes through the memory of the host, or a GPU for each rank',
            )
        self._cupy.cuda.Device(self.device).use()
        if gpu().number != self.device:
            raise PlanError(
                f"this process uses GPU {gpu().number} already, and its rank is to use {self.device}",
                fix="make the communicator before anything else runs on a GPU, or give nccl(device=…)",
            )
        greeting = control.share(self._nccl.get_unique_id() if control.rank == 0 else None)
        self._group = self._nccl.NcclCommunicator(control.size, greeting, control.rank)

    def collect(self, value: Any) -> list[Any]:
        return self.control.collect(value)

    def share(self, value: Any) -> Any:
        return self.control.share(value)

    def failure(self) -> str:
        return self.control.failure()

    def told_elsewhere(self) -> bool:
        return self.control.told_elsewhere()

    def fail(self, message: str) -> None:
        self.control.fail(message)

    def abort(self, message: str = "", status: int = 1) -> None:
        self.control.abort(message, status)

    def local_threads(self, count: int) -> int:
        return self.control.local_threads(count)

    def gather_bytes(self, x: int, y: int, nbytes: int, stream: int) -> None:
        """The bytes at x of every rank, one after another at y, in the order of a stream.

        Bytes: NCCL need not know the type, and bf16 is none of CuPy's.
        """
        self._group.allGather(x, y, nbytes, self._nccl.NCCL_UINT8, stream)

    def gather_on_device(self, x: Any) -> Any:
        """x of every rank as one array [ranks, …] on this rank's GPU; in the order of the current stream."""
        cupy = self._cupy
        dense = cupy.ascontiguousarray(x)
        found = cupy.empty((self.size, *dense.shape), dense.dtype)
        self.gather_bytes(dense.data.ptr, found.data.ptr, dense.nbytes, cupy.cuda.get_current_stream().ptr)
        return found

    def gather(self, x: Any) -> list[Any]:
        """Arrays of numpy travel through the GPU; those of CuPy stay there."""
        with self._cupy.cuda.Device(self.device):
            if isinstance(x, self._cupy.ndarray):
                return list(self.gather_on_device(x))
            raw = np.ascontiguousarray(x)
            rows = self.gather_on_device(self._cupy.asarray(raw.reshape(-1).view(np.uint8))).get()
            return [row.view(raw.dtype).reshape(raw.shape) for row in rows]

    def all_gather(self, x: Any, axis: int = -1) -> Any:
        parts = self.gather(x)
        return (np if isinstance(parts[0], np.ndarray) else self._cupy).concatenate(parts, axis=axis)

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None
            self.control.close()


def _import() -> tuple[Any, Any]:
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise CompileError('tp="nccl" needs CuPy', why=str(error), fix=install_extra("cuda")) from None
    if not getattr(nccl, "available", True):
        raise CompileError("this CuPy has no NCCL", fix="install NCCL for your CUDA, such as nvidia-nccl-cu13")
    return cupy, nccl
