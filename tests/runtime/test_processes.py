"""Compiler processes: what a person sees who waits for them, and that an interrupt leaves none behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monoplan.ir.errors import ArgumentError, CompileError
from monoplan.runtime.build import cache, compilers, processes, toolchain
from monoplan.runtime.machine import features
from monoplan.runtime.machine.features import machine, read_cpu
from tests.interrupts import assert_gone, interrupted
from tests.runtime.test_toolchain import plan, root, script  # noqa: F401  (a fixture that every test uses)


@pytest.mark.parametrize(("tty", "after", "shown"), [(True, 0.2, True), (True, 1.0, False), (False, 0.2, False)])
def test_progress_is_for_long_builds_on_a_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tty: bool,
    after: float,
    shown: bool,
) -> None:
    assert processes.PROGRESS_AFTER == 1.0
    monkeypatch.setattr(processes, "PROGRESS_AFTER", after)
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", 'case "$*" in *a.c*) sleep 0.5;; esac')))
    (tmp_path / "a.c").write_text("")
    compilers.has_openmp(compilers.find_compiler())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty, raising=False)
    log = toolchain.compile_shared(tmp_path / "a.c", tmp_path / "a.so", ())
    text = capsys.readouterr().err
    assert log.seconds > 0.45
    assert (text.startswith("\rcompiling plan … 0.") and text.endswith(" s\n")) if shown else text == ""


def slow(path: Path, pids: Path) -> Path:
    """A compiler that hangs, like gcc in a child that holds its pipes."""
    return script(path, f"sleep 60 & echo $$ $! >> {pids}; wait")


def begun(pids: Path, count: int = 1) -> Callable[[], bool]:
    return lambda: pids.is_file() and pids.read_text().count("\n") == count


def test_interrupt_kills_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("CC", str(slow(tmp_path / "cc", pids)))
    compiler = compilers.find_compiler()
    monkeypatch.setattr(toolchain, "has_openmp", lambda *_, **__: False)
    (tmp_path / "a.c").write_text("")
    with interrupted(begun(pids)):
        toolchain.compile_shared(tmp_path / "a.c", tmp_path / "a.so", (), compiler)
    assert_gone(pids)


def test_interrupt_kills_all_compilers_that_work_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("CC", str(slow(tmp_path / "cc", pids)))
    compiler = compilers.find_compiler()
    monkeypatch.setattr(toolchain, "has_openmp", lambda *_, **__: False)
    with interrupted(begun(pids, 3)):
        toolchain.compile_parts(tmp_path, ("", "", ""), toolchain.build_flags((), compiler), compiler)
    assert_gone(pids)


@pytest.mark.filterwarnings("ignore:monoplan. plans run on one thread")
def test_a_compiler_that_hangs_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("CC", str(slow(tmp_path / "my cc", pids)).replace(" ", "\\ "))
    monkeypatch.setenv("MONOPLAN_COMPILE_TIMEOUT", "0.5")
    compiler = compilers.find_compiler()
    monkeypatch.setattr(toolchain, "has_openmp", lambda *_, **__: False)
    with pytest.raises(CompileError) as caught:
        cache.get_or_build(*plan())
    assert_gone(pids)
    text = str(caught.value)
    assert f"{compiler.path} did not end within 0.5 s" in text and f"'{compiler.path}' -std=gnu11" in text
    assert "MONOPLAN_COMPILE_TIMEOUT" in text and Path(str(caught.value.where)).is_file()


def test_a_hanging_compiler_is_not_tried_with_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    trial = f'case "$*" in *probe.c*-o*probe) sleep 60 & echo $$ $! >> {pids}; wait;; esac'
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", trial)))
    monkeypatch.setenv("MONOPLAN_COMPILE_TIMEOUT", "0.5")
    monkeypatch.delenv("MONOPLAN_ISA", raising=False)
    if len(features.levels(machine(), read_cpu()[1])) <= 2:
        pytest.skip("this CPU has no level that is tried")
    with pytest.raises(CompileError, match="did not end within"):
        features.detect()
    assert begun(pids)()
    assert_gone(pids)


@pytest.mark.parametrize("text", ["soon", "-1", "0", "1e999", "nan"])
def test_time_limits_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MONOPLAN_COMPILE_TIMEOUT", text)
    with pytest.raises(ArgumentError, match="is not a number of seconds"):
        processes.run(["true"], tmp_path, None)


def test_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONOPLAN_COMPILE_TIMEOUT", raising=False)
    assert processes.time_limit() == 600
    monkeypatch.setenv("MONOPLAN_COMPILE_TIMEOUT", " 7.5 ")
    assert processes.time_limit() == 7.5
