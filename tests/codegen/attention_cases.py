"""Attention where its variants differ: several chunks and blocks, odd dimensions, caches with unwritten rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from monoplan.codegen.cpu.schedule_attention import few_queries
from monoplan.driver import build_graph_executable
from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.cache_rows import packed_rows, row_width
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.tolerances import LOW_BIT_EPSILON
from monoplan.ir.types import DTYPES, bf16
from monoplan.runtime.cpu.executable import host_target
from tests.tolerances import EPSILON, check


@dataclass(frozen=True)
class AttentionCase:
    """One attention op over a cache of `room` keys; sizes of the calls are (batch, queries, past of each row)."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    room: int
    dtype: str = "f32"
    q_dtype: str = "f32"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    mask: str = ""  # an element type
    sinks: str = ""
    layout: str = "bshd"
    calls: tuple[tuple[int, tuple[int, ...]], ...] = ((1, (299, 5)), (2, (0, 290)), (9, (0, 120)), (70, (0, 131)))

    def graph(self, name: str = "g") -> Graph:
        q = f"{self.q_dtype}[b, s, {self.heads}, {self.dim}]"
        y = f"{self.q_dtype}[b, s, {self.heads}, {self.value_dim}]"
        if self.layout == "bhsd":
            q, y = (t.replace(f"s, {self.heads}", f"{self.heads}, s") for t in (q, y))
        cache = f"{self.dtype}[b, {self.kv_heads}, {self.room}"
        mask = f", %m: {self.mask}[b, 1, s, {self.room}]" if self.mask else ""
        sinks = f", %z: {self.sinks}[{self.heads}]" if self.sinks else ""
        caches = f"%k: {cache}, {self.width(self.dim)}], %v: {cache}, {self.width(self.value_dim)}]"
        given = f"{'%m' if mask else '_'}, %p{', _, %z' if sinks else ''}"
        return parse_graph(
            f"graph {name}(%q: {q}, {caches}{mask}, %p: i64[b]{sinks}) {{\n"
            f"  %y = attention(%q, %k, %v, {given}) {{causal={self.causal}, scale=None, "
            f'softcap={self.softcap}, window={self.window}, layout="{self.layout}"}} : {y}\n  return %y\n}}'
        )

    def width(self, dim: int) -> int:
        return int(row_width(dim, DTYPES[self.dtype]))

    def paged(self, page: int) -> Graph:
        """The same over a cache in pages, which %t names."""
        text = print_graph(self.graph()).replace(f"[b, {self.kv_heads}, {self.room},", f"[n, {self.kv_heads}, {page},")
        return parse_graph(text.replace("%p: i64[b])", "%p: i64[b], %t: i32[b, w])").replace(", %p)", ", %p, %t)"))

    def arrays(self, queries: int, past: tuple[int, ...], seed: int = 0) -> list[Any]:
        """Inputs of a call; rows of the cache that no query sees hold NaN in K and V."""
        rng, batch = np.random.default_rng([seed, queries, *past]), len(past)

        def make(dtype: str, *shape: int) -> Any:
            made = rng.normal(size=shape)
            return packed_rows(made) if dtype == "i8" else made.astype(DTYPES[dtype].numpy)

        q = make(self.q_dtype, batch, queries, self.heads, self.dim)
        k = make(self.dtype, batch, self.kv_heads, self.room, self.dim)
        v = make(self.dtype, batch, self.kv_heads, self.room, self.value_dim)
        if self.layout == "bhsd":
            q = np.ascontiguousarray(np.swapaxes(q, 1, 2))
        found = [q, k, v]
        if self.mask == "bool":
            found.append(rng.random((batch, 1, queries, self.room)) < 0.7)
        elif self.mask:
            found.append(make(self.mask, batch, 1, queries, self.room))
        found.append(np.array(past, np.int64))
        return [*found, 2 * make(self.sinks, self.heads)] if self.sinks else found


