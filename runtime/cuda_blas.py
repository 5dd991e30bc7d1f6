"""Large products by cuBLAS through CuPy: row-major x · wᵀ, accumulated in f32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.ir.arrays import address

if TYPE_CHECKING:
    from monoplan.runtime.cuda_device import GpuDevice, ProductSpec

_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_COMPUTE_32F, _DEFAULT = 68, -1
_N, _T = 0, 1
_ZERO, _ONE = np.zeros(1, np.float32), np.ones(1, np.float32)


def multiply(device: GpuDevice, spec: ProductSpec) -> None:
    """Adds the product to the device's stream; rows are the library's columns."""
    from cupy_backends.cuda.libs import cublas  # type: ignore[import-not-found]

    kind, out = _TYPES[spec.dtype.name], _TYPES[spec.out_dtype.name]
    with device.stream:  # CuPy gives cuBLAS the current stream at every call
        handle: Any = device.cupy.cuda.device.get_cublas_handle()
        cublas.gemmEx(
            handle, _T, _N, spec.columns, spec.rows, spec.depth, address(_ONE), spec.w, kind, spec.depth, spec.x, kind,
            spec.depth, address(_ONE if spec.add else _ZERO), spec.out, out, spec.columns, _COMPUTE_32F, _DEFAULT,
        )
