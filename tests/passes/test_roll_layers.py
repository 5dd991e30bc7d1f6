"""Repeated isomorphic layers become a loop over a table of weights; what only looks alike stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monoplan.ir.graph import Graph
from monoplan.ir.printer import print_graph
from monoplan.passes.roll_layers import ROLL_LAYERS
from tests.passes.conftest import Golden
from tests.passes.support import fires, parse, refuses, run, same_numbers

CACHE = "f32[batch, 1, capacity, 4]"


def layer(i: int, x: str, eps: str = "1e-06", hidden: int = 6) -> list[str]:
    """A small decoder layer: norm and projection, cache write, attention, residual, MLP with residual."""
    return [
        f'%p{i} = fused_linear({x}, %w{i}, _, %g{i}, _) {{norm="rms", eps={eps}}} : f32[batch, seq, 4]',
        f"%r{i} = reshape(%p{i}) {{shape=(batch, seq, 1, 4)}} : f32[batch, seq, 1, 4]",
        f"%k{i} = kv_update(%c{i}, %r{i}, %lengths, _) : {CACHE}",
        f'%a{i} = attention(%r{i}, %k{i}, %k{i}, _, %lengths) {{causal=True, layout="bshd"}} : f32[batch, seq, 1, 4]',
        f"%f{i} = reshape(%a{i}) {{shape=(batch, seq, 4)}} : f32[batch, seq, 4]",
        f"%s{i} = add(%f{i}, {x}) : f32[batch, seq, 4]",
        f'%u{i} = fused_linear(%s{i}, %v{i}, _, _, _) {{expr="silu(x0)"}} : f32[batch, seq, {hidden}]',
        f'%d{i} = fused_linear(%u{i}, %o{i}, _, _, _, %s{i}) {{expr="add(x0, x1)"}} : f32[batch, seq, 4]',
    ]


def model(count: int, outputs: str = "", writes: bool = True, **options: Any) -> str:
    """`count` layers; eps and hidden may be functions of the layer's number."""

    def option(name: str, i: int, default: Any) -> Any:
        given = options.get(name, default)
        return given(i) if callable(given) else given

    inputs = ["%x: f32[batch, seq, 4]", "%lengths: i32[batch]", *(f"%c{i}: {CACHE}" for i in range(count))]
    lines = []
    for i in range(count):
        hidden = option("hidden", i, 6)
        for name, shape in (("w", "4, 4"), ("g", "4"), ("v", f"{hidden}, 4"), ("o", f"4, {hidden}")):
            lines.append(f'param %{name}{i}: f32[{shape}] = "layers.{i}.{name}"')
    lines.append("%e = exp(%x) : f32[batch, seq, 4]")
    for i in range(count):
        lines += layer(i, "%e" if i == 0 else f"%d{i - 1}", option("eps", i, "1e-06"), option("hidden", i, 6))
    lines.append(f"%y = tanh(%d{count - 1}) : f32[batch, seq, 4]")
    states = [f"%k{i} -> %c{i}" if writes else f"%k{i}" for i in range(count)]
    returned = ", ".join(["%y", *states, *([outputs] if outputs else [])])
    head = f"graph g({', '.join(inputs)}) {{"
    change: Callable[[str], str] = options.get("change", lambda t: t)
    return change("\n".join([head, *(f"  {line}" for line in lines), f"  return {returned}", "}"]))


def loop_of(graph: Graph) -> Any:
    (op,) = (op for op in graph.ops if op.name == "repeat_layers")
    return op


@pytest.mark.parametrize("count", [2, 3, 12])
def test_layers_roll(count: int) -> None:
    after = fires(ROLL_LAYERS, model(count), count=1)
    op = loop_of(after)
    assert [o.name for o in after.ops] == ["exp", "repeat_layers", "tanh"]
    assert op.attrs["count"] == count and op.attrs["carried"] == 1 and len(op.attrs["body"].ops) == 8
    assert [v.name for v in op.results] == [f"d{count - 1}", *(f"k{i}" for i in range(count))]


def test_the_loop(golden: Golden) -> None:
    fires(ROLL_LAYERS, model(2), golden, count=1)


def test_locations_of_the_first_layer_stay() -> None:
    text = model(3).replace(": f32[batch, seq, 6]", ': f32[batch, seq, 6] @ "layers.0.mlp" "m.py":3')
    body = loop_of(fires(ROLL_LAYERS, text)).attrs["body"]
    assert [str(op.loc) for op in body.ops if op.name == "fused_linear"][1] == "m.py:3 in layers.0.mlp"


def test_weights_that_all_layers_share() -> None:
    def tie(text: str) -> str:
        for i in range(1, 3):
            text = text.replace(f'  param %g{i}: f32[4] = "layers.{i}.g"\n', "").replace(f"%g{i},", "%g0,")
        return text

    op = loop_of(fires(ROLL_LAYERS, model(3, change=tie)))
    assert "g0" in [v.name for v in op.operands[op.attrs["carried"] :][: op.attrs["shared"]]]


def test_tables_that_begin_with_one_weight_have_names_of_their_own() -> None:
    """The first layer uses one weight for two products, the second two: both tables begin with it."""
    text = model(2, hidden=4).replace("fused_linear(%s0, %v0", "fused_linear(%s0, %w0")
    body = loop_of(fires(ROLL_LAYERS, text, count=1)).attrs["body"]
    assert len({v.name for v in body.inputs}) == len(body.inputs)


