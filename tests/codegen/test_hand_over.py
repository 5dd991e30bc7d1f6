"""Values that products on tile units hand over as bf16 tiles: where they may, and where they must not."""

from __future__ import annotations

from typing import Any

import pytest

from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target
from monoplan.ir.builder import build_graph
from monoplan.ir.ops import REGISTRY
from monoplan.ir.types import tensor_type


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
