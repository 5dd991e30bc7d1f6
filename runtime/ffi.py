"""cffi declarations, parsed once per machine: the C parser is slow to import, and what it finds does not change."""

from __future__ import annotations

import functools
import io
from typing import Any

from monoplan.runtime import facts


@functools.cache
def declared(cdef: str) -> Any:
    """An FFI object for these declarations."""
    import _cffi_backend  # type: ignore[import-untyped]

    key = f"cffi {_cffi_backend.__version__}\n{cdef}"
    fact = facts.recall("cffi", key)
    if fact is None:
        fact = {"code": _parsed(cdef)}
        facts.remember("cffi", key, fact)
    names: dict[str, Any] = {}
    exec(compile(str(fact["code"]), "<cffi declarations>", "exec"), names)
    return names["ffi"]


def _parsed(cdef: str) -> str:
    """Declarations as the Python code that cffi makes of them: it needs no parser any more."""
    import cffi
    from cffi import recompiler

    ffi = cffi.FFI()
    ffi.cdef(cdef)
    # Not ffi.emit_python_code, which prints and needs a file: a full disk must not matter here.
    made = recompiler.Recompiler(ffi, "monoplan_declarations", target_is_python=True)
    made.collect_type_table()
    made.collect_step_tables()
    text = io.StringIO()
    made.write_source_to_f(text, None)
    return text.getvalue()
