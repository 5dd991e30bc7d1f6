"""monoplan: a Module becomes one compiled plan, and every step is readable."""

from __future__ import annotations

import importlib
import time
from typing import Any

# Names of the public face and where they live; each is imported when it is first used, so that `import monoplan`
# stays cheap and needs neither a compiler, CuPy nor a tokenizer.
_HOMES = {
    "compile": "monoplan.api",
    "Compiled": "monoplan.api",
    "Options": "monoplan.options",
    "spec": "monoplan.frontend.specs",
    "Spec": "monoplan.frontend.specs",
    "trace": "monoplan.frontend.tracer",
    "Tensor": "monoplan.frontend.tensor",
    "Module": "monoplan.frontend.module",
    "Parameter": "monoplan.frontend.parameter",
    "KVCache": "monoplan.frontend.kv_cache",
    "MonoplanError": "monoplan.ir.errors",
    "ArgumentError": "monoplan.ir.errors",
    "CompileError": "monoplan.ir.errors",
    "LoadError": "monoplan.ir.errors",
    "ParseError": "monoplan.ir.errors",
    "PlanError": "monoplan.ir.errors",
    "TraceError": "monoplan.ir.errors",
    "TypeRuleError": "monoplan.ir.errors",
    "VerifyError": "monoplan.ir.errors",
}
_MODULES = ("nn", "models", "ir", "frontend", "passes", "codegen", "runtime")
__version__ = "0.1.0"
_imported = time.time()  # files that change after this are not the code that runs
__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"monoplan.{name}")
    raise AttributeError(f"module 'monoplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
