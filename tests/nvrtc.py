"""NVIDIA's run-time compiler by itself: it needs no GPU, and refuses what nvcc takes from the host's compiler.

`pip install 'nvidia-cuda-nvrtc<13.1'` gives the library: the oldest of CUDA 13, since later ones take more.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cffi import FFI

_DECLARED = """
typedef struct program *nvrtcProgram;
int nvrtcCreateProgram(nvrtcProgram *, const char *, const char *, int, const char *const *, const char *const *);
int nvrtcCompileProgram(nvrtcProgram, int, const char *const *);
int nvrtcGetProgramLogSize(nvrtcProgram, size_t *);
int nvrtcGetProgramLog(nvrtcProgram, char *);
int nvrtcDestroyProgram(nvrtcProgram *);
"""


@functools.cache
def library() -> Path | None:
    """Where the wheel has put it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")]
    return next((path for path in sorted(found) if "builtins" not in path.name and ".alt." not in path.name), None)


@functools.cache
def _loaded() -> tuple[FFI, Any]:
    ffi = FFI()
    ffi.cdef(_DECLARED)
    path = library()
    assert path is not None
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # the library opens it by name, wherever it looks
        _held.append(ffi.dlopen(str(builtins)))
    return ffi, ffi.dlopen(str(path))


_held: list[Any] = []


def refusal(source: str, flags: Sequence[str]) -> str:
    """Why it does not take a source; nothing if it does."""
    ffi, lib = _loaded()
    program = ffi.new("nvrtcProgram *")
    name, text = ffi.new("char[]", b"plan.cu"), ffi.new("char[]", source.encode())
    assert lib.nvrtcCreateProgram(program, text, name, 0, ffi.NULL, ffi.NULL) == 0
    held = [ffi.new("char[]", flag.encode()) for flag in flags]
    failed = lib.nvrtcCompileProgram(program[0], len(held), ffi.new("char *[]", held))
    size = ffi.new("size_t *")
    assert lib.nvrtcGetProgramLogSize(program[0], size) == 0
    log = ffi.new("char[]", size[0])
    assert lib.nvrtcGetProgramLog(program[0], log) == 0
    lib.nvrtcDestroyProgram(program)
    return (bytes(ffi.string(log)).decode() or f"error {failed}") if failed else ""
