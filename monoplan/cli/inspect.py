"""The commands that look inside: compile, export, inspect, verify, bisect, report, golden, run-ir."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoplan.cli.common import (
    DEFAULT_PROMPT,
    TARGETS,
    Timings,
    add_input_options,
    add_model_options,
    add_target,
    decoded,
    load,
)
from monoplan.ir.errors import ArgumentError, MonoplanError, writing

if TYPE_CHECKING:
    from monoplan.cli.model_argument import Opened
    from monoplan.inspect.golden import Golden
    from monoplan.inspect.verify import Subject


def _add_model_and_inputs(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, positional=True, own=True)
    add_input_options(parser, "inputs() of the file, or random")
    read = "what a checkpoint reads (default: %(default)r, or random ids if it has no tokenizer)"
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help=read)


def _open(args: argparse.Namespace, **options: Any) -> Opened:
    from monoplan.cli.model_argument import open_model

    return open_model(args, **options)


def add_compile(parser: argparse.ArgumentParser) -> None:
    """The options of compile."""
    add_model_options(parser, positional=True)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="where to write")


def compile(args: argparse.Namespace) -> int:
    """Writes a model's plan as files to read: IR after each pass, source, steps, build command."""
    timings = Timings()
    load(args, timings).dump(args.output)
    print(f"written to {args.output}")
    timings.print_start(args)
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    """The model, where it goes, and for which CPUs."""
    from monoplan.runtime.machine.features import known

    add_model_options(parser, positional=True, own=True)
    parser.add_argument("output", metavar="DIR", help="where to write")
    parser.add_argument("--isa", choices=known(), help="the instruction set (default: this machine's)")
    parser.add_argument("--name", default="model", metavar="NAME", help="of files and functions (default: %(default)s)")
    parser.add_argument("--no-chat", dest="chat", action="store_false", help="of a checkpoint: without chat.c")


def export(args: argparse.Namespace) -> int:
    """Writes the plan and its weights as C files to build and to run without Python."""
    opened = _open(args)
    if opened.lm is None:
        path = opened.compiled.export(args.output, isa=args.isa, name=args.name)
    else:
        path = opened.lm.export(args.output, isa=args.isa, name=args.name, chat=args.chat)
    print(f"written to {path}; to build: make -C {shlex.quote(str(path))}")
    return 0


def add_verify(parser: argparse.ArgumentParser) -> None:
    """The model, its inputs, and how much to compare."""
    _add_model_and_inputs(parser)
    parser.add_argument("--nodes", action="store_true", help="also every value on the way")


def verify(args: argparse.Namespace) -> int:
    """Prints the table; status 1 when something is outside the tolerance."""
    opened = _open(args)
    result = opened.compiled.verify(**opened.arguments(), nodes=args.nodes)
    sys.stdout.write(str(result))
    return 0 if result.ok else 1


def add_bisect(parser: argparse.ArgumentParser) -> None:
    """The model, its inputs, and where the folder goes."""
    _add_model_and_inputs(parser)
    folder = "folder that repeats the finding (default: monoplan_bisect/<plan>)"
    parser.add_argument("-o", "--output", metavar="DIR", help=folder)


def bisect(args: argparse.Namespace) -> int:
    """Prints the finding; status 1 when there is one."""
    opened = _open(args)
    found = opened.compiled.bisect(**opened.arguments(), folder=args.output)
    sys.stdout.write(str(found))
    return 0 if found.ok else 1


def add_report(parser: argparse.ArgumentParser) -> None:
    """The model, its inputs, and the file."""
    _add_model_and_inputs(parser)
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="the page (default: %(default)s)")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="without times")


def report(args: argparse.Namespace) -> int:
    """Profiles the model and writes the page."""
    from monoplan.inspect.report import write_report

    opened = _open(args)
    profiles = {}
    if args.profile and args.target != "reference":
        for label, arguments in opened.more.items():
            try:
                profiles[label] = opened.compiled.profile(**arguments())
            except MonoplanError as error:
                if args.inputs or args.size:
                    raise
                print(f"no times of {label}: random inputs do not fit ({error.what}); --inputs gives better ones")
    path = write_report(Path(args.output), opened.compiled._latest(), profiles)
    print(f"written to {path}")
    return 0


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """What to show."""
    add = parser.add_argument
    add_model_options(parser, positional=True, own=True)
    add("--diff", action="store_true", help="a unified diff of the IR for each pass that changed something")
    add("--ir", action="store_true", help="the IR after all passes")
    add("--stage", metavar="NAME", help="the IR after a pass, or `trace`")
    add("--stop-after", metavar="PASS", help="run no pass after this one")
    add("--plan", action="store_true", help="the table of steps and the arena")
    add("--source", action="store_true", help="the generated source")
    add("--explain", action="store_true", help="what fused into what, what did not, and why")
    add("--dot", action="store_true", help="the graph (of --stage, else the last) in Graphviz DOT")
    add("--no-locs", dest="locs", action="store_false", help="IR without your files and lines")
    add("--color", choices=("auto", "always", "never"), default="auto", help="of --diff (default: on a terminal)")


