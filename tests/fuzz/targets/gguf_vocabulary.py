"""Vocabularies in GGUF files: byte-level with merges, SentencePiece with scores."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.fuzz.engine import Files, Target
from tests.fuzz.support import load_tokenizer
from tests.fuzz.targets import gguf
from tests.models.vocabularies import byte_level, pieces

KEYS = (b"tokenizer.",)


def seeds() -> list[Files]:
    merges = ("a b", "ab c", "Ġ c")
    found = [byte_level(pre, merges) for pre in ("default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken")]
    found += [pieces(), pieces(**{"ggml.add_bos_token": True, "ggml.add_space_prefix": False})]
    for metadata in found:
        if "tokenizer.ggml.merges" in metadata:
            metadata["tokenizer.ggml.tokens"] = list(metadata["tokenizer.ggml.tokens"])
    return [{gguf.NAME: gguf.tiny(rows=len(m["tokenizer.ggml.tokens"]), metadata=m)} for m in found]


def mutate(random: Random, files: Files) -> Files:
    return gguf.mutate(random, files, KEYS)


def load(directory: Path) -> None:
    load_tokenizer(directory / gguf.NAME)


TARGET = Target(seeds, mutate, load)
