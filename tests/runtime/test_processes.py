"""Compiler processes: what a person sees who waits for them, and that an interrupt leaves none behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monoplan.runtime import compilers, processes, toolchain
from tests.runtime.test_toolchain import root, script  # noqa: F401  (a fixture that every test uses)


@pytest.mark.parametrize(
    ("tty", "after", "shown"), [(True, 0.2, True), (True, 1.0, False), (False, 0.2, False)]
)
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


def test_interrupt_kills_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", f"echo $$ > {tmp_path}/pid; exec sleep 60")))

    def interrupted(process: subprocess.Popen[str], show: bool, timeout: float | None) -> tuple[str, str]:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    compiler = compilers.find_compiler()
    monkeypatch.setattr(toolchain, "has_openmp", lambda *_, **__: False)
    monkeypatch.setattr(processes, "_wait", interrupted)
    (tmp_path / "a.c").write_text("")
    with pytest.raises(KeyboardInterrupt):
        toolchain.compile_shared(tmp_path / "a.c", tmp_path / "a.so", (), compiler)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_interrupt_kills_all_compilers_that_work_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", f"echo $$ >> {tmp_path}/pids; exec sleep 60")))
    pids = tmp_path / "pids"

    def interrupted(process: subprocess.Popen[str], update: object, timeout: float | None) -> tuple[str, str]:
        while not pids.exists() or len(pids.read_text().split()) < 3:
            time.sleep(0.01)
        raise KeyboardInterrupt

    compiler = compilers.find_compiler()
    monkeypatch.setattr(toolchain, "has_openmp", lambda *_, **__: False)
    monkeypatch.setattr(processes, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toolchain.compile_parts(tmp_path, ("", "", ""), toolchain.build_flags((), compiler), compiler)
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