def inspect(args: argparse.Namespace) -> int:
    """Prints what the options name; without options the list of stages and the summary of the plan."""
    opened = _open(args, stop_after=args.stop_after)
    fast = opened.compiled
    shown = False
    if args.diff:
        from monoplan.inspect.diff import diff

        color = {"auto": None, "always": True, "never": False}[args.color]
        sys.stdout.write(diff(fast._latest().stages, color=color, locs=args.locs))
        shown = True
    if args.dot:
        from monoplan.ir.graph import to_dot

        sys.stdout.write(to_dot(fast._latest().stage(args.stage).graph))
        shown = True
    elif args.stage or args.ir:
        sys.stdout.write(fast.ir(args.stage, locs=args.locs))
        shown = True
    if args.explain:
        print(fast.explain())
        shown = True
    if args.plan:
        print(fast.plan if fast.plan is not None else "target reference has no plan")
        shown = True
    if args.source:
        sys.stdout.write(fast.source())
        shown = True
    if not shown:
        print(_summary(fast, opened))
    return 0


def _summary(fast: Any, opened: Opened) -> str:
    built = fast._latest()
    lines = [
        f"{opened.label}: {built.graph.name} for {fast.target}",
        "",
        "stage                    ops  rewrites      ms  rule",
    ]
    for s in built.stages:
        mark = f"{s.rewrites:8d}" if s.changed and s.name != "trace" else "       -"
        lines.append(f"{s.name:<22} {_count(s.graph):5d}  {mark}  {s.seconds * 1e3:6.1f}  {s.rule}")
    if built.plan is not None:
        lines += ["", built.plan.summary]
    if opened.model is not None:
        lines += _stored_types(opened.model)
    lines += ["", "more: --diff, --stage NAME, --ir, --plan, --source, --explain, --dot"]
    return "\n".join(lines)


