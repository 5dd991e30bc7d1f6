"""Where the cache is: MONOPLAN_CACHE_DIR, the user's cache directory, or a temporary one of this process.

A place is used only if nobody else can write there (see trusted.py): what lies in it is loaded as machine code.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from dataclasses import field
from pathlib import Path

from monoplan.ir.errors import CompileError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.runtime.build import trusted
from monoplan.runtime.warn import warn


@dataclass(slots=True)
class _State:
    """What this process learned about its places; module-level because the disk is shared by all callers."""

    unusable: set[Path] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
    temporary: dict[int, Path] = field(default_factory=dict)  # by process id: a forked child makes its own
    lock: threading.Lock = field(default_factory=threading.Lock)


_state = _State()
_NO_HOME = Path("~/.cache/monoplan")  # what a home directory that is not known leaves as it is


def cache_root() -> Path:
    """Where to write: MONOPLAN_CACHE_DIR, else the user's cache directory, else a private temporary one."""
    wanted = wanted_root()
    if wanted not in _state.unusable:
        reason = _obstacle(wanted)
        if reason is None:
            return wanted
        leave(wanted, reason)
    return temporary_root()


def _obstacle(wanted: Path) -> str | None:
    """Why nothing can be kept in a place, or None; the place is made if it is not there."""
    if not wanted.is_absolute():
        return "there is no home directory"
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = trusted.objection(wanted)
        if reason is not None:
            return f"{reason}: what lies there could be somebody else's code"
        # The folder inside is tried too: /proc and its like say "writable" and then refuse.
        (wanted / "plans").mkdir(mode=0o700, exist_ok=True)
        return None if os.access(wanted / "plans", os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        return error.strerror or str(error)


def wanted_root() -> Path:
    """MONOPLAN_CACHE_DIR, or the user's cache directory, usable or not; a relative path if there is no home."""
    setting = os.environ.get("MONOPLAN_CACHE_DIR", "").strip()
    if setting:
        found = os.path.expanduser(setting)
        return Path(found) if found.startswith("~") else trusted.resolved(Path(os.path.abspath(found)))
    import platformdirs  # here, so that importing this module costs nothing

    try:
        found = platformdirs.user_cache_dir("monoplan", appauthor=False)
    except RuntimeError:  # neither HOME nor an entry of the user
        return _NO_HOME
    return trusted.resolved(Path(found)) if os.path.isabs(found) else _NO_HOME


def read_roots() -> tuple[Path, ...]:
    """Where a hit may be: the wanted root, even when it is read-only, and this process's temporary root."""
    wanted = wanted_root()
    readable = wanted.is_absolute() and trusted.objection(wanted) is None
    return (*([wanted] if readable else ()), *_state.temporary.values())


def leave(root: Path, reason: str) -> None:
    """Uses another place from now on, and says so."""
    _state.unusable.add(root)
    warn_once("place", f"cache directory {root} can't be used ({reason}); using a temporary one")


def warn_once(topic: str, text: str) -> None:
    """A RuntimeWarning, given once per process and topic."""
    with _state.lock:
        if topic in _state.warned:
            return
        _state.warned.add(topic)
    warn(text)


def warn_damaged(what: str) -> None:
    """Says once that the cache had damage; it is mended without a question."""
    warn_once("damage", f"damaged cache {what}: made anew")


def is_temporary(root: Path) -> bool:
    """Whether a place goes with this process."""
    return root in _state.temporary.values()


def temporary_root() -> Path:
    """The place of this process, made when it is first needed."""
    with _state.lock:
        pid = os.getpid()
        if pid not in _state.temporary:
            try:
                made = private_directory(None)
                (made / "plans").mkdir(mode=0o700)
            except OSError as error:
                raise no_place(error, None) from error
            _state.temporary[pid] = made
        return _state.temporary[pid]


def no_place(error: OSError, root: Path | None) -> CompileError:
    """The error of who can write nowhere."""
    what = f"there is no place to build a plan: neither {wanted_root()} nor a temporary directory"
    fix = "make room there, or set MONOPLAN_CACHE_DIR (or TMPDIR) to a directory that can be written"
    return CompileError(what, where=root, why=error.strerror or str(error), fix=fix)


def private_directory(base: str | None) -> Path:
    """A directory of mode 0700 that this process removes when it exits (its forked children do not).

    It is not made where somebody else could rename it and put another in its place.
    """
    base = os.path.realpath(base or tempfile.gettempdir())
    reason = trusted.objection(Path(base), shared=True)
    if reason is not None:
        raise trusted.Untrusted(reason)
    path = Path(tempfile.mkdtemp(prefix="monoplan-", dir=base))
    atexit.register(_remove_own, path, os.getpid())
    return path


def _remove_own(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
