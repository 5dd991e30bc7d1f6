"""Tracing: structures of arguments and results, parameters, constants, and what becomes of writes."""

from __future__ import annotations

from typing import Any

import numpy as np

import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.pytree import flatten, unflatten
from monoplan.frontend.specs import spec, spec_of
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import Trace, trace
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.types import tensor_type


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def run(t: Trace, *arrays: np.ndarray) -> Any:
    """The results of a trace in forward's structure, and the written inputs by number."""
    assert print_graph(parse_graph(print_graph(t.graph, locs=True)), locs=True) == print_graph(t.graph, locs=True)
    outs = interpret(t.graph, list(arrays), {p: v.numpy() for p, v in t.params.items()})
    count = len(outs) - len(t.mutated)
    return unflatten(t.out_tree, outs[:count]), {i: outs[j] for i, j in t.mutated}


def ops(t: Trace) -> list[str]:
    return [op.name for op in t.graph.ops]


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_locations_and_module_paths() -> None:
    class Inner(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1.0  # line of interest

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Inner(), Inner()])
            self.proj = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.proj(x)

    graph = trace(Outer(), spec("n", 3)).graph
    assert graph.name == "Outer" and graph.symbols == ("n",)
    adds = [op for op in graph.ops if op.name == "add"]
    assert [op.loc.path for op in adds] == ["blocks.0", "blocks.1"]
    line = open(__file__).read().splitlines()[adds[0].loc.line - 1]
    assert adds[0].loc.file == __file__ and "line of interest" in line
    # A layer of the library is not the user's code: its op stands where the user called it.
    assert (
        graph.ops[-1].loc.path == "proj"
        and "self.proj(x)" in open(__file__).read().splitlines()[graph.ops[-1].loc.line - 1]
    )


def test_structures() -> None:
    def fn(a: Any, b: Any, *, c: Any, flag: bool = False) -> Any:
        total = a["x"] + a["y"][0] + b[1]
        return {"sum": total, "parts": (c, [total * 2, None]), "flag": flag, "name": "text"}

    args = ({"x": spec("n", 3), "y": [spec("n", 3)]}, (None, spec(3)))
    t = trace(Call(fn), *args, c=spec("n"), flag=True)
    assert [str(v) for v in t.graph.inputs] == ["%args.0.x", "%args.0.y.0", "%args.1.1", "%kwargs.c"]
    got, _ = run(t, X, X * 10, X[0], X[:, 0])
    np.testing.assert_array_equal(got["sum"], X * 11 + X[0])
    np.testing.assert_array_equal(got["parts"][0], X[:, 0])
    np.testing.assert_array_equal(got["parts"][1][0], 2 * (X * 11 + X[0]))
    assert (
        got["parts"][1][1] is None and got["flag"] is True and got["name"] == "text" and isinstance(got["parts"], tuple)
    )


def test_names_of_arguments() -> None:
    class Named(nn.Module):
        def forward(self, ids: Any, state: Any = None, scale: float = 1.0, *, mask: Any = None) -> Any:
            y = ids * scale
            return y if mask is None else F.where(mask, y, 0.0)

    t = trace(Named(), spec("n"), mask=spec("n", dtype="bool"), scale=3.0)
    assert [str(v) for v in t.graph.inputs] == ["%ids", "%mask"]
    got, _ = run(t, np.array([1.0, 2.0], np.float32), np.array([True, False]))
    assert got.tolist() == [3, 0]
    odd = trace(Call(lambda d: d["a key with spaces"]), {"a key with spaces": spec(2)})
    assert str(odd.graph.inputs[0]) == "%args.0.a_key_with_spaces"
    run(odd, X[0, :2])


def test_names_of_parameters_survive_as_text() -> None:
    names = ["a b", "a:b", "a[0]", "a,b", 'a"b', "a_b", "größe", "%x", "a\\b", "a\nb"]
    module = Call(lambda x: [module._modules[name](x) for name in names])
    for name in names:
        module.add_module(name, nn.Linear(4, 4))
    graph = trace(module, spec("n", 4)).graph
    assert [p.path for p in graph.params] == [f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")]
    text = print_graph(graph, locs=True)
    again = parse_graph(text)
    assert print_graph(again, locs=True) == text and [p.path for p in again.params] == [p.path for p in graph.params]
    assert "%a_b.weight_1" in text  # names that become equal are told apart


def test_shared_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.embed(ids))

    net = Tied()
    t = trace(net, spec("n", dtype="int64"))
    assert [p.path for p in t.graph.params] == ["embed.weight"] and t.params["embed.weight"] is net.embed.weight
    w = net.embed.weight.numpy().astype(np.float64)
    got, _ = run(t, np.array([3, 1]))
    np.testing.assert_allclose(got, w[[3, 1]] @ w.T, rtol=1e-5)


def test_constants() -> None:
    table = np.arange(3, dtype=np.float32)

    def fn(x: Any, offset: Any) -> Any:
        return x * table + offset + x * table + 2.5 + F.exp(Tensor(table)) * 0.0

    t = trace(Call(fn), spec("n", 3), np.full(3, 7.0, np.float32))
    got, _ = run(t, X)
    np.testing.assert_allclose(got, 2 * X * table + 7 + 2.5)
    paths = [p.path for p in t.graph.params]
    assert all(p.startswith("constant_") for p in paths) and len(paths) == 3, "one array is one constant"
    assert "exp" not in ops(t), "what depends on constants alone is computed while tracing"


