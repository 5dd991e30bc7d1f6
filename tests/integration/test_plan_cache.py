"""Plans from disk: nothing is traced or lowered twice, what is asked for is made then, and keys hold everything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import ChoiceLoader, DictLoader

import monoplan as mp
from monoplan import driver as build
from monoplan import nn, plan_cache
from monoplan.codegen import source as rendering
from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.plan import make_plan
from monoplan.frontend.module import structure
from monoplan.frontend.specs import spec
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir import records
from monoplan.models import LlamaForCausalLM
from monoplan.nn import functional as F
from monoplan.options import Options
from monoplan.passes import manager, pipeline
from monoplan.runtime.build import trusted
from monoplan.runtime.build.toolchain import declared
from monoplan.runtime.cpu.executable import host_target
from tests.codegen.mixed import mixed_graph
from tests.integration.support import small_config

MAKERS = plan_cache.makers
IDS = np.array([[3, 1, 4, 1, 5]])


class Custom(nn.Module):
    """A class that is not the library's: its graph is only known by tracing."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x)) * self.factor


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the code is taken to be what it was when it was imported, even if somebody edits it now."""
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plan_cache, "makers", lambda: "the code")
    return tmp_path


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a module is traced and passes run."""
    found = {"trace": 0, "run_passes": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        return call

    for module, name in ((build, "trace"), (manager, "run_passes")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return found


def entries(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / "facts").glob(f"{kind}-*.sealed"))


def test_a_model_is_neither_traced_nor_lowered_twice(cache_dir: Path, counts: dict[str, int]) -> None:
    config = small_config()
    first = mp.compile(LlamaForCausalLM.from_config(config, seed=1))
    wanted = first(IDS)
    assert counts == {"trace": 1, "run_passes": 1}
    assert len(entries(cache_dir, "call")) == len(entries(cache_dir, "plan")) == 1
    second = mp.compile(LlamaForCausalLM.from_config(config, seed=2))  # other weights, the same plan
    other = second(IDS)
    assert counts == {"trace": 1, "run_passes": 1} and second.stats.cache_hits == 1
    third = mp.compile(LlamaForCausalLM.from_config(config, seed=1))
    assert np.array_equal(third(IDS), wanted) and not np.array_equal(other, wanted)
    assert third.source() == first.source() and str(third.plan) == str(first.plan)
    assert counts == {"trace": 1, "run_passes": 1}
    # What is asked for is made now, and is what it was.
    assert third.ir("trace", locs=True) == first.ir("trace", locs=True) and third.ir() == first.ir()
    assert counts == {"trace": 2, "run_passes": 2}
    assert third.explain() == first.explain() and third.plan.explain() == first.explain()
    assert np.array_equal(third(IDS), wanted)
    assert third.generate_ids([3, 1, 4], 4) == first.generate_ids([3, 1, 4], 4)


def test_a_remade_plan_can_be_verified(cache_dir: Path) -> None:
    for _ in range(2):
        fast = mp.compile(Custom(), spec("n", 4))
        assert fast.verify(np.ones((3, 4), np.float32), nodes=True).ok


def test_a_users_class_is_traced_and_not_lowered_twice(cache_dir: Path, counts: dict[str, int]) -> None:
    x = np.ones((2, 4), np.float32)
    module = Custom()
    first = mp.compile(module, spec("n", 4))(x)
    assert np.array_equal(mp.compile(module, spec("n", 4))(x), first)
    assert counts == {"trace": 2, "run_passes": 1} and not entries(cache_dir, "call")
    module.factor = 3.0  # an attribute that the graph depends on
    assert np.allclose(mp.compile(module, spec("n", 4))(x), first * 1.5)
    assert counts == {"trace": 3, "run_passes": 2} and len(entries(cache_dir, "plan")) == 2


def test_options_and_types_are_part_of_the_key(cache_dir: Path, counts: dict[str, int]) -> None:
    module = nn.Linear(4, 3)
    for options in ({}, {"fuse": False}, {"stop_after": "dce"}):
        mp.compile(module, spec("n", 4), options=options)
    mp.compile(module, spec("n", 4), dtype="bf16")
    mp.compile(module, spec(2, 4))
    assert counts["run_passes"] == 5 and len(entries(cache_dir, "plan")) == 5


def test_other_code_makes_other_plans(cache_dir: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 3)
    mp.compile(module, spec("n", 4))
    monkeypatch.setattr(plan_cache, "makers", lambda: "edited")
    mp.compile(module, spec("n", 4))
    assert counts == {"trace": 2, "run_passes": 2}


def test_code_that_is_edited_while_it_runs_makes_no_entries(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp, "_imported", 0.0)
    monkeypatch.setattr(plan_cache, "makers", MAKERS.__wrapped__)
    mp.compile(nn.Linear(4, 3), spec("n", 4))
    assert not entries(cache_dir, "plan")
    monkeypatch.setattr(mp, "_imported", 1e12)
    assert len(plan_cache.makers()) == 64


def test_passes_and_templates_from_elsewhere_leave_no_trace(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that plant a wrong pass or kernel must neither find honest plans nor leave theirs behind."""
    module, x = Custom(), np.ones((2, 4), np.float32)
    with monkeypatch.context() as planted:
        wrong = tuple(dataclasses.replace(p) for p in pipeline.PIPELINE)
        planted.setattr(pipeline, "PIPELINE", wrong)
        mp.compile(module, spec("n", 4))(x)
        assert not entries(cache_dir, "plan")
    with monkeypatch.context() as planted:
        env = rendering.environment()
        planted.setattr(env, "loader", ChoiceLoader([DictLoader({}), env.loader]))
        mp.compile(module, spec("n", 4))(x)
        assert not entries(cache_dir, "plan")
    mp.compile(module, spec("n", 4))(x)
    assert len(entries(cache_dir, "plan")) == 1


def test_locations_are_part_of_the_key() -> None:
    graph = trace(Custom(), spec("n", 4)).graph
    lower = [dataclasses.replace(op, loc=dataclasses.replace(op.loc, line=9)) for op in graph.ops]
    moved = graph.replace(ops=tuple(lower))
    assert plan_cache.plan_key(graph, "") != plan_cache.plan_key(moved, "")
    assert plan_cache.choices(Options(), "a", None, "1") != plan_cache.choices(Options(), "b", None, "1")


def test_a_layer_by_itself_has_the_lines_of_its_caller(cache_dir: Path) -> None:
    module = nn.Linear(4, 3)
    first = mp.compile(module, spec("n", 4)).source()
    second = mp.compile(module, spec("n", 4)).source()
    mine, yours = ({line for line in text.splitlines() if Path(__file__).name in line} for text in (first, second))
    assert mine and yours and not mine & yours


def test_a_damaged_entry_is_no_entry(cache_dir: Path, counts: dict[str, int]) -> None:
    module, x = nn.Linear(4, 3), np.ones((2, 4), np.float32)
    wanted = mp.compile(module, spec("n", 4))(x)
    for path in (*entries(cache_dir, "plan"), *entries(cache_dir, "call")):
        path.write_bytes(path.read_bytes()[:-20])
    assert np.array_equal(mp.compile(module, spec("n", 4))(x), wanted)
    assert counts == {"trace": 2, "run_passes": 2}
    entries(cache_dir, "plan")[0].unlink()  # the call is known, its plan is gone
    assert np.array_equal(mp.compile(module, spec("n", 4))(x), wanted)
    assert counts == {"trace": 3, "run_passes": 3}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_plan_is_the_same_after_it_was_data(dtype: str) -> None:
    graph = mixed_graph(dtype)
    plan = make_plan(graph, host_target())
    source = render_cpu(plan, "1")
    table = json.loads(json.dumps(records.dump((graph, plan, source), plan_cache.classes())))
    _, plan_again, source_again = records.load(table, plan_cache.classes())
    assert source_again == source and str(plan_again) == str(plan)
    assert render_cpu(plan_again, "1").text == source.text


def test_nothing_but_data_is_kept(cache_dir: Path) -> None:
    """Whatever a later process reads is sealed JSON, a source, a log, or the binary that was built from it."""
    mp.compile(LlamaForCausalLM.from_config(small_config(), seed=1))(IDS)
    for path in (cache_dir / "facts").iterdir():
        body = trusted.unseal(f"facts/{path.name}", path.read_bytes())
        assert body is not None and json.loads(body) is not None, path
    kinds = {path.suffix for path in (cache_dir / "plans").rglob("*") if path.is_file()}
    assert kinds == {".c", ".h", ".so", ".sh", ".log", ".sealed"}


def test_old_entries_go(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "KEPT", 2)
    for n in range(4):
        plan_cache._remember("plan", str(n), n)
    assert len(entries(cache_dir, "plan")) == 2 and plan_cache._recall("plan", "3") == 3


def test_structure_tells_modules_apart() -> None:
    config = small_config()

    def text(change: Any = None, **changes: Any) -> str | None:
        model = LlamaForCausalLM.from_config(small_config(**changes))
        if change is not None:
            change(model)
        return structure(model.generation_step())

    plain = text()
    assert plain is not None and plain == text() and config.num_hidden_layers == 3
    others = (text(layers=4), text(rms_norm_eps=1e-3), text(tie_word_embeddings=True), text(dtype="bfloat16"))
    assert len({plain, *others}) == 5

    def scale(model: Any) -> None:
        model.model.layers[1].self_attn.scaling = 0.5

    def swap(model: Any) -> None:
        model.model.norm = nn.LayerNorm(32)

    assert len({plain, text(scale), text(swap)}) == 3


def test_structure_knows_what_it_does_not_know() -> None:
    assert structure(Custom()) is None
    patched = nn.Linear(4, 3)
    object.__setattr__(patched, "forward", lambda x: x)
    assert structure(patched) is None
    odd = nn.Linear(4, 3)
    odd.table = np.zeros(3)  # type: ignore[assignment]
    assert structure(odd) is None
    model = LlamaForCausalLM.from_config(small_config())
    model.model.layers[0].mlp.act_fn = lambda x: x
    assert structure(model.generation_step()) is None
    assert structure(nn.Sequential(nn.Linear(4, 3), Custom())) is None


def test_declarations_are_parsed_once(cache_dir: Path) -> None:
    cdef = "typedef struct { int a; double b[2]; } pair; int f(const pair *);"
    declared.cache_clear()
    ffi = declared(cdef)
    (fact,) = (cache_dir / "facts").glob("cffi-tables-*.sealed")
    declared.cache_clear()
    again = declared(cdef)
    for f in (ffi, again):
        p = f.new("pair *", {"a": 3, "b": [1.0, 2.0]})
        assert (p.a, p.b[1], f.sizeof("pair")) == (3, 2.0, 24)
    assert fact.exists() and ffi is not again
    declared.cache_clear()
