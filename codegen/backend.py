"""What a back end provides: a row for each kernel family, and its own changes to lowered kernels.

A new family is one dataclass in kernels.py, one row in the table of each back end, and one template named after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monoplan.codegen.kernels import Kernel
from monoplan.codegen.lower.lowerer import Lowered
from monoplan.codegen.target import Target
from monoplan.ir.lazy_dataclass import dataclass

Variables = dict[str, Any]  # names and text that a template gets beside the kernel and its schedule


@dataclass(frozen=True, slots=True)
class Schedule:
    """Of a family without decisions: rows are shared out among the workers."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a back end makes the kernels of one family. Only `schedule` decides anything.

    `counters`: workers take their work from counters that a barrier resets, so one stands before each such step.
    """

    schedule: Callable[[Any, Target], object]
    variables: Callable[[Any, Any], Variables]
    counters: bool = False


@dataclass(frozen=True)
class BackEnd:
    """The families of a target by the class of their kernels; `prepare` moves values and splits kernels as it needs."""

    families: Mapping[type[Kernel], Family]
    prepare: Callable[[Lowered, Target], Lowered]


def back_end(target: Target) -> BackEnd:
    """The back end of a target; only the one in use is imported."""
    if target.is_cpu:
        from monoplan.codegen.cpu.backend import CPU

        return CPU
    from monoplan.codegen.cuda.backend import CUDA

    return CUDA
