"""Hugging Face weight files: one `model.safetensors` or several shards with an index.

The headers are read and checked when a checkpoint is opened, each tensor when it is read: a copy of its own, see
weight_file.py.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from monoplan.ir.errors import LoadError, writing
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, DType, Part
from monoplan.models.load.config_json import read_json
from monoplan.models.load.weight_file import Origin, WeightFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(np.bool_),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
FLOATS = frozenset(DTYPES[kind] for kind in ("F64", "F32", "F16", "BF16"))  # what weights may be


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies."""

    file: WeightFile
    begin: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of one or more safetensors files; nothing is read from the disk before it is used."""

    def __init__(self, path: Path, entries: Mapping[str, _Entry]) -> None:
        self.path = path
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the numpy dtype of a tensor; bfloat16 is the one of ml_dtypes."""
        return self._entry(name).dtype

    def tensor(self, name: str, part: Part | None = None) -> Array:
        """Return a copy of a tensor, or of a part of it, read now."""
        entry = self._entry(name)
        return entry.file.tensor(entry.begin, entry.dtype, entry.shape, f"tensor {name!r}", part)

    def origin(self, name: str) -> Origin:
        """Return where a tensor comes from."""
        return Origin(name, self._entry(name).file)

    def low_bit(self, name: str) -> DType | None:
        """No tensor of these files has blocks."""
        return None

    def blocks(self, name: str, part: Part | None = None) -> Array:
        raise LoadError(f"tensor {name!r} has no blocks", where=self.path)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise LoadError(f"there is no tensor {name!r}", where=self.path)
        return self._entries[name]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the weights of a Hugging Face directory (or one safetensors file) and check every header."""
    path = Path(path)
    if path.is_file():
        return Checkpoint(path, _read_header(path))
    if (path / SINGLE).is_file():
        return Checkpoint(path, _read_header(path / SINGLE))
    if (path / INDEX).is_file():
        return Checkpoint(path, _read_shards(path))
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(files) == 1:
        return Checkpoint(path, _read_header(files[0]))
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise LoadError(f"several safetensors files and no {INDEX}", where=path, why=f"found {names}")
    pickles = sorted([*path.glob("*.bin"), *path.glob("*.pth"), *path.glob("*.pt")])
    if pickles:
        raise LoadError(
            f"{pickles[0].name} is a pickle file, which may run any code when it is loaded",
            where=path,
            fix="convert the checkpoint to safetensors: model.save_pretrained(..., safe_serialization=True)",
        )
    raise LoadError("no safetensors file", where=path, fix=f"provide {SINGLE} or {INDEX} with its shards")


def _read_shards(directory: Path) -> dict[str, _Entry]:
    path = directory / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError("the index has no weight_map", where=path)
    shards: dict[str, dict[str, _Entry]] = {}
    for shard in sorted({str(value) for value in weight_map.values()}):
        # The index comes with the download: it may not point outside the directory.
        long = len(shard.encode("utf-8", "replace")) > 255  # no file system has such names
        if shard in ("", ".", "..") or long or any(mark in shard for mark in "/\\\0:"):
            raise LoadError(f"the index names {shard!r:.80}, which is not a plain file name", where=path)
        if not (directory / shard).is_file():
            raise LoadError(f"the shard {shard} is missing", where=directory, fix="download it again")
        shards[shard] = _read_header(directory / shard)
    lost = [name for name, shard in weight_map.items() if name not in shards[str(shard)]]
    if lost:
        first = f"{lost[0]!r} is not in {weight_map[lost[0]]}"
        raise LoadError(f"{len(lost)} tensors of the index are not in their shards", where=path, why=first)
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _read_header(path: Path) -> dict[str, _Entry]:
    """Read the header of one file and find each tensor's place: together they are all of the file, without a gap."""
    file = WeightFile(path)
    try:
        length = int.from_bytes(file.read(0, min(8, file.size), "the header").tobytes(), "little")
        start = 8 + length
        if file.size < 8 or start > file.size or length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes does not fit")
        header = json.loads(file.read(8, length, "the header").tobytes(), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: _entry(name, info, file, start) for name, info in header.items()}
        end = start
        for name, (begin, nbytes) in sorted(
            ((name, (entry.begin, entry.dtype.itemsize * math.prod(entry.shape))) for name, entry in entries.items()),
            key=lambda item: item[1],
        ):
            if begin != end:
                raise ValueError(f"tensor {name!r} begins at byte {begin}, and not at {end} where the last one ends")
            end += nbytes
        if end != file.size:
            raise ValueError(f"the tensors end at byte {end}")
        return entries
    except LoadError as error:
        raise LoadError(error.what, where=path, why=error.why, fix=error.fix) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{error} ({file.size} bytes)"
        raise LoadError(f"{path.name} is damaged", where=path, why=why, fix="download it again") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the header has a name twice")
    return found


def _entry(name: str, info: Mapping[str, Any], file: WeightFile, start: int) -> _Entry:
    kind, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(kind, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has no dtype, shape and offsets")
    if not all(type(number) is int and number >= 0 for number in (*shape, *offsets)):
        raise ValueError(f"tensor {name!r} has sizes that are no whole numbers")
    if kind not in DTYPES:
        raise LoadError(f"tensor {name!r} has the dtype {kind:.40}", fix=f"supported: {', '.join(DTYPES)}")
    if offsets[1] - offsets[0] != DTYPES[kind].itemsize * math.prod(shape):
        raise ValueError(f"tensor {name!r} has wrong offsets")
    return _Entry(file, start + offsets[0], DTYPES[kind], tuple(shape))


def save_checkpoint(
    directory: str | Path,
    state: Mapping[str, Array],
    config: Mapping[str, Any] | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write weights (and config.json) as transformers does; a reader sees the old files or the new ones.

    Tensors are grouped into shards of at most `max_shard_bytes` (a larger tensor has one to itself).
    """
    directory = Path(directory)
    for name, array in state.items():
        if np.dtype(array.dtype).newbyteorder("=") not in DTYPES.values():
            raise LoadError(f"can't save tensor {name!r} of dtype {array.dtype}", where=directory)
    with writing("the model", directory):
        directory.mkdir(parents=True, exist_ok=True)
        _save_shards(directory, state, config, _split(state, max_shard_bytes))


def _save_shards(
    directory: Path, state: Mapping[str, Array], config: Mapping[str, Any] | None, shards: list[list[str]]
) -> None:
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as folder:
        for name, shard in zip(names, shards, strict=True):
            _write(Path(folder) / name, {key: state[key] for key in shard})
        if len(shards) > 1:
            total = sum(array.nbytes for array in state.values())
            weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            _write_json(Path(folder) / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
            names.append(INDEX)
        if config is not None:
            _write_json(Path(folder) / "config.json", config)
            names.append("config.json")
        for name in names:
            os.replace(Path(folder) / name, directory / name)
    # An earlier save with another number of shards must not be found beside or before this one.
    for old in [directory / SINGLE, directory / INDEX, *directory.glob("model-?????-of-?????.safetensors")]:
        if old.name not in names:
            old.unlink(missing_ok=True)


def _split(state: Mapping[str, Array], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, array in state.items():
        if shards[-1] and used + array.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += array.nbytes
    return shards


def _write(path: Path, tensors: Mapping[str, Array]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # The library takes the memory as it lies, so it must be dense, in row order and little-endian.
    dense = {name: array.astype(array.dtype.newbyteorder("<"), "C", copy=False) for name, array in tensors.items()}
    try:
        save_file(dense, str(path), metadata={"format": "pt"})
    except SafetensorError as error:  # the library's word for a full disk
        raise OSError(str(error)) from None


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
