"""One build serves every prompt length, batch size, prompt and token; layers are a loop, memory is planned."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.codegen.kernels import Linear
from monoplan.codegen.plan import StepLoop
from monoplan.codegen.source import headers
from monoplan.ir.errors import ArgumentError
from monoplan.models import LlamaForCausalLM
from tests.integration.support import small_config, step_plan
from tests.tolerances import check

LENGTHS = range(1, 41)


@pytest.fixture(scope="module")
def llm() -> Any:
    """A compiled model that all tests of this file share: whatever they do, there is one plan."""
    return mp.compile(LlamaForCausalLM.from_config(small_config(), seed=1))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(0, 50, length).tolist()


# -- one build ------------------------------------------------------------------------------------------------


def test_every_length_and_batch_size_from_one_build(llm: Any) -> None:
    for length in LENGTHS:
        assert len(llm.generate_ids(prompt(length), 2)) == 2
    for batch in (1, 2, 3):
        made = llm.generate_batch([prompt(5 * i + 3, batch) for i in range(batch)], 3)
        assert [len(g.ids) for g in made] == [3] * batch
    assert llm.stats.compiles == 1
    assert llm.stats.calls >= 2 * len(LENGTHS) + 9


def test_tokens_are_those_of_the_eager_model(llm: Any) -> None:
    eager = LlamaForCausalLM.from_config(small_config(), seed=1)
    for length in (1, 7, 23):
        assert llm.generate_ids(prompt(length), 6) == eager.generate_ids(prompt(length), 6)


def test_each_row_has_its_own_past_and_valid_count(llm: Any) -> None:
    """Three rows with different pasts take different numbers of tokens in one run, as each does alone."""
    pasts, counts = (4, 1, 9), (3, 5, 1)
    ids = [prompt(past + n, 7) for past, n in zip(pasts, counts, strict=True)]
    cache = llm.new_cache(3, 16)
    first = np.zeros((3, max(pasts)), np.int64)
    for row, past in enumerate(pasts):
        first[row, :past] = ids[row][:past]
    llm.step(first, cache, np.array(pasts, np.int32))
    assert cache.lengths.numpy().tolist() == list(pasts)
    second = np.zeros((3, max(counts)), np.int64)
    for row, (past, n) in enumerate(zip(pasts, counts, strict=True)):
        second[row, :n] = ids[row][past:]
    together = llm.step(second, cache, np.array(counts, np.int32))
    assert cache.lengths.numpy().tolist() == [p + n for p, n in zip(pasts, counts, strict=True)]
    for row, tokens in enumerate(ids):
        alone = llm.new_cache(1, 16)
        single = llm.step(np.array([tokens]), alone)
        check(together["logits"][row], single["logits"][0], "f32", "model")
        assert together["token"][row] == single["token"][0]
        for a, b in ((cache.k, alone.k), (cache.v, alone.v)):
            for layer in range(2):
                n = len(tokens)
                check(a[layer].numpy()[row, :, :n], b[layer].numpy()[0, :, :n], "f32", "model")
    assert llm.stats.compiles == 1


def test_chunks_of_any_size_are_the_whole(llm: Any) -> None:
    tokens = prompt(20, 3)
    whole = llm.step(np.array([tokens]), llm.new_cache(1, 32))["logits"]
    for sizes in ((20,), (7, 13), (1, 1, 18), (19, 1), (5, 5, 5, 5)):
        cache, start = llm.new_cache(1, 32), 0
        for n in sizes:
            out = llm.step(np.array([tokens[start : start + n]]), cache)
            start += n
        check(out["logits"], whole, "f32", "model")
    assert llm.stats.compiles == 1


# -- the source -----------------------------------------------------------------------------------------------


def test_the_source_does_not_grow_with_depth() -> None:
    (_, least), (shallow, short), (deep, long) = (step_plan(small_config(layers)) for layers in (2, 3, 32))
    assert len(long.text) <= 1.1 * len(least.text), f"{len(least.text)} and {len(long.text)} characters"
    longer = len(long.text.splitlines()) - len(short.text.splitlines())
    assert 0 <= longer <= 6, f"{longer} lines"  # some break where the number of a weight has more digits
    loops = [item for item in deep.items if isinstance(item, StepLoop)]
    assert [loop.count for loop in loops] == [31] and len(deep.items) == len(shallow.items)


def test_the_last_layer_ends_with_one_row_and_has_no_functions_of_its_own() -> None:
    plan, source = step_plan(small_config(4))
    (loop,) = (item for item in plan.items if isinstance(item, StepLoop))
    steps = [step for step, _ in plan.steps()]
    behind = steps[steps.index(loop.steps[-1]) + 1 :]
    names = [step.kernel.op.name for step in behind]
    pick, head = names.index("select_rows"), names.index("fused_linear", names.index("select_rows") + 3)
    assert names[:3] == ["qkv_rope_cache", "attention", "fused_linear"]
    assert names[pick + 1 : head + 1] == ["fused_linear"] * 3  # gate/up, down, head
    products = [step.kernel for step in behind[pick + 1 : head + 1]]
    assert [str(k.rows) for k in products if isinstance(k, Linear)] == ["batch"] * 3
    layer = [*behind[:3], *behind[pick + 1 : head]]
    assert [source.step_functions[s.number] for s in layer] == [source.step_functions[s.number] for s in loop.steps]


def test_a_layer_is_five_kernels_in_a_loop() -> None:
    plan, source = step_plan(small_config(12))
    (loop,) = (item for item in plan.items if isinstance(item, StepLoop))
    names = [step.kernel.op.name for step in loop.steps]
    assert names == ["qkv_rope_cache", "attention", "fused_linear", "fused_linear", "fused_linear"]
    assert source.text.count("for (int turn = 0; turn < 11; ++turn)") == 1
    assert "rolled layers: 11 x 5" in plan.summary


def test_one_parallel_region_for_a_run() -> None:
    _, source = step_plan(small_config(3))
    assert source.text.count("mp_call(plan_run,") == 1 and source.text.count("int mp_run_plan(") == 1
    assert dict(headers("cpu"))["mp_call.h"].count("#pragma omp parallel") == 1


def test_calls_name_their_ir_line_and_the_users_line() -> None:
    _, source = step_plan(small_config(2))
    text = re.sub(r"\n *\* +", " ", source.text)  # comments are wrapped
    calls = re.findall(r"/\* (\d+): (%.+) = (\w+)\(.*\((\S+\.py):(\d+)", text)
    assert len(calls) >= 15 and any(path.endswith("llama.py") for *_, path, _ in calls)


def test_models_whose_layers_differ_roll_what_is_equal() -> None:
    """A sliding window in the upper half: two loops."""
    config = small_config(6, layer_types=["full_attention"] * 3 + ["sliding_attention"] * 3, sliding_window=8)
    plan, _ = step_plan(config)
    loops = [(item.count, len(item.steps)) for item in plan.items if isinstance(item, StepLoop)]
    assert loops == [(3, 5), (2, 5)]


# -- the cache ------------------------------------------------------------------------------------------------


def test_the_cache_grows_without_a_new_plan(llm: Any) -> None:
    cache = llm.new_cache(1, 16)
    capacities = []
    for length in (10, 10, 20, 20):
        llm.step(np.array([prompt(length)]), cache)
        capacities.append(cache.capacity)
    assert capacities == [16, 32, 64, 64] and cache.lengths.numpy().tolist() == [60] and llm.stats.compiles == 1


def test_a_grown_cache_keeps_its_tokens(llm: Any) -> None:
    tokens = prompt(30, 5)
    whole = llm.step(np.array([tokens]), llm.new_cache(1, 64))["logits"]
    cache = llm.new_cache(1, 16)
    for start in range(0, 30, 6):
        out = llm.step(np.array([tokens[start : start + 6]]), cache)
    assert cache.capacity == 32
    check(out["logits"], whole, "f32", "model")


def test_the_limit_of_a_cache_is_named(llm: Any) -> None:
    cache = llm.new_cache(1, 16)
    llm.step(np.array([prompt(60)]), cache)
    before = [t.numpy().copy() for t in (*cache.k, cache.lengths)]
    with pytest.raises(ArgumentError, match="KVCache: 60 tokens and 5 more need 65 places, the limit is 64") as caught:
        llm.step(np.array([prompt(5)]), cache)
    assert "truncate() the cache" in caught.value.fix
    assert all(np.array_equal(a, t.numpy()) for a, t in zip(before, (*cache.k, cache.lengths), strict=True))


def test_reset_clone_and_truncate(llm: Any) -> None:
    tokens = prompt(12, 9)
    cache = llm.new_cache(1, 32)
    first = llm.step(np.array([tokens]), cache)["logits"]
    copy = cache.clone()
    more = llm.step(np.array([[1, 2]]), cache)["logits"]
    assert copy.lengths.numpy().tolist() == [12] and cache.lengths.numpy().tolist() == [14]
    again = llm.step(np.array([[1, 2]]), copy)["logits"]
    assert np.array_equal(more, again)
    cache.truncate(12)
    assert np.array_equal(llm.step(np.array([[1, 2]]), cache)["logits"], more)
    cache.reset()
    assert np.array_equal(llm.step(np.array([tokens]), cache)["logits"], first)
    assert llm.stats.compiles == 1


# -- memory ---------------------------------------------------------------------------------------------------


def test_nothing_is_allocated_after_the_first_run(llm: Any) -> None:
    cache = llm.new_cache(2, 64)
    llm.step(np.array([prompt(30), prompt(30, 2)]), cache)  # the largest run comes first
    executable = llm.compiled.built[0][2].executable
    (frame,) = executable._frames
    arena = frame.arena
    for n in (1, 1, 3, 1):
        llm.step(np.array([prompt(n), prompt(n, 2)]), cache)
        assert executable._frames == [frame] and frame.arena is arena


def test_the_peak_is_printed(llm: Any) -> None:
    text = str(llm.plan)
    found = re.search(r"arena: (\d+) slots for (\d+) buffers, peak (\d+) bytes \((\d+) unshared\) at batch=1", text)
    assert found is not None
    slots, buffers, peak, unshared = map(int, found.groups())
    assert slots < buffers and 0 < peak < unshared
    large = llm.plan.table({"batch": 4, "seq": 128, "capacity": 256, "hist": 1, "threads": 2})
    assert int(re.search(r"peak (\d+) bytes", large)[1]) > peak  # type: ignore[index]


def test_depth_needs_no_more_memory() -> None:
    values = {"batch": 1, "seq": 16, "capacity": 32, "hist": 4, "threads": 4}
    peaks = [step_plan(small_config(layers))[0].arena.layout(values)[1] for layers in (3, 12)]
    assert peaks[0] == peaks[1]


# -- explain --------------------------------------------------------------------------------------------------


def test_explain_says_what_a_layer_became(llm: Any) -> None:
    text = llm.explain()
    assert llm.plan.explain() == text
    assert "qkv_rope_cache (runs 2 times) = rms_norm + 3 linear + 3 reshape + 2 rope + 2 kv_update" in text
    assert "fused_linear (runs 2 times) = rms_norm + 2 linear + silu + mul" in text
    assert "what did not fuse, and why" in text and "llama.py" in text
    rewritten = text.split("what was rewritten")[1]
    for name in ("merge-parallel-linears", "fuse-norm-linear", "fuse-qkv", "fuse-gated", "roll-layers"):
        assert f"  {name}: " in rewritten
