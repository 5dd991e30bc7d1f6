"""Values that products on tile units hand over as bf16 tiles: where they may, and where they must not."""

from __future__ import annotations

from typing import Any

import pytest

from monoplan.codegen.kernels import Attention
from monoplan.codegen.moves import lies_as_tiles
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target
from monoplan.codegen.views import Buffer
from monoplan.ir.builder import build_graph
from monoplan.ir.ops import REGISTRY
from monoplan.ir.types import bf16, tensor_type


def tiled(forward: Any, inner: int = 96, dtype: str = "bf16", isa: str = "tiles") -> list[int]:
    """Columns of the values that are handed over, in a graph with a product to `inner` columns and one back."""
    types = {"x": tensor_type("f32", "n", 64)}
    params = {"up": tensor_type(dtype, inner, 64), "down": tensor_type(dtype, 64, inner)}
    plan = make_plan(build_graph("pair", forward, types, params), cpu_target(isa, 64))
    return [b.tiled for b in plan.arena.slot_of if b.tiled]


def pair(x: Any, up: Any, down: Any) -> Any:
    return REGISTRY["linear"](REGISTRY["linear"](x, up), down)


def test_one_reader() -> None:
    assert tiled(pair) == [96]


def test_two_products_read_it() -> None:
    def forward(x: Any, up: Any, down: Any) -> Any:
        made = REGISTRY["linear"](x, up)
        return [REGISTRY["linear"](made, down), REGISTRY["linear"](made, down)]

    assert tiled(forward) == [96]


def test_attention_hands_over() -> None:
    types = {
        "q": tensor_type("f32", 1, "s", 4, 32),
        "k": tensor_type("bf16", 1, 2, "t", 32),
        "v": tensor_type("bf16", 1, 2, "t", 32),
    }

    def forward(q: Any, k: Any, v: Any, w: Any) -> Any:
        made = REGISTRY["attention"](q, k, v, causal=True, layout="bshd")
        return REGISTRY["linear"](REGISTRY["reshape"](made, shape=(1, made.type.shape[1], 128)), w)

    graph = build_graph("attend", forward, types, {"w": tensor_type("bf16", 64, 128)})
    assert [b.tiled for b in make_plan(graph, cpu_target("tiles", 64)).arena.slot_of if b.tiled] == [128]


def encoder(dtype: str = "bf16", isa: str = "tiles", read: bool = False, mask: str = "bool") -> list[str]:
    """Types of queries, keys and values of attention without a cache, cut from one product."""
    types = {"x": tensor_type("f32", 2, 40, 64), "mask": tensor_type(mask, 2, 1, 1, 40)}

    def forward(x: Any, mask: Any, w: Any) -> Any:
        whole = REGISTRY["linear"](x, w)
        parts = REGISTRY["split"](whole, sizes=(64, 64, 64), axis=-1)
        q, k, v = (REGISTRY["reshape"](p, shape=(2, 40, 2, 32)) for p in parts)
        k, v = (REGISTRY["transpose"](p, axes=(0, 2, 1, 3)) for p in (k, v))
        shown = REGISTRY["expand"](mask, shape=(2, 1, 40, 40))
        made = REGISTRY["attention"](q, k, v, shown, causal=False, layout="bshd")
        return [made, *([REGISTRY["tanh"](whole)] if read else [])]

    plan = make_plan(build_graph("encode", forward, types, {"w": tensor_type(dtype, 192, 64)}), cpu_target(isa, 64))
    (k,) = [s.kernel for s, _ in plan.steps() if isinstance(s.kernel, Attention)]
    tiles = [o.name for o in k.scratch]
    assert tiles == (["k_tiles", "v_tiles"] if k.operand("k").dtype == bf16 else [])
    return [k.operand(n).dtype.name for n in ("q", "k", "v")]


def test_attention_without_a_cache() -> None:
    assert encoder() == ["bf16"] * 3
    assert encoder(dtype="f32") == encoder(isa="avx512") == encoder(read=True) == encoder(mask="f32") == ["f32"] * 3


def queries(dim: int = 32, read: bool = False) -> list[Buffer]:
    """What lies as tiles between a product of heads and its attention."""
    types = {
        "x": tensor_type("f32", "b", "s", 64),
        "positions": tensor_type("i64", "b", "s"),
        "k": tensor_type("bf16", "b", 2, "t", dim),
        "v": tensor_type("bf16", "b", 2, "t", dim),
        "lengths": tensor_type("i32", "b"),
    }
    params = {
        "w": tensor_type("bf16", 8 * dim, 64),
        "sin": tensor_type("f32", 64, dim // 2),
        "cos": tensor_type("f32", 64, dim // 2),
    }

    def forward(x: Any, positions: Any, k: Any, v: Any, lengths: Any, w: Any, sin: Any, cos: Any) -> Any:
        heads = REGISTRY["qkv_rope_cache"]
        q, k, v = heads(x, w, positions, sin, cos, k, v, lengths, heads=4, kv_heads=2, algo="gpt_neox")
        made = REGISTRY["attention"](q, k, v, None, lengths, causal=True, layout="bshd")
        return [made, k, v, *([REGISTRY["tanh"](q)] if read else [])]

    plan = make_plan(build_graph("queries", forward, types, params), cpu_target("tiles", 64))
    return [b for b in plan.arena.slot_of if b.tiled]


def test_heads_hand_queries_over() -> None:
    (b,) = queries()
    assert b.tiled == 128 and str(b.queries) == "s"
    sizes = {
        (1, 16): True,
        (1, 15): False,
        (6, 3): False,
        (2, 9): True,
        (9, 2): False,
        (20, 1): False,
    }  # as both kernels go by
    found = {(n, s): lies_as_tiles(b, n * s * b.tiled, {"b": n, "s": s, "t": 64}) for n, s in sizes}
    assert found == sizes


@pytest.mark.parametrize("options", [{"dim": 48}, {"read": True}], ids=["dim", "another reader"])
def test_queries_stay_as_they_are(options: dict[str, Any]) -> None:
    assert queries(**options) == []


def also(name: str, **attrs: Any) -> Any:
    """The pair, and another op that reads what is between them."""

    def forward(x: Any, up: Any, down: Any) -> Any:
        made = REGISTRY["linear"](x, up)
        return [REGISTRY["linear"](made, down), REGISTRY[name](made, **attrs)]

    return forward


def normed(x: Any, up: Any, down: Any) -> Any:
    made = REGISTRY["linear"](x, up)
    return REGISTRY["fused_linear"](made, down, norm="rms", eps=1e-5, expr="x0")


def returned(x: Any, up: Any, down: Any) -> Any:
    made = REGISTRY["linear"](x, up)
    return [made, REGISTRY["linear"](made, down)]


@pytest.mark.parametrize(
    ("forward", "options"),
    [
        (also("tanh"), {}),
        (also("sum", axes=(-1,), keepdims=False), {}),
        (normed, {}),
        (returned, {}),
        (pair, {"inner": 80}),
        (pair, {"dtype": "f32"}),
        (pair, {"isa": "avx512"}),
    ],
    ids=["pointwise", "reduction", "norm", "returned", "columns", "f32", "no tiles"],
)
def test_it_stays_as_it_is(forward: Any, options: dict[str, Any]) -> None:
    assert tiled(forward, **options) == []
