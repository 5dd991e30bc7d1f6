"""`monoplan run-ir`: executes IR text on given or random inputs, compiled and by the interpreter."""

from __future__ import annotations

import argparse
from typing import Any

from monoplan.ir.errors import ArgumentError, writing

THRESHOLD = 40  # elements of an output that are printed whole
LARGEST = 64 << 20  # bytes of IR text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file and its inputs."""
    add = parser.add_argument
    add("file", metavar="FILE.ir", help="a graph, as `monoplan inspect --ir` prints it")
    add("--inputs", metavar="FILE.npz", help="arrays of inputs and parameters by name (default: random)")
    add("--size", action="append", default=[], metavar="NAME=N", help="the value of a symbolic size; may be repeated")
    add("--seed", type=int, default=0, help="of random arrays (default: %(default)s)")
    add("--target", choices=("cpu", "cuda", "reference"), default="cpu", help="where to run (default: %(default)s)")
    add("-o", "--output", metavar="FILE.npz", help="where to write the outputs")


def run(args: argparse.Namespace) -> int:
    """Prints each output and how far it is from the float64 interpreter."""
    import numpy as np

    from monoplan.cli.model_argument import load_npz, parse_sizes
    from monoplan.inspect.walk import example_inputs, example_params
    from monoplan.ir.interpreter import interpret
    from monoplan.ir.parser import parse_graph
    from monoplan.ir.tolerances import compare
    from monoplan.ir.verifier import verify

    try:
        with open(args.file, "rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:  # a device that never ends, or weights
            raise ArgumentError(f"can't read {args.file}", why=f"no graph has over {LARGEST} bytes of text")
        text = data.decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise ArgumentError(f"can't read {args.file}", why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        why = f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8 text"
        fix = "give a graph as text, as `monoplan inspect --ir` prints it"
        raise ArgumentError(f"can't read {args.file}", why=why, fix=fix) from None
    graph = parse_graph(text)
    verify(graph)
    given = load_npz(args.inputs) if args.inputs else {}
    inputs = example_inputs(graph, parse_sizes(args.size), args.seed)
    inputs = [_typed(given.pop(v.name, a), v) for v, a in zip(graph.inputs, inputs, strict=True)]
    params = example_params(graph, args.seed)
    for p in graph.params:
        found = given.pop(p.path, given.pop(p.value.name, params[p.path]))
        params[p.path] = _typed(found, p.value)
    if given:
        names = ", ".join([v.name for v in graph.inputs] + [p.path for p in graph.params])
        raise ArgumentError(
            f"{args.inputs} has {next(iter(given))!r}, which the graph does not have", fix=f"names: {names}"
        )
    exact = interpret(graph, inputs, params, exact=True)
    outputs = _execute(graph, inputs, params, args.target)
    good = True
    for v, got, want in zip(graph.outputs, outputs, exact, strict=True):
        difference = compare(got, want, v.type.dtype, "model")
        good = good and difference.ok
        shown = np.array2string(
            got.astype(np.float32) if got.dtype.itemsize == 2 else got, threshold=THRESHOLD, precision=6
        )
        print(f"{v}: {v.type.dtype}{list(got.shape)}  ({difference})\n{shown}")
    if args.output:
        with writing("the outputs", args.output):
            np.savez(args.output, **{v.name: a for v, a in zip(graph.outputs, outputs, strict=True)})
    return 0 if good else 1


def _execute(graph: Any, inputs: Any, params: Any, target: str) -> Any:
    from monoplan.driver import build_graph_executable
    from monoplan.ir.interpreter import interpret

    if target == "reference":
        return interpret(graph, inputs, params)
    return build_graph_executable(graph, params, target)(inputs)


def _typed(a: Any, v: Any) -> Any:
    wanted = v.type.dtype.numpy
    return a if a.dtype == wanted else a.astype(wanted)
