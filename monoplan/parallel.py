"""Tensor parallelism at compile time: which layers are divided, and whether all ranks compile the same thing."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph
from monoplan.ir.printer import print_graph
from monoplan.options import Options
from monoplan.runtime.ranks.comm import Communicator, communicator

_SAMPLED = 64  # vectors of the weights that are compared between ranks; and one matrix, the smallest


def find_communicator(given: Any, module: Module) -> Communicator | None:
    """The one of tp=, else that of the module's own parallel layers."""
    found = communicator(given)
    if found is None:
        for _, part in module.named_modules():
            if getattr(part, "communicator", None) is not None:
                return communicator(part.communicator)
    return found


def tp_plan(module: Module, options: Options) -> Mapping[str, str]:
    """Patterns of layer names and how those layers are divided: of the options, of the model, of its configuration."""
    if options.tp_plan is not None:
        return options.tp_plan
    own = getattr(module, "tp_plan", None) or getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    return own or {}


def check_world(graph: Graph, comm: Communicator | None) -> None:
    """Raises where forward speaks of more or fewer ranks than there are."""
    have = comm.size if comm is not None else 1
    for op in graph.ops:
        if op.opdef.kind == "collective" and op.attrs["world"] not in (1, have):
            what = f"{op.name} of the model is over {op.attrs['world']} ranks, there are {have}"
            raise ArgumentError(what, where=op.loc, fix="compile with tp= a communicator of that size")


def check_ranks(
    comm: Communicator,
    graph: Graph,
    tensors: Mapping[str, Tensor],
    options: Options,
    plan: Mapping[str, str],
    target: str,
    version: str,
) -> None:
    """Raises on every rank unless all compile the same model, of the same weights, in the same way.

    Also for the same instruction set: what every rank computes for itself (norms, probabilities) must be equal in
    every bit, or ranks would choose different tokens.
    """
    # A model that is written for ranks has another part on each; what must be the same is what they exchange.
    exchanged = [f"{op.name} {dict(op.attrs)} {op.result.type}" for op in graph.ops if op.opdef.kind == "collective"]
    settings = (options.fuse, options.passes, options.stop_after, sorted(plan.items()))
    comm.agree(
        {
            "ranks": comm.size,
            "model": _digest("\n".join(exchanged or [print_graph(graph)]).encode()),
            "dtype": sorted({str(p.value.type.dtype) for p in graph.params if p.value.type.dtype.is_float}),
            "weights": "" if exchanged else _sample(tensors),
            "options": _digest(repr(settings).encode()),
            "target": target,
            "instruction set (MONOPLAN_ISA)": _isa() if target == "cpu" else "",
            "version of monoplan": version,
        },
        "compile the same model",
    )


def _isa() -> str:
    from monoplan.runtime.cpu.executable import host_target

    found = host_target()
    return f"{found.isa}, {found.lanes} lanes"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _sample(tensors: Mapping[str, Tensor]) -> str:
    """A digest of a few weights: all of them would have to be read whole."""
    matrices = [(t.numel(), path) for path, t in tensors.items() if t.ndim > 1 and isinstance(t, Parameter)]
    chosen = [path for path, t in tensors.items() if t.ndim == 1][:_SAMPLED]
    chosen += [min(matrices, key=lambda m: (int(m[0]), m[1]))[1]] if matrices else []  # type: ignore[call-overload]
    found = hashlib.sha256()
    for path in chosen:
        t = tensors[path]
        array = t.read() if isinstance(t, Parameter) else t.numpy()
        found.update(path.encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


@contextlib.contextmanager
def in_turn(comm: Communicator | None, text: str) -> Iterator[None]:
    """The first rank that has a source builds it; the others then find it in the cache. All leave together."""
    if comm is None or comm.size == 1:
        yield
        return
    sources = comm.collect(_digest(text.encode()))
    first = sources.index(sources[comm.rank]) == comm.rank
    if not first:
        comm.barrier()
    try:
        yield
    finally:
        if first:
            comm.barrier()
    comm.barrier()
