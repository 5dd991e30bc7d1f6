"""Collectives of a plan on a GPU: through NCCL where ranks have GPUs of their own, else through the host's memory.

Ranks only give each other their bytes here; the sum, in rank order and with what follows it, is a kernel of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from monoplan.codegen.cuda.launches import Exchange
from monoplan.ir.dims import evaluate
from monoplan.ir.errors import PlanError
from monoplan.runtime.ranks.comm import Communicator

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """An exchange with everything known: addresses, and rows of `width` bytes."""

    x: int
    y: int
    rows: int
    width: int


def exchange_spec(a: Exchange, values: Mapping[str, int], x: int, y: int) -> ExchangeSpec:
    """An action of the plan for these sizes and addresses."""
    return ExchangeSpec(x, y, evaluate(a.rows, values), evaluate(a.columns, values) * a.dtype.itemsize)


def exchange(device: Any, comm: Communicator | None, spec: ExchangeSpec) -> None:
    """Puts x[rows] of every rank to y[rows, rank], in the order of the device's other work."""
    if comm is None:
        raise PlanError("the plan exchanges values with other ranks, but has no communicator", fix="compile with tp=")
    if not spec.rows * spec.width:
        return
    if hasattr(comm, "gather_bytes"):
        _on_device(device, comm, spec)
        return
    nbytes = spec.rows * spec.width
    mine = device.pinned(nbytes)[:nbytes].reshape(spec.rows, spec.width)
    device.download(mine, spec.x)
    device.synchronize()
    parts = comm.gather(mine)
    joined = device.pinned(nbytes * comm.size)[: nbytes * comm.size]
    np.stack(parts, axis=1, out=joined.reshape(spec.rows, comm.size, spec.width))
    device.upload(spec.y, joined)
    device.synchronize()  # the array must outlive the copy


def _on_device(device: Any, comm: Any, spec: ExchangeSpec) -> None:
    nbytes, cupy = spec.rows * spec.width, device.cupy
    if spec.rows == 1:
        comm.gather_bytes(spec.x, spec.y, nbytes, device.stream.ptr)
        return
    with device.stream:  # NCCL puts the ranks first: rows are put together again
        parts = cupy.empty((comm.size, spec.rows, spec.width), np.uint8)
        comm.gather_bytes(spec.x, parts.data.ptr, nbytes, device.stream.ptr)
        memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(spec.y, nbytes * comm.size, None), 0)
        cupy.ndarray((spec.rows, comm.size, spec.width), np.uint8, memory)[...] = parts.swapaxes(0, 1)


def take_turns(comm: Communicator) -> None:
    """Ranks of one host that have not chosen a GPU take its GPUs in turn; before the process uses one."""
    from monoplan.runtime.cuda.device import gpu, import_cupy

    cuda = import_cupy().cuda
    count = cuda.runtime.getDeviceCount()
    unchosen = not hasattr(comm, "device") and not gpu.cache_info().currsize and cuda.Device().id == 0
    if unchosen and comm.local_rank % count:
        cuda.Device(comm.local_rank % count).use()
