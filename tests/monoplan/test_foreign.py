"""Arrays of other libraries as arguments: host memory here, an emulated device's, and with -m cuda a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend.module import Module
from monoplan.ir.errors import ArgumentError, PlanError
from monoplan.runtime.cuda import device as cuda_device
from monoplan.runtime.cuda import executable as cuda
from tests.codegen import cuda_emulator
from tests.codegen.cuda_emulator import EmulatedArray
from tests.needs import needs

emulated = needs("g++")


class Doubled(Module):
    def forward(self, x: Any, y: Any) -> Any:
        return {"sum": x + y, "twice": x * 2.0}


class Counting(Module):
    """Writes into its argument."""

    def forward(self, x: Any, total: Any) -> Any:
        total.assign(total + x)
        return x * 3.0


class Foreign:
    """Somebody's array in host memory."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = cuda_emulator.EmulatedDevice()
    monkeypatch.setattr(cuda, "gpu", lambda: made)
    monkeypatch.setattr(cuda_device, "gpu", lambda: made)
    yield made


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def test_host_arrays_of_others_are_used_in_place() -> None:
    x, y = numbers(3, 4), numbers(3, 4)
    for fast in (mp.compile(Doubled()), mp.compile(Doubled(), mp.spec("n", 4), mp.spec("n", 4))):
        out = fast(Foreign(x), y)
        np.testing.assert_array_equal(out["sum"], x + y)
    counting, total = mp.compile(Counting()), np.zeros(4, np.float32)
    counting(numbers(4), Foreign(total))
    np.testing.assert_array_equal(total, numbers(4))


def test_a_call_with_arrays_of_others_is_matched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, long_way = mp.compile(Doubled()), []
    anew = mp.Compiled._call_anew
    monkeypatch.setattr(mp.Compiled, "_call_anew", lambda self, *a: (long_way.append(a), anew(self, *a))[1])
    for n in (3, 3, 3):
        x, y = numbers(n, 4) + len(long_way), numbers(n, 4)
        np.testing.assert_array_equal(fast(Foreign(x), Foreign(y))["sum"], x + y)
        np.testing.assert_array_equal(fast(y=Foreign(y), x=x)["twice"], x * 2)
    assert len(long_way) == 2
    x = numbers(8, 4)[::2]
    np.testing.assert_array_equal(fast(Foreign(x[:3]), x[:3])["sum"], 2 * x[:3])
    assert len(long_way) == 3  # strided: a copy of it runs


def test_foreign_arrays_that_share_memory_are_refused_each_time() -> None:
    counting, x, total = mp.compile(Counting()), numbers(4), np.zeros(4, np.float32)
    for _ in range(3):
        counting(Foreign(x), Foreign(total))
    np.testing.assert_array_equal(total, x + x + x)
    with pytest.raises(ArgumentError, match="share memory"):
        counting(Foreign(total), Foreign(total))


