"""Calls of a declared plan with arguments in another structure: what is taken, and what the error names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend.module import Module
from monoplan.ir.errors import ArgumentError


class Weighted(Module):
    """Not symmetric in the parts of its dicts."""

    def forward(self, x: Any, parts: Any, extra: Any = None) -> Any:
        y = x * parts["by"] + parts["more"][0] - parts["more"][1]
        return y if extra is None else y + extra["c"] * 10 + extra["d"]


X, BY, A, B = (np.full(3, value, np.float32) for value in (1, 2, 30, 400))
PARTS = {"by": mp.spec(3), "more": (mp.spec(3), mp.spec(3))}
EXTRA = {"c": mp.spec(3), "d": mp.spec(3)}


@pytest.fixture(scope="module")
def plain() -> Any:
    return mp.compile(Weighted(), mp.spec(3), PARTS)


@pytest.fixture(scope="module")
def full() -> Any:
    return mp.compile(Weighted(), mp.spec(3), PARTS, EXTRA)


def test_the_keys_of_a_dict_may_come_in_any_order(plain: Any, full: Any) -> None:
    for _ in range(3):
        assert plain(X, {"more": (A, B), "by": BY}).tolist() == plain(X, {"by": BY, "more": (A, B)}).tolist()
        assert plain(X, {"more": ([30.0] * 3, B), "by": 2.0 * X}).tolist() == [2 + 30 - 400] * 3
    assert plain.stats.compiles == 1
    parts = {"by": X, "more": (X, X)}
    # One array for both keys looks the same in either order: nothing may be learned of such a call.
    assert full(X, parts, {"d": X, "c": X}).tolist() == [12] * 3
    for _ in range(2):
        assert full(X, parts, {"d": A, "c": B}).tolist() == [1 + 4000 + 30] * 3
        assert full(X, parts, {"c": B, "d": A}).tolist() == [1 + 4000 + 30] * 3


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((X, None), "argument parts: expected a dict with by, more, got None"),
        ((None, {}), "argument x: expected an array f32[3], got None"),
        ((X, X), "argument parts: expected a dict with by, more, got an array float32[3]"),
        ((X, {"by": BY}), "argument parts.more is missing: expected a tuple of 2, as the plan was compiled with"),
        (
            (X, {"more": (A, B)}),
            "argument parts.by is missing: expected an array f32[3], as the plan was compiled with",
        ),
        (
            (X, {"by": BY, "more": (A, B), "most": B}),
            "argument parts.most is one too many: got an array float32[3], but the plan was compiled without it",
        ),
        ((X, {"by": BY, "more": (A, B, B)}), "argument parts.more: expected a tuple of 2, got a tuple of 3"),
        ((X, {"by": BY, "more": [A, B]}), "argument parts.more: expected a tuple of 2, got a list of 2"),
        ((X, {"by": BY, "more": (A, None)}), "argument parts.more.1: expected an array f32[3], got None"),
        ((X, {"by": BY, "more": "no"}), "argument parts.more: expected a tuple of 2, got 'no'"),
        ((X, {"by": None, "more": (A, B)}), "argument parts.by: expected an array f32[3], got None"),
        (
            (X, {"by": BY, "more": (A, B)}, None),
            "argument extra is one too many: got None, but the plan was compiled without it",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_named(plain: Any, args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plain(*args)
    assert str(caught.value).splitlines()[0] == text


def test_a_missing_argument_is_named(full: Any) -> None:
    with pytest.raises(ArgumentError, match="argument extra is missing: expected a dict with c, d.*\n.*give it"):
        full(X, {"by": BY, "more": (A, B)})


class Doubled(Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = mp.nn.Parameter(np.full(3, 2, np.float32))
        self.register_buffer("offset", mp.Tensor(np.zeros(3, np.float32)))

    def forward(self, x: Any) -> Any:
        return x * self.scale + self.offset


MASKED = np.ma.masked_array(X, [False, True, False])


@pytest.mark.parametrize(
    "use",
    [
        lambda: mp.Tensor(MASKED),
        lambda: mp.Tensor(X) + MASKED,
        lambda: mp.nn.Parameter(MASKED),
        lambda: Doubled()(MASKED),
        lambda: mp.compile(Doubled())(MASKED),
        lambda: mp.compile(Doubled(), MASKED),
        lambda: mp.compile(Doubled(), mp.spec(3))(MASKED),
        lambda: mp.compile(Doubled(), mp.spec(3)).verify(MASKED),
        lambda: Doubled().load_state_dict({"scale": MASKED, "offset": X}),
        lambda: Doubled().load_parameter("offset", MASKED),
        lambda: Doubled().load_parameter_from_blob("scale", MASKED),
    ],
)
def test_masked_arrays_are_refused(use: Any) -> None:
    with pytest.raises(ArgumentError, match="a masked array can't be used") as caught:
        use()
    assert "x.filled(0)" in str(caught.value)


def test_other_classes_of_arrays_are_taken_as_arrays() -> None:
    class Marked(np.ndarray[Any, Any]):
        pass

    fast = mp.compile(Doubled(), mp.spec("n", 3))
    for x in (np.ones((2, 3), np.float32).view(Marked), np.asmatrix(np.ones((2, 3), np.float32))):
        for y in (fast(x), mp.compile(Doubled())(x), mp.Tensor(x).numpy()):
            assert type(y) is np.ndarray and y.shape == (2, 3)
