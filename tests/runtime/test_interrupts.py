"""Ctrl-C that reaches only this process: whatever a call is at, it ends soon, and the next one is right."""

from __future__ import annotations

import os
import queue
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.models import LlamaForCausalLM
from monoplan.runtime.cpu import weights
from monoplan.runtime.cpu.executable import CpuExecutable
from monoplan.runtime.machine import features
from tests.interrupts import assert_gone, interrupted
from tests.models.support import tiny_config
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
    for once in (features._detect, weights.native_library):
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


class Long(nn.Module):
    """Products of many rows, and attention, one after the other."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.linear = times, nn.Linear(256, 256)

    def forward(self, x: mp.Tensor) -> mp.Tensor:
        for _ in range(self.times):
            x = F.gelu(self.linear(x))
            y = x.reshape(1, -1, 4, 64).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).reshape(-1, 256)
        return x


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as a plan runs."""
    event, enter = threading.Event(), CpuExecutable.enter

    def enter_loudly(executable: CpuExecutable, args: Any, error: Any) -> int:
        event.set()
        return enter(executable, args, error)

    monkeypatch.setattr(CpuExecutable, "enter", enter_loudly)
    return event


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_plan_is_interrupted(entered: threading.Event, threads: int) -> None:
    """One that would take minutes."""
    fast = mp.compile(Long(4), mp.spec("rows", 256), options=mp.Options(threads=threads))
    few = np.random.default_rng(0).normal(size=(40, 256)).astype(np.float32)
    expected = fast(few)
    entered.clear()
    with interrupted(entered.is_set):
        fast(np.ones((100_000, 256), np.float32))
    np.testing.assert_array_equal(fast(few), expected)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_interrupts_at_any_moment(threads: int) -> None:
    fast = mp.compile(Long(2), mp.spec("rows", 256), options=mp.Options(threads=threads))
    x = np.random.default_rng(0).normal(size=(700, 256)).astype(np.float32)
    expected = fast(x)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    draw, count = random.Random(threads), 0
    try:
        for _ in range(25):
            timer = threading.Timer(draw.uniform(0.0, 0.05), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                while True:
                    fast(x)
            except KeyboardInterrupt:
                count += 1
            timer.join()
            np.testing.assert_array_equal(fast(x), expected)
    finally:
        signal.signal(signal.SIGINT, before)
    assert count == 25


@needs_compiler
def test_a_handler_of_the_users_own_is_left_alone(entered: threading.Event) -> None:
    """It need not raise: the plan goes on, and the handler is called after it."""
    fast = mp.compile(Long(2), mp.spec("rows", 256))
    x = np.random.default_rng(0).normal(size=(700, 256)).astype(np.float32)
    expected = fast(x)
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        entered.clear()
        sender = threading.Thread(target=lambda: entered.wait() and os.kill(os.getpid(), signal.SIGINT))
        sender.start()
        result = fast(x)
        sender.join()
    finally:
        signal.signal(signal.SIGINT, before)
    np.testing.assert_array_equal(result, expected)
    assert seen == [signal.SIGINT]


@needs_compiler
def test_a_call_of_another_thread_is_not_interrupted(entered: threading.Event) -> None:
    fast = mp.compile(Long(2), mp.spec("rows", 256))
    x = np.random.default_rng(0).normal(size=(700, 256)).astype(np.float32)
    expected = fast(x)
    entered.clear()
    results: queue.Queue[Any] = queue.Queue()
    other = threading.Thread(target=lambda: results.put(fast(x)))
    with interrupted(entered.is_set):
        other.start()
        threading.Event().wait(60)
    np.testing.assert_array_equal(results.get(timeout=60), expected)


@needs_compiler
def test_generate_is_interrupted() -> None:
    model = LlamaForCausalLM.from_config(tiny_config(max_position_embeddings=50_000), seed=3)
    llm = mp.compile(model)
    prompt = [3, 4, 5, 6]
    expected = llm.generate_ids(prompt, 40, eos_token_id=())
    tokens: list[int] = []
    with interrupted(lambda: len(tokens) > 20):
        llm.generate_batch([prompt], 49_000, eos_token_id=(), callback=lambda row, token, piece: tokens.append(token))
    assert tokens[:20] == expected[:20]
    assert llm.generate_ids(prompt, 40, eos_token_id=()) == expected
