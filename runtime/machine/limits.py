"""What this machine can do, measured once and remembered: the roofs under which every kernel lives."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.ir.errors import CompileError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import address, aligned
from monoplan.runtime.build import facts, toolchain
from monoplan.runtime.cpu.executable import flags_for, host_target
from monoplan.runtime.machine import features
from monoplan.runtime.machine.threads import default_threads

CDEF = """
void mp_limit_fill(float *, int64_t, int);
double mp_limit_read(float *, int64_t, int, int, int);
double mp_limit_multiply(int64_t, int);
double mp_limit_tiles(int64_t, int, int);
"""
ABI = 5
WEEK = 7 * 86400.0
ASSUMED_CACHE = 32 << 20  # where the system does not tell
LARGEST = 1 << 30  # bytes of the working set that is read past the cache
ROUNDS = 8  # the best counts: others use the machine as well
_SUMS = 12  # as in limits.c


@dataclass(frozen=True)
class Limits:
    """Rates of this machine, in bytes and operations per second; None where it has no such unit."""

    threads: int
    memory: float  # reading past the last-level cache, all threads
    memory_one: float  # and one thread
    cache: float  # reading inside the last-level cache
    cache_one: float
    flops: float  # f32 fused multiply-adds
    flops_one: float
    tile_bf16: float | None
    tile_int8: float | None
    cache_bytes: int  # size of the last-level cache

    def __str__(self) -> str:
        rows = [
            ("read past the cache", self.memory_one, self.memory, "GB/s"),
            (f"read inside it ({self.cache_bytes >> 20} MiB)", self.cache_one, self.cache, "GB/s"),
            ("f32 multiply-adds", self.flops_one, self.flops, "GFLOP/s"),
            ("bf16 tiles", None, self.tile_bf16, "GFLOP/s"),
            ("int8 tiles", None, self.tile_int8, "GOP/s"),
        ]
        lines = [
            f"{'':<28}{'1 thread':>12}{self.threads:>9} threads" if self.threads > 1 else f"{'':<28}{'1 thread':>12}"
        ]
        for name, one, all_, unit in rows:
            if all_ is None:
                continue
            first = f"{one / 1e9:12.1f}" if one is not None else " " * 12
            second = f"{all_ / 1e9:17.1f}" if self.threads > 1 or one is None else ""
            lines.append(f"{name:<28}{first}{second}  {unit}")
        return "\n".join(lines)


def memory_bandwidth(target: str = "cpu") -> float | None:
    """Bytes per second of reading from memory; None where it can't be measured."""
    if target == "cuda":
        return _cuda_bandwidth()
    return measure().memory if target == "cpu" else None


def measure_target(target: str, threads: int) -> Limits:
    """The limits of the machine that a plan runs on."""
    return _cuda_limits() if target == "cuda" else measure(threads)


def measure(threads: int | None = None, *, fresh: bool = False) -> Limits:
    """The limits for a number of threads; measured at most once a week."""
    count = threads or default_threads().count
    key = f"{features.detect().key} {count} threads, {os.cpu_count()} cpus, abi {ABI}"
    known = _known(key)
    if known is not None and not fresh:
        return known
    found = _measure(count)
    if known is not None:  # the best that was ever seen: a busy moment can't lower what the machine can do
        found = Limits(**{k: max(v, getattr(known, k)) if v else v for k, v in dataclasses.asdict(found).items()})
    facts.remember("limits", key, dataclasses.asdict(found), WEEK)
    return found


def _known(key: str) -> Limits | None:
    fact = facts.recall("limits", key)
    try:
        return None if fact is None else Limits(**fact)  # type: ignore[arg-type]
    except TypeError:
        return None  # of another version


