"""remove-identities, hoist-setup, merge-equal-ops."""

from __future__ import annotations

import pytest

from monoplan.passes.canonicalize import HOIST_SETUP, MERGE_EQUAL_OPS, REMOVE_IDENTITIES
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses


def graph(*lines: str, inputs: str = "%x: f32[2, 3, 4]", outputs: str = "%y") -> str:
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


CACHES = "%c: f32[2, 1, 8, 4], %r: f32[2, 3, 1, 4], %lengths: i32[2]"
WRITE = "%k = kv_update(%c, %r, %lengths, _) : f32[2, 1, 8, 4]"


# -- remove-identities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "reshape(%x) {shape=(2, 3, 4)}",
        "expand(%x) {shape=(2, 3, 4)}",
        "cast(%x) {dtype=f32}",
        "transpose(%x) {axes=(0, 1, 2)}",
        "slice(%x) {axis=1, start=0, length=3, step=1}",
        "repeat(%x) {repeats=1, axis=1}",
        "all_reduce(%x) {world=1}",
        "all_gather(%x) {axis=-1, world=1}",
    ],
    ids=lambda line: line.split("(")[0],
)
def test_identity(line: str) -> None:
    after = fires(REMOVE_IDENTITIES, graph(f"%i = {line} : f32[2, 3, 4]", "%y = exp(%i) : f32[2, 3, 4]"), count=1)
    assert [op.name for op in after.ops] == ["exp"] and after.ops[0].operands == after.inputs


@pytest.mark.parametrize(
    ("line", "type"),
    [
        ("reshape(%x) {shape=(3, 2, 4)}", "f32[3, 2, 4]"),
        ("cast(%x) {dtype=f64}", "f64[2, 3, 4]"),
        ("slice(%x) {axis=1, start=1, length=2, step=1}", "f32[2, 2, 4]"),
        ("repeat(%x) {repeats=2, axis=1}", "f32[2, 6, 4]"),
        ("transpose(%x) {axes=(1, 0, 2)}", "f32[3, 2, 4]"),
    ],
    ids=["reshape", "cast", "slice", "repeat", "transpose"],
)
def test_not_an_identity(line: str, type: str) -> None:
    refuses(REMOVE_IDENTITIES, graph(f"%i = {line} : {type}", f"%y = exp(%i) : {type}"))


def test_a_permutation_of_equal_sizes_is_no_identity() -> None:
    line = "%i = transpose(%x) {axes=(1, 0)} : f32[4, 4]"
    refuses(REMOVE_IDENTITIES, graph(line, "%y = exp(%i) : f32[4, 4]", inputs="%x: f32[4, 4]"))
    backwards = "%i = slice(%x) {axis=0, start=0, length=2, step=2} : f32[2, 4]"
    refuses(REMOVE_IDENTITIES, graph(backwards, "%y = exp(%i) : f32[2, 4]", inputs="%x: f32[4, 4]"))


def test_views_in_a_row(golden: Golden) -> None:
    text = graph(
        "%a = reshape(%x) {shape=(6, 4)} : f32[6, 4]",
        "%b = reshape(%a) {shape=(24,)} : f32[24]",
        "%c = reshape(%b) {shape=(4, 6)} : f32[4, 6]",
        "%d = transpose(%c) {axes=(1, 0)} : f32[6, 4]",
        "%e = transpose(%d) {axes=(1, 0)} : f32[4, 6]",
        "%f = cast(%e) {dtype=f32} : f32[4, 6]",
        "%t = transpose(%x) {axes=(1, 2, 0)} : f32[3, 4, 2]",
        "%u = transpose(%t) {axes=(1, 2, 0)} : f32[4, 2, 3]",
        outputs="%f, %d, %u",
    )
    fires(REMOVE_IDENTITIES, text, golden)


def masked(mask: str, *lines: str) -> str:
    """Attention of 2 heads and 3 queries under a mask that `lines` make of positions."""
    return graph(
        "%n = arange() {length=3, start=0, dtype=i64} : i64[3]",
        "%zero = full() {shape=(), value=0, dtype=i64} : i64[]",
        "%ge = ge(%n, %zero) : bool[3]",
        "%r = reshape(%ge) {shape=(1, 1, 1, 3)} : bool[1, 1, 1, 3]",
        *lines,
        f"%y = attention(%x, %x, %x, {mask}) "
        '{causal=False, scale=None, softcap=None, window=None, layout="bhsd"} : f32[1, 2, 3, 4]',
        inputs="%x: f32[1, 2, 3, 4], %m: bool[3], %all: bool[1, 1, 3, 3]",
    )


