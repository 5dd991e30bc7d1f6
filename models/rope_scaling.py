"""RoPE frequencies of every kind a LLaMA checkpoint may ask for, and the sine and cosine tables made of them.

Kinds: default, linear, dynamic (NTK), yarn, longrope, llama3. For dynamic and longrope the frequencies depend
on the length of the sequence: `table_key` says when two lengths share their tables, so a compiled plan takes
the tables as data and gets new ones only where the key changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import Array
from monoplan.models.load.config_json import is_factor

if TYPE_CHECKING:
    from monoplan.models.config import LlamaConfig

Parameters = Mapping[str, Any]
Length = int | None
Frequencies = tuple[Array, float]

# kind: (keys that must be there, keys that may be there)
KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset({"original_max_position_embeddings"}),
        frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "truncate"}) | {"mscale", "mscale_all_dim"},
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
        frozenset({"factor", "attention_factor"}),
    ),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
}
MOST_POSITIONS = 2**31 - 1  # lengths are int32
ALIASES = {"su": "longrope"}
# Notes that writers leave in the dictionary and that no formula reads.
HARMLESS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})


def standard_parameters(raw: Parameters | None, max_positions: int, rotary_dim: int) -> dict[str, Any] | None:
    """Check the `rope_scaling` of a config and return it in one spelling; None is the default kind."""
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise LoadError(f"rope_scaling must be a dictionary, not {type(raw).__name__}")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else repr(kind)
    if kind not in KINDS:
        raise LoadError(
            f"unknown rope kind {kind!r}",
            why="ignoring it would give wrong text beyond the first few tokens",
            fix=f"supported: {', '.join(KINDS)}",
        )
    values = {key: value for key, value in raw.items() if value is not None and key not in HARMLESS}
    required, optional = KINDS[kind]
    if kind in ("yarn", "longrope", "llama3"):
        values.setdefault("original_max_position_embeddings", max_positions)
    missing, unknown = required - values.keys(), values.keys() - required - optional
    if missing or unknown:
        listed = [f"missing {key}" for key in sorted(missing)] + [f"unknown {key}" for key in sorted(unknown)]
        raise LoadError(f"rope kind {kind!r} has wrong keys: {', '.join(listed)}")
    for key, value in values.items():
        values[key] = _checked(kind, key, value, rotary_dim)
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise LoadError("rope kind 'llama3' needs high_freq_factor greater than low_freq_factor")
    if kind == "dynamic" and rotary_dim <= 2:
        raise LoadError("rope kind 'dynamic' needs at least four rotated values in a head")
    return None if kind == "default" else {"rope_type": kind, **values}


def _checked(kind: str, key: str, value: Any, rotary_dim: int) -> Any:
    def bad(expected: str) -> LoadError:
        return LoadError(f"{key} of rope kind {kind!r} must be {expected}, got {value!r:.60}")

    if key == "truncate":
        if not isinstance(value, bool):
            raise bad("true or false")
        return value
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, (list, tuple)) or not all(map(is_factor, value)):
            raise bad("a list of positive numbers from 1e-30 to 1e30")
        if len(value) != rotary_dim // 2:
            raise bad(f"{rotary_dim // 2} numbers, one for each pair of rotated values; there are {len(value)}")
        return tuple(float(item) for item in value)
    if key == "original_max_position_embeddings":
        # Formulae divide by the logarithm of this, so 1 is no use either.
        if not is_factor(value) or int(value) != value or not 2 <= value <= MOST_POSITIONS:
            raise bad("an integer of 2 or more below 2**31")
        return int(value)
    if not is_factor(value):
        raise bad("a positive number from 1e-30 to 1e30")
    return float(value)


def inverse_frequencies(
    config: LlamaConfig, seq_len: int | None = None, dtype: type[np.floating[Any]] = np.float64
) -> tuple[Array, float]:
    """Return the frequencies [rotary_dim / 2] in float64 and the factor on sine and cosine.

    `dtype` is the precision of every step, not of the result: float32 repeats the arithmetic that checkpoints
    were trained and are served with (see `rope_tables`).
    """
    parameters = config.rope_scaling or {"rope_type": "default"}
    # Exponents are rounded like every other step; only the power itself is taken in double and then rounded,
    # which no platform's own float32 power may change.
    exponents = np.arange(0, config.rotary_dim, 2).astype(dtype) / dtype(config.rotary_dim)
    frequencies, factor = _FORMULAS[parameters["rope_type"]](config, parameters, exponents, seq_len)
    return frequencies.astype(np.float64), float(factor)


def rope_tables(
    config: LlamaConfig, positions: int | Array, *, seq_len: int | None = None, exact: bool = False
) -> tuple[Array, Array]:
    """Return float32 tables (sin, cos), [positions, rotary_dim / 2], with the attention factor multiplied in.

    `positions` is a count (0, 1, 2, ...) or an array; `seq_len` matters for dynamic and longrope only. Angles
    are float32 as in the code that trained the models: at position 20 000 a float64 angle differs from that
    by up to 1e-3 radian. `exact=True` keeps float64 up to the last rounding.
    """
    dtype: type[np.floating[Any]] = np.float64 if exact else np.float32
    where = np.arange(positions) if isinstance(positions, (int, np.integer)) else np.asarray(positions)
    if where.size and (where.dtype.kind not in "iu" or where.min() < 0):
        raise ArgumentError("positions must be integers of 0 or more")
    frequencies, factor = inverse_frequencies(config, seq_len, dtype)
    angles = (where.astype(dtype)[..., None] * frequencies.astype(dtype)).astype(np.float64)
    return (np.sin(angles) * factor).astype(np.float32), (np.cos(angles) * factor).astype(np.float32)


def table_key(config: LlamaConfig, seq_len: int) -> int:
    """Return a number that is equal for two lengths exactly when their tables are equal.

    `seq_len` is the largest position of the call plus one, as transformers counts it. 0 stands for the tables
    of `seq_len=None`, any other result is a length to pass as `seq_len`. What is in a KV cache keeps the
    rotation it got. transformers' dynamic kind also remembers the longest sequence until a short one arrives;
    here each call stands for itself.
    """
    parameters = config.rope_scaling or {"rope_type": "default"}
    if parameters["rope_type"] == "dynamic" and seq_len > config.max_position_embeddings:
        return seq_len
    if parameters["rope_type"] == "longrope" and parameters["short_factor"] != parameters["long_factor"]:
        original = int(parameters["original_max_position_embeddings"])
        return original + 1 if seq_len > original else 0
    return 0


def context_length(config: LlamaConfig) -> int:
    """Return how long a sequence may be, which transformers leaves to the user.

    linear, dynamic and yarn are added to a finished model, whose max_position_embeddings stay: they stretch them by
    their factor. yarn and longrope say what they stretch, so the result is right as well where the configuration
    already has the longer context. That of llama3 always has it: its factor is a constant of the formula alone.
    """
    rope, longest = config.rope_scaling or {"rope_type": "default"}, config.max_position_embeddings
    stretched = 0.0
    if config.trained_rope:
        return longest
    if rope["rope_type"] in ("linear", "dynamic"):
        stretched = longest * rope["factor"]
    elif rope["rope_type"] in ("yarn", "longrope"):
        stretched = rope["original_max_position_embeddings"] * rope.get("factor", 1.0)
    return max(longest, int(min(stretched, MOST_POSITIONS)))


def _power(base: float, exponents: Array) -> Array:
    dtype = exponents.dtype.type
    power: Array = np.power(np.float64(dtype(base)), exponents.astype(np.float64))
    return power.astype(dtype)


def _default(config: LlamaConfig, p: Parameters, exponents: Array, seq_len: Length) -> Frequencies:
    return exponents.dtype.type(1) / _power(config.rope_theta, exponents), 1.0


def _linear(config: LlamaConfig, p: Parameters, exponents: Array, seq_len: Length) -> Frequencies:
    return _default(config, p, exponents, seq_len)[0] / exponents.dtype.type(p["factor"]), 1.0


def _dynamic(config: LlamaConfig, p: Parameters, exponents: Array, seq_len: Length) -> Frequencies:
    base, longest = config.rope_theta, config.max_position_embeddings
    if seq_len is not None and seq_len > longest:
        dtype = exponents.dtype.type
        stretch = dtype(p["factor"]) * dtype(seq_len) / dtype(longest) - dtype(p["factor"] - 1)
        grown = np.power(np.float64(stretch), config.rotary_dim / (config.rotary_dim - 2))
        base = float(dtype(base) * dtype(grown))
    return exponents.dtype.type(1) / _power(base, exponents), 1.0


def _yarn(config: LlamaConfig, p: Parameters, exponents: Array, seq_len: Length) -> Frequencies:
    dtype, dim = exponents.dtype.type, config.rotary_dim
    original = p["original_max_position_embeddings"]
    factor = p.get("factor", config.max_position_embeddings / original)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    def pair_that_turns(times: float) -> float:
        """Return the index of the pair that makes this many turns within the original context."""
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_that_turns(p.get("beta_fast", 32.0)), pair_that_turns(p.get("beta_slow", 1.0))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if high == low else 0.0
    ramp = np.clip((np.arange(dim // 2).astype(dtype) - dtype(low)) / dtype(high - low), dtype(0), dtype(1))
    turns = _power(config.rope_theta, exponents)
    kept = dtype(1) - ramp  # 1: fast pairs stay as they are; 0: slow pairs are stretched by the factor
    frequencies = dtype(1) / (dtype(factor) * turns) * (dtype(1) - kept) + dtype(1) / turns * kept
    mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
    implied = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return frequencies, p.get("attention_factor", implied)


def _longrope(config: LlamaConfig, p: Parameters, exponents: Array, seq_len: Length) -> Frequencies:
    original = p["original_max_position_embeddings"]
    factor = p.get("factor", config.max_position_embeddings / original)
    implied = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    is_long = seq_len is not None and seq_len > original
    stretch = np.array(p["long_factor" if is_long else "short_factor"]).astype(exponents.dtype)
    frequencies = exponents.dtype.type(1) / (stretch * _power(config.rope_theta, exponents))
    return frequencies, p.get("attention_factor", implied)


def _llama3(config: LlamaConfig, p: Parameters, exponents: Array, seq_len: Length) -> Frequencies:
    dtype = exponents.dtype.type
    factor, low, high = (dtype(p[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = dtype(p["original_max_position_embeddings"])
    plain, _ = _default(config, p, exponents, seq_len)
    wavelength = dtype(2 * math.pi) / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (dtype(1) - smooth) * plain / factor + smooth * plain
    slow, fast = wavelength > original / low, wavelength < original / high
    return np.where(slow, plain / factor, np.where(fast, plain, blended)), 1.0


_FORMULAS: dict[str, Callable[[LlamaConfig, Parameters, Array, Length], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
