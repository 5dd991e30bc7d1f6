"""Small models that targets begin with, and how a case loads one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.models import AutoLlamaModel, LlamaConfig, LlamaForCausalLM, open_model
from monoplan.models.load.config_json import FAMILIES
from monoplan.models.load.safetensors import save_checkpoint
from monoplan.models.rope_scaling import rope_tables
from monoplan.models.text.tokenizer import MissingTokenizer, Tokenizer
from tests.fuzz.engine import Files, scratch

TEXT = "Ab c, 12é\n<s>"
SMALL: dict[str, Any] = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def config(family: str = "llama", **changes: Any) -> LlamaConfig:
    """A configuration of one layer, as its family has it."""
    head = {"head_dim": 4} if family == "qwen3" else {}
    return LlamaConfig.from_dict({**SMALL, **head, "model_type": family, **changes})


def state(made: LlamaConfig) -> dict[str, Any]:
    """Random weights by name."""
    model = LlamaForCausalLM.from_config(made, seed=1)
    return {name: t.numpy() for name, t in model.state_dict().items()}


@cache
def checkpoint(family: str = "llama", shards: int = 1 << 30, **changes: Any) -> Files:
    """A saved model of random weights."""
    made = config(family, **{key: json.loads(value) for key, value in changes.items()})
    with scratch() as folder:
        save_checkpoint(folder, state(made), made.to_dict(), max_shard_bytes=shards)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def families() -> list[Files]:
    """A checkpoint of each family."""
    return [checkpoint(family) for family in FAMILIES]


def load_model(path: Path) -> None:
    """Reads all that a model on disk has: each tensor as it lies, and the model with its weights."""
    opened = open_model(path)
    for name in opened.weights.names():
        np.asarray(opened.weights.tensor(name)).tobytes()
    model = AutoLlamaModel.from_pretrained(path, progress=False)
    for parameter in model.parameters():
        parameter.numpy().tobytes()
    rope_tables(model.config, 4)


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """A short text there and back, token by token as well."""
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids)
    stream = tokenizer.stream(ids[:2])
    for token in ids:
        stream.push(token)
    for token in range(min(tokenizer.vocab_size, 4)):
        tokenizer.token(token)


def load_tokenizer(path: Path) -> None:
    try:
        tokenizer = open_model(path).tokenizer()
    except MissingTokenizer:
        return
    use_tokenizer(tokenizer)
