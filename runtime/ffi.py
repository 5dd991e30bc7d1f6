"""cffi declarations, parsed once per machine: the C parser is slow to import, and what it finds does not change."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from monoplan.runtime import toolchain


@functools.cache
def declared(cdef: str) -> Any:
    """An FFI object for these declarations."""
    import _cffi_backend  # type: ignore[import-untyped]

    key = f"cffi {_cffi_backend.__version__}\n{cdef}"
    fact = toolchain.recall("cffi", key)
    if fact is None:
        fact = {"code": _parsed(cdef)}
        toolchain.remember("cffi", key, fact)
    names: dict[str, Any] = {}
    exec(compile(str(fact["code"]), "<cffi declarations>", "exec"), names)
    return names["ffi"]


def _parsed(cdef: str) -> str:
    """Declarations as the Python code that cffi makes of them: it needs no parser any more."""
    import cffi
    from cffi import recompiler

    ffi = cffi.FFI()
    ffi.cdef(cdef)
    with tempfile.TemporaryDirectory(prefix="monoplan-") as folder:
        path = Path(folder) / "declarations.py"
        # Not ffi.emit_python_code, which prints. To redirect sys.stdout meanwhile would take it from other threads too.
        recompiler.make_py_source(ffi, "monoplan_declarations", str(path), verbose=False)
        return path.read_text()
