"""Nothing that somebody else could have written is believed, and no damaged file is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from monoplan.runtime.build import cache, cache_places, facts, trusted
from tests.runtime.cache_support import IMPORT_ROOT, KEY, build, never

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> Path:
    """A cache directory of our own below tmp_path."""
    found = tmp_path / "place" / "cache"
    found.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(found))
    return found


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


# What makes a place one that others can change: the directory itself, or one above it.
OPENED: dict[str, Callable[[Path], None]] = {
    "everybody may write": lambda p: p.chmod(0o777),
    "its group may write": lambda p: (os.chown(p, -1, STRANGER), p.chmod(0o770)),  # type: ignore[dict-item]
    "everybody may write above": lambda p: p.parent.chmod(0o777),
    "a sticky cache": lambda p: p.chmod(0o1777),
    "it is another user's": give_away,
    "its parent is another user's": lambda p: give_away(p.parent),
}


@as_root
@pytest.mark.parametrize("way", OPENED)
def test_a_place_that_others_can_change_is_not_used(place: Path, way: str) -> None:
    planted = cache.get_or_build(KEY, build)
    facts.remember("isa", "key", {"planted": 1})
    assert planted.path.is_relative_to(place) and facts.recall("isa", "key")
    OPENED[way](place)
    with pytest.warns(RuntimeWarning, match="can't be used.*(belongs to user|can be written by)") as caught:
        entry = cache.get_or_build(KEY, build)
    assert len(caught) == 1 and not entry.hit and not entry.path.is_relative_to(place)
    assert facts.recall("isa", "key") is None
    facts.remember("isa", "key", {"own": 1})
    assert facts.recall("isa", "key") == {"own": 1}
    assert stat.S_IMODE(cache_places.cache_root().stat().st_mode) == 0o700


def test_a_sticky_directory_above_is_in_order(place: Path) -> None:
    place.parent.chmod(0o1777)
    assert cache.get_or_build(KEY, build).path.is_relative_to(place)


@as_root
@pytest.mark.parametrize("name", ["", "plan.so", "meta.sealed", "plan.c", "vec", "vec/v.h", "build.log"])
@pytest.mark.parametrize("way", ["another user's", "writable"])
def test_every_part_of_an_entry_is_checked(place: Path, name: str, way: str) -> None:
    part = cache.get_or_build(KEY, build).path / name
    give_away(part) if way == "another user's" else part.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="damaged cache entry"):
        assert not cache.get_or_build(KEY, build).hit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(KEY, never).hit


@pytest.mark.parametrize("name", ["", "plan.so", "meta.sealed", "vec"])
def test_no_link_is_followed(place: Path, tmp_path: Path, name: str) -> None:
    part = cache.get_or_build(KEY, build).path / name
    elsewhere = tmp_path / "elsewhere"
    part.rename(elsewhere)
    part.symlink_to(elsewhere)
    with pytest.warns(RuntimeWarning, match="damaged cache entry"):
        entry = cache.get_or_build(KEY, build)
    assert not entry.hit and not any(p.is_symlink() for p in (place / "plans").rglob("*"))
    assert elsewhere.exists()  # what a link leads to is not ours to remove


def test_a_pipe_in_place_of_a_file_blocks_nobody(place: Path) -> None:
    facts.remember("isa", "key", {"a": 1})
    (fact,) = (place / "facts").iterdir()
    fact.unlink()
    os.mkfifo(fact)
    assert facts.recall("isa", "key") is None


def test_files_under_each_others_names_are_no_facts(place: Path) -> None:
    facts.remember("isa", "one", {"a": 1})
    facts.remember("isa", "two", {"a": 2})
    one, two = (place / "facts").iterdir()
    one.rename(place / "spare")
    two.rename(one)
    (place / "spare").rename(two)
    with pytest.warns(RuntimeWarning, match="damaged cache file"):
        assert facts.recall("isa", "one") is facts.recall("isa", "two") is None


def test_every_bit_of_a_fact_counts(place: Path) -> None:
    facts.remember("isa", "key", {"a": 1})
    (fact,) = (place / "facts").iterdir()
    whole = fact.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bit in range(8 * len(whole)):
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            fact.write_bytes(changed)
            assert facts.recall("isa", "key") is None, bit
        for length in range(len(whole)):
            fact.write_bytes(whole[:length])
            assert facts.recall("isa", "key") is None, length
    fact.write_bytes(whole)
    assert facts.recall("isa", "key") == {"a": 1}


def test_what_is_written_is_ours_alone_whatever_the_umask(place: Path) -> None:
    before = os.umask(0)
    try:
        facts.remember("isa", "key", {"a": 1})
        cache.get_or_build(KEY, build)
    finally:
        os.umask(before)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in place.rglob("*")}
    assert modes and all(mode & 0o077 == 0 for mode in modes.values()), modes
    assert cache.get_or_build(KEY, never).hit


@as_root
def test_the_private_group_of_a_user_may_write(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(place, -1, STRANGER)
    place.chmod(0o770)
    monkeypatch.setattr(trusted, "_is_private_group", lambda gid: gid == STRANGER)
    assert cache.get_or_build(KEY, build).path.is_relative_to(place)


def test_links_on_the_way_to_the_cache_are_the_users_choice(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(place.parent)
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "link" / "cache"))
    assert cache.get_or_build(KEY, build).path.is_relative_to(place)


@as_root
def test_a_temporary_directory_that_others_can_rename_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(trusted.Untrusted, match="can be written by everybody"):
        cache_places.private_directory(str(tmp_path / "open"))


def test_without_a_home_directory(tmp_path: Path) -> None:
    """Neither HOME nor an entry of the user: the cache must not land in the working directory."""
    code = """
        import os, pwd, warnings
        def nobody(*_): raise KeyError("no such user")
        pwd.getpwuid = nobody
        from monoplan.runtime.build import cache_places
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            root = cache_places.cache_root()
        assert root.is_absolute() and "there is no home directory" in str(caught[0].message), caught
        assert cache_places.read_roots() == (root,)
    """
    environ = {k: v for k, v in os.environ.items() if k not in ("HOME", "MONOPLAN_CACHE_DIR", "XDG_CACHE_HOME")}
    environ["PYTHONPATH"] = str(IMPORT_ROOT)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, env=environ, cwd=tmp_path, check=True, timeout=60)
    assert not list(tmp_path.iterdir())
