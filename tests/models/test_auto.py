"""Loading and saving whole models: what fits is loaded lazily, what does not is one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.models import AutoLlamaModel, LlamaForCausalLM
from monoplan.models.load.safetensors import open_checkpoint, save_checkpoint
from tests.models.support import tiny_checkpoint, tiny_config, tiny_tokenizer_files

IDS = np.array([[5, 6, 7, 8]])


def rewrite(directory: Path, change: Any) -> None:
    """Saves the checkpoint again after `change` has worked on its tensors."""
    opened = open_checkpoint(directory)
    state = {name: np.array(opened.tensor(name)) for name in opened.names()}
    change(state)
    config = json.loads((directory / "config.json").read_text())
    save_checkpoint(directory, state, config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", [5_000_000_000, 20_000])
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, tied: bool, shard: int) -> None:
    model = LlamaForCausalLM.from_config(tiny_config(tie_word_embeddings=tied), seed=2)
    model.save_pretrained(tmp_path, max_shard_bytes=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard > 20_000)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config == model.config
    assert set(again.state_dict()) == set(model.state_dict())
    np.testing.assert_array_equal(again(IDS).numpy(), model(IDS).numpy())
    assert ("lm_head.weight" in open_checkpoint(tmp_path).names()) == (not tied)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_come_in_the_dtype_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    directory = tiny_checkpoint(tmp_path)
    model = AutoLlamaModel.from_pretrained(directory, dtype=dtype)
    assert {p.numpy().dtype.name for p in model.parameters()} == {dtype}
    assert model.config.dtype == dtype
    exact = AutoLlamaModel.from_pretrained(directory)
    np.testing.assert_allclose(model(IDS).numpy().astype("f4"), exact(IDS).numpy(), rtol=0, atol=0.3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_a_dtype_in_config_json_it_is_that_of_the_weights(tmp_path: Path, dtype: str) -> None:
    directory = tiny_checkpoint(tmp_path, dtype=dtype)
    # Norms are often kept in float32: what most weights have decides.
    rewrite(directory, lambda s: s.update({n: a.astype("float32") for n, a in s.items() if "norm" in n}))
    config = json.loads((directory / "config.json").read_text())
    del config["torch_dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    model = AutoLlamaModel.from_pretrained(directory)
    assert model.config.dtype == dtype and {p.numpy().dtype.name for p in model.parameters()} == {dtype}
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    assert AutoLlamaModel.from_pretrained(directory).config.dtype == "float32"


@pytest.mark.parametrize("target", ["eager", "cpu"])
def test_weights_are_a_copy_and_a_file_that_is_cut_ends_nothing(tmp_path: Path, target: str) -> None:
    directory = tiny_checkpoint(tmp_path)
    model = AutoLlamaModel.from_pretrained(directory)
    lm = model if target == "eager" else mp.compile(model)
    before = lm.generate_ids([1, 2, 3], 4)
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert lm.generate_ids([1, 2, 3], 4) == before
    with pytest.raises(LoadError, match="damaged"):
        AutoLlamaModel.from_pretrained(directory)


@pytest.mark.parametrize("target", ["eager", "cpu"])
def test_a_file_that_is_cut_before_its_weights_are_read_is_an_error(tmp_path: Path, target: str) -> None:
    directory = tiny_checkpoint(tmp_path)
    model = AutoLlamaModel.from_pretrained(directory)
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(LoadError, match="model.safetensors changed while it was being loaded"):
        (model if target == "eager" else mp.compile(model)).generate_ids([1, 2, 3], 4)


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)

    def damage(state: dict[str, Any]) -> None:
        del state["model.norm.weight"], state["model.layers.0.mlp.up_proj.weight"]
        state["model.layers.7.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
        state["lm_head.weight"] = state["lm_head.weight"][:-1]

    rewrite(directory, damage)
    with pytest.raises(LoadError) as error:
        AutoLlamaModel.from_pretrained(directory)
    text = str(error.value)
    assert "missing: model.layers.0.mlp.up_proj.weight, model.norm.weight" in text
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in text
    assert "wrong shape: lm_head.weight is [99, 32], not [100, 32]" in text


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_base_model_has_no_head(tmp_path: Path, prefix: str) -> None:
    directory = tiny_checkpoint(tmp_path)

    def behead(state: dict[str, Any]) -> None:
        del state["lm_head.weight"]
        for name in list(state):
            state[prefix + name.removeprefix("model.")] = state.pop(name)

    rewrite(directory, behead)
    with pytest.raises(LoadError, match="it is a base model without a head: there is no lm_head.weight"):
        AutoLlamaModel.from_pretrained(directory)


def test_a_long_list_of_names_is_cut(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    with pytest.raises(LoadError, match="and 24 more"):
        AutoLlamaModel.from_pretrained(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 100_000}, "missing: model.layers.2.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 2**31 - 1}, "missing: model.layers.2.self_attn.q_proj.weight"),
        ({"hidden_size": 2**30}, r"model.embed_tokens.weight is \[100, 32\], not \[100, 1073741824\]"),
        ({"vocab_size": 2**31 - 1, "intermediate_size": 2**31 - 1}, "wrong shape: "),
    ],
    ids=str,
)
def test_sizes_that_no_memory_has_are_compared_before_the_model_is_made(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    directory = tiny_checkpoint(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(LoadError, match=message):
        AutoLlamaModel.from_pretrained(directory)


def test_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, lambda state: state.update({name: np.zeros(4, np.float32)}))
    AutoLlamaModel.from_pretrained(directory)


def test_a_second_copy_of_a_tied_embedding_must_be_equal(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    rewrite(directory, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].copy()}))
    AutoLlamaModel.from_pretrained(directory)
    rewrite(directory, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"] + 1}))
    with pytest.raises(LoadError, match="differs from model.embed_tokens.weight"):
        AutoLlamaModel.from_pretrained(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_copy_is_equal_where_both_are_not_numbers(tmp_path: Path, dtype: str) -> None:
    directory = tiny_checkpoint(tmp_path, tie_word_embeddings=True, dtype=dtype)

    def damage(state: dict[str, Any]) -> None:
        state["model.embed_tokens.weight"][3, 4] = np.nan
        state["lm_head.weight"] = state["model.embed_tokens.weight"].copy()

    rewrite(directory, damage)
    AutoLlamaModel.from_pretrained(directory)


@pytest.mark.parametrize("dtype", ["int8", "bool", "int64", "uint8"])
def test_weights_that_are_not_floating_point_are_refused(tmp_path: Path, dtype: str) -> None:
    directory, name = tiny_checkpoint(tmp_path), "model.layers.1.mlp.up_proj.weight"
    rewrite(directory, lambda state: state.update({name: state[name].astype(dtype)}))
    with pytest.raises(LoadError, match=f"not floating point: {name} is {dtype}\n.*use a checkpoint in float32"):
        AutoLlamaModel.from_pretrained(directory)


def test_the_tokenizer_is_made_when_it_is_used(tmp_path: Path) -> None:
    LlamaForCausalLM.from_config(tiny_config()).save_pretrained(tmp_path)
    model = AutoLlamaModel.from_pretrained(tmp_path)  # there is no tokenizer.json yet
    with pytest.raises(LoadError, match=r"no tokenizer\.json"):
        _ = model.tokenizer
    tiny_tokenizer_files(tmp_path)
    assert model.tokenizer is model.tokenizer and model.tokenizer.encode("a")[0] == 0


def test_saving_takes_the_tokenizer_along(tmp_path: Path) -> None:
    model = AutoLlamaModel.from_pretrained(tiny_checkpoint(tmp_path / "one"))
    model.save_pretrained(tmp_path / "two")
    again = AutoLlamaModel.from_pretrained(tmp_path / "two")
    again.name_or_path = ""  # as a model whose tokenizer came out of a GGUF file: the object itself is written
    again.save_pretrained(tmp_path / "three")
    third = AutoLlamaModel.from_pretrained(tmp_path / "three")
    for other in (again, third):
        assert other.tokenizer.encode("Hello") == model.tokenizer.encode("Hello")
        assert other.tokenizer.chat_template == model.tokenizer.chat_template
        assert other.tokenizer.eos_ids == model.tokenizer.eos_ids


def test_a_model_that_came_without_a_tokenizer_is_saved_without_one(tmp_path: Path) -> None:
    LlamaForCausalLM.from_config(tiny_config(), seed=2).save_pretrained(tmp_path / "one")
    model = AutoLlamaModel.from_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "two")
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == ["config.json", "model.safetensors"]
    again = AutoLlamaModel.from_pretrained(tmp_path / "two")
    np.testing.assert_array_equal(again(IDS).numpy(), model(IDS).numpy())


def test_nothing_is_printed_unless_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = tiny_checkpoint(tmp_path)
    AutoLlamaModel.from_pretrained(directory)
    assert capfd.readouterr() == ("", "")
    AutoLlamaModel.from_pretrained(directory, verbose=True)
    assert "parameters as float32 in" in capfd.readouterr().err


def test_a_model_needs_a_path() -> None:
    for path in (None, 5, b"model"):
        with pytest.raises(ArgumentError, match="a model is loaded from a path, got"):
            AutoLlamaModel.from_pretrained(path)  # type: ignore[arg-type]


def test_the_device_is_where_the_model_is_compiled_for(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    for device in ("cpu", "cuda", "reference"):
        model = AutoLlamaModel.from_pretrained(tmp_path, device=device)
        assert mp.compile(model).target == mp.compile(model, dtype="bfloat16").target == device
        assert mp.compile(model, target="cpu").target == "cpu"
    assert mp.compile(model, mp.spec(1, 3, dtype="int64")).target == "reference"
    with pytest.raises(ArgumentError, match="unknown target 'tpu'\n.*cpu, cuda, reference"):
        AutoLlamaModel.from_pretrained(tmp_path, device="tpu")
    model.device = "tpu"
    with pytest.raises(ArgumentError, match="unknown target 'tpu'"):
        mp.compile(model)
