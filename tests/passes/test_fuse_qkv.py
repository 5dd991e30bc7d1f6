"""RoPE on q and k and the cache writes as the epilogue of the QKV product."""

from __future__ import annotations

import pytest

from monoplan.ir.graph import Graph
from monoplan.ir.printer import print_graph
from monoplan.passes.fuse_qkv import FUSE_QKV
from tests.passes.conftest import Golden
from tests.passes.support import fires, parse, refuses, run

HEADS = {"q": 4, "k": 2, "v": 2}
PARAMS = (
    'param %w: f32[32, 8] = "w"', 'param %b: f32[32] = "b"', 'param %g: f32[8] = "g"', 'param %c: f32[8] = "c"',
    'param %sin: f32[9, 2] = "sin"', 'param %cos: f32[9, 2] = "cos"', 'param %nq: f32[4] = "nq"',
    'param %nk: f32[4] = "nk"',
)  # fmt: skip
INPUTS = ", ".join(
    (
        "%x: f32[batch, seq, 8]",
        "%positions: i64[batch, seq]",
        "%kc: f32[batch, 2, capacity, 4]",
        "%vc: f32[batch, 2, capacity, 4]",
        "%lengths: i32[batch]",
        "%valid: i32[batch]",
    )
)
LINEAR = "%l = linear(%x, %w, _) : f32[batch, seq, 32]"


def lines(
    product: str = LINEAR,
    *,
    norms: str = "",
    algo: str = "gpt_neox",
    valid: str = "_",
    eps: tuple[str, str] = ("1e-06", "1e-06"),
    heads: dict[str, int] = HEADS,
) -> list[str]:
    """split, reshape to heads, norms of the parts named in `norms`, rope, cache writes."""
    sizes = [4 * heads[part] for part in "qkv"]
    types = ", ".join(f"f32[batch, seq, {n}]" for n in sizes)
    rows = {part: f"batch, seq, {heads[part]}, 4" for part in "qkv"}
    made = [product, f"%q, %k, %v = split(%l) {{sizes=({', '.join(map(str, sizes))}), axis=-1}} : {types}"]
    made += [f"%{part}1 = reshape(%{part}) {{shape=({rows[part]})}} : f32[{rows[part]}]" for part in "qkv"]
    for i, part in enumerate("qk"):
        source = f"%{part}1"
        if part in norms:
            made.append(f"%{part}2 = rms_norm({source}, %n{part}) {{eps={eps[i]}, dims=1}} : f32[{rows[part]}]")
            source = f"%{part}2"
        made.append(f'%{part}3 = rope({source}, %positions, %sin, %cos) {{algo="{algo}"}} : f32[{rows[part]}]')
    for part, source in (("k", "%k3"), ("v", "%v1")):
        type_ = f"f32[batch, {heads[part]}, capacity, 4]"
        made.append(f"%{part}u = kv_update(%{part}c, {source}, %lengths, {valid}) : {type_}")
    return made


ATTENTION = '%y = attention(%q3, %ku, %vu, _, %lengths) {causal=True, layout="bshd"} : f32[batch, seq, 4, 4]'


def graph(body: list[str], outputs: str = "%y, %ku -> %kc, %vu -> %vc", inputs: str = INPUTS) -> str:
    found = (*PARAMS, *body, ATTENTION)
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in found), f"  return {outputs}", "}"])


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


@pytest.mark.parametrize("valid", ["_", "%valid"], ids=["all rows", "valid counts"])
@pytest.mark.parametrize("norms", ["", "q", "k", "qk"])
@pytest.mark.parametrize("algo", ["gpt_neox", "gpt_j"])
def test_qkv(algo: str, norms: str, valid: str) -> None:
    after = fires(FUSE_QKV, graph(lines(norms=norms, algo=algo, valid=valid)), count=1)
    op = after.ops[0]
    assert names(after) == ["qkv_rope_cache", "attention"] and op.attrs["algo"] == algo
    assert (op.operand("q_norm") is not None, op.operand("k_norm") is not None) == ("q" in norms, "k" in norms)
    assert (op.operand("valid") is not None) == (valid != "_") and (op.attrs["heads"], op.attrs["kv_heads"]) == (4, 2)


@pytest.mark.parametrize(
    "product",
    [
        LINEAR.replace("_", "%b"),
        '%l = fused_linear(%x, %w, _, %g, _) {norm="rms", eps=1e-05} : f32[batch, seq, 32]',
        '%l = fused_linear(%x, %w, %b, %g, %c) {norm="layer", eps=1e-05} : f32[batch, seq, 32]',
    ],
    ids=["bias", "rms", "layer and bias"],
)
def test_products(product: str, golden: Golden) -> None:
    fires(FUSE_QKV, graph(lines(product, valid="%valid")), golden, count=1)