def test_a_mask_that_shows_all_keys() -> None:
    after = fires(REMOVE_IDENTITIES, masked("%e", "%e = expand(%r) {shape=(1, 1, 3, 3)} : bool[1, 1, 3, 3]"), count=1)
    assert [op.name for op in after.ops] == ["attention"] and after.ops[0].operand("mask") is None
    after = fires(REMOVE_IDENTITIES, masked("%e", "%e = logical_and(%r, %all) : bool[1, 1, 3, 3]"), count=2)
    assert [op.name for op in after.ops] == ["attention"] and after.ops[0].operand("mask") is after.inputs[2]
    gathered = (
        "%g = gather(%m, %n) {axis=0} : bool[3]",
        "%q = reshape(%g) {shape=(1, 1, 1, 3)} : bool[1, 1, 1, 3]",
        "%e = bitwise_and(%q, %r) : bool[1, 1, 1, 3]",
    )
    after = fires(REMOVE_IDENTITIES, masked("%e", *gathered))
    assert [op.name for op in after.ops] == ["reshape", "attention"]


def test_a_mask_that_hides_a_key_stays() -> None:
    one = "%one = full() {shape=(), value=1, dtype=i64} : i64[]"
    hidden = (one, "%g1 = ge(%n, %one) : bool[3]", "%e = reshape(%g1) {shape=(1, 1, 1, 3)} : bool[1, 1, 1, 3]")
    refuses(REMOVE_IDENTITIES, masked("%e", *hidden))
    shifted = (
        "%back = mul(%n, %zero) : i64[3]",
        "%g = gather(%m, %back) {axis=0} : bool[3]",
        "%e = reshape(%g) {shape=(1, 1, 1, 3)} : bool[1, 1, 1, 3]",
    )
    refuses(REMOVE_IDENTITIES, masked("%e", *shifted))


def test_an_identity_may_be_an_output() -> None:
    after = fires(REMOVE_IDENTITIES, graph("%y = reshape(%x) {shape=(2, 3, 4)} : f32[2, 3, 4]"), count=1)
    assert after.outputs == after.inputs and not after.ops


def test_the_old_contents_of_a_cache_stay_apart_from_the_new() -> None:
    before = graph(
        "%i = reshape(%c) {shape=(2, 1, 8, 4)} : f32[2, 1, 8, 4]",
        WRITE,
        "%y = exp(%i) : f32[2, 1, 8, 4]",
        inputs=CACHES,
        outputs="%y, %k -> %c",
    )
    refuses(REMOVE_IDENTITIES, before)
    copied = graph(
        "%i = cast(%c) {dtype=f32} : f32[2, 1, 8, 4]",
        "%k = kv_update(%i, %r, %lengths, _) : f32[2, 1, 8, 4]",
        "%y = exp(%c) : f32[2, 1, 8, 4]",
        inputs=CACHES,
        outputs="%y, %k",
    )
    refuses(REMOVE_IDENTITIES, copied)
    joined = graph(
        "%a = reshape(%c) {shape=(2, 8, 4)} : f32[2, 8, 4]",
        WRITE,
        "%y = reshape(%a) {shape=(16, 4)} : f32[16, 4]",
        inputs=CACHES,
        outputs="%y, %k -> %c",
    )
    refuses(REMOVE_IDENTITIES, joined)


# -- hoist-setup ----------------------------------------------------------------------------------------------

WEIGHTS = """\
graph g(%x: f32[n, 4]) {
  param %w: f32[4, 3] = "w"
  param %g: f32[4] = "g"
  %one = full() {shape=(), value=1.0, dtype=f32} : f32[]
  %t = transpose(%w) {axes=(1, 0)} : f32[3, 4]
  %a = add(%g, %one) : f32[4]
  %b = mul(%a, %x) : f32[n, 4]
  %y = linear(%b, %t, _) : f32[n, 3]
  %z = add(%y, %one) : f32[n, 3]
  return %z
}
"""


def test_hoist(golden: Golden) -> None:
    fires(HOIST_SETUP, WEIGHTS, golden, count=2)


def test_sizes_that_are_known_late_stay_in_the_plan() -> None:
    """Learned positions: the weight is constant, the number of rows that are read is not."""
    for line, type_ in (
        ("slice(%w) {axis=0, start=0, length=n, step=1}", "f32[n, 4]"),
        ("expand(%w) {shape=(n, 4)}", "f32[n, 4]"),
    ):
        size = 1 if "expand" in line else 9
        text = graph(
            f'param %w: f32[{size}, 4] = "w"',
            f"%p = {line} : {type_}",
            "%y = add(%x, %p) : f32[n, 4]",
            inputs="%x: f32[n, 4]",
        )
        refuses(HOIST_SETUP, text)


