"""Generation: greedy and sampled, alone and in batches, streamed, stopped; on the module and on the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.models import AutoLlamaModel, LlamaForCausalLM
from monoplan.models.generate.decoding import StopText, random_value
from monoplan.models.generate.generation import Session
from tests.matrices import partly
from tests.models.support import EOS, tiny_checkpoint, tiny_config
from tests.needs import default_model, needs

PROMPTS = ["Once upon a time", "x", "Hello, world!", "The quick brown fox jumps over the lazy dog"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["eager", "cpu"])
def lm(checkpoint: Path, request: pytest.FixtureRequest) -> Any:
    """The same model as a module, and as a plan of each target."""
    model = AutoLlamaModel.from_pretrained(checkpoint)
    return model if request.param == "eager" else mp.compile(model, target=request.param)


def argmax_loop(model: LlamaForCausalLM, ids: list[int], count: int) -> list[int]:
    """The plainest greedy loop: the whole sequence again for each token."""
    done = list(ids)
    for _ in range(count):
        token = int(np.argmax(np.asarray(model(np.array([done])))[0, 0]))
        if token == EOS:
            break
        done.append(token)
    return done[len(ids) :]


def eager(lm: Any) -> LlamaForCausalLM:
    return lm if isinstance(lm, LlamaForCausalLM) else lm.model


def test_greedy_is_the_argmax_of_each_step(lm: Any) -> None:
    for prompt in PROMPTS:
        ids = lm.tokenizer.encode(prompt)
        assert lm.generate_ids(ids, 10) == argmax_loop(eager(lm), ids, 10)


def test_pieces_join_to_the_text(lm: Any) -> None:
    stream = lm.generate("Once upon a time", 30)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text == lm.tokenizer.decode(stream.result.ids)
    assert len(pieces) > 5 and all(pieces)
    assert stream.result.finish_reason in ("length", "eos")


def test_a_batch_gives_each_prompt_what_it_gets_alone(lm: Any) -> None:
    together = lm.generate_batch(PROMPTS, 14, logprobs=True)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = lm.generate_batch([prompt], 14, logprobs=True)[0]
        assert (row.ids, row.text, row.finish_reason) == (alone.ids, alone.text, alone.finish_reason)
        np.testing.assert_allclose(row.logprobs, alone.logprobs, rtol=0, atol=1e-4)


def test_rows_that_end_early_leave_the_others_alone(lm: Any) -> None:
    alone = [lm.generate_batch([p], 20)[0].ids for p in PROMPTS]
    ends = [alone[0][3], alone[3][9]]  # ids that some rows meet sooner than others
    together = lm.generate_batch(PROMPTS, 20, eos_token_id=ends)
    assert len({len(row.ids) for row in together}) > 1
    for ids, row in zip(alone, together, strict=True):
        cut = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        assert row.ids == ids[:cut]
        assert row.finish_reason == ("eos" if cut < len(ids) else "length" if len(ids) == 20 else "eos")


def test_seeds(lm: Any) -> None:
    def text(seed: int) -> str:
        return "".join(lm.generate("Once", 12, temperature=1.5, seed=seed, eos_token_id=()))

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) == 4


def test_the_plan_draws_what_the_module_draws(lm: Any) -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "seed": 7}
    settings |= {"repetition_penalty": 1.3, "eos_token_id": ()}
    rows = [lm.tokenizer.encode(prompt) for prompt in PROMPTS]
    one, other = (m.generate_batch(rows, 10, **settings) for m in (lm, eager(lm)))
    assert [row.ids for row in one] == [row.ids for row in other]


def test_top_k_of_one_is_greedy(lm: Any) -> None:
    ids = lm.tokenizer.encode("Hello")
    assert lm.generate_ids(ids, 12, temperature=2.0, top_k=1) == lm.generate_ids(ids, 12)


def test_a_large_penalty_forbids_repetition(lm: Any) -> None:
    ids = lm.tokenizer.encode("Hello")
    out = lm.generate_ids(ids, 30, repetition_penalty=1e6, eos_token_id=())
    assert len(set(out)) == 30 and not set(out) & set(ids)


def test_logprobs_are_log_softmax_of_the_raw_logits(lm: Any) -> None:
    row = lm.generate_batch(["Hello"], 4, logprobs=True, temperature=1.3, repetition_penalty=1.5, seed=5)[0]
    tokens = row.prompt_ids + row.ids
    logits = eager(lm)(np.array([tokens]), all_logits=True).numpy()[0].astype(np.float64)
    for i, (token, logprob) in enumerate(zip(row.ids, row.logprobs, strict=True)):
        x = logits[len(row.prompt_ids) + i - 1]
        assert logprob == pytest.approx(x[token] - np.log(np.exp(x - x.max()).sum()) - x.max(), abs=1e-4)


def test_stop_texts(lm: Any) -> None:
    whole = "".join(lm.generate("Once upon a time", 30, eos_token_id=()))
    stop = whole[7:10]
    stream = lm.generate("Once upon a time", 30, eos_token_id=(), stop=[stop, "never there"])
    assert "".join(stream) == whole[: whole.index(stop)]
    assert stream.result.finish_reason == "stop"


def test_one_of_several_ends(lm: Any) -> None:
    ids = lm.tokenizer.encode("Once")
    out = lm.generate_ids(ids, 20, eos_token_id=())
    cut = next(i for i, token in enumerate(out) if token in (out[5], out[8]))
    row = lm.generate_batch([ids], 20, eos_token_id=[out[8], out[5]])[0]
    assert (row.ids, row.finish_reason) == (out[:cut], "eos")
    assert lm.generate_batch([ids], 20, eos_token_id=out[0])[0].ids == []


def test_the_callback_sees_each_token_and_may_end_the_text(lm: Any) -> None:
    seen: list[tuple[int, int, str]] = []

    def callback(*event: Any) -> bool:
        seen.append(event)
        return len(seen) < 5

    stream = lm.generate("Once", 20, callback=callback, eos_token_id=())
    text = "".join(stream)
    assert stream.result.finish_reason == "callback" and len(seen) == 5
    assert [token for _, token, _ in seen] == stream.result.ids
    assert "".join(piece for _, _, piece in seen) == text


def test_a_session_runs_only_what_is_new(lm: Any) -> None:
    session = Session()
    first = lm.generate("Once upon", 6, session=session, eos_token_id=())
    list(first)
    prompt = first.result.prompt_ids + first.result.ids + lm.tokenizer.encode(" and then", False)
    assert session.shared(prompt) == len(first.result.prompt_ids) + len(first.result.ids) - 1
    again = lm.generate(prompt, 12, session=session, eos_token_id=())
    list(again)
    assert again.result.ids == lm.generate_ids(prompt, 12, eos_token_id=())
    other = lm.generate("Once more", 8, session=session, eos_token_id=())
    assert session.shared(other.result.prompt_ids) == len(lm.tokenizer.encode("Once "))
    assert "".join(other) == "".join(lm.generate("Once more", 8, eos_token_id=()))


def test_the_context_ends_the_text(lm: Any) -> None:
    row = lm.generate_batch([[5] * 90], 50, eos_token_id=())[0]
    assert (len(row.ids), row.finish_reason) == (7, "length")  # the last token needs no place in the cache
    assert len(lm.generate_ids([5] * 96, 50, eos_token_id=())) == 1


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([5] * 97, {}, "97 tokens, the context of the model 96"),
        ([5, 100], {}, "token id 100 at position 1"),
        ([-1], {}, "token id -1"),
        (["a", "b"], {}, "generate takes one prompt"),
        ([1.5], {}, "a prompt is a text or a list of token ids\n.*1.5"),
        (None, {}, "a prompt is a text or a list of token ids\n.*None"),
        (5, {}, "a prompt is a text or a list of token ids\n.*5"),
        ("a", {"eos_token_id": 2.0}, "eos_token_id must be a token id or several\n.*2.0"),
        ("a", {"eos_token_id": [[2]]}, "eos_token_id must be a token id or several"),
        ("a", {"stop": 5}, "stop must be a text or several"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be"),
        ("a", {"temperature": -1.0}, "temperature must be"),
        ("a", {"temperature": float("nan")}, "temperature must be"),
        ("a", {"top_p": 0.0}, "top_p must be"),
        ("a", {"top_k": -1}, "top_k must be"),
        ("a", {"min_p": 2}, "min_p must be"),
        ("a", {"repetition_penalty": 0}, "repetition_penalty must be"),
        ("a", {"stop": [""]}, "stop must be"),
        ("a", {"temprature": 1.0}, "unknown setting temprature"),
        ("a", {"callback": 5}, "callback must be a function"),
        ("a", {"session": 5}, "session must be a Session"),
    ],
)
def test_wrong_arguments_are_reported_at_once(lm: Any, prompt: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lm.generate(prompt, **settings)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there is no prompt to continue"),
        ([None], "a prompt is a text or a list of token ids\n.*None"),
        ([[5], [5, 1.5]], "a prompt is a text or a list of token ids"),
        (None, "generate_batch takes a list of prompts\n.*None"),
        ("a", "takes a list of prompts\n.*use generate for one"),
        ([5, 6], "takes a list of prompts\n.*use generate for one"),
    ],
)
def test_wrong_batches(lm: Any, prompts: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lm.generate_batch(prompts)


def test_a_model_without_a_tokenizer_takes_ids() -> None:
    model = LlamaForCausalLM.from_config(tiny_config())
    assert model.generate_batch([[5, 6]], 3, eos_token_id=())[0].text == ""
    for arguments in ({"prompt": "text"}, {"prompt": [5], "stop": "x"}):
        with pytest.raises(ArgumentError, match="tokenizer"):
            model.generate(**arguments)


@pytest.mark.parametrize("target", [None, "cpu"])
def test_a_checkpoint_without_a_tokenizer_takes_ids(tmp_path: Path, target: str | None) -> None:
    LlamaForCausalLM.from_config(tiny_config(), seed=3).save_pretrained(tmp_path)
    model = AutoLlamaModel.from_pretrained(tmp_path)
    lm: Any = model if target is None else mp.compile(model, target=target)
    ids = lm.generate_ids([5, 6], 4, eos_token_id=())
    assert ids == argmax_loop(model, [5, 6], 4) and len(ids) == 4
    stream = lm.generate([5, 6], 4, eos_token_id=(), logprobs=True)
    assert list(stream) == [] and stream.result.ids == ids and len(stream.result.logprobs) == 4
    first = ids[0]
    assert lm.generate_ids([5, 6], 4, eos_token_id=first) == [], "it ends at an id, which needs no text"
    for arguments in ({"prompt": "text"}, {"prompt": [5], "stop": "x"}):
        with pytest.raises(LoadError, match="there is no tokenizer.json"):
            lm.generate(**arguments)
    with pytest.raises(LoadError, match="there is no tokenizer.json"):
        lm.generate_batch([[5], "text"])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="can't be used"):  # one that is broken is not passed over
        AutoLlamaModel.from_pretrained(tmp_path).generate_ids([5, 6], 4)


def test_random_values_depend_on_seed_row_and_step_alone() -> None:
    values = [random_value(s, r, t) for s in (0, 1, 2**130 + 1) for r in range(3) for t in range(50)]
    assert values == [random_value(s, r, t) for s in (0, 1, 2**130 + 1) for r in range(3) for t in range(50)]
    assert len(set(values[:300])) == 300 and all(0 <= v < 1 and np.float32(v) < 1 for v in values)
    assert np.mean(values[:300]) == pytest.approx(0.5, abs=0.05)


def test_stop_text_holds_back_what_may_become_one() -> None:
    stops = StopText(["END", "E.O.F"])
    assert stops.push("an E") == ("an ", False)
    assert stops.push("N") == ("", False)
    assert stops.push("Ough") == ("ENOugh", False)
    assert stops.push(" E.O") == (" ", False)
    assert stops.finish() == "E.O"
    assert StopText(["aab"]).push("aaab!") == ("a", True)


def test_the_plan_serves_every_length_and_batch(checkpoint: Path) -> None:
    llm = mp.compile(AutoLlamaModel.from_pretrained(checkpoint))
    for length in range(1, 41):
        llm.generate_ids([6] * length, 2)
    for batch in (2, 3):
        llm.generate_batch([[5] * (7 + i) for i in range(batch)], 40)
    assert llm.stats.compiles == 1


def test_the_text_does_not_depend_on_the_number_of_threads(checkpoint: Path) -> None:
    model = AutoLlamaModel.from_pretrained(checkpoint)
    texts = set()
    for threads in (1, 2, 3):
        llm = mp.compile(model, options={"threads": threads})
        texts.add("".join(llm.generate("Once upon a time", 40, temperature=1.2, seed=5, eos_token_id=())))
    assert len(texts) == 1


def test_calls_of_the_compiled_model(checkpoint: Path) -> None:
    model = AutoLlamaModel.from_pretrained(checkpoint)
    llm = mp.compile(model)
    ids = np.array([[5, 6, 7, 8]])
    wanted = model(ids, all_logits=True).numpy()
    np.testing.assert_allclose(llm(ids), wanted[:, -1:], rtol=0, atol=1e-5)
    np.testing.assert_allclose(llm(ids.tolist(), position_ids=[[0, 1, 2, 3]]), wanted[:, -1:], rtol=0, atol=1e-5)
    assert len(llm._plans) == 1  # those are the positions that the cache has: the same plan
    np.testing.assert_allclose(llm(ids, all_logits=True), wanted, rtol=0, atol=1e-5)
    shifted = np.arange(10, 14)[None]
    np.testing.assert_allclose(llm(ids, shifted), model(ids, shifted).numpy(), rtol=0, atol=1e-5)
    llm(ids[:, :2], use_cache=True)
    np.testing.assert_allclose(llm(ids[:, 2:], None, llm.last_cache), wanted[:, -1:], rtol=0, atol=1e-5)
    cache = llm.new_cache(1, 16)
    for _ in range(6):
        llm(ids, past_key_values=cache)
    assert cache.lengths.numpy().tolist() == [24] and cache.capacity >= 24


@pytest.mark.parametrize("kind", partly(["default", "dynamic"], lambda kind: kind == "default"))
def test_padding_is_no_position(kind: str) -> None:
    rope = None if kind == "default" else {"rope_type": kind, "factor": 4.0}
    model = LlamaForCausalLM.from_config(tiny_config(max_position_embeddings=16, rope_scaling=rope), seed=2)
    llm, ids = mp.compile(model), np.arange(5, 25)[None] % 90
    last = llm.max_length - 2  # padding goes beyond the context, and beyond the trained length of dynamic
    caches = [llm.new_cache(1), model.new_cache(1)]
    found = []
    for run, cache in zip((llm, model), caches, strict=True):
        run(np.full((1, last), 7), past_key_values=cache)
        padded = run(ids[:, :8], past_key_values=cache, num_valid=np.array([2], np.int32), all_logits=True)
        found.append(np.asarray(padded)[:, :2])
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)
    assert caches[0].lengths.numpy().tolist() == [llm.max_length]
    alone = llm(ids[:, :14], all_logits=True)
    valid, places = np.array([14], np.int32), np.arange(20)[None]
    for positions in (None, np.minimum(places, 15)):  # what a caller says of padding does not count either
        padded = llm(np.where(places < 14, ids, 0), positions, num_valid=valid, all_logits=True)
        np.testing.assert_allclose(padded[:, :14], alone, rtol=0, atol=1e-4)


def test_wrong_calls_of_the_compiled_model(checkpoint: Path) -> None:
    llm = mp.compile(AutoLlamaModel.from_pretrained(checkpoint))
    ids = np.array([[5, 6, 7, 8]])
    for arguments, message in (
        ({"input_ids": [5, 6]}, "input_ids must be"),
        ({"input_ids": np.zeros((1, 0), int)}, "at least one token"),
        ({"input_ids": [[5, 100]]}, "100"),
        ({"input_ids": np.array([[1.7]])}, "input_ids must be an array of integers, got float64"),
        ({"input_ids": [[5], [6, 7]]}, "input_ids must be an array of integers"),
        ({"input_ids": None}, "input_ids must be an array of integers"),
        ({"input_ids": ids, "num_valid": [1.5]}, "num_valid must be an array of integers"),
        ({"input_ids": ids, "past_key_values": llm.new_cache(2)}, "1 rows, the cache 2"),
        ({"input_ids": ids, "position_ids": [[0, 1]]}, "position_ids must be"),
        ({"input_ids": ids, "num_valid": [5]}, "num_valid must be"),
        ({"input_ids": np.full((1, 97), 5)}, "limit is 96"),
    ):
        with pytest.raises(mp.MonoplanError, match=message):
            llm(**arguments)
    assert llm(ids).shape == (1, 1, 100)


def test_prompts_of_verify_and_profile_fit_the_context(checkpoint: Path) -> None:
    llm = mp.compile(AutoLlamaModel.from_pretrained(checkpoint))
    assert llm.step_arguments([5, 6])["input_ids"].shape == (1, 2)
    for ids, message in (([[]], "at least one token"), ([[5] * 97], "has 97 tokens, the context of the model 96")):
        with pytest.raises(ArgumentError, match=message):
            llm.profile(ids)
    for odd in ([1.9, 2.2], [[5], [6, 7]], "text"):
        with pytest.raises(ArgumentError, match="the prompt must be an array of integers"):
            llm.verify(odd)
    with pytest.raises(ArgumentError, match="has 96 tokens and 1 more behind it, the context of the model 96"):
        llm.prompt_array([5] * 96, more=1)


def test_the_compiled_model_shows_its_plan(checkpoint: Path) -> None:
    llm = mp.compile(AutoLlamaModel.from_pretrained(checkpoint))
    assert "mp_run" in llm.source() and str(llm.plan)
    assert "random_sample" in llm.ir() and "kv_update" in llm.ir("trace")
    assert not hasattr(llm, "nonsense")
    assert "ok" in str(llm.verify([[5, 6, 7]]))


def test_another_dtype_for_the_plan(checkpoint: Path) -> None:
    llm = mp.compile(AutoLlamaModel.from_pretrained(checkpoint), target="reference", dtype="bfloat16")
    assert llm.new_cache().dtype.name == "bf16"
    assert llm(np.array([[5, 6]])).dtype.name == "float32"  # logits are never rounded to half


@pytest.mark.nightly
@needs("model")
def test_smollm2_writes_what_transformers_makes_it_write() -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden/smollm2/greedy.json").read_text())
    texts = [prompt["text"] for prompt in golden["prompts"]]
    llm = mp.compile(AutoLlamaModel.from_pretrained(str(default_model()), dtype="float32"))
    alone = [llm.generate_batch([text], 64)[0] for text in texts]
    for row, other, prompt in zip(alone, llm.generate_batch(texts, 64), golden["prompts"], strict=True):
        assert row.prompt_ids == prompt["input_ids"]
        assert row.ids == other.ids == prompt["output_ids"]
        assert row.text == other.text == prompt["output_text"]
    assert llm.stats.compiles == 1
