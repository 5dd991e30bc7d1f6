"""Options of compile(), and the environment variables behind their defaults."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import known_target


@dataclass(frozen=True)
class Options:
    """How to compile: all of these may be given as a dict to compile(options=)."""

    fuse: bool = True  # False: one kernel per op, for comparison
    threads: int | None = None  # None: MONOPLAN_NUM_THREADS, else what the machine offers
    passes: tuple[str, ...] | None = None  # names of the passes to run; None: all
    stop_after: str | None = None  # the last pass to run
    source: str | None = None  # a file to build in place of the generated source
    tp_plan: Mapping[str, str] | None = None  # layer names and how tp= divides them; None: the model's own
    prefill_chunk: int = 2048  # tokens of a prompt that run at once, all rows together: bounds the memory of a run
    resident: bool = True  # on a GPU, generation stays there; False: every token by way of the host, for comparison
    dump: str | None = None  # a folder for every stage; None: MONOPLAN_DUMP

    def __post_init__(self) -> None:
        if not isinstance(self.prefill_chunk, int) or self.prefill_chunk < 1:
            raise ArgumentError(f"prefill_chunk must be a whole number above 0, got {self.prefill_chunk!r}")

    @classmethod
    def make(cls, given: Options | Mapping[str, Any] | None) -> Options:
        """Options from a dict; an unknown name is an error that lists the known ones."""
        if isinstance(given, Options):
            return given
        known = {f.name for f in dataclasses.fields(cls)}
        fix = "known ones: " + ", ".join(sorted(known))
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(f"options must be a dict or Options, got {type(given).__name__} {given!r:.60}", fix=fix)
        unknown = sorted(str(name) for name in set(given or {}) - known)
        if unknown:
            raise ArgumentError(f"unknown options: {', '.join(unknown)}", fix=fix)
        return cls(**dict(given or {}))


def find_target(given: Any, module: Any) -> str:
    """Where to run a module: what compile() was told, else the device that a model was loaded for, else the CPU."""
    if given is None:
        # A `device` of any other module is its author's, and may mean anything.
        given = getattr(module, "device", "cpu") if hasattr(module, "generation_step") else "cpu"
    return known_target(given)


def debug_level() -> int:
    """MONOPLAN_DEBUG: 0 silent, 1 a line per compile, 2 passes, 3 near misses, 4 source."""
    text = os.environ.get("MONOPLAN_DEBUG", "0") or "0"
    if not text.isdigit() or int(text) > 4:
        raise ArgumentError(f"MONOPLAN_DEBUG={text!r} is not a number from 0 to 4")
    return int(text)