CASES = {
    "gqa": AttentionCase(8, 2, 64, 64, 400),
    "gqa_half": AttentionCase(8, 2, 64, 64, 400, "bf16"),
    "group_of_3": AttentionCase(9, 3, 64, 64, 400, "bf16", "bf16"),
    "group_of_8": AttentionCase(16, 2, 128, 96, 340, "bf16", layout="bhsd", calls=((1, (339, 32, 0)), (2, (30, 254)))),
    "long": AttentionCase(24, 8, 32, 32, 4200, "bf16", calls=((1, (4199, 2100, 5)),)),
    "one_head": AttentionCase(1, 1, 32, 96, 303, "bf16"),
    "group_of_7": AttentionCase(7, 1, 80, 48, 310, "f16"),
    "odd_sizes": AttentionCase(6, 2, 20, 13, 301),
    "odd_half": AttentionCase(6, 3, 20, 13, 301, "f16", "f16", layout="bhsd"),
    "window": AttentionCase(4, 2, 64, 32, 400, "bf16", window=37),
    "long_window": AttentionCase(4, 2, 32, 32, 400, window=150),
    "softcap": AttentionCase(4, 2, 16, 16, 400, softcap=3.0),
    "sinks": AttentionCase(8, 2, 32, 32, 400, "bf16", "bf16", sinks="bf16"),
    "sinks_added": AttentionCase(4, 2, 16, 16, 400, softcap=3.0, sinks="f32"),
    "sinks_double": AttentionCase(4, 2, 16, 8, 301, "f64", "f64", sinks="f64"),
    "no_order": AttentionCase(4, 2, 64, 64, 400, "bf16", causal=False),
    "flags": AttentionCase(4, 2, 16, 16, 400, mask="bool"),
    "flags_half": AttentionCase(4, 2, 32, 32, 400, "bf16", mask="bool"),
    "added": AttentionCase(4, 1, 16, 16, 400, "bf16", mask="f32", layout="bhsd"),
    "f16": AttentionCase(9, 3, 64, 64, 400, "f16"),
    "f16_window": AttentionCase(4, 2, 32, 64, 400, "f16", "f16", window=37),
    "f16_flags": AttentionCase(4, 2, 64, 32, 400, "f16", mask="bool"),
    "bytes": AttentionCase(9, 3, 64, 64, 400, "i8"),
    "bytes_of_8": AttentionCase(16, 2, 128, 96, 340, "i8", "bf16", calls=((1, (339, 32, 0)), (2, (30, 254)))),
    "long_bytes": AttentionCase(4, 4, 32, 32, 4200, "i8", calls=((1, (4199, 2100, 5)),)),
    "odd_bytes": AttentionCase(6, 2, 20, 13, 301, "i8", layout="bhsd", mask="bool"),
    "bytes_window": AttentionCase(4, 2, 16, 32, 400, "i8", window=37, softcap=3.0),
    "double_bytes": AttentionCase(4, 2, 16, 8, 301, "i8", "f64", window=140),
    "double": AttentionCase(4, 2, 16, 8, 301, "f64", "f64", window=140),
}


def nan(cache: Any) -> Any:
    """What makes rows of a cache NaN: in 8 bits their scales."""
    return -1 if cache.dtype == np.int8 else np.nan


