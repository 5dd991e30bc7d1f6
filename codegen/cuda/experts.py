"""The ways products with chosen matrices run on a GPU: few pairs of a row and a choice, many, or the general kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from monoplan.codegen.cpu.variables import experts as shared_variables
from monoplan.codegen.cuda.early import chosen_early
from monoplan.codegen.cuda.launches import Action, Between, Launch, Variant, Word, ceil_div, pointer_word
from monoplan.codegen.cuda.schedule import (
    CudaExperts,
    CudaSchedule,
    ExpertRowSchedule,
    FewSchedule,
    RowSchedule,
    expert_shared,
    few_shared,
    tuned,
)
from monoplan.codegen.cuda.variables import few_weights, gamma_kind
from monoplan.codegen.expressions import C_TYPES, c_literal, convert
from monoplan.codegen.kernels import Experts, Latent
from monoplan.codegen.operands import Operand
from monoplan.ir.dims import Dim, equal
from monoplan.ir.types import f32

if TYPE_CHECKING:
    from monoplan.codegen.backend import Variables
    from monoplan.codegen.cuda.render import Renderer

FEW_PAIRS = 64  # up to so many, blocks of their own for each pair read no more than a pass over all chosen matrices


def experts(k: Experts) -> Variables:
    """Template variables."""
    found, x, ids = shared_variables(k, total="sums[{}]"), k.operand("x"), k.operand("ids")
    places = 1 if equal(x.view.strides[1], 0) else k.choices
    gamma = k.operand("norm_weight") if k.has("norm_weight") else None
    normed = x.at("r", "j", "i") + (" * scale" if k.norm == "rms" else "")
    if gamma is not None:
        normed = f"({normed}) * {gamma.at('i')}"
    found["moe"] |= {
        "x_row": x.pointer("r", "j", "0"),
        "few": "" if k.layout is None else few_weights(k),
        "header": "" if k.layout is None else k.format.cuda_header,
        "places": places,  # rows of x for each row of choices
        "x_place": "r" if places == 1 else "p",
        "x_rounded": "" if k.layout is None else convert(normed, x.compute, k.format.x_dtype),
        "rms": int(k.norm == "rms"),
        "has_gamma": int(gamma is not None),
        "gamma_kind": gamma_kind(gamma),
        # heads that are all chosen have no ids in memory
        "id": ids.at("r", "j") if ids.view.is_virtual else f"__ldcg({ids.pointer('r', 'j')})",
        "gamma_value": "" if gamma is None else gamma.at("i"),
        "gamma": "(const float *)0" if gamma is None else gamma.pointer("0"),
        "eps": c_literal(k.eps, f32),
    }
    return found


def expert_variants(renderer: Renderer, k: Experts, s: CudaExperts) -> tuple[Variant, ...]:
    """Variants in order of preference."""
    found, names, pairs = list[Variant](), experts(k), k.rows * k.choices
    words = [pointer_word(o) for o in k.pointers]
    if s.row is not None:
        found.append(Variant("row", (_row(renderer, k, s.row, names, words),), (Between(pairs, 1, FEW_PAIRS),)))
    if s.few is not None:
        return (*found, _many(renderer, k, s.few, names))
    plain = CudaSchedule()
    blocks = -(-k.experts * k.columns * 32 // plain.threads)
    function, given = renderer.function(k, "experts", words, s=plain, blocks=blocks, **names)
    return (*found, Variant("experts", (Launch(function, (blocks + _beside(k), 1, 1), plain.threads, given),)))


def _beside(k: Experts, side: int = 1) -> Dim:
    """Rows of `side` blocks for what stands beside the products: a block for each token."""
    return 0 if k.latent is None else ceil_div(k.rows, side)


def _row(
    renderer: Renderer, k: Experts, s: RowSchedule | ExpertRowSchedule, names: Variables, words: list[tuple[str, Word]]
) -> Launch:
    """Few pairs, each by blocks of its own. Weights of choices that are known early are prefetched."""
    if isinstance(s, ExpertRowSchedule):
        function, given = renderer.function(k, "experts_tiles_row", words, s=s, threads=s.warps * 32, **names)
        across = -(-k.columns // s.columns)
        grid = (across, k.rows * k.choices + _beside(k, across), 1)
        return Launch(function, grid, s.warps * 32, given, s.shared)
    if chosen_early(renderer.plan, k):
        s = replace(s, early=s.ring, gentle=1)
    s = tuned(s, renderer.tuning.get(str(k.step), {}))
    function, given = renderer.function(k, "experts_row", words, s=s, threads=s.warps * 32, **names)
    grid = (s.grid, k.rows * k.choices + _beside(k, s.grid), 1)
    return Launch(function, grid, s.warps * 32, given, expert_shared(k, s))


def _many(renderer: Renderer, k: Experts, s: FewSchedule, names: Variables) -> Variant:
    """x as tensor cores take it, sums of all pairs by each matrix, then the body."""
    half, pairs = k.format.x_dtype, k.rows * k.choices

    def words(*wanted: str) -> list[tuple[str, Word]]:
        return [pointer_word(o) for o in k.pointers if o.name in wanted]

    rows = k.rows * names["moe"]["places"]
    xs, size = Word("workspace"), (rows * (k.depth * half.itemsize) + 255) // 256 * 256
    to = (f"{C_TYPES[half.name]} *xs", xs)
    function, given = renderer.function(k, "experts_prepare", [*words("x", "norm_weight"), to], **names)
    actions: list[Action] = [Launch(function, (rows, 1, 1), 256, given)]
    matrices = [k.operand(n) for n in ("w", "up") if k.has(n)]
    for number, matrix in enumerate(matrices):
        own = Operand("w", matrix.view)
        sums = Word("workspace", offset=size + pairs * (4 * k.columns * s.splits * number))
        parts = [pointer_word(own), *words("ids"), (f"const {C_TYPES[half.name]} *xs", xs), ("float *sums", sums)]
        function, given = renderer.function(k, "experts_few", parts, s=s, **names)
        actions.append(Launch(function, (s.grid, s.splits, k.experts), s.warps * 32, given, few_shared(k, s)))
    parts = [*words("b", "up_b", "ids", "y", *Latent.NAMES), ("const float *totals", Word("workspace", offset=size))]
    function, given = renderer.function(k, "experts_finish", parts, s=s, threads=256, **names)
    actions.append(Launch(function, (ceil_div(pairs * k.columns, 256) + _beside(k), 1, 1), 256, given))
    room = size + pairs * (4 * k.columns * s.splits * len(matrices))
    return Variant("many", tuple(actions), (), room)
