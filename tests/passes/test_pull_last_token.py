"""The last token is picked before the head, and before the MLP of the last layer."""

from __future__ import annotations

import pytest

from monoplan.passes.pull_last_token import PULL_LAST_TOKEN
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses

PARAMS = (
    'param %g: f32[4] = "g"', 'param %w: f32[6, 4] = "w"', 'param %up: f32[6, 4] = "up"',
    'param %down: f32[4, 6] = "down"', 'param %o: f32[4, 4] = "o"',
)  # fmt: skip


def graph(*lines: str, inputs: str, outputs: str = "%y") -> str:
    lines = (*PARAMS, *lines)
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


HEAD = (
    "%n = rms_norm(%x, %g) {eps=1e-06, dims=1} : f32[batch, seq, 4]", "%l = linear(%n, %w, _) : f32[batch, seq, 6]",
    "%t = tanh(%l) : f32[batch, seq, 6]",
)  # fmt: skip
LAST = "slice({}) {{axis=1, start=seq-1, length=1, step=1}} : f32[batch, 1, 6]"
THREE = "%x: f32[batch, seq, 4], %rows: i32[batch]"
PICKS = [LAST.format("%t"), "select_rows(%t, %rows) : f32[batch, 1, 6]"]


@pytest.mark.parametrize("pick", PICKS, ids=["slice", "select"])
def test_last_token(pick: str, golden: Golden) -> None:
    after = fires(PULL_LAST_TOKEN, graph(*HEAD, f"%y = {pick}", inputs=THREE), golden, count=3)
    assert [op.name for op in after.ops][1:] == ["rms_norm", "linear", "tanh"]


def test_the_last_token_is_not_pulled_through_what_mixes_rows() -> None:
    whole = "%n = rms_norm(%x, _) {eps=1e-06, dims=2} : f32[batch, 3, 4]"
    one = "%y = slice(%n) {axis=1, start=2, length=1, step=1} : f32[batch, 1, 4]"
    refuses(PULL_LAST_TOKEN, graph(whole, one, inputs="%x: f32[batch, 3, 4]"))
    column = "%y = slice(%l) {axis=-1, start=0, length=2, step=1} : f32[batch, seq, 2]"
    refuses(PULL_LAST_TOKEN, graph(HEAD[1].replace("%n", "%x"), column, inputs=THREE))
    feature = "%y = slice(%n) {axis=2, start=0, length=2, step=1} : f32[batch, seq, 2]"
    refuses(PULL_LAST_TOKEN, graph(HEAD[0], feature, inputs=THREE))
    soft = "%s = softmax(%x) {axis=1} : f32[batch, seq, 4]"
    last = "%y = slice(%s) {axis=1, start=seq-1, length=1, step=1} : f32[batch, 1, 4]"
    refuses(PULL_LAST_TOKEN, graph(soft, last, inputs=THREE))


def test_the_last_token_of_what_is_read_elsewhere() -> None:
    text = graph(*HEAD, "%y = " + LAST.format("%t"), inputs=THREE, outputs="%y, %t")
    refuses(PULL_LAST_TOKEN, text, "%t has 2 readers, it must have one")
    text = graph(
        HEAD[0],
        HEAD[1],
        "%y = " + LAST.format("%l"),
        "%z = exp(%l) : f32[batch, seq, 6]",
        inputs=THREE,
        outputs="%y, %z",
    )
    refuses(PULL_LAST_TOKEN, text, "%l has 2 readers, it must have one")


def test_the_last_token_of_a_cache_that_is_overwritten() -> None:
    text = graph(
        "%e = exp(%cache) : f32[2, 1, 8, 4]",
        "%k = kv_update(%cache, %r, %lengths, _) : f32[2, 1, 8, 4]",
        "%y = slice(%e) {axis=2, start=0, length=1, step=1} : f32[2, 1, 1, 4]",
        inputs="%cache: f32[2, 1, 8, 4], %r: f32[2, 3, 1, 4], %lengths: i32[2]",
        outputs="%y, %k -> %cache",
    )
    refuses(PULL_LAST_TOKEN, text, "%cache is overwritten in between")


# -- through both sides of a residual -------------------------------------------------------------------------

MLP = (
    "%n = rms_norm(%x, %g) {eps=1e-06, dims=1} : f32[batch, seq, 4]", "%a = linear(%n, %w, _) : f32[batch, seq, 6]",
    "%s = silu(%a) : f32[batch, seq, 6]", "%u = linear(%n, %up, _) : f32[batch, seq, 6]",
    "%m = mul(%s, %u) : f32[batch, seq, 6]", "%d = linear(%m, %down, _) : f32[batch, seq, 4]",
    "%r = add(%x, %d) : f32[batch, seq, 4]",
)  # fmt: skip
PICK = "%y = select_rows(%r, %rows) : f32[batch, 1, 4]"
LAST_ROW = "%y = slice(%r) {axis=1, start=seq-1, length=1, step=1} : f32[batch, 1, 4]"


