"""The ways a linear layer runs on a GPU: one row, a few, many by the vendor's library, or the general tile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monoplan.codegen.cuda.early import settled
from monoplan.codegen.cuda.launches import (
    Action,
    Between,
    Boxes,
    Launch,
    Product,
    Variant,
    Word,
    ceil_div,
    pointer_word,
)
from monoplan.codegen.cuda.schedule import (
    CudaLinear,
    FewSchedule,
    WgmmaSchedule,
    few_shared,
    row_shared,
    tuned,
    whole_heads,
)
from monoplan.codegen.cuda.variables import linear
from monoplan.codegen.expressions import C_TYPES
from monoplan.codegen.kernels import Linear
from monoplan.codegen.operands import Operand
from monoplan.ir.dims import Dim
from monoplan.ir.types import DType, f32

if TYPE_CHECKING:
    from monoplan.codegen.cuda.render import Renderer

_INPUTS = ("x", "w", "norm_weight")
_HEADS = ("positions", "sin", "cos", "lengths", "valid")  # what the epilogue of heads reads beside the sums
_PIECE = 256  # parts of the workspace start at multiples of this


def _rounded(nbytes: Dim) -> Dim:
    return (nbytes + (_PIECE - 1)) // _PIECE * _PIECE


class LinearVariants:
    """Renders the functions of one product and gives its variants."""

    def __init__(self, renderer: Renderer, k: Linear, s: CudaLinear) -> None:
        self.renderer, self.k, self.s = renderer, k, s
        self.names: dict[str, Any] = linear(k)
        self.half = k.format.x_dtype

    def all(self) -> tuple[Variant, ...]:
        """Variants in order of preference."""
        found: list[Variant] = [self.one_row()] if self.s.row is not None else []
        low = 2 if found else 1
        for f in self.s.few:
            found.append(self.few(f, low))
            low = f.tiles * 8 + 1
        if self.s.many is not None:
            found.append(self.many(self.s.many, low))
            if self.s.many.least <= low:
                return tuple(found)
        return (*found, self.library(low) if self.s.library else self.tile())

    def _words(self, operands: tuple[Operand, ...]) -> list[tuple[str, Word]]:
        return [pointer_word(o) for o in operands if not o.view.is_virtual]

    @property
    def _inputs(self) -> list[tuple[str, Word]]:
        return self._words(tuple(o for o in self.k.operands if o.name in _INPUTS))

    @property
    def _others(self) -> list[tuple[str, Word]]:
        return self._words(tuple(o for o in (*self.k.operands, *self.k.scratch) if o.name not in _INPUTS))

    @property
    def _only_w(self) -> list[tuple[str, Word]]:
        return [w for w in self._inputs if w[1].operand is not None and w[1].operand.name == "w"]

    def one_row(self) -> Variant:
        """One row: a kernel that streams the weights."""
        k = self.k
        assert self.s.row is not None
        row = tuned(self.s.row, self.renderer.tuning.get(str(k.step), {}))
        words, epilogue = self._words((*k.operands, *k.scratch)), k.epilogue
        template = "linear_tiles_row" if k.format.tile else "linear_row"
        ahead = [k.operand(name) for name in _HEADS if k.has(name)] if k.epilogue == "heads" else []
        early = bool(ahead) and all(settled(self.renderer.plan, k, o, k.rows) for o in ahead)
        if whole_heads(k):  # no block has one
            words, epilogue = [*self._inputs, ("float *sums", Word("workspace"))], "sums"
        elif k.epilogue == "argmax":
            words.append(("uint64_t *candidates", Word("workspace")))
        elif k.epilogue == "normed":
            words += [("float *made", Word("workspace")), ("uint32_t *tickets", Word("tickets"))]
        elif k.epilogue == "routed":
            words.append(("uint32_t *tickets", Word("tickets")))
        found = {"ahead": early, "epilogue": epilogue, **self.names}
        function, all_words = self.renderer.function(k, template, words, s=row, **found)
        actions: list[Action] = [Launch(function, (row.grid, 1, 1), row.warps * 32, all_words, row_shared(k, row))]
        size = 4 * k.columns if epilogue == "normed" else 8 * row.grid
        if epilogue == "sums":
            actions += self._finish(Word("workspace"), f32, 1, 0, early)
            size = 4 * k.columns
        elif epilogue == "argmax":
            actions.append(self._best(row.grid, Word("workspace"), 1))
        return Variant("row", tuple(actions), (Between(k.rows, 1, 1),), size)

    def _best(self, count: int, candidates: Word, rows: Dim) -> Launch:
        """The best of the candidates of each row."""
        words = [
            *self._others,
            ("const uint64_t *candidates", candidates),
            ("const int64_t count", Word("number", offset=count)),
        ]
        function, all_words = self.renderer.function(self.k, "linear_best", words, **self.names)
        return Launch(function, (rows, 1, 1), 256, all_words)

    def _prepared(self) -> tuple[list[Action], Word, Dim]:
        """x normed and in the weights' type: actions that make it, where it is, and bytes of workspace."""
        k, x = self.k, self.k.operand("x")
        if self.s.prepare == "none":
            return [], Word("operand", x, offset=x.view.offset * x.dtype.itemsize), 0
        place = Word("workspace")
        others = [w for w in self._inputs if w[1].operand is not None and w[1].operand.name != "w"]
        words = [*others, (f"{C_TYPES[self.half.name]} *xs", place)]
        function, all_words = self.renderer.function(k, "linear_prepare", words, s=self.s, **self.names)
        size = _rounded(k.rows * (k.depth * self.half.itemsize))
        return [Launch(function, (k.rows, 1, 1), 256, all_words)], place, size

    def few(self, f: FewSchedule, low: int) -> Variant:
        """A few rows on tensor cores: partial sums, then the epilogue."""
        k = self.k
        actions, xs, used = self._prepared()
        sums = Word("workspace", offset=used)
        given = [*self._only_w, (f"const {C_TYPES[self.half.name]} *xs", xs), ("float *sums", sums)]
        function, words = self.renderer.function(k, "linear_few", given, s=f, **self.names)
        actions.append(Launch(function, (f.grid, f.splits, 1), f.warps * 32, words, few_shared(k, f)))
        end = used + k.rows * (4 * f.splits * k.columns)
        actions += self._finish(sums, f32, f.splits, end)
        size = self._room(end)
        return Variant(f"few{f.tiles * 8}", tuple(actions), (Between(k.rows, low, f.tiles * 8),), size)

    def _finish(self, sums: Word, dtype: DType, splits: int, after: Dim, ahead: bool = False) -> list[Launch]:
        """The epilogue over sums in memory; `after` is where the workspace behind them begins.

        Ahead: what it reads beside them was there before the kernels in front."""
        k, s = self.k, self.s.finish if dtype == f32 else self.s.finish_half
        words = [
            *self._others,
            (f"const {C_TYPES[dtype.name]} *sums", sums),
            ("const int64_t splits", Word("number", offset=splits)),
        ]
        if k.epilogue == "normed":
            words.append(("float *made", sums))
        candidates = Word("workspace", offset=_rounded(after))
        if k.epilogue == "argmax":
            words.append(("uint64_t *candidates", candidates))
        function, all_words = self.renderer.function(k, "linear_finish", words, s=s, ahead=ahead, **self.names)
        launch = Launch(function, s.grid(k.rows), 256, all_words)
        return (
            [launch, self._best(s.blocks, candidates, k.rows)] if k.epilogue == "argmax" else [launch, *self._choose()]
        )

    def _choose(self) -> list[Launch]:
        """The choice by scores that lie in memory, if there is one: a warp for each row."""
        k, threads = self.k, 256
        if k.epilogue != "routed":
            return []
        words = self._words(tuple(o for o in (*k.operands, *k.scratch) if o.name in ("scores", "share", "ids")))
        function, all_words = self.renderer.function(k, "linear_choose", words, threads=threads, **self.names)
        return [Launch(function, (ceil_div(k.rows * 32, threads), 1, 1), threads, all_words)]

    def _room(self, sums: Dim) -> Dim:
        """Bytes of workspace up to the end of the sums, and of candidates behind them."""
        return sums if self.k.epilogue != "argmax" else _rounded(sums) + self.k.rows * (64 * 8)

    def _expanded(self, used: Dim) -> tuple[list[Action], Word, Dim]:
        """Weights as rows of bf16: actions that expand tiles, where the rows are, and the end of the workspace."""
        k = self.k
        if not k.format.tile:
            return [], Word("operand", k.operand("w")), used
        place = Word("workspace", offset=used)
        given = [*self._only_w, ("mp_bf16 *expanded", place)]
        function, words = self.renderer.function(k, "linear_expand", given, **self.names)
        tiles = -(-k.columns // 16) * -(-k.depth // 256)
        return [Launch(function, (-(-tiles // 4), 1, 1), 128, words)], place, used + _rounded(k.columns * k.depth * 2)

    def library(self, low: int) -> Variant:
        """Many rows: the vendor's product; a plain result or a residual goes straight into place."""
        k, y = self.k, self.k.operand("y")
        actions, xs, used = self._prepared()
        expansion, w, used = self._expanded(used)
        actions += expansion
        if self.s.result != "finish":
            out = Word("operand", y, offset=y.view.offset * y.dtype.itemsize)
            add = None
            if self.s.result == "add":
                e = k.operand("e0")
                add = Word("operand", e, offset=e.view.offset * e.dtype.itemsize)
            bias = None
            if k.has("bias"):
                b = k.operand("bias")
                bias = Word("operand", b, offset=b.view.offset * b.dtype.itemsize)
            actions.append(Product(k.rows, k.columns, k.depth, xs, w, out, self.half, y.dtype, add, bias))
            return Variant("library", tuple(actions), (Between(k.rows, low),), used)
        kept = f32 if k.epilogue in ("argmax", "normed", "routed") else self.half
        sums = Word("workspace", offset=used)
        actions.append(Product(k.rows, k.columns, k.depth, xs, w, sums, self.half, kept))
        end = used + k.rows * (k.columns * kept.itemsize)
        actions += self._finish(sums, kept, 1, end)
        size = self._room(end)
        return Variant("library", tuple(actions), (Between(k.rows, low),), size)

    def many(self, given: WgmmaSchedule, low: int) -> Variant:
        """Many rows by Hopper's warpgroups, which have the sums in registers when the epilogue comes."""
        k, s = self.k, tuned(given, self.renderer.tuning.get(str(self.k.step), {}))
        actions, xs, used = self._prepared()
        expansion, w, used = self._expanded(used)
        weight = k.operand("w").view.buffer
        ahead = not expansion and "param" in (weight.kind, weight.table_kind)
        words = [
            ("MP_MAP x_map", replace(xs, boxes=Boxes(k.rows, k.depth, s.groups * 64))),
            ("MP_MAP w_map", replace(w, boxes=Boxes(k.columns, k.depth, s.columns))),
            *self._others,
        ]
        function, all_words = self.renderer.function(k, "linear_wgmma", words, s=s, ahead=ahead, **self.names)
        grid = (s.grid(k.rows, k.columns, self.renderer.plan.target.cores), 1, 1)
        launch = Launch(function, grid, s.threads, all_words, s.shared, s.splits)
        actions += [*expansion, launch, *self._choose()]
        return Variant("many", tuple(actions), (Between(k.rows, max(low, s.least)),), used)

    def tile(self) -> Variant:
        """Any number of rows, any type."""
        k = self.k
        actions, w, used = self._expanded(0)
        sums = Word("workspace", offset=used)
        inputs = self._inputs
        if actions:
            inputs = [i for i in inputs if i not in self._only_w] + [("const mp_bf16 *w", w)]
        function, words = self.renderer.function(k, "linear", [*inputs, ("float *sums", sums)], **self.names)
        actions.append(Launch(function, (-(-k.columns // 64), (k.rows + 63) // 64, 1), 256, words))
        end = used + k.rows * (4 * k.columns)
        return Variant("tile", (*actions, *self._finish(sums, f32, 1, end)), (), self._room(end))
