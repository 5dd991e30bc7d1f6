"""The CUDA driver through cffi: cubins, their functions, and launches with attributes, which CuPy does not have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from monoplan.ir.errors import CompileError, PlanError

_CDEF = """
typedef void *CUmodule, *CUfunction, *CUstream;
typedef union { char pad[64]; int flag; struct { unsigned x, y, z; } dim; } CUlaunchAttributeValue;
typedef struct { int id; char pad[4]; CUlaunchAttributeValue value; } CUlaunchAttribute;
typedef struct {
    unsigned gx, gy, gz, bx, by, bz, shared; CUstream stream; CUlaunchAttribute *attributes; unsigned count;
} CUlaunchConfig;
int cuModuleLoadData(CUmodule *, const void *);
int cuModuleGetFunction(CUfunction *, CUmodule, const char *);
int cuFuncSetAttribute(CUfunction, int, int);
int cuFuncGetAttribute(int *, int, CUfunction);
int cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **);
int cuGetErrorString(int, const char **);
"""
CLUSTER, OVERLAP = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION
_STATIC_SHARED, _LOCAL, _REGISTERS, _DYNAMIC_SHARED = 1, 3, 4, 8  # CU_FUNC_ATTRIBUTE_…


@cache
def load_driver() -> tuple[Any, Any]:
    """cffi, and the driver's functions."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(_CDEF)
    try:
        return ffi, ffi.dlopen("libcuda.so.1")
    except OSError as error:
        raise CompileError(
            "the NVIDIA driver is not there", why=str(error), fix="install it, or use target='cpu'"
        ) from None


def check(code: int, what: str) -> None:
    """Raises for an error code of the driver, with its own words."""
    if code:
        ffi, driver = load_driver()
        text = ffi.new("const char **")
        driver.cuGetErrorString(code, text)
        said = ffi.string(text[0]).decode() if text[0] != ffi.NULL else ""
        raise PlanError(f"{what}: CUDA error {code} ({said})")


class Module:
    """Loaded cubins; functions by name."""

    def __init__(self, binaries: Sequence[bytes], limit: int) -> None:
        self.ffi, self.driver = load_driver()
        self.limit = limit
        self.functions: dict[str, Any] = {}
        self.handles, self._held, self._binaries = [], [], binaries
        for binary in binaries:
            data, handle = self.ffi.new("char[]", binary), self.ffi.new("CUmodule *")
            check(self.driver.cuModuleLoadData(handle, data), "loading the plan's cubin")
            self.handles.append(handle[0])
            self._held.append(data)

    def __getitem__(self, name: str) -> Any:
        if name not in self.functions:
            f = self.ffi.new("CUfunction *")
            section = f".text.{name}\0".encode()  # asking the wrong cubin would be an error
            handle = next(h for h, b in zip(self.handles, self._binaries, strict=True) if section in b)
            check(self.driver.cuModuleGetFunction(f, handle, name.encode()), f"kernel {name}")
            # The most once: launches of one function with different sizes must not undo each other.
            most = self.limit - self.attribute(f[0], _STATIC_SHARED)
            check(self.driver.cuFuncSetAttribute(f[0], _DYNAMIC_SHARED, most), f"shared memory of {name}")
            self.functions[name] = f[0]
        return self.functions[name]

    def attribute(self, function: Any, number: int) -> int:
        value = self.ffi.new("int *")
        check(self.driver.cuFuncGetAttribute(value, number, function), "function attribute")
        return int(value[0])

    def describe(self, name: str) -> dict[str, int]:
        """Registers, bytes of local memory (spills) and of static shared memory."""
        f = self[name]
        return {
            "registers": self.attribute(f, _REGISTERS),
            "local": self.attribute(f, _LOCAL),
            "shared": self.attribute(f, _STATIC_SHARED),
        }
