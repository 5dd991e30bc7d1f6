"""A plan that mixes kernel families: a small transformer with a cache, sampling and odd views, in the IR."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.builder import Builder, build_graph
from monoplan.ir.dims import symbol
from monoplan.ir.graph import Graph, Loc, Param, Value
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import DTYPES, TensorType, tensor_type

B, S = symbol("batch"), symbol("seq")
DIM, HEADS, KV, HEAD, HIDDEN, VOCABULARY, ROOM = 32, 4, 2, 8, 48, 50, 24
LAYERS = 2


def op(name: str, *operands: Any, **attrs: Any) -> Any:
    return REGISTRY[name](*operands, **attrs)


def params_of(dtype: str) -> dict[str, TensorType]:
    d = DTYPES[dtype]
    types = {"table": TensorType(d, (VOCABULARY, DIM)), "norm": TensorType(d, (DIM,))}
    types |= {name: tensor_type("f32", ROOM, HEAD // 2) for name in ("sin", "cos")}
    for i in range(LAYERS):
        types |= {
            f"{i}.{n}": TensorType(d, s)
            for n, s in (
                ("qkv", ((HEADS + 2 * KV) * HEAD, DIM)),
                ("out", (DIM, DIM)),
                ("up", (2 * HIDDEN, DIM)),
                ("down", (DIM, HIDDEN)),
                ("norm1", (DIM,)),
                ("norm2", (DIM,)),
            )
        }
    return types


def inputs_of(dtype: str) -> dict[str, TensorType]:
    caches = {f"{kind}{i}": tensor_type(dtype, "batch", KV, ROOM, HEAD) for i in range(LAYERS) for kind in "kv"}
    return {"ids": tensor_type("i64", "batch", "seq"), "lengths": tensor_type("i64", "batch"), **caches}


def mixed_graph(dtype: str = "f32") -> Graph:
    """Tokens and caches to logits, a token, and the new caches; every op has a location."""
    types, weights = inputs_of(dtype), params_of(dtype)
    v = {n: Value(t, n.replace(".", "_")) for n, t in {**types, **weights}.items()}
    with Builder(taken=[x.name for x in v.values()]) as b:
        b.loc = Loc("model.embed", "user/model.py", 12)
        x = op("embedding", v["ids"], v["table"])
        ramp = op("reshape", op("arange", length=S), shape=(1, S))
        positions = op("add", op("reshape", v["lengths"], shape=(B, 1)), ramp)
        new = []
        for i in range(LAYERS):
            b.loc = Loc(f"model.layers.{i}", "user/model.py", 20 + i)
            h = op("linear", op("rms_norm", x, v[f"{i}.norm1"]), v[f"{i}.qkv"])
            h = op("reshape", h, shape=(B, S, HEADS + 2 * KV, HEAD))
            q, k, val = op("split", h, sizes=(HEADS, KV, KV), axis=2)
            q, k = (op("rope", t, positions, v["sin"], v["cos"]) for t in (q, k))
            kc = op("kv_update", v[f"k{i}"], k, v["lengths"])
            vc = op("kv_update", v[f"v{i}"], val, v["lengths"])
            new += [kc, vc]
            a = op("attention", op("transpose", q, axes=(0, 2, 1, 3)), kc, vc, None, v["lengths"], causal=True)
            a = op("reshape", op("transpose", a, axes=(0, 2, 1, 3)), shape=(B, S, DIM))
            x = op("add", x, op("linear", a, v[f"{i}.out"]))
            u = op("linear", op("rms_norm", x, v[f"{i}.norm2"]), v[f"{i}.up"])
            gate, up = op("split", u, sizes=(HIDDEN, HIDDEN))
            x = op("add", x, op("linear", op("swiglu", gate, up), v[f"{i}.down"]))
        b.loc = Loc("model.head", "user/model.py", 40)
        last = op("slice", op("layer_norm", x, v["norm"]), axis=1, start=S - 1, length=1)
        logits = op("reshape", op("linear", last, v["table"]), shape=(B, VOCABULARY))
        best, where = op("topk", logits, k=5)
        out = [logits, op("argmax", logits, axis=-1), op("softmax", logits), best, where, op("cumsum", best)]
        out += [op("sum", x, axes=(0, 2)), op("transpose", x, axes=(2, 1, 0)), *new]
    graph = Graph("mixed", tuple(v[n] for n in types), tuple(Param(v[n], n) for n in weights), tuple(b.ops), tuple(out))
    first = len(out) - len(new)
    return graph.replace(writes=tuple((2 + i, first + i) for i in range(len(new))))


def mixed_arrays(dtype: str, batch: int, seq: int, past: int = 3) -> tuple[list[Any], dict[str, Any]]:
    """Inputs and params."""
    rng = np.random.default_rng(5)

    def values(shape: tuple[int, ...], d: Any) -> Any:
        return (rng.standard_normal(shape) * 0.2).astype(d)

    d = DTYPES[dtype].numpy
    params = {n: values(t.shape, t.dtype.numpy) for n, t in params_of(dtype).items()}  # type: ignore[arg-type]
    for name in ("norm", *(f"{i}.norm{j}" for i in range(LAYERS) for j in (1, 2))):
        params[name] = params[name] + d.type(1)
    caches = [values((batch, KV, ROOM, HEAD), d) for _ in range(2 * LAYERS)]
    ids = rng.integers(0, VOCABULARY, (batch, seq))
    return [ids, np.full(batch, past), *caches], params


def rolled_graph(count: int = 3) -> tuple[Graph, dict[str, TensorType]]:
    """A loop over `count` layers with weights of their own, a shared scale and a cache each."""
    types = {"x": tensor_type("f32", "batch", 6), "g": tensor_type("f32", 6), "w": tensor_type("f32", 6, 6)}
    cache = tensor_type("f32", "batch", 1, 4, 6)
    lengths = tensor_type("i64", "batch")

    def layer(x: Value, lengths: Value, g: Value, w: Value, cache: Value) -> list[Value]:
        y = op("linear", op("rms_norm", x, g), w)
        new = op("kv_update", cache, op("reshape", y, shape=(B, 1, 1, 6)), lengths)
        return [op("add", x, op("mul", y, op("sum", new, axes=(1, 2)))), new]

    operands = {"x": types["x"], "lengths": lengths, "g": types["g"], "w": types["w"], "cache": cache}
    body = build_graph("layer", layer, operands)
    params = {"g": types["g"]} | {f"w{i}": types["w"] for i in range(count)}

    def forward(**v: Value) -> list[Value]:
        tables = [v[f"{n}{i}"] for n in ("w", "cache") for i in range(count)]
        attrs = {"count": count, "carried": 1, "shared": 2, "body": body}
        made = op("repeat_layers", v["x"], v["lengths"], v["g"], *tables, **attrs)
        return [op("add", made[0], v["x"]), *made[1:]]

    inputs = {"x": types["x"], "lengths": lengths} | {f"cache{i}": cache for i in range(count)}
    graph = build_graph("rolled", forward, inputs, params)
    return graph.replace(writes=tuple((2 + i, 1 + i) for i in range(count))), params
