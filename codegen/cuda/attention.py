"""The ways attention runs on a GPU: one new token by clusters or spread over more blocks, many tokens, or any."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monoplan.codegen.cuda.launches import Between, Launch, Variant, Word, ceil_div, pointer_word
from monoplan.codegen.cuda.schedule import CudaAttention, DecodeSchedule, tuned
from monoplan.codegen.cuda.variables import attention
from monoplan.codegen.kernels import Attention, KVUpdate, Linear
from monoplan.ir.dims import Dim

if TYPE_CHECKING:
    from monoplan.codegen.cuda.render import Renderer
    from monoplan.codegen.plan import Plan


def attention_variants(renderer: Renderer, k: Attention, s: CudaAttention) -> tuple[Variant, ...]:
    """Variants in order of preference."""
    names = attention(k)
    words = [pointer_word(o) for o in k.pointers]
    found: list[Variant] = []
    constants = renderer.tuning.get(str(k.step), {})
    decode, prefill = s.decode and tuned(s.decode, constants), s.prefill and tuned(s.prefill, constants)
    hopper = s.hopper and tuned(s.hopper, constants)
    if decode is not None:
        found += _decode(renderer, k, decode, names, words)
    if hopper is not None and hopper.groups:
        function, all_words = renderer.function(k, "attention_hopper", words, s=hopper, **names)
        blocks: tuple[Dim, Dim, Dim] = (k.heads // hopper.heads, ceil_div(k.seq, hopper.queries), k.batch)
        launch = Launch(function, blocks, hopper.groups * 128, all_words, shared=hopper.shared(k.head_dim))
        found.append(Variant("prefill", (launch,), (Between(k.seq, 2),)))
    elif prefill is not None:
        function, all_words = renderer.function(k, "attention_prefill", words, s=prefill, **names)
        blocks = (ceil_div(k.seq, prefill.queries), k.heads, k.batch)
        launch = Launch(function, blocks, prefill.warps * 32, all_words, shared=prefill.shared(k.head_dim))
        found.append(Variant("prefill", (launch,), (Between(k.seq, 2),)))
    if decode is not None and prefill is not None:
        return tuple(found)
    function, all_words = renderer.function(k, "attention", words, **names)
    launch = Launch(function, (k.batch * k.seq * k.heads, 1, 1), 128, all_words)
    return (*found, Variant("attention", (launch,)))


def _decode(
    renderer: Renderer, k: Attention, d: DecodeSchedule, names: dict[str, Any], words: list[tuple[str, Word]]
) -> list[Variant]:
    """One new token: more sequences need fewer blocks for each; long caches more than a cluster has."""
    attn = names["attn"] | {"early": stable_past(renderer.plan, k)}
    one = Between(k.seq, 1, 1)

    def clusters(splits: int, fixed: bool) -> Launch:
        function, all_words = renderer.function(
            k,
            "attention_decode",
            words,
            d=d,
            spread=False,
            splits=str(splits) if fixed else "(int)gridDim.x",
            attn=attn,
        )
        blocks, pad = (splits, k.kv_heads, k.batch), d.pad if fixed else 0
        return Launch(function, blocks, d.warps * 32, all_words, shared=pad, cluster=splits)

    partial = k.heads // k.kv_heads * (k.head_dim + 2)
    spread, spread_words = renderer.function(
        k,
        "attention_decode",
        [*words, ("float *partial", Word("workspace")), ("uint32_t *tickets", Word("tickets"))],
        d=replace(d, warps=d.long_warps, blocks=1),
        spread=True,
        splits=str(d.spread),
        attn=attn,
    )
    long = Launch(spread, (d.spread, k.kv_heads, k.batch), d.long_warps * 32, spread_words)
    few, some = -(-d.full // (8 * k.kv_heads)), 3 * d.full // (2 * k.kv_heads)
    return [
        Variant(
            "decode_long",
            (long,),
            (one, Between(k.keys, d.long + 1), Between(k.batch, 0, few)),
            k.batch * (k.kv_heads * d.spread * partial * 4),
        ),
        Variant("decode", (clusters(d.splits, True),), (one, Between(k.batch, 0, few))),
        Variant("decode_some", (clusters(2, False),), (one, Between(k.batch, 0, some))),
        Variant("decode_many", (clusters(1, False),), (one,)),
    ]


def stable_past(plan: Plan, k: Attention) -> bool:
    """Whether attention may read `past` and earlier keys before the kernels in front of it are done.

    They must be as they were when the plan began: `past` an input that no step writes, the caches written only behind
    that very length.
    """
    past = k.operand("past").view.buffer
    if past.kind != "input":
        return False
    caches = {(b.table_kind or b.kind, b.table or b.index) for b in (k.operand(n).view.buffer for n in ("k", "v"))}
    for step, _ in plan.steps():
        other = step.kernel
        for o in other.writes:
            b = o.view.buffer
            if (
                b is past
                or (b.kind == "input" and b.index == past.index)
                or past.index in b.table
                and b.table_kind == "input"
            ):
                return False
            if (b.table_kind or b.kind, b.table or b.index) in caches:
                if not isinstance(other, Linear | KVUpdate) or other.operand("lengths").view.buffer is not past:
                    return False
    return all(kind == "input" for kind, _ in caches)
