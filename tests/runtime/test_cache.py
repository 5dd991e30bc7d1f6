"""The build cache under races, kills and damage."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from monoplan.ir.errors import ArgumentError, CompileError
from monoplan.runtime.build import cache, cache_places, facts, trusted
from tests.runtime.cache_support import KEY, build, never, plans, start_child, truncate

pytestmark = pytest.mark.usefixtures("root")


def fake_entry(name: str, size: int, age: float) -> cache.Entry:
    """An entry of its own key, last used `age` seconds ago."""

    def make(folder: Path) -> None:
        (folder / "plan.so").write_bytes(b"x" * size)

    entry = cache.get_or_build(replace(KEY, source=name), make)
    then = time.time() - age
    os.utime(entry.path / "meta.sealed", (then, then))
    return entry


def test_miss_then_hit(root: Path) -> None:
    first = cache.get_or_build(KEY, build)
    second = cache.get_or_build(KEY, never)
    assert (first.hit, second.hit) == (False, True)
    assert first.path == second.path == root / "plans" / KEY.digest()
    assert second.log == "the log\n"
    assert second.source.read_text() == KEY.source
    assert (second.path / "vec/v.h").read_text() == "#pragma once\n"
    assert plans(root) == [KEY.digest()]


def test_meta_records_key_and_sums() -> None:
    entry = cache.get_or_build(KEY, build)
    meta = json.loads(trusted.unseal("meta.sealed", (entry.path / "meta.sealed").read_bytes()) or b"")
    assert set(meta["files"]) == {"plan.c", "plan.so", "build.log", "vec/v.h"}
    assert meta["key"] == {"compiler": "cc 1", "flags": ["-O3"], "target": "test", "abi": 1, "language": "c"}
    assert re.match(r"\d{4}-\d\d-\d\dT", meta["created"])


def test_root_is_private(root: Path) -> None:
    assert cache_places.cache_root() == root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "plans").stat().st_mode) == 0o700


def test_default_root_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import platformdirs

    monkeypatch.delenv("MONOPLAN_CACHE_DIR")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name, **_: str(tmp_path / "user" / name))
    assert cache_places.cache_root() == tmp_path / "user" / "monoplan"


@pytest.mark.parametrize(
    "change",
    [
        {"source": "x"},
        {"headers": ()},
        {"headers": (("vec/v.h", "other"),)},
        {"compiler": "cc 2"},
        {"flags": ("-O2",)},
        {"flags": ("-O3", "")},
        {"target": "other"},
        {"abi": 2},
        {"language": "cuda"},
    ],
)
def test_every_part_of_the_key_counts(change: dict[str, object]) -> None:
    assert replace(KEY, **change).digest() != KEY.digest()
    assert replace(KEY).digest() == KEY.digest()


def test_comments_are_not_part_of_the_key_of_c() -> None:
    def digest(source: str, language: str = "c") -> str:
        return replace(KEY, source=source, language=language).digest()

    one = '/* model.py:7 */ int a = 1; // of 7\nchar q = \'"\', *s = "/* 7 */"; /* 7\n */ int b;'
    assert digest(one) == digest(one.replace("model.py:7", "model.py:8, which is longer").replace("of 7", "of 8"))
    for old, new in (("a = 1", "a = 2"), ('"/* 7 */"', '"/* 8 */"'), ("int b", "int c")):
        assert digest(one.replace(old, new)) != digest(one)
    assert digest(one, "cuda") != digest(one.replace("model.py:7", "model.py:8"), "cuda")


def test_header_may_not_leave_the_entry() -> None:
    for name in ("../v.h", "/v.h", "a/../../v.h"):
        with pytest.raises(ArgumentError, match="leaves"):
            cache.get_or_build(replace(KEY, headers=((name, ""),)), build)


def test_failed_build_leaves_nothing(root: Path) -> None:
    def fails(folder: Path) -> None:
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        cache.get_or_build(KEY, fails)
    with pytest.raises(CompileError, match=r"made no plan\.so"):
        cache.get_or_build(KEY, lambda folder: None)
    assert plans(root) == []


def test_an_error_of_the_build_itself_is_not_taken_for_a_bad_place() -> None:
    def fails(folder: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "the user's file")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FileNotFoundError, match="the user's file"):
            cache.get_or_build(KEY, fails)


def test_sixteen_processes_build_one_entry(root: Path) -> None:
    children = [start_child("time.sleep(0.3)") for _ in range(16)]
    results = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0] * 16, results
    assert "built\n" in {out for out, _ in results}
    assert plans(root) == [KEY.digest()]
    assert cache.get_or_build(KEY, never).hit


def test_threads_of_one_process_race_too(root: Path) -> None:
    entries: list[cache.Entry] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        entries.append(cache.get_or_build(KEY, build))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(entries) == 8 and plans(root) == [KEY.digest()]


def test_killed_builder_does_no_harm(root: Path) -> None:
    child = start_child("print('inside', flush=True); time.sleep(60)")
    assert child.stdout is not None and child.stdout.readline() == "inside\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    [left] = plans(root)
    assert left.startswith(f".tmp-{child.pid}-")
    assert not cache.get_or_build(KEY, build).hit
    assert left in plans(root)  # young: its owner might live where we can't see it
    old = time.time() - 2 * cache.STALE_SECONDS
    os.utime(root / "plans" / left, (old, old))
    cache.get_or_build(replace(KEY, abi=2), build)
    assert not any(name.startswith(".tmp-") for name in plans(root))


def test_old_directory_of_a_live_process_stays(root: Path) -> None:
    cache_places.cache_root()
    mine = root / "plans" / f".tmp-{os.getpid()}-00ff"
    mine.mkdir()
    os.utime(mine, (1, 1))
    cache.get_or_build(KEY, build)
    cache.clear()
    assert plans(root) == [mine.name]


def flip(path: Path) -> None:
    data = bytearray((path / "plan.so").read_bytes())
    data[500] ^= 1
    (path / "plan.so").write_bytes(data)


DAMAGE = {
    "truncated binary": truncate,
    "flipped bit": flip,
    "no binary": lambda path: (path / "plan.so").unlink(),
    "no meta": lambda path: (path / "meta.sealed").unlink(),
    "meta is not json": lambda path: (path / "meta.sealed").write_text("{"),
    "meta is not utf-8": lambda path: (path / "meta.sealed").write_bytes(b"\xff\xfe"),
    "meta is a list": lambda path: (path / "meta.sealed").write_text("[]"),
    "meta without files": lambda path: (path / "meta.sealed").write_text("{}"),
    "meta is nothing": lambda path: (path / "meta.sealed").write_text('{"files": {"plan.so": null}}'),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_rebuilt_with_a_warning(root: Path, name: str) -> None:
    DAMAGE[name](cache.get_or_build(KEY, build).path)
    with pytest.warns(RuntimeWarning, match="damaged cache entry"):
        entry = cache.get_or_build(KEY, build)
    assert not entry.hit and entry.binary.stat().st_size == 6000
    assert cache.get_or_build(KEY, never).hit
    assert plans(root) == [KEY.digest()]


def test_entry_copied_under_another_name_is_damage(root: Path) -> None:
    other = replace(KEY, abi=2)
    os.rename(cache.get_or_build(other, build).path, root / "plans" / KEY.digest())
    with pytest.warns(RuntimeWarning, match="another key"):
        assert not cache.get_or_build(KEY, build).hit


@pytest.mark.parametrize("kind", ["file", "empty directory"])
def test_something_else_under_the_entrys_name(root: Path, kind: str) -> None:
    path = cache_places.cache_root() / "plans" / KEY.digest()
    path.write_text("?") if kind == "file" else path.mkdir()
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert not cache.get_or_build(KEY, build).hit
    assert cache.get_or_build(KEY, never).hit


def test_damage_that_appears_during_the_build(root: Path) -> None:
    def build_while_another_leaves_rubbish(folder: Path) -> None:
        build(folder)
        (root / "plans" / KEY.digest()).mkdir()
        (root / "plans" / KEY.digest() / "plan.so").write_text("rubbish")

    entry = cache.get_or_build(KEY, build_while_another_leaves_rubbish)
    assert entry.binary.read_bytes() == b"binary" * 1000
    assert plans(root) == [KEY.digest()]


def test_loser_of_the_race_takes_the_winners_entry(root: Path) -> None:
    def slower(folder: Path) -> None:
        cache.get_or_build(KEY, build)
        (folder / "plan.so").write_bytes(b"the loser's")

    entry = cache.get_or_build(KEY, slower)
    assert not entry.hit and entry.binary.read_bytes() == b"binary" * 1000
    assert plans(root) == [KEY.digest()]


def test_build_directory_removed_by_a_stranger(root: Path) -> None:
    import shutil

    def build_and_lose(folder: Path) -> None:
        build(folder)
        if folder.is_relative_to(root):
            shutil.rmtree(folder)

    with pytest.warns(RuntimeWarning, match="removed by another process"):
        assert cache.get_or_build(KEY, build_and_lose).binary.exists()


def test_cleared_between_look_and_read_is_a_plain_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get_or_build(KEY, build)
    real = cache._problem

    def cleared(path: Path, key: cache.BuildKey) -> str | None:
        monkeypatch.setattr(cache, "_problem", real)
        cache.clear()
        return real(path, key)

    monkeypatch.setattr(cache, "_problem", cleared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.get_or_build(KEY, build).hit


def test_entry_replaced_while_it_was_read_is_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get_or_build(KEY, build)
    real = cache._problem

    def torn_look(path: Path, key: cache.BuildKey) -> str | None:
        monkeypatch.setattr(cache, "_problem", real)
        return "FileNotFoundError: the old binary had just gone"

    monkeypatch.setattr(cache, "_problem", torn_look)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(KEY, never).hit


def test_clear_beside_builders(root: Path) -> None:
    """Clearing all the time while others build and read: nobody fails, nobody warns."""
    children = [start_child("time.sleep(0.05)", "unread") for _ in range(4)]
    while any(child.poll() is None for child in children):
        cache.clear()
        time.sleep(0.01)
    for child in children:
        _, err = child.communicate()
        assert child.returncode == 0, err
    cache.clear()
    assert plans(root) == []


def test_lru_prune_spares_the_recent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [fake_entry(f"{n}", 10_000, age) for n, age in enumerate((4000, 2000, 3000, 30))]
    one = sum(p.stat().st_size for p in entries[0].path.rglob("*") if p.is_file())
    monkeypatch.setenv("MONOPLAN_CACHE_MAX_BYTES", str(int(3.5 * one)))
    fake_entry("new", 10_000, 0)  # the build itself prunes: five entries, room for three
    assert [e.path.exists() for e in entries] == [False, True, False, True]
    count, nbytes = cache.prune(0)
    assert count == 1 and nbytes == pytest.approx(one, abs=200)
    assert not entries[1].path.exists() and entries[3].path.exists()
    assert cache.info().entries == 2
    assert not any(name.startswith(".tmp-") for name in plans(root))


def test_a_hit_makes_an_entry_recent() -> None:
    entry = fake_entry("a", 100, 5000)
    assert cache.get_or_build(replace(KEY, source="a"), never).hit
    assert cache.prune(0) == (0, 0) and entry.path.exists()


@pytest.mark.parametrize("text", ["2GB", "-1", "1.5", "much"])
def test_bad_size_is_named_before_the_build(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MONOPLAN_CACHE_MAX_BYTES", text)
    with pytest.raises(ArgumentError, match="MONOPLAN_CACHE_MAX_BYTES"):
        cache.get_or_build(KEY, never)


def test_clear_leaves_files_of_others(root: Path) -> None:
    """Somebody may point MONOPLAN_CACHE_DIR at a folder that is not ours alone."""
    cache.get_or_build(KEY, build)
    facts.remember("limits", "key", {})
    ours = [
        f"facts/plan-{'a1' * 32}.sealed",
        f"facts/isa-{'0f' * 12}.sealed",
        f"facts/.tmp-12-{'0f' * 8}",
        f"facts/plan-{'a1' * 32}.pickle",
        f"facts/isa-{'0f' * 12}.json",
        f"facts/__jinja2_{'0f' * 20}.cache",
        f"failed/{'0f' * 8}/plan.c",
        "failed/tmp-123-00ff/plan.cu",
    ]
    theirs = [
        "facts/notes.txt",
        "facts/a-list.json",
        "facts/plan-b.sealed",
        "facts/more/limits.json",
        "failed/why.md",
        "plans/budget.txt",
        "plans/data/table.csv",
    ]
    for name in ours + theirs:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    assert cache.info().entries == 1 and cache.clear()[0] == 1
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) == sorted(theirs)


def test_info_and_clear(root: Path) -> None:
    assert cache.info() == cache.CacheInfo(root, False, 0, 0, 2_000_000_000, 0, 0, 8_000_000_000)
    cache.get_or_build(KEY, build)
    (root / "facts").mkdir()
    (root / "failed").mkdir()
    info = cache.info()
    assert info.entries == 1 and info.nbytes > 6000
    assert cache.clear() == (1, info.nbytes)
    assert sorted(p.name for p in root.iterdir()) == ["plans"] and plans(root) == []
