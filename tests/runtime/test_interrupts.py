"""Ctrl-C that reaches only this process: whatever a call is at, it ends soon, and the next one is right."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.runtime import features, packing, weights
from tests.interrupts import assert_gone, interrupted
from tests.runtime.test_toolchain import COMPILERS, needs_compiler, root  # noqa: F401  (an empty cache for every test)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 48)

    def forward(self, x: mp.Tensor) -> mp.Tensor:
        return self.linear(x)


@pytest.fixture(autouse=True)
def new_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing about the machine is known, so that compilers try it."""
    for once in (features._detect, packing.native_library):
        monkeypatch.setattr(once, "_known", {})


def stumbling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> Path:
    """CC hangs where its command is like `where`, while there is a file `hangs`; returns the list of its processes."""
    pids, hangs, path = tmp_path / "pids", tmp_path / "hangs", tmp_path / "cc"
    real = shutil.which(COMPILERS[0])
    path.write_text(
        f'#!/bin/sh\nif [ -e {hangs} ]; then case "$*" in {where}) sleep 60 & echo $$ $! >> {pids}; wait;; esac; fi\n'
        f'exec {real} "$@"\n'
    )
    path.chmod(0o755)
    hangs.touch()
    monkeypatch.setenv("CC", str(path))
    return pids


@needs_compiler
@pytest.mark.parametrize("stage", ["openmp", "isa", "packing", "plan"])
def test_compile_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    # The packing library is a plan.c as well, but one without the plans' flags.
    where = {"openmp": "*probe.so*", "isa": "*probe", "packing": "*plan.so*", "plan": "*MP_LANES*"}[stage]
    pids = stumbling(tmp_path, monkeypatch, where)
    if stage == "isa" and len(features.levels(features.machine(), features.read_cpu()[1])) <= 2:
        pytest.skip("this CPU has no level that is tried")
    x = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    module = Product()
    fast = mp.compile(module)
    with interrupted(lambda: pids.is_file() and pids.read_text().endswith("\n")):
        fast(x)
    assert_gone(pids)
    (tmp_path / "hangs").unlink()
    np.testing.assert_allclose(fast(x), module(mp.Tensor(x)).numpy(), atol=1e-5)
    assert not list((tmp_path / "cache" / "plans").glob(".tmp-*"))


@needs_compiler
def test_packing_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = threading.Event(), threading.Event()
    honest = weights.pack

    def slow(*args: object) -> object:
        reached.set()
        go.wait(60)
        return honest(*args)  # type: ignore[arg-type]

    module = Product()
    x = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    fast = mp.compile(module)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "pack", slow)
        with interrupted(reached.is_set):
            fast(x)
        go.set()
    np.testing.assert_allclose(fast(x), module(mp.Tensor(x)).numpy(), atol=1e-5)
