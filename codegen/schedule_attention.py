"""Decisions for attention on the CPU: how many queries share a pass over the keys, and how the keys are cut."""

from __future__ import annotations

from dataclasses import dataclass

from monoplan.codegen.kernels import Attention
from monoplan.codegen.target import Target


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """Queries that share one pass over the keys, and keys whose scores are kept at a time."""

    queries: int
    keys: int
    tiled: bool  # whether many queries run as register tiles (f32 sums)
    panel: int
    block: int  # rows of a tile


def choose_attention(k: Attention, target: Target) -> AttentionSchedule:
    """The schedule of an attention kernel on a CPU."""
    # About 32 rows share each block of keys: enough to pay for transposing it, and the strip still fits L1 and L2.
    queries = max(1, 32 // (k.heads // k.kv_heads))
    tiled = all(o.dtype.bits <= 32 for o in k.operands if o.name in ("q", "k", "v"))
    return AttentionSchedule(queries, 64, tiled, target.panel, target.row_blocks[-1])