def test_what_cannot_be_exported_is_explained() -> None:
    class Private(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("it requires gradients")

    with pytest.raises(ArgumentError, match=r"argument x: a Private can't be used in place") as caught:
        mp.compile(Doubled())(Private(numbers(2)), numbers(2))
    assert "requires gradients" in str(caught.value) and "detach()" in str(caught.value)


def test_a_gpu_array_is_refused_by_the_cpu() -> None:
    with pytest.raises(ArgumentError, match=r"argument y: a EmulatedArray is on a GPU, the plan runs on the CPU"):
        mp.compile(Doubled())(numbers(2), EmulatedArray(numbers(2)))


@emulated
def test_device_arrays_go_in_and_out(device: Any) -> None:
    fast = mp.compile(Doubled(), target="cuda")
    for shape in ((3, 4), (3, 4), (5, 4)):  # the last one is traced anew, with a symbol
        x, y = numbers(*shape), numbers(*shape) + 1
        for given in ((EmulatedArray(x), EmulatedArray(y)), (x, EmulatedArray(y))):
            out = fast(*given)
            assert all(isinstance(a, EmulatedArray) for a in out.values())
            np.testing.assert_array_equal(out["sum"].get(), x + y)
        assert isinstance(fast(x, y)["sum"], np.ndarray)
    assert fast.stats.compiles == 2 and device.followed


@emulated
def test_tools_take_device_arrays_too(device: Any) -> None:
    x = numbers(3, 4)
    assert mp.compile(Doubled(), target="cuda").verify(EmulatedArray(x), x).ok


@emulated
def test_device_arrays_that_are_not_dense_are_copied(device: Any) -> None:
    x = numbers(4, 6)
    out = mp.compile(Doubled(), target="cuda")(EmulatedArray(x.T), EmulatedArray(x.T))
    np.testing.assert_array_equal(out["twice"].get(), 2 * x.T)


@emulated
def test_wrong_types_are_named(device: Any) -> None:
    fast = mp.compile(Doubled(), mp.spec("n", 4), mp.spec("n", 4), target="cuda")
    with pytest.raises(ArgumentError, match=r"argument y: expected f32\[n, 4\], got dtype float64"):
        fast(EmulatedArray(numbers(2, 4)), EmulatedArray(numbers(2, 4).astype(np.float64)))
    with pytest.raises(ArgumentError, match=r"argument y|y: "):
        fast(EmulatedArray(numbers(2, 4)), EmulatedArray(numbers(2, 5)))


@emulated
def test_arguments_that_forward_changes(device: Any) -> None:
    counting = mp.compile(Counting(), target="cuda")
    x = numbers(6)
    for total in (EmulatedArray(np.ones(6, np.float32)), np.ones(6, np.float32)):
        for given in (EmulatedArray(x), x):
            counting(given, total)
        got = total.get() if isinstance(total, EmulatedArray) else total
        np.testing.assert_allclose(got, 1 + x + x, rtol=1e-6)


class Looked(Module):
    """Rows of a table, and then more work."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.linear = mp.nn.Linear(8, 8)

    def forward(self, x: Any, ids: Any) -> Any:
        if self.late:
            return mp.nn.functional.embedding(ids, self._more(x))
        return self._more(mp.nn.functional.embedding(ids, x))

    def _more(self, x: Any) -> Any:
        for _ in range(3):
            x = mp.nn.functional.softmax(self.linear(x), -1)
        return x


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device that does its work when somebody waits for it."""
    made = cuda_emulator.LateDevice()
    monkeypatch.setattr(cuda, "gpu", lambda: made)
    monkeypatch.setattr(cuda_device, "gpu", lambda: made)
    yield made


@emulated
def test_a_caller_with_device_arrays_does_not_wait(late: Any) -> None:
    fast, x = mp.compile(Doubled(), mp.spec("n", 4), mp.spec("n", 4), target="cuda"), numbers(3, 4)
    given, results = [EmulatedArray(x + i) for i in range(4)], []
    for i in range(4):
        results.append(fast(given[i], given[0])["sum"])
        assert late.queue and late.led == i + 1
    late.synchronize()
    for i, y in enumerate(results):
        np.testing.assert_array_equal(y.get(), x + i + x)
    np.testing.assert_array_equal(fast(x, x)["sum"], x + x)  # numpy's are there
    mixed = fast(EmulatedArray(x), x)["sum"]  # what it is copied from is used again by the next call
    assert not late.queue and late.led == 4
    np.testing.assert_array_equal(mixed.get(), x + x)


@emulated
@pytest.mark.parametrize("at_the_end", [False, True])
def test_errors_belong_to_their_call(late: Any, at_the_end: bool) -> None:
    """The host waits until the last index is checked, not for what comes behind it."""
    module = Looked(at_the_end)
    fast = mp.compile(module, mp.spec(5, 8), mp.spec("n", dtype="int64"), target="cuda")
    table, good = numbers(5, 8), np.array([4, 0, 1])
    expected = mp.compile(module, target="reference")(table, good)
    rows, ids, wrong = EmulatedArray(table), EmulatedArray(good), EmulatedArray(np.array([1, 7]))
    for _ in range(3):
        got = fast(rows, ids)
        assert bool(late.queue) == (not at_the_end)
        with pytest.raises(ArgumentError, match=r"index 7 at position \[1\] is out of range"):
            fast(rows, wrong)
        late.synchronize()
        np.testing.assert_allclose(got.get(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
class TestOnAGpu:
    """The same with CuPy and torch, on their own streams."""

    def test_cupy(self) -> None:
        cupy = pytest.importorskip("cupy")
        fast = mp.compile(Doubled(), target="cuda")
        stream = cupy.cuda.Stream(non_blocking=True)
        for n in (1 << 22, 1 << 22, 100):
            with stream:  # made by work that is under way while the plan is called, read before anybody waits
                x = cupy.arange(n, dtype=cupy.float32) + 1
                for _ in range(20):
                    x = cupy.sqrt(x * x)
                out = fast(x, x[::-1])
                assert isinstance(out["sum"], cupy.ndarray) and out["sum"].device.id == 0
                total = (out["sum"] + 0).get()
            np.testing.assert_allclose(total, np.full(n, n + 1), rtol=1e-6)
        assert isinstance(fast(np.ones(100, np.float32), np.ones(100, np.float32))["sum"], np.ndarray)

    def test_cupy_bfloat16(self) -> None:
        cupy = pytest.importorskip("cupy")
        x = np.arange(64, dtype=np.float32).astype(ml_dtypes.bfloat16)
        out = mp.compile(Doubled(), target="cuda")(cupy.asarray(x), cupy.asarray(x))
        assert out["sum"].dtype == x.dtype
        np.testing.assert_array_equal(out["sum"].get().astype(np.float32), 2 * x.astype(np.float32))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
    def test_torch(self, dtype: str) -> None:
        torch = pytest.importorskip("torch")
        fast = mp.compile(Doubled(), target="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.arange(1 << 20, device="cuda").remainder(100).to(getattr(torch, dtype))
            for _ in range(20):
                x = (x * 2).div(2, rounding_mode="floor").to(x.dtype)
            out = fast(x, x)["sum"]
            back = torch.from_dlpack(out) if dtype != "bfloat16" else torch.from_dlpack(out.view("int16")).view(x.dtype)
            assert torch.equal(back, x + x)
        with pytest.raises(ArgumentError, match="detach"):
            fast(torch.ones(3, device="cuda", requires_grad=True), torch.ones(3, device="cuda"))

    def test_a_call_returns_before_its_work_is_done(self) -> None:
        """What the caller enqueues next waits for it, also where memory of arguments and results is used again."""
        torch = pytest.importorskip("torch")

        class Many(Module):
            def forward(self, x: Any) -> Any:
                y = x
                for _ in range(20):
                    y = y @ y / 2048.0 + 0.1
                return x + y

        fast = mp.compile(Many(), target="cuda")
        for number in range(6):
            with torch.cuda.stream(torch.cuda.Stream() if number % 2 else torch.cuda.default_stream()):
                x = torch.full((1024, 1024), 0.1 * (number + 1), device="cuda")
                want = fast(x.cpu().numpy())
                torch.cuda.synchronize()
                out = fast(x)
                assert number < 2 or not torch.cuda.current_stream().query(), "the caller waited"
                del x
                for _ in range(8):  # takes the memory of x
                    torch.full((1024, 1024), float("nan"), device="cuda")
                got = torch.from_dlpack(out) * 1.0
                np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-5)

    def test_errors_of_queued_calls(self) -> None:
        torch = pytest.importorskip("torch")
        module = Looked(late=False)
        fast = mp.compile(module, mp.spec(5, 8), mp.spec("n", dtype="int64"), target="cuda")
        table, good = torch.from_numpy(numbers(5, 8)).cuda(), torch.tensor([4, 0, 1]).cuda()
        expected = mp.compile(module, target="reference")(numbers(5, 8), np.array([4, 0, 1]))
        results = []
        for _ in range(5):
            results.append(fast(table, good))
            with pytest.raises(ArgumentError, match=r"index 7 at position \[1\] is out of range"):
                fast(table, torch.tensor([1, 7]).cuda())
        for got in results:
            np.testing.assert_allclose(got.get(), expected, rtol=1e-3, atol=1e-4)

    def test_torch_on_the_host(self) -> None:
        torch = pytest.importorskip("torch")
        fast = mp.compile(Doubled(), target="cuda")
        for dtype in (torch.float32, torch.bfloat16):
            out = fast(torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype))["sum"]
            assert isinstance(out, np.ndarray) and out.astype(np.float32).tolist() == [2.0] * 5

    def test_a_device_array_that_forward_changes(self) -> None:
        cupy = pytest.importorskip("cupy")
        counting, total, x = mp.compile(Counting(), target="cuda"), cupy.ones(100, cupy.float32), numbers(100)
        for given in (cupy.asarray(x), x):
            counting(given, total)
        np.testing.assert_allclose(total.get(), 1 + x + x, rtol=1e-6)
        every_other = cupy.ones(200, cupy.float32)  # not written in place: put there afterwards
        counting(cupy.asarray(x), every_other[::2])
        np.testing.assert_allclose(every_other.get(), np.stack([1 + x, np.ones(100, np.float32)], 1).ravel(), rtol=1e-6)

    def test_too_little_memory(self) -> None:
        with pytest.raises(PlanError, match="are left on GPU"):
            cuda_device.gpu().allocate(1 << 46)
