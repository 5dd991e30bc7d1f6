"""CUDA source to cubins: NVRTC through CuPy's thin wrapper, with our own options, into the common build cache.

A plan is compiled in parts, by as many threads as the machine has; the entry's `plan.cubin` holds them all, one after
another behind a small table.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monoplan.codegen.target import Target
from monoplan.ir.errors import CompileError, install_extra
from monoplan.runtime.build import cache, cache_places
from monoplan.runtime.build.background import side_by_side

ABI = 1
MESSAGE_LINES = 30
_MAGIC = b"MPCUBINS"


def options(target: Target) -> tuple[str, ...]:
    """Flags of a build. The `a` variant of an architecture allows its special instructions."""
    special = "a" if target.capability >= 90 else ""
    return ("--std=c++17", f"--gpu-architecture={target.isa}{special}", "-lineinfo", "-diag-suppress=177,550")


def load_nvrtc() -> Any:
    """CuPy's wrapper of NVRTC."""
    try:
        from cupy_backends.cuda.libs import nvrtc  # type: ignore[import-not-found]
    except ImportError as error:
        raise CompileError("NVRTC can't be loaded", why=str(error), fix=install_extra("cuda")) from None
    return nvrtc


def build(source: str, target: Target, parts: Sequence[str] = ()) -> cache.Entry:
    """The cubins of a source (or of its parts), from the cache or built now."""
    nvrtc = load_nvrtc()
    flags = options(target)
    version = "NVRTC " + ".".join(map(str, nvrtc.getVersion()))
    key = cache.BuildKey(source, (), version, flags, target.isa, ABI, "cuda")

    def make(folder: Path) -> None:
        # No daemons: NVRTC works in this process, which must not end under it.
        workers = os.cpu_count() or 4
        made = side_by_side(lambda text: _compile(nvrtc, text, flags), parts or (source,), workers, daemon=False)
        for binary, log in made:
            if not binary:
                raise _failure(log, folder)
        (folder / "plan.cubin").write_bytes(pack([binary for binary, _ in made]))
        (folder / "build.log").write_text(f"{version} {' '.join(flags)}\n" + "".join(log for _, log in made), "utf-8")
        arch = f"{target.isa}{'a' if target.capability >= 90 else ''}"
        (folder / "build.sh").write_text(
            f'#!/bin/sh\ncd "$(dirname "$0")" && nvcc -std=c++17 -arch={arch} -cubin -o whole.cubin plan.cu\n', "utf-8"
        )

    return cache.get_or_build(key, make)


def _compile(nvrtc: Any, text: str, flags: Sequence[str]) -> tuple[bytes, str]:
    """The cubin and the compiler's messages; no cubin where it refused."""
    program = nvrtc.createProgram(text, "plan.cu", (), ())
    try:
        nvrtc.compileProgram(program, flags)
        return bytes(nvrtc.getCUBIN(program)), str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        return b"", str(nvrtc.getProgramLog(program)) or str(error)
    finally:
        nvrtc.destroyProgram(program)


def pack(binaries: Sequence[bytes]) -> bytes:
    """Several cubins as one file."""
    table = struct.pack(f"<8sQ{len(binaries)}Q", _MAGIC, len(binaries), *map(len, binaries))
    return table + b"".join(binaries)


def unpack(data: bytes) -> list[bytes]:
    """The cubins of a packed file; a plain cubin is one."""
    if not data.startswith(_MAGIC):
        return [data]
    (count,) = struct.unpack_from("<Q", data, 8)
    sizes = struct.unpack_from(f"<{count}Q", data, 16)
    at = 16 + 8 * count
    found = []
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return found


def _failure(log: str, folder: Path) -> CompileError:
    lines = log.strip().splitlines() or ["(it printed nothing)"]
    shown = "".join(f"\n    {line}" for line in lines[:MESSAGE_LINES])
    kept = cache_places.cache_root() / "failed" / folder.name.strip(".")
    try:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "plan.cu").write_bytes((folder / "plan.cu").read_bytes())
    except OSError:
        kept = folder
    return CompileError(
        f"NVRTC refused the generated source:{shown}", where=kept / "plan.cu", fix="read the source at the path above"
    )
