"""mp.scan: eager it is a Python loop, traced one op; what can't be one is an error that names the leaf and the line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.tracer import Trace, trace
from monoplan.ir.errors import ArgumentError, TraceError, TypeRuleError
from monoplan.ir.interpreter import interpret

X = np.arange(12, dtype=np.float32).reshape(4, 3)
H = np.ones(3, np.float32)


def traced(forward: Any, x: Any) -> Trace:
    """A trace of forward(x) on a spec of this array, whose first size is symbolic."""

    class Given(nn.Module):
        def forward(self, x: Any) -> Any:
            return forward(x)

    return trace(Given(), mp.spec("n", *x.shape[1:], dtype=x.dtype))


def test_a_running_sum() -> None:
    last, ys = mp.scan(lambda s, x: (s + x, s * 2), mp.Tensor(H), mp.Tensor(X))
    sums = 1 + np.cumsum(X, 0)
    np.testing.assert_array_equal(last.numpy(), sums[-1])
    np.testing.assert_array_equal(ys.numpy(), 2 * np.concatenate([H[None], sums[:-1]]))


def test_nested_states_and_results() -> None:
    def cell(state: Any, x: Any) -> Any:
        return {"n": state["n"] + 1, "h": (state["h"][0] + x["a"],)}, [x["b"], None, {"n": state["n"]}]

    last, ys = mp.scan(cell, {"n": 0, "h": (H,)}, {"a": X, "b": X[:, 0] > 2})
    assert last["n"].item() == 4 and last["n"].dtype == mp.Tensor(0).dtype
    np.testing.assert_array_equal(last["h"][0].numpy(), 1 + X.sum(0))
    assert ys[0].numpy().tolist() == [False, True, True, True] and ys[1] is None
    assert ys[2]["n"].numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dim", [1, -1, 0])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_dimension_in_both_directions(dim: int, reverse: bool) -> None:
    first = np.zeros(4 if dim else 3, np.float32)
    last, ys = mp.scan(lambda s, x: (s + x, s + x), first, X, dim=dim, reverse=reverse)
    flipped = np.flip(X, dim) if reverse else X
    want = np.cumsum(flipped, dim)
    np.testing.assert_array_equal(ys.numpy(), np.flip(want, dim) if reverse else want)
    np.testing.assert_array_equal(last.numpy(), np.take(want, -1, dim))


def test_a_length_in_place_of_slices() -> None:
    last, ys = mp.scan(lambda s, x: (s * 2, x), H, length=5)
    assert last.numpy().tolist() == [32.0] * 3 and ys is None


def test_no_steps() -> None:
    last, (y, n) = mp.scan(lambda s, x: (s + x, (x[:2], s.sum() > 0)), H, X[:0])
    np.testing.assert_array_equal(last.numpy(), H)
    assert y.type == mp.Tensor(np.zeros((0, 2), np.float32)).type and n.shape == (0,) and str(n.dtype) == "bool"


def test_traced_it_is_one_op_with_the_lines_of_its_cell() -> None:
    table = np.arange(3, dtype=np.float32)

    def cell(s: Any, x: Any) -> Any:
        s = s + x * table
        return s, s / x.shape[0]

    found = traced(lambda x: mp.scan(cell, x[0] * 0, x, length=x.shape[0]), X)
    (op,) = (o for o in found.graph.ops if o.name == "scan")
    body = op.attrs["body"]
    assert str(op.attrs["length"]) == "n" and str(op.results[1].type) == "f32[n, 3]"
    assert [o.name for o in body.ops][:2] == ["mul", "add"]
    line = cell.__code__.co_firstlineno + 1
    assert body.ops[0].loc.line == line and body.ops[0].loc.file.endswith("test_scan.py")
    assert op.loc.line == line + 3
    got = interpret(found.graph, [X], {path: t.numpy() for path, t in found.params.items()})
    want = mp.scan(cell, mp.Tensor(X[0] * 0), mp.Tensor(X))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_parameters_and_modules_keep_their_paths() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 5)

        def forward(self, x: Any) -> Any:
            return mp.scan(lambda s, v: (self.cell(v, s),) * 2, F.zeros((5,)), x)[1]

    graph = trace(Net(), mp.spec("n", 3)).graph
    assert {p.path for p in graph.params} == {f"cell.{k}_{i}" for k in ("weight", "bias") for i in ("ih", "hh")}
    (op,) = (o for o in graph.ops if o.name == "scan")
    assert {o.loc.path for o in op.attrs["body"].ops} == {"cell"}


WRONG = {
    "element type": (lambda s, x: (s.double(), x), r"changes the element type of state: f32\[3\] .*, f64\[3\]"),
    "shape": (lambda s, x: (s.sum(), x), r"changes the shape of state: f32\[3\] before the step, f32\[\] after it"),
    "structure": (lambda s, x: ({"h": s}, x), "it got a tensor and returned a dict with h"),
    "no pair": (lambda s, x: s, "returned a Tensor, not a state and a y"),
    "a word": (lambda s, x: ("h", x), "state is a str, not a tensor"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("eager", [True, False])
def test_states_keep_their_types(name: str, eager: bool) -> None:
    cell, message = WRONG[name]
    with pytest.raises((TypeRuleError, ArgumentError), match=message) as error:
        if eager:
            mp.scan(cell, mp.Tensor(H), mp.Tensor(X))
        else:
            traced(lambda x: mp.scan(cell, x[0], x), X)
    assert "test_scan.py" in str(error.value.where)


def test_the_leaf_of_a_nested_state_is_named() -> None:
    with pytest.raises(TypeRuleError, match=r"the element type of state\.h\.1: f32\[3\]") as error:
        mp.scan(lambda s, x: ({"h": (x, x > 0)}, None), {"h": (H, H)}, X)
    assert "start with bool" in error.value.fix


def test_lengths_that_do_not_fit() -> None:
    def cell(s: Any, x: Any) -> Any:
        return s, None

    with pytest.raises(ArgumentError, match=r"xs\.b has 3 slices, but xs\.a is 4 long"):
        mp.scan(cell, H, {"a": X, "b": X[:3]})
    with pytest.raises(ArgumentError, match="xs has 4 slices, but length is 5"):
        mp.scan(cell, H, X, length=5)
    with pytest.raises(ArgumentError, match="neither xs nor a length"):
        mp.scan(cell, H)
    with pytest.raises(ArgumentError, match="length=-1 is not a number of steps"):
        mp.scan(cell, H, length=-1)
    with pytest.raises(ArgumentError, match="length=n-2 is negative for some sizes"):
        traced(lambda x: mp.scan(cell, x[0], length=x.shape[0] - 2), X)
    with pytest.raises(ArgumentError, match=r"xs is f32\[\]: it has no dimension to slice"):
        mp.scan(cell, H, np.float32(1))
    with pytest.raises(ArgumentError, match="m slices, but xs.0 is n long") as error:

        class Two(nn.Module):
            def forward(self, x: Any, y: Any) -> Any:
                return mp.scan(cell, H, (x, y))

        trace(Two(), mp.spec("n", 3), mp.spec("m", 3))
    assert "the same name in the specs" in error.value.fix


def test_what_a_cell_keeps_is_not_used_outside() -> None:
    kept: list[Any] = []

    def cell(s: Any, x: Any) -> Any:
        kept.append(s * 2)
        return s + x, None

    def forward(x: Any) -> Any:
        return mp.scan(cell, x[0], x)[0] + kept[0]

    with pytest.raises(TraceError, match="of a scan's cell is used outside of it") as error:
        traced(forward, X)
    assert "return it from the cell" in error.value.fix and "test_scan.py" in str(error.value.where)


def test_a_cell_does_not_write_outside() -> None:
    def forward(x: Any) -> Any:
        other = x[0] * 1

        def cell(s: Any, v: Any) -> Any:
            other.copy_(s)
            return s + v, None

        return mp.scan(cell, x[0], x)[0] + other

    with pytest.raises(TraceError, match="a scan's cell writes into a tensor"):
        traced(forward, X)


def test_a_cell_may_write_into_its_own_tensors() -> None:
    def forward(x: Any) -> Any:
        def cell(s: Any, v: Any) -> Any:
            own = s * 2
            own.copy_(v)
            return own + s, None

        return mp.scan(cell, x[0], x)[0]

    found = traced(forward, X)
    np.testing.assert_array_equal(interpret(found.graph, [X])[0], X[0] + X.sum(0))
