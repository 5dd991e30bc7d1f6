"""Weight formats: a new one is one file, and no other file knows a format by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.codegen import formats
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.formats import FORMATS, Layout, choose_format, format_of
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.types import tensor_type
from monoplan.nn import functional as F
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from monoplan.runtime.cuda.executable import CudaExecutable
from monoplan.runtime.cuda.weights import upload_params
from tests.codegen import cuda_emulator
from tests.codegen.toy_format import Toy, value
from tests.needs import needs

ROOT = Path(formats.__file__).resolve().parents[2]
VOCABULARY, DIM, HIDDEN = 70, 48, 40


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    """The toy format in front of all others."""
    found = Toy()
    monkeypatch.setattr(formats, "FORMATS", FORMATS)
    FORMATS.insert(0, found)
    yield found
    FORMATS.remove(found)


class Tied(nn.Module):
    """An embedding whose table is the last product's weight, with a gated product and a plain one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return F.linear(x, self.embed.weight)


def model(toy: Toy, *, rounded: bool) -> Tied:
    """A module whose weights the format represents, roughly or exactly."""
    made, rng = Tied(), np.random.default_rng(0)
    for name, p in made.named_parameters():
        values = rng.uniform(-0.5, 0.5, p.shape).astype(np.float32)
        exact = value(toy.pack_rows(values)) if len(p.shape) == 2 else values
        made.load_parameter(name, exact if rounded else values)
    return made


@pytest.mark.parametrize("ids", [[[3]], [[1, 69, 0], [5, 5, 64]], [list(range(70))] * 3])
def test_a_format_of_ones_own_on_the_cpu(toy: Toy, ids: Any) -> None:
    module, given = model(toy, rounded=False), np.array(ids)
    fast = mp.compile(module, mp.spec("batch", "seq", dtype="i64"))
    wanted = model(toy, rounded=True)(mp.Tensor(given)).numpy()
    assert np.allclose(fast(given), wanted, rtol=1e-5, atol=1e-5)
    assert not np.allclose(module(mp.Tensor(given)).numpy(), wanted, atol=1e-4)  # else nothing was rounded
    text = fast.source()
    assert "mp_load_row_toy" in text and "mp_load_column_toy" in text
    assert {use.layout.format for use in fast.plan.params if use.layout is not None} == {"toy"}


@needs("g++")
@pytest.mark.parametrize("library", [False, True])
def test_a_format_of_ones_own_on_a_gpu(toy: Toy, library: bool) -> None:
    module, device = model(toy, rounded=False), cuda_emulator.EmulatedDevice(library=library)
    traced = trace(module, mp.spec("batch", "seq", dtype="i64"))
    graph = run_passes(traced.graph, PIPELINE)[-1].graph
    plan = make_plan(graph, device.target)
    source = render_cuda(plan, "test")
    params = upload_params(plan, lambda path: traced.params[path].numpy(), device)
    made = CudaExecutable(plan, source, params, device)
    assert "mp_widen<mp_toy>" in source.text and "mp_weight(" in source.text
    for ids in ([[3]], [[1, 69, 0], [5, 5, 64]]):
        given = np.array(ids)
        (got,) = made.run([given], {"batch": given.shape[0], "seq": given.shape[1]})
        assert np.allclose(got, model(toy, rounded=True)(mp.Tensor(given)).numpy(), rtol=1e-5, atol=1e-5)


def test_packing_and_meaning_agree(toy: Toy) -> None:
    w = np.random.default_rng(1).uniform(-1, 1, (70, 24)).astype(np.float32)
    layout = Layout("toy", 16, 2)
    rows = layout.rows(70)
    packed = toy.pack(w, rows, layout, np.empty, None)
    assert np.array_equal(toy.unpack(packed, 24, layout)[rows >= 0], value(toy.pack_rows(w))[rows[rows >= 0]])


def test_the_first_format_that_takes_a_weight_keeps_it() -> None:
    weight, narrow = tensor_type("bf16", 64, 64), tensor_type("bf16", 64, 33)
    chosen = [choose_format(w, cpu_target(isa, 64)) for isa in ("tiles", "avx512") for w in (weight, narrow)]
    assert [f and f.bits for f in chosen] == [12, 16, 16, 16]
    assert choose_format(tensor_type("f64", 8, 8), cpu_target("avx512", 64)) is None
    assert all(format_of(Layout(f.name)) is f for f in FORMATS)


def test_nobody_else_knows_a_format_by_its_name() -> None:
    """Names that are element types too are looked for as parts of names: mp_load_row_bf16, bf16_12."""
    words = re.compile(r"mp_load_(row|column)_(?!\{)\w+|bf16_12|mp_format_(?!bf16_12\.h\"$)\w+")
    for folder in ("ir", "frontend", "passes", "codegen", "runtime", "models", "monoplan"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".py", ".j2", ".h", ".c", ".cuh") or "formats" in path.parts:
                continue
            found = [line for line in path.read_text("utf-8").splitlines() if words.search(line)]
            allowed = [line for line in found if line.startswith('#include "mp_format_bf16_12.h"')]
            assert found == allowed, f"{path}: {found}"
