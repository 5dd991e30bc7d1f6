"""linear(x, a), linear(x, b) -> split(linear(x, a|b)); weights and biases are joined at load."""

from __future__ import annotations

import pytest

from monoplan.passes.fuse_linear import MERGE_PARALLEL_LINEARS
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses

PARAMS = tuple(
    f'param %{name}: f32[{shape}] = "{name}"'
    for name, shape in (("a", "4, 4"), ("b", "2, 4"), ("c", "2, 4"), ("p", "4"), ("q", "2"), ("r", "2"), ("d", "6, 4"))
)


def graph(*lines: str, inputs: str = "%x: f32[n, 4]", outputs: str = "%k, %l, %m") -> str:
    lines = (*PARAMS, *lines)
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


def linears(*biases: str, x: str = "%x") -> list[str]:
    rows = zip("klm", "abc", ("4", "2", "2"), biases, strict=True)
    return [f"%{name} = linear({x}, %{w}, {bias}) : f32[n, {size}]" for name, w, size, bias in rows]


@pytest.mark.parametrize(
    "biases", [("_", "_", "_"), ("%p", "%q", "%r"), ("%p", "_", "%r")], ids=["no biases", "all biases", "some biases"]
)
def test_three_linears(biases: tuple[str, ...], golden: Golden) -> None:
    fires(MERGE_PARALLEL_LINEARS, graph(*linears(*biases)), golden, count=1)


def test_they_need_not_be_neighbours(golden: Golden) -> None:
    first, second, third = linears("_", "_", "_")
    text = graph(first, "%e = exp(%k) : f32[n, 4]", second, third, outputs="%e, %l, %m")
    fires(MERGE_PARALLEL_LINEARS, text, golden, count=1)


def test_an_mlp_beside_attention_is_a_group_of_its_own() -> None:
    """GPT-J: q, k and v are cut into heads, the MLP of the same input ends in an activation."""
    lines = [
        *linears("_", "_", "_"),
        "%f = linear(%x, %d, _) : f32[n, 6]",
        "%g = gelu(%f) : f32[n, 6]",
        "%h = reshape(%k) {shape=(n, 2, 2)} : f32[n, 2, 2]",
    ]
    after = fires(MERGE_PARALLEL_LINEARS, graph(*lines, outputs="%h, %l, %m, %g"), count=1)
    assert [op.name for op in after.ops] == ["linear", "split", "linear", "gelu", "reshape"]


def test_two_pairs_are_merged_apart() -> None:
    lines = [
        *linears("_", "_", "_")[1:],
        "%e = exp(%x) : f32[n, 4]",
        "%u = linear(%e, %a, _) : f32[n, 4]",
        "%v = linear(%e, %d, _) : f32[n, 6]",
    ]
    fires(MERGE_PARALLEL_LINEARS, graph(*lines, outputs="%l, %m, %u, %v"), count=2)


def test_linears_of_different_values_stay() -> None:
    lines = linears("_", "_", "_")[:2]
    text = graph(lines[0], lines[1].replace("%x", "%z"), inputs="%x: f32[n, 4], %z: f32[n, 4]", outputs="%k, %l")
    refuses(MERGE_PARALLEL_LINEARS, text)


def test_one_linear_stays() -> None:
    refuses(MERGE_PARALLEL_LINEARS, graph(linears("_", "_", "_")[0], outputs="%k"))


def test_computed_weights_and_biases_stay() -> None:
    lines = linears("_", "_", "_")[:2]
    text = graph(lines[0], lines[1].replace("%b", "%z"), inputs="%x: f32[n, 4], %z: f32[2, 4]", outputs="%k, %l")
    refuses(MERGE_PARALLEL_LINEARS, text)
    text = graph(lines[0], lines[1].replace("_", "%z"), inputs="%x: f32[n, 4], %z: f32[2]", outputs="%k, %l")
    refuses(MERGE_PARALLEL_LINEARS, text)


def test_weights_of_another_type_stay() -> None:
    text = graph(*linears("_", "_", "_")[:2], outputs="%k, %l")
    refuses(MERGE_PARALLEL_LINEARS, text.replace("param %b: f32", "param %b: bf16"))


def test_a_weight_that_is_read_elsewhere_stays_alone() -> None:
    tied = "%t = mul(%z, %c) : f32[2, 4]"
    text = graph(*linears("_", "_", "_"), tied, inputs="%x: f32[n, 4], %z: f32[4]", outputs="%k, %l, %m, %t")
    after = fires(MERGE_PARALLEL_LINEARS, text, count=1)
    assert [op.name for op in after.ops] == ["linear", "split", "linear", "mul"]
    pair = graph(*linears("_", "_", "_")[1:], "%u = linear(%x, %b, _) : f32[n, 2]", outputs="%l, %m, %u")
    refuses(MERGE_PARALLEL_LINEARS, pair, "%b is read elsewhere too: joining it would store it twice")


def test_huge_weights_stay() -> None:
    text = graph(*linears("_", "_", "_")[:2], outputs="%k, %l").replace("%a: f32[4, 4]", "%a: f32[70000, 4]")
    text = text.replace("f32[n, 4]\n  %l", "f32[n, 70000]\n  %l")
    refuses(MERGE_PARALLEL_LINEARS, text, "%a has 70000 rows, over the limit of 65536")


def test_products_that_are_cut_again_merge_into_one_split() -> None:
    after = fires(MERGE_PARALLEL_LINEARS, graph(*linears("_", "_", "_")), count=1)
    (wide, cut) = after.ops
    assert cut.attrs["sizes"] == (4, 2, 2) and wide.operands[1] in {op.result for op in after.setup}