def test_what_is_not_hoisted() -> None:
    weight = 'param %w: f32[2, 3, 4] = "w"'
    refuses(HOIST_SETUP, graph(weight, "%y = add(%x, %w) : f32[2, 3, 4]"))  # reads an input
    refuses(HOIST_SETUP, graph(weight, "%y = exp(%w) : f32[2, 3, 4]"))  # an output of the plan
    refuses(HOIST_SETUP, graph("%c = full() {shape=(2,), value=1.0, dtype=f32} : f32[2]", "%y = exp(%c) : f32[2]"))
    reduced = "%r = all_reduce(%w) {world=1} : f32[2, 3, 4]"  # a collective happens when the plan runs
    refuses(HOIST_SETUP, graph(weight, reduced, "%y = add(%x, %r) : f32[2, 3, 4]"))


def test_a_parameter_that_is_overwritten_stays() -> None:
    text = graph(
        'param %c: f32[2, 1, 8, 4] = "c"',
        'param %r: f32[2, 3, 1, 4] = "r"',
        'param %lengths: i32[2] = "lengths"',
        WRITE,
        "%y = mul(%k, %x) : f32[2, 1, 8, 4]",
        inputs="%x: f32[2, 1, 8, 4]",
    )
    refuses(HOIST_SETUP, text)


# -- merge-equal-ops ------------------------------------------------------------------------------------------


def test_merge_equal_ops(golden: Golden) -> None:
    text = graph(
        "%a = exp(%x) : f32[2, 3, 4]",
        "%b = exp(%x) : f32[2, 3, 4]",
        "%p = neg(%a) : f32[2, 3, 4]",
        "%q = neg(%b) : f32[2, 3, 4]",
        "%s = sum(%p) {axes=(-1,), keepdims=True} : f32[2, 3, 1]",
        "%t = sum(%q) {axes=(-1,), keepdims=True} : f32[2, 3, 1]",
        "%u = sum(%q) {axes=(1,), keepdims=True} : f32[2, 1, 4]",
        outputs="%s, %t, %u",
    )
    fires(MERGE_EQUAL_OPS, text, golden, count=3)


def test_ops_with_several_results_merge() -> None:
    line = "sort(%x) {axis=-1, descending=False} : f32[2, 3, 4], i64[2, 3, 4]"
    fires(MERGE_EQUAL_OPS, graph(f"%a, %b = {line}", f"%c, %d = {line}", outputs="%a, %d, %b"), count=1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sum(%x) {axes=(1,), keepdims=True} : f32[2, 1, 4]", "sum(%x) {axes=(-2,), keepdims=False} : f32[2, 4]"),
        ("exp(%x) : f32[2, 3, 4]", "neg(%x) : f32[2, 3, 4]"),
        ("sub(%x, %z) : f32[2, 3, 4]", "sub(%z, %x) : f32[2, 3, 4]"),
        ("full() {value=0.0} : f32[]", "full() {value=-0.0} : f32[]"),
        ("full() {value=1, dtype=i64} : i64[]", "full() {value=1, dtype=i32} : i32[]"),
    ],
    ids=["attributes", "op", "order", "signed zero", "type"],
)
def test_different_ops_stay(first: str, second: str) -> None:
    inputs = "%x: f32[2, 3, 4], %z: f32[2, 3, 4]"
    refuses(MERGE_EQUAL_OPS, graph(f"%a = {first}", f"%b = {second}", outputs="%a, %b", inputs=inputs))


def test_collectives_stay_apart() -> None:
    line = "all_reduce(%x) {world=1} : f32[2, 3, 4]"
    refuses(MERGE_EQUAL_OPS, graph(f"%a = {line}", f"%b = {line}", outputs="%a, %b"))


def test_two_caches_of_zeros_are_two_caches() -> None:
    zeros = "full() {shape=(2, 1, 8, 4), value=0.0, dtype=f32} : f32[2, 1, 8, 4]"
    text = graph(
        f"%a = {zeros}",
        f"%b = {zeros}",
        "%k = kv_update(%a, %r, %lengths, _) : f32[2, 1, 8, 4]",
        "%v = kv_update(%b, %r, %lengths, _) : f32[2, 1, 8, 4]",
        inputs=CACHES,
        outputs="%k, %v",
    )
    refuses(MERGE_EQUAL_OPS, text)
