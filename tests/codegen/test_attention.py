"""Attention on the CPU: every variant of every instruction set, and bits that depend on nothing but the row itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from monoplan.build import build_graph_executable
from monoplan.runtime.features import detect, levels, machine, read_cpu
from tests.codegen.attention_cases import CASES, check_case, check_nan, check_pieces

PIECES = ("gqa", "group_of_3", "window")
ROOT = Path(__file__).resolve().parents[2]
OTHERS = [isa for isa in (*levels(machine(), read_cpu()[1]), "tiles") if isa != detect().isa]


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets(isa: str) -> None:
    program = """
        import sys
        from tests.codegen.attention_cases import CASES, check_case, check_nan, check_pieces
        for case in CASES.values():
            check_case(case)
        for name in sys.argv[1:]:
            check_pieces(CASES[name])
        check_nan(CASES["gqa_half"])
    """
    env = {**os.environ, "MONOPLAN_ISA": isa, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program), *PIECES]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", PIECES)
def test_a_prompt_in_pieces_gives_the_same_bits(name: str) -> None:
    check_pieces(CASES[name])


def test_one_query_has_the_same_bits_in_any_batch() -> None:
    case = CASES["gqa_half"]
    run = build_graph_executable(case.graph())
    q, k, v, past = case.arrays(1, (399, 3, 140))
    together = run([q, k, v, past])[0]
    for row in range(3):
        part = slice(row, row + 1)
        np.testing.assert_array_equal(run([q[part], k[part], v[part], past[part]])[0], together[part])


@pytest.mark.parametrize("name", ["gqa", "gqa_half"])
def test_a_nan_that_is_seen_is_not_lost(name: str) -> None:
    check_nan(CASES[name])