@pytest.mark.parametrize("pick", [PICK, LAST_ROW], ids=["select", "slice"])
def test_an_mlp_with_its_residual(pick: str, golden: Golden) -> None:
    after = fires(PULL_LAST_TOKEN, graph(*MLP, pick, inputs=THREE), golden, count=7)
    assert [op.name for op in after.ops][1:] == ["rms_norm", "linear", "silu", "linear", "mul", "linear", "add"]
    assert after.ops[0].name == pick.split()[2].partition("(")[0]  # one pick, of what the layer begins with


def test_ranks_sum_the_last_row_alone(golden: Golden) -> None:
    total = "%t = all_reduce(%d) {world=1} : f32[batch, seq, 4]"
    lines = (*MLP[:-1], total, MLP[-1].replace("%d", "%t"), PICK)
    after = fires(PULL_LAST_TOKEN, graph(*lines, inputs=THREE), golden, count=8)
    assert [op.name for op in after.ops][-3:] == ["linear", "all_reduce", "add"]


def test_what_is_the_same_for_all_rows_is_not_picked(golden: Golden) -> None:
    lines = [*MLP[:-1], "%r = where(%mask, %d, %bias) : f32[batch, seq, 4]", PICK]
    inputs = f"{THREE}, %mask: bool[batch, 1, 1], %bias: f32[4]"
    after = fires(PULL_LAST_TOKEN, graph(*lines, inputs=inputs), golden, count=7)
    assert [op.name for op in after.ops].count("select_rows") == 1


def test_a_residual_is_not_pulled_apart_for_one_product_alone() -> None:
    """The product behind attention: it is the kernel of the layers before, which a pick would make another one."""
    mixed = "%n = softmax(%x) {axis=1} : f32[batch, seq, 4]"
    lines = (mixed, "%d = linear(%n, %o, _) : f32[batch, seq, 4]", MLP[-1], PICK)
    refuses(PULL_LAST_TOKEN, graph(*lines, inputs=THREE))
    refuses(PULL_LAST_TOKEN, graph("%r = add(%x, %x) : f32[batch, seq, 4]", PICK, inputs=THREE))


def test_a_residual_whose_rows_lie_elsewhere() -> None:
    by_position = [*MLP[:-1], "%r = add(%d, %p) : f32[batch, seq, 4]", PICK]
    refuses(PULL_LAST_TOKEN, graph(*by_position, inputs=f"{THREE}, %p: f32[seq, 4]"))
    refuses(PULL_LAST_TOKEN, graph(*by_position, inputs=f"{THREE}, %p: f32[1, seq, 4]"))


def test_a_residual_of_which_several_rows_are_wanted() -> None:
    two = "%y = slice(%r) {axis=1, start=0, length=2, step=1} : f32[batch, 2, 4]"
    inputs = THREE.replace("seq", "3")
    refuses(PULL_LAST_TOKEN, graph(*(line.replace("seq", "3") for line in MLP), two, inputs=inputs))


def test_a_residual_that_is_read_elsewhere() -> None:
    text = graph(*MLP, PICK, inputs=THREE, outputs="%y, %r")
    refuses(PULL_LAST_TOKEN, text, "%r has 2 readers, it must have one")
    other = PICK.replace("%y", "%z").replace("%rows", "%others")
    text = graph(*MLP, PICK, other, inputs=f"{THREE}, %others: i32[batch]", outputs="%y, %z")
    refuses(PULL_LAST_TOKEN, text, "%r has 2 readers, it must have one")


def test_picks_that_are_overwritten_stay_apart() -> None:
    """Two caches that begin with the same contents; a third pick moves, after which equal ones become one."""
    slot = "slice(%x) {axis=1, start=0, length=3, step=1} : f32[2, 3, 4, 4]"
    update = "kv_update({}, %r, %lengths, _) : f32[2, 3, 4, 4]"
    text = graph(
        f"%a = {slot}",
        f"%b = {slot}",
        "%k = " + update.format("%a"),
        "%v = " + update.format("%b"),
        "%e = exp(%q) : f32[2, 6, 4]",
        "%y = slice(%e) {axis=1, start=0, length=1, step=1} : f32[2, 1, 4]",
        inputs="%x: f32[2, 6, 4, 4], %r: f32[2, 3, 3, 4], %lengths: i32[2], %q: f32[2, 6, 4]",
        outputs="%y, %k, %v",
    )
    after = fires(PULL_LAST_TOKEN, text, count=1)
    assert [op.name for op in after.ops].count("slice") == 3
