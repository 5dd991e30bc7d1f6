"""The ways attention runs on a GPU: one new token by clusters or spread over more blocks, many tokens, or any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monoplan.codegen.backend import Variables
from monoplan.codegen.cuda.early import stable_past
from monoplan.codegen.cuda.launches import Between, Launch, Variant, Word, ceil_div, pointer_word
from monoplan.codegen.cuda.schedule import CudaAttention, DecodeVariant, tuned
from monoplan.codegen.cuda.variables import attention
from monoplan.codegen.kernels import Attention
from monoplan.ir.dims import Dim

if TYPE_CHECKING:
    from monoplan.codegen.cuda.render import Renderer


def attention_variants(renderer: Renderer, k: Attention, s: CudaAttention) -> tuple[Variant, ...]:
    """Variants in order of preference."""
    names = attention(k) | {"early": s.decode is not None and stable_past(renderer.plan, k)}
    words = [pointer_word(o) for o in k.pointers]
    constants = renderer.tuning.get(str(k.step), {})
    decode, prefill = s.decode and tuned(s.decode, constants), s.prefill and tuned(s.prefill, constants)
    hopper = s.hopper and tuned(s.hopper, constants)
    found = [_decode(renderer, k, v, decode.long, names, words) for v in decode.variants] if decode is not None else []
    launch: Launch | None = None
    if hopper is not None and hopper.groups:
        function, all_words = renderer.function(k, "attention_hopper", words, s=hopper, **names)
        blocks: tuple[Dim, Dim, Dim] = (k.heads // hopper.heads, ceil_div(k.seq, hopper.queries), k.batch)
        launch = Launch(function, blocks, hopper.groups * 128, all_words, shared=hopper.shared(k.head_dim))
    elif prefill is not None:
        function, all_words = renderer.function(k, "attention_prefill", words, s=prefill, **names)
        blocks = (ceil_div(k.seq, prefill.queries), k.heads, k.batch)
        launch = Launch(function, blocks, prefill.warps * 32, all_words, shared=prefill.shared(k.head_dim))
    if launch is not None:
        found.append(Variant("prefill", (launch,), (Between(k.seq, 2),)))
    if decode is not None and prefill is not None:
        return tuple(found)
    function, all_words = renderer.function(k, "attention", words, threads=s.threads, **names)
    launch = Launch(function, (k.batch * k.seq * k.heads, 1, 1), s.threads, all_words)
    return (*found, Variant("attention", (launch,)))


def _decode(
    renderer: Renderer, k: Attention, v: DecodeVariant, long: int, names: Variables, words: list[tuple[str, Word]]
) -> Variant:
    """One new token; blocks that are spread leave their parts in the workspace."""
    one, batch = Between(k.seq, 1, 1), (Between(k.batch, 0, v.batch),) if v.batch else ()
    grid = (v.splits, k.kv_heads, k.batch)
    if not v.spread:
        function, all_words = renderer.function(k, "attention_decode", words, s=v, **names)
        launch = Launch(function, grid, v.warps * 32, all_words, v.shared(k.head_dim), v.splits)
        return Variant(v.name, (launch,), (one, *batch))
    more = [("float *partial", Word("workspace")), ("uint32_t *tickets", Word("tickets"))]
    function, all_words = renderer.function(k, "attention_decode", [*words, *more], s=v, **names)
    launch = Launch(function, grid, v.warps * 32, all_words, v.shared(k.head_dim))
    part = k.heads // k.kv_heads * (k.head_dim + 2) * 4
    size = k.batch * (k.kv_heads * v.splits * part)
    return Variant(v.name, (launch,), (one, Between(k.keys, long + 1), *batch), size)
