"""Calls like earlier ones: recognised when they are, and never when something about them changed."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import arguments
from monoplan.api import Compiled
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError, TraceError
from monoplan.runtime.cuda import device as cuda_device
from monoplan.runtime.cuda import executable as cuda
from tests.codegen import cuda_emulator
from tests.codegen.cuda_emulator import EmulatedArray
from tests.needs import needs

Array = np.ndarray[Any, Any]


class Both(Module):
    def forward(self, x: Any, y: Any) -> Any:
        return {"sum": x + y, "difference": x - y}


class Adding(Module):
    """Writes into its second argument."""

    def forward(self, x: Any, total: Any) -> Any:
        total.assign(total + x)
        return total * 2.0


def numbers(*shape: int, start: int = 0, dtype: Any = np.float32) -> Array:
    return (start + np.arange(np.prod(shape))).reshape(shape).astype(dtype)


def declared(module: Module, *shape: Any) -> Compiled:
    made: Compiled = mp.compile(module, mp.spec(*shape), mp.spec(*shape))
    return made


# -- what is recognised -----------------------------------------------------------------------------------------


def test_a_call_is_matched_once(long_way: list[Any]) -> None:
    fast = declared(Both(), "n", 3)
    for rows in (2, 5, 2, 5, 2):
        x, y = numbers(rows, 3), numbers(rows, 3, start=7)
        np.testing.assert_array_equal(fast(x, y)["sum"], x + y)
        np.testing.assert_array_equal(fast(Tensor(x), y)["difference"], x - y)
    assert len(long_way) == 2 and fast.stats.calls == 10


def test_keywords_in_any_order(long_way: list[Any]) -> None:
    fast, x, y = mp.compile(Both()), numbers(4), numbers(4, start=9)
    for _ in range(2):
        for out in (fast(x, y), fast(x=x, y=y), fast(y=y, x=x), fast(x, y=y)):
            np.testing.assert_array_equal(out["difference"], x - y)
    assert len(long_way) == 4


def test_keywords_with_arrays_that_are_others() -> None:
    """What is known of a call by keyword is its form; shapes, types and strides are read every time."""
    fast, x, y = declared(Both(), "n", 4), numbers(4, 4), numbers(4, 4, start=9)
    for _ in range(3):
        np.testing.assert_array_equal(fast(y=y, x=x)["difference"], x - y)
    np.testing.assert_array_equal(fast(y=y.T, x=x)["difference"], x - y.T)
    np.testing.assert_array_equal(fast(y=y[:2], x=x[1:3])["difference"], x[1:3] - y[:2])
    with pytest.raises(ArgumentError, match="argument y"):
        fast(y=y.astype(np.float64), x=x)
    np.testing.assert_array_equal(fast(x=x, y=y)["difference"], x - y)


def test_one_array_twice(long_way: list[Any]) -> None:
    """Order by keyword is found by name, not by which array was where."""
    fast, x, y = mp.compile(Both()), numbers(4), numbers(4, start=9)
    fast(y=x, x=x)
    np.testing.assert_array_equal(fast(y=y, x=x)["difference"], x - y)
    assert len(long_way) == 1


class Nested(Module):
    def forward(self, parts: Any, scale: Any = 1) -> Any:
        if isinstance(parts, dict):
            return parts["a"] - parts["b"], [parts["a"] * scale]
        return parts[0] - parts[1], [parts[0] * scale]


def test_structures_and_constants_are_told_apart(long_way: list[Any]) -> None:
    fast, a, b = mp.compile(Nested()), numbers(4), numbers(4, start=3)
    given: list[tuple[Any, ...]] = [
        ([a, b],),
        ((a, b),),
        ({"a": a, "b": b},),
        ({"b": b, "a": a},),
        ([a, b], 2),
        ([a, b], 2.0),
        ([a, b], 3),
    ]
    for _ in range(3):
        for args in given:
            difference, (scaled,) = fast(*args)
            np.testing.assert_array_equal(difference, a - b)
            np.testing.assert_array_equal(scaled, a * (args[1] if len(args) > 1 else 1))
    assert len(long_way) == len(given)
    assert fast(([a, b]), True)[1][0].dtype == np.float32 and len(long_way) == len(given) + 1, "True is not 1"


def test_any_number_of_arguments() -> None:
    class Several(Module):
        def forward(self, *parts: Any, **named: Any) -> Any:
            return sum(named.values(), sum(parts[1:], parts[0]))

    fast, x, y = mp.compile(Several()), numbers(3), numbers(3, start=5)
    for _ in range(2):
        np.testing.assert_array_equal(fast(x, y, z=y), x + 2 * y)
        np.testing.assert_array_equal(fast(x, y), x + y)


def test_wrong_arguments_stay_wrong() -> None:
    fast, x = mp.compile(Both()), numbers(3)
    fast(x, x)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="missing a required argument: 'y'"):
            fast(x)
        with pytest.raises(ArgumentError, match="too many positional arguments"):
            fast(x, x, x)
        with pytest.raises(ArgumentError, match="unexpected keyword argument 'z'"):
            fast(x, x, z=x)


def test_the_table_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "KEPT", 4)
    fast = declared(Both(), "n")
    for n in (*range(1, 20), 3, 3):
        np.testing.assert_array_equal(fast(numbers(n), numbers(n))["sum"], 2 * numbers(n))
        assert len(fast._known._calls) <= 4


# -- arrays that are others, or were changed ----------------------------------------------------------------------


def test_arrays_of_other_types_are_refused_as_ever() -> None:
    fast, x = declared(Both(), "n", 4), numbers(2, 4)
    fast(x, x)
    wrong: list[Any] = [numbers(2, 4, dtype=np.float64), numbers(2, 5), numbers(3, 4), numbers(8), numbers(2, 4, 1)]
    for y in wrong:
        with pytest.raises(ArgumentError) as first:
            declared(Both(), "n", 4)(x, y)
        with pytest.raises(ArgumentError) as later:
            fast(x, y)
        assert str(later.value) == str(first.value)
    np.testing.assert_array_equal(fast(x, x)["sum"], 2 * x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # numpy wishes that nobody did this
def test_an_array_that_is_changed_in_place() -> None:
    """Its shape, its type, its strides: the same object is not the same argument."""
    fast, x = declared(Both(), "n", 4), numbers(6, 4)
    np.testing.assert_array_equal(fast(x, x)["sum"], 2 * x)
    x.shape = (4, 6)
    with pytest.raises(ArgumentError, match="argument x"):
        fast(x, x)
    x.shape = (6, 4)
    np.testing.assert_array_equal(fast(x, x)["sum"], 2 * x)
    base = numbers(2, 6, 4)
    view = base[0]
    fast(view, view)
    view.strides = (4, 24)
    np.testing.assert_array_equal(fast(view, view)["sum"], 2 * view)
    assert (view[0] == [0, 6, 12, 18]).all()
    x.dtype = np.int32
    with pytest.raises(ArgumentError, match=r"argument x: expected f32\[n, 4\], got dtype int32"):
        fast(x, x)


def test_arrays_that_a_plan_cannot_take_as_they_are(tmp_path: Path, long_way: list[Any]) -> None:
    fast, x = declared(Both(), "n", 4), numbers(4, 4)
    fast(x, x)
    raw = np.zeros(4 * 16 + 1, np.uint8)
    crooked = raw[1:].view(np.float32).reshape(4, 4)
    crooked[:] = x
    for y in (x.T, x[::-1], x.astype(">f4"), crooked):
        for _ in range(2):
            np.testing.assert_array_equal(fast(x, y)["difference"], x - y.astype(np.float32))
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4, 4))
    mapped[:] = x
    count = len(long_way)
    np.testing.assert_array_equal(fast(mapped, x)["sum"], 2 * x)
    assert len(long_way) == count, "a mapped file is as good as any array"


def test_arrays_that_come_and_go() -> None:
    """The memory of one array is soon the memory of the next."""
    fast = declared(Both(), "n")
    for i in range(100):
        n = 1 + i % 3
        np.testing.assert_array_equal(fast(np.full(n, i, np.float32), np.ones(n, np.float32))["sum"], np.full(n, i + 1))


def test_no_array_is_kept_alive() -> None:
    fast, x = mp.compile(Both()), numbers(5)
    fast(x, x)
    fast(x, x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


# -- arguments that forward writes into ---------------------------------------------------------------------------


def test_what_forward_writes_arrives_in_each_callers_array(long_way: list[Any]) -> None:
    fast, x = declared(Adding(), "n"), np.ones(4, np.float32)
    ours, theirs = np.zeros(4, np.float32), Tensor(np.full(4, 10, np.float32))
    for i in range(1, 4):
        assert (fast(x, ours) == 2 * i).all() and (ours == i).all()
        fast(x, theirs)
        assert (theirs.numpy() == 10 + i).all()
    strided = np.zeros(8, np.float32)[::2]
    fast(x, strided)
    fast(x, strided)
    assert (strided == 2).all() and len(long_way) == 3


def test_an_array_that_became_read_only() -> None:
    fast, x, total = declared(Adding(), "n"), np.ones(4, np.float32), np.zeros(4, np.float32)
    x.flags.writeable = False  # which is only read
    fast(x, total)
    fast(x, total)
    total.flags.writeable = False
    with pytest.raises(ArgumentError, match="argument total: forward writes into it, but the array is read-only"):
        fast(x, total)
    assert (total == 2).all()
    total.flags.writeable = True
    fast(x, total)
    assert (total == 3).all()


class Exchange(Module):
    """Each argument gets the other's contents, and is a result too."""

    def forward(self, a: Any, b: Any) -> Any:
        old = a * 1.0
        a.assign(b)
        b.assign(old)
        return a


