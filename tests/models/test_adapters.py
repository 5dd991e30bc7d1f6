"""LoRA adapters: logits are those that PEFT gives, merged into the weights or kept beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.models import AutoModel
from monoplan.models.generate.generation import Session
from monoplan.models.load.safetensors import save_checkpoint
from tests.golden.weights import random_state_dict
from tests.tolerances import check

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "adapters.npz"))
META = json.loads(str(GOLDEN["meta"]))
IDS = GOLDEN["ids"][None]


def write_adapter(folder: Path, name: str, **changes: Any) -> Path:
    """The recorded adapter as PEFT wrote it."""
    from safetensors.numpy import save_file

    about = META["adapters"][name]
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**about["config"], **changes}))
    shapes = {tensor: tuple(shape) for tensor, shape in about["shapes"].items()}
    save_file(random_state_dict(shapes, about["seed"]), folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    shapes = {name: tuple(shape) for name, shape in META["shapes"].items()}
    save_checkpoint(base / "base", random_state_dict(shapes, 7), META["config"])
    return {"base": base / "base", **{name: write_adapter(base / name, name) for name in META["adapters"]}}


@pytest.fixture(scope="module")
def lm(folders: dict[str, Path]) -> Any:
    lm = mp.compile(AutoModel.from_pretrained(folders["base"]))
    for name in META["adapters"]:
        lm.load_adapter(name, folders[name])
    return lm


@pytest.mark.parametrize("name", META["adapters"])
def test_a_merged_adapter_gives_the_logits_of_peft(folders: dict[str, Path], name: str) -> None:
    model = AutoModel.from_pretrained(folders["base"], adapter=folders[name])
    # PEFT adds products with x, here those of the matrices are added: sums are rounded otherwise.
    check(mp.compile(model)(IDS, all_logits=True)[0], GOLDEN[name], "f32", "model", 4.0)
    plain = mp.compile(AutoModel.from_pretrained(folders["base"]))(IDS, all_logits=True)[0]
    assert np.abs(plain - GOLDEN[name]).max() > 0.1  # the adapter counts


def steps(lm: Any, adapter: str | None) -> Any:
    """Logits of the last tokens: a prompt, then one by one through a cache."""
    from monoplan.models.generate.decoding import Settings, sampling_arrays

    cache, found = lm.new_cache(1, 8), []
    given = {} if adapter is None else {"adapter": adapter}
    for ids in (IDS[:, :15], *(IDS[:, i : i + 1] for i in range(15, IDS.shape[1]))):
        valid = np.array([ids.shape[1]], np.int32)
        choice = sampling_arrays(Settings(), [0.0])
        found.append(lm._run_step(input_ids=ids, past_key_values=cache, num_valid=valid, **choice, **given)["logits"])
    return np.concatenate(found, 1)[0]


@pytest.mark.parametrize("name", META["adapters"])
def test_an_adapter_beside_the_weights_gives_the_logits_of_peft(lm: Any, name: str) -> None:
    check(steps(lm, name), GOLDEN[name][14:], "f32", "model")


def test_an_eager_model_takes_adapters_as_well(folders: dict[str, Path]) -> None:
    model = AutoModel.from_pretrained(folders["base"])
    model.load_adapter("all", folders["all"])
    check(steps(model, "all"), GOLDEN["all"][14:], "f32", "model")


def test_one_plan_serves_adapters_of_all_ranks(lm: Any) -> None:
    before = steps(lm, None)
    for name in ("attention", "other", "attention"):
        check(steps(lm, name), GOLDEN[name][14:], "f32", "model")
    assert sum("q_proj" in plan and "o_proj" not in plan for plan in lm._plans) == 1
    np.testing.assert_array_equal(steps(lm, None), before)  # the weights are as they were


def test_text_with_an_adapter_is_that_of_merged_weights(lm: Any, folders: dict[str, Path]) -> None:
    prompt, session = [5, 9, 2] * 4, Session()
    texts = {}
    for name in ("attention", "all"):
        merged = mp.compile(AutoModel.from_pretrained(folders["base"], adapter=folders[name]))
        want = merged.generate_ids(prompt, 20, eos_token_id=())
        assert lm.generate_batch([prompt], 20, adapter=name, eos_token_id=())[0].ids == want
        for drafts in ({}, {"lookup": True}):
            stream = lm.generate(prompt, 20, adapter=name, session=session, eos_token_id=(), **drafts)
            assert list(stream) == []
            assert stream.result.ids == want  # the cache of another adapter is not used
        texts[name] = want
    assert texts["attention"] != texts["all"]


def test_low_bit_weights_take_an_adapter(folders: dict[str, Path]) -> None:
    model = AutoModel.from_pretrained(folders["base"])
    lm = mp.compile(model, dtype="q8_0")
    lm.load_adapter("all", folders["all"])
    want = GOLDEN["all"][14:]
    assert np.abs(steps(lm, "all") - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora of the adapter is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save of the adapter is not supported"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "IA3"}, "type 'IA3' is not supported"),
        ({"r": 5}, "not rank 5"),
        ({"r": "4"}, "r of the adapter must be a number"),
        ({"lora_alpha": 0}, "lora_alpha of the adapter must be a number"),
        ({"rank_pattern": {"(": 3}}, "pattern"),
        ({"rank_pattern": [3]}, "rank_pattern of the adapter"),
        ({"something_new": 3}, "something_new of the adapter is not supported"),
    ],
)
def test_what_is_no_plain_adapter_is_refused(folders: Any, tmp_path: Path, changes: Any, message: str) -> None:
    folder = write_adapter(tmp_path / "x", "attention", **changes)
    with pytest.raises(LoadError, match=message):
        AutoModel.from_pretrained(folders["base"], adapter=folder)


def test_an_adapter_that_does_not_fit_is_refused(lm: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    with pytest.raises(ArgumentError, match="there is no adapter 'none'"):
        lm.generate([1], adapter="none")
    with pytest.raises(LoadError, match="no adapter in the directory"):
        lm.load_adapter("x", folders["base"])
    folder, known = write_adapter(tmp_path / "x", "attention"), dict(lm.adapters)
    module = "base_model.model.model.layers.7.self_attn.q_proj.lora_"
    for tensors, message in (
        ({f"{module}A.weight": (4, 32), f"{module}B.weight": (32, 4)}, "the model has no model.layers.7"),
        ({f"{module}A.weight": (4, 32)}, "needs two matrices"),
        (
            {f"{module.replace('7', '1')}A.weight": (4, 30), f"{module.replace('7', '1')}B.weight": (32, 4)},
            r"\[32, 30\]",
        ),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 32)}, "is not supported"),
        ({}, "no matrices"),
    ):
        save_file({n: np.zeros(s, np.float32) for n, s in tensors.items()}, folder / "adapter_model.safetensors")
        with pytest.raises(LoadError, match=message):
            lm.load_adapter("x", folder)
    assert lm.adapters == known
