"""A file of weights: read by position into memory of the reader's own, never mapped.

A mapped file is shared with whoever writes to it: a weight would change under a plan, and a file that is cut would end
the process by SIGBUS. What is read here is a copy, and a file that is not what it was is an error.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.ir.errors import LoadError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, Part, aligned

_BLOCK = 4 << 20  # bytes read at a time where a part is scattered over its tensor
SETTLED = 2.0  # seconds after a change in which another one may leave the file's times as they are


class WeightFile:
    """An open file. The descriptor stays open: if the path gets another file meanwhile, this one is read all the same.

    A change in place is noticed by size and modification time, which are compared after each read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, -1
        try:
            # Without O_NONBLOCK opening a named pipe would wait for somebody who writes to it.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(self._descriptor)
        except OSError as error:
            raise LoadError(f"can't read {path.name}", where=path, why=error.strerror or str(error)) from None
        if not stat.S_ISREG(found.st_mode):
            raise LoadError(f"can't read {path.name}", where=path, why="it is not a regular file")
        self.size, self._modified = found.st_size, found.st_mtime_ns
        age = time.time() - max(found.st_mtime, found.st_ctime)
        self._status = _status(found) if age > SETTLED else None

    @property
    def signature(self) -> str | None:
        """What a file has as long as nobody writes to it; None for one that was written to a moment ago.

        The time of the last change of status can't be set by hand.
        """
        return None if self._status is None else json.dumps(self._status)

    def digest(self) -> str:
        """The digest of all of its bytes, which are still those of the time when it was opened."""
        found, block = hashlib.blake2b(digest_size=32), np.empty(min(_BLOCK, max(self.size, 1)), np.uint8)
        for begin in range(0, self.size, len(block)):
            piece = block[: self.size - begin]
            self._fill(piece, begin, "all of it")
            found.update(memoryview(piece))  # type: ignore[arg-type]
        self._check("all of it")
        if self._status is not None and _status(os.fstat(self._descriptor)) != self._status:
            raise self._changed("all of it", "it was written to since it was opened")
        return found.hexdigest()

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightFile:
        return self  # nothing about it ever changes

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, (self.path, self.size, self._modified)

    def read(self, begin: int, nbytes: int, what: str) -> Array:
        """Return a copy of these bytes; `what` names them in an error."""
        data = aligned((nbytes,), np.uint8)
        self._fill(data, begin, what)
        self._check(what)
        return data

    def tensor(self, begin: int, dtype: np.dtype[Any], shape: tuple[int, ...], what: str, part: Part | None) -> Array:
        """Return a copy of a dense tensor, or of a part of it: of a part only its own bytes are held."""
        if part is None:
            return self.read(begin, dtype.itemsize * math.prod(shape), what).view(dtype).reshape(shape)
        outer, inner = math.prod(shape[: part.axis]), math.prod(shape[part.axis + 1 :]) * dtype.itemsize
        skipped, wanted, row = part.start * inner, part.length * inner, shape[part.axis] * inner
        data = aligned((outer, wanted), np.uint8)
        if outer == 1:
            self._fill(data[0], begin + skipped, what)
        else:
            step = max(1, _BLOCK // max(row, 1))
            for first in range(0, outer, step):
                block = np.empty((min(step, outer - first), row), np.uint8)
                self._fill(block.reshape(-1), begin + first * row, what)
                data[first : first + step] = block[:, skipped : skipped + wanted]
        self._check(what)
        return data.reshape(-1).view(dtype).reshape(part.of(shape))

    def _fill(self, data: Array, begin: int, what: str) -> None:
        """Read until `data` is full: the system gives at most 2 GB at a time."""
        view, done = memoryview(data), 0  # type: ignore[arg-type]
        try:
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], begin + done)
                if count == 0:
                    raise self._changed(what, f"{len(view)} bytes were expected at byte {begin}, {done} were found")
                done += count
        except OSError as error:
            why = f"{what}: {error.strerror or error}"
            raise LoadError(f"can't read {self.path.name}", where=self.path, why=why) from None

    def _check(self, what: str) -> None:
        found = os.fstat(self._descriptor)
        if found.st_size != self.size:
            raise self._changed(what, f"it had {self.size} bytes when it was opened and has {found.st_size}")
        if found.st_mtime_ns != self._modified:
            raise self._changed(what, "it was written to since it was opened")

    def _changed(self, what: str, why: str) -> LoadError:
        return LoadError(
            f"{self.path.name} changed while it was being loaded",
            where=self.path,
            why=f"{what}: {why}",
            fix="load the model again when nobody writes to the file; replace a file by renaming a new one onto it",
        )


def _status(found: os.stat_result) -> list[int]:
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


@dataclass(frozen=True)
class Origin:
    """Where a weight comes from: `name` says which numbers of the file it is, and what was done to them since."""

    name: str
    file: WeightFile


def _open_again(path: Path, size: int, modified: int) -> WeightFile:
    """The file in another process; it must still be the one whose header was read."""
    file = WeightFile(path)
    if (file.size, file._modified) != (size, modified):
        raise file._changed("its header", "it is not the file that was opened first")
    return file


@cache
def code_of(file: str) -> str:
    """What a source file of ours is called in names of what it makes: other code may make something else."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
