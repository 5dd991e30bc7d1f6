"""Communicators: sums equal on every rank, bit for bit; plans that exchange; and what happens when a rank is not there.

Ranks are threads of this process, or processes that share a file. Those of a real mpirun are in tests/integration.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.driver import build_graph_executable
from monoplan.ir.errors import ArgumentError, PlanError
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import bf16
from monoplan.runtime.ranks.comm import Communicator, communicator, launched, single, threads
from monoplan.runtime.ranks.exchange import Exchange, shared_bytes
from tests.ranks import run_ranks
from tests.tolerances import check

Array = np.ndarray[Any, Any]


def drawn(rank: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    values = np.random.default_rng(rank).standard_normal(shape)
    return (values * 8).astype(dtype) if np.dtype(dtype).kind != "f" or dtype == bf16.numpy else values.astype(dtype)


# -- a group --------------------------------------------------------------------------------------------------------


def test_one_rank() -> None:
    comm, x = single(), np.arange(3.0)
    assert comm.collect("a") == ["a"] and comm.share(1) == 1 and comm.gather(x)[0] is x
    assert np.array_equal(comm.all_reduce(x), x) and np.array_equal(comm.all_gather(x), x)
    assert (comm.rank, comm.size, comm.failure(), comm.local_threads(8)) == (0, 1, "", 8)
    comm.barrier()
    comm.agree({"a": 1}, "agree")
    comm.abort()
    comm.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, bf16.numpy])
@pytest.mark.parametrize("room", [64, 1 << 20])
def test_sums_are_equal_bit_for_bit_and_in_rank_order(dtype: Any, room: int) -> None:
    results = run_ranks(threads(3, room), lambda c: c.all_reduce(drawn(c.rank, (7, 11), dtype)))
    first, second, third = (drawn(r, (7, 11), dtype) for r in range(3))
    for got in results:
        assert got.dtype == dtype and np.array_equal(got, (first + second) + third)


def test_gathers_keep_the_order_and_any_type() -> None:
    def work(c: Communicator) -> Any:
        return c.all_gather(np.full((2, 3), c.rank, np.int16), axis=0), c.gather(np.zeros((0, 4), np.float32))

    for joined, empty in run_ranks(threads(4, 64), work):
        assert joined.shape == (8, 3) and joined[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(empty) == 4 and empty[3].shape == (0, 4)


def test_values_of_python() -> None:
    def work(c: Communicator) -> Any:
        c.barrier()
        return c.collect({"rank": c.rank}), c.share(f"from {c.rank}"), c.local_threads(8)

    for collected, shared, count in run_ranks(threads(2), work):
        assert collected == [{"rank": 0}, {"rank": 1}] and shared == "from 0" and count == 4


def test_many_exchanges_in_a_row() -> None:
    """Slots are used in turn: no rank may overwrite what another still reads."""

    def work(c: Communicator) -> bool:
        ok = True
        for i in range(500):
            ok = ok and c.all_reduce(np.full(33, i + c.rank, np.int64))[32] == 3 * i + 3
        return ok

    assert run_ranks(threads(3, 128), work) == [True] * 3


def test_what_tp_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    one = single()
    assert communicator(None) is None and communicator(one) is one
    with pytest.raises(ArgumentError, match="tp= takes a communicator, got 2"):
        communicator(2)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    assert not launched()
    monkeypatch.setenv("PMI_SIZE", "1")
    assert not launched()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert launched()


# -- failures -------------------------------------------------------------------------------------------------------


def test_an_error_of_one_rank_reaches_the_others() -> None:
    said = []

    def work(c: Communicator) -> None:
        if c.rank == 1:
            raise ValueError("no disk left")
        try:
            c.all_reduce(np.zeros(4))
        except PlanError as error:
            said.append(str(error))
            assert c.told_elsewhere()
            raise

    with pytest.raises(ValueError, match="no disk left"):
        run_ranks(threads(3), work)
    assert len(said) == 2 and all("rank 1 failed: no disk left" in text for text in said)


def test_who_is_absent_can_be_seen_without_an_exchange() -> None:
    first, second, third = threads(3)
    assert first.exchange is not None and first.exchange.absent() == ""
    third.close()
    assert first.exchange.absent().startswith("rank 2 has left")
    second.fail("no disk left")
    assert first.exchange.absent() == "rank 1 failed: no disk left"
    assert first.failure() == ""  # nothing has gone wrong here yet


def test_a_rank_that_left_is_not_waited_for() -> None:
    first, second = threads(2)
    second.close()
    begin = time.perf_counter()
    with pytest.raises(PlanError, match="rank 1 has left"):
        first.all_reduce(np.zeros(4))
    with pytest.raises(PlanError, match="rank 1 has left"):  # and again, at once
        first.all_reduce(np.zeros(4))
    assert not first.told_elsewhere()
    assert time.perf_counter() - begin < 5


def test_ranks_that_do_different_things_are_told() -> None:
    def work(c: Communicator) -> str:
        with pytest.raises(PlanError) as caught:
            c.all_reduce(np.zeros(4 + c.rank))
        return str(caught.value)

    first, second = run_ranks(threads(2), work)
    assert "rank 1 sends 40 bytes at collective -1, this one 32" in first and "rank 0 sends 32 bytes" in second


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_COMM_TIMEOUT", "0.1")
    with pytest.raises(PlanError, match="rank 1 did not answer for 0.1 s"):
        threads(2)[0].all_reduce(np.zeros(4))
    monkeypatch.setenv("MONOPLAN_COMM_TIMEOUT", "soon")
    with pytest.raises(ArgumentError, match="MONOPLAN_COMM_TIMEOUT='soon' is not a number of seconds"):
        threads(2)


_PEER = """
import mmap, sys, numpy as np
from monoplan.runtime.ranks.exchange import Exchange
with open(sys.argv[1], "r+b") as file:
    memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
