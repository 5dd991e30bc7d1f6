"""Decisions by shape and machine: every tile size and loop order that a template uses is chosen here."""

from __future__ import annotations

from dataclasses import dataclass

from monoplan.codegen.kernels import Attention, Kernel, Linear
from monoplan.codegen.schedule_attention import choose_attention
from monoplan.codegen.target import Target
from monoplan.ir.types import TensorType, bf16

CHUNK = 512  # rows whose sums wait in L2 between slices of k


@dataclass(frozen=True, slots=True)
class Schedule:
    """Nothing to decide: rows are shared out among the threads."""


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """How a packed product runs: groups of `panels` panels make one epilogue; `streams` panels are read at once."""

    panel: int  # columns in a panel
    panels: int  # panels in a group
    groups: int
    streams: int  # panels read side by side when there is one row
    row_blocks: tuple[int, ...]
    vectors: int  # vectors in a panel
    ahead: int  # rows of a panel that are asked for before they are read
    tiles: bool = False  # many rows run on bf16 tile units
    chunk: int = CHUNK  # rows whose sums wait between slices of k
    deep: int = 512  # k of a slice: 32 KB of weights, which stay in L1

    @property
    def width(self) -> int:
        """Columns of a group, padding included."""
        return self.panel * self.panels

    @property
    def block(self) -> int:
        return self.row_blocks[-1]


def choose(kernel: Kernel, target: Target) -> object:
    """The schedule of a kernel on a target."""
    if not target.is_cpu:
        from monoplan.codegen.schedule_cuda import choose_cuda

        return choose_cuda(kernel, target)
    if isinstance(kernel, Linear):
        return _linear(kernel, target)
    if isinstance(kernel, Attention):
        return choose_attention(kernel, target)
    return Schedule()


def linear_layout(target: Target, weight: TensorType, epilogue: str, head_dim: int = 0) -> str:
    """How a weight is packed for an epilogue: `panel16x2`, with what a group means after a colon; on a GPU `rows`.

    `pairs` in place of `panel`: neighbours in k lie side by side, as bf16 tile units read them.
    """
    if not target.is_cpu:  # row-major; rows that an epilogue needs together are neighbours
        return {"heads": f"rows:heads{head_dim}", "gated": "rows:gated"}.get(epilogue, "rows")
    depth = weight.shape[1]
    tiles = target.has_tiles and weight.dtype == bf16 and isinstance(depth, int) and depth % 32 == 0
    kind = "pairs" if tiles else "panel"
    # Eight independent sums hide the latency of a fused multiply-add on every machine we know.
    wide = max(1, 8 * target.lanes // target.panel)
    if epilogue == "heads":
        return f"{kind}{target.panel}x{-(-head_dim // target.panel)}:heads{head_dim}"
    if epilogue == "gated":
        return f"{kind}{target.panel}x{max(wide, 2)}:gated"
    return f"{kind}{target.panel}x{wide}"


def parse_layout(layout: str) -> tuple[int, int, str]:
    """Columns in a panel, panels in a group, and what a group is."""
    shape, _, group = layout.partition(":")
    panel, panels = shape.removeprefix("panel").removeprefix("pairs").split("x")
    return int(panel), int(panels), group


def _linear(k: Linear, target: Target) -> LinearSchedule:
    panel, panels, group = parse_layout(k.operand("w").view.buffer.layout)
    if k.epilogue == "heads":
        groups = k.heads + 2 * k.kv_heads
    elif k.epilogue == "gated":
        groups = -(-(k.columns // 2) // (panel * (panels // 2)))
    else:
        groups = -(-k.columns // (panel * panels))
    vectors = panel // target.lanes
    wide = max(1, 8 // vectors)
    streams = wide if panels % wide == 0 else 1
    w = k.operand("w")
    # One block of 2 KB ahead hides the latency of memory and leaves L1 room; less would come late, more too early.
    ahead = max(2, 2048 // (panel * w.dtype.itemsize))
    tiles = w.view.buffer.layout.startswith("pairs")
    return LinearSchedule(panel, panels, groups, streams, target.row_blocks, vectors, ahead, tiles)
