"""IR text: parse, verify, print and parse again; small graphs run on the interpreter as well."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from monoplan.inspect.walk import example_inputs, example_params, sizes_for
from monoplan.ir.builder import build_graph
from monoplan.ir.dims import evaluate, symbols_of
from monoplan.ir.errors import MonoplanError
from monoplan.ir.graph import Graph, Loc
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.types import DTYPES, f32
from monoplan.ir.verifier import verify
from tests.codegen.cases import CASES, Case
from tests.codegen.mixed import mixed_graph, rolled_graph
from tests.fuzz.engine import Files, Target
from tests.fuzz.mutations import INTEGERS, damage, mutate_text

NAME = "graph.ir"
MOST = 4096  # elements of a value in graphs that are interpreted
GOLDEN = Path(__file__).parents[2] / "golden" / "passes"
WORDS = (
    *DTYPES, "%x", "%y", "_", "n", "s", "None", "True", "inf", "nan", "-inf", "1e999", "9" * 5000, "(" * 300, "-" * 300,
    "[" * 300, "{", "}", "(", ")", "[", "]", '"', '"\\ud800"', '"a"', "=", ":", "->", "//", "@", ",", "\\",
    "\0", "\ud800",
    "ٱ", "²", "٣", "\u2028", "return", "param", "setup", "graph", "((n+1)//2)*n", "n*n*n*n", "(a+b+c+d)*(a+b+c+d)",
    "n//0",
    "a*" * 150 + "a", "(a+1)*" * 60 + "a", "((" * 90 + "n" + ")//2)" * 90, "()", "(1,)", "((((((1,),),),),),)",
)  # fmt: skip


def _case_graph(case: Case) -> Graph | None:
    """One call of an op; None for what does not take f32, or has a size that no operand has."""
    operands = [None if a is None else a.type(f32) for a in case.operands]
    names = {f"x{i}": t for i, t in enumerate(operands) if t is not None}

    def forward(**values: Any) -> Any:
        given = [None if t is None else values[f"x{i}"] for i, t in enumerate(operands)]
        return REGISTRY[case.op](*given, **case.attributes(f32))

    try:
        made = build_graph(case.op, forward, names)
        verify(made)
        return made
    except MonoplanError:
        return None


def seeds() -> list[Files]:
    graphs = [mixed_graph(), rolled_graph()[0]]
    seen = set()
    for case in CASES:
        if case.op not in seen and (made := _case_graph(case)) is not None:
            seen.add(case.op)
            graphs.append(made)
    placed = graphs[0].replace(ops=tuple(_placed(op) for op in graphs[0].ops))
    texts = [*(print_graph(g) for g in graphs), print_graph(placed, locs=True)]
    texts += [p.read_text("utf-8") for p in sorted(GOLDEN.glob("*.ir")) if p.read_text("utf-8").startswith("graph ")]
    return [{NAME: text.encode()} for text in texts]


def _placed(op: Any) -> Any:
    return dataclasses.replace(op, loc=Loc("layers.0", 'a "b".py', 7))


def mutate(random: Random, files: Files) -> Files:
    data = files[NAME]
    if random.random() < 0.15:
        return {NAME: damage(random, data)}
    words = (*WORDS, str(random.choice(INTEGERS)), random.choice(tuple(REGISTRY)))
    return {NAME: mutate_text(random, data.decode(), words).encode("utf-8", "surrogatepass")}


def load(directory: Path) -> None:
    data = (directory / NAME).read_bytes()
    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    graph = parse_graph(text)
    verify(graph)
    printed = print_graph(graph, locs=True)
    try:
        again = print_graph(parse_graph(printed), locs=True)
    except MonoplanError as error:
        again = str(error)
    if again != printed:
        raise AssertionError(f"the text of a graph reads back as another:\n{printed}\n{again}")
    if _small(graph):
        with contextlib.suppress(MonoplanError):  # random inputs need not fit
            interpret(graph, example_inputs(graph), example_params(graph))


def _small(graph: Graph) -> bool:
    sizes = sizes_for(graph)
    for v in graph.values:
        if any(symbols_of(d) - set(sizes) for d in v.type.shape):
            return False
        shape = [evaluate(d, sizes) for d in v.type.shape]
        if any(d < 0 for d in shape) or np.prod([float(d) for d in shape]) > MOST:
            return False
    return True


TARGET = Target(seeds, mutate, load)
