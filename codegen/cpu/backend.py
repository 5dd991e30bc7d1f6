"""The CPU's table of kernel families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from monoplan.codegen import kernels
from monoplan.codegen.backend import BackEnd, Family, Schedule, Variables
from monoplan.codegen.cpu import variables as v
from monoplan.codegen.cpu.schedule_attention import choose_attention, on_tiles
from monoplan.codegen.cpu.schedule_conv import ConvSchedule, choose_conv
from monoplan.codegen.cpu.schedule_linear import choose_experts, choose_linear
from monoplan.codegen.cpu.variables import attention, linear
from monoplan.codegen.kernels import Kernel
from monoplan.codegen.lower.attention import tile_scratch
from monoplan.codegen.lower.lowerer import Lowered
from monoplan.codegen.moves import attended, handed_over, map_kernels, moved, residuals
from monoplan.codegen.target import Target
from monoplan.codegen.views import Buffer, View, whole
from monoplan.ir.dims import Dim
from monoplan.ir.types import DType, product


def _plain(variables: Callable[[Any], Variables]) -> Family:
    """A family without decisions."""
    return Family(schedule=lambda k, target: Schedule(), variables=lambda k, s: variables(k))


def _conv_schedule(k: kernels.Conv, target: Target) -> ConvSchedule:
    layout = k.operand("w").view.buffer.layout
    assert layout is not None
    return choose_conv(target, layout, k.weight, k.groups)


def _prepare(lowered: Lowered, target: Target) -> Lowered:
    lowered = _attended_on_tiles(lowered, target) if target.has_tiles else lowered
    lowered = moved(lowered, residuals(lowered.items))
    return moved(lowered, handed_over(lowered.items, target))


def _attended_on_tiles(lowered: Lowered, target: Target) -> Lowered:
    """Attention without a cache in bf16, with the memory that its tiles need."""
    lowered = moved(lowered, attended(lowered.items, lambda k: on_tiles(k, target)))

    def with_scratch(k: Kernel) -> Iterator[Kernel]:
        if isinstance(k, kernels.Attention) and all(o.name != "k_tiles" for o in k.scratch):
            name = k.operand("y").view.buffer.name
            yield replace(k, scratch=(*k.scratch, *tile_scratch(k, target, partial(_scratch, name))))
        else:
            yield k

    return replace(lowered, items=map_kernels(lowered.items, with_scratch))


def _scratch(stem: str, name: str, dtype: DType, shape: Sequence[Dim]) -> View:
    return whole(Buffer(f"{stem}_{name}", dtype, product(shape), "scratch"), shape)


CPU = BackEnd(
    {
        kernels.Pointwise: _plain(v.pointwise),
        kernels.Reduce: _plain(v.reduce),
        kernels.Norm: _plain(v.norm),
        kernels.Softmax: _plain(v.softmax),
        kernels.Matmul: _plain(v.matmul),
        kernels.Linear: Family(schedule=choose_linear, variables=lambda k, s: {"m": linear(k, s)}, counters=True),
        kernels.Conv: Family(schedule=_conv_schedule, variables=v.conv, counters=True),
        kernels.Experts: Family(schedule=choose_experts, variables=v.experts, counters=True),
        kernels.Window: _plain(v.window),
        kernels.Attention: Family(schedule=choose_attention, variables=attention, counters=True),
        kernels.Gather: _plain(v.gather),
        kernels.Rope: _plain(v.rope),
        kernels.KVUpdate: _plain(v.kv_update),
        kernels.Heads: _plain(v.heads),
        kernels.Latent: _plain(v.latent),
        kernels.Scan: _plain(v.scan),
        kernels.Scatter: _plain(v.scatter),
        kernels.Route: _plain(v.route),
        kernels.Sort: _plain(v.sort),
        kernels.Sample: _plain(v.sample),
        kernels.Collective: _plain(v.collective),
    },
    _prepare,
)
