"""Sampling against a plain Python sampler, and its corners."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monoplan.ir.types import FLOATS, DType, tensor_type
from tests.ir.support import infer, refuses, run
from tests.tolerances import check


def by_hand(logits: list[float], u: float, top_p: float, top_k: int, temperature: float, min_p: float) -> set[int]:
    """The ids that may be drawn: more than one where u lies within rounding of a boundary."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature <= 0:
        return {order[0]}
    if top_k > 0:
        order = order[:top_k]
    p = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    total, running, count = math.fsum(p), 0.0, 0
    for weight in p:
        running, count = running + weight, count + 1
        if top_p < 1 and running >= top_p * total:
            break
    kept = [(i, w) for i, w in list(zip(order, p, strict=True))[:count] if w >= min_p * p[0]]
    total, running, found = math.fsum(w for _, w in kept), 0.0, set()
    for i, w in kept:
        low, running = running, running + w
        if low - 1e-9 * total <= u * total < running + 1e-9 * total:
            found.add(i)
    return found or {kept[-1][0]}


LOGITS = st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=12)
CONTROLS = st.tuples(
    st.floats(0, 0.999),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0.0, 0.2, 1.0]),
)


@given(LOGITS, CONTROLS)
def test_against_a_plain_sampler(logits: list[float], controls: tuple[float, float, int, float, float]) -> None:
    u, top_p, top_k, temperature, min_p = controls
    got = run("random_sample", np.array(logits), *map(np.asarray, (u, top_p, top_k, temperature, min_p)))
    assert int(got) in by_hand(logits, *controls)


def sample(
    logits: Any, u: Any = 0.5, top_p: Any = 1.0, top_k: Any = 0, temperature: Any = 1.0, min_p: Any = None
) -> Any:
    floats = [np.asarray(v, np.float32) for v in (u, top_p)]
    least = None if min_p is None else np.asarray(min_p, np.float32)
    return run(
        "random_sample",
        np.asarray(logits, np.float32),
        *floats,
        np.asarray(top_k),
        np.asarray(temperature, np.float32),
        least,
    )


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert sample([1.0, 3.0, 3.0], temperature=0.0) == 1
    assert sample([1.0, 3.0, 3.0], temperature=-1.0, u=0.99) == 1
    assert sample([1.0, 3.0, 3.0], top_k=1, u=0.99) == 1


def test_corners() -> None:
    even = [0.0, 0.0, 0.0, 0.0]
    assert [int(sample(even, u=u)) for u in (0.0, 0.24, 0.25, 0.5, 0.999)] == [0, 0, 1, 2, 3]
    assert sample(even, u=1.0) == 3, "a random value of 1 stays inside"
    assert (
        sample(even, u=0.9, top_k=2) == 1 and sample(even, u=0.9, top_k=99) == 3 and sample(even, u=0.9, top_k=-1) == 3
    )
    assert sample(even, u=0.9, top_p=0.0) == 0 and sample(even, u=0.9, top_p=0.5) == 1
    assert sample([0.0, -math.inf, -math.inf], u=0.999) == 0, "an id of probability zero is never drawn"
    assert sample([5.0, 4.0, 0.0], u=0.999, min_p=0.3) == 1 and sample([5.0, 4.0], u=0.999, min_p=1.0) == 0
    assert sample([0.0, 1000.0], u=0.9, temperature=1e-3) == 1
    assert sample([7.0], u=0.3) == 0


def test_rows_have_their_own_controls() -> None:
    logits = np.tile(np.array([0.0, 1.0, 2.0], np.float32), (3, 1))
    got = sample(logits, u=[0.0, 0.99, 0.99], top_k=[0, 1, 0], temperature=[1.0, 1.0, 1.0])
    assert got.tolist() == [2, 2, 0] and got.dtype == np.int64
    assert sample(logits[None], temperature=0.0).shape == (1, 3)


def test_types() -> None:
    f, i = tensor_type("f32"), tensor_type("i64")
    logits = tensor_type("bf16", "b", 100)
    assert infer("random_sample", logits, tensor_type("f32", "b"), f, i, f) == tensor_type("i64", "b")
    refuses("top_k must be an integer", "random_sample", logits, f, f, f, f)
    refuses("axis 1 of f32\\[b, 0\\] has no elements", "random_sample", tensor_type("f32", "b", 0), f, f, i, f)
    refuses("top_p must be a float", "random_sample", logits, f, i, i, f)
    refuses("does not broadcast", "random_sample", logits, tensor_type("f32", "c"), f, i, f)
    # One row of logits does not become three.
    refuses("does not broadcast", "random_sample", tensor_type("f32", 1, 9), tensor_type("f32", 3), f, i, f)
    refuses("logits must be floats", "random_sample", i, f, f, i, f)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_repetition_penalty(dtype: DType, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((2, 6)).astype(dtype.numpy)
    history = np.array([[1, 1, 4, 0], [5, 2, -1, 9]])
    counts, penalty = np.array([3, 4], np.int32), np.array([1.5, 2.0], np.float32)
    wanted = logits.astype(np.float64)
    for b, ids in enumerate(({1, 4}, {5, 2})):  # ids outside of the vocabulary are padding
        for i in ids:
            x = wanted[b, i]
            wanted[b, i] = x / penalty[b] if x > 0 else x * penalty[b]
    check(run("repetition_penalty", logits, history, counts, penalty), wanted, dtype, "pointwise")


def test_repetition_penalty_refusals() -> None:
    logits, history = tensor_type("f32", "b", 9), tensor_type("i64", "b", 4)
    n, p = tensor_type("i32", "b"), tensor_type("f32", "b")
    refuses("history must be integers", "repetition_penalty", logits, tensor_type("f32", "b", 4), n, p)
    refuses(r"must be \[batch\]", "repetition_penalty", logits, history, tensor_type("i32"), p)
    refuses("integer counts, float penalty", "repetition_penalty", logits, history, p, p)
    refuses("logits must be floats", "repetition_penalty", tensor_type("f32", 9), history, n, p)
