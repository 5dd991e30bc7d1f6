"""verify compares a plan with the float64 interpreter; the table decides, and the table is the package's own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.inspect.verify import Verification, verify
from monoplan.inspect.walk import number_range, rolled_layers, roundings, turn_locs
from monoplan.ir.graph import Loc
from monoplan.ir.tolerances import EPSILON, compare, tolerance
from monoplan.nn import functional as F
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from tests import tolerances
from tests.codegen.random_graphs import Grower
from tests.runtime.subjects import graph_subject
from tests.runtime.test_bisect import small_llama


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Any) -> Any:
        hidden = F.gelu(self.up(x))
        return {"y": self.down(hidden), "best": hidden.argmax(-1)}


@pytest.fixture(scope="module")
def fast() -> Any:
    return mp.compile(Mlp(), mp.spec("batch", 24))


@pytest.fixture
def x(rng: np.random.Generator) -> Any:
    return rng.normal(size=(3, 24)).astype("f4")


def test_a_right_plan_is_ok_and_prints_a_table(fast: Any, x: Any) -> None:
    found = fast.verify(x)
    assert found.ok and bool(found)
    assert [r.name for r in found.outputs] == ["y", "best"]
    text = str(found)
    assert text.startswith("Mlp on cpu against the float64 interpreter at batch=3: ok\n")
    for word in ("value", "max abs", "max rel", "ulp", "nan/inf", "f32[3, 24]", "i64[3]"):
        assert word in text
    first = found.outputs[0].difference
    assert 0 < first.max_abs < 1e-5 and first.strange == 0


def test_nodes_shows_every_value_with_its_line(fast: Any, x: Any) -> None:
    found = fast.verify(x, nodes=True)
    names = [r.name for r in found.nodes]
    assert len(names) >= 3 and all(r.difference.ok for r in found.nodes)
    assert all("test_verify.py" in r.where for r in found.nodes)
    assert "values of the final graph, in order:" in str(found)


def test_a_wrong_number_is_shown_with_its_place(fast: Any, x: Any) -> None:
    subject = fast.subject(x)
    weight = next(a for a in subject.executable.params if a.ndim > 2)  # packed: a copy of the plan's own
    kept = weight.copy()
    try:
        weight += 0.5
        found = fast.verify(x, nodes=True)
    finally:
        weight[...] = kept
    assert not found.ok
    assert not found.nodes[0].difference.ok
    assert "wrong" in str(found) and "bisect() with the same arguments" in str(found)
    assert "worst at" in str(found.outputs[0].difference)


def test_nan_and_infinity_count(fast: Any, x: Any) -> None:
    x[1, 3] = np.nan
    found = fast.verify(x)
    assert found.ok  # the exact result is NaN as well
    assert found.outputs[0].difference.strange == 24  # a row of it, which the table shows
    assert "y: 24 of 72 elements are NaN or infinite, as forward in float64 says" in str(found)
    subject = fast.subject(np.zeros((1, 24), "f4"))
    got = subject.run()
    got[0][0, 5] = np.inf
    difference = subject.judge(got)[0]
    assert (difference.ok, difference.strange, difference.place) == (False, 1, (0, 5))


class Squares(nn.Module):
    """Halves overflow where the sum is over 65504; forward itself does not."""

    def forward(self, x: Any) -> Any:
        return (x * x).sum(-1) * 0.001


def test_infinity_where_the_reference_has_none_is_wrong() -> None:
    fast = mp.compile(Squares(), mp.spec("batch", 8, dtype="float16"))
    x = np.ones((3, 8), np.float16)
    found = fast.verify(x)
    assert found.ok and "infinite" not in str(found)
    x[1] = 200.0
    subject = fast.subject(x)
    got = subject.run()
    got[0][1] = np.inf  # as plain halves have it, or worse
    assert np.isinf(subject.plain[0][1]) and np.isfinite(subject.exact[0]).all()
    assert not subject.judge(got)[0].ok
    got[0][2] = np.nan  # and one that nothing excuses
    assert subject.judge(got)[0].bad == 2
    subject.run = lambda: got  # type: ignore[method-assign]
    text = str(verify(subject))
    assert "WRONG" in text and "2 of 3 elements are NaN or infinite where forward in float64 is not" in text
    assert "so are 1 in plain f16" in text


def test_arguments_are_not_changed() -> None:
    llm = mp.compile(small_llama())
    arguments = llm.step_arguments(np.arange(1, 5)[None])
    before = [np.array(t.numpy()) for t in arguments["past_key_values"].k]
    assert llm.compiled.verify(**arguments).ok
    for old, now in zip(before, arguments["past_key_values"].k, strict=True):
        assert np.array_equal(old, now.numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_language_model_with_rolled_layers(dtype: str) -> None:
    llm = mp.compile(small_llama(dtype=dtype))
    found: Verification = llm.verify(np.arange(1, 8)[None], nodes=True)
    assert found.ok, str(found)
    assert all(r.difference.ok for r in found.nodes), str(found)
    layers = [r for r in found.nodes if r.name.endswith("[2]")]
    assert layers and all("layers.2" in r.where for r in layers)  # the layer's own number, not the first one's
    assert llm.compiled.subject(**llm.step_arguments(np.arange(1, 8)[None])).kernel_fault is None


def test_a_near_tie_is_not_an_error() -> None:
    """Two columns with equal weights: which index wins is decided by rounding, and no kernel is wrong."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 8, bias=False)

        def forward(self, x: Any) -> Any:
            return self.head(x).argmax(-1)

    module = Head()
    weight = module.head.weight.numpy()
    weight[5] = weight[2] * (1 + 1e-9)
    weight[2] = weight[5] = np.abs(weight).max() * np.sign(np.ones(64))
    fast = mp.compile(module, mp.spec("n", 64))
    rng = np.random.default_rng(0)
    assert fast.verify(np.abs(rng.normal(size=(16, 64))).astype("f4")).ok


