"""Weights in their kernels' layouts: every column is where the layout says, by the C library and without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from monoplan.codegen.schedule_linear import parse_layout
from monoplan.ir.types import bf16
from monoplan.runtime import packing
from monoplan.runtime.weights import pack

# layout, rows, depth: whole groups and groups that are filled up, depths that are no multiple of a vector
LAYOUTS = [
    ("panel16x2", 64, 24), ("panel16x2", 70, 37), ("panel8x4", 9, 5), ("panel32x3", 146, 130), ("panel16x1", 1, 1),
    ("panel16x2:gated", 64, 24), ("panel8x4:gated", 146, 67), ("panel32x4:gated", 20, 9),
    ("panel16x4:heads64", 192, 24), ("panel16x3:heads40", 200, 11), ("panel8x1:heads8", 24, 3),
]  # fmt: skip
TILES = [
    ("tiles32x2", 146, 96), ("tiles32x4:gated", 146, 64), ("tiles32x2:heads64", 192, 160),
    ("tiles32x3:heads80", 240, 32),
]  # fmt: skip
CASES = [(*case, dtype) for case in LAYOUTS for dtype in ("float32", "float16", "bfloat16")]
CASES += [(*case, "bfloat16") for case in TILES]


def row_of(column: int, count: int, layout: str) -> int:
    """The row of the weight that a column of all panels is, or -1: written down once more, one at a time."""
    panel, panels, group = parse_layout(layout)
    if group.startswith("heads"):
        dim = int(group.removeprefix("heads"))
        head, j = divmod(column, panel * panels)
        return head * dim + j if j < dim else -1
    if group == "gated":
        number, j = divmod(column, panel)
        row = number * (panel // 2) + j % (panel // 2)
        return -1 if row >= count // 2 else row + (count // 2 if j >= panel // 2 else 0)
    return column if column < count else -1


def read_column(packed: Any, column: int, layout: str) -> Any:
    """A column of a packed weight."""
    panel, _, _ = parse_layout(layout)
    number, j = divmod(column, panel)
    one = packed.reshape(-1, *packed.shape[-2:])[number]
    if layout.startswith("tiles"):
        return one.reshape(-1, 2, 16, 16, 2)[:, j // 16, :, j % 16, :].reshape(-1)
    if packed.dtype == bf16.numpy:  # beside the column half a panel away
        j = 2 * j if j < panel // 2 else 2 * (j - panel // 2) + 1
    return one[:, j]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("layout", "rows", "depth", "dtype"), CASES)
def test_every_column_is_in_its_place(
    layout: str, rows: int, depth: int, dtype: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(packing, "_library", lambda: None)
    w = np.random.default_rng(rows).standard_normal((rows, depth)).astype(dtype)
    packed = pack(w, layout)
    panel, panels, _ = parse_layout(layout)
    assert packed.shape[1:] == (panels, depth, panel)
    seen = []
    for column in range(packed.shape[0] * panels * panel):
        row = row_of(column, rows, layout)
        want = w[row] if row >= 0 else np.zeros(depth, w.dtype)
        assert read_column(packed, column, layout).tobytes() == want.tobytes(), (column, row)
        seen.append(row)
    assert sorted(r for r in seen if r >= 0) == list(range(rows))


def test_a_weight_at_an_odd_address() -> None:
    w = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    odd = np.frombuffer(b"x" + w.tobytes(), np.uint8)[1:].view(np.float32).reshape(w.shape)
    assert not odd.flags.aligned
    assert pack(odd, "panel16x2").tobytes() == pack(w, "panel16x2").tobytes()
