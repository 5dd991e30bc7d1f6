"""The CPU's table of kernel families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monoplan.codegen.backend import BackEnd, Family, Schedule, Variables
from monoplan.codegen.cpu import variables as v
from monoplan.codegen.cpu.schedule_attention import choose_attention
from monoplan.codegen.cpu.schedule_conv import ConvSchedule, choose_conv
from monoplan.codegen.cpu.schedule_linear import choose_experts, choose_linear
from monoplan.codegen.cpu.variables import attention, linear
from monoplan.codegen.kernels import (
    Attention,
    Collective,
    Conv,
    Experts,
    Gather,
    Heads,
    KVUpdate,
    Linear,
    Matmul,
    Norm,
    Pointwise,
    Reduce,
    Rope,
    Route,
    Sample,
    Scan,
    Scatter,
    Softmax,
    Sort,
    Window,
)
from monoplan.codegen.lower.lowerer import Lowered
from monoplan.codegen.moves import handed_over, moved, residuals
from monoplan.codegen.target import Target


def _plain(variables: Callable[[Any], Variables]) -> Family:
    """A family without decisions."""
    return Family(schedule=lambda k, target: Schedule(), variables=lambda k, s: variables(k))


def _conv_schedule(k: Conv, target: Target) -> ConvSchedule:
    layout = k.operand("w").view.buffer.layout
    assert layout is not None
    return choose_conv(target, layout, k.weight, k.groups)


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
        Conv: Family(schedule=_conv_schedule, variables=v.conv, counters=True),
        Experts: Family(schedule=choose_experts, variables=v.experts, counters=True),
        Window: _plain(v.window),
        Attention: Family(schedule=choose_attention, variables=attention, counters=True),
        Gather: _plain(v.gather),
        Rope: _plain(v.rope),
        KVUpdate: _plain(v.kv_update),
        Heads: _plain(v.heads),
        Scan: _plain(v.scan),
        Scatter: _plain(v.scatter),
        Route: _plain(v.route),
        Sort: _plain(v.sort),
        Sample: _plain(v.sample),
        Collective: _plain(v.collective),
    },
    _prepare,
)
