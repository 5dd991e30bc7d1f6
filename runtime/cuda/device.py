"""One GPU through CuPy and the driver: memory, launches with attributes, products by cuBLAS, captured graphs.

CuPy has no launch attributes, so kernels are loaded and launched through cffi; memory, streams, graphs and cuBLAS are
CuPy's. `CudaExecutable` needs nothing but the methods of `Device`, which tests implement on the CPU.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from monoplan.codegen.target import Target, cuda_target
from monoplan.ir.errors import ArgumentError, CompileError, PlanError, install_extra
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, DType, address, bf16, torch_types
from monoplan.runtime.build.cache import Entry
from monoplan.runtime.cuda import build as cuda_build
from monoplan.runtime.cuda.blas import Products, load_library

# The CUDA driver through cffi: cubins, their functions, and launches with attributes, which CuPy does not have.


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
int cuTensorMapEncodeTiled(void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const unsigned *,
                           const unsigned *, int, int, int, int);
"""
CLUSTER, OVERLAP = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION
_BF16, _SWIZZLE_128, _PROMOTE_256 = 9, 3, 3  # CU_TENSOR_MAP_…
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


class Device(Protocol):
    """What an executable needs of a GPU. Addresses are plain numbers; all work is done in order."""

    target: Target
    lock: Any  # held while work is put on the stream: a capture takes all of it

    def load(self, source: str, parts: Sequence[str] = ()) -> tuple[Any, Entry | None]: ...
    def free(self) -> int: ...  # bytes that could be allocated
    def allocate(self, nbytes: int) -> Any: ...  # an object with .address; its memory lives as long as it does
    def upload(self, target: int, source: Array) -> None: ...
    def download(self, target: Array, source: int) -> None: ...
    def copy(self, target: int, source: int, nbytes: int) -> None: ...
    def prepare(self, launch: LaunchSpec) -> Any: ...
    def run(self, prepared: Any) -> None: ...
    def product(self, spec: ProductSpec) -> None: ...
    def synchronize(self) -> None: ...
    def clear(self, target: int, nbytes: int) -> None: ...
    def event(self, sleep: bool = True) -> Any: ...
    def record(self, event: Any) -> None: ...  # what is on the stream now comes before the event
    def wait(self, event: Any) -> None: ...  # the host, until the device has come to the event
    def capture(self, actions: Any) -> Any: ...  # a graph of what actions() would do
    def launch_graph(self, graph: Any) -> None: ...
    def is_lasting(self, a: Any) -> bool: ...  # whether the array's memory is safe until the caller's stream goes on
    def lead(self) -> None: ...  # what the caller does next with the device comes after what is on the stream now


class MatrixSpec(NamedTuple):
    """A dense matrix of bf16 that a kernel takes in boxes, see mp_map."""

    address: int
    rows: int
    depth: int
    box: int


@dataclass(slots=True, eq=False)
class LaunchSpec:
    """A kernel launch with everything known."""

    function: Any
    grid: tuple[int, int, int]
    block: int
    shared: int
    cluster: int
    overlap: bool
    words: Sequence[int | MatrixSpec]


@dataclass(slots=True, eq=False)
class ProductSpec:
    """out[rows, columns] = x[rows, depth] · w[columns, depth]ᵀ at addresses.

    (+ what lies at `add`, + the row at `bias`, if they are not 0.)
    """

    x: int
    w: int
    out: int
    rows: int
    columns: int
    depth: int
    dtype: DType
    out_dtype: DType
    add: int
    bias: int


def import_cupy() -> Any:
    """CuPy, or an error that names the extra to install."""
    try:
        import cupy
    except ImportError as error:
        raise CompileError(
            "target='cuda' needs CuPy, which is not installed",
            why=str(error),
            fix=f"{install_extra('cuda')} (CuPy for CUDA 13; for another CUDA install its cupy package)",
        ) from None
    return cupy


class Memory:
    """Device memory that is freed with this object."""

    __slots__ = ("address", "nbytes", "_owner")

    def __init__(self, owner: Any, nbytes: int) -> None:
        self._owner, self.address, self.nbytes = owner, int(owner.ptr), nbytes