def _stored_types(model: Any) -> list[str]:
    """A line on the weights of a quantized file: how many stay in their types, which are expanded, and why."""
    from collections import Counter

    from monoplan.ir.types import LOW_BITS, as_dtype
    from monoplan.models.load.checkpoint import open_model
    from monoplan.models.load.gguf import FLOATS, GGUFCheckpoint
    from monoplan.models.load.quantized import QuantizedCheckpoint

    weights, own = open_model(model.name_or_path).weights, model.state_dict()
    if not isinstance(weights, GGUFCheckpoint | QuantizedCheckpoint):
        return []
    counts: Counter[str] = Counter()
    for name in weights.names():
        dtype = own[name].type.dtype if name in own else None
        if isinstance(weights, GGUFCheckpoint):
            kind = weights.stored_type(name)
            is_plain, why = kind in FLOATS, "" if kind.lower() in LOW_BITS else "plans have no such format"
        else:
            found = weights.kept(name)
            is_plain, why = found is None, found if isinstance(found, str) else ""
            kind = str(as_dtype(weights.dtype(name)) if is_plain else weights.method if why else found)
        if dtype is None or is_plain or dtype.is_low_bit:
            counts[kind + " kept" * (not is_plain)] += 1
        else:
            counts[f"{kind} expanded to {dtype} ({why or 'as requested'})"] += 1
    return ["weights: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))]


def _count(graph: Any) -> int:
    from monoplan.ir.graph import all_ops

    return sum(1 for _ in all_ops(graph.replace(setup=())))


_KEPT = ("model", "dtype", "target", "prompt", "size", "seed")


def add_golden(parser: argparse.ArgumentParser) -> None:
    """record or check, the folder, the model."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    record = actions.add_parser("record", help="run the model and keep outputs, IR and hashes of the source in DIR")
    check = actions.add_parser("check", help="run it again, with the recorded inputs, and compare")
    for action in (record, check):
        action.add_argument("folder", metavar="DIR", help="the golden")
        _add_model_and_inputs(action)
    record.add_argument("-y", "--yes", action="store_true", help="overwrite a golden without asking, for scripts")
    check.add_argument("--ir", action="store_true", help="the IR must be the same, too")
    check.add_argument("--source", action="store_true", help="the source must be the same, too")


def golden(args: argparse.Namespace) -> int:
    """Status 1 with a report when something is not as recorded."""
    from monoplan.inspect.golden import Golden

    golden = Golden(Path(args.folder))
    if args.action == "record":
        if not args.yes and not _may_overwrite(golden.folder):
            print("nothing was written")
            return 1
        opened = _open(args)
        kept = {k: getattr(args, k) for k in _KEPT}
        if args.model is not None and Path(args.model).exists():
            kept["model"] = str(Path(args.model).resolve())
        golden.record(opened.compiled.subject(**opened.arguments()), seed=args.seed, inputs=True, about=kept)
        print(f"recorded in {golden.folder}")
        return 0
    meta = golden.meta()
    about = meta["about"] or {}
    args.model = args.model or about.get("model")
    for name in ("dtype", "target", "prompt", "size", "seed"):
        setattr(args, name, about.get(name, getattr(args, name)))
    golden = Golden(golden.folder, _record_command(args))
    opened = _open(args)
    subject = opened.compiled.subject(**opened.arguments())
    subject.inputs = _recorded_inputs(golden, meta, subject)
    golden.check(subject, ir=args.ir, source=args.source)
    print(f"as recorded in {golden.folder}")
    return 0


def _may_overwrite(folder: Path) -> bool:
    """Whether nothing is there, or the user agrees; without a terminal to ask at, an error that names the flag."""
    there = sorted(n for n in ("golden.json", "outputs.npz", "inputs.npz", "plan.ir") if (folder / n).exists())
    if not there:
        return True
    what = f"{folder} holds a golden already ({', '.join(there)})"
    if not sys.stdin.isatty():
        raise ArgumentError(what, why="there is no terminal to ask at", fix="give --yes to overwrite it")
    print(f"{what}; overwrite it? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _record_command(args: argparse.Namespace) -> str:
    """The command that records what `check` looks at."""
    words = ["monoplan", "golden", "record", str(args.folder)]
    if args.model is not None:
        words.append(str(args.model))
    for name, usual in {"dtype": None, "target": TARGETS[0], "prompt": DEFAULT_PROMPT, "seed": 0}.items():
        if getattr(args, name) != usual:
            words += [f"--{name}", str(getattr(args, name))]
    words += [word for size in args.size for word in ("--size", size)]
    return shlex.join([*words, "--yes"])


def _recorded_inputs(golden: Golden, meta: dict[str, Any], subject: Subject) -> Any:
    """What the golden was recorded with; raises if that is gone, or is not what the module takes."""
    from monoplan.inspect.golden import GoldenError

    path = golden.folder / "inputs.npz"
    again = f"or record it again: monoplan golden record {golden.folder} MODEL"
    if len(meta["inputs"]) != len(subject.inputs):
        what = f"{subject.name} takes {len(subject.inputs)} inputs, the golden was recorded with {len(meta['inputs'])}"
        raise GoldenError(what, where=golden.folder, fix=f"give the model of then, {again}")
    stored = golden.stored_inputs(len(subject.inputs), [a.dtype for a in subject.inputs])
    if stored is None:
        if meta["about"] is None:
            return subject.inputs  # a test keeps none: they are made anew, and `check` compares their hashes
        why = "record wrote the inputs there, and check runs with them"
        raise GoldenError("the recorded inputs are missing", where=path, why=why, fix=f"restore the file, {again}")
    rows = zip(subject.traced.inputs, stored, subject.inputs, strict=True)
    other = [f"{v.name}: recorded {[*a.shape]}, now {[*b.shape]}" for v, a, b in rows if a.shape != b.shape]
    if other:
        what = f"{subject.name} takes inputs of other shapes than the recorded ones"
        fix = f"give the model and its inputs() of then, {again}"
        raise GoldenError(what, where=path, why="; ".join(other), fix=fix)
    return stored


THRESHOLD = 40  # elements of an output that are printed whole
LARGEST = 64 << 20  # bytes of IR text


def add_run_ir(parser: argparse.ArgumentParser) -> None:
    """The file and its inputs."""
    parser.add_argument("file", metavar="FILE.ir", help="a graph, as `monoplan inspect --ir` prints it")
    add_input_options(parser, "random; parameters, too")
    add_target(parser)
    parser.add_argument("-o", "--output", metavar="FILE.npz", help="where to write the outputs")


def run_ir(args: argparse.Namespace) -> int:
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
    except OSError as error:
        raise ArgumentError(f"can't read {args.file}", why=error.strerror or str(error)) from None
    text = decoded(data, args.file, fix="give a graph as text, as `monoplan inspect --ir` prints it")
    graph = parse_graph(text.replace("\r\n", "\n"))
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
