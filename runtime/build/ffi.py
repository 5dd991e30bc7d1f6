"""cffi declarations, parsed once per machine: the C parser is slow to import, and what it finds does not change."""

from __future__ import annotations

import ast
import functools
import io
from typing import Any

from monoplan.runtime.build import facts


@functools.cache
def declared(cdef: str) -> Any:
    """An FFI object for these declarations."""
    import _cffi_backend  # type: ignore[import-untyped]

    key = f"cffi {_cffi_backend.__version__}\n{cdef}"
    fact = facts.recall("cffi-tables", key)
    if fact is None:
        fact = {"tables": repr(_tables(_parsed(cdef)))}
        facts.remember("cffi-tables", key, fact)
    return _cffi_backend.FFI("monoplan_declarations", **ast.literal_eval(str(fact["tables"])))


def _tables(code: str) -> dict[str, Any]:
    """The tables of types and functions in the Python code that cffi makes: literals, which are read and not run."""
    (call,) = (node.value for node in ast.parse(code).body if isinstance(node, ast.Assign))
    assert isinstance(call, ast.Call)
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


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
