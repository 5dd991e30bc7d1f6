"""CUDA source to cubin: NVRTC through CuPy's thin wrapper, with our own options, into the common build cache."""

from __future__ import annotations

from pathlib import Path

from monoplan.codegen.target import Target
from monoplan.ir.errors import CompileError
from monoplan.runtime import cache

ABI = 1
MESSAGE_LINES = 30


def options(target: Target, version: tuple[int, int]) -> tuple[str, ...]:
    """Flags of a build. The `a` variant of an architecture allows its special instructions."""
    special = "a" if target.capability >= 90 else ""
    parallel = ("--split-compile=0",) if version >= (13, 0) else ()  # kernels are optimized side by side
    return ("--std=c++17", f"--gpu-architecture={target.isa}{special}", "-lineinfo", "-diag-suppress=177,550", *parallel)


def build(source: str, target: Target) -> cache.Entry:
    """The cubin of a source, from the cache or built now."""
    try:
        from cupy_backends.cuda.libs import nvrtc  # type: ignore[import-not-found]
    except ImportError as error:
        raise CompileError("NVRTC can't be loaded", why=str(error), fix="pip install monoplan[cuda]") from None
    flags = options(target, tuple(nvrtc.getVersion()))
    version = "NVRTC " + ".".join(map(str, nvrtc.getVersion()))
    key = cache.BuildKey(source, (), version, flags, target.isa, ABI, "cuda")

    def make(folder: Path) -> None:
        program = nvrtc.createProgram(source, "plan.cu", (), ())
        try:
            nvrtc.compileProgram(program, flags)
            (folder / "plan.cubin").write_bytes(nvrtc.getCUBIN(program))
            log = nvrtc.getProgramLog(program)
        except nvrtc.NVRTCError:
            raise _failure(nvrtc.getProgramLog(program), folder) from None
        finally:
            nvrtc.destroyProgram(program)
        (folder / "build.log").write_text(f"{version} {' '.join(flags)}\n{log}", "utf-8")
        arch = f"{target.isa}{'a' if target.capability >= 90 else ''}"
        (folder / "build.sh").write_text(
            f'#!/bin/sh\ncd "$(dirname "$0")" && nvcc -std=c++17 -arch={arch} -cubin -o plan.cubin plan.cu\n'
        )

    return cache.get_or_build(key, make)


def _failure(log: str, folder: Path) -> CompileError:
    lines = log.strip().splitlines() or ["(it printed nothing)"]
    shown = "".join(f"\n    {line}" for line in lines[:MESSAGE_LINES])
    kept = cache.cache_root() / "failed" / folder.name.strip(".")
    try:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "plan.cu").write_bytes((folder / "plan.cu").read_bytes())
    except OSError:
        kept = folder
    return CompileError(f"NVRTC refused the generated source:{shown}", where=kept / "plan.cu",
                        fix="read the source at the path above")
