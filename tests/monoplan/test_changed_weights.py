"""Weights that change after compile(): a module's new ones are taken, changes in place are at least found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.models import LlamaForCausalLM
from tests.matrices import partly
from tests.models.support import tiny_config

X = np.ones((2, 8), np.float32)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def check(compiled: Any, module: Any) -> None:
    np.testing.assert_allclose(compiled(X), module(mp.Tensor(X)).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("specs", [(mp.spec("b", 8),), ()], ids=["declared", "lazy"])
def test_new_weights_are_taken(specs: tuple[Any, ...]) -> None:
    module = Two()
    compiled = mp.compile(module, *specs)
    check(compiled, module)
    module.load_state_dict({name: np.full(t.shape, 0.5, np.float32) for name, t in module.state_dict().items()})
    check(compiled, module)
    module.load_parameter("second.bias", np.arange(8, dtype=np.float32))
    check(compiled, module)
    module.first.weight = nn.Parameter(np.eye(8, dtype=np.float32))
    check(compiled, module)
    module.second = nn.Linear(8, 8)
    check(compiled, module)
    module.second.weight = module.first.weight  # shared from now on
    check(compiled, module)
    assert compiled.verify(X).ok


def test_what_happens_to_other_modules_makes_no_plan() -> None:
    module, other = Two(), Two()
    compiled = mp.compile(module, mp.spec("b", 8))
    other.load_state_dict(module.state_dict())
    check(compiled, module)
    assert compiled.stats.compiles == 1


def test_weights_that_do_not_fit_are_tried_again() -> None:
    module = nn.Linear(8, 8)
    compiled = mp.compile(module, mp.spec("b", 8))
    good = module.weight
    module.weight = nn.Parameter(np.zeros((8, 9), np.float32))
    for _ in range(2):  # and never the old plan
        with pytest.raises(mp.MonoplanError):
            compiled(X)
    module.weight = good
    check(compiled, module)


@pytest.mark.parametrize("dtype", partly([None, "bfloat16"], lambda dtype: dtype is None))
def test_a_language_model(dtype: str | None) -> None:
    model, other = (LlamaForCausalLM.from_config(tiny_config(), seed=seed) for seed in (0, 1))
    compiled, ids = mp.compile(model, dtype=dtype), np.arange(9)[None]
    before, want = compiled(ids), mp.compile(other, dtype=dtype)(ids)
    assert (before != want).any()
    model.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(compiled(ids), want)
    made = compiled.compiled.stats.compiles
    list(compiled.generate_ids([1, 2], max_new_tokens=3))
    assert compiled.compiled.stats.compiles == made


def test_a_change_in_place_is_not_taken_for_a_wrong_kernel() -> None:
    module = nn.Linear(8, 8)
    compiled = mp.compile(module, mp.spec("b", 8))
    assert compiled.verify(X).ok
    module.weight.numpy()[:] = 0
    found = compiled.verify(X)
    assert not found.ok and "%weight is no longer what Linear was compiled with: its array was changed" in str(found)
    with pytest.raises(mp.MonoplanError, match="%weight is no longer what Linear was compiled with"):
        compiled.bisect(X)


class Scaled(nn.Module):
    """Its weights keep the order of rows in a plan, which others could be tempted to share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.RMSNorm(8), nn.Embedding(4, 8)

    def forward(self, x: Any, ids: Any) -> Any:
        return self.norm(x) + self.table(ids)


def test_no_weight_of_a_plan_is_memory_of_the_module(tmp_path: Path) -> None:
    module, ids = Scaled(), np.array([0, 3])
    np.save(tmp_path / "w.npy", np.ones((4, 8), np.float32))
    mapped = np.load(tmp_path / "w.npy", mmap_mode="r+")
    module.table.weight = nn.Parameter(mapped)
    compiled = mp.compile(module)
    before = compiled(X, ids)
    module.norm.weight.numpy()[:] = 7.0
    mapped[:] = 3.0
    np.testing.assert_array_equal(compiled(X, ids), before)
    assert "changed in place" in str(compiled.verify(X, ids))
