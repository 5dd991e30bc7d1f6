"""RoPE frequencies against what transformers computed, at every kind and at far positions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.models.config import LlamaConfig
from monoplan.models.rope_scaling import context_length, inverse_frequencies, rope_tables, table_key

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "llama").glob("*.npz"))
FACTORS = [1.0 + 0.1 * i for i in range(16)]
LONGROPE = {"type": "longrope", "short_factor": FACTORS, "long_factor": [2 * f for f in FACTORS]}


def model(**rope: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=4096, rope_scaling=rope or None
    )  # head_dim 32


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_frequencies_are_those_of_transformers(path: Path) -> None:
    golden = np.load(path)
    config = LlamaConfig.from_dict(json.loads(str(golden["meta"]))["configs"]["new"])
    for record, expected in enumerate(golden["inv_freq"]):
        seq_len = int(golden["position_ids"][record].max()) + 1
        found, factor = inverse_frequencies(config, seq_len, np.float32)
        # One unit in the last place is what two libraries' powers may differ by; almost all are equal.
        np.testing.assert_array_max_ulp(found.astype(np.float32), expected, maxulp=1)
        assert np.mean(found.astype(np.float32) == expected) > 0.9
        assert factor == pytest.approx(float(golden["attention_scaling"][record]), rel=1e-12)
        exact, _ = inverse_frequencies(config, seq_len)
        np.testing.assert_allclose(exact, expected, rtol=1e-6)
        # The key stands for the length: the same tables come of it.
        key = table_key(config, seq_len) or None
        np.testing.assert_array_equal(inverse_frequencies(config, key, np.float32)[0], found)


def test_there_are_goldens_of_every_kind() -> None:
    names = {path.stem for path in GOLDEN}
    for kind in ("default", "linear", "dynamic", "yarn", "longrope", "llama3"):
        assert f"rope_{kind}" in names


def test_default_and_linear_by_hand() -> None:
    plain, factor = inverse_frequencies(model())
    assert plain.dtype == np.float64 and plain.shape == (16,) and factor == 1.0
    np.testing.assert_allclose(plain, [10000.0 ** (-2 * i / 32) for i in range(16)], rtol=1e-15)
    np.testing.assert_allclose(inverse_frequencies(model(type="linear", factor=4))[0], plain / 4, rtol=1e-15)


def test_llama3_leaves_fast_pairs_and_stretches_slow_ones() -> None:
    config = model(type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=512)
    ratio = inverse_frequencies(model())[0] / inverse_frequencies(config)[0]
    wavelength = 2 * math.pi / inverse_frequencies(model())[0]
    np.testing.assert_allclose(ratio[wavelength < 128], 1.0)
    np.testing.assert_allclose(ratio[wavelength > 512], 8.0)
    between = ratio[(wavelength > 128) & (wavelength < 512)]
    assert between.size and ((between > 1) & (between < 8)).all()


def test_dynamic_grows_only_beyond_the_trained_length() -> None:
    config = model(type="dynamic", factor=2.0)
    plain, _ = inverse_frequencies(model())
    np.testing.assert_array_equal(inverse_frequencies(config, 4096)[0], plain)
    base = 10000.0 * (2.0 * 8192 / 4096 - 1.0) ** (32 / 30)
    np.testing.assert_allclose(inverse_frequencies(config, 8192)[0], base ** (-np.arange(0, 32, 2) / 32), rtol=1e-14)
    assert [table_key(config, n) for n in (1, 4096, 4097, 9000)] == [0, 0, 4097, 9000]


def test_longrope_has_two_tables() -> None:
    config = model(**LONGROPE, original_max_position_embeddings=1024)
    plain, _ = inverse_frequencies(model())
    short, factor = inverse_frequencies(config, 1024)
    np.testing.assert_allclose(short, plain / FACTORS, rtol=1e-14)
    np.testing.assert_allclose(inverse_frequencies(config, 1025)[0], short / 2, rtol=1e-14)
    assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
    assert [table_key(config, n) for n in (1, 1024, 1025, 4000)] == [0, 0, 1025, 1025]
    same = model(type="longrope", short_factor=FACTORS, long_factor=FACTORS, attention_factor=1.0)
    assert table_key(same, 10**6) == 0


def test_yarn_attention_factor() -> None:
    assert inverse_frequencies(model(type="yarn", factor=8))[1] == pytest.approx(0.1 * math.log(8) + 1)
    assert inverse_frequencies(model(type="yarn", factor=8, attention_factor=1.5))[1] == 1.5
    scaled = inverse_frequencies(model(type="yarn", factor=8, mscale=0.7, mscale_all_dim=1.0))[1]
    assert scaled == pytest.approx((0.07 * math.log(8) + 1) / (0.1 * math.log(8) + 1))
    # Without a factor it is the ratio of the two lengths.
    assert inverse_frequencies(model(type="yarn", original_max_position_embeddings=512))[1] == pytest.approx(
        0.1 * math.log(8) + 1
    )


def test_tables_are_sine_and_cosine_of_float32_angles() -> None:
    config = model(type="yarn", factor=4.0)
    positions = np.array([0, 1, 1000, 8000, 20000, 60000])
    sin, cos = rope_tables(config, positions)
    assert sin.shape == cos.shape == (6, 16) and sin.dtype == cos.dtype == np.float32
    frequencies, factor = inverse_frequencies(config, dtype=np.float32)
    angles = (positions[:, None].astype(np.float32) * frequencies.astype(np.float32)).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=1e-7)
    np.testing.assert_allclose(cos[0], factor, rtol=1e-7)
    exact_sin, _ = rope_tables(config, positions, exact=True)
    assert 1e-6 < np.abs(exact_sin - sin).max() < 1e-2  # far out the two differ: that is why there is a choice
    np.testing.assert_array_equal(rope_tables(config, 1001)[0][1000], sin[2])


def test_rotary_part_of_a_head() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, partial_rotary_factor=0.5)
    assert rope_tables(config, 3)[0].shape == (3, 8)
    np.testing.assert_allclose(inverse_frequencies(config)[0], 10000.0 ** (-np.arange(0, 16, 2) / 16))


@pytest.mark.parametrize("positions", [np.array([-1]), np.array([0.5]), np.array([True])])
def test_bad_positions(positions: Any) -> None:
    with pytest.raises(ArgumentError, match="positions must be integers"):
        rope_tables(model(), positions)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "ntk", "factor": 2}, "unknown rope kind 'ntk'"),
        ({"type": "proportional", "factor": 2}, "unknown rope kind 'proportional'"),
        ({"type": "linear"}, "missing factor"),
        ({"type": "linear", "factor": 0}, "factor of rope kind 'linear' must be a positive number"),
        ({"type": "linear", "factor": "2"}, "must be a positive number"),
        ({"type": "linear", "factor": float("inf")}, "must be a positive number"),
        ({"type": "linear", "factor": 1e-320}, "must be a positive number from 1e-30 to 1e30, got 1e-320"),
        ({"type": "linear", "factor": 10**400}, "must be a positive number from 1e-30 to 1e30"),
        ({"type": "linear", "factor": 2, "mrope_section": [8, 8]}, "unknown mrope_section"),
        ({"type": "default", "mrope_section": [8, 8]}, "unknown mrope_section"),
        ({"type": "llama3", "factor": 8, "low_freq_factor": 1}, "missing high_freq_factor"),
        ({"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}, "greater than low_freq"),
        ({"type": "yarn", "factor": 8, "truncate": 1}, "truncate of rope kind 'yarn' must be true or false"),
        ({"type": "yarn", "original_max_position_embeddings": 1.5}, "must be an integer of 2 or more"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "must be 16 numbers"),
        ({"type": "longrope", "short_factor": 1.0, "long_factor": 1.0}, "must be a list of positive numbers"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_parameters(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        model(**rope)


def test_old_name_of_longrope() -> None:
    scaling = model(**{**LONGROPE, "type": "su"}, original_max_position_embeddings=1024).rope_scaling
    assert scaling is not None and scaling["rope_type"] == "longrope"


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({}, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"type": "linear", "factor": 0.5}, 4096),
        ({"type": "dynamic", "factor": 2.5}, 10240),
        ({"type": "dynamic", "factor": 1e30}, 2**31 - 1),
        ({"type": "yarn", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),  # it is in 4096 already
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}, 8192),
        ({"type": "yarn", "original_max_position_embeddings": 1024}, 4096),
        ({**LONGROPE, "original_max_position_embeddings": 1024}, 4096),
        ({**LONGROPE, "factor": 4.0}, 16384),
        (
            {
                "type": "llama3",
                "factor": 32,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 1024,
            },
            4096,
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_context_that_scaling_gives(rope: dict[str, Any], length: int) -> None:
    assert context_length(model(**rope)) == length
