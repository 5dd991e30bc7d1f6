"""Attention on the CPU: every variant of every instruction set, and bits that depend on nothing but the row itself."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from monoplan.build import build_graph_executable
from monoplan.runtime.features import detect, levels, machine, read_cpu
from tests.codegen.attention_cases import CASES, check_case

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [isa for isa in (*levels(machine(), read_cpu()[1]), "tiles") if isa != detect().isa]


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets(isa: str) -> None:
    program = """
        from tests.codegen.attention_cases import CASES, check_case
        for case in CASES.values():
            check_case(case)
    """
    env = {**os.environ, "MONOPLAN_ISA": isa, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["gqa", "group_of_3", "window"])
def test_a_prompt_in_pieces_gives_the_same_bits(name: str) -> None:
    """Blocks of keys lie at fixed places, so neither the pieces of a prompt nor its batch mates change a row."""
    case = CASES[name]
    run = build_graph_executable(case.graph())
    q, k, v, _ = case.arrays(201, (0, 0))
    whole = run([q, k, v, np.zeros(2, np.int64)])[0]
    for start, stop in ((0, 64), (64, 67), (67, 201)):
        piece = run([np.ascontiguousarray(q[:, start:stop]), k, v, np.full(2, start)])[0]
        np.testing.assert_array_equal(piece, whole[:, start:stop])
    alone = run([q[1:], k[1:], v[1:], np.zeros(1, np.int64)])[0]
    np.testing.assert_array_equal(alone, whole[1:])


def test_one_query_has_the_same_bits_in_any_batch() -> None:
    case = CASES["gqa_half"]
    run = build_graph_executable(case.graph())
    q, k, v, past = case.arrays(1, (399, 3, 140))
    together = run([q, k, v, past])[0]
    for row in range(3):
        part = slice(row, row + 1)
        np.testing.assert_array_equal(run([q[part], k[part], v[part], past[part]])[0], together[part])


def test_a_nan_that_is_seen_is_not_lost() -> None:
    for queries in (1, 40):
        case = dataclasses.replace(CASES["gqa_half"], calls=())
        run = build_graph_executable(case.graph())
        for which in (1, 2):
            inputs = case.arrays(queries, (200, 200))
            inputs[which][0, 1, 150, 3] = np.nan
            got = run(inputs)[0]
            assert np.isnan(got[0, :, 4:]).any(-1).all() and not np.isnan(got[0, :, :4]).any()
            assert not np.isnan(got[1]).any()
