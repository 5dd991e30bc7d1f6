"""Plain values that forward reads: other values have other plans, and what can't be guarded is an error."""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.frontend.guards import same, snapshot
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import TraceError

X = np.arange(4, dtype=np.float32)
RNG = np.random.default_rng(0)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = 1.0

    def forward(self, x: Any) -> Any:
        return x + self.shift


class Values(nn.Module):
    power = 1  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mode, self.unread = 2.0, "add", 0
        self.sizes, self.table, self.nested = [1, 2], np.ones(4, np.float32), {"a": [0.5], "b": (1, [2])}
        self.settings = SimpleNamespace(bias=0.25)
        self.tensor = Tensor(np.zeros(4, np.float32))
        self.inner = Inner()

    def forward(self, x: Any) -> Any:
        y = x * self.scale if self.mode == "add" else x - self.scale
        y = y * sum(self.sizes) + self.table + self.nested["a"][0] + self.nested["b"][1][0] + self.tensor
        return self.inner(y) + self.settings.bias + self.power


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m, "scale", 3.0),
    "string": lambda m: setattr(m, "mode", "subtract"),
    "list in place": lambda m: m.sizes.append(5),
    "array in place": lambda m: m.table.__setitem__(2, 7.0),
    "another array": lambda m: setattr(m, "table", np.full(4, 3, np.float32)),
    "nested": lambda m: m.nested["a"].__setitem__(0, 0.75),
    "list in a tuple": lambda m: m.nested["b"][1].__setitem__(0, 9),
    "object": lambda m: setattr(m.settings, "bias", -1.0),
    "tensor": lambda m: setattr(m, "tensor", Tensor(np.ones(4, np.float32))),
    "child": lambda m: setattr(m.inner, "shift", -2.0),
    "class": lambda m: setattr(type(m), "power", 4),
}


def check(fast: Any, module: Any) -> None:
    np.testing.assert_allclose(fast(X), module(X).numpy(), rtol=1e-6)


@pytest.mark.parametrize("specs", [(mp.spec(4),), ()], ids=["declared", "lazy"])
def test_changed_values_have_new_plans(specs: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Values, "power", 1)
    module = Values()
    fast = mp.compile(module, *specs, target="reference")
    check(fast, module)
    for count, (what, change) in enumerate(CHANGES.items(), 1):
        before = fast(X)
        change(module)
        assert not np.array_equal(module(X).numpy(), before), what
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # many plans
            check(fast, module)
        check(fast, module)
        assert fast.stats.compiles == count + 1, what


def test_old_values_find_their_plans() -> None:
    module = Values()
    fast = mp.compile(module)
    for scale in (2.0, 3.0, 2.0, 3.0):
        module.scale = scale
        check(fast, module)
    assert fast.stats.compiles == 2
    module.unread = 5  # forward does not read it
    check(fast, module)
    assert fast.stats.compiles == 2
    module.scale = 3  # an int is another value
    check(fast, module)
    assert fast.stats.compiles == 3


def test_many_values_are_mentioned() -> None:
    module = Inner()
    fast = mp.compile(module, target="reference")
    with pytest.warns(RuntimeWarning, match="8 plans were made for values of Inner.shift"):
        for i in range(9):
            module.shift = float(i)
            check(fast, module)


def test_a_model_of_the_library_that_was_not_traced_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    from monoplan.models import LlamaForCausalLM
    from tests.models.support import tiny_config

    ids, seen = np.array([[3, 1, 4]]), []
    for _ in range(2):  # the second is found by its structure
        model = LlamaForCausalLM.from_config(tiny_config(), seed=1)
        llm = mp.compile(model)
        llm(ids)
        model.model.norm.eps = 0.5
        seen.append(np.asarray(llm(ids)))
        np.testing.assert_allclose(seen[-1], model(ids).numpy(), rtol=1e-3, atol=1e-4)
    assert np.array_equal(*seen)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x + self.calls


class Appending(Counting):
    def forward(self, x: Any) -> Any:
        self.seen.append(1)
        return x * len(self.seen)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x: Any) -> Any:
        return x + self.rng.random()


class DrawingGlobally(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + RNG.random()


class DrawingFromNumpy(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + float(np.random.rand())


class DrawingFromPython(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + random.random()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Counting, "forward changes Counting.calls, which it has read"),
        (Appending, "forward changes Appending.seen, which it has read"),
        (Drawing, "random numbers from Drawing.rng"),
        (DrawingGlobally, "random numbers from RNG"),
        (DrawingFromNumpy, "random numbers from numpy.random"),
        (DrawingFromPython, "random numbers from the module random"),
    ],
)
def test_what_can_not_be_guarded_is_an_error(kind: type[nn.Module], what: str) -> None:
    module = kind()
    with pytest.raises(TraceError, match=what):
        mp.compile(module, mp.spec(4), target="reference")
    if kind is Counting:
        assert module.calls == 0  # type: ignore[attr-defined]


class Writing(nn.Module):
    def forward(self, x: Any) -> Any:
        self.last = x.shape
        return x * self.last[0]


def test_what_is_written_first_is_no_state() -> None:
    fast = mp.compile(Writing())
    for n in (4, 5):
        np.testing.assert_array_equal(fast(np.ones(n, np.float32)), np.full(n, n))


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.getLogger("monoplan.test")
        self.me = SimpleNamespace(owner=self)  # a cycle
        self.me.me = self.me

    def forward(self, x: Any) -> Any:
        self.logger.debug("called by %s", self.me.owner)
        return x + 1


def test_objects_may_have_private_state_and_cycles() -> None:
    fast = mp.compile(Logging(), mp.spec(4), target="reference")
    logging.getLogger("monoplan.test").isEnabledFor(logging.INFO)  # kept in the logger
    fast(X)
    assert fast.stats.compiles == 1


class Timed(nn.Module):
    def forward(self, x: Any) -> Any:
        time.perf_counter()
        return x + 1


def test_the_time_is_mentioned() -> None:
    clock = time.perf_counter
    with pytest.warns(RuntimeWarning, match="forward reads the clock while it is traced"):
        mp.compile(Timed(), mp.spec(4), target="reference")
    assert time.perf_counter is clock and "__getattribute__" not in vars(nn.Module)


def test_comparison_is_exact() -> None:
    differ = [(1, 1.0), (1, True), (0.0, -0.0), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1}, {1, 2})]
    differ += [(np.float32(1), np.float64(1)), (np.zeros(2), np.zeros(3)), (np.zeros(2), np.float32([0, 0]))]
    for a, b in differ:
        assert not same(snapshot(a)[0], b), (a, b)
        assert same(snapshot(a)[0], a) and same(snapshot(b)[0], b)
    for value in (float("nan"), np.float32("nan"), [float("nan")], np.full(2, np.nan), None, "text"):
        assert same(snapshot(value)[0], value)
    assert snapshot((1, "a"))[1] and not snapshot((1, []))[1] and not snapshot(np.zeros(2))[1]
