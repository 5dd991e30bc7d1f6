"""What lies in the folder of a cache: the names that are ours, and how they are found and removed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

STALE_SECONDS = 3600  # a temporary directory this old, of a dead process, is rubbish
TEMP_NAME = re.compile(r"\.tmp-([0-9]{1,9})-[0-9a-f]+")
# What `clear` may remove: the folder of a cache may hold files of others, too. The second form of a fact is one that
# was being written; the third is what earlier versions left.
PLAN_NAME = re.compile(r"[0-9a-f]{64}")
FACT_NAME = re.compile(
    r"[a-z-]+-([0-9a-f]{24}|[0-9a-f]{64})\.sealed"
    r"|\.tmp-[0-9]{1,9}-[0-9a-f]{16}"
    r"|[a-z-]+-[0-9a-f]{24}\.json|(plan|call)-[0-9a-f]{64}\.pickle|__jinja2_[0-9a-f]{40}\.cache"
)
FAILED_NAME = re.compile(r"[0-9a-f]{16}|tmp-[0-9]{1,9}-[0-9a-f]+")


def entries_of(root: Path) -> Iterator[tuple[float, int, Path]]:
    """(last use, bytes, path) of every entry; one that vanishes meanwhile is skipped."""
    for path in sorted(p for p in (root / "plans").glob("[0-9a-f]*") if PLAN_NAME.fullmatch(p.name)):
        try:
            size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            meta = path / "meta.sealed"
            yield (meta if meta.exists() else path).stat().st_mtime, size, path
        except OSError:
            continue


def discard(path: Path) -> bool:
    """Removes an entry in one step for all readers: renamed first, deleted after."""
    trash = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        os.rename(path, trash)
        trash.unlink() if trash.is_symlink() or not trash.is_dir() else shutil.rmtree(trash, ignore_errors=True)
    except OSError:
        return False
    return True


def sweep(root: Path, age: float = STALE_SECONDS) -> None:
    """Removes temporary directories that killed builders left."""
    for path in (root / "plans").glob(".tmp-*"):
        found = TEMP_NAME.fullmatch(path.name)
        try:
            if found and not _alive(int(found[1])) and time.time() - path.stat().st_mtime >= age:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, under another user
    return True


def remove_named(folder: Path, names: re.Pattern[str]) -> None:
    """Removes what has such a name, and then the folder, if nothing of others is in it."""
    for path in sorted(folder.glob("*")):
        if names.fullmatch(path.name):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
