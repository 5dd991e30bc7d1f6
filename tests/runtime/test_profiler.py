"""The profile: each step has its time, bytes and flops; the trace opens in Perfetto; off, it changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.codegen.kernels import Attention, Gather, Linear
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target
from monoplan.inspect.probe import ProbedCpu, events, instrument
from monoplan.inspect.profile import kernel_cost
from monoplan.ir.builder import build_graph
from monoplan.ir.errors import ArgumentError, CompileError
from monoplan.ir.ops import REGISTRY
from monoplan.ir.types import tensor_type
from monoplan.runtime.machine import limits
from tests.runtime.test_bisect import small_llama


@pytest.fixture(scope="module")
def llm() -> Any:
    return mp.compile(small_llama())


@pytest.fixture(scope="module")
def profile(llm: Any) -> Any:
    return llm.profile(np.arange(1, 9)[None], repeat=3)


def test_every_step_has_a_time(llm: Any, profile: Any) -> None:
    assert [s.number for s in profile.steps] == [s.number for s, _ in llm.plan.steps()]
    assert all(s.nanoseconds >= 0 for s in profile.steps)
    assert profile.total == pytest.approx(sum(t for _, _, t in profile.events))
    rolled = [s for s in profile.steps if s.runs > 1]
    assert rolled and all(s.runs == 3 for s in rolled)
    assert len(profile.events) == sum(n for _, n in llm.plan.steps())
    assert profile.top(2)[0].nanoseconds >= profile.top(2)[1].nanoseconds


def test_it_prints_a_table_with_the_overhead_and_the_limits(profile: Any) -> None:
    text = str(profile)
    for word in ("profile of GenerationStep on cpu", "GB/s", "GFLOP/s", "of limit", "looking costs", "limits: memory"):
        assert word in text
    assert "batch=1, seq=8" in text and " model.layers.0–2.mlp " in text and " model.layers.3.mlp " in text


def test_the_sums_add_up(profile: Any) -> None:
    steady = replace(profile, probed=profile.total + 5e6, plain=profile.total)
    runs, kernels = len(profile.events), len(profile.steps)
    total = f"{profile.total / 1e3:.1f} µs"
    assert f"{kernels} kernels in {runs} runs: {total}, " in steady.summary
    assert "; 5000.0 µs outside them" in steady.summary and f"a call takes {total}: looking costs +" in steady.summary
    alone = replace(profile, target="cuda").summary
    assert "each was timed alone" in alone and "outside them" not in alone


@pytest.mark.parametrize(("share", "shown"), [(0.5, "50% memory"), (3.25, ">100% memory")])
def test_a_share_above_the_limit_is_cut_and_explained(profile: Any, share: float, shown: str) -> None:
    rows = [replace(s, nanoseconds=1e3, roof=share * 1e-6, bound="memory") for s in profile.steps]
    text = str(replace(profile, steps=tuple(rows)))
    assert text.count(shown) == len(rows) and "325%" not in text
    assert (">100%: faster than the limit" in text) is (share > 1)


def test_the_trace_is_chromes(profile: Any, tmp_path: Path) -> None:
    data = json.loads(profile.save(tmp_path / "trace.json").read_text())
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(profile.events)
    for before, after in zip(spans, spans[1:], strict=False):
        assert after["ts"] >= before["ts"] + before["dur"] - 0.01  # one after the other
    for key in ("bytes", "flops", "gbps", "ir", "where", "turn"):
        assert key in spans[0]["args"]
    assert {e["name"] for e in data["traceEvents"] if e["ph"] == "M"} == {"process_name", "thread_name"}
    assert any(e["args"]["turn"] == 2 and e["name"].endswith("[2]") for e in spans)


def test_the_plain_source_is_not_changed(llm: Any) -> None:
    assert "mp_probe" not in llm.source() and "mp_mark" not in llm.source()


def test_the_instrumented_plan_gives_the_same_bits(llm: Any) -> None:
    subject = llm.compiled.subject(**llm.step_arguments(np.arange(1, 6)[None]))
    probed = ProbedCpu(subject.executable)
    assert probed.entry.path != subject.executable.entry.path  # a build of its own
    plain, outputs = subject.run(), probed.times(subject.fresh_inputs(), subject.symbols)[0]
    for a, b in zip(plain, outputs, strict=True):
        assert np.array_equal(a, b)


def test_every_step_is_marked_and_its_writes_are_kept(llm: Any) -> None:
    executable = llm.compiled._latest().executable
    text = instrument(executable.text, executable.plan)
    steps = [s for s, _ in executable.plan.steps()]
    assert text.count("mp_mark(run, t, T, ") == len(steps) + 1
    assert text.count("mp_keep(t, ") == sum(len(s.kernel.writes) for s in steps)
    numbers = [n for e in events(executable.plan, {}) for n, _ in e.writes]
    assert numbers == list(range(len(numbers)))


def test_an_edited_source_without_a_step_is_refused(llm: Any) -> None:
    executable = llm.compiled._latest().executable
    head, _, body = executable.text.partition("static void plan_run(")
    with pytest.raises(CompileError, match="has no call of step 0"):
        instrument(head + "static void plan_run(" + body.replace("(run, t, T, 0,", "(run, 0, 1, 0,"), executable.plan)


def test_costs_count_what_moves(llm: Any) -> None:
    arguments = llm.step_arguments(np.arange(1, 5)[None])
    subject = llm.compiled.subject(**arguments)
    sizes = {**subject.symbols, "threads": 1}
    kernels = [s.kernel for s, _ in subject.executable.plan.steps()]
    embedding = next(k for k in kernels if isinstance(k, Gather) and k.limit == 97)
    assert kernel_cost(embedding, sizes, subject.inputs)[0] < 97 * 32 * 4  # four rows, not the table
    attention = next(k for k in kernels if isinstance(k, Attention))
    wide = {**sizes, "capacity": 1000}
    assert kernel_cost(attention, wide, subject.inputs) == kernel_cost(attention, sizes, subject.inputs)
    linear = next(k for k in kernels if isinstance(k, Linear))
    assert kernel_cost(linear, sizes, subject.inputs)[1] == 2 * 4 * linear.depth * linear.columns


def test_weights_for_tile_units_count_as_they_lie() -> None:
    """12 bits of 16; a lookup takes rows of them, not the table."""
    types = {"x": tensor_type("f32", 3, 64), "ids": tensor_type("i64", 2)}
    graph = build_graph(
        "tied",
        lambda x, ids, w: [REGISTRY["linear"](x, w), REGISTRY["embedding"](ids, w)],
        types,
        {"w": tensor_type("bf16", 96, 64)},
    )
    kernels = {k.family: k for k in (s.kernel for s, _ in make_plan(graph, cpu_target("tiles", 64)).steps())}
    assert kernel_cost(kernels["linear"], {}, [])[0] == 3 * 64 * 4 + 96 * 64 * 12 // 8 + 3 * 96 * 4
    assert kernel_cost(kernels["gather"], {}, [])[0] == 2 * 64 * 12 // 8 + 2 * 8 + 2 * 64 * 2


def test_experts_count_as_far_as_they_are_chosen() -> None:
    types = {"x": tensor_type("f32", "rows", 16), "ids": tensor_type("i64", "rows", 2)}
    weight = {"w": tensor_type("f32", 8, 64, 16)}
    graph = build_graph("experts", lambda x, ids, w: [REGISTRY["expert_linear"](x, w, ids, None)], types, weight)
    (kernel,) = (s.kernel for s, _ in make_plan(graph, cpu_target("neon", 16)).steps())
    few, many = (kernel_cost(kernel, {"rows": n}, [])[0] for n in (1, 4))
    assert few == 16 * 4 + 2 * 8 + 2 * 64 * 4 + 2 * 64 * 16 * 4
    assert many == 4 * (few - 2 * 64 * 16 * 4) + 8 * 64 * 16 * 4


def test_bad_requests_are_refused(llm: Any) -> None:
    with pytest.raises(ArgumentError, match="repeat must be 1 or more"):
        llm.profile(np.arange(1, 5)[None], repeat=0)
    reference = mp.compile(small_llama(), target="reference")
    with pytest.raises(ArgumentError, match="has no kernels to profile"):
        reference.profile(np.arange(1, 5)[None])


def test_limits_are_measured_and_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(limits, "LARGEST", 32 << 20)  # a small working set: this is not about the numbers
    monkeypatch.setattr(limits, "ROUNDS", 2)
    first = limits.measure(1)
    assert first.memory > 1e8 and first.flops > 1e8 and first.cache >= first.memory
    monkeypatch.setattr(limits, "_measure", lambda threads: pytest.fail("measured again"))
    assert limits.measure(1) == first
    for word in ("read past the cache", "f32 multiply-adds", "GB/s"):
        assert word in str(first)


def test_the_last_level_cache_is_read_from_the_system(tmp_path: Path) -> None:
    for i, size in enumerate(("64K", "1024K", "32M")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{i}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert limits.last_level_cache(tmp_path) == 32 << 20
    assert limits.last_level_cache(tmp_path / "nowhere") == limits.ASSUMED_CACHE
