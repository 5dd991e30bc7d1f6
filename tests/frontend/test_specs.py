"""spec(): what is a size, and what the error says of what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from monoplan.frontend.specs import spec
from monoplan.ir.errors import ArgumentError, ParseError


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2, 3), "f32[2, 3]"),
        (("batch", "2*seq+1"), "f32[batch, 2*seq+1]"),
        ((np.int64(4), 0), "f32[4, 0]"),
        ((), "f32[]"),
    ],
)
def test_sizes_are_numbers_and_names(shape: tuple[Any, ...], text: str) -> None:
    assert str(spec(*shape)) == text


@pytest.mark.parametrize(
    ("shape", "what", "fix"),
    [
        ((-1, 3), "-1 at dimension 0", 'a name such as "batch": mp.spec("batch", 3)'),
        ((2, None), "None at dimension 1", 'a name such as "batch": mp.spec(2, "batch")'),
        ((np.int64(-1),), r"-1\)? at dimension 0", 'a name such as "batch"'),
        (("-1",), "'-1' at dimension 0", 'a name such as "batch"'),
        ((2.5, 3), "2.5 at dimension 0", 'a name such as "batch"'),
        ((True, 3), "True at dimension 0", "write a number"),
        (((2, 3),), r"\(2, 3\) at dimension 0", "mp.spec(2, 3)"),
        (([2, 3], 4), r"\[2, 3\] at dimension 0", "without parentheses"),
        ((2, np.float32), "numpy.float32'> at dimension 1", "write a number"),
    ],
    ids=lambda x: str(x) if isinstance(x, tuple) else "",
)
def test_what_is_no_size_is_refused(shape: tuple[Any, ...], what: str, fix: str) -> None:
    with pytest.raises(ArgumentError, match=f"spec: .*{what} is not a size") as caught:
        spec(*shape)
    assert fix in caught.value.fix and str(caught.value.where).startswith(__file__)


def test_a_name_that_is_none_is_refused_as_before() -> None:
    with pytest.raises(ParseError, match="a dimension"):
        spec("1.5")
