"""Model families against logits of transformers: recorded ones, and random configurations where it is installed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.frontend.parameter import no_init
from monoplan.ir.errors import LoadError
from monoplan.models import AutoModel
from monoplan.models.families import family_of
from monoplan.models.load.safetensors import open_checkpoint, save_checkpoint
from tests.golden.family_cases import KINDS, weights
from tests.golden.weights import fingerprint
from tests.matrices import partly
from tests.models.family_gguf import FILES, VOCABULARY, write

GOLDEN = Path(__file__).parents[1] / "golden"
RANDOM = 20  # configurations of each family
ALWAYS = (("gemma2", 0), ("phi3", 0), ("gpt2", 0))  # plans of the others are made by `full`
REFUSED: dict[str, dict[str, Any]] = {
    "gemma2": {"use_bidirectional_attention": True},
    "gemma3_text": {"attn_logit_softcapping": 50.0, "partial_rotary_factor": 0.5},
    "gpt2": {"add_cross_attention": True},
    "stablelm": {"qk_layernorm": True},
    "falcon": {"alibi": True},
    "deepseek_v2": {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gpt_oss": {"swiglu_limit": "7"},
}
# Kernels of a decoder layer, 7 of others. Experts whose columns fill no panels, as here, norm their rows by one more.
KERNELS = {"mixtral": 10, "qwen2_moe": 10, "qwen3_moe": 10, "gpt_oss": 10, "deepseek_v2": 11}
MODELS = [(kind, number) for kind in KINDS for number in range(3)]


def golden_checkpoint(kind: str, number: int, folder: Path) -> tuple[Any, Any, Any]:
    """Writes a recorded model to a folder; its ids and logits, and what they are of."""
    arrays = np.load(GOLDEN / "families" / f"{kind}.npz")
    meta = json.loads(str(arrays["meta"]))
    model = meta["models"][number]
    state = weights(kind, {name: tuple(shape) for name, shape in model["shapes"].items()}, model["seed"])
    assert fingerprint(state) == model["weights_sha256"]
    save_checkpoint(folder, state, model["config"])
    return arrays[f"ids_{number}"], arrays[f"logits_{number}"], meta


def logits(model: Any, ids: Any, prompt: int) -> Any:
    """Logits of a prompt in one call, and of the rest one by one through a cache."""
    cache = model.new_cache(1)
    parts = [model(ids[None, :prompt], None, cache, all_logits=True)]
    parts += [model(ids[None, at : at + 1], None, cache, all_logits=True) for at in range(prompt, len(ids))]
    return np.concatenate([np.asarray(part) for part in parts], axis=1)[0]


def check(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * max(1.0, float(np.abs(wanted).max())))


def most_kernels(plan: Any) -> int:
    """Kernels of the decoder layer that has the most."""
    paths = [re.match(r".*\.(?:layers|h)\.\d+", step.kernel.op.loc.path or "") for step, _ in plan.steps()]
    return max(Counter(m[0] for m in paths if m).values())


@pytest.mark.parametrize(("kind", "number"), MODELS)
def test_logits_are_those_of_transformers(kind: str, number: int, tmp_path: Path) -> None:
    ids, wanted, meta = golden_checkpoint(kind, number, tmp_path)
    check(logits(AutoModel.from_pretrained(tmp_path), ids, meta["prompt"])[meta["kept"]], wanted)


@pytest.mark.parametrize(("kind", "number"), partly(MODELS, lambda case: case in ALWAYS))
def test_logits_of_plans_are_those_of_transformers(kind: str, number: int, tmp_path: Path) -> None:
    ids, wanted, meta = golden_checkpoint(kind, number, tmp_path)
    fast = mp.compile(AutoModel.from_pretrained(tmp_path))
    check(logits(fast, ids, meta["prompt"])[meta["kept"]], wanted)
    assert most_kernels(fast.plan) <= KERNELS.get(kind, 7)


def test_kernels_of_deepseek_layers() -> None:
    """A dense layer has 7, one with experts 9, whose columns fill panels; one build takes prompts and tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 64}
    sizes |= {"qk_rope_head_dim": 16, "moe_intermediate_size": 64, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    family = family_of("deepseek_v2")
    data = {"model_type": "deepseek_v2", "n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    nn.manual_seed(1)
    model = family.model(family.config({**data, **sizes, "num_hidden_layers": 2, "q_lora_rank": None}))
    fast = mp.compile(model)
    for prompt in (1, 5, 23):
        check(logits(fast, IDS, prompt), logits(model, IDS, prompt))
    layers = [re.match(r".*\.layers\.(\d)", step.kernel.op.loc.path or "") for step, _ in fast.plan.steps()]
    assert Counter(m[1] for m in layers if m) == {"0": 7, "1": 9}
    assert fast.stats.compiles == 1


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("gemma2", "query_pre_attn_scalar", (0, -1, None, "x", float("nan"), float("inf"))),
        ("gemma2", "attn_logit_softcapping", (0, float("inf"), "x", [])),
        ("gemma2", "final_logit_softcapping", (0, float("nan"), -1, True)),
        ("gemma3_text", "sliding_window_pattern", (0, 0.5, "x")),
        ("gemma3_text", "num_hidden_layers", (0, 2.0, None, 2**31 - 1)),
        ("gemma3_text", "rope_parameters", (1, {"sliding_attention": 1})),
        ("granite", "logits_scaling", (0, None, float("inf"))),
        ("granite", "embedding_multiplier", (0, float("nan"), [1], True)),
        ("cohere2", "logit_scale", (0, float("nan"), "x")),
        ("qwen3_moe", "decoder_sparse_step", (0, -1, 0.5, None)),
        ("qwen3_moe", "mlp_only_layers", (1, [-1], ["x"])),
        ("qwen3_moe", "moe_intermediate_size", (0, -1, "x")),
        ("qwen3_moe", "num_experts_per_tok", (0, None, 1.5)),
        ("qwen3_moe", "norm_topk_prob", (1, "x")),
        ("deepseek_v2", "routed_scaling_factor", (0, None, float("nan"))),
        ("deepseek_v2", "first_k_dense_replace", (-1, None, 0.5)),
        ("smollm3", "no_rope_layer_interval", (0, "x")),
        ("smollm3", "no_rope_layers", (1, [1], ["x"])),
        ("gpt2", "n_head", (0, "4")),
        ("gptj", "rotary_dim", (0, "x", -2)),
    ],
)
def test_values_that_make_no_sense_are_refused(kind: str, key: str, values: tuple[Any, ...]) -> None:
    """They gave NaN, an error from the inside, or silently another model."""
    family = family_of(kind)
    data = {**(FILES[kind].config if kind in FILES else {}), "model_type": kind}
    family.config(data)
    for value in values:
        data.pop("rope_scaling", None)
        with pytest.raises(LoadError, match=key):
            family.config({**data, key: value})


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(RANDOM))
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind: str, seed: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.golden import record_families as record

    theirs, _ = record.make(kind, 100 + seed, tmp_path)
    plan = mp.compile(AutoModel.from_pretrained(tmp_path))
    random = np.random.Generator(np.random.Philox(seed))
    ids = random.integers(0, theirs.config.vocab_size, 330)
    for prompt, steps in ((int(random.integers(2, 65)), 30), (1, 1), (300, 30)):
        part = ids[: prompt + steps]
        check(logits(plan, part, prompt), record.run(theirs, part, prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_the_same(kind: str, tmp_path: Path) -> None:
    ids, _, _ = golden_checkpoint(kind, 1, tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert again.config == model.config
    np.testing.assert_array_equal(again(ids[None, :9]).numpy(), model(ids[None, :9]).numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_change_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    golden_checkpoint(kind, 0, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    unread = {"moe_num_experts": 8, "value_residual_scale": 0.3, "clip_qkv": 8.0, **REFUSED.get(kind, {})}
    for key, value in unread.items():
        (tmp_path / "config.json").write_text(json.dumps({**data, key: value}))
        with pytest.raises(LoadError, match=key):
            AutoModel.from_pretrained(tmp_path)


def test_vision_towers_are_refused(tmp_path: Path) -> None:
    golden_checkpoint("gemma3_text", 0, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    data = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(LoadError, match="vision tower"):
        AutoModel.from_pretrained(tmp_path)


def gguf_pair(kind: str, folder: Path, low_bit: str = "") -> tuple[Path, Path]:
    """A checkpoint of random weights as a Hugging Face directory and as a GGUF file."""
    written = FILES[kind]
    family = family_of(kind)
    data = {**written.config, "model_type": kind}
    config = family.config(data)
    with no_init():
        model = family.model(config)
    state = weights(kind, {name: p.full_shape for name, p in model.named_parameters()}, 1)
    stored = state if family.layout is None else family.layout(config).stored(state, config)
    save_checkpoint(folder / "hf", stored, data)
    # The converter joins the matrices of experts, as our modules do.
    write(folder / "model.gguf", written, state if "expert_count" in written.metadata else stored, low_bit)
    return folder / "hf", folder / "model.gguf"


@pytest.mark.parametrize("kind", FILES)
def test_a_gguf_file_is_the_same_model(kind: str, tmp_path: Path) -> None:
    ids = np.random.Generator(np.random.Philox(1)).integers(2, VOCABULARY, 24)
    one, other = (logits(AutoModel.from_pretrained(path), ids, 20) for path in gguf_pair(kind, tmp_path))
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-5)


def test_windows_of_a_gguf_file_by_their_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a list of layers there may be the number of layers after which one sees all."""
    wanted = AutoModel.from_pretrained(gguf_pair("olmo3", tmp_path)[1]).config
    key = "attention.sliding_window_pattern"
    for pattern in (4, 2, 0.5, "x"):
        monkeypatch.setitem(FILES["olmo3"].metadata, key, pattern)
        path = gguf_pair("olmo3", tmp_path)[1]
        if isinstance(pattern, int):
            assert (AutoModel.from_pretrained(path).config == wanted) == (pattern == 4)
            continue
        with pytest.raises(LoadError, match=f"{key} must be a positive integer"):
            AutoModel.from_pretrained(path)


LLAMA_CPP = {"gpt_oss": "mxfp4"}  # the type of experts, where it is not q8_0
EXPERTS = [kind for kind, written in FILES.items() if "expert_count" in written.metadata]


@pytest.mark.parametrize("low_bit", ["q4_0", *partly(["q8_0", "mxfp4"], lambda _: False)])
@pytest.mark.parametrize("kind", partly(EXPERTS, lambda kind: kind == "qwen2_moe"))
def test_experts_of_a_gguf_file_stay_in_their_low_bit_type(
    kind: str, low_bit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = gguf_pair(kind, tmp_path, low_bit)
    ids = np.random.Generator(np.random.Philox(1)).integers(2, VOCABULARY, 24)
    model = AutoModel.from_pretrained(path)
    kept = [p for p in model.parameters() if p.type.dtype.is_low_bit]
    assert kept == [p for p in model.parameters() if p.ndim == 3] and {p.type.dtype.name for p in kept} == {low_bit}
    fast = mp.compile(model)
    one, other = logits(fast, ids, 20), logits(AutoModel.from_pretrained(path, dtype="float32"), ids, 20)
    np.testing.assert_allclose(one, other, rtol=0, atol=5e-3)  # rows of x are integers of 15 bits, the cache is f16
    assert f"mp_panel_{low_bit}_four" in fast.source()
    monkeypatch.setattr("monoplan.runtime.cpu.weights.PIECE", 4096)  # matrices by matrices
    again = mp.compile(AutoModel.from_pretrained(path), options={"weight_bytes": 0})
    np.testing.assert_array_equal(logits(again, ids, 20), one)


def mxfp4_of(state: dict[str, Any], rng: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A gpt-oss checkpoint with random experts: as values, and as the blocks and scales that its files have."""
    values, blocks = dict(state), dict(state)
    codes_of = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in [name for name in state if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = state[name].shape
        packed = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 125, packed.shape[:3], np.uint8)
        codes = np.stack([packed % 16, packed // 16], -1).reshape(*packed.shape[:3], 32)
        made = np.where(codes < 8, 1, -1) * codes_of[codes % 8] * 2.0 ** (scales[..., None] - 127.0)
        values[name] = made.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32).copy()
        blocks |= {f"{name}_blocks": packed, f"{name}_scales": scales}
        del blocks[name]
    return values, blocks


def mxfp4_pair(folder: Path, dtype: str = "float32") -> tuple[Path, Path]:
    """A gpt-oss checkpoint as values and as blocks."""
    from safetensors.numpy import save_file

    hf, _ = gguf_pair("gpt_oss", folder)
    data, stored = json.loads((hf / "config.json").read_text()) | {"torch_dtype": dtype}, open_checkpoint(hf)
    state = {name: stored.tensor(name) for name in stored.names()}
    values, blocks = mxfp4_of(state, np.random.Generator(np.random.Philox(1)))
    save_checkpoint(folder / "values", values, data)
    save_file(blocks, hf / "model.safetensors")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (hf / "config.json").write_text(json.dumps({**data, "quantization_config": quantization}))
    return folder / "values", hf


IDS = np.random.Generator(np.random.Philox(1)).integers(2, VOCABULARY, 24)


def test_experts_of_a_hugging_face_file_are_mxfp4(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    values, hf = mxfp4_pair(tmp_path)
    wanted = logits(AutoModel.from_pretrained(values), IDS, 20)
    check(logits(AutoModel.from_pretrained(hf, dtype="float32"), IDS, 20), wanted)
    tensors = load_file(hf / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, :3].copy()}, hf / "model.safetensors")
    with pytest.raises(LoadError, match="does not fit"):
        AutoModel.from_pretrained(hf)(IDS[None])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_a_hugging_face_file_stay_in_mxfp4(dtype: str, tmp_path: Path) -> None:
    values, hf = mxfp4_pair(tmp_path, dtype)
    wanted = logits(AutoModel.from_pretrained(values, dtype="float32"), IDS, 20)
    model = AutoModel.from_pretrained(hf)  # what is not an expert has the type that the file says
    kinds = [p.type.dtype.name for p in model.parameters()]
    assert kinds.count("mxfp4") == 3 * model.config.num_hidden_layers and len(set(kinds)) == 2
    assert model.dtype.numpy.name == dtype
    close = 5e-3 if dtype == "float32" else 0.1 * np.abs(wanted).max()
    np.testing.assert_allclose(logits(mp.compile(model), IDS, 20), wanted, rtol=0, atol=close)


def test_experts_can_be_rounded_to_low_bits(tmp_path: Path) -> None:
    hf, _ = gguf_pair("qwen3_moe", tmp_path)
    lm = mp.compile(AutoModel.from_pretrained(hf), dtype="q8_0")
    assert sum(p.type.dtype.is_low_bit and p.ndim == 3 for p in lm.model.parameters()) == 9
    ids = np.random.Generator(np.random.Philox(1)).integers(2, VOCABULARY, 24)
    exact = logits(AutoModel.from_pretrained(hf), ids, 20)
    assert np.abs(logits(lm, ids, 20) - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "low_bit"), [(kind, "") for kind in FILES] + [(kind, LLAMA_CPP.get(kind, "q8_0")) for kind in EXPERTS]
)
def test_llama_cpp_agrees_on_the_gguf_file(kind: str, low_bit: str, tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    _, path = gguf_pair(kind, tmp_path, low_bit)
    ids = np.random.Generator(np.random.Philox(1)).integers(2, VOCABULARY, 40)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.port, params.warmup, params.verbosity = 256, 1, 0, False, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    request = {"prompt": ids.tolist(), "n_predict": 6, "cache_prompt": False, "ignore_eos": True, "temperature": 0.0}
    request |= {"samplers": ["temperature"], "logprobs": VOCABULARY, "n_probs": VOCABULARY}
    answer = xllamacpp.Server(params).handle_completions(request)
    found = json.loads(answer) if isinstance(answer, str) else answer
    steps = found["choices"][0]["logprobs"]["content"]
    chosen = [int(step["id"]) for step in steps]
    ours = logits(mp.compile(AutoModel.from_pretrained(path)), np.array([*ids, *chosen[:-1]]), len(ids))[len(ids) - 1 :]
    ours = ours - np.log(np.exp(ours).sum(-1, keepdims=True))
    for row, step in zip(ours, steps, strict=True):
        theirs = {int(entry["id"]): entry["logprob"] for entry in step["top_logprobs"]}
        assert len(theirs) > 1
        np.testing.assert_allclose(
            [row[i] for i in theirs], list(theirs.values()), rtol=0, atol=0.1 if low_bit else 0.03
        )  # its gelu is a table of f16; beside low-bit weights it rounds x to 8 bits