class GpuDevice:
    """A device of this machine, with a stream of its own."""

    def __init__(self, number: int | None = None) -> None:
        self.cupy = import_cupy()
        self.runtime = self.cupy.cuda.runtime
        try:
            self.number = self.cupy.cuda.Device().id if number is None else number
            ask = self.runtime.deviceGetAttribute
            major, minor, cores, shared = (ask(n, self.number) for n in (75, 76, 16, 97))  # cudaDevAttr…
        except self.runtime.CUDARuntimeError as error:
            raise CompileError(
                "no GPU can be used",
                why=str(error),
                fix="see what nvidia-smi and `monoplan doctor` say, look at CUDA_VISIBLE_DEVICES, or use target='cpu'",
            ) from None
        capability = 10 * major + minor
        if capability < 75:
            name = self.runtime.getDeviceProperties(self.number)["name"].decode()
            raise CompileError(
                f"the GPU is too old: {name} has compute capability {capability / 10}",
                why="kernels need 7.5 (Turing) or newer",
                fix="choose another GPU by CUDA_VISIBLE_DEVICES, or use target='cpu'",
            )
        self.target = cuda_target(capability, cores, shared, library=load_library() is not None)
        self.cupy.cuda.Device(self.number).use()
        self.runtime.free(0)  # makes the context
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.ffi, self.driver = load_driver()
        self._stream = self.ffi.cast("void *", self.stream.ptr)
        self.lock = threading.RLock()

    @property
    def name(self) -> str:
        """The device's name and its kind."""
        return f"{self.runtime.getDeviceProperties(self.number)['name'].decode()} {self.target.isa}"

    def build(self, source: str, parts: Sequence[str] = ()) -> Entry:
        """The cubins of a source, built or from the cache."""
        return cuda_build.build(source, self.target, parts)

    def load(self, source: str, parts: Sequence[str] = ()) -> tuple[Module, Entry]:
        """The functions of a source, which may also be given in parts."""
        entry = self.build(source, parts)
        return Module(cuda_build.unpack(entry.binary.read_bytes()), self.target.shared), entry

    def allocate(self, nbytes: int) -> Memory:
        with self.stream:  # CuPy keeps freed memory for the stream it came from: nobody else writes into ours too early
            return Memory(self._room(lambda: self.cupy.cuda.alloc(max(nbytes, 16)), nbytes), nbytes)

    def _room(self, allocate: Any, nbytes: int) -> Any:
        try:
            return allocate()
        except self.cupy.cuda.memory.OutOfMemoryError:
            free, total = self.runtime.memGetInfo()
            raise PlanError(
                f"no {nbytes / 1e9:.2f} GB are left on GPU {self.number}",
                why=f"{free / 1e9:.2f} of its {total / 1e9:.2f} GB are free",
                fix="use a smaller dtype, batch or context (options prefill_chunk), free other arrays "
                "(cupy.get_default_memory_pool().free_all_blocks()), or end other programs on this GPU",
            ) from None

    def free(self) -> int:
        """Bytes that are free: the system's, and those that the pool keeps for later."""
        return int(self.runtime.memGetInfo()[0]) + int(self.cupy.get_default_memory_pool().free_bytes())

    def pinned(self, nbytes: int) -> Array:
        """Host memory that copies without a detour."""
        memory = self.cupy.cuda.alloc_pinned_memory(max(nbytes, 16))
        return np.frombuffer(memory, np.uint8, max(nbytes, 16))

    # Whatever goes onto the stream takes the lock: another thread may be capturing.

    def upload(self, target: int, source: Array) -> None:
        with self.lock:
            self.runtime.memcpyAsync(target, address(source), source.nbytes, 1, self.stream.ptr)

    def download(self, target: Array, source: int) -> None:
        with self.lock:
            self.runtime.memcpyAsync(address(target), source, target.nbytes, 2, self.stream.ptr)

    def copy_rows(self, target: int, target_pitch: int, source: int, pitch: int, width: int, count: int) -> None:
        """`width` bytes of each of `count` rows that are `pitch` bytes apart."""
        with self.lock:
            self.runtime.memcpy2DAsync(target, target_pitch, source, pitch, width, count, 3, self.stream.ptr)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        with self.lock:
            self.runtime.memcpyAsync(target, source, nbytes, 3, self.stream.ptr)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A CuPy array for the caller, who may have used its memory just now: see follow."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return self._room(lambda: self.cupy.empty(shape, dtype), nbytes)

    def follow(self, stream: int | None = None) -> None:
        """Work comes after all that the caller has enqueued on its current stream, or on one by its handle."""
        with self.lock:  # a wait is for what the event has recorded so far: one event serves all
            handle = self.cupy.cuda.get_current_stream().ptr if stream is None else stream
            self.runtime.eventRecord(self._order.ptr, handle)
            self.runtime.streamWaitEvent(self.stream.ptr, self._order.ptr)

    def lead(self) -> None:
        """What the caller enqueues from now on, on its current streams of CuPy and torch, comes after our work."""
        handles = {self.cupy.cuda.get_current_stream().ptr}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            handles.add(torch.cuda.current_stream(self.number).cuda_stream)
        with self.lock:
            self.runtime.eventRecord(self._order.ptr, self.stream.ptr)
            for handle in handles:
                self.runtime.streamWaitEvent(handle, self._order.ptr)

    @cached_property
    def _order(self) -> Any:
        return self.cupy.cuda.Event(disable_timing=True)

    def is_lasting(self, a: Any) -> bool:
        """Whether an array's memory is CuPy's own, or torch's: what is freed is used again in the order of a stream.

        Other libraries may do with theirs what they like as soon as the call returns.
        """
        memory = self.cupy.cuda.memory
        kinds = (memory.PooledMemory, memory.Memory, memory.MemoryAsync, self._torch_memory)
        return isinstance(a, self.cupy.ndarray) and isinstance(a.data.mem, kinds)

    @cached_property
    def _torch_memory(self) -> Any:
        return type("TorchMemory", (self.cupy.cuda.UnownedMemory,), {})

    def adopt(self, a: Any) -> Any:
        """A CuPy array in the memory of a GPU array of any library; what its owner has enqueued for it comes first."""
        if isinstance(a, self.cupy.ndarray):
            self.follow()
            array = a
        elif (array := self._of_torch(a)) is None:
            with self.lock, self.stream:  # the stream that DLPack's producer makes wait for its own
                array = self._shared(a)
        if array.device.id != self.number:
            raise ArgumentError(
                f"an array is on GPU {array.device.id}, the plan on GPU {self.number}",
                fix=f"copy it to GPU {self.number} before the call",
            )
        return array

    def _shared(self, a: Any) -> Any:
        if not hasattr(a, "__dlpack__"):
            return self.cupy.asarray(a)
        try:
            return self.cupy.from_dlpack(a)
        except (BufferError, NotImplementedError, RuntimeError, TypeError) as error:
            if str(getattr(a, "dtype", "")) == "torch.bfloat16" and not getattr(a, "requires_grad", False):
                return self.cupy.from_dlpack(a.view(sys.modules["torch"].int16)).view(bf16.numpy)  # as in _of_torch
            raise ArgumentError(
                f"a {type(a).__name__} can't be used in place", why=str(error), fix="detach() it, or pass a CuPy array"
            ) from None

    def _of_torch(self, a: Any) -> Any:
        """A torch tensor that is nothing but an address, sizes and a type: many times as quick as DLPack; or None."""
        torch = sys.modules.get("torch")
        if torch is None or type(a) is not torch.Tensor or not a.is_cuda or a.requires_grad or not a.is_contiguous():
            return None
        half = a.dtype is torch.bfloat16  # which an older CuPy does not know, but the bits
        dtype, at = np.dtype(np.int16) if half else torch_types(torch).get(a.dtype), a.data_ptr()
        if dtype is None or not at:
            return None
        number = a.device.index
        if number == self.number:  # an event is of one GPU; `adopt` refuses arrays of others
            self.follow(torch.cuda.current_stream(number).cuda_stream)
        memory = self._torch_memory(at, a.nbytes, a, number)
        array = self.cupy.ndarray(tuple(a.shape), dtype, self.cupy.cuda.MemoryPointer(memory, 0))
        return array.view(bf16.numpy) if half else array

    def as_device_array(self, a: Any, written: bool = False) -> Any:
        """The array if it is dense and aligned, else a copy that is."""
        if isinstance(a, self.cupy.ndarray) and a.flags.c_contiguous and a.data.ptr % 16 == 0:
            return a
        array = self.adopt(a)
        with self.lock, self.stream:
            dense = self.cupy.ascontiguousarray(array)
            if dense.data.ptr % 16:
                dense = dense.copy()
        if written and dense.data.ptr != array.data.ptr:
            raise ArgumentError("an argument that forward changes must be a dense device array, aligned to 16 bytes")
        return dense

    def prepare(self, launch: LaunchSpec) -> Any:
        """A launch as the driver wants it; the tuple keeps alive what it points to."""
        ffi = self.ffi
        words = ffi.new("int64_t[]", [0 if isinstance(w, MatrixSpec) else w for w in launch.words])
        places: list[Any] = [words + i for i in range(len(launch.words))]
        held = [words]
        for i, w in enumerate(launch.words):
            if isinstance(w, MatrixSpec):
                places[i], memory = self._map(w)
                held.append(memory)
        params = ffi.new("void *[]", places)
        attributes = ffi.new("CUlaunchAttribute[2]")
        count = 0
        if launch.overlap:
            attributes[count].id, attributes[count].value.flag = OVERLAP, 1
            count += 1
        if launch.cluster > 1:
            attributes[count].id = CLUSTER
            dim = attributes[count].value.dim
            dim.x, dim.y, dim.z = launch.cluster, 1, 1
            count += 1
        config = ffi.new(
            "CUlaunchConfig *", (*launch.grid, launch.block, 1, 1, launch.shared, self._stream, attributes, count)
        )
        return config, launch.function, params, held, attributes

    def _map(self, m: MatrixSpec) -> tuple[Any, Any]:
        """The driver's map of a matrix, at a multiple of 64, and the memory that it lies in."""
        ffi = self.ffi
        memory = ffi.new("char[]", 128 + 64)
        place = memory + -int(ffi.cast("uintptr_t", memory)) % 64
        sizes, pitch = ffi.new("uint64_t[]", [m.depth, m.rows]), ffi.new("uint64_t[]", [m.depth * 2])
        box, steps = ffi.new("unsigned[]", [64, m.box]), ffi.new("unsigned[]", [1, 1])
        at = ffi.cast("void *", m.address)
        code = self.driver.cuTensorMapEncodeTiled(
            place, _BF16, 2, at, sizes, pitch, box, steps, 0, _SWIZZLE_128, _PROMOTE_256, 0
        )
        check(code, f"map of a matrix {m.rows} x {m.depth}")
        return place, memory

    def run(self, prepared: Any) -> None:
        with self.lock:
            code = self.driver.cuLaunchKernelEx(prepared[0], prepared[1], prepared[2], self.ffi.NULL)
        if code:
            check(code, "kernel launch")

    @cached_property
    def products(self) -> Products:
        """The vendor's matrix products."""
        return Products(self)

    def product(self, spec: ProductSpec) -> None:
        with self.lock:
            self.products.run(spec)

    def synchronize(self) -> None:
        """Waits for what is on the stream now; by an event, since a stream that is captured must not be asked."""
        event = self.cupy.cuda.Event(disable_timing=True)
        self.record(event)
        event.synchronize()

    def clear(self, target: int, nbytes: int) -> None:
        with self.lock:
            self.runtime.memsetAsync(target, 0, nbytes, self.stream.ptr)

    def event(self, sleep: bool = True) -> Any:
        """An event. A host that sleeps for it leaves the core to others, and wakes a little later."""
        return self.cupy.cuda.Event(block=sleep, disable_timing=True)

    def record(self, event: Any) -> None:
        with self.lock:
            event.record(self.stream)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def capture(self, actions: Any) -> Any:
        """A graph of the actions, ready to be launched again and again."""
        with self.lock:
            self.stream.begin_capture()
            try:
                actions()
            finally:
                graph = self.stream.end_capture()
            graph.upload(self.stream)
        return graph

    def launch_graph(self, graph: Any) -> None:
        with self.lock:
            graph.launch(self.stream)

    def measure(self, graph: Any, count: int, warm: int = 3) -> float:
        """The median milliseconds of a graph's replays, enqueued ahead with an event between any two."""
        events = [self.cupy.cuda.Event() for _ in range(count + 1)]
        with self.lock:
            for _ in range(warm):
                graph.launch(self.stream)
            events[0].record(self.stream)
            for e in events[1:]:
                graph.launch(self.stream)
                e.record(self.stream)
        self.synchronize()
        return statistics.median(
            self.cupy.cuda.get_elapsed_time(a, b) for a, b in zip(events, events[1:], strict=False)
        )


@cache
def gpu() -> GpuDevice:
    """The current device; one for the whole process."""
    return GpuDevice()
