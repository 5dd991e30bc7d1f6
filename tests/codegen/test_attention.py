"""Attention on the CPU: every variant of every instruction set, and bits that depend on nothing but the row itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.driver import build_graph_executable
from monoplan.ir.errors import CompileError
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import bf16
from monoplan.runtime.machine.features import detect, levels, machine, read_cpu
from tests.codegen.attention_cases import (
    CASES,
    check_case,
    check_nan,
    check_neighbours,
    check_pages,
    check_pieces,
    check_unseen,
)
from tests.tolerances import check

PIECES = ("gqa", "group_of_3", "window", "bytes")
PAGES = [("gqa", 64), ("gqa_half", 64), ("group_of_3", 32), ("window", 16), ("odd_half", 7), ("bytes", 64), ("f16", 64)]
PAGES += [("double", 64)]
SLOW = ("flags_half", "bytes_of_8", "long_bytes", "bytes_window", "double_bytes")  # to build; CI has them
ROOT = Path(__file__).resolve().parents[2]
OTHERS = [isa for isa in (*levels(machine(), read_cpu()[1]), "tiles") if isa != detect().isa]


def check_columns() -> None:
    """Views in which the elements of a row are not neighbours: they are copied before they are used as vectors."""
    text = (
        "graph g(%q0: f32[b, s, 64, 6], %k0: bf16[b, 2, 64, 160], %v0: bf16[b, 2, 96, 160], %p: i64[b]) {\n"
        "  %q = transpose(%q0) {axes=(0, 1, 3, 2)} : f32[b, s, 6, 64]\n"
        "  %k = transpose(%k0) {axes=(0, 1, 3, 2)} : bf16[b, 2, 160, 64]\n"
        "  %v = transpose(%v0) {axes=(0, 1, 3, 2)} : bf16[b, 2, 160, 96]\n"
        "  %y = attention(%q, %k, %v, _, %p) {causal=True, scale=None, softcap=None, window=None, "
        'layout="bshd"} : f32[b, s, 6, 96]\n  return %y\n}'
    )
    graph, rng = parse_graph(text), np.random.default_rng(0)
    q = rng.normal(size=(2, 41, 64, 6)).astype(np.float32)
    k, v = (rng.normal(size=(2, 2, dim, 160)).astype(bf16.numpy) for dim in (64, 96))
    inputs = [q, k, v, np.array([0, 100])]
    want = interpret(graph, inputs, exact=True)[0]
    check(build_graph_executable(graph)(inputs)[0].astype(bf16.numpy), want, bf16.numpy, "matmul", 2.0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in SLOW else n for n in CASES])
def test_attention(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize(("name", "page"), PAGES)
def test_a_cache_in_pages(name: str, page: int) -> None:
    check_pages(CASES[name], page)


@pytest.mark.full
@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets(isa: str) -> None:
    program = """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from tests.codegen.attention_cases import (
            CASES, check_case, check_nan, check_neighbours, check_pages, check_pieces, check_unseen,
        )
        from tests.codegen.test_attention import PAGES, check_columns
        with ThreadPoolExecutor(2) as threads:  # compilers side by side
            list(threads.map(check_case, CASES.values()))
        for name in sys.argv[1:]:
            check_pieces(CASES[name])
        for name, page in PAGES:
            check_pages(CASES[name], page)
        check_nan(CASES["gqa_half"])
        check_unseen(CASES["window"])
        check_neighbours(CASES["long"])
        check_columns()
    """
    env = {**os.environ, "MONOPLAN_ISA": isa, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program), *PIECES]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", PIECES)
def test_a_prompt_in_pieces_gives_the_same_bits(name: str) -> None:
    check_pieces(CASES[name])


def test_rows_that_are_columns() -> None:
    check_columns()


def test_one_query_has_the_same_bits_in_any_batch() -> None:
    case = CASES["gqa_half"]
    run = build_graph_executable(case.graph())
    q, k, v, past = case.arrays(1, (399, 3, 140))
    together = run([q, k, v, past])[0]
    for row in range(3):
        part = slice(row, row + 1)
        np.testing.assert_array_equal(run([q[part], k[part], v[part], past[part]])[0], together[part])


@pytest.mark.parametrize("name", ["gqa", "gqa_half", "bytes"])
def test_a_nan_that_is_seen_is_not_lost(name: str) -> None:
    check_nan(CASES[name])


def test_a_nan_before_the_window_reaches_nobody() -> None:
    check_unseen(CASES["window"])


def test_one_query_has_the_same_bits_beside_another() -> None:
    check_neighbours(CASES["long"])


@pytest.mark.parametrize(("dim", "value_dim", "named"), [("d", "d", "values in a head is d"), (4, "e", "values is e")])
def test_a_head_of_symbolic_size_is_refused(dim: Any, value_dim: Any, named: str) -> None:
    class Attends(nn.Module):
        def forward(self, x: Any, v: Any) -> Any:
            return F.scaled_dot_product_attention(x, x, v)

    with pytest.raises(CompileError, match=named):
        mp.compile(Attends(), mp.spec("b", 2, "s", dim), mp.spec("b", 2, "s", value_dim))