def test_two_values_may_be_carried() -> None:
    """A layer reads the result of the one before, and a product inside of it as well."""

    def also(text: str) -> str:
        for i in range(1, 3):
            text = text.replace(f"add(%f{i}, %d{i - 1})", f"add(%f{i}, %u{i - 1})")
        return text

    op = loop_of(fires(ROLL_LAYERS, model(3, hidden=4, change=also)))
    assert op.attrs["carried"] == 2


def test_two_runs_of_layers_are_two_loops() -> None:
    """A window from layer 3 on: two kinds of layers."""
    after = fires(ROLL_LAYERS, model(6, eps=lambda i: "1e-06" if i < 3 else "1e-05"), count=2)
    assert [op.attrs["count"] for op in after.ops if op.name == "repeat_layers"] == [3, 3]


def test_alternating_layers_roll_in_pairs() -> None:
    after = fires(ROLL_LAYERS, model(6, eps=lambda i: ("1e-06", "1e-05")[i % 2]), count=1)
    assert (loop_of(after).attrs["count"], len(loop_of(after).attrs["body"].ops)) == (3, 16)


def test_a_layer_of_another_kind_in_the_middle() -> None:
    after = fires(ROLL_LAYERS, model(7, eps=lambda i: "1e-05" if i == 3 else "1e-06"), count=2)
    assert [op.attrs["count"] for op in after.ops if op.name == "repeat_layers"] == [3, 3]
    assert len(after.ops) == 2 + 2 + 8


# -- what must stay -------------------------------------------------------------------------------------------


def test_one_layer() -> None:
    refuses(ROLL_LAYERS, model(1))


def test_two_layers_with_different_eps() -> None:
    refuses(ROLL_LAYERS, model(2, eps=lambda i: f"{i + 1}e-06"))


def test_two_layers_of_different_widths() -> None:
    refuses(ROLL_LAYERS, model(2, hidden=lambda i: 6 + 2 * i))


def test_results_of_every_layer_that_are_read_outside() -> None:
    notes = refuses(ROLL_LAYERS, model(3, outputs="%d0, %d1"), "%d0 of layer 0 is read after the loop")
    assert len(notes.misses) == 1 and "3 times 8 ops look alike" in notes.misses[0].reason


def test_a_result_of_the_last_layer_that_is_not_carried() -> None:
    refuses(ROLL_LAYERS, model(3, outputs="%u2"), "%u2 of layer 2 is read after the loop")


def test_caches_that_the_caller_keeps() -> None:
    refuses(ROLL_LAYERS, model(3, writes=False), "is updated in place, but the caller keeps its old contents")


def test_layers_that_skip() -> None:
    """The third layer reads the first: what a layer gets is not what the one before made."""
    refuses(ROLL_LAYERS, model(3).replace("fused_linear(%d1, %w2", "fused_linear(%d0, %w2"), "skips layers")


def test_layers_wired_differently() -> None:
    swapped = model(3).replace("%s1 = add(%f1, %d0)", "%s1 = add(%f1, %p1)")
    refuses(ROLL_LAYERS, swapped, "look alike, but")


def test_values_that_are_computed_outside_for_each_layer() -> None:
    def outside(text: str) -> str:
        made = "\n".join(f"  %z{i} = neg(%v{i}) : f32[6, 4]" for i in range(3))
        text = text.replace("  %e = exp", f"{made}\n  %n = exp(%x) : f32[batch, seq, 4]\n  %e = exp")
        for i in range(3):
            text = text.replace(f"%s{i}, %v{i}", f"%s{i}, %z{i}")
        return text.replace("return %y", "return %y, %n")

    refuses(ROLL_LAYERS, model(3, change=outside), "is computed outside, one for each layer")


def test_a_loop_must_be_worth_it() -> None:
    """Two equal products in a row are no layers."""
    lines = [
        'param %w: f32[4, 4] = "w"',
        'param %v: f32[4, 4] = "v"',
        "%a = linear(%x, %w, _) : f32[n, 4]",
        "%y = linear(%a, %v, _) : f32[n, 4]",
    ]
    text = "\n".join(["graph g(%x: f32[n, 4]) {", *(f"  {line}" for line in lines), "  return %y", "}"])
    refuses(ROLL_LAYERS, text)


def test_a_state_that_goes_through_all_layers_stays() -> None:
    def one_cache(text: str) -> str:
        for i in range(1, 3):
            text = text.replace(f"kv_update(%c{i}", f"kv_update(%k{i - 1}").replace(f", %c{i}: {CACHE}", "")
        return text.replace("%k0 -> %c0, %k1 -> %c1, %k2 -> %c2", "%k2 -> %c0")

    before = parse(model(3, change=one_cache))
    after, notes = run(ROLL_LAYERS, before)
    same_numbers(before, after)
    assert notes.rewrites == 0 and "is read after the loop" in notes.misses[0].reason


def test_the_text_of_a_loop_reads_back() -> None:
    after = fires(ROLL_LAYERS, model(3))
    assert print_graph(parse(print_graph(after))) == print_graph(after)
