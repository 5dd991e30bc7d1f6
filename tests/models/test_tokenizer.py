"""Tokenizers from tokenizer.json and GGUF metadata: ids, one BOS, chats."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.models.load.gguf import open_gguf
from monoplan.models.text.tokenizer import Tokenizer
from tests.models.vocabularies import ALPHABET, byte_level, pieces
from tests.needs import default_model, needs

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2" / "tokenizer.json"
CHATML = (
    "{% for message in messages %}\n"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def spelled(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token(token) for token in tokenizer.encode(text, add_special_tokens=False)]


@needs("model")
def test_smollm2_as_recorded() -> None:
    golden = json.loads(GOLDEN.read_text())
    path = default_model()
    assert path is not None and path.name == golden["model"]
    checkpoint = open_gguf(path)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata, vocab_size=checkpoint.config.vocab_size)
    for case in golden["strings"]:
        ids = tokenizer.encode(case["text"])
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["text"]
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)
    for case in golden["chats"]:
        assert tokenizer.chat_text(case["messages"], case["add_generation_prompt"]) == case["text"]
        assert tokenizer.chat(case["messages"], case["add_generation_prompt"]) == case["ids"]
    assert tokenizer.eos_ids == {0, 2} and not tokenizer.add_bos


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", "Ġ", "12", "34", "5"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "5"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["a", "Ġ", "12", "3", "4", "5"]),
        ("tekken", ["a", "Ġ", "1", "2", "3", "4", "5"]),
        ("default", ["a", "Ġ", "12", "3", "4", "5"]),
    ],
)
def test_each_pre_tokenizer_cuts_numbers_its_own_way(pre: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre, ("1 2", "3 4")))
    assert spelled(tokenizer, "a 12345") == expected


def test_pre_tokenizers_differ_in_more_than_numbers() -> None:
    merges = (". Ċ", "' S")
    assert spelled(Tokenizer.from_gguf(byte_level("llama-bpe", merges)), "a.\n'S") == ["a", ".Ċ", "'S"]
    assert spelled(Tokenizer.from_gguf(byte_level("gpt-2", merges)), "a.\n'S") == ["a", ".", "Ċ", "'", "S"]
    # Qwen composes characters first; the others take the bytes as they come.
    assert (
        Tokenizer.from_gguf(byte_level("qwen2")).decode(Tokenizer.from_gguf(byte_level("qwen2")).encode("e\u0301"))
        == "\u00e9"
    )


def test_llama3_takes_whole_words_of_the_vocabulary_before_any_merge() -> None:
    metadata = byte_level("llama-bpe", ("h e",))
    metadata["tokenizer.ggml.tokens"].append("hello")
    metadata["tokenizer.ggml.token_type"] = np.array([3, 3] + [1] * (len(metadata["tokenizer.ggml.tokens"]) - 2))
    assert spelled(Tokenizer.from_gguf(metadata), "hello") == ["hello"]
    assert spelled(Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}), "hello") == ["he", "l", "l", "o"]


def test_sentence_pieces_join_by_score() -> None:
    tokenizer = Tokenizer.from_gguf(pieces())
    # "bc" has the best score, so "ab" and "▁ab" never come up; then "▁a" is joined.
    assert spelled(tokenizer, "abc") == ["▁a", "bc"]
    assert spelled(tokenizer, "ab") == ["▁ab"]
    assert spelled(tokenizer, "é") == ["▁", "é"]
    assert spelled(tokenizer, "€") == ["▁", "<0xE2>", "<0x82>", "<0xAC>"]
    for text in ("abc", "a b  c", " a", "a€ b", "€uro", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    without = Tokenizer.from_gguf(pieces(**{"ggml.add_space_prefix": False}))
    assert spelled(without, "abc") == ["abc"]
    assert without.decode(without.encode(" abc")) == " abc"


def test_one_bos_and_never_two() -> None:
    tokenizer = Tokenizer.from_gguf(pieces())
    assert tokenizer.add_bos and tokenizer.eos_ids == {2}
    for text in ("abc", "", "<s>abc", "<s>"):
        assert tokenizer.encode(text).count(1) == 1, text
        assert tokenizer.encode(text)[0] == 1
    assert tokenizer.encode("abc", add_special_tokens=False)[0] != 1
    # The key in the file decides; without it SentencePiece and Llama 3 have a BOS, and others none.
    assert not Tokenizer.from_gguf(pieces(**{"ggml.add_bos_token": False})).encode("abc").count(1)
    metadata = byte_level("llama-bpe")
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(metadata).encode("a")[0] == 1
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("a")[0] != 1
    assert not Tokenizer.from_gguf(metadata | {"tokenizer.ggml.bos_token_id": None}).add_bos


def test_control_tokens_are_found_in_text_and_left_out_of_it() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    ids = tokenizer.encode("<|start|>hi<|end|>")
    assert ids[0] == 1 and ids[-1] == 0 and len(ids) == 4
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>hi<|end|>"
    assert tokenizer.eos_ids == {0}


def test_special_texts_of_pieces_are_found_as_llama_cpp_finds_them() -> None:
    """Control, unknown and user-defined tokens, and those that end a text whatever their type."""
    metadata = pieces()
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|im_end|>", "<b>"]
    count = len(tokens)
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [1, 4]).astype(np.int32)
    metadata["tokenizer.ggml.scores"] = np.append(metadata["tokenizer.ggml.scores"], [0, 0]).astype(np.float32)
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("<unk>ab</s><|im_end|><b>", add_special_tokens=False)
    assert ids == [0, tokens.index("▁ab"), 2, count - 2, count - 1]
    assert tokenizer.eos_ids == {2, count - 2} and tokenizer.decode(ids) == "ab<b>"
    assert tokenizer.encode("<0x41>", add_special_tokens=False) != [3 + 0x41]  # bytes are no special texts


def test_ids_out_of_range_are_named() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    for bad in (-1, tokenizer.vocab_size, 10**9):
        for use in (lambda bad=bad: tokenizer.decode([1, bad]), lambda bad=bad: tokenizer.stream().push(bad)):
            with pytest.raises(ArgumentError, match=f"token id {bad} is not in the vocabulary"):
                use()
    for bad in ("ab", [1.0], [None]):
        with pytest.raises(ArgumentError, match="a token id is a whole number"):
            tokenizer.decode(bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="decode takes a list of token ids"):
        tokenizer.decode(5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="can't be tokenized"):
        tokenizer.encode("half a pair: \ud83d")
    with pytest.raises(ArgumentError, match="can't be tokenized"):
        tokenizer.encode(7)  # type: ignore[arg-type]


def test_a_model_may_have_more_rows_than_tokens_but_not_fewer() -> None:
    size = len(byte_level()["tokenizer.ggml.tokens"])
    padded = Tokenizer.from_gguf(byte_level(), vocab_size=size + 6)
    assert padded.decode([size + 5]) == "" and padded.token(size + 5) is None
    assert padded.stream().push(size + 5) == ""
    with pytest.raises(LoadError, match=f"token id {size - 1}, but the model has {size - 1} tokens"):
        Tokenizer.from_gguf(byte_level(), vocab_size=size - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.tokens": []}, "the file has no vocabulary"),
        ({"ggml.tokens": None}, "the file has no vocabulary"),
        ({"ggml.tokens": np.array([1, 2])}, "the file has no vocabulary"),
        ({"ggml.tokens": ["a", "b", "a"]}, "the token 'a' is in the vocabulary twice"),
        ({"ggml.model": "bert"}, "unknown tokenizer model 'bert'"),
        ({"ggml.model": None}, "unknown tokenizer model None"),
        ({"ggml.pre": "klingon"}, "unknown pre-tokenizer 'klingon'"),
        ({"ggml.merges": None}, "no usable merges"),
        ({"ggml.merges": ["a b c"]}, "no usable merges"),
        ({"ggml.merges": ["zz y"]}, "the merges do not fit the vocabulary"),
        ({"ggml.token_type": np.array([1, 2])}, "tokens have 2 types"),
        ({"ggml.token_type": ["x"] * 258}, "tokens have 258 types"),
        ({"ggml.bos_token_id": 999}, "bos_token_id 999 is not in the vocabulary of 258"),
        ({"ggml.eos_token_id": -1}, "eos_token_id -1 is not in the vocabulary"),
        ({"ggml.add_bos_token": np.array([], np.uint8)}, "add_bos_token must be true or false"),
        ({"ggml.add_bos_token": np.array([1, 0], np.uint8)}, "add_bos_token must be true or false"),
        ({"ggml.add_bos_token": "no"}, "add_bos_token must be true or false, got 'no'"),
    ],
    ids=str,
)
def test_bad_metadata(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        Tokenizer.from_gguf(byte_level(**change), where="some.gguf")
    assert "some.gguf" in str(caught.value)


def test_sentence_pieces_need_scores() -> None:
    with pytest.raises(LoadError, match="tokens have 0 scores"):
        Tokenizer.from_gguf(pieces(**{"ggml.scores": []}))
    with pytest.raises(LoadError, match="add_space_prefix must be true or false"):
        Tokenizer.from_gguf(pieces(**{"ggml.add_space_prefix": np.array([], np.int32)}))


def chat_tokenizer(template: str) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level(chat_template=template))


def test_chat_templates() -> None:
    tokenizer = chat_tokenizer(CHATML)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.chat_text(messages)
    # Blocks take their own line away with them, as transformers renders templates.
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_text(messages, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.chat(messages) == tokenizer.encode(text)
    assert messages == [{"role": "user", "content": "hi"}]


def test_chat_with_bos_in_the_template_and_without() -> None:
    for template in ("{{ bos_token }}{{ messages[0]['content'] }}", "{{ messages[0]['content'] }}"):
        tokenizer = Tokenizer.from_gguf(pieces(chat_template=template))
        ids = tokenizer.chat([{"role": "user", "content": "abc"}])
        assert ids.count(1) == 1 and ids[0] == 1 and tokenizer.decode(ids) == "abc"


def test_what_templates_may_use() -> None:
    messages = [{"role": "user", "content": "é<&>"}]
    assert chat_tokenizer("{{ messages[0]['content'] | tojson }}").chat_text(messages) == '"é<&>"'
    assert chat_tokenizer("{{ {'a': 1} | tojson(indent=2) }}").chat_text(messages) == '{\n  "a": 1\n}'
    assert chat_tokenizer("{{ strftime_now('%Y') }}").chat_text(messages).isdigit()
    assert chat_tokenizer("{% for i in [1, 2] %}{% break %}{% endfor %}x").chat_text(messages) == "x"
    assert chat_tokenizer("{% generation %}y{% endgeneration %}").chat_text(messages) == "y"
    assert chat_tokenizer("{{ eos_token }}{{ nothing }}").chat_text(messages) == "<|end|>"
    assert chat_tokenizer("{{ mood }}").chat_text(messages, mood="calm") == "calm"
    assert chat_tokenizer("{% if tools is none %}no tools{% endif %}").chat_text(messages) == "no tools"


def test_templates_that_refuse_fail_or_reach_out() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ArgumentError, match="refuses the messages") as caught:
        chat_tokenizer("{{ raise_exception('roles must alternate') }}").chat(messages)
    assert "roles must alternate" in str(caught.value)
    with pytest.raises(LoadError, match="the chat template is damaged"):
        chat_tokenizer("{% if %}").chat(messages)
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ messages[5]['content'] }}",
    ):
        with pytest.raises(LoadError, match="the chat template failed"):
            chat_tokenizer(template).chat(messages)
    with pytest.raises(LoadError, match="the model has no chat template"):
        Tokenizer.from_gguf(byte_level()).chat(messages)
    for bad in ([], ["hi"], [{"content": "hi"}], None, 5, "hi", iter([])):
        with pytest.raises(ArgumentError, match="messages with a role"):
            chat_tokenizer(CHATML).chat(bad)  # type: ignore[arg-type]


DOUBLED = "{% set ns = namespace(v=START) %}{% for i in range(60) %}{% set ns.v = STEP %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 9**(9**9) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a'|center(width=10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
        "{{ '{x:>{w}}'.format_map({'x': 1, 'w': 10**9}) }}",
        "{{ [1]|batch(10**9, 'x')|list }}",
        "{{ [1]|slice(10**9, 'x')|list }}",
        "{{ 'a\nb'|indent(10**9) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ 1.5|round(10**9, 'ceil') }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ ('f' * 2000000)|int(0, 16) }}",
        DOUBLED.replace("START", "'ab'").replace("STEP", "ns.v ~ ns.v"),
        DOUBLED.replace("START", "'ab'").replace("STEP", "ns.v + ns.v"),
        DOUBLED.replace("START", "'ab'").replace("STEP", "[ns.v, ns.v]|join"),
        DOUBLED.replace("START", "2").replace("STEP", "ns.v * ns.v"),
        DOUBLED.replace("START", "[1]").replace("STEP", "[ns.v, ns.v]") + "{{ ns.v }}",
        DOUBLED.replace("START", "(1,)").replace("STEP", "(ns.v, ns.v)") + "{{ {ns.v: 1} }}",
        DOUBLED.replace("START", "()").replace("STEP", "(ns.v,)").replace("60", "100000") + "{{ {ns.v: 1} }}",
        "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
        "{% set s = 'a' * 1000000 %}{% set b %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endset %}",
        "{% macro m() %}{% for i in range(100000) %}{{ 'a' * 1000000 }}{% endfor %}{% endmacro %}{{ m() }}",
        "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
        "{% set s = 'a' * 1000000 %}{{ s|replace('a', s) }}",
        "{% set s = 'a' * 1000000 %}{{ s.join([s] * 4) }}",
        "{% set s = 'a' * 1000000 %}{{ s.translate({97: s}) }}",
        "{% set s = 'a' * 1000000 %}{{ ('%(a)s' * 1000) % {'a': s} }}",
        "{% set s = 'a' * 1000000 %}{{ ('{0}' * 1000).format(s) }}",
        "{% set s = 'a' * 2000000 %}{{ s.rfind('a' * 1000000 ~ 'b') }}",
        "{% set s = 'a' * 2000000 %}{{ s|trim('b' * 2000000) }}",
        "{% set n = namespace(l=none) %}{% set s = 'a' * 2000000 %}"
        "{% for i in range(100000) %}{% set n.l = namespace(a=n.l, b=s[1:]) %}{% endfor %}",
        "{% set n = namespace(b='a' * 1000000) %}{{ ([n] * 100000)|join(attribute='b') }}",
        "{{ ('<' * 1000000)|striptags }}",
        "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
        "{% set l = [1] * 1000000 %}{% set m = [1] * 1000000 %}{{ " + " and ".join(["l == m"] * 300) + " }}",
        "{{ messages|length }}" * 60_000,
    ],
)
def test_templates_that_want_too_much(template: str) -> None:
    with pytest.raises(LoadError, match="the chat template wants too much"):
        chat_tokenizer(template).chat_text([{"role": "user", "content": "hi"}])


def test_a_long_conversation_is_not_too_much() -> None:
    messages = [{"role": "user", "content": "12345678 " * 10_000}] * 100
    text = chat_tokenizer("{{ messages|tojson }}" + CHATML).chat_text(messages)
    assert len(text) > 2 * 100 * 90_000 and sys.gettrace() is None


def test_what_a_budget_must_not_change() -> None:
    def text(template: str) -> str:
        return chat_tokenizer(template).chat_text([{"role": "user", "content": "a b"}] * 3)

    assert text("{{ messages[1:]|length }}{{ 'abcdef'[-4:-1:2] }}") == "2ce"
    assert text("{{ messages[:-1]|map(attribute='role')|join('+') }}") == "user+user"
    assert text("{% set a, b = (1, 2) %}{% for x, y in [(a, b)] %}{{ x ~ y ~ 'z' }}{% endfor %}") == "12z"
    assert text("{{ {'k': [1, (2,)]} }}{{ [] == [] }}{{ 1 < 2 < 3 }}{{ 'a' in ['a'] }}{{ 3 is in [3] }}") == (
        "{'k': [1, (2,)]}TrueTrueTrueTrue"
    )
    assert text("{{ '%s-%3d' % ('a', 7) }}{{ '{}{x:>4}'.format(1, x=2) }}") == "a-  71   2"
    assert text("{{ 'a'.center(3) }}|{{ 'ab'|replace('a', 'c') }}") == " a |cb"
    macro = "{% macro m(x, y=[1]) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}"
    assert text(macro + "{% call m(2) %}c{% endcall %}") == "2[1]c"
    assert text("{% for x in [[1, []], [2, [[3, []]]]] recursive %}{{ x[0] }}{{ loop(x[1]) }}{% endfor %}") == "123"
    assert text("{{ range(3)|sum }}{{ [3, 1]|sort }}{{ 2**10 }}{{ 7 // 2 }}{{ ' x '|trim }}{{ 'x'|upper|lower }}") == (
        "3[1, 3]10243xx"
    )


def evil(where: str, pattern: str) -> Core:
    core = Core(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    if where == "pre_tokenizer":
        core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    elif where == "normalizer":
        core.normalizer = normalizers.Replace(Regex(pattern), "b")
    else:
        core.decoder = decoders.Replace(Regex(pattern), "b")
    return core


@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_panics(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(evil(where, "(a+)+$"), where="tokenizer.json")
    assert tokenizer.encode("aa") in ([0, 0], [1])
    with pytest.raises(LoadError, match="the tokenizer failed on 101 characters") as caught:
        tokenizer.encode("a" * 100 + "!")
    assert "PanicException" in str(caught.value) and "regular expression" in str(caught.value)
    capfd.readouterr()  # the library shows where it was


def test_a_pattern_that_runs_on(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("monoplan.models.text.tokenizer.SECONDS", 0.01)
    tokenizer = Tokenizer(evil("pre_tokenizer", "(a|aa){1,24}$"), where="tokenizer.json")
    with pytest.raises(LoadError, match="the tokenizer was not done with 101 characters in 0 s") as caught:
        tokenizer.encode("a" * 100 + "!")
    assert "use another tokenizer.json" in str(caught.value)
    for thread in threading.enumerate():
        if thread.name == "monoplan-tokenizer":
            thread.join()
    capfd.readouterr()


@pytest.mark.parametrize("escaped", [False, True])
def test_patterns_that_would_run_while_a_file_is_loaded(
    tmp_path: Path, escaped: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    core = evil("normalizer", "(a+)+$")
    core.add_tokens([AddedToken("aa", normalized=True)])
    core.save(str(tmp_path / "tokenizer.json"))
    text = (tmp_path / "tokenizer.json").read_text()
    text = text.replace('"aa"', json.dumps("a" * 100 + "!"))
    text = text.replace('"normalizer"', '"\\u006eormalizer"') if escaped else text
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(LoadError, match="the tokenizer failed on 101 characters"):
        Tokenizer.from_pretrained(tmp_path)
    capfd.readouterr()


def test_a_decoder_has_no_pattern(tmp_path: Path) -> None:
    evil("decoder", "(a+)+$").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(LoadError, match="tokenizer.json can't be used") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert "its decoder has a regular expression" in str(caught.value)


def test_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(save_directory(tmp_path))
    for text in ("a\ud800", "\udfff", "é\udc80x"):
        with pytest.raises(ArgumentError, match="the text can't be tokenized") as caught:
            tokenizer.encode(text)
        assert "surrogate" in str(caught.value)
    assert tokenizer.decode(tokenizer.encode("\U0001f600")) == "\U0001f600"
    with pytest.raises(ArgumentError, match="the text can't be tokenized"):
        chat_tokenizer(CHATML).chat([{"role": "user", "content": "\ud800"}])
    for key in ("bos_token", "eos_token", "pad_token"):
        save_directory(tmp_path, config={key: "\ud800"})
        with pytest.raises(LoadError, match=f"{key} is .*ud800"):
            Tokenizer.from_pretrained(tmp_path)


def test_odd_entries_of_the_files_beside(tmp_path: Path) -> None:
    save_directory(tmp_path, config={"chat_template": [{"name": ["default"], "template": "x"}, 3, {}]})
    assert Tokenizer.from_pretrained(tmp_path).chat_template is None
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    core.post_processor = None
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    for odd in (-1, 2**70, [1], True, "1"):
        (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": odd}))
        assert Tokenizer.from_pretrained(tmp_path).bos_id is None


def test_long_sentence_pieces_are_refused() -> None:
    metadata = pieces()
    metadata["tokenizer.ggml.tokens"][-1] = "x" * 100_000
    with pytest.raises(LoadError, match="a piece of 100000 characters"):
        Tokenizer.from_gguf(metadata)


def save_directory(
    path: Path, *, template_bos: bool = True, config: dict[str, Any] | None = None, **files: Any
) -> Path:
    """Write a Hugging Face tokenizer directory with a byte-level vocabulary; <s> is 256 and </s> 257."""
    core = Core(models.BPE(vocab={token: index for index, token in enumerate(ALPHABET)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if template_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    core.enable_truncation(4)
    core.save(str(path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"} | (config or {})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, data in files.items():
        (path / f"{name}.json").write_text(json.dumps(data))
    return path


def test_directory(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(save_directory(tmp_path))
    assert tokenizer.bos_id == 256 and tokenizer.eos_ids == {257} and tokenizer.add_bos
    # One BOS, no matter that the file has a template for it; and the file's truncation is not ours.
    assert tokenizer.encode("longer than four") == [256, *tokenizer.encode("longer than four", False)]
    assert tokenizer.encode("<s>hi").count(256) == 1
    assert tokenizer.decode(tokenizer.encode("longer than four")) == "longer than four"
    assert tokenizer.vocab_size == 258


def test_directory_add_bos_token(tmp_path: Path) -> None:
    assert not Tokenizer.from_pretrained(save_directory(tmp_path, template_bos=False)).add_bos
    assert not Tokenizer.from_pretrained(save_directory(tmp_path, config={"add_bos_token": False})).add_bos
    config: dict[str, Any] = {"add_bos_token": True}
    assert Tokenizer.from_pretrained(save_directory(tmp_path, template_bos=False, config=config)).add_bos
    config = {"tokenizer_class": "LlamaTokenizer"}
    assert Tokenizer.from_pretrained(save_directory(tmp_path, template_bos=False, config=config)).add_bos
    config = {"bos_token": None, "add_bos_token": True}
    assert not Tokenizer.from_pretrained(save_directory(tmp_path, config=config)).add_bos


@pytest.mark.parametrize(
    ("template", "model", "bos_id", "adds"),
    [
        ("<s> $A", {}, 256, True),
        ("<s> $A </s>", {"bos_token_id": 65}, 256, True),
        ("$A </s>", {}, None, False),
        ("$A", {"bos_token_id": 256}, 256, False),
        ("$A", {"bos_token_id": 999}, None, False),
    ],
)
def test_directory_without_a_tokenizer_config(
    tmp_path: Path, template: str, model: dict[str, Any], bos_id: int | None, adds: bool
) -> None:
    """What tokenizer.json puts in front of a text is the BOS, as it is for transformers."""
    core = Core.from_file(str(save_directory(tmp_path) / "tokenizer.json"))
    ends = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
    core.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(model))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_id, tokenizer.add_bos) == (bos_id, adds)
    assert tokenizer.encode("hello")[:-5] == ([256] if adds else [])


def test_directory_ends_of_text_come_from_every_file(tmp_path: Path) -> None:
    save_directory(tmp_path, generation_config={"eos_token_id": [5, 6]}, config=None)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_pretrained(tmp_path).eos_ids == {5, 6, 7, 257}


@pytest.mark.parametrize("found", [[[5]], {"a": 5}, [5, {}], "5", -1, [1.5], True, 2**40])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_directory_ends_of_text_are_token_ids(tmp_path: Path, name: str, found: Any) -> None:
    save_directory(tmp_path)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": found}))
    with pytest.raises(LoadError, match="eos_token_id must be a token id or a list of them") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert name in str(caught.value)


def test_directory_chat_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    save_directory(tmp_path, config={"chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"})
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_text(messages) == "<s>hi</s>"
    assert tokenizer.chat(messages).count(256) == 1
    named: list[Any] = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    named += [{"name": ["default"], "template": "nothing"}, "default"]
    save_directory(tmp_path, config={"chat_template": named})
    assert Tokenizer.from_pretrained(tmp_path).chat_text(messages) == "plain"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_pretrained(tmp_path).chat_text(messages) == "from the file"


def test_damaged_directories(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no tokenizer.json"):
        Tokenizer.from_pretrained(tmp_path)
    save_directory(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    for data in (b"", b"{}", b"[]", whole[:100], whole[: len(whole) // 2], b"\xff" + whole):
        (tmp_path / "tokenizer.json").write_bytes(data)
        with pytest.raises(LoadError, match="tokenizer.json can't be used"):
            Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(whole)
    with pytest.raises(LoadError, match="but the model has 100 tokens"):
        Tokenizer.from_pretrained(tmp_path, vocab_size=100)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(LoadError, match="tokenizer_config.json is not valid JSON"):
        Tokenizer.from_pretrained(tmp_path)
    Core(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(LoadError, match="empty vocabulary"):
        Tokenizer.from_pretrained(tmp_path)
