"""Files of the cache that may be believed: nobody else can have written them, and their digest is right.

A directory is trusted if only this user and the system can change it or any directory above it. That is checked by
descriptors, component by component, and no link is followed; after that its path can be used as it is, because nobody
else can put something in its place. A file is trusted if it is a regular file of the same owners that nobody else can
write. A sealed file begins with a line that holds the digest of its name and its body.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

MAGIC = b"monoplan-1 "  # the version of the sealed form
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ANCESTOR = _DIRECTORY | getattr(os, "O_PATH", 0)  # a directory above may be closed to readers
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a planted pipe must not block


class Untrusted(OSError):
    """Somebody else could have written this."""


def resolved(path: Path) -> Path:
    """The path without links. They are followed here, once; what they lead to is what gets checked."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def opened(directory: Path, *, shared: bool = False) -> Iterator[int]:
    """A descriptor of a trusted directory; Untrusted if others can change what is there.

    `shared`: others may add names of their own to it, as in /tmp, but can't rename or remove ours.
    """
    parts = directory.parts
    fd = os.open(parts[0], _ANCESTOR)
    try:
        _check_ancestor(os.fstat(fd), parts[0])
        for i, part in enumerate(parts[1:], 2):
            last = i == len(parts)
            inner = os.open(part, _DIRECTORY if last else _ANCESTOR, dir_fd=fd)
            os.close(fd)
            fd = inner
            check = _check if last and not shared else _check_ancestor
            check(os.fstat(fd), str(Path(*parts[:i])))
        yield fd
    finally:
        os.close(fd)


def objection(directory: Path, *, shared: bool = False) -> str | None:
    """Why a directory can't be trusted; None if it can, or can't be opened at all."""
    try:
        with opened(directory, shared=shared):
            return None
    except Untrusted as error:
        return str(error)
    except OSError:
        return None


def open_file(root: Path, name: str) -> int:
    """A descriptor of a trusted file at a relative path; OSError where there is none, Untrusted where others can
    write."""
    with opened(root) as fd:
        return _open_at(fd, root, PurePosixPath(name))


def read(root: Path, name: str) -> bytes:
    """The bytes of such a file."""
    with os.fdopen(open_file(root, name), "rb") as stream:
        return stream.read()


def read_all(root: Path, folder: str) -> dict[str, bytes]:
    """All files below a folder of a trusted directory, by their relative paths."""
    found: dict[str, bytes] = {}
    with opened(root / folder) as fd:
        _collect(fd, root / folder, PurePosixPath(), found)
    return found


def _collect(fd: int, at: Path, below: PurePosixPath, found: dict[str, bytes]) -> None:
    for name in sorted(os.listdir(fd)):
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            inner = os.open(name, _DIRECTORY, dir_fd=fd)
            try:
                _check(os.fstat(inner), str(at / name))
                _collect(inner, at / name, below / name, found)
            finally:
                os.close(inner)
        else:
            with os.fdopen(_open_at(fd, at, PurePosixPath(name)), "rb") as stream:
                found[(below / name).as_posix()] = stream.read()


def _open_at(fd: int, root: Path, path: PurePosixPath) -> int:
    here, close = fd, False
    try:
        for i, part in enumerate(path.parts[:-1], 1):
            inner = os.open(part, _DIRECTORY, dir_fd=here)
            if close:
                os.close(here)
            here, close = inner, True
            _check(os.fstat(here), str(root.joinpath(*path.parts[:i])))
        file = os.open(path.name, _FILE, dir_fd=here)
    finally:
        if close:
            os.close(here)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted(f"{root / path} is not a regular file")
        _check(status, str(root / path))
    except BaseException:
        os.close(file)
        raise
    return file


def seal(name: str, body: bytes) -> bytes:
    """A file's contents with the digest in front."""
    return MAGIC + _digest(name, body) + b"\n" + body


def unseal(name: str, data: bytes) -> bytes | None:
    """The body of a sealed file; None if it is damaged, or belongs under another name."""
    head, _, body = data.partition(b"\n")
    return body if head == MAGIC + _digest(name, body) else None


def _digest(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass") + b"\0" + body).hexdigest().encode()


@contextlib.contextmanager
def replacing(root: Path, name: str) -> Iterator[BinaryIO]:
    """A stream whose bytes become the file at a relative path when the block ends; nothing, if it fails."""
    path = PurePosixPath(name)
    folder = root / path.parent
    folder.mkdir(mode=0o700, exist_ok=True)
    with opened(folder) as fd:
        temporary = f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=fd), "wb") as stream:
                yield stream
            os.rename(temporary, path.name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=fd)
            raise


def _check_ancestor(status: os.stat_result, path: str) -> None:
    """Others may add names to a directory above only if they can't rename ours (the sticky bit of /tmp)."""
    _check_owner(status, path)
    if not status.st_mode & stat.S_ISVTX:
        _check_mode(status, path)


def _check(status: os.stat_result, path: str) -> None:
    _check_owner(status, path)
    _check_mode(status, path)


def _check_owner(status: os.stat_result, path: str) -> None:
    if status.st_uid not in _owners():
        raise Untrusted(f"{path} belongs to user {status.st_uid}")


def _check_mode(status: os.stat_result, path: str) -> None:
    group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    if status.st_mode & stat.S_IWOTH or group:
        who = "everybody" if status.st_mode & stat.S_IWOTH else f"group {status.st_gid}"
        raise Untrusted(f"{path} can be written by {who}")


def _owners() -> set[int]:
    """This user, the administrator, and the owner of the root directory (who can change everything anyway): inside of
    a container the administrator may have another number."""
    return {os.geteuid(), 0, _root_owner()}


@functools.cache
def _root_owner() -> int:
    return os.stat("/").st_uid


@functools.cache
def _is_private_group(gid: int) -> bool:
    """Whether a group has no member but this user: many systems make such groups, and files that they can write."""
    try:
        import grp
        import pwd

        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except (ImportError, KeyError):
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
