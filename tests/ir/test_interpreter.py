"""The interpreter: native and float64 runs, symbols, errors, rolled layers."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.driver import build_graph_executable
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Op, Value
from monoplan.ir.interpreter import bind_symbols, interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import bf16, tensor_type
from tests.ir.test_printer import repeated

MLP = """\
graph mlp(%x: bf16[n, 4]) {
  param %w: bf16[3, 4] = "up.weight"
  setup %neg = neg(%w) : bf16[3, 4]
  %linear = linear(%x, %neg, _) : bf16[n, 3]
  %mul = mul(%linear, %linear) : bf16[n, 3]
  return %mul, %x
}
"""


def test_native_and_exact(rng: np.random.Generator) -> None:
    graph = parse_graph(MLP)
    x = rng.standard_normal((5, 4)).astype(bf16.numpy)
    w = rng.standard_normal((3, 4)).astype(bf16.numpy)
    native, same = interpret(graph, [x], {"up.weight": w})
    exact, _ = interpret(graph, [x], {"up.weight": w}, exact=True)
    wide = x.astype(np.float64) @ -w.astype(np.float64).T
    assert exact.dtype == np.float64 and np.allclose(exact, wide * wide, rtol=1e-15)
    assert native.dtype == bf16.numpy and same is x
    # Each op of the native run rounds to bf16 once.
    once = (x.astype(np.float32) @ -w.astype(np.float32).T).astype(bf16.numpy)
    assert np.array_equal(native, (once.astype(np.float32) ** 2).astype(bf16.numpy))


def test_exact_takes_float64_inputs() -> None:
    graph = parse_graph(MLP)
    x, w = np.ones((1, 4)), np.full((3, 4), 0.1)
    out, _ = interpret(graph, [x], {"up.weight": w}, exact=True)
    assert np.allclose(out, 0.16, rtol=1e-15)


def test_watch_sees_every_value() -> None:
    seen: list[str] = []

    def watch(op: Op, v: Value, a: np.ndarray) -> None:
        seen.append(f"{op.name} {v} {a.shape}")

    interpret(parse_graph(MLP), [np.ones((2, 4), bf16.numpy)], {"up.weight": np.ones((3, 4), bf16.numpy)}, watch=watch)
    assert seen == ["neg %neg (3, 4)", "linear %linear (2, 3)", "mul %mul (2, 3)"]


def test_rolled_layers_are_a_loop(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 4)).astype(np.float32)
    scale = rng.standard_normal(4).astype(np.float32)
    ws = [rng.standard_normal((4, 4)).astype(np.float32) for _ in range(3)]
    h, turns = x.astype(np.float64), []
    for w in ws:
        normed = h / np.sqrt((h**2).sum(-1, keepdims=True) / 4 + 1e-5) * scale
        turns.append(np.einsum("nk,ok->no", normed, w.astype(np.float64)))
        h = h + turns[-1]
    outs = interpret(repeated(), [x, scale], {f"w{i}": w for i, w in enumerate(ws)}, exact=True)
    assert len(outs) == 4 and np.allclose(outs[0], h)
    for got, wanted in zip(outs[1:], turns, strict=True):
        assert np.allclose(got, wanted)


def values(*types: str) -> list[Value]:
    made = []
    for i, text in enumerate(types):
        made.append(Value(tensor_type("f32", *text.split()), f"a{i}"))
    return made


def test_symbols_are_solved() -> None:
    assert bind_symbols(values("n 4", "2*n+1"), [(3, 4), (7,)]) == {"n": 3}
    # A product of symbols can wait until the others are known.
    assert bind_symbols(values("batch*seq", "batch", "seq+1"), [(6,), (2,), (4,)]) == {"batch": 2, "seq": 3}
    assert bind_symbols(values("n//2", "n"), [(3,), (7,)]) == {"n": 7}
    assert bind_symbols([], []) == {}


@pytest.mark.parametrize(
    ("types", "shapes", "message"),
    [
        (["n 4"], [(3, 5)], "argument a0: expected f32[n, 4], got size 5 at dimension 1, not 4"),
        (["n", "n"], [(3,), (4,)], "argument a1: expected f32[n], got size 4 at dimension 0, not 3 (n with n=3)"),
        (["n 4"], [(3,)], "argument a0: expected f32[n, 4] (rank 2), got shape [3]"),
        (["2*n"], [(3,)], "argument a0: 2*n = 3 at dimension 0 has no solution in whole numbers"),
        (["n*m"], [(6,)], "m*n = 6"),
    ],
)
def test_sizes_that_do_not_fit(types: list[str], shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        bind_symbols(values(*types), shapes)
    assert message in caught.value.what


def test_wrong_arguments() -> None:
    graph = parse_graph(MLP)
    x, w = np.ones((2, 4), bf16.numpy), np.ones((3, 4), bf16.numpy)
    with pytest.raises(ArgumentError, match=r"takes 1 inputs \(x: bf16\[n, 4\]\), got 2"):
        interpret(graph, [x, x], {"up.weight": w})
    with pytest.raises(ArgumentError, match="no values for the parameters up.weight"):
        interpret(graph, [x])
    with pytest.raises(ArgumentError, match=r"argument x: expected bf16\[n, 4\], got dtype float32"):
        interpret(graph, [x.astype(np.float32)], {"up.weight": w})


def test_errors_of_ops_name_the_line() -> None:
    text = """\
graph g(%ids: i64[n], %w: f32[4, 2]) {
  %embedding = embedding(%ids, %w) : f32[n, 2] @ "model.embed" "user.py":12
  return %embedding
}
"""
    with pytest.raises(ArgumentError, match=r"index 9 at position \[1\] is out of range") as caught:
        interpret(parse_graph(text), [np.array([0, 9]), np.zeros((4, 2), np.float32)])
    assert str(caught.value.where) == "user.py:12 in model.embed"


def test_a_symbolic_slice_past_the_end() -> None:
    text = """\
graph g(%x: f32[n], %table: f32[8]) {
  %slice = slice(%table) {axis=0, start=0, length=n, step=1} : f32[n]
  return %slice
}
"""
    graph = parse_graph(text)
    assert interpret(graph, [np.zeros(3, np.float32), np.arange(8, dtype=np.float32)])[0].tolist() == [0, 1, 2]
    with pytest.raises(ArgumentError, match="9 elements from 0 go past 8"):
        interpret(graph, [np.zeros(9, np.float32), np.zeros(8, np.float32)])


def test_results_that_no_memory_holds() -> None:
    text = """\
graph g(%x: f32[2]) {
  %full = full() {shape=(1152921504606846976,), value=0.0, dtype=f32} : f32[1152921504606846976]
  return %full
}
"""
    with pytest.raises(ArgumentError, match="full: its result does not fit into memory"):
        interpret(parse_graph(text), [np.zeros(2, np.float32)])


def test_parameters_have_their_shapes() -> None:
    graph = parse_graph('graph g(%x: f32[2]) {\n  param %w: f32[2] = "w"\n  return %x, %w\n}\n')
    with pytest.raises(ArgumentError, match=r"parameter w: expected f32\[2\], got shape \[3\]"):
        interpret(graph, [np.zeros(2, np.float32)], {"w": np.zeros(3, np.float32)})
    with pytest.raises(ArgumentError, match=r"parameter w: expected f32\[2\], got shape \[1\]"):
        build_graph_executable(graph, {"w": np.zeros(1, np.float32)})