def test_scalars_and_special_values() -> None:
    t = trace(Call(lambda x: F.masked_fill(x, x > 2, -np.inf) / 2), spec(2, 3))
    got, _ = run(t, X)
    np.testing.assert_array_equal(got, np.where(X > 2, -np.inf, X / 2))
    assert not t.graph.params


def test_symbolic_sizes_as_numbers() -> None:
    def fn(x: Any) -> Any:
        batch, width = x.shape
        mean = x.sum(0) / batch
        places = F.arange(batch).unsqueeze(1) * width
        return mean, places, x.reshape(batch * width), F.full((batch, 2), 1.0), x[batch - 1]

    t = trace(Call(fn), spec("batch", 3))
    for x in (X, X[:1], np.tile(X, (3, 1))):
        (mean, places, flat, ones, last), _ = run(t, x)
        np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)
        assert places[:, 0].tolist() == [3 * i for i in range(len(x))] and flat.shape == (x.size,)
        assert ones.shape == (len(x), 2) and last.tolist() == x[-1].tolist()


def test_static_control_flow_is_unrolled() -> None:
    def fn(x: Any, depth: int, kind: str) -> Any:
        for i in range(depth):
            x = F.exp(x) if kind == "exp" and i % 2 == 0 else x + 1
        return x if x.shape[-1] == 3 else None

    assert ops(trace(Call(fn), spec("n", 3), 3, "exp")).count("exp") == 2
    assert "exp" not in ops(trace(Call(fn), spec("n", 3), 3, "none"))


def test_results_that_are_inputs_parameters_or_missing() -> None:
    layer = nn.Linear(3, 3)
    t = trace(Call(lambda x: (x, x, layer.weight, np.ones(2, np.float32), None)), spec(2, 3))
    got, _ = run(t, X)
    assert got[0] is X and got[1] is X and got[3].tolist() == [1, 1] and got[4] is None
    assert trace(Call(lambda x: None), spec(2)).graph.outputs == ()


def test_specs() -> None:
    assert str(spec("batch", 2, dtype="int64")) == "i64[batch, 2]" and spec().type == tensor_type("f32")
    assert spec_of(X).type == tensor_type("f32", 2, 3) and spec_of(Tensor([1])).type == tensor_type("i64", 1)
    assert spec_of("text") == "text" and spec("2*n+1").type == tensor_type("f32", "2*n+1")


# -- writes -------------------------------------------------------------------------------------------------


def test_written_arguments_are_outputs() -> None:
    def fn(x: Any, state: dict[str, Any]) -> Any:
        y = x + state["a"]
        F.exp(y, out=state["a"])
        state["b"] = state["b"] * 2.0  # bound anew
        return y

    t = trace(Call(fn), spec("n"), {"a": spec("n"), "b": spec(3), "c": spec(2)})
    assert t.mutated == t.graph.writes == ((1, 1), (2, 2)) and len(flatten(unflatten(t.out_tree, [0]))[0]) == 1
    got, written = run(t, X[0], X[1], X[1], X[0, :2])
    np.testing.assert_array_equal(got, X[0] + X[1])
    np.testing.assert_allclose(written[1], np.exp(X[0] + X[1]), rtol=1e-6)
    np.testing.assert_array_equal(written[2], X[1] * 2)


def test_an_argument_that_is_only_read_is_not_written() -> None:
    t = trace(Call(lambda x: F.silu(x * 1.0, inplace=True)), spec(3))
    assert t.mutated == ()
    swapped = trace(Call(lambda a: a.update(x=a["y"], y=a["x"])), {"x": spec(2), "y": spec(2)})
    _, written = run(swapped, X[0, :2], X[1, :2])
    assert written[0].tolist() == X[1, :2].tolist() and written[1].tolist() == X[0, :2].tolist()


def test_a_constant_can_be_written_into_an_argument() -> None:
    t = trace(Call(lambda x: x.assign(Tensor(np.ones(3, np.float32)))), spec(3))
    _, written = run(t, X[0])
    assert written[0].tolist() == [1, 1, 1]


def test_in_place_on_a_view_whose_base_is_gone() -> None:
    rope = nn.RoPE(2, 8)

    def fn(x: Any) -> Any:
        q = (x * 2.0).view(2, 1, 2)
        rope(q, F.arange(2), in_place=True)
        return q

    x = np.ones((2, 2), np.float32)
    got, _ = run(trace(Call(fn), spec(2, 2)), x)
    np.testing.assert_array_equal(got, fn(Tensor(x)).numpy())


def test_scratch_space_may_be_reused_and_is_left_alone() -> None:
    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = Tensor(np.full(3, 9.0, np.float32))
            self.register_buffer("buffer", np.full(3, 9.0, np.float32))

        def forward(self, x: Any) -> Any:
            F.exp(x, out=self.plain)
            F.add(self.plain, 1.0, out=self.buffer)
            return self.buffer * self.plain

    net = Scratch()
    got, _ = run(trace(net, spec(3)), X[0])
    np.testing.assert_allclose(got, (np.exp(X[0]) + 1) * np.exp(X[0]), rtol=1e-6)
    assert net.plain.tolist() == net.buffer.tolist() == [9, 9, 9] and not net.buffer.is_traced


def test_local_accumulators() -> None:
    def fn(x: Any) -> Any:
        total = Tensor(np.zeros(3, np.float32))
        for i in range(2):
            F.add(total, x[i], out=total)
        return total

    got, _ = run(trace(Call(fn), spec(2, 3)), X)
    np.testing.assert_array_equal(got, X.sum(0))
