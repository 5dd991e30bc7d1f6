"""Where the cache lies: the place that was asked for, the user's own, or a temporary one that goes with the process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from monoplan.ir.errors import CompileError
from monoplan.runtime.warn import warn


@dataclass(slots=True)
class _State:
    """What this process learned about its places; module-level because the disk is shared by all callers."""

    unusable: set[Path] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
    temporary: dict[int, Path] = field(default_factory=dict)  # by process id: a forked child makes its own
    lock: threading.Lock = field(default_factory=threading.Lock)


_state = _State()


def cache_root() -> Path:
    """Where to write: MONOPLAN_CACHE_DIR, else the user's cache directory, else a private temporary one."""
    wanted = wanted_root()
    if wanted not in _state.unusable:
        try:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The folder inside is tried too: /proc and its like say "writable" and then refuse.
            (wanted / "plans").mkdir(mode=0o700, exist_ok=True)
            if os.access(wanted / "plans", os.W_OK | os.X_OK):
                return wanted
            leave(wanted, "it is not writable")
        except OSError as error:
            leave(wanted, error.strerror or str(error))
    return temporary_root()


def wanted_root() -> Path:
    """The place that was asked for, or the user's own, whether it can be used or not."""
    setting = os.environ.get("MONOPLAN_CACHE_DIR", "").strip()
    if setting:
        return Path(os.path.abspath(os.path.expanduser(setting)))
    import platformdirs  # here, so that importing this module costs nothing

    return Path(platformdirs.user_cache_dir("monoplan", appauthor=False))


def read_roots() -> tuple[Path, ...]:
    """Where a hit may be: the wanted root even when it is read-only, and this process's temporary root."""
    return (wanted_root(), *_state.temporary.values())


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
                (made / "plans").mkdir()
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
    """A directory of mode 0700 that this process removes when it exits (its forked children do not)."""
    path = Path(tempfile.mkdtemp(prefix="monoplan-", dir=base))
    atexit.register(_remove_own, path, os.getpid())
    return path


def _remove_own(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
