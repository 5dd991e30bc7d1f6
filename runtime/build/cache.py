"""The content-addressed build cache: an entry appears whole, by one rename, or not at all.

    <root>/plans/<digest>/   plan.c (and its headers), plan.so, build.sh, build.log, meta.sealed
    <root>/weights/          packed weights (see runtime/cpu/packed.py)
    <root>/facts/            small answers about this machine's compiler and CPU (see facts.py), and plans as data
    <root>/failed/           sources whose build failed, kept for the reader of the error

There are no locks: two builders of one key make equal entries, and the loser of the rename discards its own.
An entry is used if nobody else can have written any part of it (trusted.py) and every file has the digest that
meta.sealed recorded; meta.sealed is sealed with its own. Anything else is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath

from monoplan.codegen.text import without_comments
from monoplan.ir.errors import ArgumentError, CompileError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.runtime.build import trusted
from monoplan.runtime.build.cache_places import (
    cache_root,
    is_temporary,
    leave,
    no_place,
    read_roots,
    temporary_root,
    wanted_root,
    warn_damaged,
)

FORMAT = 2  # of an entry: versions that keep other files, or check others, have entries of their own
DEFAULT_MAX_BYTES = 2_000_000_000
DEFAULT_MAX_WEIGHT_BYTES = 8_000_000_000
RECENT_SECONDS = 600
FILE_NAMES = {"c": ("plan.c", "plan.so"), "cuda": ("plan.cu", "plan.cubin")}

# The place is at fault, not the build: another may do. ESTALE is NFS's word for a directory that went away.
_PLACE_ERRORS = "ENOSPC EDQUOT EFBIG EROFS EACCES EPERM ENOTDIR EIO ESTALE".split()
_PLACE_TEXTS = ("No space left on device", "Disk quota exceeded", "Read-only file system")


@dataclass(frozen=True)
class BuildKey:
    """Everything that may change the machine code; what is not here must not affect it."""

    source: str
    headers: tuple[tuple[str, str], ...]  # (name as #include "name" says it, text); written beside the source
    compiler: str  # Compiler.identity, or the NVRTC version
    flags: tuple[str, ...]
    target: str  # as detected, never "native"
    abi: int
    language: str = "c"  # "c" or "cuda": names the files of the entry

    def digest(self) -> str:
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        """The name of the entry: sha256 of all fields, but for comments in C: they hold the user's lines, which move
        whenever a file is edited above them."""
        source = without_comments(self.source) if self.language == "c" else self.source
        parts = {f.name: getattr(self, f.name) for f in fields(self)} | {"source": source, "format": FORMAT}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished build on disk; `hit` says that nothing was built for this call."""

    path: Path
    source: Path
    binary: Path
    hit: bool
    log: str


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What `monoplan cache info` and the doctor print."""

    root: Path
    temporary: bool  # True when the wanted place could not be used
    entries: int
    nbytes: int
    max_bytes: int
    weights: int  # files of packed weights
    weight_bytes: int
    max_weight_bytes: int


def max_bytes() -> int:
    """The size cap of plans: MONOPLAN_CACHE_MAX_BYTES, or 2 GB."""
    return _setting("MONOPLAN_CACHE_MAX_BYTES", DEFAULT_MAX_BYTES)


def max_weight_bytes() -> int:
    """The size cap of packed weights: MONOPLAN_CACHE_MAX_WEIGHT_BYTES, or 8 GB; 0: none are kept."""
    return _setting("MONOPLAN_CACHE_MAX_WEIGHT_BYTES", DEFAULT_MAX_WEIGHT_BYTES)


def _setting(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not re.fullmatch(r"[0-9]*", text):
        raise ArgumentError(f"{name}={text!r} is not a number of bytes")
    return int(text) if text else default


def get_or_build(key: BuildKey, build: Callable[[Path], None]) -> Entry:
    """The entry of `key`. On a miss `build(dir)` makes the binary in `dir`, where the source already lies."""
    cap = max_bytes()  # a bad setting is reported before the work, not after it
    for root in read_roots():
        entry = _lookup(root, key)
        if entry is not None:
            return entry
    entry = _build_somewhere(key, build)
    root = entry.path.parents[1]
    sweep(root)
    prune(cap, root)
    return entry


def build_privately(key: BuildKey, build: Callable[[Path], None]) -> Entry:
    """The entry of `key` in the temporary place of this process, which no other process clears."""
    root = temporary_root()
    return _lookup(root, key) or _build_in(root, key, build)


def _build_somewhere(key: BuildKey, build: Callable[[Path], None]) -> Entry:
    root, again = cache_root(), 3
    while True:
        try:
            return _build_in(root, key, build)
        except (OSError, CompileError) as error:
            if not _place_at_fault(error):
                raise
            if getattr(error, "errno", None) == errno.ESTALE and again:
                again -= 1  # somebody clears the cache: the place itself is in order
                continue
            if is_temporary(root):
                raise (no_place(error, root) if isinstance(error, OSError) else error) from None
            leave(root, getattr(error, "strerror", None) or "the compiler could not write there")
            root = temporary_root()


def _lookup(root: Path, key: BuildKey) -> Entry | None:
    path = root / "plans" / key.digest()
    if not os.path.exists(path):  # not Path.exists: that one raises where the directory may not be entered
        return None
    # Asked twice: while another process replaces the entry, one look may see half of it old, half new.
    problem = _problem(root, key) and _problem(root, key)
    if problem is None:
        with contextlib.suppress(OSError):  # a read-only cache is still a cache
            os.utime(path / "meta.sealed")  # the clock of the LRU; its content is not touched
        return _entry(path, key, hit=True)
    if os.path.exists(path):  # else another process cleared it while we read: an ordinary miss
        warn_damaged(f"entry {path} ({problem})")
        discard(path)
    return None


def _problem(root: Path, key: BuildKey) -> str | None:
    """Why the entry can't be used, or None when nobody else could write it and all its files have the recorded sums."""
    try:
        files = trusted.read_all(root, f"plans/{key.digest()}")
        meta = json.loads(trusted.unseal("meta.sealed", files.pop("meta.sealed")) or b"null")
        if meta is None:
            return "meta.sealed is damaged"
        if meta["digest"] != key.digest():
            return "meta.sealed belongs to another key"
        recorded = {name: file["sha256"] for name, file in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    actual = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    for name in sorted({*recorded, *actual, FILE_NAMES[key.language][1]}):
        if recorded.get(name) is None or recorded[name] != actual.get(name):
            return f"{name} does not have the recorded sha256"
    return None


def _build_in(root: Path, key: BuildKey, build: Callable[[Path], None]) -> Entry:
    plans = root / "plans"
    temp = plans / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        plans.mkdir(mode=0o700, parents=True, exist_ok=True)
        temp.mkdir(mode=0o700)
        _write_sources(temp, key)
        build(temp)
        if not (temp / FILE_NAMES[key.language][1]).is_file():
            raise CompileError(f"the build made no {FILE_NAMES[key.language][1]}")
        _write_meta(temp, key)
        _publish(temp, root, key)
    except (FileNotFoundError, CompileError) as error:
        if temp.exists():
            raise
        # Someone cleared the directory under the build (a host that can't see our process).
        raise OSError(errno.ESTALE, "the build directory was removed by another process") from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return _entry(plans / key.digest(), key, hit=False)


def _write_sources(temp: Path, key: BuildKey) -> None:
    for name, text in ((FILE_NAMES[key.language][0], key.source), *key.headers):
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise ArgumentError(f"header name {name!r} leaves the build directory")
        (temp / pure).parent.mkdir(parents=True, exist_ok=True)
        (temp / pure).write_text(text, "utf-8")


def _write_meta(temp: Path, key: BuildKey) -> None:
    """Writes meta.sealed, then forces everything to the disk: after the rename a crash must not tear it.

    Whatever the umask and the compiler did, nobody else may write what lies here.
    """
    paths = sorted(temp.rglob("*"))
    for path in paths:
        os.chmod(path, 0o700 if path.is_dir() or path.suffix in (".so", ".sh") else 0o600)
    parts = asdict(key)
    del parts["source"], parts["headers"]  # they lie beside it, as files
    files = {p.relative_to(temp).as_posix(): p.read_bytes() for p in paths if p.is_file()}
    meta = {
        "digest": key.digest(),
        "key": parts,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": {n: {"sha256": hashlib.sha256(d).hexdigest(), "bytes": len(d)} for n, d in files.items()},
    }
    sealed = temp / "meta.sealed"
    sealed.write_bytes(trusted.seal("meta.sealed", json.dumps(meta, indent=1).encode() + b"\n"))
    os.chmod(sealed, 0o600)
    for path in (*paths, sealed):
        if path.is_file():
            _fsync(path)


def _publish(temp: Path, root: Path, key: BuildKey) -> None:
    final = root / "plans" / key.digest()
    for _ in range(8):
        try:
            os.rename(temp, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if _problem(root, key) is None:
                return  # another process won the race; our copy is discarded by the caller
            discard(final)
        else:
            return
    raise CompileError(f"the cache entry {final} stays damaged", fix="run `monoplan cache clear`")


def _entry(path: Path, key: BuildKey, *, hit: bool) -> Entry:
    source, binary = FILE_NAMES[key.language]
    log = ""
    with contextlib.suppress(OSError):
        log = (path / "build.log").read_text("utf-8", errors="replace")
    return Entry(path, path / source, path / binary, hit, log)


def _place_at_fault(error: Exception) -> bool:
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0) in _PLACE_ERRORS
    return any(text in str(error) for text in _PLACE_TEXTS)  # the compiler ran into it, and said so


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def info() -> CacheInfo:
    """Place, number of entries and their size, the same of packed weights."""
    root = cache_root()
    sizes, weights = ([size for _, size, _ in found] for found in (entries_of(root), weights_of(root)))
    kept = (len(weights), sum(weights), max_weight_bytes())
    return CacheInfo(root, root != wanted_root(), len(sizes), sum(sizes), max_bytes(), *kept)


def clear() -> tuple[int, int]:
    """Removes every entry, fact and kept source, but no running build; returns (entries, bytes) removed."""
    root = cache_root()
    removed = [size for _, size, path in (*entries_of(root), *weights_of(root)) if discard(path)]
    sweep(root, age=0)
    remove_named(root / "facts", FACT_NAME)
    remove_named(root / "failed", FAILED_NAME)
    return len(removed), sum(removed)


def prune(limit: int | None = None, root: Path | None = None) -> tuple[int, int]:
    """Removes the longest unused entries until `limit` bytes are left; returns (entries, bytes) removed.

    Entries used in the last ten minutes stay: another process may be about to load them.
    """
    found = entries_of(cache_root() if root is None else root)
    return _prune(found, max_bytes() if limit is None else limit, time.time() - RECENT_SECONDS)


def prune_weights(limit: int | None = None, root: Path | None = None, spare: str = "") -> tuple[int, int]:
    """The same for packed weights. Who has a file mapped keeps it; `spare` is the name of one that stays."""
    found = weights_of(cache_root() if root is None else root)
    return _prune(found, max_weight_bytes() if limit is None else limit, float("inf"), spare)


def _prune(found: Iterator[tuple[float, int, Path]], limit: int, before: float, spare: str = "") -> tuple[int, int]:
    entries = sorted(found)
    total, removed = sum(size for _, size, _ in entries), []
    for used, size, path in entries:
        if total <= limit or used > before:
            break
        if path.name == spare:
            continue
        if discard(path):
            total -= size
            removed.append(size)
    return len(removed), sum(removed)


# What lies in the folder of a cache: the names that are ours, and how they are found and removed.


STALE_SECONDS = 3600  # a temporary directory this old, of a dead process, is rubbish
TEMP_NAME = re.compile(r"\.tmp-([0-9]{1,9})-[0-9a-f]+")
# What `clear` may remove: the folder of a cache may hold files of others, too. The second form of a fact is one that
# was being written; the third is what earlier versions left.
PLAN_NAME = re.compile(r"[0-9a-f]{64}")
WEIGHT_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.packed")
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


def weights_of(root: Path) -> Iterator[tuple[float, int, Path]]:
    """The same of every file of packed weights."""
    for path in sorted(p for p in (root / "weights").glob("*.packed") if WEIGHT_NAME.fullmatch(p.name)):
        with contextlib.suppress(OSError):
            status = path.lstat()
            yield status.st_mtime, status.st_size, path


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
    """Removes temporary directories and files that killed processes left."""
    for path in (*(root / "plans").glob(".tmp-*"), *(root / "weights").glob(".tmp-*")):
        found = TEMP_NAME.fullmatch(path.name)
        try:
            if found and not _alive(int(found[1])) and time.time() - path.stat().st_mtime >= age:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
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
