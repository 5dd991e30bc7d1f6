"""Writes a folder that repeats one fault alone: IR, inputs, the one kernel's source, and a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.plan import make_plan
from monoplan.codegen.source import headers
from monoplan.codegen.text import block_comment
from monoplan.inspect.kernel_check import KernelFault, Recorder
from monoplan.inspect.walk import Node, storable, walk
from monoplan.ir.errors import MonoplanError
from monoplan.ir.graph import Graph, Op, Param, Value, bodies
from monoplan.ir.printer import print_graph
from monoplan.ir.types import Array

if TYPE_CHECKING:
    from monoplan.inspect.bisect import Region
    from monoplan.inspect.verify import Subject

_PASS_SCRIPT = '''\
"""A value before and after a pass, both computed in float64. Exit status 1: they differ."""

import sys
from pathlib import Path

import numpy as np

from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.tolerances import compare

VALUE, PASS = {value!r}, {name!r}
HERE = Path(__file__).resolve().parent
ARRAYS = np.load(HERE / "inputs.npz")


def run(name):
    graph = parse_graph((HERE / name).read_text("utf-8"))
    return interpret(graph, [ARRAYS[v.name] for v in graph.inputs], exact=True)


wrong = False
for before, after in zip(run("before.ir"), run("after.ir")):
    difference = compare(after, before, "f64" if before.dtype.kind == "f" else before.dtype, "rewrite")
    print(VALUE, "after", PASS, difference)
    wrong = wrong or not difference.ok
sys.exit(1 if wrong else 0)
'''

_KERNEL_SCRIPT = '''\
"""The {family} kernel in {file} against the float64 interpreter of graph.ir. Exit status 1: they differ.

