"""A plan's source in parts: the same kernels, each once, the same results, and the whole source's lines in messages."""

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.codegen import source as splitting
from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.plan import make_plan
from monoplan.codegen.source import Source, headers
from monoplan.ir.errors import CompileError
from monoplan.models import LlamaConfig, LlamaForCausalLM
from monoplan.runtime.build import cache, toolchain
from monoplan.runtime.cpu import executable as cpu


def tiny() -> LlamaForCausalLM:
    c = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        attention_bias=False,
    )
    return LlamaForCausalLM.from_config(c, seed=3)


@pytest.fixture(scope="module")
def source() -> Source:
    graph = mp.compile(tiny(), target="reference").prepare().compiled.built[0][2].stages[-1].graph
    return render_cpu(make_plan(graph, cpu.host_target()), "test")


def test_every_kernel_is_in_one_part(source: Source) -> None:
    found = source.parts()
    assert 2 <= len(found) <= splitting.MOST
    for f in source.functions:
        assert sum(f.text in p for p in found) == 1
        assert sum(f"MP_KERNEL {f.name}(" in p.replace(f.text, "") for p in found) == 1  # declared where it is called
    assert [("mp_run_plan(" in p) for p in found] == [False] * (len(found) - 1) + [True]
    assert all(p.startswith("#define MP_PARTS 1\n") and '#include "mp_plan.h"' in p for p in found)
    weights = [splitting.weight_of([f for f in source.functions if f.text in p]) for p in found]
    assert max(weights) < 2 * min(weights)


def test_no_more_parts_than_cores(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "LEAST", 1 << 10)
    monkeypatch.setattr(splitting, "LOOPS", {})
    monkeypatch.setattr(splitting, "SHARED", {})
    counts = [len(source.parts(cores)) for cores in (1, 2, 3, 4, 64)]
    assert counts == [splitting.FEWEST, 2, 3, 4, splitting.MOST]


def test_lines_are_those_of_the_whole(source: Source) -> None:
    whole = source.text.splitlines()
    for part in source.parts():
        lines = part.splitlines()
        starts = [(i, int(m[1])) for i, line in enumerate(lines) if (m := re.fullmatch(r'#line (\d+) "plan.c"', line))]
        assert starts
        for i, number in starts:
            assert lines[i + 1] == whole[number - 1]


def test_small_sources_stay_whole(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dataclasses.replace(source, functions=source.functions[:1]).parts() == ()
    monkeypatch.setattr(splitting, "LEAST", splitting.weight_of(source.functions))
    assert source.parts() == ()


def test_results_are_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Built in parts and whole, each in a cache of its own; nothing of the parts is left there."""
    ids = np.arange(40).reshape(2, 20) % 96
    found: list[Any] = []
    for name, least in (("parts", 1 << 10), ("whole", 1 << 30)):
        monkeypatch.setattr(splitting, "LEAST", least)
        monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / name))
        llm = mp.compile(tiny())
        found.append((np.asarray(llm(ids)), np.asarray(llm(ids[:, :1]))))
        executable = llm.compiled.built[0][2].executable
        assert bool(executable.parts()) == (name == "parts")
        files = {p.name for p in executable.entry.path.iterdir()}
        assert {"plan.c", "plan.so", "build.sh", "build.log"} <= files
        assert not [f for f in files if f.startswith("part")]
        subprocess.run(["sh", str(executable.entry.path / "build.sh")], check=True)  # the whole source compiles as well
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_bad_part_is_reported_with_the_line_of_the_whole(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path))
    name = source.functions[-1].name
    bad = source.text.replace(f"MP_KERNEL {name}(", f"int broken = nowhere;\nMP_KERNEL {name}(")
    line = bad[: bad.index("nowhere")].count("\n") + 1
    pieces = [
        p.replace(f"MP_KERNEL {name}(", f"int broken = nowhere;\nMP_KERNEL {name}(", 1)
        if source.functions[-1].text in p
        else p
        for p in source.parts()
    ]
    key, build = toolchain.plan_build(
        bad, cpu.flags_for(cpu.host_target()), target="test", abi=1, headers=headers("cpu"), parts=lambda: pieces
    )
    with pytest.raises(CompileError, match=rf"plan\.c:{line}:.*nowhere") as error:
        cache.get_or_build(key, build)
    kept = Path(str(error.value.where))
    assert kept.name == "plan.c" and (kept.parent / "part0.c").exists()  # the command in the message can be repeated
    command = str(error.value.why)
    assert subprocess.run(command, shell=True, capture_output=True).returncode == 1
