"""Decisions by shape and machine: every tile size and loop order that a template uses is chosen here."""

from __future__ import annotations

from dataclasses import dataclass

from monoplan.codegen.cpu.schedule_attention import choose_attention
from monoplan.codegen.cpu.schedule_linear import choose_linear
from monoplan.codegen.kernels import Attention, Kernel, Linear
from monoplan.codegen.target import Target


@dataclass(frozen=True, slots=True)
class Schedule:
    """Nothing to decide: rows are shared out among the threads."""


def choose(kernel: Kernel, target: Target) -> object:
    """The schedule of a kernel on a target."""
    if not target.is_cpu:
        from monoplan.codegen.cuda.schedule import choose_cuda

        return choose_cuda(kernel, target)
    if isinstance(kernel, Linear):
        return choose_linear(kernel, target)
    if isinstance(kernel, Attention):
        return choose_attention(kernel, target)
    return Schedule()
