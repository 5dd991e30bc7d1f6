"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from monoplan.ir.dims import evaluate
from monoplan.ir.types import TensorType
from monoplan.runtime.cpu import executable as cpu
from tests.codegen import cuda_emulator
from tests.needs import check

pytest_plugins = ["monoplan.pytest_plugin"]  # the golden fixture; an installed package brings it by itself

# Slow shared machines: no deadlines. Derandomized: a run either fails for everybody or for nobody.
settings.register_profile("monoplan", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("monoplan")

SLOW = Path(__file__).with_name("slow_tests.txt")  # over a second each, beside others of their matter
QUICK = ("integration", "models", "monoplan", "serve", "test_bisect.py", "test_lower.py", "test_profiler.py",
         "test_report.py", "test_verify.py")  # fmt: skip
# Files of those folders that compare what only the usual flags make equal: rows of other batches, other programs.
AS_BUILT = ("test_engine.py", "test_export.py", "test_export_chat.py", "test_generation.py", "test_host_generation.py",
            "test_one_plan.py", "test_speculation.py", "test_window_cache.py")  # fmt: skip
WORKERS = 8  # at most: each one imports and collects all tests before it runs the first


@pytest.hookimpl(tryfirst=True)  # before xdist reads the options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Folders run on all cores; files, single tests and the debugger run in one process. `-n` overrides both."""
    option = config.option
    if not hasattr(option, "numprocesses") or option.numprocesses is not None or "PYTEST_XDIST_WORKER" in os.environ:
        return  # -p no:xdist, -n, or one of the workers
    if option.usepdb or option.collectonly or any(".py" in arg for arg in config.args):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1:
        option.numprocesses = min(cores, WORKERS)
        option.dist = "worksteal"  # a worker starts with a contiguous part: module fixtures are made once, mostly


def pytest_configure(config: pytest.Config) -> None:
    """Runs of more than the quick tests have some whose emulated kernels run for long."""
    if not config.option.markexpr.startswith("not full"):
        cuda_emulator.LEVEL = "-O1"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of slow_tests.txt carry the mark `full`."""
    slow = set(SLOW.read_text("utf-8").splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker("full")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips or fails tests whose needs are missing here."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            check(name)


@pytest.fixture(scope="module", autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans are built with -O1 in folders and files that are not about the compiler's optimizations: half the time.

    Those of the full run (`-m full`, or more) are built as a user's are.
    """
    name = request.path.name
    flags_for, level = cpu.flags_for, () if request.config.option.markexpr.startswith("full") else ("-O1",)
    with pytest.MonkeyPatch.context() as patch:
        if not {request.path.parent.name, name}.isdisjoint(QUICK) and name not in AS_BUILT:
            patch.setattr(cpu, "flags_for", lambda target: (*flags_for(target), *level))
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(1234)


def random_array(
    t: TensorType, rng: np.random.Generator, *, low: int = 0, high: int = 10, scale: float = 1.0, **symbols: int
) -> np.ndarray[Any, Any]:
    """Random contents for a type: normal floats, integers in [low, high), bools; symbols give its sizes."""
    shape = tuple(evaluate(d, symbols) for d in t.shape)
    if t.dtype.is_float:
        return (rng.standard_normal(shape) * scale).astype(t.dtype.numpy)
    if t.dtype.is_integer:
        return rng.integers(low, high, shape).astype(t.dtype.numpy)
    return rng.integers(0, 2, shape).astype(np.bool_)


@pytest.fixture
def make_array(rng: np.random.Generator) -> Callable[..., np.ndarray[Any, Any]]:
    """make_array(type, low=…, high=…, scale=…, n=3): a random array of a TensorType."""

    def make(t: TensorType, **options: Any) -> np.ndarray[Any, Any]:
        return random_array(t, rng, **options)

    return make
