"""A Device that runs generated kernels on the CPU (see cuda_emulator.h): the whole CUDA path without a GPU."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cffi import FFI

from monoplan.codegen.target import Target, cuda_target
from monoplan.ir.types import address, aligned
from monoplan.runtime.cuda.device import LaunchSpec, MatrixSpec, ProductSpec

Array = np.ndarray[Any, Any]
HEADER = Path(__file__).with_name("cuda_emulator.h")
HEADERS = sorted(HEADER.parent.glob("cuda_emulator*.h"))  # the first one includes the others
LEVEL = "-O0"  # g++ takes longer than the kernels of most tests run; conftest.py has another for the full run
KERNEL = re.compile(r"__global__ void __launch_bounds__\(.*?\)\s*(\w+)\(")
_memory = FFI()


def _bytes(address: int, nbytes: int) -> Array:
    """Memory at an address."""
    return np.frombuffer(_memory.buffer(_memory.cast("char *", address), nbytes), np.uint8)


def _typed(address: int, count: int, dtype: Any) -> Array:
    return _bytes(address, count * np.dtype(dtype).itemsize).view(dtype)


def available() -> bool:
    """Whether a C++ compiler is there."""
    return shutil.which("g++") is not None


class _Memory:
    def __init__(self, nbytes: int) -> None:
        self.array = aligned((max(-(-nbytes // 16) * 16, 16),), np.uint8, 256)  # what is read is whole pieces
        self.array[:] = 0xFF  # NaN, -1: what nobody wrote shows
        self.address, self.nbytes = address(self.array), nbytes


class EmulatedArray:
    """What CuPy's array is to a GPU: an array in the device's memory."""

    def __init__(self, array: Array) -> None:
        self.host = array
        self.data = SimpleNamespace(ptr=address(array))

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.host.__array_interface__)

    def get(self) -> Array:
        return self.host.copy()

    def set(self, array: Array) -> None:
        self.host[...] = array

    def __setitem__(self, at: Any, value: EmulatedArray) -> None:
        self.host[at] = value.host


class _Library:
    """A compiled source: kernels by name, and the function that runs them."""

    def __init__(self, path: Path, source: str) -> None:
        self.ffi = FFI()
        self.ffi.cdef("int emu_launch(void *, const unsigned *, unsigned, unsigned, unsigned, const int64_t *, int);")
        for name in KERNEL.findall(source):
            self.ffi.cdef(f"void {name}(void);")
        self.lib = self.ffi.dlopen(str(path))

    def __getitem__(self, name: str) -> Any:
        return self, self.ffi.cast("void *", self.ffi.addressof(self.lib, name))

    def launch(self, kernel: Any, spec: LaunchSpec) -> None:
        """Runs all blocks of a launch."""
        grid = self.ffi.new("unsigned[3]", list(spec.grid))
        maps = [self.ffi.new("int64_t[]", list(w)) if isinstance(w, MatrixSpec) else None for w in spec.words]
        places = [w if m is None else int(self.ffi.cast("uintptr_t", m)) for w, m in zip(spec.words, maps, strict=True)]
        words = self.ffi.new("int64_t[]", places)
        self.lib.emu_launch(kernel, grid, spec.block, spec.shared, spec.cluster, words, len(spec.words))


class EmulatedDevice:
    """Device memory is host memory; every action is done at once."""

    name = "emulator"

    def __init__(
        self, capability: int = 90, cores: int = 4, shared: int = 232448, library: bool = False, level: str = ""
    ) -> None:
        self.target: Target = cuda_target(capability, cores, shared, library)
        self.flags = ("-std=c++17", level or LEVEL, "-fPIC", "-w", "-ffp-contract=off", "-pthread")
        self.folder = Path(tempfile.gettempdir()) / f"monoplan-emulator-{os.getuid()}"
        self.launches: list[str] = []
        self.lock = threading.RLock()
        self.followed = self.led = 0

    def load(self, source: str, parts: Any = ()) -> tuple[_Library, None]:
        """Compiles a source with g++; kept by its text."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        headers = self._compiled(f'#include "{HEADER}"\n', ".h.gch", "-x", "c++-header")  # once: a third of the time
        path = self._compiled(f'#include "{headers.with_suffix("")}"\n{source}', ".so", "-x", "c++", "-shared")
        return _Library(path, source), None

    def _compiled(self, text: str, suffix: str, *more: str) -> Path:
        """What g++ makes of a text; the text lies beside it."""
        known = "\0".join((*self.flags, *(h.read_text() for h in HEADERS), text))
        path = self.folder / f"{hashlib.sha256(known.encode()).hexdigest()[:24]}{suffix}"
        if not path.exists():
            own = self.folder / f"{os.getpid()}.{threading.get_ident()}"  # ranks are threads, at the same text
            own.write_text(text)
            os.replace(own, path.with_suffix(""))
            command = ["g++", *self.flags, *more, str(path.with_suffix("")), "-o", str(own)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            os.replace(own, path)
        return path

    def free(self) -> int:
        return 1 << 28

    def allocate(self, nbytes: int) -> _Memory:
        return _Memory(nbytes)

    def pinned(self, nbytes: int) -> Array:
        return np.zeros(max(nbytes, 16), np.uint8)

    def upload(self, target: int, source: Array) -> None:
        _bytes(target, source.nbytes)[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)

    def download(self, target: Array, source: int) -> None:
        target.reshape(-1).view(np.uint8)[:] = _bytes(source, target.nbytes)

    def copy_rows(self, target: int, target_pitch: int, source: int, pitch: int, width: int, count: int) -> None:
        for i in range(count):
            self.copy(target + i * target_pitch, source + i * pitch, width)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        _bytes(target, nbytes)[:] = _bytes(source, nbytes).copy()

    def prepare(self, launch: LaunchSpec) -> LaunchSpec:
        return launch

    def run(self, launch: LaunchSpec) -> None:
        library, kernel = launch.function
        library.launch(kernel, launch)

    def product(self, p: ProductSpec) -> None:
        x = _typed(p.x, p.rows * p.depth, p.dtype.numpy).reshape(p.rows, p.depth).astype(np.float32)
        w = _typed(p.w, p.columns * p.depth, p.dtype.numpy).reshape(p.columns, p.depth).astype(np.float32)
        out = _typed(p.out, p.rows * p.columns, p.out_dtype.numpy).reshape(p.rows, p.columns)
        base = _typed(p.add, out.size, out.dtype).reshape(out.shape).astype(np.float32) if p.add else 0
        bias = _typed(p.bias, p.columns, out.dtype).astype(np.float32) if p.bias else 0
        out[:] = (x @ w.T + base + bias).astype(out.dtype)

    def synchronize(self) -> None:
        pass

    def clear(self, target: int, nbytes: int) -> None:
        _bytes(target, nbytes)[:] = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> EmulatedArray:
        return EmulatedArray(aligned(shape, dtype, 256))

    def adopt(self, a: Any) -> EmulatedArray:
        assert isinstance(a, EmulatedArray)
        return a

    def as_device_array(self, a: EmulatedArray, written: bool = False) -> EmulatedArray:
        dense = a if a.host.flags.c_contiguous else EmulatedArray(a.host.copy())
        assert dense is a or not written
        return dense

    def follow(self) -> None:
        self.followed += 1

    def lead(self) -> None:
        self.led += 1

    def is_lasting(self, a: Any) -> bool:
        return isinstance(a, EmulatedArray)

    def event(self, sleep: bool = True) -> object:
        return object()

    def record(self, event: object) -> None:
        pass

    def wait(self, event: object) -> None:
        pass

    def capture(self, actions: Any) -> Any:
        return actions

    def launch_graph(self, graph: Any) -> None:
        graph()

    def measure(self, graph: Any, count: int, warm: int = 3) -> float:
        graph()
        return 0.0


class _LateMemory(_Memory):
    """Memory that is spoiled when it is given back, so that work which still uses it shows."""

    def __init__(self, nbytes: int, graveyard: list[Array]) -> None:
        super().__init__(nbytes)
        weakref.finalize(self, _LateMemory._bury, self.array, graveyard)

    @staticmethod
    def _bury(array: Array, graveyard: list[Array]) -> None:
        array[:] = 0xFF
        graveyard.append(array)


class LateDevice(EmulatedDevice):
    """Work is done as late as it may be: when the host waits for it. Copies from and to pinned memory are such work."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.queue: list[Any] = []
        self.done = 0  # how much was ever done
        self.recording: list[Any] | None = None
        self.graveyard: list[Array] = []
        self.blocks: list[tuple[int, int]] = []  # pinned memory
        self.replays = 0

    def _put(self, act: Any) -> None:
        (self.queue if self.recording is None else self.recording).append(act)

    def _flush(self, until: int | None = None) -> None:
        assert self.recording is None, "a capture does not wait"
        while self.queue and (until is None or self.done < until):
            self.queue.pop(0)()
            self.done += 1
        if not self.queue:
            self.graveyard.clear()

    def allocate(self, nbytes: int) -> _Memory:
        return _LateMemory(nbytes, self.graveyard)

    def pinned(self, nbytes: int) -> Array:
        made = super().pinned(nbytes)
        self.blocks.append((address(made), address(made) + made.nbytes))
        return made

    def _is_pinned(self, a: Array) -> bool:
        return any(low <= address(a) < high for low, high in self.blocks)

    def upload(self, target: int, source: Array) -> None:
        assert self.recording is None, "a captured copy would read the host's memory at each replay"
        held = source if self._is_pinned(source) else source.copy()
        self._put(lambda: EmulatedDevice.upload(self, target, held))

    def download(self, target: Array, source: int) -> None:
        if self._is_pinned(target):
            self._put(lambda: EmulatedDevice.download(self, target, source))
        else:
            self._flush()
            super().download(target, source)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._put(lambda: EmulatedDevice.copy(self, target, source, nbytes))

    def copy_rows(self, target: int, target_pitch: int, source: int, pitch: int, width: int, count: int) -> None:
        def act() -> None:
            for i in range(count):
                EmulatedDevice.copy(self, target + i * target_pitch, source + i * pitch, width)

        self._put(act)

    def clear(self, target: int, nbytes: int) -> None:
        self._put(lambda: EmulatedDevice.clear(self, target, nbytes))

    def run(self, launch: LaunchSpec) -> None:
        self._put(lambda: EmulatedDevice.run(self, launch))

    def product(self, p: ProductSpec) -> None:
        self._put(lambda: EmulatedDevice.product(self, p))

    def synchronize(self) -> None:
        self._flush()

    def event(self, sleep: bool = True) -> dict[str, int]:
        return {}

    def record(self, event: dict[str, int]) -> None:  # type: ignore[override]
        event["until"] = self.done + len(self.queue)

    def wait(self, event: dict[str, int]) -> None:  # type: ignore[override]
        self._flush(event["until"])

    def capture(self, actions: Any) -> Any:
        self.recording = []
        try:
            actions()
        finally:
            graph, self.recording = self.recording, None
        return graph

    def launch_graph(self, graph: Any) -> None:
        self.replays += 1
        self.queue += graph

    def measure(self, graph: Any, count: int, warm: int = 3) -> float:
        self.queue += graph
        self._flush()
        return 0.0
