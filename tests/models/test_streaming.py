"""Text in whole characters from ids that come one by one, the same as decoding them at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from monoplan.models.text.tokenizer import Tokenizer
from tests.models.vocabularies import byte_level, pieces


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode one by one and check that no piece has half a character in it."""
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in ids]
    assert not any("\ufffd" in part for part in parts)
    return "".join(parts) + stream.finish()


TEXTS = ["plain words", "naïve café", "日本語のテキスト", "🙂🚀👨‍👩‍👧‍👦 and 🇫🇷", "a\ufffdb", "\n\n  spaces \t", ""]


@pytest.mark.parametrize("make", [byte_level, pieces])
@pytest.mark.parametrize("text", TEXTS)
def test_streaming_gives_the_same_text_in_whole_characters(make: Any, text: str) -> None:
    tokenizer = Tokenizer.from_gguf(make())
    ids = tokenizer.encode(text)
    if "\ufffd" in text:
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == text
    else:
        assert streamed(tokenizer, ids) == text


def test_streaming_waits_for_the_last_byte() -> None:
    for tokenizer in (
        Tokenizer.from_gguf(byte_level()),
        Tokenizer.from_gguf(pieces(**{"ggml.add_space_prefix": False})),
    ):
        stream = tokenizer.stream()
        ids = tokenizer.encode("a€€", add_special_tokens=False)
        assert [stream.push(token) for token in ids] == ["a", "", "", "€", "", "", "€"]
        # A text that ends inside a character: the rest comes as a replacement, once.
        stream = tokenizer.stream()
        assert [stream.push(token) for token in ids[:2]] == ["a", ""]
        assert stream.finish() == "\ufffd" and stream.finish() == ""


def test_streaming_bytes_that_never_become_a_character() -> None:
    for make in (byte_level, pieces):
        tokenizer = Tokenizer.from_gguf(make())
        lead, letter = tokenizer.encode("é€", add_special_tokens=False)[-3], tokenizer.encode("a", False)[-1]
        for ids in ([lead] * 9 + [letter], [lead] * 5, [letter, lead, lead, letter]):
            stream = tokenizer.stream()
            parts = [stream.push(token) for token in ids]
            assert "".join(parts) + stream.finish() == tokenizer.decode(ids)
        stream = tokenizer.stream()
        assert any(stream.push(lead) for _ in range(9)), "it must not be held back for ever"


def test_streaming_random_ids_equals_decoding_them_at_once() -> None:
    random = np.random.default_rng(6)
    tokenizer = Tokenizer.from_gguf(byte_level("gpt-2", ("Ã ©", "â Ĥ", "Ġ a")))
    for _ in range(200):
        ids = random.integers(0, tokenizer.vocab_size, random.integers(1, 30)).tolist()
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_streaming_after_a_prompt_keeps_the_space() -> None:
    tokenizer = Tokenizer.from_gguf(pieces())
    prompt, rest = tokenizer.encode("abc"), tokenizer.encode("abc")[1:]
    after = tokenizer.stream(prompt)
    assert "".join(map(after.push, rest)) + after.finish() == " abc"
    alone = tokenizer.stream()
    assert "".join(map(alone.push, rest)) + alone.finish() == "abc"
    between = tokenizer.stream()  # a control token has no text, but what follows is no beginning
    assert "".join(map(between.push, [*rest, 2, *rest])) == "abc abc"


def only_bytes() -> Tokenizer:
    """A vocabulary of the 256 bytes: one that is not part of a character spoils all bytes beside it."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    core = Core(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(core)


def after(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of ids that come one by one after a prompt."""
    stream = tokenizer.stream(prompt)
    return "".join(map(stream.push, ids)) + stream.finish()


def test_streaming_after_a_prompt_of_bytes() -> None:
    tokenizer, random = only_bytes(), np.random.default_rng(7)
    ids = tokenizer.encode

    assert after(tokenizer, ids("😀€й😀"), ids("\nñ ok")) == "\nñ ok"
    for _ in range(200):
        prompt, answer = ("".join(random.choice(list("a ñй€語😀"), random.integers(1, 9))) for _ in range(2))
        assert after(tokenizer, ids(prompt), ids(answer)) == tokenizer.decode(ids(answer)) == answer
    # Bytes in front of the window that make no character are no reason to spoil what is in it.
    assert after(tokenizer, [1 + 0x80] * 20 + ids("€"), ids("€")) == "€"


@pytest.mark.parametrize("make", [only_bytes, lambda: Tokenizer.from_gguf(byte_level())], ids=["bytes", "byte_level"])
def test_a_character_that_the_prompt_only_begins_is_part_of_the_answer(make: Any) -> None:
    tokenizer = make()
    ids = tokenizer.encode("a€😀b")
    for cut in (4, 5, 6, 7):
        assert after(tokenizer, ids[:cut], ids[cut:]) == "😀b"
    assert after(tokenizer, ids[:8], ids[8:]) == "b"
    ids = tokenizer.encode("a\ufffdb")  # a whole character, though it looks like half a one
    assert after(tokenizer, ids[:-1], ids[-1:]) == "b"
