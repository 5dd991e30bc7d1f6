"""Language models as C programs: the tokenizer's ids, the template's texts, and the tokens that Python chooses."""

from __future__ import annotations

import functools
import json
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from cffi import FFI

import monoplan as mp
from monoplan.codegen.source import HERE
from monoplan.ir.errors import ArgumentError
from monoplan.models import AutoModel, LlamaForCausalLM
from monoplan.models.generate.decoding import random_values
from monoplan.models.text.gguf_tokenizer import PRE_TOKENIZERS
from monoplan.models.text.tables import conversation, tokenizer_bytes, written
from monoplan.models.text.tokenizer import Tokenizer
from monoplan.runtime.build.compilers import find_compiler
from tests.integration.support import small_config
from tests.models.vocabularies import byte_level, pieces
from tests.monoplan.test_export import SANITIZED, built, run
from tests.needs import default_model, needs

HEADERS = HERE / "cpu" / "export" / "chat"
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
_DRIVER = r"""
#include "tokenizer.h"
static tokenizer t;
static char *memory;
const char *open_file(const char *path) { return tok_open(&t, path, &memory); }
size_t encode(const char *text, size_t count, int32_t *out, size_t room)
{
    tok_ids ids = {0};
    tok_encode(&t, text, count, &ids);
    if (ids.count && ids.count <= room) memcpy(out, ids.at, ids.count * sizeof *out);
    free(ids.at);
    return ids.count;
}
size_t decode(const int32_t *ids, size_t count, char *out, size_t room)
{
    tok_text bytes = {0}, text = {0};
    for (size_t i = 0; i < count; ++i) tok_decode(&t, ids[i], &bytes);
    utf8_lossy(&text, bytes.at, bytes.count, 0);
    if (text.count && text.count <= room) memcpy(out, text.at, text.count);
    const size_t made = text.count;
    free(bytes.at), free(text.at);
    return made;
}
"""