def check_case(case: AttentionCase, threads: int = 2) -> None:
    """Every call of a case against the interpreter in float64; unwritten rows of the cache must not matter."""
    graph = case.graph()
    run = build_graph_executable(graph)
    for queries, past in case.calls:
        inputs = case.arrays(queries, past)
        want = interpret(graph, inputs, exact=True)[0]
        for row, length in enumerate(past):
            for cache in inputs[1:3]:
                cache[row, :, length + queries :] = nan(cache)
        got = []
        for n in (1, threads):
            run.executable.threads = n
            got.append(run(inputs)[0])
        # Tile units read bf16: queries and weights are rounded as the cache is, whatever the result's type.
        kept = DTYPES[case.dtype].numpy if case.dtype == "bf16" and host_target().has_tiles else got[0].dtype
        # Integers of 15 bits, and two parts of bf16 on tile units.
        parts = case.dtype == "i8" or (case.dtype == "f16" and host_target().has_tiles)
        rough = LOW_BIT_EPSILON / EPSILON["f32"] if parts else 1.0
        check(got[0].astype(kept), want, kept, "matmul", 2.0 * rough)
        np.testing.assert_array_equal(*got, err_msg="the bits depend on the number of threads")
        if case.causal and queries > 1:  # a row of fewer tokens than its batch mates: what follows them is not written
            for row, length in enumerate(past):
                for cache in inputs[1:3]:
                    cache[row, :, length + queries // 2 :] = nan(cache)
            axis = 1 if case.layout == "bshd" else 2
            halves = [np.split(a, [queries // 2], axis)[0] for a in (run(inputs)[0], got[0])]
            np.testing.assert_array_equal(*halves, err_msg="a hidden key changes the result")


def check_pieces(case: AttentionCase) -> None:
    """Neither the pieces of a prompt nor its batch mates change a row's bits; a few queries have those of one."""
    run = build_graph_executable(case.graph())
    q, k, v, _ = case.arrays(201, (0, 0))
    whole = run([q, k, v, np.zeros(2, np.int64)])[0]
    count = few_queries(host_target())
    some = 64 + count + 1
    for start, stop in ((0, 64), (64, some), (some, 201)):
        piece = run([np.ascontiguousarray(q[:, start:stop]), k, v, np.full(2, start)])[0]
        np.testing.assert_array_equal(piece, whole[:, start:stop])
    few = run([np.ascontiguousarray(q[:, 150 : 150 + count]), k, v, np.full(2, 150)])[0]
    for i in range(count):
        one = run([np.ascontiguousarray(q[:, 150 + i : 151 + i]), k, v, np.full(2, 150 + i)])[0]
        np.testing.assert_array_equal(one, few[:, i : i + 1])
    alone = run([q[1:], k[1:], v[1:], np.zeros(1, np.int64)])[0]
    np.testing.assert_array_equal(alone, whole[1:])


def in_pages(caches: list[Any], page: int, rng: np.random.Generator) -> tuple[list[Any], Any]:
    """Caches [batch, heads, room, dim] cut into pages that lie in any order, and the table that names them."""
    batch, _, room, _ = caches[0].shape
    width = -(-room // page)
    table = (rng.permutation(batch * width) + 1).astype(np.int32).reshape(batch, width)
    made = []
    for cache in caches:
        _, heads, _, dim = cache.shape
        pages = np.full((batch * width + 2, heads, page, dim), nan(cache), cache.dtype)
        for b, i in np.ndindex(batch, width):
            rows = cache[b, :, i * page : (i + 1) * page]
            pages[table[b, i], :, : rows.shape[1]] = rows
        made.append(pages)
    return made, table


def check_pages(case: AttentionCase, page: int) -> None:
    """A cache in pages gives the bits of the same cache in one piece, and a page that is not there is refused."""
    whole, paged = build_graph_executable(case.graph()), build_graph_executable(case.paged(page))
    rng = np.random.default_rng(page)
    for queries, past in case.calls:
        q, k, v, p = case.arrays(queries, past)
        (pk, pv), table = in_pages([k, v], page, rng)
        table[:, -(-(max(past) + queries) // page) :] = -1  # behind the text a table holds anything
        want, got = whole([q, k, v, p])[0], paged([q, pk, pv, p, table])[0]
        if case.dtype == "f64":  # a plain loop: the compiler adds in another order where rows are not side by side
            check(got, want, np.float64, "matmul")
        elif host_target().has_tiles and queries <= 2:  # they read one piece on tile units, and pages by vectors
            check(got.astype(bf16.numpy), want.astype(np.float64), bf16.numpy, "matmul", 2.0)
        else:
            np.testing.assert_array_equal(got, want)
        for wrong in (-1, len(pk)):
            bad = table.copy()
            bad[-1, 0] = wrong
            with pytest.raises(ArgumentError, match=str(wrong)):
                paged([q, pk, pv, p, bad])


def check_nan(case: AttentionCase) -> None:
    """A NaN in a key or a value reaches every query that sees it, and no other."""
    run = build_graph_executable(case.graph())
    half = case.heads // case.kv_heads
    for queries, first in ((1, 0), (40, 0), (40, 7)):
        for which in (1, 2):
            inputs = case.arrays(queries, (200, 200))
            row = inputs[which][0, 1, 200 + first if first else 150]
            row[-4 if case.dtype == "i8" else 3 :] = nan(row)
            got = run(inputs)[0]
            assert np.isnan(got[0, first:, half : 2 * half]).any(-1).all()
            assert not np.isnan(got[0, :first]).any() and not np.isnan(got[0, :, :half]).any()
            assert not np.isnan(got[1]).any()


def check_unseen(case: AttentionCase) -> None:
    """A NaN that lies before the window of every query reaches none, though it lies in a block that they read."""
    run = build_graph_executable(case.graph())
    inputs = case.arrays(40, (200, 200))
    for cache in inputs[1:3]:
        cache[:, :, 150] = nan(cache)
    assert not np.isnan(run(inputs)[0]).any()


def check_neighbours(case: AttentionCase) -> None:
    """A query has the same bits alone and beside the next one, also where that one's keys are dealt out otherwise."""
    run = build_graph_executable(case.graph())
    q, k, v, past = case.arrays(2, (2046, 4094, 255))
    both = run([q, k, v, past])[0]
    np.testing.assert_array_equal(run([np.ascontiguousarray(q[:, :1]), k, v, past])[0], both[:, :1])
    np.testing.assert_array_equal(run([np.ascontiguousarray(q[:, 1:]), k, v, past + 1])[0], both[:, 1:])
