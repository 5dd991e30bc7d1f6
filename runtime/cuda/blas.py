"""Large products by cuBLASLt: row-major out = x · wᵀ (+ residual), accumulated in f32.

CuPy brings the library but no binding of it, so it is called through cffi. The first algorithm that its heuristic
offers is used: on an H200 the fastest of each product by itself made a whole prompt slower (47.6 and not 47.3 ms, 8B),
since power is what limits it. Algorithms that split K are offered for results too small to fill the device, if they add
the parts in a step of their own: sums must not depend on the order of the blocks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.ir.errors import PlanError
from monoplan.ir.types import address

if TYPE_CHECKING:
    from monoplan.runtime.cuda.device import GpuDevice, ProductSpec

_CDEF = """
typedef struct { uint64_t data[8]; } Algo;
typedef struct { Algo algo; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
int cublasLtCreate(void **);
int cublasLtMatmulDescCreate(void **, int, int);
int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
int cublasLtMatrixLayoutCreate(void **, int, uint64_t, uint64_t, int64_t);
int cublasLtMatmulPreferenceCreate(void **);
int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t);
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, Heuristic *, int *);
int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *,
                   const void *, void *, void *, void *, const Algo *, void *, size_t, void *);
"""
_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_COMPUTE_32F, _TRANSPOSE_A, _MAX_WORKSPACE, _REDUCTIONS = 68, 3, 1, 3
_EPILOGUE, _BIAS_POINTER, _ADDS_BIAS, _IN_A_STEP = 7, 8, 4, 2
WORKSPACE = 32 << 20
_ZERO, _ONE = np.zeros(1, np.float32), np.ones(1, np.float32)


@cache
def load_library() -> tuple[Any, Any] | None:
    """cffi's view of cuBLASLt, or None where it is not there."""
    try:
        from cffi import FFI
        from cupy_backends.cuda.libs import cublas  # type: ignore[import-not-found]  # noqa: F401  (loads the library)
    except ImportError:
        return None
    ffi = FFI()
    ffi.cdef(_CDEF)
    for name in ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"):
        try:
            return ffi, ffi.dlopen(name)
        except OSError:
            continue
    return None


class _Shape:
    """A product of certain sizes and types: descriptors and an algorithm that fits it."""

    def __init__(self, owner: Products, spec: ProductSpec) -> None:
        ffi, lib = owner.ffi, owner.lib

        def make(create: Any, *arguments: Any) -> Any:
            handle = ffi.new("void **")
            _check(create(handle, *arguments))
            return handle[0]

        kind, out = _TYPES[spec.dtype.name], _TYPES[spec.out_dtype.name]
        self.operation = make(lib.cublasLtMatmulDescCreate, _COMPUTE_32F, 0)
        _check(lib.cublasLtMatmulDescSetAttribute(self.operation, _TRANSPOSE_A, ffi.new("int *", 1), 4))
        if spec.bias:
            _check(lib.cublasLtMatmulDescSetAttribute(self.operation, _EPILOGUE, ffi.new("uint32_t *", _ADDS_BIAS), 4))
            self.set_bias(owner, spec.bias)  # heuristics look at its alignment
        # The library thinks in columns: w is its left operand, rows of x are its columns.
        self.w = make(lib.cublasLtMatrixLayoutCreate, kind, spec.depth, spec.columns, spec.depth)
        self.x = make(lib.cublasLtMatrixLayoutCreate, kind, spec.depth, spec.rows, spec.depth)
        self.out = make(lib.cublasLtMatrixLayoutCreate, out, spec.columns, spec.rows, spec.columns)
        preference = make(lib.cublasLtMatmulPreferenceCreate)
        tiles = -(-spec.rows // 128) * -(-spec.columns // 128)
        splits = _IN_A_STEP if 2 * tiles <= owner.device.target.cores else 0
        for attribute, ctype, value in ((_MAX_WORKSPACE, "size_t *", WORKSPACE), (_REDUCTIONS, "uint32_t *", splits)):
            pointer = ffi.new(ctype, value)
            size = ffi.sizeof(ffi.typeof(pointer).item)
            _check(lib.cublasLtMatmulPreferenceSetAttribute(preference, attribute, pointer, size))
        self.offer = ffi.new("Heuristic *")
        count = ffi.new("int *")
        _check(
            lib.cublasLtMatmulAlgoGetHeuristic(
                owner.handle, self.operation, self.w, self.x, self.out, self.out, preference, 1, self.offer, count
            )
        )
        if count[0] == 0:
            raise PlanError(f"cuBLASLt has no algorithm for a product {spec.rows} x {spec.columns} x {spec.depth}")

    def set_bias(self, owner: Products, address: int) -> None:
        pointer = owner.ffi.new("void **", owner.ffi.cast("void *", address))
        _check(owner.lib.cublasLtMatmulDescSetAttribute(self.operation, _BIAS_POINTER, pointer, 8))


class Products:
    """The products of a device."""

    def __init__(self, device: GpuDevice) -> None:
        found = load_library()
        assert found is not None
        self.ffi, self.lib = found
        self.device = device
        handle = self.ffi.new("void **")
        _check(self.lib.cublasLtCreate(handle))
        self.handle = handle[0]
        self.workspace = device.allocate(WORKSPACE)
        self._shapes: dict[tuple[Any, ...], _Shape] = {}

    def shape(self, spec: ProductSpec) -> _Shape:
        """The descriptors of a product, made once."""
        key = (spec.rows, spec.columns, spec.depth, spec.dtype.name, spec.out_dtype.name, bool(spec.bias))
        if key not in self._shapes:
            if len(self._shapes) > 4096:
                self._shapes.clear()
            self._shapes[key] = _Shape(self, spec)
        return self._shapes[key]

    def run(self, spec: ProductSpec) -> None:
        """Puts the product on the device's stream."""
        shape = self.shape(spec)
        cast = self.ffi.cast
        if spec.bias:
            shape.set_bias(self, spec.bias)
        _check(
            self.lib.cublasLtMatmul(
                self.handle,
                shape.operation,
                cast("void *", address(_ONE)),
                cast("void *", spec.w),
                shape.w,
                cast("void *", spec.x),
                shape.x,
                cast("void *", address(_ONE if spec.add else _ZERO)),
                cast("void *", spec.add or spec.out),
                shape.out,
                cast("void *", spec.out),
                shape.out,
                self.ffi.addressof(shape.offer, "algo"),
                cast("void *", self.workspace.address),
                WORKSPACE,
                cast("void *", self.device.stream.ptr),
            )
        )


def _check(code: int) -> None:
    if code:
        raise PlanError(f"cuBLASLt error {code}")
