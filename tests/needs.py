"""What some tests need beyond Python and a C compiler. A test says `@needs("browser")`.

Where that is missing, the test is skipped and says how to get it; where MONOPLAN_REQUIRE names it (`mpi,browser`), the
test fails. `.ci/run` installs these things and sets the variable: no capability goes untested without being noticed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from monoplan.models.load.default_model import SMOLLM2
from monoplan.runtime.build.cache_places import read_roots
from tests import nvrtc
from tests.browser import find_browser
from tests.integration import mpi_support


def default_model() -> Path | None:
    """The default model's file, if it was fetched: tests do not download."""
    paths = [root / "models" / SMOLLM2.name for root in read_roots()]
    return next((path for path in paths if path.is_file()), None)


def _program(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"there is no {name}"


def _cross_compiler() -> str:
    """A compiler for x86-64, with the headers of its C library: packages have them apart."""
    name = "x86_64-linux-gnu-gcc"
    if not shutil.which(name):
        return f"there is no {name}"
    command = [name, "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input="#include <math.h>\n", capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{name} has no headers: apt install libc6-dev-amd64-cross"


def _package(*names: str) -> Callable[[], str]:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return lambda: f"there is no {', '.join(missing)}" if missing else ""


def _no_wasm() -> str:
    there = all(map(shutil.which, ("clang", "wasm-ld"))) and Path("/usr/include/wasm32-wasi").is_dir()
    return "" if there else "no WebAssembly: apt install clang lld wasi-libc libclang-rt-dev-wasm32"


# Name -> the function that says why it is missing; an empty text if it is there.
PROBLEMS: dict[str, Callable[[], str]] = {
    "gcc": _program("gcc"),
    "g++": _program("g++"),
    "clang": _program("clang"),
    "nvcc": _program("nvcc"),
    "nvrtc": lambda: "" if nvrtc.library() else "there is no NVRTC: pip install 'nvidia-cuda-nvrtc<13.1'",
    "rustc": _program("rustc"),
    "wasm": _no_wasm,
    "x86_64-linux-gnu-gcc": _cross_compiler,
    "browser": lambda: "" if find_browser() else "there is no Chromium or Chrome on PATH: apt install chromium",
    "model": lambda: "" if default_model() else f"{SMOLLM2.name} is not in the cache: `monoplan generate` fetches it",
    "mpi": mpi_support.problem,
    "torch": _package("torch"),
    "transformers": _package("transformers"),
    "ray": _package("ray"),
    "clients": _package("llm", "langchain_openai"),
}


def needs(*names: str) -> pytest.MarkDecorator:
    """Marks a test that needs these things."""
    unknown = set(names) - PROBLEMS.keys()
    assert not unknown, f"tests/needs.py does not know {unknown}"
    return pytest.mark.needs(*names)


def check(name: str) -> None:
    """Skips or fails the test if a thing is missing."""
    required = os.environ.get("MONOPLAN_REQUIRE", "").split(",")
    if unknown := set(required) - {"", *PROBLEMS}:
        raise pytest.UsageError(f"MONOPLAN_REQUIRE names {sorted(unknown)}; known are {sorted(PROBLEMS)}")
    if problem := PROBLEMS[name]():
        if name in required:
            pytest.fail(f"{problem} (and MONOPLAN_REQUIRE names {name})", pytrace=False)
        pytest.skip(problem)


COMPILERS = [pytest.param(name, marks=needs(name)) for name in ("gcc", "clang")]
