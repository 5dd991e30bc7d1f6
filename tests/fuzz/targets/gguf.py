"""GGUF files: header, metadata of the model, tensors of all kinds that are read."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.engine import Files, Target
from tests.fuzz.gguf_files import Pieces, change, split, write_gguf
from tests.fuzz.mutations import damage
from tests.fuzz.support import load_model

NAME = "model.gguf"
HIDDEN = 32
NAMES = {
    "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (HIDDEN, HIDDEN),
    "ffn_up": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, HIDDEN),
}  # fmt: skip


def tiny(arch: str = "llama", kind: str = "F32", rows: int = 8, metadata: dict[str, Any] | None = None) -> bytes:
    """A model of one layer whose matrices have one block format."""
    random = np.random.default_rng(2)
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}.weight": shape for name, shape in NAMES.items()}
    shapes |= {"token_embd.weight": (rows, HIDDEN), "output.weight": (rows, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if arch == "qwen2":
        shapes |= {f"blk.0.attn_{name}.bias": (HIDDEN,) for name in "qkv"}
    if arch == "qwen3":
        shapes |= {f"blk.0.attn_{name}_norm.weight": (8,) for name in "qk"}
    if arch == "llama":
        shapes["rope_freqs.weight"] = (4,)
    tensors = {name: random.uniform(0.5, 1.0, shape).astype(np.float32) for name, shape in shapes.items()}
    keys = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": HIDDEN,
        "attention.head_count": 4,
        "attention.head_count_kv": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 8,
        "attention.key_length": 8,
        "attention.value_length": 8,
    } | ({} if arch == "llama" else {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0})
    kinds = {name: kind for name, shape in shapes.items() if len(shape) == 2}
    more = {"general.alignment": 32, "split.count": 1, **(metadata or {})}
    return write_gguf({f"{arch}.{key}": value for key, value in keys.items()} | more, tensors, kinds, arch)


def seeds() -> list[Files]:
    pairs = (
        ("llama", "F32"),
        ("qwen2", "BF16"),
        ("qwen3", "F16"),
        ("llama", "Q8_0"),
        ("qwen2", "Q4_0"),
        ("llama", "Q5_1"),
    )
    return [{NAME: tiny(*pair)} for pair in pairs]


@cache
def _pieces(data: bytes) -> tuple[Pieces, int]:
    pieces = split(data)
    assert pieces.join() == data
    return pieces, len(data) - len(pieces.data)


def mutate(random: Random, files: Files, keys: tuple[bytes, ...] = ()) -> Files:
    pieces, header = _pieces(files[NAME])
    if random.random() < 0.35:
        return {NAME: damage(random, files[NAME], within=random.choice((header, header, None)))}
    return {NAME: change(random, pieces, keys)}


def load(directory: Path) -> None:
    load_model(directory / NAME)


TARGET = Target(seeds, mutate, load)
