"""The file of a saved plan: a table of contents, small members, and weights as kernels read them. Data only.

    0    16 bytes `monoplan-plan-1\\n`, u64 bytes of the table, 32 bytes SHA-256 of the table, 8 bytes 0
    64   the table: JSON with `about`, `members` (name: [place, bytes, SHA-256]) and `arrays` ([place, dtype, shape])
    then members, each at a multiple of 64, and `weights`, all arrays, each at a multiple of a block of 16 KB

Places count from the first block behind the table. The member `sums` has a sum for each block of the weights
(packed.py): they are compared when a file is mapped, at the speed of memory. SHA-256 is compared where a file is read.
Nothing here believes a size, a place or a name: names lead to members and never to files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from monoplan.ir.errors import LoadError, writing
from monoplan.ir.types import DTYPES, Array, aligned, as_dtype
from monoplan.runtime.cpu.block_sums import BLOCK, pieces, sums

MAGIC = b"monoplan-plan-1\n"
HEAD, LINE = 64, 64
MOST_TABLE = 64 << 20  # bytes
_CUT = "the file is cut, or was changed"


def write(path: Path, about: Mapping[str, Any], members: Mapping[str, bytes], arrays: Sequence[Array]) -> str:
    """Makes a file, whole or not at all; gives the digest of its table."""
    temporary = path.with_name(f".{path.name[:80]}.{os.getpid()}-{secrets.token_hex(4)}")
    with writing("the saved plan", path):
        try:
            with temporary.open("xb") as stream:
                digest = write_to(stream, about, members, arrays)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    return digest


def write_to(stream: BinaryIO, about: Mapping[str, Any], members: Mapping[str, bytes], arrays: Sequence[Array]) -> str:
    """The same into a stream."""
    found, whole = [], hashlib.sha256()
    for piece in pieces(arrays):
        found.append(sums(piece))
        whole.update(piece.data)
    sizes = [-(-a.nbytes // BLOCK) * BLOCK for a in arrays]
    small = {**members, "sums": b"".join(s.astype("<u8").tobytes() for s in found)}
    places, at = {}, 0
    for name, data in small.items():
        places[name] = [at, len(data), hashlib.sha256(data).hexdigest()]
        at += -(-len(data) // LINE) * LINE
    at = -(-at // BLOCK) * BLOCK
    places["weights"] = [at, sum(sizes), whole.hexdigest()]
    table = []
    for a, size in zip(arrays, sizes, strict=True):
        table.append([at, as_dtype(a.dtype).name, list(a.shape)])
        at += size
    text = json.dumps({"about": about, "members": places, "arrays": table}).encode()
    digest = hashlib.sha256(text).digest()
    stream.write(MAGIC + len(text).to_bytes(8, "little") + digest + bytes(8) + text)
    stream.write(bytes(-(HEAD + len(text)) % BLOCK))
    for data in small.values():
        stream.write(data + bytes(-len(data) % LINE))
    stream.write(bytes(-sum(-(-len(d) // LINE) * LINE for d in small.values()) % BLOCK))
    for piece in pieces(arrays):
        stream.write(piece.data)
    return digest.hex()


class PlanFile:
    """An opened file, whose table is checked."""

    def __init__(self, where: object, size: int, read: Callable[[int, int], bytes], load: Callable[[], Array]) -> None:
        """`read(place, bytes)` and `load()`, which gives all bytes, in memory that begins with a cache line."""
        self.where, self._load = where, load
        head = read(0, HEAD)
        length = int.from_bytes(head[16:24], "little")
        if len(head) < HEAD or head[:16] != MAGIC:
            raise self.refuse("it is no saved plan of this version of monoplan")
        if length > min(size - HEAD, MOST_TABLE):
            raise self.refuse(_CUT)
        text = read(HEAD, length)
        if hashlib.sha256(text).digest() != head[24:56]:
            raise self.refuse("its table does not have the digest that the file names")
        self.digest, self._begin = head[24:56].hex(), -(-(HEAD + length) // BLOCK) * BLOCK
        try:
            table = json.loads(text)
            self.about: dict[str, Any] = dict(table["about"])
            self._members = {str(n): (int(at), int(nbytes), str(d)) for n, (at, nbytes, d) in table["members"].items()}
            self._arrays = [(int(at), DTYPES[kind].numpy, _shape(shape)) for at, kind, shape in table["arrays"]]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise self.refuse(f"its table is not what it should be ({type(error).__name__})") from None
        room, end = size - self._begin, 0
        for at, nbytes, _ in self._members.values():
            if at < 0 or nbytes < 0 or at + nbytes > room:
                raise self.refuse(_CUT)
            end = max(end, -(-(at + nbytes) // LINE) * LINE)
        if end != room or not {"sums", "weights"} <= self._members.keys():
            raise self.refuse(_CUT)
        first, nbytes, _ = self._members["weights"]
        for at, kind, shape in self._arrays:
            inside = at - first
            if inside < 0 or inside % BLOCK or inside + _bytes(kind, shape) > nbytes:
                raise self.refuse("an array is not within the weights")
        if first % BLOCK or nbytes % BLOCK or self._members["sums"][1] != nbytes // BLOCK * 8:
            raise self.refuse("the weights are not whole blocks")
        self._data: Array | None = None
        self._checking: threading.Thread | None = None
        self._right = False

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mapped: bool) -> PlanFile:
        """A file on disk; mapped, or read into memory of this process, which nobody else can change or cut."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
            with os.fdopen(descriptor, "rb") as stream:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise LoadError("a saved plan is a regular file", where=path)
                size = status.st_size

                def read(at: int, count: int) -> bytes:
                    return os.pread(descriptor, count, at)

                def load() -> Array:
                    if mapped:
                        return np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ), np.uint8)
                    data = aligned((size,), np.uint8)
                    stream.seek(0)
                    if stream.readinto(data.data) != size:
                        raise LoadError("can't load the saved plan", where=path, why=_CUT)
                    return data

                made = cls(path, size, read, load)
                made._data = load()
                return made
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise LoadError("can't read the saved plan", where=path, why=why) from None

    @classmethod
    def of(cls, data: bytes) -> PlanFile:
        """A file in memory."""

        def load() -> Array:
            copy = aligned((len(data),), np.uint8)
            copy[:] = np.frombuffer(data, np.uint8)
            return copy

        return cls("bytes of a saved plan", len(data), lambda at, count: data[at : at + count], load)

    def refuse(self, why: str) -> LoadError:
        """The error for a file that can't be used."""
        return LoadError("can't load the saved plan", where=self.where, why=why, fix="save it again")

    def member(self, name: str) -> bytes:
        """The bytes of a member, which have their digest."""
        if name not in self._members:
            raise self.refuse(f"there is no {name} in it")
        data = self._bytes(name).tobytes()
        if hashlib.sha256(data).hexdigest() != self._members[name][2]:
            raise self.refuse(f"{name} does not have the digest that the table names")
        return data

    def text(self, name: str) -> str:
        """A member that is text."""
        try:
            return self.member(name).decode()
        except UnicodeDecodeError:
            raise self.refuse(f"{name} is not text") from None

    def arrays(self, *, quickly: bool) -> list[Array]:
        """The weights, read-only, checked by digests that nobody can make to fit; or quickly, by sums that find damage,
        in a thread of its own: `finish` waits for it."""
        weights = self._bytes("weights")
        weights.flags.writeable = False
        if quickly:
            wanted = np.frombuffer(self.member("sums"), "<u8")
            self._checking = threading.Thread(target=lambda: self._check(weights, wanted), name="monoplan")
            self._checking.start()
        else:
            self._right = hashlib.sha256(weights.data).hexdigest() == self._members["weights"][2]
            self.finish()
        first, found = self._members["weights"][0], []
        for at, kind, shape in self._arrays:
            found.append(weights[at - first : at - first + _bytes(kind, shape)].view(kind).reshape(shape))
        return found

    def _check(self, weights: Array, wanted: Array) -> None:
        """One call, which needs Python no more once it runs: a tokenizer is read meanwhile."""
        self._right = bool(np.array_equal(sums(weights), wanted))

    def finish(self) -> None:
        """Waits for the check of the weights; raises if they are not right."""
        if self._checking is not None:
            self._checking.join()
        if not self._right:
            raise self.refuse("the weights do not have the sums that the table names")

    def _bytes(self, name: str) -> Array:
        if self._data is None:
            self._data = self._load()
        at, nbytes, _ = self._members[name]
        return self._data[self._begin + at : self._begin + at + nbytes]


def _shape(given: Any) -> tuple[int, ...]:
    shape = tuple(given)
    if len(shape) > 64 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("no shape")
    return shape


def _bytes(kind: np.dtype[Any], shape: Sequence[int]) -> int:
    total = kind.itemsize
    for n in shape:
        total *= n
    return total
