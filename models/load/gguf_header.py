"""The header of a GGUF file, read with a check at every step, and the tensors that it describes.

`gguf.GGUFReader` trusts the counts in the file and needs seconds for a vocabulary. The block formats of the weights are
the library's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoplan.ir.arrays import Part
from monoplan.ir.errors import LoadError
from monoplan.models.load.safetensors import DTYPES
from monoplan.models.load.weight_file import WeightFile

Array = NDArray[Any]

FLOATS = {kind: DTYPES[kind] for kind in ("F32", "F16", "BF16")}
CHUNK = 1 << 18  # values dequantized at a time: small enough to stay in the CPU's cache
FIRST_READ = 16 << 20  # bytes: more than the header of most files, vocabulary and all
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: its block format, its shape (row-major), and where its bytes are."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: WeightFile
    begin: int
    nbytes: int

    def values(self, part: Part | None = None) -> Array:
        """Return a copy of the numbers, or of a part of them: in the stored type if that is of floats, else float32."""
        what = f"tensor {self.name!r}"
        if self.kind in FLOATS:
            return self.file.tensor(self.begin, FLOATS[self.kind], self.shape, what, part)
        if part is None:
            return dequantized(self.kind, self.shape, self.file.read(self.begin, self.nbytes, what))
        if part.axis == 0 and len(self.shape) > 1:  # rows are made of whole blocks
            row = self.nbytes // self.shape[0]
            raw = self.file.read(self.begin + part.start * row, part.length * row, what)
            return dequantized(self.kind, part.of(self.shape), raw)
        return np.ascontiguousarray(part.cut(self.values()))


def dequantized(kind: str, shape: tuple[int, ...], raw: Array) -> Array:
    """Return the numbers, in float32, that the blocks of a format stand for."""
    import gguf

    codec = getattr(gguf.quants, kind)
    codec.init_grid()
    blocks = raw.reshape(-1, codec.type_size)
    out = np.empty((len(blocks), codec.block_size), np.float32)
    step = max(1, CHUNK // codec.block_size)
    # Damaged scales may overflow to infinity; that is seen in the numbers and needs no warning as well.
    with np.errstate(all="ignore"):
        for begin in range(0, len(blocks), step):
            out[begin : begin + step] = codec.dequantize_blocks(blocks[begin : begin + step])
    return out.reshape(shape)


class _MoreNeeded(Exception):  # noqa: N818  (no error: more of the file is read)
    """The header goes on beyond what was read of the file."""


class Header:
    """The header of a GGUF file; every length is checked against the file before it is used."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, WeightFile(path)
        self.size, count = self.file.size, FIRST_READ
        while True:
            self.bytes = memoryview(self.file.read(0, min(count, self.size), "the header"))  # type: ignore[arg-type]
            try:
                self._parse()
                break
            except _MoreNeeded:
                count *= 4
        self.bytes = memoryview(b"")  # it may be large, and all that was in it has been taken

    def _parse(self) -> None:
        if bytes(self.bytes[:4]) != b"GGUF":
            raise self.damaged("it does not begin with GGUF")
        self.position = 4
        version = self.number("I")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            raise self.damaged("it is big-endian" if swapped else f"format version {version} is unknown")
        tensors, pairs = self.number("Q"), self.number("Q")
        # The smallest pair has 13 bytes and the smallest tensor 24: a larger count can only be damage.
        if tensors * 24 + pairs * 13 > self.size:
            raise self.damaged(f"{tensors} tensors and {pairs} metadata entries can't fit into the file")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.string()
            if key in self.metadata:
                raise self.damaged(f"the key {key!r} is there twice")
            self.metadata[key] = self.value(self.number("I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.damaged(f"the alignment {alignment!r} is not a power of two")
        start = -(-self.position // alignment) * alignment
        self.tensors: dict[str, StoredTensor] = {}
        for name, kind, shape, offset in infos:
            if name in self.tensors:
                raise self.damaged(f"the tensor {name!r} is there twice")
            self.tensors[name] = self._tensor(name, kind, shape, start + offset)

    def damaged(self, why: str) -> LoadError:
        fix = "provide a GGUF file of version 2 or 3, or download it again"
        return LoadError(f"{self.path.name} is not a usable GGUF file", where=self.path, why=why, fix=fix)

    def take(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        begin = self.position
        if begin + count > len(self.bytes):
            if begin + count <= self.size:
                raise _MoreNeeded
            raise self.damaged(f"it ends inside its header: {count} bytes wanted at byte {begin}")
        self.position += count
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.bytes, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"a metadata entry has the unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
            begin = self.take(count * dtype.itemsize)
            return np.frombuffer(self.bytes, dtype, count, begin).copy()
        if kind != _STRING:
            raise self.damaged(f"a metadata array has the unsupported type {kind}")
        if count * 8 > self.size:
            raise self.damaged(f"an array of {count} strings can't fit into the file")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """Read strings in a plain loop, since a vocabulary has 100 000 of them."""
        texts, data, position, size = [], self.bytes, self.position, len(self.bytes)
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                end = position + 8 + length_at(data, position)[0]
                if end > size:
                    break
                texts.append(str(data[position + 8 : end], "utf-8"))
                position = end
        except (struct.error, UnicodeDecodeError):
            pass
        if len(texts) < count:
            if size < self.size and (position + 8 > size or position + 8 + length_at(data, position)[0] > size):
                raise _MoreNeeded
            raise self.damaged(f"the text at byte {position} is longer than the file or not UTF-8")
        self.position = position
        return texts

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name, rank = self.string(), self.number("I")
        if not 1 <= rank <= 4:
            raise self.damaged(f"the tensor {name!r} has {rank} dimensions, not 1 to 4")
        shape = tuple(reversed([self.number("Q") for _ in range(rank)]))
        if 0 in shape:  # whatever its other sizes are: they would be checked against nothing
            raise self.damaged(f"the tensor {name!r} has no elements: its shape is {list(shape)}")
        return name, self.number("I"), shape, self.number("Q")

    def _tensor(self, name: str, number: int, shape: tuple[int, ...], begin: int) -> StoredTensor:
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(number)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.damaged(f"the tensor {name!r} has the unknown type {number}") from None
        if kind.name not in FLOATS and not hasattr(getattr(gguf.quants, kind.name, None), "dequantize_blocks"):
            raise LoadError(f"tensor {name!r} has the unsupported type {kind.name}", where=self.path)
        count = 1
        for length in shape:
            count *= length
        nbytes = count // block * size
        if count % block or (shape and shape[-1] % block):
            raise self.damaged(f"a row of the tensor {name!r} is not made of whole {kind.name} blocks")
        if begin + nbytes > self.size:
            raise self.damaged(f"the tensor {name!r} ends at byte {begin + nbytes}, the file at {self.size}")
        return StoredTensor(name, kind.name, shape, self.file, begin, nbytes)
