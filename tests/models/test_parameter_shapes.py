"""What a configuration says of a checkpoint is what the model made from it has."""

from __future__ import annotations

from typing import Any

import pytest

from monoplan.models import LlamaForCausalLM
from monoplan.models.load.checkpoint import parameter_shapes
from tests.models.support import tiny_config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"qk_norm": True},
        {"head_dim": 16},
        {"mlp_bias": True},
        {"attention_bias": True},
        {"attention_bias": True, "attention_out_bias": False},
        {"num_key_value_heads": 1},
    ],
    ids=str,
)
def test_shapes_are_those_of_the_model(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    model = LlamaForCausalLM.from_config(config)
    assert parameter_shapes(config, 99) == {name: t.shape for name, t in model.state_dict().items()}


def test_layers_that_no_checkpoint_has_are_not_listed() -> None:
    few, many = (parameter_shapes(tiny_config(num_hidden_layers=n), 3) for n in (3, 2**31 - 1))
    assert few == many
