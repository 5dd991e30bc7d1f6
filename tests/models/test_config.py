"""LlamaConfig: the documented defaults, every spelling of config.json, one clear error for each bad value."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from monoplan.ir.errors import LoadError
from monoplan.models.config import LlamaConfig

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "llama").glob("*.npz"))
SMALL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_defaults_are_those_of_the_document() -> None:
    config = LlamaConfig()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32000, 4096, 11008)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (32, 32, 32)
    assert (config.head_dim, config.rotary_dim, config.max_position_embeddings) == (128, 128, 2048)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)
    assert config.attention_bias and config.attention_out_bias and not config.mlp_bias
    assert (config.dtype, config.hidden_act, config.tie_word_embeddings) == ("float32", "silu", False)
    assert config.base_model_tp_plan["layers.*.self_attn.o_proj"] == "rowwise"
    assert config.base_model_tp_plan["layers.*.mlp.up_proj"] == "colwise"
    assert set(config.base_model_pp_plan) == {"embed_tokens", "layers", "norm"}


def test_config_json_without_attention_bias_has_none() -> None:
    assert LlamaConfig().attention_bias is True
    assert LlamaConfig.from_dict({"model_type": "llama"}).attention_bias is False
    assert LlamaConfig.from_dict(SMALL | {"attention_bias": True}).attention_out_bias is True


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_recorded_spelling_is_the_same_model(path: Path) -> None:
    meta = json.loads(str(np.load(path)["meta"]))
    configs = {name: LlamaConfig.from_dict(data) for name, data in meta["configs"].items()}
    assert len(set(configs.values())) == 1, configs
    config = configs["new"]
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    shapes = {name: tuple(shape) for name, shape in meta["shapes"].items()}
    layer = "model.layers.0.self_attn."
    assert shapes[layer + "q_proj.weight"] == (config.num_attention_heads * config.head_dim, config.hidden_size)
    assert shapes[layer + "k_proj.weight"][0] == config.num_key_value_heads * config.head_dim
    assert (layer + "k_proj.bias" in shapes) == config.attention_bias
    assert (layer + "o_proj.bias" in shapes) == config.attention_out_bias
    assert (layer + "q_norm.weight" in shapes) == config.qk_norm
    assert ("model.layers.0.mlp.up_proj.bias" in shapes) == config.mlp_bias
    assert ("lm_head.weight" in shapes) != config.tie_word_embeddings


def test_families_and_their_defaults() -> None:
    mistral = LlamaConfig.from_dict({"model_type": "mistral"})
    assert (mistral.num_key_value_heads, mistral.sliding_window, mistral.intermediate_size) == (8, 4096, 14336)
    qwen2 = LlamaConfig.from_dict({"model_type": "qwen2"})
    assert qwen2.attention_bias and not qwen2.attention_out_bias
    assert (qwen2.vocab_size, qwen2.sliding_window, qwen2.eos_token_id) == (151936, None, None)
    qwen3 = LlamaConfig.from_dict({"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.attention_bias) == (128, True, False)
    assert LlamaConfig.from_dict(SMALL | {"model_type": "smollm"}).model_type == "llama"
    assert LlamaConfig.from_dict({"architectures": ["MistralForCausalLM"]}).model_type == "mistral"


def test_windows_of_single_layers() -> None:
    data = SMALL | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    config = LlamaConfig.from_dict(data)
    assert [config.layer_window(layer) for layer in range(2)] == [None, 6]
    everywhere = LlamaConfig.from_dict(data | {"max_window_layers": 0})
    assert everywhere.layer_types is None and everywhere.layer_window(0) == 6
    nowhere = LlamaConfig.from_dict(data | {"max_window_layers": 9})
    assert nowhere.sliding_window is None and nowhere.layer_window(1) is None


def test_rope_in_old_and_new_keys() -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **rope}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **rope}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **rope}},
        {"rope_parameters": {"full_attention": {"rope_type": "llama3", "rope_theta": 5e5, **rope}}},
    ]
    configs = [LlamaConfig.from_dict(SMALL | spelling) for spelling in spellings]
    assert len(set(configs)) == 1
    assert configs[0].rope_theta == 5e5
    assert configs[0].rope_scaling == {"rope_type": "llama3", **rope}


def test_no_rope_theta_is_the_default() -> None:
    assert LlamaConfig.from_dict(SMALL | {"rope_theta": None}) == LlamaConfig.from_dict(SMALL)
    assert LlamaConfig.from_dict(SMALL).rope_theta == 10000.0


def test_constructor_takes_both_names_of_the_dtype() -> None:
    assert LlamaConfig(torch_dtype="bfloat16").dtype == "bfloat16"
    assert LlamaConfig(torch_dtype="bfloat16").torch_dtype == "bfloat16"
    for dtype in ("bf16", "torch.bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert LlamaConfig(dtype=dtype).dtype == "bfloat16"
    assert LlamaConfig(dtype=np.float16).dtype == "float16"
    assert LlamaConfig.from_dict(SMALL | {"torch_dtype": "float16"}).dtype == "float16"
    assert dataclasses.replace(LlamaConfig(dtype="float16"), dtype="bfloat16").dtype == "bfloat16"


def test_a_configuration_stays_as_it_is() -> None:
    config = LlamaConfig(rope_scaling={"type": "linear", "factor": 2}, eos_token_id=[1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="can't be changed"):
        config.rope_scaling["factor"] = 4.0  # type: ignore[index]
    assert config.eos_ids == (1, 2)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert hash(config) == hash(copy.deepcopy(config))


def test_family_follows_from_features() -> None:
    assert LlamaConfig(attention_bias=False).model_type == "llama"
    assert LlamaConfig(attention_bias=False, sliding_window=8).model_type == "mistral"
    assert LlamaConfig(attention_out_bias=False).model_type == "qwen2"
    assert LlamaConfig(qk_norm=True).model_type == "qwen3"
    with pytest.raises(LoadError, match="can't say: mlp_bias"):
        LlamaConfig(qk_norm=True, mlp_bias=True).to_dict()
    with pytest.raises(LoadError, match="turns 64 values"):
        LlamaConfig(partial_rotary_factor=0.5).to_dict()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 0}, "vocab_size must be a positive integer"),
    ({"hidden_size": -64}, "hidden_size must be a positive integer"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
    ({"num_attention_heads": "4"}, "num_attention_heads must be a positive integer"),
    ({"intermediate_size": 2**40}, "intermediate_size must be a positive integer below"),
    ({"hidden_size": None}, "hidden_size must be a positive integer"),
    ({"num_attention_heads": 3, "num_key_value_heads": 1}, "is not a multiple of 3 heads"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"head_dim": 15}, "head_dim 15 gives 15 rotated values"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ({"rope_theta": float("nan")}, "rope_theta must be a number"),
    ({"rope_theta": 0}, "rope_theta must be a number from 1.001 to 1e[+]30, got 0"),
    ({"rope_theta": -1e4}, "rope_theta must be a number"),
    ({"rope_theta": False}, "rope_theta must be a number"),
    ({"rope_theta": []}, "rope_theta must be a number"),
    ({"rope_theta": {}}, "rope_theta must be a number"),
    ({"rope_theta": ""}, "rope_theta must be a number"),
    ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    ({"hidden_act": "swiglu_oai"}, "unknown hidden_act 'swiglu_oai'"),
    ({"hidden_act": ["silu"]}, "unknown hidden_act"),
    ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
    ({"eos_token_id": [2, -3]}, "eos_token_id must be a token id"),
    ({"torch_dtype": "float64"}, "unsupported dtype 'float64'"),
    ({"dtype": "float8_e4m3fn"}, "unsupported dtype 'float8_e4m3fn'"),
    ({"model_type": "gemma2"}, "unsupported model_type 'gemma2'"),
    ({"model_type": "smollm3"}, "unsupported model_type 'smollm3'"),
    ({"model_type": None}, "names no model_type"),
    ({"sliding_window": 4096}, "a llama model has no sliding_window"),
    ({"layer_types": ["full_attention", "chunked"]}, "layer_types of a llama model must all be full_attention"),
    ({"layer_types": 5}, "layer_types of a llama model must all be full_attention, got 5"),
    ({"rope_scaling": {"type": "yarrn", "factor": 2}}, "unknown rope kind 'yarrn'"),
    ({"rope_scaling": {"type": ["yarn"]}}, "unknown rope kind"),
    ({"rope_scaling": "linear"}, "rope_scaling must be a dictionary"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not defined for a llama model"),
    ({"final_logit_softcapping": 30.0}, "unsupported key 'final_logit_softcapping'"),
    ({"residual_multiplier": 0.2}, "unsupported key 'residual_multiplier'"),
    ({"num_local_experts": 8}, "unsupported key 'num_local_experts'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "unsupported key 'quantization_config'"),
    ({"rope_interleaved": True}, "unsupported key 'rope_interleaved'"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
        "differ between layers",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: str(value)[:40])
def test_each_bad_value_is_one_clear_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        LlamaConfig.from_dict(SMALL | change, where="some/config.json")
    assert "some/config.json" in str(caught.value)


def test_harmless_keys_pass() -> None:
    extra = {
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "rope_interleaved": False,
        "logits_scaling": 1.0,
        "_name_or_path": "x",
        "is_llama_config": True,
        "pad_token_id": -1,
        "transformers_version": "4.31.0",
    }
    config = LlamaConfig.from_dict(SMALL | extra)
    assert config == LlamaConfig.from_dict(SMALL)
    assert config.pad_token_id is None


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "nonsense", '{"a": ' * 5000, '"config"'])
def test_a_damaged_config_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match="config.json"):
        LlamaConfig.from_pretrained(tmp_path)


def test_a_missing_config_json(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="can't read config.json"):
        LlamaConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert LlamaConfig.from_pretrained(tmp_path) == LlamaConfig.from_dict(SMALL)


def test_a_number_of_layers_that_no_model_has_makes_no_list() -> None:
    config = LlamaConfig.from_dict({"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 2**31 - 1})
    assert config.layer_types is None  # the weights will not fit it, and say so
