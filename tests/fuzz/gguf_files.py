"""GGUF files in pieces, so that a case can change one of them and the rest still fits."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np

from tests.fuzz.engine import scratch
from tests.fuzz.mutations import FLOATS, INTEGERS, TEXTS, field, integer

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass
class Pieces:
    """A file: its metadata as key and value, its tensors' descriptions, and the data behind the header."""

    pairs: list[tuple[bytes, bytes]]
    tensors: list[bytes]
    data: bytes

    def join(self, tensors: int | None = None, pairs: int | None = None) -> bytes:
        """The file; counts may be others than those of its pieces."""
        counts = [len(self.tensors) if tensors is None else tensors, len(self.pairs) if pairs is None else pairs]
        head = b"GGUF" + struct.pack("<I", 3) + b"".join(n.to_bytes(8, "little") for n in counts)
        head += b"".join(text(key) + value for key, value in self.pairs) + b"".join(self.tensors)
        return head + bytes(-len(head) % 32) + self.data


def text(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def write_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], kinds: Mapping[str, str], arch: str) -> bytes:
    """A file as the gguf library writes it."""
    with scratch() as folder:
        path = folder / "model.gguf"
        writer = gguf.GGUFWriter(path, arch)
        for key, value in metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value.tolist() if isinstance(value, np.ndarray) else value)
        for name, array in tensors.items():
            kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(path).read_bytes()


def split(data: bytes) -> Pieces:
    """The pieces of a valid file."""
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    at = 24
    found = []
    for _ in range(pairs):
        key_end = at + 8 + _number(data, at, 8)
        end = _value_end(data, key_end)
        found.append((data[at + 8 : key_end], data[key_end:end]))
        at = end
    infos = []
    for _ in range(tensors):
        end = at + 8 + _number(data, at, 8)
        end += 4 + 8 * _number(data, end, 4) + 12
        infos.append(data[at:end])
        at = end
    return Pieces(found, infos, data[at + -at % 32 :])


def _number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _value_end(data: bytes, at: int) -> int:
    kind, at = _number(data, at, 4), at + 4
    if kind != ARRAY:
        return _element_end(data, at, kind)
    kind, count, at = _number(data, at, 4), _number(data, at + 4, 8), at + 12
    for _ in range(count):
        at = _element_end(data, at, kind)
    return at


def _element_end(data: bytes, at: int, kind: int) -> int:
    return at + 8 + _number(data, at, 8) if kind == STRING else at + struct.calcsize("<" + SCALARS[kind])


def elements(value: bytes) -> tuple[int, list[bytes]] | None:
    """The type and the elements of an array, as bytes; None for any other value."""
    if _number(value, 0, 4) != ARRAY or (kind := _number(value, 4, 4)) not in (*SCALARS, STRING):
        return None
    count, at = _number(value, 8, 8), 16
    found = []
    while len(found) < count and at < len(value):  # it may have been changed before
        end = _element_end(value, at, kind)
        found.append(value[at:end])
        at = end
    return kind, found


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    size = (len(items) if count is None else count) & (2**64 - 1)
    return struct.pack("<IIQ", ARRAY, kind, size) + b"".join(items)


def element(random: Random, kind: int) -> bytes:
    """A hostile value of a type."""
    if kind == STRING:
        chosen = random.choice(TEXTS).encode("utf-8", random.choice(("surrogatepass", "replace")))
        return text(chosen if random.random() < 0.9 else random.randbytes(5))
    code = SCALARS.get(kind, "Q")
    if code in "fd":
        value = random.choice(FLOATS)
        with np.errstate(over="ignore"):
            return np.array(value, "<f8" if code == "d" else "<f4").tobytes()
    return field(random, struct.calcsize("<" + code))


def any_value(random: Random) -> bytes:
    """A value of any type, arrays of none and of many among them."""
    kind = random.choice((*SCALARS, STRING))
    choice = random.randrange(4)
    if choice == 0:
        return struct.pack("<I", kind) + element(random, kind)
    if choice == 1:
        return array(kind, [])
    if choice == 2:
        return array(kind, [element(random, kind) for _ in range(random.choice((1, 2, 3, 300)))])
    return struct.pack("<I", random.choice((ARRAY, STRING, 13, 255, 2**31))) + field(random, 4) + field(random, 8)


