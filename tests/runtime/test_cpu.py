"""The loaded plan: errors with the position that is wrong, the GIL, forks, and memory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.codegen.source import headers
from monoplan.driver import GraphExecutable, build_graph_executable
from monoplan.ir.builder import Builder
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph, Loc, Value
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import TensorType, tensor_type
from monoplan.runtime.cpu.executable import CpuExecutable

ROOT = Path(__file__).resolve().parents[2]


def one_op(name: str, types: dict[str, TensorType | None], **attrs: Any) -> Graph:
    """A graph of one op with a location."""
    values = {n: None if t is None else Value(t, n) for n, t in types.items()}
    given = tuple(v for v in values.values() if v is not None)
    with Builder(taken=[v.name for v in given]) as b:
        b.loc = Loc("model.block", "user.py", 7)
        made = REGISTRY[name](*values.values(), **attrs)
    return Graph("one", given, (), tuple(b.ops), made if isinstance(made, tuple) else (made,))


@pytest.fixture(scope="module")
def lookups() -> dict[str, GraphExecutable]:
    """Compiled once for the whole file."""
    table = tensor_type("f32", 5, 2)
    cache = {"cache": tensor_type("f32", 2, 1, 6, 2), "rows": tensor_type("f32", 2, 3, 1, 2)}
    cache["lengths"] = tensor_type("i64", 2)
    graphs = {
        "embedding": one_op("embedding", {"ids": tensor_type("i64", "b", "s"), "weight": table}),
        "gather": one_op("gather", {"x": tensor_type("f32", 3, 5, 2), "index": tensor_type("i32", 4)}, axis=1),
        "unsigned": one_op("gather", {"x": table, "index": tensor_type("u64", 3)}),
        "rope": one_op(
            "rope",
            {"x": tensor_type("f32", "s", 1, 4), "positions": tensor_type("i64", "s"), "sin": table, "cos": table},
        ),
        "update": one_op("kv_update", {**cache, "valid": tensor_type("i32", 2)}),
    }
    return {name: build_graph_executable(g) for name, g in graphs.items()}


def refuses(run: GraphExecutable, inputs: list[Any], message: str) -> None:
    """The plan and the interpreter both refuse; the plan names the place, whatever the number of threads."""
    with pytest.raises(ArgumentError):
        interpret(run.graph, inputs)
    for threads in (1, 3):
        run.executable.threads = threads
        with pytest.raises(ArgumentError, match=message) as caught:
            run(inputs)
        assert "user.py:7 in model.block" in str(caught.value) and f"%{run.graph.ops[0].name} = " in str(caught.value)


def test_token_ids_out_of_range(lookups: dict[str, GraphExecutable]) -> None:
    ids, table = np.zeros((2, 3), np.int64), np.ones((5, 2), np.float32)
    run = lookups["embedding"]
    ids[1, 2] = 5
    refuses(run, [ids, table], r"embedding: index 5 at position \[1, 2\] is out of range \[0, 5\)")
    ids[0, 1] = -1  # the first of several
    refuses(run, [ids, table], r"index -1 at position \[0, 1\]")
    assert run([np.zeros((2, 3), np.int64), table])[0].shape == (2, 3, 2)  # and the plan still works


def test_indices_out_of_range(lookups: dict[str, GraphExecutable]) -> None:
    x = np.ones((3, 5, 2), np.float32)
    index = np.array([0, 1, 9, 2], np.int32)
    refuses(lookups["gather"], [x, index], r"gather: index 9 at position \[2\] is out of range \[0, 5\)")
    huge = np.array([0, 2**63 + 1, 1], np.uint64)
    with pytest.raises(ArgumentError, match=r"at position \[1\] is out of range"):
        lookups["unsigned"]([x[0], huge])


def test_positions_beyond_the_table(lookups: dict[str, GraphExecutable]) -> None:
    x, table = np.ones((2, 1, 4), np.float32), np.ones((5, 2), np.float32)
    refuses(lookups["rope"], [x, np.array([0, 5]), table, table], "rope: position 5 is beyond the table of 5 positions")
    refuses(lookups["rope"], [x, np.array([-2, 0]), table, table], "rope: position -2 is negative")


def test_a_full_cache(lookups: dict[str, GraphExecutable]) -> None:
    cache, rows = np.zeros((2, 1, 6, 2), np.float32), np.ones((2, 3, 1, 2), np.float32)

    def inputs(lengths: list[int], valid: list[int]) -> list[Any]:
        return [cache, rows, np.array(lengths), np.array(valid, np.int32)]

    run = lookups["update"]
    refuses(run, inputs([0, 4], [3, 3]), "kv_update: sequence 1 needs 7 positions, the cache has 6")
    refuses(run, inputs([0, -1], [3, 3]), "kv_update: sequence 1")
    refuses(run, inputs([0, 0], [3, 4]), "kv_update: sequence 1 has 4 valid rows, of 3 given")
    refuses(run, inputs([0, 0], [-1, 3]), "kv_update: sequence 0 has -1 valid rows, of 3 given")
    assert (run(inputs([3, 6], [3, 0]))[0][1] == 0).all()


def test_wrong_inputs_of_a_graph(lookups: dict[str, GraphExecutable]) -> None:
    table = np.ones((5, 2), np.float32)
    with pytest.raises(ArgumentError, match="one takes 2 inputs .ids: i64.*got 1"):
        lookups["embedding"]([table])
    with pytest.raises(ArgumentError, match="argument ids: expected i64.b, s., got dtype int32"):
        lookups["embedding"]([np.zeros((1, 1), np.int32), table])
    with pytest.raises(ArgumentError, match=r"argument weight: expected f32.5, 2., got size 4"):
        lookups["embedding"]([np.zeros((1, 1), np.int64), table[:4]])
    graph = one_op("neg", {"x": tensor_type("f32", 2)})
    assert build_graph_executable(Graph("empty", (), (), (), ()))([]) == []
    with pytest.raises(ArgumentError, match="takes 1 inputs"):
        build_graph_executable(graph)([])


def test_the_gil_is_released() -> None:
    """A Python thread goes on while a plan runs."""
    square = tensor_type("f64", "n", "n")
    run = build_graph_executable(one_op("matmul", {"a": square, "b": square}))
    run.executable.threads = 1
    a = np.ones((400, 400))
    ticks, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        during = 0
        for _ in range(100):  # until a run was long enough to see
            before, start = ticks[0], time.perf_counter()
            run([a, a])
            during = max(during, ticks[0] - before)
            if during >= 3:
                break
            if time.perf_counter() - start < 0.02:
                a = np.ones((len(a) + 100, len(a) + 100))
    finally:
        stop.set()
        thread.join()
    assert during >= 3


def test_a_forked_child_runs_plans(tmp_path: Path) -> None:
    """The child has no OpenMP threads of its parent's pool: old and new plans run in it all the same."""
    program = """
        import os, sys, numpy as np
        from tests.runtime.test_cpu import build_graph_executable, one_op, tensor_type

        x = np.arange(20000, dtype=np.float32)
        run = build_graph_executable(one_op("exp", {"x": tensor_type("f32", "n")}))
        run.executable.threads = 3
        want = run([x])[0]
        child = os.fork()
        if child == 0:
            same = np.array_equal(run([x])[0], want)
            new = build_graph_executable(one_op("neg", {"x": tensor_type("f32", "n")}))
            new.executable.threads = 3
            os._exit(0 if same and np.array_equal(new([x])[0], -x) else 3)
        _, status = os.waitpid(child, 0)
        assert np.array_equal(run([x])[0], want)
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    done = run_python(program)
    assert done.returncode == 0, done.stderr


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, timeout=120, capture_output=True, text=True)


def test_threads_outlive_their_plan() -> None:
    """A plan that is gone takes its library along, but not OpenMP, whose threads still wait for work."""
    program = """
        import gc, time, numpy as np
        from tests.runtime.test_cpu import build_graph_executable, one_op, tensor_type

        x = np.arange(20000, dtype=np.float32)
        for name in ("exp", "neg", "exp", "neg", "exp"):
            run = build_graph_executable(one_op(name, {"x": tensor_type("f32", "n")}))
            run.executable.threads = 3
            assert np.allclose(run([x / 1e4])[0], getattr(np, {"neg": "negative"}.get(name, name))(x / 1e4))
            del run
            gc.collect()
            time.sleep(0.05)
    """
    done = run_python(program)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"


def test_threads_share_a_plan() -> None:
    """Calls at the same time have arenas of their own."""
    graph = one_op("sort", {"x": tensor_type("f32", "n", "m")})
    run = build_graph_executable(graph)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            x = rng.standard_normal((rng.integers(1, 9), rng.integers(1, 400))).astype(np.float32)
            if not np.array_equal(run([x])[0], np.sort(x, axis=-1)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_large_offsets() -> None:
    """Offsets beyond 31 bits: a slice far into a large array."""
    try:
        big = np.zeros((3, 2**30), np.uint8)  # pages that nobody touches cost nothing
    except MemoryError:
        pytest.skip("no address space for 3 GB")
    big[2, -4:] = (1, 2, 3, 4)
    graph = one_op("slice", {"x": tensor_type("u8", 3, 2**30)}, axis=1, start=2**30 - 4, length=4)
    np.testing.assert_array_equal(build_graph_executable(graph)([big])[0][2], [1, 2, 3, 4])


def test_a_graph_without_ops_is_copied() -> None:
    """forward(a, b): a becomes b, and b is the result; nothing is computed, but both have places of their own."""
    import monoplan as mp
    from monoplan import nn

    class Keep(nn.Module):
        def forward(self, a, b):  # type: ignore[no-untyped-def]
            a.assign(b)
            return b

    a, b = np.zeros(5, np.float32), np.arange(5, dtype=np.float32)
    out = mp.compile(Keep())(a, b)
    assert a.tolist() == b.tolist() == out.tolist() and not np.shares_memory(out, b)


def test_crowded_threads_leave_the_rest_to_one() -> None:
    """Of a run whose threads wait for their cores one goes on, with the same results to the bit."""
    module = mp.nn.Sequential(*(mp.nn.Linear(64, 64) for _ in range(4)))
    fast = mp.compile(module, mp.spec("rows", 64), options=mp.Options(threads=3))
    made = fast.built[0][2].executable
    honest = dict(headers("cpu"))["mp_call.h"]
    changed = honest.replace("run.begun = mp_now();", "run.begun = mp_now() - 2000000; run.waited = 1ll << 60;")
    crowded = made.text.replace('#include "mp_call.h"', changed)
    assert honest != changed and crowded != made.text and "if (mp_phase" in made.text
    other = CpuExecutable(made.plan, made.source, made.params, 3, crowded)
    rng = np.random.default_rng(0)
    for rows in (1, 3, 300, 1, 300):
        x = rng.normal(size=(rows, 64)).astype(np.float32)
        np.testing.assert_array_equal(other.run([x], {"rows": rows})[0], fast(x))
