"""Angles that are computed in the graph, as for contexts too long for tables, are those of the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.models import LlamaForCausalLM, rotary
from tests.models.support import tiny_config

LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 24, "attention_factor": 1.2,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "default": None,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "longrope": LONGROPE,
}


@pytest.mark.parametrize("kind", KINDS)
def test_computed_angles_are_those_of_the_tables(
    kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(rope_scaling=KINDS[kind])
    with_tables = LlamaForCausalLM.from_config(config)
    monkeypatch.setattr(rotary, "TABLE_POSITIONS", 95)
    computed = LlamaForCausalLM.from_config(config)
    assert "model.rotary_emb.sin" not in dict(computed.named_buffers())
    ids, valid = rng.integers(0, 90, (2, 40)), np.array([40, 20], np.int32)  # longrope: one row of each kind
    want = with_tables(ids, num_valid=valid).numpy()
    np.testing.assert_array_equal(computed(ids, num_valid=valid).numpy(), want)
    np.testing.assert_allclose(mp.compile(computed)(ids, num_valid=valid), want, rtol=0, atol=1e-4)


def test_a_context_of_any_length_costs_nothing() -> None:
    model = LlamaForCausalLM.from_config(tiny_config(max_position_embeddings=2**31 - 1))
    short = LlamaForCausalLM.from_config(tiny_config())
    llm = mp.compile(model)
    assert llm.max_length == 2**31 - 1
    assert llm.generate_ids([5, 6, 7], 8) == short.generate_ids([5, 6, 7], 8)
