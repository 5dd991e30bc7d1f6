"""The CPU's table of kernel families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monoplan.codegen.backend import BackEnd, Family, Schedule, Variables
from monoplan.codegen.cpu import variables as v
from monoplan.codegen.cpu.schedule_attention import choose_attention
from monoplan.codegen.cpu.schedule_linear import choose_linear
from monoplan.codegen.cpu.variables import attention, linear
from monoplan.codegen.kernels import (
    Attention,
    Collective,
    Gather,
    KVUpdate,
    Linear,
    Matmul,
    Norm,
    Pointwise,
    Reduce,
    Rope,
    Sample,
    Scan,
    Softmax,
    Sort,
)
from monoplan.codegen.lower.lowerer import Lowered
from monoplan.codegen.moves import handed_over, moved, residuals
from monoplan.codegen.target import Target


def _plain(variables: Callable[[Any], Variables]) -> Family:
    """A family without decisions."""
    return Family(schedule=lambda k, target: Schedule(), variables=lambda k, s: variables(k))


def _prepare(lowered: Lowered, target: Target) -> Lowered:
    lowered = moved(lowered, residuals(lowered.items))
    return moved(lowered, handed_over(lowered.items, target))


CPU = BackEnd(
    {
        Pointwise: _plain(v.pointwise),
        Reduce: _plain(v.reduce),
        Norm: _plain(v.norm),
        Softmax: _plain(v.softmax),
        Matmul: _plain(v.matmul),
        Linear: Family(schedule=choose_linear, variables=lambda k, s: {"m": linear(k, s)}, counters=True),
        Attention: Family(schedule=choose_attention, variables=attention, counters=True),
        Gather: _plain(v.gather),
        Rope: _plain(v.rope),
        KVUpdate: _plain(v.kv_update),
        Scan: _plain(v.scan),
        Sort: _plain(v.sort),
        Sample: _plain(v.sample),
        Collective: _plain(v.collective),
    },
    _prepare,
)
