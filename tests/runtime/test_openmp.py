"""Whether the compiler has OpenMP: asked once, remembered, and never decided by another trouble."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

from monoplan.runtime.build import cache, cache_places, compilers, processes, toolchain
from tests.needs import needs
from tests.runtime.test_toolchain import COMPILERS, SOURCE, needs_compiler, plan, root, script

__all__ = ["root"]  # the fixture of every test there and here


@pytest.mark.parametrize("links", [True, False])
def test_openmp_is_used_where_it_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    fail = "" if links else 'case "$*" in *-fopenmp*) echo "cannot find -lomp" >&2; exit 1;; esac\n'
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", fail + "echo > plan.so")))
    compiler = compilers.find_compiler()
    before = processes.compiler_runs()
    assert compilers.has_openmp(compiler) is links
    assert ("-fopenmp" in toolchain.build_flags(())) is links
    assert processes.compiler_runs() == before + (1 if links else 3)  # a "no" is checked: see _openmp_links
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert cache.get_or_build(*plan()).binary.exists()
        assert cache.get_or_build(*plan(SOURCE + "\n")).binary.exists()
    assert [("plans run on one thread" in str(w.message)) for w in seen] == [True] * (not links)  # once


@needs("gcc")  # which brings its own OpenMP
def test_gcc_links_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc")
    assert compilers.has_openmp(compilers.find_compiler())


def test_openmp_installed_later_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'case "$*" in *-fopenmp*) [ -e {tmp_path}/libomp ] || exit 1;; esac'
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", body)))
    compiler = compilers.find_compiler()
    assert not compilers.has_openmp(compiler)
    (tmp_path / "libomp").touch()
    compilers._openmp.cache_clear()  # as a new process
    assert not compilers.has_openmp(compiler)  # remembered on disk, for a day
    assert compilers.has_openmp(compiler, fresh=True)
    compilers._openmp.cache_clear()
    assert compilers.has_openmp(compiler)


@pytest.mark.parametrize("how", ["exit 1", "kill -9 $$"])
def test_a_failure_that_is_not_openmps_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As on a full disk, or when the system kills gcc for memory: a moment later the answer is yes."""
    body = f"[ -e {tmp_path}/trouble ] && {how}; exit 0"
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", body)))
    compiler = compilers.find_compiler()
    (tmp_path / "trouble").touch()
    assert not compilers.has_openmp(compiler)
    (tmp_path / "trouble").unlink()
    assert compilers.has_openmp(compiler)


def test_one_failed_probe_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcc whose cc1 was killed ends with status 1, as one without libgomp does."""
    body = f"[ -e {tmp_path}/tried ] && exit 0; touch {tmp_path}/tried; exit 1"
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", body)))
    assert compilers.has_openmp(compilers.find_compiler())


@needs_compiler
def test_openmp_is_found_without_a_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", COMPILERS[0])
    compiler = compilers.find_compiler()
    expected = compilers.has_openmp(compiler, fresh=True)
    compilers._openmp.cache_clear()
    shutil.rmtree(cache_places.cache_root() / "facts")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert compilers.has_openmp(compiler) is expected