end = Exchange.shared(memory, 1, 2, 4096)
total = sum(float(part[0]) for part in end.gather(np.array([2.0])))
print("there", total, flush=True)
sys.stdin.readline()
"""


def test_a_process_that_was_killed(tmp_path: Path) -> None:
    """Another process of the group dies without a word; who waits for it says so within moments."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(shared_bytes(2, 4096)))
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    end = Exchange.shared(memory, 0, 2, 4096)
    with subprocess.Popen(
        [sys.executable, "-c", _PEER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert [float(part[0]) for part in end.gather(np.array([1.0]))] == [1.0, 2.0]
        assert peer.stdout is not None and peer.stdout.readline() == "there 3.0\n"
        os.kill(peer.pid, signal.SIGKILL)  # nobody has waited for it yet: it is a zombie when it is looked for
        begin = time.perf_counter()
        with pytest.raises(PlanError, match=rf"rank 1 has ended \(process {peer.pid}\)"):
            end.gather(np.array([1.0]))
        assert not end.told_elsewhere()  # so rank 0 says it at once: the launcher ends it soon
        assert time.perf_counter() - begin < 5


def test_disagreement_is_refused_on_every_rank() -> None:
    def work(c: Communicator) -> str:
        with pytest.raises(ArgumentError) as caught:
            c.agree({"model": "a", "dtype": "f32" if c.rank == 0 else "bf16"}, "compile the same model")
        return str(caught.value)

    for text in run_ranks(threads(2), work):
        assert "the ranks do not compile the same model: they differ in dtype" in text and "bf16 on rank 1" in text


# -- in plans -------------------------------------------------------------------------------------------------------


def executed(c: Communicator, graph: Any, inputs: list[Array], plan_threads: int) -> list[Array]:
    made = build_graph_executable(graph, options=mp.Options(threads=plan_threads))
    made.executable.comm = c
    return made(inputs)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize(("room", "plan_threads"), [(64, 1), (192, 3), (1 << 20, 2)])
def test_the_kernels(dtype: str, room: int, plan_threads: int) -> None:
    """Sums with a residual and a bias, and gathers along two axes; in several pieces where the room is small."""
    from monoplan.ir.builder import build_graph
    from monoplan.ir.types import as_dtype, tensor_type

    def forward(x: Any, r: Any, b: Any) -> Any:
        total = REGISTRY["fused_all_reduce"](x, r, b, world=2, expr="add(mul(x0, x2), x1)")
        return (
            REGISTRY["all_reduce"](x, world=2),
            total,
            REGISTRY["all_gather"](x, axis=-1, world=2),
            REGISTRY["all_gather"](x, axis=1, world=2),
        )

    types = {"x": tensor_type(dtype, "n", 3, 10), "r": tensor_type(dtype, "n", 3, 10), "b": tensor_type(dtype, 10)}
    graph = build_graph("exchange", forward, types)
    kind = as_dtype(dtype).numpy
    shared = [drawn(7, (5, 3, 10)).astype(kind), drawn(8, (10,)).astype(kind)]
    mine = [drawn(r, (5, 3, 10)).astype(kind) for r in range(2)]
    results = run_ranks(threads(2, room), lambda c: executed(c, graph, [mine[c.rank], *shared], plan_threads))
    a, b = (m.astype(np.float64) for m in mine)
    wide = [s.astype(np.float64) for s in shared]
    for got in results:
        check(got[0], a + b, dtype, "pointwise")
        terms = (a + b) * wide[1], wide[0]
        check(got[1], terms[0] + terms[1], dtype, "pointwise", scale=np.abs(terms[0]) + np.abs(terms[1]))
        assert np.array_equal(got[2], np.concatenate(mine, -1)) and np.array_equal(got[3], np.concatenate(mine, 1))
    for one, two in zip(*results, strict=True):
        assert one.tobytes() == two.tobytes()


def test_a_plan_whose_other_rank_fails_says_so() -> None:
    from monoplan.ir.builder import build_graph
    from monoplan.ir.types import tensor_type

    graph = build_graph("alone", lambda x: REGISTRY["all_reduce"](x, world=2), {"x": tensor_type("f32", 4)})
    first, second = threads(2)
    second.fail("it lost its way")
    with pytest.raises(PlanError, match="the ranks can't go on together") as caught:
        executed(first, graph, [np.zeros(4, np.float32)], 1)
    assert "rank 1 failed: it lost its way" in caught.value.why
    first.close()
    with pytest.raises(PlanError, match="the communicator was closed"):
        executed(first, graph, [np.zeros(4, np.float32)], 1)
    with pytest.raises(PlanError, match="the communicator was closed"):
        first.all_reduce(np.zeros(4))
