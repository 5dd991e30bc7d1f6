"""tokenizer.json and the files beside it: settings, special tokens, generation_config.json, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from monoplan.models.text.tokenizer import Tokenizer
from tests.fuzz.engine import Files, Target, scratch
from tests.fuzz.mutations import damage, mutate_json
from tests.fuzz.support import use_tokenizer
from tests.models.support import TEMPLATE, tiny_tokenizer_files

SIZE = 300
MESSAGES = [{"role": "user", "content": "Ab"}, {"role": "assistant", "content": "c"}]


def _beside() -> dict[str, Any]:
    token = {"content": "</s>", "special": True, "lstrip": False}
    return {
        "config.json": {"bos_token_id": 0, "eos_token_id": [1, 2]},
        "generation_config.json": {"eos_token_id": [1], "temperature": 0.5},
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": token,
            "add_bos_token": True,
            "tokenizer_class": "LlamaTokenizer",
            "chat_template": [{"name": "default", "template": TEMPLATE}],
        },
        "special_tokens_map.json": {"bos_token": "<s>", "pad_token": token, "additional_special_tokens": ["<s>"]},
    }


def _byte_level(folder: Path) -> None:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Core

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(["<s>", "</s>", *letters, "ab", "abc"])}
    core = Core(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
    cut = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}|\s+(?!\S)|[^\s]"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    core.save(str(folder / "tokenizer.json"))


def _unigram(folder: Path) -> None:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers

    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("\u2581", -1.0), ("A", -2.0), ("b", -2.0), ("\u2581c", -3.0), ("Ab", -1.5)]
    core = Core(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.save(str(folder / "tokenizer.json"))


def seeds() -> list[Files]:
    found = []
    for make in (tiny_tokenizer_files, _byte_level, _unigram):
        with scratch() as folder:
            make(folder)
            core = (folder / "tokenizer.json").read_bytes()
        found.append({"tokenizer.json": core, **{name: json.dumps(v).encode() for name, v in _beside().items()}})
    return found


def mutate(random: Random, files: Files) -> Files:
    name = "tokenizer.json" if random.random() < 0.5 else random.choice(sorted(files))
    if random.random() < 0.02:
        return {"chat_template.jinja": damage(random, TEMPLATE.encode())}
    return {name: mutate_json(random, files[name])}


def load(directory: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(directory, vocab_size=SIZE)
    use_tokenizer(tokenizer)
    if tokenizer.chat_template is not None:
        tokenizer.chat(MESSAGES)


TARGET = Target(seeds, mutate, load)