def test_roundings_follow_the_roughest_type() -> None:
    llm = mp.compile(small_llama(dtype="bfloat16"), target="reference")
    final = llm.compiled._latest().stages[-1].graph
    rough = roundings(final)
    assert max(rough[v] for v in final.outputs if v.type.dtype.is_float) == EPSILON["bf16"]


def test_locations_inside_rolled_layers() -> None:
    llm = mp.compile(small_llama(), target="reference")
    final = llm.compiled._latest().stages[-1].graph
    loop = next(op for op in final.ops if op.opdef.kind == "repeat")
    place = turn_locs(loop, {p.value: p.path for p in final.params})
    locs = {op.loc.path for op in loop.attrs["body"].ops}
    assert any(path.startswith("model.layers.0") for path in locs)
    for op in loop.attrs["body"].ops:
        assert place(op.loc, 2).path == op.loc.path.replace("layers.0", "layers.2")
    # A body that begins inside a layer ends inside the next one.
    assert place(Loc("model.layers.1.mlp"), 2).path == "model.layers.3.mlp"
    assert [place(Loc(path), 2).path for path in ("model.layers", "model.norm", "")] == [
        "model.layers",
        "model.norm",
        "",
    ]
    assert {r.path for r in rolled_layers(final).values()} >= {"model.layers.0–2", "model.layers.0–2.mlp"}
    assert [number_range(n) for n in ([3], [4, 5, 6], [0, 2, 4])] == ["3", "4–6", "0, 2 … 4"]


def test_there_is_one_table() -> None:
    assert tolerances.UNITS is __import__("monoplan.ir.tolerances", fromlist=["UNITS"]).UNITS
    assert tolerance("i64", "model") == (0.0, 0.0)


@pytest.mark.parametrize(
    ("got", "want", "ok"), [(1.0, 1.0 + 1e-7, True), (1.0, 1.01, False), (np.nan, np.nan, True), (np.nan, 1.0, False)]
)
def test_compare(got: float, want: float, ok: bool) -> None:
    assert compare(np.array([got], "f4"), np.array([want]), "f32", "pointwise").ok is ok


def test_compare_accepts_what_is_no_worse_than_the_plain_reference() -> None:
    got, want, plain = np.array([1.001], "f4"), np.array([1.0]), np.array([0.999], "f4")
    assert not compare(got, want, "f32", "pointwise").ok
    assert compare(got, want, "f32", "pointwise", plain=plain).ok
    assert not compare(np.array([1.1], "f4"), want, "f32", "pointwise", plain=plain).ok


def test_a_reference_that_overflows_excuses_only_the_same_place() -> None:
    want, plain = np.array([1.0, 2.0, 3.0]), np.array([np.inf, 2.0, 3.0], "f4")
    for got, ok in ([np.inf, 2, 3], True), ([np.nan, 2, 3], True), ([1, np.nan, 3], False), ([1, 2, 30], False):
        assert compare(np.array(got, "f4"), want, "f32", "model", plain=plain).ok is ok


def test_the_reference_target_is_compared_too(x: Any) -> None:
    fast = mp.compile(Mlp(), mp.spec("batch", 24), target="reference")
    assert fast.verify(x).ok and fast.bisect(x).ok


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 40))])
def test_right_kernels_are_not_accused(seed: int) -> None:
    """Random graphs of every kind of op and type, fused and not: no kernel is called wrong."""
    rng = random.Random(seed)
    grower = Grower(rng.choice)
    for _ in range(10):
        grower.graph(steps=rng.randint(1, 12))
    graph = grower.finish()
    graph = run_passes(graph, PIPELINE)[-1].graph if seed % 2 else graph
    numbers = np.random.default_rng(seed)
    params = {v.name: grower.array(v, {}, numbers) for v in grower.params}
    inputs = [grower.array(v, {"b": 2, "s": 4}, numbers) for v in grower.inputs]
    subject = graph_subject(graph, inputs, {p.path: params[p.path] for p in graph.params})
    assert subject.kernel_fault is None, f"{subject.kernel_fault.node.op}: {subject.kernel_fault.difference}"
