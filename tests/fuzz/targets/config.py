"""config.json of every family and kind of RoPE."""

from __future__ import annotations

import json
from random import Random

from tests.fuzz.engine import Files, Target
from tests.fuzz.mutations import mutate_json
from tests.fuzz.support import checkpoint, families, load_model

_ROPE = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16.0, "mscale": 1.0},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0],
     "original_max_position_embeddings": 8},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
)  # fmt: skip


def seeds() -> list[Files]:
    windows = {"use_sliding_window": "true", "sliding_window": "4", "max_window_layers": "0"}
    scaled = [checkpoint(rope_scaling=json.dumps(rope), eos_token_id="[1, 2]") for rope in _ROPE]
    return [*families(), checkpoint("qwen2", **windows), *scaled]


def mutate(random: Random, files: Files) -> Files:
    return {"config.json": mutate_json(random, files["config.json"])}


TARGET = Target(seeds, mutate, load_model)
