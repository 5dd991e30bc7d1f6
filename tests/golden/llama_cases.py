"""The models and inputs that record_llama.py records: what a reader of the goldens may want to look up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

STARTS = (0, 1000, 8000, 20000)
# One sequence with far distances: RoPE is relative, so a contiguous window hides wrong low frequencies.
SPREAD = (0, 1, 2, 1000, 1001, 8000, 8001, 20000, 20001)
STEPS = (12, 1, 1, 1, 1, 1, 1, 1, 1)

Config = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model and its inputs: one record for each start, at start + 0, 1, 2, ... or at explicit positions."""

    name: str
    config: Config
    length: int = 12
    batch: int = 1
    starts: tuple[int, ...] = (0,)
    positions: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    # Keys whose absence from config.json must mean the same model; keys that only older writers had.
    defaults: tuple[str, ...] = ()
    old_keys: Config = field(default_factory=dict)
    note: str = ""
    seed: int = 1

    def inputs(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yield token ids and positions, both [batch, length], of each record."""
        random = np.random.Generator(np.random.Philox(self.seed))
        length = len(self.positions) or self.length
        for start in self.starts:
            ids = random.integers(0, self.config["vocab_size"], (self.batch, length), dtype=np.int32)
            row = np.array(self.positions or range(start, start + length), dtype=np.int32)
            yield ids, np.tile(row, (self.batch, 1))

    def other_spellings(self, config: Config) -> dict[str, Config]:
        """Return the same model as older checkpoints spell it, and with default keys left out."""
        rope = dict(config["rope_parameters"])
        kind, theta = rope.pop("rope_type"), rope.pop("rope_theta")
        new_keys = ("rope_parameters", "dtype", "layer_types")
        old = {key: value for key, value in config.items() if key not in new_keys}
        old |= {"rope_theta": theta, "torch_dtype": "float32", "transformers_version": "4.31.0", **self.old_keys}
        if kind == "default":
            spellings = {"old": {**old, "rope_scaling": None}}
        else:
            spellings = {
                "old_type": {**old, "rope_scaling": {"type": kind, **rope}},
                "old_rope_type": {**old, "rope_scaling": {"rope_type": kind, **rope}},
            }
        if kind == "longrope":
            original = rope.pop("original_max_position_embeddings")
            top = {"original_max_position_embeddings": original, "rope_scaling": {"type": kind, **rope}}
            spellings["old_top_level"] = {**old, **top}
        if self.defaults:
            spellings["minimal"] = {key: value for key, value in config.items() if key not in self.defaults}
        return spellings


def model(model_type: str = "llama", **changes: Any) -> Config:
    """Return a small model: two layers, four heads of 16 over two KV heads."""
    small = {
        "model_type": model_type,
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
    return {**small, **changes}


def rope(name: str, kind: str, *, note: str = "", max_positions: int = 32768, **parameters: Any) -> list[Case]:
    """Return a RoPE kind at every start, and over far distances within one sequence."""
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    config = model(head_dim=32, max_position_embeddings=max_positions, rope_parameters=parameters)
    return [
        Case(f"rope_{name}", config, length=6, starts=STARTS, note=note),
        Case(f"rope_{name}_spread", config, positions=SPREAD, note=note),
    ]


SHORT_FACTORS = [1.0 + 0.05 * i for i in range(16)]
LONG_FACTORS = [1.0 + 0.5 * i for i in range(16)]
LONGROPE = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
LLAMA_DEFAULTS = (
    "architectures", "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id",
    "head_dim", "hidden_act", "initializer_range", "max_position_embeddings", "mlp_bias",
    "num_key_value_heads", "pad_token_id", "pretraining_tp", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "transformers_version", "use_cache",
)  # fmt: skip
QWEN_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

ATTENTION = [
    Case(
        "mha",
        model(num_key_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=2048),
        defaults=LLAMA_DEFAULTS,
        note="every optional key left out must mean this model",
    ),
    Case("gqa", model(num_attention_heads=8)),
    Case("mqa", model(num_key_value_heads=1)),
    Case("head_dim_free", model(hidden_size=48, head_dim=32, rms_norm_eps=1e-2), note="4 * 32 is not 48"),
    Case("head_dim_80", model(hidden_size=160, num_attention_heads=2, num_key_value_heads=1), starts=(0, 20000)),
    Case("head_dim_96", model(hidden_size=96, num_attention_heads=2, head_dim=96), starts=(0, 20000)),
    Case("attention_bias", model(attention_bias=True), note="q, k, v and o"),
    Case("mlp_bias", model(mlp_bias=True)),
    Case("all_biases", model(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    Case("tied", model(tie_word_embeddings=True)),
    Case("odd_sizes", model(vocab_size=101, hidden_size=72, intermediate_size=83, num_hidden_layers=3)),
    Case("long", model(), length=70),
    Case("batch", model(), length=10, batch=2),
    Case("cached", model(), length=20, chunks=(5, 1, 1, 6, 1, 4, 2)),
]

FAMILY = [
    Case("mistral", model("mistral", sliding_window=None), note="no window"),
    Case(
        "mistral_defaults",
        model("mistral", num_attention_heads=8, num_key_value_heads=8, sliding_window=4096),
        defaults=("num_key_value_heads", "head_dim", "sliding_window", "rope_parameters"),
        note="without the key a Mistral has 8 KV heads, whatever its number of heads",
    ),
    Case("mistral_window", model("mistral", sliding_window=8), length=24, note="a query sees itself and 7 before"),
    Case("mistral_window_cached", model("mistral", sliding_window=8), length=20, chunks=STEPS),
    Case("qwen2", model("qwen2"), defaults=QWEN_WINDOW_KEYS, note="bias on q, k, v and none on o"),
    Case(
        "qwen2_window_unused",
        model("qwen2", tie_word_embeddings=True),
        old_keys={"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 1},
        note="sliding_window counts only where use_sliding_window is true",
    ),
    Case(
        "qwen2_window",
        model("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
        length=20,
        defaults=("layer_types",),
        note="layer 0 is full; layers from max_window_layers on have the window",
    ),
    Case("qwen3", model("qwen3", head_dim=32, rms_norm_eps=1e-6), note="norm of each q and k head before RoPE"),
    Case(
        "qwen3_defaults",
        model("qwen3", head_dim=128, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True),
        defaults=("head_dim", "attention_bias", *QWEN_WINDOW_KEYS),
        note="without the key a Qwen3 head has 128 values, whatever the hidden size",
    ),
    Case("qwen3_bias", model("qwen3", head_dim=32, attention_bias=True), note="bias on q, k, v and o"),
]

ROPE = [
    *rope("default", "default"),
    *rope("default_theta", "default", rope_theta=500000.0),
    *rope("linear", "linear", factor=4.0),
    *rope("dynamic", "dynamic", factor=4.0, max_positions=2048, note="scaled from position 2048 on"),
    *rope("yarn", "yarn", factor=8.0, original_max_position_embeddings=4096),
    *rope(
        "yarn_betas", "yarn", factor=8.0, original_max_position_embeddings=4096, attention_factor=1.3,
        beta_fast=16.0, beta_slow=2.0,
    ),
    *rope(
        "yarn_mscale", "yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0,
        mscale_all_dim=0.8, truncate=False,
    ),
    *rope(
        "longrope", "longrope", original_max_position_embeddings=4096, **LONGROPE,
        note="no factor: max / original; long factors from position 4096 on",
    ),
    *rope("longrope_factor", "longrope", factor=4.0, original_max_position_embeddings=4096, **LONGROPE),
    *rope(
        "llama3", "llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    Case(
        "rope_dynamic_cached",
        model(max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        length=20,
        chunks=STEPS,
        note="from position 16 on each step has its own frequencies; keys in the cache keep their rotation",
    ),
    Case(
        "rope_longrope_cached",
        model(
            head_dim=32,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 16, **LONGROPE},
        ),
        length=20,
        chunks=STEPS,
        note="from position 16 on the long factors hold; keys in the cache keep their rotation",
    ),
]  # fmt: skip

CASES = (*ATTENTION, *FAMILY, *ROPE)