def change_value(random: Random, value: bytes) -> bytes:
    """Another value of its type, or of another."""
    found = elements(value)
    if random.random() < 0.25:
        return any_value(random)
    if found is None:
        kind = _number(value, 0, 4)
        return value[:4] + element(random, kind)
    kind, items = found
    at = random.randrange(len(items)) if items else 0
    choice = random.randrange(6)
    if choice == 0:
        items[at : at + 1] = []
    elif choice == 1:
        items.insert(at, items[random.randrange(len(items))] if items else b"")
    elif choice == 2 and items:
        items[at] = items[random.randrange(len(items))]
    elif choice == 3:
        return array(kind, items, integer(random))
    elif choice == 4:
        return array(random.choice((*SCALARS, STRING, ARRAY, 99)), items)
    else:
        items[at : at + 1] = [element(random, kind)]
    return array(kind, items)


def change_tensor(random: Random, info: bytes) -> bytes:
    """Another name, rank, shape, type or offset of a tensor."""
    name_end = 8 + _number(info, 0, 8)
    rank = _number(info, name_end, 4)
    name, dims, rest = info[8:name_end], info[name_end + 4 : name_end + 4 + 8 * rank], info[-12:]
    choice = random.randrange(6)
    if choice == 0:
        name = random.choice((b"", b"\xff", b"blk.0.attn_q.weight", b"rope_freqs.weight", b"blk.999999.x", name + b"x"))
    elif choice == 1:
        rank = random.choice((0, 1, 2, 3, 4, 5, 2**31, 2**32 - 1))
        dims = (dims * 4)[: 8 * min(rank, 6)]
    elif choice == 2:
        at = 8 * random.randrange(max(rank, 1))
        dims = dims[:at] + field(random, 8) + dims[at + 8 :]
    elif choice == 3:
        rank = random.randrange(5)
        dims = b"".join(
            (random.choice((0, 1, 2, 32, *INTEGERS)) & (2**64 - 1)).to_bytes(8, "little") for _ in range(rank)
        )
    elif choice == 4:
        rest = random.choice((random.randrange(45), 2**32 - 1)).to_bytes(4, "little") + rest[4:]
    else:
        rest = rest[:4] + field(random, 8)
    return text(name) + rank.to_bytes(4, "little") + dims + rest


def change(random: Random, pieces: Pieces, keys: tuple[bytes, ...] = ()) -> bytes:
    """A file with other metadata or tensors; only metadata whose keys begin with one of `keys`, if there are any."""
    pairs, tensors = list(pieces.pairs), list(pieces.tensors)
    wanted = [i for i, (key, _) in enumerate(pairs) if not keys or key.startswith(keys)]
    counts: dict[str, int] = {}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        choice = random.randrange(12)
        at = random.choice(wanted) % len(pairs)
        if choice <= 4 or keys and choice <= 9:
            pairs[at] = (pairs[at][0], change_value(random, pairs[at][1]))
        elif choice == 10:
            pairs[at] = (pairs[at][0], random.choice(pairs)[1])
        elif choice == 11:
            del pairs[at]
            wanted = [i - (i > at) for i in wanted if i != at] or [0]
            if not pairs:
                break
        elif choice == 5:
            pairs.append(
                (random.choice((*(key for key, _ in pairs), b"general.alignment", b"", b"\xff")), any_value(random))
            )
        elif choice == 6:
            counts[random.choice(("tensors", "pairs"))] = integer(random) & (2**64 - 1)
        elif choice == 7 and tensors:
            tensors.insert(0, random.choice(tensors))
        elif choice == 8 and tensors:
            del tensors[random.randrange(len(tensors))]
        elif tensors:
            index = random.randrange(len(tensors))
            tensors[index] = change_tensor(random, tensors[index])
    return Pieces(pairs, tensors, pieces.data).join(**counts)