def test_results_that_are_arguments() -> None:
    fast = mp.compile(Exchange())
    for i in range(3):
        a, b = np.full(3, i, np.float32), np.full(3, i + 10, np.float32)
        got = fast(a, b)
        assert (a == i + 10).all() and (b == i).all() and (got == i + 10).all()


class Same(Module):
    def forward(self, x: Any) -> Any:
        return {"x": x, "more": x + 1}


def test_results_are_those_of_the_first_call() -> None:
    """Whether a result is the caller's own array does not depend on how often it was called."""
    fast, x, y = mp.compile(Same()), numbers(3), numbers(3, start=4)
    first, second, other = fast(x), fast(x), fast(y)
    assert (first["x"] is x) == (second["x"] is x) == (other["x"] is y)
    assert first["more"] is not second["more"]
    np.testing.assert_array_equal(other["x"], y)


# -- forward, threads, other targets ------------------------------------------------------------------------------


def test_another_forward() -> None:
    module, x, y = Both(), numbers(3), numbers(3, start=4)
    fast = mp.compile(module)
    fast(x, y)

    def swapped(y: Any, x: Any) -> Any:
        raise AssertionError("the plan is compiled already")

    object.__setattr__(module, "forward", swapped)
    assert module.signature().parameters.keys() == {"y", "x"}
    with pytest.raises(TraceError, match="compiled already"):
        fast(x, y)  # names in another order: not the call that was known


