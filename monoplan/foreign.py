"""Arrays of other libraries as arguments: used where they lie, through DLPack or __cuda_array_interface__."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from monoplan.frontend.specs import Spec, spec_of
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import TensorType, as_dtype

_HOST = (1, 3)  # kDLCPU, kDLCUDAHost


def is_array(x: Any) -> bool:
    """Whether it is an array of a plan: numpy's, or after `adopt` a device array."""
    return isinstance(x, np.ndarray) or (not isinstance(x, Tensor | Spec) and hasattr(x, "__cuda_array_interface__"))


def adopt(x: Any, target: str) -> Any:
    """An array of another library as numpy's or, in a GPU's memory, as the device's own; it shares the memory."""
    if isinstance(x, np.ndarray | Tensor | Spec | str | int | float | bool | None):
        return x
    # A torch tensor on a GPU has both; its interface can say neither bfloat16 nor a stream.
    has_dlpack = hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")
    if has_dlpack and int(x.__dlpack_device__()[0]) in _HOST:
        return _from_host(x)
    if not has_dlpack and not hasattr(x, "__cuda_array_interface__"):
        return x
    if target != "cuda":
        raise ArgumentError(
            f"a {type(x).__name__} is on a GPU, the plan runs on the CPU",
            fix="copy it to the host (cupy.asnumpy(x), x.cpu()), or compile with target='cuda'",
        )
    from monoplan.runtime.cuda.device import gpu

    return gpu().adopt(x)


def _from_host(x: Any) -> Any:
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        if str(getattr(x, "dtype", "")) == "torch.bfloat16" and not getattr(x, "requires_grad", False):
            return np.from_dlpack(x.view(sys.modules["torch"].int16)).view(as_dtype("bfloat16").numpy)
        raise ArgumentError(
            f"a {type(x).__name__} can't be used in place", why=str(error), fix="detach() it, or pass a numpy array"
        ) from None


def array_spec(x: Any) -> Any:
    """The static Spec of an array on either side; other leaves stay as they are."""
    if is_array(x) and not isinstance(x, np.ndarray):
        return Spec(TensorType(as_dtype(x.dtype), tuple(x.shape)))
    return spec_of(x)


def assign(target: Any, value: Any) -> None:
    """Puts a plan's result into an argument that forward changed, on whichever side each of them is."""
    if target is value or (is_device(target) and is_device(value) and target.data.ptr == value.data.ptr):
        return
    if is_device(target) == is_device(value):
        target[...] = value
    elif is_device(value):
        target[...] = value.get()
    else:
        target.set(value)


def is_device(x: Any) -> bool:
    """Whether an array of a plan is in a GPU's memory."""
    return not isinstance(x, np.ndarray)