def test_values_in_another_format(golden: Golden) -> None:
    """Low-bit weights of unlike formats are not joined: v is a product beside, of the same norm."""
    _, cut, *rest = lines()
    two = cut.replace("%q, %k, %v =", "%q, %k =").replace(", 8), axis", "), axis").removesuffix(", f32[batch, seq, 8]")
    products = [
        "%n = rms_norm(%x, %g) {eps=1e-05, dims=1} : f32[batch, seq, 32]",
        "%l = linear(%n, %w, _) : f32[batch, seq, 24]",
        two,
        "%v = linear(%n, %wv, _) : f32[batch, seq, 8]",
    ]
    text = (
        graph([*products, *rest])
        .replace("%w: f32[32, 8]", "%w: q4_0[24, 32]")
        .replace("%b: f32[32]", "%wv: q8_0[8, 32]")
    )
    text = text.replace('"b"', '"wv"').replace("%g: f32[8]", "%g: f32[32]").replace("seq, 8]", "seq, 32]", 1)
    after, notes = run(FUSE_QKV, parse(text))
    golden(print_graph(after))
    assert notes.rewrites == 1 and names(after) == ["qkv_rope_cache", "attention"]
    alike = text.replace("q8_0", "q4_0")  # would have been joined before
    assert "rope" in names(run(FUSE_QKV, parse(alike))[0])


def test_partial_rotation() -> None:
    text = graph(lines()).replace("f32[9, 2]", "f32[9, 1]")
    assert names(fires(FUSE_QKV, text, count=1)) == ["qkv_rope_cache", "attention"]


def test_positions_of_all_rows() -> None:
    text = graph(lines(algo="gpt_j")).replace("%positions: i64[batch, seq]", "%positions: i64[seq]")
    fires(FUSE_QKV, text, count=1)


# -- what must stay -------------------------------------------------------------------------------------------


def changed(old: str, new: str, **options: str) -> str:
    text = graph(lines(**options))
    assert old in text
    return text.replace(old, new)


def test_second_readers() -> None:
    for value in ("%l", "%q1", "%k3", "%v1", "%k"):
        text = graph(lines(), outputs=f"%y, %ku -> %kc, %vu -> %vc, {value}")
        refuses(FUSE_QKV, text, f"{value} has 2 readers, it must have one")


def test_a_part_that_only_leaves_the_graph() -> None:
    body = [line for line in lines() if not line.startswith("%vu")]
    text = graph(body, outputs="%y, %ku -> %kc, %v1").replace("%ku, %vu", "%ku, %vc")
    refuses(FUSE_QKV, text, "%v1 is an output of the graph")


def test_q_without_rotation() -> None:
    text = changed('%q3 = rope(%q1, %positions, %sin, %cos) {algo="gpt_neox"}', "%q3 = exp(%q1)")
    refuses(FUSE_QKV, text, "q and k must be rotated, v must not")


def test_q_and_k_rotated_differently() -> None:
    text = changed("rope(%k1, %positions, %sin, %cos)", "rope(%k1, %positions, %cos, %sin)")
    refuses(FUSE_QKV, text, "q and k are rotated by different tables or positions")
    text = graph(lines()).replace(
        '%k3 = rope(%k1, %positions, %sin, %cos) {algo="gpt_neox"}',
        '%k3 = rope(%k1, %positions, %sin, %cos) {algo="gpt_j"}',
    )
    refuses(FUSE_QKV, text, "q and k are rotated by different tables or positions")


def test_k_and_v_at_different_positions() -> None:
    text = changed("kv_update(%vc, %v1, %lengths, _)", "kv_update(%vc, %v1, %valid, _)")
    refuses(FUSE_QKV, text, "k and v go to different positions of their caches")
    text = changed("kv_update(%vc, %v1, %lengths, _)", "kv_update(%vc, %v1, %lengths, %valid)")
    refuses(FUSE_QKV, text, "k and v go to different positions of their caches")


def test_a_part_that_goes_nowhere_near_a_cache() -> None:
    body = [line for line in lines() if not line.startswith("%vu")]
    text = (
        graph(body, outputs="%y, %ku -> %kc, %z")
        .replace("%ku, %vu", "%ku, %vc")
        .replace("  %y = ", "  %z = exp(%v1) : f32[batch, seq, 2, 4]\n  %y = ")
    )
    refuses(FUSE_QKV, text, "%v1 is not written to a cache")


def test_norms_with_different_eps() -> None:
    refuses(FUSE_QKV, graph(lines(norms="qk", eps=("1e-06", "1e-05"))), "the norms of q and k differ in eps")


def test_a_weight_that_is_computed() -> None:
    text = graph(lines(), inputs=INPUTS + ", %w: f32[32, 8]").replace('  param %w: f32[32, 8] = "w"\n', "")
    refuses(FUSE_QKV, text, "the packed product takes a constant weight and floats up to f32")


def test_a_product_with_another_epilogue() -> None:
    product = '%l = fused_linear(%x, %w, _, _, _) {expr="neg(x0)"} : f32[batch, seq, 32]'
    refuses(FUSE_QKV, graph(lines(product)), "the product has another epilogue already")