class InC:
    """A tokenizer as chat.c has it, in a library of its own."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        (folder / "driver.c").write_text(_DRIVER)
        (folder / "tokenizer.bin").write_bytes(tokenizer_bytes(tokenizer))
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", "-shared", "-fPIC", "-o", "driver.so"]
        done = run(folder, *find_compiler().command, *flags, "driver.c")
        assert done.returncode == 0, done.stderr
        self.ffi = FFI()
        self.ffi.cdef(
            "const char *open_file(const char *); size_t encode(const char *, size_t, int32_t *, size_t);"
            "size_t decode(const int32_t *, size_t, char *, size_t);"
        )
        self.library: Any = self.ffi.dlopen(str(folder / "driver.so"))
        problem = self.library.open_file(str(folder / "tokenizer.bin").encode())
        assert problem == self.ffi.NULL, self.ffi.string(problem)

    def encode(self, text: bytes) -> list[int]:
        out = self.ffi.new("int32_t[]", 4 * len(text) + 16)
        return list(out[0 : self.library.encode(text, len(text), out, len(out))])

    def decode(self, ids: list[int]) -> str:
        out = self.ffi.new("char[]", 1 << 16)
        given = self.ffi.new("int32_t[]", ids)
        return bytes(self.ffi.buffer(out)[0 : self.library.decode(given, len(ids), out, len(out))]).decode()


WORDS = (
    *"I'm you're he'd SHE'LL they've It's isn't 'S 'LL 'Re ''s '\u017f caf\u00e9 cafe\u0301 na\u00efve".split(),
    *"A\u030angstrom 12 123 1234567 3.14 1,000,000 \u0663\u0664 \u00bd \u00b2 \u2167 \u4e00\u4e8c\u4e09".split(),
    *"\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab \u0440\u0443\u0441\u0441\u043a\u0438\u0439".split(),
    *"\u00c5ngstr\u00f6m".split(),
    *"\u05e2\u05d1\u05e8 \u0627\u0644\u0639\u0631 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17".split(),
    *"\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \u2603\ufe0f \U0001d54f".split(),
    *"\U00010400 \ufffd \ufeff".split(),
    *'#include <stdio.h> int main(){return 0;} foo_bar->baz[10] += ~x&&y||!z; "quoted" (brackets) {braces}'.split(),
    *"$5 50% a@b.c http://example.com/?q=1&r=2 ... --- === *** \u2026 \u2014 \u201cquotes\u201d \u00a1Hola!".split(),
    *"\u00bfQu\u00e9? ab abc a b c bc <|end|> <|start|>user <s> </s>".split(),
)
SPACES = (
    *(" ", "  ", "   ", "\n", "\n\n", " \n ", "\t", "\t\t ", "\r\n", "\r", "\u00a0", "\u3000", "\u2003\u2003"),
    *("\x0b", "\u0085", ""),
)


@functools.cache
def corpus() -> tuple[str, ...]:
    random = Random(1)
    texts = [
        "",
        " ",
        "   ",
        "\n",
        "a",
        *WORDS,
        " ".join(WORDS),
        "\n".join(WORDS),
        "x" * 3000,
        " " * 300,
        "\n" * 200,
        "7" * 100,
    ]
    for _ in range(400):
        texts.append("".join(random.choice(WORDS) + random.choice(SPACES) for _ in range(random.randrange(1, 12))))
    for _ in range(150):  # any characters
        points = [
            random.choice((random.randrange(0x250), random.randrange(0x3000), random.randrange(0x110000)))
            for _ in range(30)
        ]
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
    return tuple(texts)


@functools.cache
def merges() -> tuple[str, ...]:
    """Pairs that go across every border of words: a cut at another place gives other tokens."""
    from tokenizers import Tokenizer as Core
    from tokenizers import models, pre_tokenizers, trainers

    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=1200, show_progress=False))
    found = [m if isinstance(m, str) else " ".join(m) for m in json.loads(core.to_str())["model"]["merges"]]
    made = {m.replace(" ", ""): m for m in reversed(found) if "<|" not in m.replace(" ", "")}
    return tuple(m for m in found if made.get(m.replace(" ", "")) == m)


def assert_equal(tokenizer: Tokenizer, folder: Path, decodes: bool = True) -> None:
    in_c = InC(tokenizer, folder)
    for text in corpus():
        want = tokenizer.encode(text, add_special_tokens=False)
        assert in_c.encode(text.encode()) == want, ascii(text)
        if decodes and want:
            assert in_c.decode(want) == tokenizer.decode(want), ascii(text)


QUICK = ("smollm", "llama-bpe", "qwen2")
SLOW = {str(cut): pre for pre, cut in PRE_TOKENIZERS.items() if pre not in QUICK}  # one of those that are the same


@pytest.mark.parametrize("pre", [*QUICK, *(pytest.param(p, marks=pytest.mark.full) for p in SLOW.values())])
def test_byte_level_tokenizers(pre: str, tmp_path: Path) -> None:
    assert_equal(Tokenizer.from_gguf(byte_level(pre, merges())), tmp_path)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces(prefix: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(pieces(**{"ggml.add_space_prefix": prefix}))
    assert_equal(tokenizer, tmp_path, decodes=False)
    in_c = InC(tokenizer, tmp_path)
    ids = tokenizer.encode("ab c \u00e9\u65e5!", add_special_tokens=False)
    assert in_c.decode(ids).lstrip(" ") == tokenizer.decode(ids).lstrip(" ")


def test_bytes_that_are_no_text_become_replacement_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level("gpt-2", ("a b", "Ġ a")))
    in_c, random = InC(tokenizer, tmp_path), Random(2)
    cases = [
        b"\xff",
        b"a\xc3",
        b"\xe2\x82",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xc0\x80",
        b"ab\x80\x80 c",
        b"\xf0\x9f\x98",
        b"\x00a",
    ]
    cases += [
        bytes(random.choice((random.randrange(256), 0xE2, 0x82, 0xF0, 97)) for _ in range(12)) for _ in range(300)
    ]
    for data in cases:
        want = tokenizer.encode(data.decode("utf-8", "replace"), add_special_tokens=False)
        assert in_c.encode(data) == want, data


def test_composed_characters_are_those_of_unicode(tmp_path: Path) -> None:
    """Every character that is taken apart, and marks in any order."""
    tokenizer = Tokenizer.from_gguf(byte_level("qwen2"))
    in_c, random = InC(tokenizer, tmp_path), Random(3)
    changed = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.decomposition(chr(c))]
    marks = [chr(c) for c in range(0x300, 0x370)]
    for _ in range(300):
        text = "".join(random.choice(changed) + "".join(random.choices(marks, k=random.randrange(3))) for _ in range(8))
        text = unicodedata.normalize("NFD", text) if random.random() < 0.5 else text
        assert in_c.encode(text.encode()) == tokenizer.encode(text, add_special_tokens=False), ascii(text)


@needs("model")
def test_the_default_tokenizer(tmp_path: Path) -> None:
    path = default_model()
    assert path is not None
    assert_equal(AutoModel.from_pretrained(path).tokenizer, tmp_path)


def test_what_the_program_can_not_do_is_refused() -> None:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Core

    def changed(change: Callable[[Any], None]) -> Tokenizer:
        made = Tokenizer.from_gguf(byte_level())
        change(made._core)
        return made

    cases: dict[str, Callable[[Any], None]] = {
        "normalizer has a Lowercase": lambda c: setattr(c, "normalizer", normalizers.Lowercase()),
        "cuts texts by Whitespace": lambda c: setattr(c, "pre_tokenizer", pre_tokenizers.Whitespace()),
        "quantifier that is not greedy": lambda c: setattr(
            c, "pre_tokenizer", pre_tokenizers.Split(Regex("a+?"), "isolated")
        ),
        "its decoder is WordPiece": lambda c: setattr(c, "decoder", decoders.WordPiece()),
        "its model is WordLevel": lambda c: setattr(c, "model", models.WordLevel({"a": 0}, "a")),
    }
    for message, change in cases.items():
        with pytest.raises(ArgumentError) as caught:
            tokenizer_bytes(changed(change))
        assert message in caught.value.why
    assert Core


def chatting(template: str, **more: Any) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level("gpt-2", ("a b",), chat_template=template, **more))


def test_templates_are_texts_between_messages_or_refused() -> None:
    texts = conversation(chatting(TEMPLATE))
    assert texts["next"] == "<|end|>\n<|start|>user\n" and texts["answer"] == "<|end|>\n<|start|>assistant\n"
    inst = (
        "{% if messages[0]['role'] == 'system' %}{% set s = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m['role'] == 'user' %}{{ '[INST] ' + (s if loop.first else '') }}"
        "{{ m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
    )
    tokenizer = chatting(inst)
    texts = conversation(tokenizer)
    talk = [{"role": r, "content": c} for r, c in (("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V"))]
    assert (
        written(texts, talk) == tokenizer.chat_text(talk) == "[INST] <<SYS>>S<</SYS>>U [/INST] A </s>[INST] V [/INST]"
    )
    for template, message in (
        ("{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}", "can't be written as texts"),
        ("{{ messages[-1]['content'] }}", "changes or repeats"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "changes or repeats"),
    ):
        with pytest.raises(ArgumentError, match=message):
            conversation(chatting(template))


# -- the program -----------------------------------------------------------------------------------------------------


@functools.cache
def small() -> Any:
    made = byte_level("gpt-2", ("a b", "Ġ a", "h e", "l l", "he ll"), chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_gguf(made)
    size = len(made["tokenizer.ggml.tokens"])
    model = LlamaForCausalLM.from_config(small_config(2, vocab_size=size, max_position_embeddings=256), seed=3)
    model.set_tokenizer(tokenizer)
    return mp.compile(model, options={"threads": 2, "prefill_chunk": 40})


def ids_of(folder: Path, *arguments: str, text: str = "") -> list[int]:
    command = ["./chat", "-t", "2", "-i", *arguments, "weights.bin", "tokenizer.bin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, input=text.encode(), timeout=280)
    assert done.returncode == 0, done.stderr.decode()
    return [int(n) for n in done.stdout.split()]


def test_the_program_chooses_the_tokens_of_python(tmp_path: Path) -> None:
    lm = small()
    lm.export(tmp_path)
    built(tmp_path)
    prompt = "hello ab a " * 9  # in several parts
    assert ids_of(tmp_path, "-n", "48", "-c", prompt) == lm.generate_ids(lm.tokenizer.encode(prompt), 48)
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 7}
    flags = ["-T", "0.8", "-k", "40", "-p", "0.95", "-m", "0.01", "-r", "1.2", "-s", "7"]
    assert ids_of(tmp_path, "-n", "48", *flags, "-c", prompt) == lm.generate_ids(
        lm.tokenizer.encode(prompt), 48, **settings
    )
    assert len(ids_of(tmp_path, "-n", "-1", "-c", "a")) <= lm.max_length
    refused = run(tmp_path, "./chat", "-c", "", "weights.bin", "tokenizer.bin")
    assert refused.returncode == 1 and "the prompt is empty" in refused.stderr
    data = bytearray((tmp_path / "tokenizer.bin").read_bytes())
    for at, message in ((3, "is no file of a tokenizer"), (2000, "is damaged")):
        (tmp_path / "bad.bin").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        done = run(tmp_path, "./chat", "-c", "a", "weights.bin", "bad.bin")
        assert done.returncode == 1 and message in done.stderr
    (tmp_path / "bad.bin").write_bytes(data[:-9])
    assert "is cut" in run(tmp_path, "./chat", "-c", "a", "weights.bin", "bad.bin").stderr


def test_a_conversation_goes_on_as_in_python(tmp_path: Path) -> None:
    from monoplan.models.generate.generation import Session

    lm = small()
    lm.export(tmp_path)
    built(tmp_path, "-O1 -Wall -Wextra -Werror")
    lines = ["hello", "ab ab", "a <|end|> b"]
    messages: list[dict[str, str]] = [{"role": "system", "content": "be\u00e9"}]
    expected: list[int] = []
    session = Session()
    for line in lines:
        messages.append({"role": "user", "content": line})
        stream = lm.generate(lm.tokenizer.chat(messages), 6, session=session)
        text = "".join(stream)
        expected += stream.result.ids
        messages.append({"role": "assistant", "content": text})
    assert ids_of(tmp_path, "-n", "6", "-S", "be\u00e9", text="\n".join([lines[0], "", *lines[1:]]) + "\n") == expected


@needs("gcc")
@pytest.mark.full
def test_the_program_under_sanitizers(tmp_path: Path) -> None:
    lm = small()
    lm.export(tmp_path, isa="generic")
    built(tmp_path, SANITIZED, CC="gcc", OPENMP="", PROGRAMS="chat")
    prompt = "a <|end|> b\u00e9 " * 4
    flags = ["-n", "5", "-T", "0.8", "-r", "1.2"]
    expected = lm.generate_ids(lm.tokenizer.encode(prompt), 5, temperature=0.8, repetition_penalty=1.2)
    assert ids_of(tmp_path, *flags, "-c", prompt) == expected
    assert len(ids_of(tmp_path, "-n", "3", text="hello\n\xff ab\n")) <= 6


def test_random_numbers_are_those_of_numpy() -> None:
    """The constants of chat.c, in Python: the program itself is compared where it samples."""
    source = (HEADERS / "chat.c").read_text()
    assert "0xD2E7470EE14C6C93" in source and random_values(5, 0, 3, 2).dtype == np.float32


def test_models_without_a_tokenizer_or_with_another_have_no_program(tmp_path: Path) -> None:
    lm = mp.compile(LlamaForCausalLM.from_config(small_config(1), seed=0))
    lm.export(tmp_path / "a")
    assert not (tmp_path / "a" / "chat.c").exists()
    model = LlamaForCausalLM.from_config(small_config(1, vocab_size=300), seed=0)
    model.set_tokenizer(chatting("{{ messages[-1]['content'] }}"))
    lm = mp.compile(model)
    with pytest.raises(ArgumentError, match="changes or repeats") as caught:
        lm.export(tmp_path / "b")
    assert "chat=False" in caught.value.fix
    lm.export(tmp_path / "b", chat=False)


@needs("model")
@pytest.mark.full
def test_the_default_model_answers_the_same_64_tokens(tmp_path: Path) -> None:
    path = default_model()
    assert path is not None
    lm = mp.compile(AutoModel.from_pretrained(path), options={"threads": 2})
    lm.export(tmp_path)
    built(tmp_path)
    question = "Tell me a story about a dog who learns to swim."
    chat = lm.tokenizer.chat([{"role": "user", "content": question}])
    expected = lm.generate_ids(chat, 64)
    assert len(expected) == 64 and ids_of(tmp_path, "-n", "64", text=question + "\n") == expected
    assert (tmp_path / "chat").stat().st_size < 1_000_000
