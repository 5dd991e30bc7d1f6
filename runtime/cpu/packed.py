"""Packed weights on disk: a plan whose weights were packed before maps them, reads no checkpoint and packs nothing.

    <root>/weights/<what>-<from>.packed

`what` is the digest of the plan, of the code that packs and of the names of the tensors; `from` that of the bytes of
the files that they come from. A file's digest is worked out once and kept as a fact under the file's signature (inode,
size, times), which changes when anybody writes to it.

A file has the arrays, each from the start of a block on, and behind them a sealed trailer (trusted.py): where each
array lies, and a sum for each block. All sums are compared before the arrays are used, which is quick: the first token
reads these bytes anyway. The mapping is private and read-only, and processes share its memory. A file is never written
again once it has its name; who removes it takes nothing from those who have it mapped.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from monoplan.codegen.formats import Array, ParamUse
from monoplan.ir.errors import LoadError
from monoplan.ir.graph import Graph, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import as_dtype
from monoplan.runtime.build import cache, cache_places, facts, trusted
from monoplan.runtime.cpu.block_sums import BLOCK, blocks_are_right, pieces, sums
from monoplan.runtime.cpu.weights import Progress, Source, prepare
from monoplan.runtime.warn import context_of_caller

FORMAT = "packed-1"
_TAIL = 20  # the last bytes: the length of the trailer, as text


class File(Protocol):
    """A file of weights, as models/load/weight_file.py has it."""

    @property
    def signature(self) -> str | None: ...

    def digest(self) -> str: ...


@dataclass(frozen=True)
class Keeping:
    """How the packed weights of a plan are kept: under a key that stands for graph, layouts and the code that packs."""

    key: str
    limit: int  # bytes of packed weights in the cache


def kept_or_packed(
    graph: Graph, uses: Sequence[ParamUse], source: Source, keeping: Keeping | None, progress: Progress | None = None
) -> tuple[list[Array], bool, Callable[[], None]]:
    """The plan's params as `prepare` makes them, and whether nothing was packed for it.

    What was packed is written to the cache by a thread, which the third result begins: later than the compilers, for
    which it would leave less of the machine.
    """
    entry = None if keeping is None or keeping.limit == 0 else _entry_of(graph, uses, source, keeping)
    if keeping is None or entry is None:
        return prepare(graph, uses, source, progress), False, lambda: None
    arrays = entry.recall()
    found = arrays is not None
    # The rest comes from no file: tables that the configuration gives. They are small.
    rest = [i for i in range(len(uses)) if not found or i not in entry.places]
    made = dict(zip(rest, prepare(graph, [uses[i] for i in rest], source, progress), strict=True))
    if arrays is not None:
        made |= dict(zip(entry.places, arrays, strict=True))
        return [made[i] for i in range(len(uses))], True, lambda: None
    begin = functools.partial(_begin_writing, entry, [made[i] for i in entry.places], keeping.limit)
    return [made[i] for i in range(len(uses))], False, begin


_writers: set[threading.Thread] = set()


def _begin_writing(entry: Entry, arrays: Sequence[Array], limit: int) -> None:
    context = context_of_caller()

    def write() -> None:
        if sys.platform == "linux":  # threads have priorities of their own: compilers and the first prompt go first
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            context.run(entry.keep, arrays, limit)
        finally:
            _writers.discard(thread)

    thread = threading.Thread(target=write, name="monoplan")  # no daemon: the interpreter's end waits for it
    _writers.add(thread)
    thread.start()


def wait_written() -> None:
    """Waits until all that this process packed is on disk."""
    for thread in tuple(_writers):
        thread.join()


@dataclass(frozen=True)
class Entry:
    """Params of a plan that come from files: their places among all, and the entry's name as far as it is known."""

    places: tuple[int, ...]
    what: str
    files: tuple[File, ...]

    def recall(self) -> list[Array] | None:
        """The arrays, mapped, if they are in the cache."""
        roots = [root for root in cache_places.read_roots() if any((root / "weights").glob(f"{self.what}-*.packed"))]
        name = self._name() if roots else None  # a large file is not read for nothing
        for root in roots if name is not None else ():
            with contextlib.suppress(FileNotFoundError, trusted.Untrusted):
                arrays = _mapped(root, f"weights/{name}")
                if arrays is not None and len(arrays) == len(self.places):
                    with contextlib.suppress(OSError):
                        os.utime(root / "weights" / str(name))  # the clock of the LRU
                    return arrays
                cache_places.warn_damaged(f"file {root / 'weights' / str(name)}")
                cache.discard(root / "weights" / str(name))
        return None

    def keep(self, arrays: Sequence[Array], limit: int) -> None:
        """Writes the arrays; failing to is no error, but is mentioned once."""
        total = sum(-(-a.nbytes // BLOCK) * BLOCK for a in arrays)
        if total > limit:
            return
        try:
            name, root = self._name(), cache_places.cache_root()
            if name is None or cache_places.is_temporary(root):
                return
            (root / "weights").mkdir(mode=0o700, exist_ok=True)
            room = os.statvfs(root / "weights")
            if room.f_bavail * room.f_frsize < total:
                raise OSError("there is no room on the disk")
            with trusted.replacing(root, f"weights/{name}") as stream:
                _write(stream, f"weights/{name}", arrays)
            cache.prune_weights(limit, root, spare=name)
        except LoadError:
            pass  # the file was written to since it was opened: its name is not known
        except OSError as error:
            reason = error.strerror or str(error)
            cache_places.warn_once("weights", f"packed weights are not kept for later processes ({reason})")

    def _name(self) -> str | None:
        digests = []
        for file in self.files:
            if (signature := file.signature) is None:
                return None
            fact = facts.recall("file", signature)
            if fact is None:
                fact = {"digest": file.digest()}
                facts.remember("file", signature, fact)
            digests.append(str(fact["digest"]))
        return f"{self.what}-{_digest(*digests)[:32]}.packed"


def _entry_of(graph: Graph, uses: Sequence[ParamUse], source: Source, keeping: Keeping) -> Entry | None:
    """What can be kept of the params; None if nothing can."""
    origins = {p.value: source.origin(p.path) for p in graph.params}
    made = {r: op for op in graph.setup for r in op.results}
    leaves: dict[Value, tuple[Value, ...]] = {}

    def reached(value: Value) -> tuple[Value, ...]:
        if value not in leaves:
            op = made.get(value)
            leaves[value] = (value,) if op is None else tuple(x for v in op.reads for x in reached(v))
        return leaves[value]

    places = tuple(i for i, u in enumerate(uses) if all(origins[v] is not None for v in reached(u.value)))
    used = {v: origins[v] for i in places for v in reached(uses[i].value)}
    files = tuple(dict.fromkeys(o.file for o in used.values()))
    if not files:
        return None
    names = [f"{files.index(o.file)} {o.name}" for o in used.values()]
    return Entry(places, _digest(FORMAT, keeping.key, _code(), repr(places), *names)[:32], files)


@functools.cache
def _code() -> str:
    """The digest of what packs: the code here, and where blocks of GGUF files are decoded."""
    import importlib.util

    here = Path(__file__).resolve().parent
    paths = [here / "weights.py", here / "packing.c"]
    found = importlib.util.find_spec("gguf")
    if found is not None and found.origin is not None:
        paths.append(Path(found.origin).parent / "quants.py")
    return _digest(*(p.read_text("utf-8") for p in paths if p.exists()))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


# The file: arrays, trailer, length of the trailer.


def _write(stream: Any, name: str, arrays: Sequence[Array]) -> None:
    table, found, at = [], [], 0
    for a in arrays:
        table.append([at, a.dtype.name, list(a.shape)])
        for piece in pieces([a]):
            stream.write(piece.data)
            found.append(sums(piece))
            at += len(piece)
    head = json.dumps({"bytes": at, "arrays": table}).encode()
    trailer = trusted.seal(name, head + b"\n" + np.concatenate(found).astype("<u8").tobytes())
    stream.write(trailer + f"{len(trailer):{_TAIL}d}".encode())


def _mapped(root: Path, name: str) -> list[Array] | None:
    """The arrays of a file; None if it is damaged."""
    descriptor = trusted.open_file(root, name)
    try:
        size = os.fstat(descriptor).st_size
        if size <= _TAIL:
            return None
        memory = mmap.mmap(descriptor, size, mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0), mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with contextlib.suppress(ValueError):
        length = int(memory[size - _TAIL :])
        body = trusted.unseal(name, memory[max(0, size - _TAIL - length) : size - _TAIL])
        if body is None or length < 0:
            return None
        head, _, recorded = body.partition(b"\n")
        described: Mapping[str, Any] = json.loads(head)
        raw = np.frombuffer(memory, np.uint8)
        data, wanted = raw[: described["bytes"]], np.frombuffer(recorded, "<u8")
        if size != len(data) + length + _TAIL or not blocks_are_right(data, wanted):
            return None
        found = []
        for at, dtype, shape in described["arrays"]:
            kind = as_dtype(dtype).numpy
            nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            found.append(data[at : at + nbytes].view(kind).reshape(shape))
        return found
    return None
