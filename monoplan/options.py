"""Options of compile(), and the environment variables behind their defaults."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from monoplan.ir.errors import ArgumentError, TypeRuleError, did_you_mean
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, as_dtype, i8, known_target

# The environment variables that are read, for docs/options.md.
ENVIRONMENT = {
    "MONOPLAN_CACHE_DIR": "where builds and models are kept (default: the user's cache directory)",
    "MONOPLAN_CACHE_MAX_BYTES": "bytes that plans in the cache may have (default: 2 GB)",
    "MONOPLAN_CACHE_MAX_WEIGHT_BYTES": "bytes that packed weights in the cache may have; 0: keep none (default: 8 GB)",
    "MONOPLAN_NUM_THREADS": "threads (default: OMP_NUM_THREADS, else the least of affinity, cgroup quota and cores)",
    "MONOPLAN_ISA": "instruction set: avx512, avx2, neon, generic, scalar … (default: what was seen to work)",
    "MONOPLAN_DEBUG": "1 a line for each compilation and whole tracebacks, 2 passes, 3 near misses, 4 source",
    "MONOPLAN_DUMP": "a folder for every stage of every compilation",
    "MONOPLAN_OVERRIDE": "a folder of edited sources, which are built in place of the generated ones",
    "MONOPLAN_COMPILE_TIMEOUT": "seconds after which a compiler that hangs is killed (default: 600)",
    "MONOPLAN_COMM": "shared or mpi: the transport between ranks (default: the best one)",
    "MONOPLAN_COMM_TIMEOUT": "seconds that a rank waits for the others; 0: for ever (default: 600)",
    "MONOPLAN_API_KEY": "what clients of `monoplan serve` must send, and what `llm` sends",
    "MONOPLAN_URL": "the server that `llm -m monoplan` asks (default: http://127.0.0.1:8000)",
    "CC": "the C compiler",
    "NO_COLOR": "no colours on a terminal",
    "HF_HOME, HF_TOKEN, HF_HUB_OFFLINE": "cache, account and network of the hub, as huggingface_hub reads them",
}


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
    kv_dtype: str | None = None  # of a language model's keys and values: "int8" or a float type; None: its own
    resident: bool = True  # on a GPU, generation stays there; False: every token by way of the host, for comparison
    compact: bool = False  # on a GPU, bf16 weights in 12 bits without loss: less memory, faster tokens of one stream
    weight_bytes: int | None = None  # of packed weights in the cache; 0: keep none; None: what the cache's cap says
    dump: str | None = None  # a folder for every stage; None: MONOPLAN_DUMP

    def __post_init__(self) -> None:
        if not isinstance(self.prefill_chunk, int) or self.prefill_chunk < 1:
            raise ArgumentError(f"prefill_chunk must be a whole number above 0, got {self.prefill_chunk!r}")
        known_kv_dtype(self.kv_dtype)
        if self.weight_bytes is not None and (not isinstance(self.weight_bytes, int) or self.weight_bytes < 0):
            raise ArgumentError(f"weight_bytes must be a whole number of bytes, or None, got {self.weight_bytes!r}")

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
            raise ArgumentError(f"unknown options: {', '.join(unknown)}", fix=did_you_mean(unknown[0], known) or fix)
        return cls(**dict(given or {}))


def known_kv_dtype(given: Any) -> DType | None:
    """The type of keys and values that the option kv_dtype names; None: what fits the model."""
    if given is None:
        return None
    try:
        found = as_dtype(given)
    except TypeRuleError:
        found = None
    if found is None or not (found == i8 or (found.is_float and found.bits <= 32)):
        fix = "use int8, bfloat16, float16 or float32; None: what the model computes in"
        raise ArgumentError(f"kv_dtype={given!r} is no type for keys and values", fix=fix)
    return found


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
