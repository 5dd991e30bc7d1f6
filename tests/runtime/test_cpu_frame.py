"""What runs keep for each other: addresses of inputs by weak references, arenas that grow, structures of their own."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from monoplan.driver import GraphExecutable, build_graph_executable
from monoplan.ir.errors import ArgumentError
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import as_dtype

Array = np.ndarray[Any, Any]


def compiled(inputs: str, op: str, result: str) -> GraphExecutable:
    """A graph of one op."""
    return build_graph_executable(parse_graph(f"graph one({inputs}) {{\n  %y = {op} : {result}\n  return %y\n}}\n"))


@pytest.fixture(scope="module")
def doubled() -> Any:
    """x + x of any length, straight from the executable: nothing between the test and the frames."""
    return compiled("%x: f32[n]", "add(%x, %x)", "f32[n]").executable


def run(executable: Any, x: Array) -> Array:
    (y,) = executable.run([x], {"n": len(x)})
    return y  # type: ignore[no-any-return]


def test_new_arrays_at_old_addresses(doubled: Any) -> None:
    """numpy gives a freed array's memory, and Python its object's, to the next: neither is mistaken for the last."""
    seen = set()
    for i in range(200):
        x = np.full(32, i, np.float32)
        seen.add((id(x), x.__array_interface__["data"][0]))
        assert (run(doubled, x) == 2 * i).all()
        del x
    assert len(seen) < 200, "no memory was used again: this test tests nothing"


def test_two_arrays_by_turns(doubled: Any) -> None:
    x, y = np.ones(8, np.float32), np.full(8, 5, np.float32)
    for _ in range(3):
        assert (run(doubled, x) == 2).all() and (run(doubled, y) == 10).all()


def test_contents_are_read_anew(doubled: Any) -> None:
    x = np.ones(8, np.float32)
    for i in range(4):
        x[:] = i
        assert (run(doubled, x) == 2 * i).all()


def test_an_array_that_was_given_cannot_move(doubled: Any) -> None:
    """numpy refuses to resize what a weak reference points to, so that an address stays right while it is known."""
    x = np.ones(8, np.float32)
    run(doubled, x)
    with pytest.raises(ValueError, match="resize"):
        x.resize(1 << 20, refcheck=False)
    run(doubled, np.ones(8, np.float32))  # which makes the frame forget x
    x.resize(1 << 20, refcheck=False)
    assert (run(doubled, x)[:8] == 2).all()


def test_no_input_is_kept_alive(doubled: Any) -> None:
    x = np.ones(8, np.float32)
    y, gone = run(doubled, x), weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None and (y == 2).all()


def test_results_are_not_shared_between_runs(doubled: Any) -> None:
    x = np.ones(8, np.float32)
    first = run(doubled, x)
    x[:] = 3
    second = run(doubled, x)
    assert (first == 2).all() and (second == 6).all()


@pytest.mark.parametrize("keep", [lambda y: y, lambda y: y[:1], lambda y: memoryview(y.view(np.uint16))])
def test_memory_of_results_is_used_again_when_nobody_has_it(keep: Any) -> None:
    """bfloat16 takes that path on every machine. A view, or a buffer that another library took, keeps it, too."""
    doubled = compiled("%x: bf16[n]", "add(%x, %x)", "bf16[n]").executable
    x = np.ones(8, as_dtype("bf16").numpy)
    kept = []
    for i in range(6):
        x[:] = i
        kept.append(keep(run(doubled, x)))
    assert [float(np.asarray(y).view(x.dtype)[0]) for y in kept] == [0, 2, 4, 6, 8, 10]
    kept.clear()
    places = {run(doubled, x).__array_interface__["data"][0] for _ in range(6)}
    assert len(places) <= 2 and all(p % 64 == 0 for p in places)


def test_sizes_by_turns() -> None:
    """An arena that grew serves smaller runs, and each size has its own offsets."""
    text = "graph two(%x: f32[n, m]) {\n  %y, %i = sort(%x) : f32[n, m], i64[n, m]\n  return %y\n}\n"
    ordered = build_graph_executable(parse_graph(text))
    rng = np.random.default_rng(0)
    for shape in ((2, 5), (9, 700), (2, 5), (1, 2000), (9, 700)):
        x = rng.standard_normal(shape).astype(np.float32)
        np.testing.assert_array_equal(ordered([x])[0], np.sort(x, axis=-1))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i8", "u16", "i64", "bool"])
def test_every_kind_of_element(dtype: str) -> None:
    """bfloat16 has no buffer interface, the others do."""
    turn = compiled(f"%x: {dtype}[n, 3]", "transpose(%x) {axes=(1, 0)}", f"{dtype}[3, n]")
    for rows in (2, 4):
        x = np.arange(rows * 3).reshape(rows, 3).astype(as_dtype(dtype).numpy)
        np.testing.assert_array_equal(turn([x])[0], x.T)


def test_a_failed_run_leaves_nothing_behind() -> None:
    look = compiled("%w: f32[4, 2], %ids: i64[n]", "embedding(%ids, %w)", "f32[n, 2]")
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    good, bad = np.array([3, 0]), np.array([1, 9])
    for _ in range(3):
        np.testing.assert_array_equal(look([table, good])[0], table[good])
        with pytest.raises(ArgumentError, match="index 9 at position"):
            look([table, bad])


def test_runs_at_the_same_time(doubled: Any) -> None:
    wrong: list[float] = []

    def work(seed: int) -> None:
        x = np.full(64, seed, np.float32)  # one array of its own, which some other run's frame never saw
        for i in range(300):
            x[:] = seed + i
            if not (run(doubled, x) == 2 * (seed + i)).all():
                wrong.append(seed + i)

    threads = [threading.Thread(target=work, args=(1000 * s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
