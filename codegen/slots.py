"""Where the slots of an arena lie: the part of codegen/memory.py that every run needs, and nothing else with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monoplan.ir.dims import Dim, evaluate

ALIGN = 64


def slot_offsets(slots: Sequence[Sequence[Dim]], symbols: Mapping[str, int]) -> tuple[list[int], int]:
    """Byte offset of each slot and the total, for these values of the symbols."""
    offsets, end = [], 0
    for sizes in slots:
        offsets.append(end)
        end += -(-max(0, *(evaluate(s, symbols) for s in sizes)) // ALIGN) * ALIGN
    return offsets, end
