"""Collectives of a plan on a GPU: through NCCL where ranks have GPUs of their own, else through the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from monoplan.codegen.plan_cuda import Exchange
from monoplan.ir.dims import evaluate
from monoplan.ir.errors import PlanError
from monoplan.runtime.comm import Communicator

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """An exchange with everything known."""

    x: int
    y: int
    rows: int
    columns: int
    gather: bool
    dtype: np.dtype[Any]


def exchange_spec(a: Exchange, values: Mapping[str, int], x: int, y: int) -> ExchangeSpec:
    """An action of the plan for these sizes and addresses."""
    rows, columns = evaluate(a.rows, values), evaluate(a.columns, values)
    return ExchangeSpec(x, y, rows, columns, a.gather, a.dtype.numpy)


def exchange(device: Any, comm: Communicator | None, spec: ExchangeSpec) -> None:
    """Does it, in the order of the device's other work."""
    if comm is None:
        raise PlanError("the plan exchanges values with other ranks, but has no communicator", fix="compile with tp=")
    if hasattr(comm, "gather_on_device"):
        _on_device(device, comm, spec)
        return
    host = device.pinned(spec.rows * spec.columns * spec.dtype.itemsize)
    mine = host[: spec.rows * spec.columns * spec.dtype.itemsize].view(spec.dtype).reshape(spec.rows, spec.columns)
    device.download(mine, spec.x)
    device.synchronize()
    result = _joined(comm.gather(mine), spec.gather)
    device.upload(spec.y, result)
    device.synchronize()  # the array must outlive the copy


def _joined(parts: list[Array], gather: bool) -> Array:
    """All parts side by side, or their sum in rank order; half floats are summed in f32."""
    if gather:
        return np.ascontiguousarray(np.stack(parts, axis=1))
    dtype = parts[0].dtype
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    return total.astype(dtype)


def _on_device(device: Any, comm: Any, spec: ExchangeSpec) -> None:
    cupy = device.cupy
    if spec.dtype not in (np.float64, np.float32, np.float16):
        raise PlanError(f"sums of {spec.dtype} between GPUs are not supported", fix='use tp="mpi"')
    nbytes = spec.rows * spec.columns * spec.dtype.itemsize

    def at(address: int, shape: tuple[int, ...], size: int) -> Any:
        memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, None), 0)
        return cupy.ndarray(shape, spec.dtype, memory)

    with device.stream:
        parts = comm.gather_on_device(at(spec.x, (spec.rows, spec.columns), nbytes))
        if spec.gather:
            at(spec.y, (spec.rows, comm.size, spec.columns), nbytes * comm.size)[...] = parts.swapaxes(0, 1)
            return
        total = parts[0].astype(np.float32) if spec.dtype == np.float16 else parts[0].copy()
        for part in parts[1:]:
            total += part
        at(spec.y, (spec.rows, spec.columns), nbytes)[...] = total
