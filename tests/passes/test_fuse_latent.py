"""The norm of a latent, rotations and the cache write of latent attention."""

from __future__ import annotations

import pytest

from monoplan.passes.fuse_latent import FUSE_LATENT
from tests.passes.conftest import Golden
from tests.passes.support import fires, parse, refuses, run

INPUTS = (
    "%l: f32[b, s, 6], %k: f32[b, s, 1, 4], %q: f32[b, s, 2, 4], %a: f32[b, s, 2, 6], %p: i64[b, s], %n: i32[b], "
    "%cache: f32[b, 1, 16, 10], %other: i64[b, s]"
)
LINES = (
    "%normed = rms_norm(%l, %g) {eps=1e-06, dims=1} : f32[b, s, 6]",
    "%shaped = reshape(%normed) {shape=(b, s, 1, 6)} : f32[b, s, 1, 6]",
    '%key = rope(%k, %p, %sin, %cos) {algo="gpt_j"} : f32[b, s, 1, 4]',
    '%query = rope(%q, %p, %sin, %cos) {algo="gpt_j"} : f32[b, s, 2, 4]',
    "%rows = concat(%shaped, %key) {axis=-1} : f32[b, s, 1, 10]",
    "%new = kv_update(%cache, %rows, %n) : f32[b, 1, 16, 10]",
    "%joined = concat(%a, %query) {axis=-1} : f32[b, s, 2, 10]",
    "%values = slice(%new) {axis=3, start=0, length=6, step=1} : f32[b, 1, 16, 6]",
    '%y = attention(%joined, %new, %values, _, %n) {causal=True, layout="bshd"} : f32[b, s, 2, 6]',
)


def graph(*lines: str, outputs: str = "%y, %new") -> str:
    params = ('param %g: f32[6] = "g"', 'param %sin: f32[64, 2] = "sin"', 'param %cos: f32[64, 2] = "cos"')
    body = "\n".join(f"  {line}" for line in (*params, *lines))
    return f"graph g({INPUTS}) {{\n{body}\n  return {outputs}\n}}"


def test_latent(golden: Golden) -> None:
    after = fires(FUSE_LATENT, graph(*LINES), golden, count=1)
    assert [op.name for op in after.ops] == ["latent_rope_cache", "concat", "slice", "attention"]


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("rope(%q, %p", "rope(%q, %other", "rotated by different tables or positions"),
    ("(%l, %g)", "(%l, _)", "with a weight"),
], ids=["positions", "weight"])  # fmt: skip
def test_parts_that_differ(old: str, new: str, reason: str) -> None:
    refuses(FUSE_LATENT, graph(*(line.replace(old, new) for line in LINES)), reason)


def test_parts_that_others_read() -> None:
    refuses(FUSE_LATENT, graph(*LINES, outputs="%y, %new, %normed"), "%normed has 2 readers")
    early = (*LINES[:5], LINES[6], LINES[5], *LINES[7:])
    refuses(FUSE_LATENT, graph(*early), "%query is read before the cache is written")


def test_queries_that_are_made_late() -> None:
    late = "%late = tanh(%q) : f32[b, s, 2, 4]"
    lines = (*LINES[:3], *LINES[4:6], late, LINES[3].replace("rope(%q", "rope(%late"), *LINES[6:])
    refuses(FUSE_LATENT, graph(*lines), "%late is made after the cache is written")


WHOLE = (
    "%ramp = arange() {length=2, start=0, dtype=i64} : i64[2]",
    "%flat = reshape(%ramp) {shape=(1, 2)} : i64[1, 2]",
    "%heads = expand(%flat) {shape=(b*s, 2)} : i64[b*s, 2]",
    "%first = reshape(%x) {shape=(b*s, 2, 3)} : f32[b*s, 2, 3]",
    '%product = expert_linear(%first, %m, %heads) {gate=""} : f32[b*s, 2, 6]',
    "%made = reshape(%product) {shape=(b, s, 2, 6)} : f32[b, s, 2, 6]",
    *(line.replace("concat(%a, ", "concat(%made, ") for line in LINES),
)


def with_product(*lines: str, outputs: str = "%y, %new") -> str:
    """Queries whose first part is a product by a matrix for each head."""
    text = graph('param %m: f32[2, 6, 3] = "m"', *lines, outputs=outputs)
    return text.replace("%a: f32[b, s, 2, 6]", "%x: f32[b, s, 2, 3], %ids: i64[b*s, 2]")


def test_queries_with_a_matrix_for_each_head(golden: Golden) -> None:
    after = fires(FUSE_LATENT, with_product(*WHOLE), golden, count=1)
    assert [op.name for op in after.ops] == ["latent_rope_cache", "slice", "attention"]


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("(%first, %m, %heads)", "(%first, %m, %ids)", "they are not one for each head"),
    ("{length=2, start=0,", "{length=2, start=1,", "they are not one for each head"),
    ("(%first, %m, %heads)", "(%first, %m, %heads, _, %mb)", "more than a matrix for each head"),
], ids=["chosen", "from-1", "bias"])  # fmt: skip
def test_a_product_that_stays_by_itself(old: str, new: str, reason: str) -> None:
    """The rest is fused all the same."""
    lines = ['param %mb: f32[2, 6] = "mb"', *(line.replace(old, new) for line in WHOLE)]
    after, notes = run(FUSE_LATENT, parse(with_product(*lines)))
    assert "expert_linear" in [op.name for op in after.ops]
    assert notes.rewrites == 1 and [miss.reason for miss in notes.misses if reason in miss.reason]


def test_a_product_of_what_is_made_late() -> None:
    at = next(i for i, line in enumerate(WHOLE) if "kv_update" in line)
    late = "%late = tanh(%x) : f32[b, s, 2, 3]"
    lines = [*WHOLE[6 : at + 1], late, *(line.replace("(%x)", "(%late)") for line in WHOLE[:6]), *WHOLE[at + 1 :]]
    after, notes = run(FUSE_LATENT, parse(with_product(*lines)))
    assert "expert_linear" in [op.name for op in after.ops] and notes.rewrites == 1
    assert [miss.reason for miss in notes.misses] == ["%late is made after the cache is written"]


def test_a_product_that_others_read() -> None:
    after, notes = run(FUSE_LATENT, parse(with_product(*WHOLE, outputs="%y, %new, %product")))
    assert "expert_linear" in [op.name for op in after.ops]
    assert [miss.reason for miss in notes.misses] == ["%product has 2 readers, it must have one"]


def test_a_cache_of_whole_keys() -> None:
    """Without a latent there is nothing to fuse, and nothing to say about it."""
    text = graph("%new = kv_update(%cache, %whole, %n) : f32[b, 1, 16, 10]", outputs="%new")
    assert not refuses(FUSE_LATENT, text.replace("%other: i64[b, s]", "%whole: f32[b, s, 1, 10]")).misses
