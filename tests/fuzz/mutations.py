"""Damage: to bytes, to values of JSON, to text made of words."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

INTEGERS = (
    0, 1, 2, 3, 7, 8, 31, 32, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -1, -2, -(2**31), -(2**63), -(2**64),
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1e-320, 1e-45, 1e38, 1e39, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", "a", "\0", "\ud800", "a\udfffb", "é", "\U0001f600", "..", "../x", "/etc/passwd", "a/b", "%s%n",
    "{{ 7*7 }}",
    "nan", "inf", "0", "-1", "9" * 5000, "x" * 70000, "\n", "*/", "\u2581", "<0x00>", "<0xZZ>", "(", "[",
    "(a+)+$", "\\",
)  # fmt: skip
_RAW = "\0raw\0"  # in a string: the rest of it is written as it stands
_AGAIN = "\0again\0"  # before a key: it is written a second time
# JSON that json.dumps would not write.
RAW = (
    "1e400", "-1e400", "NaN", "9" * 5000, "-" + "9" * 5000, "[" * 5000, "[" * 100_000 + "]" * 100_000,
    '{"a":' * 2000 + "1" + "}" * 2000, "[[[[[[1]]]]]]", "01", "'a'", "\\ud800", '"\\ud800"', '"\\u0000"', "tru", "",
    "1.5e-400", '"' + "a" * 100_000 + '"', "[" + "0," * 3000 + "0]", "{}", "{,}", "// no",
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, False, *INTEGERS, *FLOATS, *TEXTS, [], {}, [[]], [[1]], [None], ["a"], [1, [2]], {"a": 1}, {"a": {}},
    [1, 2, 3], [1.5], [{}], {"": ""}, ["\ud800"],
)  # fmt: skip


def integer(random: Random) -> int:
    return random.choice(INTEGERS) if random.random() < 0.8 else random.getrandbits(random.choice((8, 16, 40, 64)))


def field(random: Random, size: int) -> bytes:
    """A number of `size` bytes, as they are in headers."""
    return (integer(random) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


def damage(random: Random, data: bytes, within: int | None = None) -> bytes:
    """Some bytes changed, moved, lost or added, in the first `within` of them."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        most = max(1, min(len(out), within or len(out)))
        at = random.randrange(most)
        end = min(len(out), at + random.choice((1, 2, 4, 8, 16, 64, 300)))
        kind = random.randrange(8)
        if kind <= 1 and out:
            out[at % len(out)] ^= 1 << random.randrange(8)
        elif kind == 2:
            out[at:end] = random.randbytes(end - at)
        elif kind == 3:
            size = random.choice((1, 2, 4, 8))
            out[at : at + size] = field(random, size)
        elif kind == 4:
            del out[at:end]
        elif kind == 5:
            out[at:at] = out[at:end] * random.choice((1, 1, 2, 50))
        elif kind == 6:
            other = random.randrange(most)
            out[at:end] = out[other : other + end - at]
        else:
            del out[at:]
    return bytes(out)


def _nodes(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: a container and a key of it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _nodes(inner, found)
    return found


def change_json(random: Random, value: Any, hostile: Sequence[Any] = HOSTILE) -> Any:
    """A JSON value with some of its parts replaced, exchanged, removed, moved or written twice; it may be changed."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = _nodes(value, [])
        if not places:
            return value
        holder, key = random.choice(places)
        kind = random.randrange(10)
        if kind <= 3:
            holder[key] = copy.deepcopy(random.choice(hostile))
        elif kind == 4:
            holder[key] = _RAW + random.choice(RAW)
        elif kind == 5:
            other, its = random.choice(places)
            holder[key] = copy.deepcopy(other[its])
        elif kind == 6:
            del holder[key]
        elif kind == 7 and isinstance(holder, dict):
            holder[_AGAIN + key] = copy.deepcopy(random.choice(hostile))
        elif kind == 8 and isinstance(holder, dict):
            holder[random.choice((key + "x", "", "\ud800", key.upper(), "rope_type", "a"))] = holder.pop(key)
        elif kind == 9:
            holder[key] = [holder[key]] if random.random() < 0.5 else {"a": holder[key]}
        else:
            holder[key] = copy.deepcopy(random.choice(hostile))
    return value


_MARK = re.compile(r'"\\u0000raw\\u0000((?:[^"\\]|\\.)*)"')


def dump_json(value: Any) -> bytes:
    """The text of a changed JSON value, with what is no JSON in it."""
    text = json.dumps(value)
    if "\\u0000" in text:
        text = _MARK.sub(lambda m: json.loads(f'"{m[1]}"'), text).replace("\\u0000again\\u0000", "")
    return text.encode("utf-8", "surrogatepass")


def mutate_json(random: Random, data: bytes) -> bytes:
    """A JSON file with changed values, and sometimes changed bytes."""
    if random.random() < 0.15:
        return damage(random, data)
    out = dump_json(change_json(random, json.loads(data)))
    return damage(random, out) if random.random() < 0.05 else out


_WORD = re.compile(r'"(?:[^"\\\n]|\\.)*"|\w+|\s+|[^\w\s]')


def mutate_text(random: Random, text: str, words: Sequence[str]) -> str:
    """Text with words replaced, exchanged, removed or repeated, lines moved, brackets nested."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        if random.random() < 0.2:
            lines = text.split("\n")
            at = random.randrange(len(lines))
            change: Callable[[], object] = random.choice(
                (
                    lambda: lines.pop(at),  # noqa: B023
                    lambda: lines.insert(at, random.choice(lines)),  # noqa: B023
                    lambda: lines.append(lines.pop(at)),  # noqa: B023
                )
            )
            change()
            text = "\n".join(lines)
            continue
        parts = _WORD.findall(text)
        if not parts:
            return text
        at = random.randrange(len(parts))
        kind = random.randrange(9)
        if kind <= 1:
            parts[at] = random.choice(words)
        elif kind >= 7:  # everywhere: a graph whose sizes or names are others may still be whole
            old, new = parts[at], random.choice((*words, *parts, str(random.choice(INTEGERS))))
            parts = [new if part == old else part for part in parts]
        elif kind == 2:
            parts[at] = random.choice(parts)
        elif kind == 3:
            del parts[at]
        elif kind == 4:
            parts.insert(at, random.choice(parts))
        elif kind == 5:
            number = str(random.choice((*INTEGERS, *FLOATS)))
            numbers = [i for i, part in enumerate(parts) if part[0].isdigit()]
            parts[random.choice(numbers) if numbers else at] = number
        else:
            parts[at] = parts[at] * random.choice((2, 3, 300))
        text = "".join(parts)
    return text