class Probes:
    """The same loops one round at a time, for benchmarks that measure a limit beside each of their own rounds."""

    def __init__(self, threads: int, nbytes: int | None = None) -> None:
        self.threads, self.lanes = threads, max(host_target().lanes, 1)
        self.vectors = (nbytes or past_cache()) // (4 * self.lanes)
        self._memory = aligned((self.vectors * self.lanes,), np.float32)
        self._pointer = _ffi().cast("float *", address(self._memory))
        _library().mp_limit_fill(self._pointer, self.vectors, threads)

    def read(self, streams: int = 4, threads: int | None = None) -> float:
        """Bytes per second of a plain read loop over the memory."""
        inner = max(1, (64 << 20) // self._memory.nbytes)
        seconds = _library().mp_limit_read(self._pointer, self.vectors, streams, inner, threads or self.threads)
        return float(self._memory.nbytes * inner / seconds)

    def multiply(self, threads: int | None = None) -> float:
        """f32 operations per second of independent fused multiply-adds."""
        iterations, count = 1_000_000, threads or self.threads
        return float(2 * _SUMS * self.lanes * iterations * count / _library().mp_limit_multiply(iterations, count))

    def tiles(self, int8: bool = False) -> float | None:
        """Operations per second of the tile unit; None where there is none."""
        iterations = 200_000
        seconds = _library().mp_limit_tiles(iterations, self.threads, int(int8))
        each = 4 * 16 * 16 * (64 if int8 else 32) * 2
        return None if seconds < 0 else float(each * iterations * self.threads / seconds)


def past_cache() -> int:
    """Bytes that do not fit the last-level cache by far."""
    return min(max(4 * last_level_cache(), 128 << 20), LARGEST)


def _measure(threads: int) -> Limits:
    far, near = Probes(threads), Probes(threads, max(last_level_cache() // 4, 1 << 20))

    def best(run: Callable[[], float]) -> float:
        return max(run() for _ in range(ROUNDS))

    def read(probes: Probes, count: int) -> float:
        return best(lambda: max(probes.read(1, count), probes.read(4, count)))

    def tiles(int8: bool) -> float | None:
        return None if far.tiles(int8) is None else best(lambda: far.tiles(int8) or 0.0)

    one = read(far, 1), read(near, 1), best(lambda: far.multiply(1))
    # On a busy machine several threads may measure less than one, which they can't be.
    all_threads = read(far, threads), read(near, threads), best(far.multiply)
    memory, cache, flops = (max(a, b) for a, b in zip(all_threads, one, strict=True))
    tile_rates = tiles(False), tiles(True)
    cache = max(cache, memory)
    return Limits(threads, memory, one[0], cache, one[1], flops, one[2], *tile_rates, last_level_cache())


@functools.cache
def _ffi() -> Any:
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    return ffi


@functools.cache
def _library() -> Any:
    source = (Path(__file__).resolve().parent / "limits.c").read_text("utf-8")
    key, build = toolchain.plan_build(source, flags_for(host_target()), target=features.detect().key, abi=ABI)
    library, _ = toolchain.load(key, build, _ffi().dlopen)
    return library


def last_level_cache(root: Path = Path("/")) -> int:
    """Bytes of the largest cache of the first CPU."""
    sizes = []
    for path in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        try:
            text = path.read_text("utf-8").strip()
        except OSError:
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * unit)
    return max(sizes, default=ASSUMED_CACHE)


_CUDA_MULTIPLY = """
extern "C" __global__ void multiply(float *out, int iterations, float x, float y) {
    float s[8];
    for (int j = 0; j < 8; ++j) s[j] = y + j;
    for (int i = 0; i < iterations; ++i)
        #pragma unroll
        for (int j = 0; j < 8; ++j) s[j] = s[j] * x + y;
    float all = 0;
    for (int j = 0; j < 8; ++j) all += s[j];
    if (all == 12345.0f) out[0] = all;
}
"""


def _cuda_bandwidth() -> float | None:
    """Reading of device memory; None without CuPy or a GPU."""
    try:
        return _cuda_limits().memory
    except CompileError:
        return None


@functools.cache
def _cuda_limits() -> Limits:
    """Memory and f32 rates of the GPU; products of bf16 matrices by the vendor's library stand for its tile units."""
    from monoplan.runtime.cuda.device import gpu, import_cupy

    cupy, device = import_cupy(), gpu()
    far, near = cupy.zeros(1 << 28, cupy.float32), cupy.zeros(1 << 21, cupy.float32)
    out, iterations, threads = cupy.zeros(1, cupy.float32), 4096, 1 << 20
    kernel = cupy.RawKernel(_CUDA_MULTIPLY, "multiply")

    def best(run: Any, count: int = 10) -> float:
        seconds = 1e30
        for _ in range(count):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds = min(seconds, cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
        return seconds

    def multiply() -> None:
        kernel((threads // 256,), (256,), (out, np.int32(iterations), np.float32(1.0), np.float32(0.5)))

    memory = far.nbytes / best(lambda: far.sum())
    cache = max(memory, near.nbytes / best(lambda: near.sum(), 30))
    flops = 2.0 * 8 * iterations * threads / best(multiply)
    half = cupy.zeros((4096, 4096), cupy.float16)
    tiles = 2.0 * 4096**3 / best(lambda: half @ half)
    size = int(device.runtime.getDeviceProperties(device.number)["l2CacheSize"])
    return Limits(1, memory, memory, cache, cache, flops, flops, tiles, None, size)
