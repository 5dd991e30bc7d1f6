"""A tokenizer as tables for programs without Python: tokenizer.bin, which codegen/cpu/export/chat/tokenizer.h reads.

What it does with a text is taken from the tokenizers library itself: its description of each part and, by asking it,
the classes of characters that patterns mean. What the C program does not do is refused here.
"""

from __future__ import annotations

import functools
import json
import struct
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError
from monoplan.models.text.tokenizer import Tokenizer

MATCH, CLASS, SPLIT, JUMP, NOT = range(5)
NORMAL, SPECIAL, BYTE = range(3)
BYTES, WHOLE_WORDS, NFC = 1, 2, 4
MAGIC = b"monoplantokens1\n"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MARK = "\u2581"  # SentencePiece's space
_AT_ONCE = 1024  # characters that are asked for at once
_UNASSIGNED = ((0x40000, 0xE0000), (0xE1000, 0xF0000), (0xF0000, 0x110000))  # planes without, and of private use
_DIGITS = "digit"  # the class of the pre-tokenizer Digits, which is no pattern


def tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    """The contents of tokenizer.bin; an ArgumentError in words where the program in C would do something else."""
    core = tokenizer._core
    data = json.loads(core.to_str())
    model = data["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        raise _refused(f"its model is {model.get('type')}", "byte-level BPE and SentencePiece BPE are written in C")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _refused(f"it has a {key}")
    in_bytes = _is_byte_level(data)
    flags = BYTES * in_bytes | WHOLE_WORDS * bool(model.get("ignore_merges"))
    front, old, new = "", "", ""
    for step in _steps(data["normalizer"], "normalizers"):
        if step["type"] == "NFC":
            flags |= NFC
        elif step["type"] == "Prepend" and not front:
            front = step["prepend"]
        elif step["type"] == "Replace" and not old and step["pattern"].get("String"):
            old, new = step["pattern"]["String"], step["content"]
        else:
            raise _refused(f"its normalizer has a {step['type']}")
    if not in_bytes and (old, new) != (" ", _MARK):
        raise _refused("it writes spaces in another way than SentencePiece")
    classes: dict[str, int] = {}
    patterns = [_program(p, classes) for p in _patterns(data["pre_tokenizer"])]
    vocab: dict[str, int] = model["vocab"]
    count = core.get_vocab_size(with_added_tokens=True)
    names = [core.id_to_token(i) or "" for i in range(max([count, *(v + 1 for v in vocab.values())]))]
    added = _added_tokens(data, bool(data["normalizer"]))
    byte_token, kinds = _byte_tokens(vocab, in_bytes), [NORMAL] * len(names)
    if not in_bytes:
        for i in byte_token:
            kinds[i] = BYTE if i >= 0 else kinds[i]
    for token in added:
        kinds[token["id"]] = SPECIAL if token["special"] else NORMAL
    texts = [_raw(name) if in_bytes else name.encode() for name in names]
    merges = {}
    for rank, pair in enumerate(model["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        merges[vocab[left], vocab[right]] = (rank, vocab[left + right])
    unknown = model.get("unk_token")
    tables = {
        "tokens": _places(texts),
        "kinds": kinds,
        # An added token has no piece of the text: it is found before.
        "order": sorted(range(len(texts)), key=lambda i: (texts[i], i)),
        **{f"merge_{i}": column for i, column in enumerate(_columns(merges))},
    }
    ranges = _ranges(classes)
    pool, places = b"".join(texts), sum(map(len, texts))
    contents = [t["content"].encode() for t in added]
    fixed = [front.encode(), old.encode(), new.encode()]
    codes = [number for p in patterns for pair in p for number in pair]
    words: list[Iterable[int]] = [
        *tables.values(), [r[0] for r in ranges], [r[1] for r in ranges],
        _places(patterns), codes,
        [p + places for p in _places(contents)], [t["id"] for t in added],
        *(_composition() if flags & NFC else ([], [], [])), byte_token,
        [p + places + sum(map(len, contents)) for p in _places(fixed)],
    ]  # fmt: skip
    pool += b"".join(contents) + b"".join(fixed)
    pool += bytes(-len(pool) % 4)
    body = b"".join(np.array(list(w), np.int64).astype(np.uint32).tobytes() for w in words) + pool
    apart, joined, combining = (len(list(w)) for w in (words[-5], words[-4], words[-3]))
    numbers = (
        flags, len(texts), len(merges), len(ranges), len(patterns), len(codes) // 2, len(added), apart // 3,
        joined // 3, combining // 2, len(pool), vocab[unknown] if unknown in vocab else 2**32 - 1,
    )  # fmt: skip
    head = 16 + 16 + 4 * len(numbers)
    return MAGIC + struct.pack("<QQ12I", head + len(body), _sum(body), *numbers) + body


def _refused(why: str, fix: str = "") -> ArgumentError:
    return ArgumentError("the tokenizer can't be written as a C program", why=why, fix=fix)


def _is_byte_level(data: dict[str, Any]) -> bool:
    """Whether tokens are bytes; else they are SentencePiece's, and anything else is refused."""
    decoders = [d["type"] for d in _steps(data["decoder"], "decoders")]
    if decoders == ["ByteLevel"]:
        return True
    if decoders[:3] == ["Replace", "ByteFallback", "Fuse"] and decoders[3:] in ([], ["Strip"]):
        return False
    raise _refused(f"its decoder is {' '.join(decoders) or 'none'}", "ByteLevel and SentencePiece's are written in C")


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a Sequence, or the one part."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner: list[dict[str, Any]] = part.get(name) or part.get("pretokenizers") or []
    return [step for p in inner for step in _steps(p, name)]


def _patterns(part: Any) -> list[str]:
    """The regular expressions by which a text is cut, in their order."""
    found = []
    for step in _steps(part, "pretokenizers"):
        kind = step["type"]
        if kind == "Digits":
            found.append(_DIGITS if step["individual_digits"] else _DIGITS + "+")
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            found += [_GPT2] if step["use_regex"] else []
        elif kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            found.append(step["pattern"]["Regex"])
        else:
            raise _refused(f"it cuts texts by {kind} {step}"[:200])
    return found


def _added_tokens(data: dict[str, Any], normalizes: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data["added_tokens"]
    for t in found:
        if t["single_word"] or t["lstrip"] or t["rstrip"] or (t["normalized"] and normalizes):
            raise _refused(f"the added token {t['content']!r} takes more than its own text")
    return [t for t in found if t["content"]]


@functools.cache
def _byte_of() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(rest)}


def _raw(name: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; one with other characters stands for itself."""
    known = _byte_of()
    return bytes(known[c] for c in name) if all(c in known for c in name) else name.encode()


def _byte_tokens(vocab: dict[str, int], in_bytes: bool) -> list[int]:
    """The token of each byte; -1 where there is none."""
    if in_bytes:
        names = {b: c for c, b in _byte_of().items()}
        return [vocab.get(names[b], -1) for b in range(256)]
    return [vocab.get(f"<0x{b:02X}>", -1) for b in range(256)]


def _columns(merges: dict[tuple[int, int], tuple[int, int]]) -> list[list[int]]:
    rows = [(*pair, *made) for pair, made in sorted(merges.items())]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], []]


def _places(parts: Sequence[Any]) -> list[int]:
    found = [0]
    for p in parts:
        found.append(found[-1] + len(p))
    return found


def _sum(body: bytes) -> int:
    """The sum of tok_open: any one changed bit changes it."""
    words = np.frombuffer(body, "<u4").astype(np.uint64)
    return int((words * np.arange(1, 2 * len(words), 2, dtype=np.uint64)).sum())


# -- patterns: regular expressions as programs over classes ----------------------------------------------------


class _Compiler:
    """Alternatives, groups, classes and greedy quantifiers; `classes` numbers the texts of classes."""

    def __init__(self, text: str, classes: dict[str, int]) -> None:
        self.text, self.at, self.classes = text, 0, classes

    def fail(self, what: str) -> ArgumentError:
        return _refused(f"its pattern {self.text!r:.120} has {what}")

    def peek(self, *texts: str) -> str:
        return next((t for t in texts if self.text.startswith(t, self.at)), "")

    def take(self, text: str) -> None:
        if not self.text.startswith(text, self.at):
            raise self.fail(f"no {text!r} at {self.at}")
        self.at += len(text)

    def alternatives(self, fold: bool) -> list[tuple[int, int]]:
        """Code with relative targets."""
        found = [self.sequence(fold)]
        while self.peek("|"):
            self.take("|")
            found.append(self.sequence(fold))
        code = found[-1]
        for other in reversed(found[:-1]):
            code = [(SPLIT, len(other) + 2), *other, (JUMP, len(code) + 1), *code]
        return code

    def sequence(self, fold: bool) -> list[tuple[int, int]]:
        code: list[tuple[int, int]] = []
        while self.at < len(self.text) and not self.peek("|", ")"):
            code += self.quantified(self.atom(fold))
        return code

    def quantified(self, code: list[tuple[int, int]]) -> list[tuple[int, int]]:
        mark = self.peek("?", "*", "+", "{")
        if not mark:
            return code
        least, most = {"?": (0, 1), "*": (0, None), "+": (1, None)}.get(mark, (0, None))
        if mark == "{":
            end = self.text.index("}", self.at)
            low, comma, high = self.text[self.at + 1 : end].partition(",")
            least, most = int(low), (int(high) if high else None) if comma else int(low)
            self.at = end
        self.at += 1
        if self.peek("?", "+", "*"):
            raise self.fail("a quantifier that is not greedy")
        out = code * least
        if most is None:
            return [*out, (SPLIT, len(code) + 2), *code, (JUMP, -len(code) - 1)]
        rest: list[tuple[int, int]] = []
        for _ in range(most - least):
            rest = [(SPLIT, len(code) + len(rest) + 1), *code, *rest]
        return out + rest

    def atom(self, fold: bool) -> list[tuple[int, int]]:
        if kind := self.peek("(?:", "(?i:"):
            self.take(kind)
            code = self.alternatives(fold or kind == "(?i:")
            self.take(")")
            return code
        if self.peek("(?!"):
            self.take("(?!")
            number = self.number(fold)
            self.take(")")
            return [(NOT, number)]
        if self.peek("(", ".", "^", "$"):
            raise self.fail(f"{self.text[self.at : self.at + 3]!r}")
        return [(CLASS, self.number(fold))]

    def number(self, fold: bool) -> int:
        """The number of the class that stands here."""
        begin = self.at
        if self.peek("["):
            self.at += 1
            while not self.peek("]"):
                if self.at >= len(self.text):
                    raise self.fail("a class without an end")
                self.at += 2 if self.peek("\\") else 1
            self.at += 1
        elif self.peek("\\p{", "\\P{"):
            self.at = self.text.index("}", self.at) + 1
        elif self.peek("\\"):
            if self.text[self.at + 1 : self.at + 2].isalnum() and not self.peek(
                "\\s", "\\S", "\\r", "\\n", "\\t", "\\d"
            ):
                raise self.fail(f"{self.text[self.at : self.at + 2]!r}")
            self.at += 2
        else:
            self.at += 1
        text = self.text[begin : self.at]
        return self.classes.setdefault(f"(?i:{text})" if fold else text, len(self.classes))


def _program(pattern: str, classes: dict[str, int]) -> list[tuple[int, int]]:
    """The code of a pattern, with targets that count from its beginning."""
    if pattern.startswith(_DIGITS):
        number = classes.setdefault(_DIGITS, len(classes))
        more = [(SPLIT, 3), (CLASS, number), (JUMP, -2)] if pattern.endswith("+") else []
        code = [(CLASS, number), *more]
    else:
        compiler = _Compiler(pattern, classes)
        code = compiler.alternatives(fold=False)
        if compiler.at < len(pattern):
            raise compiler.fail("a bracket too many")
    if len(classes) > 32:
        raise _refused(f"its patterns have {len(classes)} classes of characters", "32 are supported")
    return [(op, i + arg if op in (SPLIT, JUMP) else arg) for i, (op, arg) in enumerate(code)] + [(MATCH, 0)]


def _ranges(classes: dict[str, int]) -> list[tuple[int, int]]:
    """First characters of ranges, and bits of the classes that their characters are in."""
    masks = np.zeros(0x110000, np.uint32)
    for text, number in classes.items():
        masks[_members(text)] |= np.uint32(1 << number)
    changes = [0, *(np.flatnonzero(np.diff(masks)) + 1).tolist()]
    return [(at, int(masks[at])) for at in changes]


@functools.lru_cache(64)
def _members(text: str) -> np.ndarray[Any, Any]:
    """The characters of a class, as the library has them."""
    from tokenizers import Regex, pre_tokenizers

    if text == _DIGITS:
        runs: Any = pre_tokenizers.Digits(individual_digits=False)
        single: Any = pre_tokenizers.Digits(individual_digits=True)
        is_member: Any = lambda c: len(single.pre_tokenize_str("a" + c)) == 2  # noqa: E731
    else:
        runs = pre_tokenizers.Split(Regex(f"(?:{text})+"), "isolated")
        single = pre_tokenizers.Split(Regex(f"(?:{text})"), "removed")
        is_member = lambda c: not single.pre_tokenize_str(c)  # noqa: E731
    found = [np.zeros(0, np.int64)]
    for first, end in _UNASSIGNED:  # all alike
        if is_member(chr(first)):
            found.append(np.arange(first, end))
    for first in range(0, 0x110000, _AT_ONCE):  # pieces are runs of the class, and what lies between two
        if not 0xD800 <= first < 0xE000 and not any(a <= first < b for a, b in _UNASSIGNED):
            every = "".join(map(chr, range(first, first + _AT_ONCE)))
            if len({unicodedata.category(c) for c in every}) == 1 and len({is_member(c) for c in every[::32]}) == 1:
                found += [np.arange(first, first + _AT_ONCE)] * is_member(every[0])  # thousands of one kind
                continue
            for piece, (begin, end) in runs.pre_tokenize_str(every):
                if is_member(piece[0]):
                    found.append(np.arange(first + begin, first + end))
    return np.concatenate(found)


@functools.cache
def _composition() -> tuple[list[int], list[int], list[int]]:
    """NFC: what characters are taken apart into, what is joined again, and the classes of marks."""
    from tokenizers import normalizers

    taken_apart, composed = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str
    apart, joined, combining = [], {}, []
    for c in (*range(0xD800), *range(0xE000, 0x110000)):
        if kind := unicodedata.combining(chr(c)):
            pair = chr(c) + "\u0334" if kind > 1 else "\u0345" + chr(c)  # marks that change places, if both are known
            combining += [c, kind] if taken_apart("a" + pair) != "a" + pair else []
        text = unicodedata.decomposition(chr(c))
        if text and not text.startswith("<") and taken_apart(chr(c)) != chr(c):  # the library may know fewer
            first, second = ([int(p, 16) for p in text.split()] + [0])[:2]
            apart += [c, first, second]
            if second and composed(chr(first) + chr(second)) == chr(c):
                joined[first, second] = c
    return apart, [n for (a, b), c in sorted(joined.items()) for n in (a, b, c)], combining


# -- conversations ---------------------------------------------------------------------------------------------


def conversation(tokenizer: Tokenizer) -> dict[str, str]:
    """What the chat template writes before, between and behind messages; raises where it does something else.

    with_system, without_system: in front of the first message; after_system; answer: behind a question that is to be
    answered; answered: behind one whose answer follows; next: behind an answer.
    """
    whole = _parts(tokenizer, ["system", *("user", "assistant") * 2, "user"])
    plain = _parts(tokenizer, [*("user", "assistant") * 2, "user"])
    found = {
        "with_system": whole[0],
        "after_system": whole[1],
        "without_system": plain[0],
        "answered": whole[2],
        "next": whole[3],
        "answer": whole[6],
    }
    for count in (1, 2, 4):
        for system in (True, False):
            talk = ["A question, {n}?", "An answer!\nIn {n} lines: 1, 2."] * count
            messages = [{"role": "system", "content": "Be brief."}] if system else []
            for n, text in enumerate(talk[:-1]):
                messages.append({"role": ("user", "assistant")[n % 2], "content": text.format(n=n)})
            if tokenizer.chat_text(messages) != written(found, messages):
                raise ArgumentError(
                    "the chat template can't be written as texts between messages",
                    why="what it writes for a conversation is not the same text around each message",
                    fix="export with chat=False, and write the prompt yourself",
                )
    return found


def written(texts: dict[str, str], messages: Sequence[dict[str, str]]) -> str:
    """A conversation of those texts, as chat.c puts it together."""
    system = messages[0]["role"] == "system"
    out = texts["with_system"] + messages[0]["content"] + texts["after_system"] if system else texts["without_system"]
    rest = messages[1:] if system else messages
    for n, message in enumerate(rest):
        behind = texts["next"] if n % 2 else texts["answer"] if n + 1 == len(rest) else texts["answered"]
        out += message["content"] + behind
    return out


def _parts(tokenizer: Tokenizer, roles: Sequence[str]) -> list[str]:
    """The texts around messages of these roles."""
    names = [f"Qx{i}z" for i in range(len(roles))]
    text = tokenizer.chat_text([{"role": r, "content": c} for r, c in zip(roles, names, strict=True)])
    places = [0, *(text.find(name) for name in names), len(text)]
    if any(text.count(name) != 1 for name in names) or any(a > b for a, b in pairwise(places)):
        raise ArgumentError("the chat template changes or repeats messages", fix="export with chat=False")
    return [text[a + (4 if i else 0) : b] for i, (a, b) in enumerate(pairwise(places))]