def test_several_threads() -> None:
    fast, wrong = declared(Adding(), "n"), []

    def work(seed: int) -> None:
        n = 1 + seed % 2
        x, total = np.full(n, seed, np.float32), np.zeros(n, np.float32)
        for i in range(1, 200):
            if not (fast(x, total) == 2 * seed * i).all() or not (total == seed * i).all():
                wrong.append(seed)
            if i % 50 == 0:  # sizes that nobody had before
                fast(numbers(seed + i), numbers(seed + i))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and fast.stats.compiles == 1


def test_the_reference_target() -> None:
    fast, total = mp.compile(Adding(), target="reference"), np.zeros(3, np.float32)
    for i in range(1, 4):
        assert (fast(np.ones(3, np.float32), total) == 2 * i).all() and (total == i).all()


@needs("g++")
def test_device_arrays_and_numpy_arrays_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cuda_emulator.EmulatedDevice()
    monkeypatch.setattr(cuda, "gpu", lambda: made)
    monkeypatch.setattr(cuda_device, "gpu", lambda: made)
    fast, x = mp.compile(Adding(), target="cuda"), np.ones(6, np.float32)
    here, there = np.zeros(6, np.float32), EmulatedArray(np.zeros(6, np.float32))
    for i in range(1, 4):
        assert isinstance(fast(x, here), np.ndarray)
        assert isinstance(fast(x, there), EmulatedArray)
        assert (here == i).all() and (there.get() == i).all()
