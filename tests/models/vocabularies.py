"""Small vocabularies that tests make tokenizers of, as the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre: str = "gpt-2", merges: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: 256 bytes, what the merges make, and two control tokens."""
    tokens = ["<|end|>", "<|start|>", *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (len(tokens) - 2), np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    } | {f"tokenizer.{key}": value for key, value in changes.items()}


def pieces(**changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary with bytes to fall back on."""
    words = ["▁", "a", "b", "c", "ab", "abc", "bc", "▁a", "▁ab", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = {"bc": -1.0, "▁a": -2.0, "ab": -3.0, "▁ab": -4.0, "abc": -5.0}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(words), np.int32),
        "tokenizer.ggml.scores": np.array([scores.get(token, -99.0) for token in tokens], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.{key}": value for key, value in changes.items()}
