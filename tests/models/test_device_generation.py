"""Generation that stays on a GPU gives what generation through the host gives: on an emulated device, late in all it
does, and with -m cuda on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.models.config import LlamaConfig
from monoplan.models.generate.decoding import random_value, random_values
from monoplan.models.generate.device_generation import DeviceCache, DeviceSteps
from monoplan.models.generate.generation import Session
from monoplan.models.llama import LlamaForCausalLM
from monoplan.runtime.cuda import device as cuda_device
from monoplan.runtime.cuda import executable as cuda
from monoplan.runtime.cuda.decode import AHEAD, may_share
from tests.codegen import cuda_emulator
from tests.needs import needs

emulated = needs("g++")
PROMPT = [1, 7, 3, 40, 22]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "seed": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "penalized": {"repetition_penalty": 1.4},
    "all": {**SAMPLED, "repetition_penalty": 1.2},
}


@pytest.fixture(params=[pytest.param("emulator", marks=emulated), pytest.param("gpu", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "gpu":
        yield cuda_device.gpu()
        return
    made = cuda_emulator.LateDevice(library=True)
    monkeypatch.setattr(cuda, "gpu", lambda: made)
    yield made


def tiny_lm(dtype: str = "float32", **changes: Any) -> LlamaForCausalLM:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 60,
        "max_position_embeddings": 200,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    return LlamaForCausalLM.from_config(LlamaConfig(**{**sizes, **changes}), seed=1)


def both_paths(lm: LlamaForCausalLM, **options: Any) -> tuple[Any, Any]:
    """The model on the device, and by way of the host."""
    return tuple(mp.compile(lm, target="cuda", options={"resident": r, **options}) for r in (True, False))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_and_probabilities_are_those_of_the_host_path(device: Any, settings: dict[str, Any]) -> None:
    stays, travels = both_paths(tiny_lm())
    for prompt in (PROMPT, [2]):  # the second text has the first one's cache and graph
        (a,), (b,) = (lm.generate_batch([prompt], 8, logprobs=True, **settings) for lm in (stays, travels))
        assert a.ids == b.ids and len(a.ids) == 8 and a.finish_reason == "length"
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [SETTINGS["greedy"], SETTINGS["all"]], ids=["greedy", "all"])
def test_rows_of_a_batch_have_lengths_of_their_own(device: Any, settings: dict[str, Any]) -> None:
    stays, travels = both_paths(tiny_lm())
    prompts = [PROMPT, [9], [4] * 11]
    ends = {t for r in travels.generate_batch(prompts, 10, **settings) for t in r.ids[4:5]}  # rows leave one by one
    a, b = (lm.generate_batch(prompts, 10, eos_token_id=ends, **settings) for lm in (stays, travels))
    assert [r.ids for r in a] == [r.ids for r in b]
    assert [r.finish_reason for r in a] == [r.finish_reason for r in b] and "eos" in [r.finish_reason for r in a]


def test_equals_the_cpu_in_f32(device: Any) -> None:
    lm = tiny_lm()
    ours, theirs = mp.compile(lm, target="cuda"), mp.compile(lm)
    for settings in ({}, SAMPLED):
        assert ours.generate_ids(PROMPT, 8, **settings) == theirs.generate_ids(PROMPT, 8, **settings)


def test_a_stop_wastes_few_steps_and_leaves_the_cache_as_it_should_be(device: Any) -> None:
    stays, travels = both_paths(tiny_lm())
    ids = travels.generate_ids(PROMPT, 12)
    end = max(i for i in range(12) if ids[i] not in ids[:i])
    before = getattr(device, "replays", 0)
    sessions = Session(), Session()
    for lm, session in zip((stays, travels), sessions, strict=True):
        stream = lm.generate(PROMPT, 64, eos_token_id=ids[end], session=session)
        assert list(stream) == [] and stream.result.ids == ids[:end] and stream.result.finish_reason == "eos"
    if hasattr(device, "replays"):
        assert end <= device.replays - before <= end + AHEAD
    first, second = (s.cache for s in sessions)
    assert isinstance(first, DeviceCache) and sessions[0].tokens == sessions[1].tokens
    copied = first.on_host()
    np.testing.assert_array_equal(copied.lengths.numpy(), second.lengths.numpy())
    length = int(second.lengths.numpy()[0])
    for a, b in zip((*copied.k, *copied.v), (*second.k, *second.v), strict=True):
        np.testing.assert_allclose(a.numpy()[:, :, :length], b.numpy()[:, :, :length], rtol=1e-4, atol=1e-5)
        assert not a.numpy()[:, :, length:].any()


def test_a_conversation_goes_on_in_its_cache(device: Any) -> None:
    stays, travels = both_paths(tiny_lm())
    texts = []
    for lm in (stays, travels):
        session, prompt, found = Session(), list(PROMPT), []
        for turn in range(3):
            stream = lm.generate(prompt, 5, session=session, **SAMPLED)
            if turn == 1:  # the reader goes away after two tokens
                for _ in range(2):
                    next(iter(lm.generate(prompt, 5, session=session, callback=_pieces(found), **SAMPLED)), None)
            list(stream)
            found.append(stream.result.ids)
            prompt = [*prompt, *stream.result.ids, 11 + turn]
        texts.append(found)
    assert texts[0] == texts[1]


def test_a_conversation_may_change_paths(device: Any) -> None:
    stays, travels = both_paths(tiny_lm())
    want = travels.generate_ids(PROMPT, 9)
    session, known = Session(), list(PROMPT)
    for lm in (stays, travels, stays):
        stream = lm.generate(known, 3, session=session)
        list(stream)
        known += stream.result.ids
        assert isinstance(session.cache, DeviceCache) == (lm is stays)
        assert session.cache.lengths.numpy().tolist() == [len(known) - 1]
    assert known == [*PROMPT, *want]


def _pieces(found: list[Any]) -> Any:
    return lambda row, token, piece: found.append(token) or len(found) % 3 != 0


def test_a_callback_ends_a_text(device: Any) -> None:
    stays, travels = both_paths(tiny_lm())
    for lm in (stays, travels):
        seen: list[int] = []
        (got,) = lm.generate_batch([PROMPT], 20, callback=lambda r, t, p, seen=seen: seen.append(t) or len(seen) < 4)
        assert got.finish_reason == "callback" and got.ids == seen and len(seen) == 4


def test_an_abandoned_text_leaves_nothing_under_way(device: Any) -> None:
    stays, _ = both_paths(tiny_lm())
    session = Session()
    pieces = stays._loop(stays._rows([PROMPT], 50, None, False, True, {}), session)
    for _ in range(5):
        next(pieces)
    pieces.close()
    assert not getattr(device, "queue", ())
    assert session.cache.lengths.numpy().tolist() == [len(PROMPT) + 4]
    again = stays.generate([*session.tokens, 3], 6, session=session)
    list(again)
    assert again.result.ids == stays.generate_ids([*session.tokens[: len(PROMPT) + 5], 3], 6)


def test_caches_grow(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monoplan.models.generate.device_generation.RESERVED", 4)
    monkeypatch.setattr("monoplan.models.generate.device_generation.STEP", 4)
    stays, travels = both_paths(tiny_lm())
    prompts = [PROMPT, [9, 8]]
    for settings in ({}, {**SAMPLED, "repetition_penalty": 1.3}):
        a, b = (lm.generate_batch(prompts, 18, **settings) for lm in (stays, travels))
        assert [r.ids for r in a] == [r.ids for r in b]
    assert stays.spare["cache"].capacity >= 22


@pytest.mark.full
def test_a_text_may_fill_the_context(device: Any) -> None:
    stays, travels = both_paths(tiny_lm(max_position_embeddings=14))
    a, b = (lm.generate_batch([PROMPT, [9]], 100) for lm in (stays, travels))
    assert [r.ids for r in a] == [r.ids for r in b] and [len(r.ids) for r in a] == [10, 14]


def test_prompts_in_pieces(device: Any) -> None:
    lm = tiny_lm()
    prompts = [[(3 * i) % 60 for i in range(23)], [5], list(range(9))]
    want = [r.ids for r in mp.compile(lm, target="cuda").generate_batch(prompts, 4)]
    for chunk in (4, 30):
        for one in both_paths(lm, prefill_chunk=chunk):
            assert [r.ids for r in one.generate_batch(prompts, 4)] == want


@pytest.mark.full
def test_prompts_stay_whole_where_their_angles_follow_their_length(device: Any) -> None:
    lm = tiny_lm(max_position_embeddings=8, rope_scaling={"rope_type": "dynamic", "factor": 8.0}, initializer_range=0.3)
    prompts = [list(range(1, 30)), list(range(20, 40))]
    on_device, through_host = both_paths(lm, prefill_chunk=6)
    want = [lm.generate_ids(prompt, 5) for prompt in prompts]
    for one in (on_device, through_host):
        assert [r.ids for r in one.generate_batch(prompts, 5)] == want


def test_caches_are_freed_with_their_texts(device: Any) -> None:
    before = _caches()  # of other tests
    stays, _ = both_paths(tiny_lm())
    stays.generate_ids(PROMPT, 4)
    kept = stays.spare["cache"]
    stays.generate_ids(PROMPT, 8)
    assert stays.spare["cache"] is kept  # used again
    del kept
    assert [o for o in _caches() if o not in before]  # they would be seen
    stays.spare.clear()
    assert not [o for o in _caches() if o not in before]


def _caches() -> list[Any]:
    return [o for o in gc.get_objects() if isinstance(o, DeviceCache | DeviceSteps)]


@emulated
def test_what_was_settled_about_launches_holds_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for faster in (True, False):
        late = cuda_emulator.LateDevice(library=True)
        monkeypatch.setattr(cuda, "gpu", lambda late=late: late)
        times = iter([1.0, 2.0] if faster else [2.0, 1.0])  # overlapping, one after another
        monkeypatch.setattr(late, "measure", lambda graph, count, times=times: next(times))
        lm = mp.compile(tiny_lm(), target="cuda")
        lm.generate_ids(PROMPT, 3)
        (steps,) = lm.spare["cache"].loops.values()
        launches = [spec for act, spec, _ in steps.loop.calls.actions if act == late.run]
        assert any(spec.overlap for spec in launches) == faster and next(times, None) is None


def test_greedy_text_has_a_plan_of_its_own_and_plans_share_the_weights(device: Any) -> None:
    lm = mp.compile(tiny_lm(), target="cuda").prepare(temperature=0.0)
    lm.generate_ids(PROMPT, 3)
    assert list(lm._plans) == ["greedy"]
    lm.generate_ids(PROMPT, 3, temperature=0.5)
    lm(np.array([PROMPT]), all_logits=True)
    places = {}
    for name, plan in lm._plans.items():
        executable = plan.built[0][2].executable
        places[name] = {m.address for m in executable.params}
        assert ("logits" in str(plan.built[0][2].out_tree)) == (name == "generation")
    assert set(places) == {"greedy", "generation", "positioned"}
    assert places["greedy"] == places["generation"] == places["positioned"]
    assert len(lm._weights) == len(places["greedy"])


def test_random_numbers_of_many_steps() -> None:
    for seed, row, step in ((0, 0, 0), (5, 3, 7), (2**127 + 3, 1, 1000)):
        want = [random_value(seed, row, step + i) for i in range(5)]
        assert random_values(seed, row, step, 5).tolist() == want


@emulated
def test_where_an_output_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "gpu", lambda: cuda_emulator.EmulatedDevice(library=True))
    plan = mp.compile(tiny_lm(), target="cuda").prepare().plan
    names = [v.name for v in plan.graph.inputs]
    assert may_share(plan, names.index("input_ids"), 0)
    lengths = names.index("past_key_values.lengths")
    (written,) = (j for i, j in plan.graph.writes if i == lengths)
    assert not may_share(plan, lengths, written)  # attention reads the old lengths after the new ones are made
