"""The build cache in places that are full, read-only, unusable or temporary."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from monoplan.ir.errors import CompileError
from monoplan.runtime.build import cache, cache_places
from tests.runtime.cache_support import IMPORT_ROOT, KEY, build, never, plans, truncate

pytestmark = pytest.mark.usefixtures("root")


@pytest.mark.parametrize("place", ["file/below", "/proc/monoplan", "/proc", "file"])
def test_unusable_place_falls_to_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    if place.startswith("/proc") and sys.platform != "linux":
        pytest.skip("needs /proc")
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / place))
    with pytest.warns(RuntimeWarning) as caught:
        first = cache.get_or_build(KEY, build)
        second = cache.get_or_build(KEY, never)
        cache.get_or_build(replace(KEY, abi=2), build)
    assert len(caught) == 1 and place in str(caught[0].message) and "temporary" in str(caught[0].message)
    assert second.hit and second.path == first.path
    assert stat.S_IMODE(cache_places.cache_root().stat().st_mode) == 0o700
    assert cache.info().temporary and cache.info().entries == 2


def test_temporary_root_is_removed_at_exit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    code = "from monoplan.runtime.build import cache_places; print(cache_places.cache_root())"
    environ = {"MONOPLAN_CACHE_DIR": str(tmp_path / "file/x"), "TMPDIR": str(tmp_path / "tmp")}
    environ = {**os.environ, "PYTHONPATH": str(IMPORT_ROOT), **environ}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "tmp"))
    assert "RuntimeWarning" in done.stderr and not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_disk_trouble_during_the_build(root: Path, code: int) -> None:
    def full_disk(folder: Path) -> None:
        if folder.is_relative_to(root):
            raise OSError(code, os.strerror(code))
        build(folder)

    with pytest.warns(RuntimeWarning, match=re.escape(os.strerror(code))):
        entry = cache.get_or_build(KEY, full_disk)
    assert not entry.path.is_relative_to(root) and entry.binary.exists()
    assert plans(root) == []
    assert cache.get_or_build(KEY, never).hit


def test_disk_trouble_that_only_the_compiler_saw(root: Path) -> None:
    def full_disk(folder: Path) -> None:
        if folder.is_relative_to(root):
            raise CompileError("the C compiler failed: plan.s: No space left on device")
        build(folder)

    with pytest.warns(RuntimeWarning, match="compiler could not write"):
        assert cache.get_or_build(KEY, full_disk).binary.exists()


def test_disk_trouble_everywhere_is_reported() -> None:
    def full_disk(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.warns(RuntimeWarning), pytest.raises(CompileError, match=r"no place to build(.|\n)*No space"):
        cache.get_or_build(KEY, full_disk)
    with pytest.raises(CompileError, match=r"no place to build(.|\n)*No space(.|\n)*MONOPLAN_CACHE_DIR"):
        cache.get_or_build(KEY, full_disk)  # in the temporary place at once


def test_no_temporary_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.warns(RuntimeWarning), pytest.raises(CompileError, match=r"no place to build(.|\n)*No such file"):
        cache.get_or_build(KEY, build)


def test_read_only_cache_still_hits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get_or_build(KEY, build)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:  # permission bits do not stop root
        patch.setattr(os, "utime", refuse)
        patch.setattr(os, "access", lambda *_: False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cache.get_or_build(KEY, never).path.is_relative_to(root)
        with pytest.warns(RuntimeWarning, match="not writable"):
            assert not cache.get_or_build(replace(KEY, abi=2), build).path.is_relative_to(root)
        assert cache.get_or_build(KEY, never).path.is_relative_to(root)


def test_damaged_entry_of_a_read_only_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncate(cache.get_or_build(KEY, build).path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(cache, "discard", lambda path: False)
    with pytest.warns(RuntimeWarning):
        assert not cache.get_or_build(KEY, build).path.is_relative_to(root)


def test_fork_does_not_remove_the_parents_temporary_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from monoplan.runtime.build import cache_places
        mine = cache_places.cache_root()
        pid = os.fork()
        if pid == 0:
            assert cache_places.cache_root() != mine
            sys.exit(0)  # runs the exit handlers of the parent, in the child
        assert os.waitpid(pid, 0)[1] == 0
        assert mine.is_dir()
    """
    environ = {**os.environ, "PYTHONPATH": str(IMPORT_ROOT), "MONOPLAN_CACHE_DIR": str(tmp_path / "file/x")}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environ, check=True, timeout=60)