def test_heads_that_are_arranged_differently() -> None:
    again = "%q0 = reshape(%q) {shape=(batch, seq, 16)} : f32[batch, seq, 16]"
    text = changed("%q1 = reshape(%q)", f"{again}\n  %q1 = reshape(%q0)")
    refuses(FUSE_QKV, text, "%q is not reshaped from [batch, seq, features] to heads")


def test_more_key_than_value_heads() -> None:
    inputs = INPUTS.replace("%kc: f32[batch, 2", "%kc: f32[batch, 3").replace("%vc: f32[batch, 2", "%vc: f32[batch, 1")
    text = graph(lines(heads={"q": 4, "k": 3, "v": 1}), inputs=inputs)
    text = text.replace(ATTENTION, "%y = exp(%q3) : f32[batch, seq, 4, 4]")
    refuses(FUSE_QKV, text, "3 key heads and 1 value heads differ")


def test_a_reader_in_the_middle_of_the_group() -> None:
    body = lines()
    body.insert(-1, "%e = exp(%ku) : f32[batch, 2, capacity, 4]")
    text = graph(body, outputs="%y, %ku -> %kc, %vu -> %vc, %e")
    refuses(FUSE_QKV, text, "%e reads %ku before the whole group is ready")


def test_one_cache_for_keys_and_values() -> None:
    """v is written behind k into the result of k's write: the group would read its own result."""
    text = changed("kv_update(%vc, %v1, %lengths, _)", "kv_update(%ku, %v1, %lengths, _)")
    text = text.replace("attention(%q3, %ku, %vu", "attention(%q3, %vu, %vu")
    text = text.replace(", %ku -> %kc, %vu -> %vc", ", %vu -> %kc")
    refuses(FUSE_QKV, text, "%vu reads %ku before the whole group is ready")


def test_a_model_without_caches() -> None:
    body = [line for line in lines() if "kv_update" not in line]
    text = graph(body, outputs="%y, %v1").replace("attention(%q3, %ku, %vu", "attention(%q3, %kc, %vc")
    text = text.replace("return %y, %v1", "return %y, %v1, %k3")
    refuses(FUSE_QKV, text)


def normed_behind(kind: str) -> str:
    """Norms that the product can't have: over all heads (rms), or of each head with weights [heads, dim] (layer)."""
    body = []
    for line in lines(valid="%valid"):
        part = line[1]
        if kind == "rms" and line[1:].startswith(("q1 = reshape", "k1 = reshape")):
            size = 4 * HEADS[part]
            body.append(f"%{part}0 = rms_norm(%{part}, %n{part}) {{eps=1e-06, dims=1}} : f32[batch, seq, {size}]")
            line = line.replace(f"reshape(%{part})", f"reshape(%{part}0)")
        elif kind == "layer" and line[1:].startswith(("q3 = rope", "k3 = rope")):
            rows = f"f32[batch, seq, {HEADS[part]}, 4]"
            body.append(f"%{part}2 = layer_norm(%{part}1, _, _) {{eps=1e-06, dims=1}} : {rows}")
            body.append(f"%{part}4 = mul(%{part}2, %n{part}) : {rows}")
            line = line.replace(f"rope(%{part}1", f"rope(%{part}4")
        body.append(line)
    text, sizes = graph(body), ("[16]", "[8]") if kind == "rms" else ("[4, 4]", "[2, 4]")
    for name, size in zip(("nq", "nk"), sizes, strict=True):
        text = text.replace(f"%{name}: f32[4]", f"%{name}: f32{size}")
    return text


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_behind_the_product(kind: str) -> None:
    after = fires(FUSE_QKV, normed_behind(kind), count=1)
    op = after.ops[1]
    assert names(after) == ["linear", "heads_rope_cache", "attention"]
    assert (op.attrs["norm"], op.attrs["whole"]) == (kind, kind == "rms") and op.operand("valid") is not None


def test_norms_that_stay_where_they_are() -> None:
    text = normed_behind("rms")
    refuses(FUSE_QKV, text.replace("{eps=1e-06", "{eps=1e-05", 1), "the norms of q and k differ")
    refuses(FUSE_QKV, text.replace("%y, %ku ->", "%y, %q0, %ku ->"), "%q0 has 2 readers")
    refuses(
        FUSE_QKV, text.replace("rope(%k1, %positions, %sin, %cos)", "rope(%k1, %positions, %cos, %sin)"), "different"
    )
    mixed = text.replace("%k0 = rms_norm(%k, %nk)", "%k0 = layer_norm(%k, %nk, _)")
    refuses(FUSE_QKV, mixed, "the norms of q and k differ")
    biased = normed_behind("rms").replace("rms_norm(%q, %nq)", "layer_norm(%q, %nq, %nq)")
    refuses(FUSE_QKV, biased.replace("rms_norm(%k, %nk)", "layer_norm(%k, %nk, %nk)"), "the norm has a bias")
    refuses(FUSE_QKV, normed_behind("layer").replace("mul(%q2, %nq)", "add(%q2, %nq)"), "no constant weight")
    double = normed_behind("rms").replace("f32[", "f64[")
    refuses(FUSE_QKV, double, "takes f32, bf16 and f16")
