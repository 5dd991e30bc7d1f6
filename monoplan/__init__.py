"""monoplan: a Module becomes one compiled plan, and every step is readable."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; what runs is below
    from monoplan import codegen, frontend, ir, models, nn, passes, runtime
    from monoplan.api import Compiled, compile
    from monoplan.frontend.kv_cache import KVCache
    from monoplan.frontend.module import Module
    from monoplan.frontend.parameter import Parameter
    from monoplan.frontend.scan import scan
    from monoplan.frontend.specs import Spec, spec
    from monoplan.frontend.tensor import Tensor
    from monoplan.frontend.tracer import trace
    from monoplan.ir.errors import (
        ArgumentError,
        CompileError,
        LoadError,
        MonoplanError,
        ParseError,
        PlanError,
        TraceError,
        TypeRuleError,
        VerifyError,
    )
    from monoplan.llm import CompiledLM
    from monoplan.options import Options
    from monoplan.pytorch.program import coverage, from_torch
    from monoplan.saved import load

# Where the names of the public face live; each is imported when it is first used, so that `import monoplan` stays cheap
# and needs neither a compiler, CuPy nor a tokenizer.
_PLACES = {
    "api": ("compile", "Compiled"),
    "llm": ("CompiledLM",),
    "options": ("Options",),
    "pytorch.program": ("coverage", "from_torch"),
    "saved": ("load",),
    "frontend.specs": ("spec", "Spec"),
    "frontend.tracer": ("trace",),
    "frontend.scan": ("scan",),
    "frontend.tensor": ("Tensor",),
    "frontend.module": ("Module",),
    "frontend.parameter": ("Parameter",),
    "frontend.kv_cache": ("KVCache",),
    "ir.errors": (
        "MonoplanError", "ArgumentError", "CompileError", "LoadError", "ParseError", "PlanError", "TraceError",
        "TypeRuleError", "VerifyError",
    ),
}  # fmt: skip
_HOMES = {name: f"monoplan.{place}" for place, names in _PLACES.items() for name in names}
_MODULES = ("nn", "models", "ir", "frontend", "passes", "codegen", "runtime")
__version__ = "0.1.0"
_imported = time.time()  # files that change after this are not the code that runs
__all__ = [
    "ArgumentError", "CompileError", "Compiled", "CompiledLM", "KVCache", "LoadError", "Module", "MonoplanError",
    "Options", "Parameter", "ParseError", "PlanError", "Spec", "Tensor", "TraceError", "TypeRuleError", "VerifyError",
    "__version__", "codegen", "compile", "coverage", "from_torch", "frontend",
    "ir", "load", "models", "nn", "passes", "runtime", "scan", "spec",
    "trace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(_import(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return _import(f"monoplan.{name}")
    raise AttributeError(f"module 'monoplan' has no attribute {name!r}")


def _import(name: str) -> Any:
    from monoplan.ir.garbage import kept

    with kept():
        return importlib.import_module(name)


def __dir__() -> list[str]:
    return sorted(__all__)