`python repro.py --fresh` builds what the templates make today in place of {file}.
"""

import sys
from pathlib import Path

import numpy as np

from monoplan.driver import build_graph_executable
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.tolerances import compare, kind_of
from monoplan.options import Options

HERE = Path(__file__).resolve().parent
ARRAYS = np.load(HERE / "inputs.npz")

graph = parse_graph((HERE / "graph.ir").read_text("utf-8"))
inputs = [ARRAYS[v.name].astype(v.type.dtype.numpy) for v in graph.inputs]
params = {{p.path: ARRAYS[p.value.name].astype(p.value.type.dtype.numpy) for p in graph.params}}
source = None if "--fresh" in sys.argv else str(HERE / "{file}")
kernel = build_graph_executable(graph, params, "{target}", Options(source=source{threads}))
wrong = False
exact = interpret(graph, inputs, params, exact=True)
plain = interpret(graph, inputs, params)
for v, got, want, other in zip(graph.outputs, kernel(inputs), exact, plain):
    difference = compare(got, want, v.type.dtype, kind_of(graph.ops[-1].opdef.kind), plain=other)
    print(v, difference)
    wrong = wrong or not difference.ok
sys.exit(1 if wrong else 0)
'''


def write_pass_folder(into: Path, subject: Subject, name: str, region: Region, node: Node) -> Path | None:
    """before.ir and after.ir hold just the ops behind the wrong value; the whole graphs lie beside them."""
    into.mkdir(parents=True, exist_ok=True)
    (into / "whole_before.ir").write_text(print_graph(region.old, locs=True), "utf-8")
    (into / "whole_after.ir").write_text(print_graph(region.new, locs=True), "utf-8")
    # A value inside rolled layers can't be cut out of the graph: then the whole loop is repeated.
    inside = node.turn is not None
    arrays: dict[str, Array] = {}
    for file, graph, value, new in (
        ("before.ir", region.old, region.right, False),
        ("after.ir", region.new, region.wrong, True),
    ):
        ops: list[Op] = list((*graph.setup, *graph.ops)) if inside else region.ops(new=new)
        outputs = graph.outputs if inside else (value,)
        part = cut(graph.name, ops, outputs, graph if inside else None)
        (into / file).write_text(print_graph(part, locs=True), "utf-8")
        wanted = {v for v in part.inputs if v.name not in arrays}
        found = _values(subject, graph, wanted)
        arrays.update({v.name: a.astype(np.float64) if v.type.dtype.is_float else a for v, a in found.items()})
    np.savez(into / "inputs.npz", **arrays)  # type: ignore[arg-type]
    (into / "repro.py").write_text(_PASS_SCRIPT.format(value=node.name(), name=name), "utf-8")
    return into


def cut(
    name: str,
    ops: Sequence[Op],
    outputs: Sequence[Value],
    whole: Graph | None = None,
    is_weight: Callable[[Value], bool] = lambda v: False,
) -> Graph:
    """A graph of some ops in order; what they read from outside becomes inputs, or params where it is a weight."""
    made = {r for op in ops for r in op.results}
    read = dict.fromkeys(v for op in ops for v in op.reads if v not in made)
    read.update(dict.fromkeys(v for v in outputs if v not in made))
    if whole is not None:
        read = dict.fromkeys([*whole.inputs, *(p.value for p in whole.params)])
    params = tuple(Param(v, v.name) for v in read if is_weight(v))
    inputs = tuple(v for v in read if not is_weight(v))
    writes = []
    for op in ops:
        for i, operand in op.opdef.inplace.items():
            target = op.operand(operand)
            if target in inputs and op.results[i] in outputs:
                writes.append((inputs.index(target), list(outputs).index(op.results[i])))
    return Graph(name, inputs, params, tuple(ops), tuple(outputs), writes=tuple(writes))


def _values(subject: Subject, graph: Graph, wanted: set[Value]) -> dict[Value, Array]:
    """The exact values of some inputs, params and results of a graph."""
    paths = {p.value: p.path for p in graph.params}
    found = {v: a for v, a in zip(graph.inputs, subject.inputs, strict=True) if v in wanted}
    found.update({v: subject.params(paths[v]) for v in wanted if v in paths})

    def keep(node: Node, operands: Sequence[Array | None], results: Sequence[Array]) -> None:
        if node.turn is None:
            found.update({r: a for r, a in zip(node.op.results, results, strict=True) if r in wanted})

    if wanted - set(found):
        walk(graph, list(subject.inputs), subject.params, exact=True, visit=keep)
    return found


def write_kernel_folder(into: Path, subject: Subject, fault: KernelFault) -> Path | None:
    """graph.ir with the one op (and the views in front of it), its inputs, and its C as a plan of its own."""
    graph = subject.final
    weights = _weights(graph)
    ops = _with_views(fault.node.op, graph, weights)
    part = cut(fault.node.op.name, ops, fault.node.op.results, is_weight=weights.__contains__)
    into.mkdir(parents=True, exist_ok=True)
    (into / "graph.ir").write_text(print_graph(part, locs=True), "utf-8")
    arrays = _actual(subject, fault.node, {*part.inputs, *(p.value for p in part.params)})
    np.savez(into / "inputs.npz", **{v.name: storable(a) for v, a in arrays.items()})  # type: ignore[arg-type]
    target = subject.target
    file = "plan.cu" if target == "cuda" else "plan.c"
    try:
        (into / file).write_text(_with_edits(_render(part, subject), subject, fault), "utf-8")
    except MonoplanError as error:  # the op does not stand alone: its IR and inputs are still there
        (into / file).write_text(block_comment(str(error).splitlines()) + "\n", "utf-8")
    if target == "cpu":
        for name, text in headers("cpu"):
            (into / name).write_text(text, "utf-8")
    threads = f", threads={subject.executable.threads}" if target == "cpu" else ""
    family = fault.step.kernel.family
    script = _KERNEL_SCRIPT.format(family=family, threads=threads, file=file, target=target)
    (into / "repro.py").write_text(script, "utf-8")
    return into


def _render(part: Graph, subject: Subject) -> Any:
    """The source of a small graph for the target of the whole."""
    target = subject.executable.plan.target
    if subject.target == "cuda":
        from monoplan.codegen.cuda.render import render_cuda

        return render_cuda(make_plan(part, target), "bisect")
    return render_cpu(make_plan(part, target), "bisect")


def _weights(graph: Graph) -> set[Value]:
    """Params and what setup makes of them; inside rolled layers the inputs that stand for them."""
    found = {p.value for p in graph.params} | {r for op in graph.setup for r in op.results}
    for op in graph.ops:
        if op.opdef.kind == "repeat":
            a = op.attrs
            body, carried, shared = a["body"], a["carried"], a["shared"]
            for i, v in enumerate(body.inputs):
                first = i if i < carried + shared else carried + shared + (i - carried - shared) * a["count"]
                if i >= carried and op.operands[first] in found:
                    found.add(v)
        elif op.opdef.kind == "loop":
            shared = op.attrs["state"] + op.attrs["slices"]
            inside = zip(op.attrs["body"].inputs[shared:], op.operands[shared:], strict=True)
            found.update(v for v, outer in inside if outer in found)
    return found


def _with_views(op: Op, graph: Graph, weights: Iterable[Value]) -> list[Op]:
    """The op behind the views and constants that feed it: a strided operand is part of the fault."""
    body = next((body for o in graph.ops for body in bodies(o) if op in body.ops), graph)
    wanted, kept = set(op.reads), [op]
    for other in reversed(body.ops[: body.ops.index(op)]):
        if other.opdef.kind in ("view", "generate") and wanted.intersection(other.results):
            kept.append(other)
            wanted.update(other.reads)
    return kept[::-1]


def _actual(subject: Subject, node: Node, wanted: set[Value]) -> dict[Value, Array]:
    """The values as the plan itself had them when the op ran."""
    recorder, setup = Recorder(subject.watched), set(subject.final.setup)
    found: dict[Value, Array] = {}

    def visit(seen: Node, operands: Sequence[Array | None], exact: Sequence[Array]) -> Sequence[Array]:
        if seen.turn is None or seen.turn == node.turn:
            pairs = zip(seen.op.operands, operands, strict=True)
            found.update({v: a for v, a in pairs if v in wanted and a is not None and v is not None})
        if seen.op is node.op and seen.turn == node.turn:
            raise _Reached
        made = []
        for i, (r, a) in enumerate(zip(seen.op.results, exact, strict=True)):
            got = recorder.value(seen, i) if seen.op not in setup and recorder.events(seen) else None
            made.append(a.astype(r.type.dtype.numpy) if got is None else got)
        return made

    try:
        walk(subject.final, list(subject.inputs), subject.params, exact=True, visit=visit, casts=True)
    except _Reached:
        pass
    return found


class _Reached(Exception):
    pass


def _with_edits(source: Any, subject: Subject, fault: KernelFault) -> str:
    """The one-kernel source, with the function as the running plan has it: a person may have edited it."""
    plan_source = subject.executable.source
    name = plan_source.step_functions[fault.step.number]
    original = next((f for f in plan_source.functions if f.name == name), None)
    if original is None:
        return str(source.text)
    edited = function_text(subject.executable.text, name)
    text = str(source.text)
    for f in source.functions:
        if _bare(f.text, f.name) == _bare(original.text, name) and edited is not None:
            text = text.replace(f.text, edited.replace(name, f.name))
    return text


def _bare(text: str, name: str) -> str:
    """A function without its name and without spaces: lines are broken where they get too long."""
    return "".join(text.replace(name, "@").split())


def function_text(text: str, name: str) -> str | None:
    """A kernel's text in a source that may have been edited: what follows the comment with its IR line."""
    kernels = text.partition("\nstatic void plan_run(")[0]
    for block in re.split(r"(?m)^(?=/\* %)", kernels):
        code = block.partition("*/\n")[2]
        if re.search(rf"\b{re.escape(name)}\(", code):
            return code.rstrip("\n") + "\n"
    return None
