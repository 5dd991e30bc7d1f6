"""Weight files: one model.safetensors, shards with their index, names and shapes that do not fit the configuration."""

from __future__ import annotations

import json
from random import Random

from tests.fuzz.engine import Files, Target
from tests.fuzz.mutations import HOSTILE, change_json, damage, dump_json, field, integer, mutate_json
from tests.fuzz.support import checkpoint, load_model

INDEX = "model.safetensors.index.json"
_KINDS = ("F32", "F16", "BF16", "F64", "I8", "U64", "BOOL", "F8_E4M3", "F4", "C64", "")


def _header(random: Random, data: bytes) -> bytes:
    """Another header; its length fits, mostly."""
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    infos = [info for name, info in header.items() if name != "__metadata__"]
    info = random.choice(infos)
    kind = random.randrange(6)
    if kind == 0:
        info["dtype"] = random.choice(_KINDS)
    elif kind == 1:
        info["shape"] = [integer(random) for _ in range(random.randrange(5))]
    elif kind == 2:
        info["data_offsets"] = [integer(random), integer(random)]
    elif kind == 3:
        info["shape"] = random.choice(([], [0], [0, 2**63], [2**32, 2**32], [1] * 70, [0] * 200, [-1, -8]))
        info["data_offsets"] = random.choice((info["data_offsets"], [info["data_offsets"][0]] * 2, [0, 0], [0, 4]))
    else:
        header = change_json(random, header, (*HOSTILE, *_KINDS))
    text = dump_json(header)
    length = field(random, 8) if random.random() < 0.05 else len(text).to_bytes(8, "little")
    return length + text + rest


def mutate(random: Random, files: Files) -> Files:
    name = random.choice([name for name in files if name.endswith((".safetensors", INDEX))])
    if name == INDEX:
        return {name: mutate_json(random, files[name])}
    header = 8 + int.from_bytes(files[name][:8], "little")
    if random.random() < 0.4:
        return {name: damage(random, files[name], within=random.choice((9, header, None)))}
    return {name: _header(random, files[name])}


def seeds() -> list[Files]:
    return [
        checkpoint(),
        checkpoint("qwen3", dtype='"bfloat16"'),
        checkpoint("qwen2", shards=400),
        checkpoint("mistral", tie_word_embeddings="true"),
    ]


TARGET = Target(seeds, mutate, load_model)
