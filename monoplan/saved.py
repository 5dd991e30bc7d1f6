"""Compiled plans as files: `fast.save("plan.mpz")`, `mp.load("plan.mpz")`, pickle and copy. See docs/saving.md.

A file (runtime/cpu/plan_file.py) has two sides. What describes the computation is checked like a stranger's: the graph
as IR text, the weights with their layouts, the arguments and results, a configuration and a tokenizer. What is believed
or not looked at is the plan as records, the library, and cffi's tables of its functions: with them a plan is only
mapped, and machine code runs. Without them it is made again from the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import monoplan
from monoplan.api import Compiled
from monoplan.built import Built, Clock, Planned
from monoplan.codegen.slots import slot_offsets
from monoplan.frontend.kv_cache import KVCache, PagedKVCache, WindowKVCache
from monoplan.frontend.module import Module
from monoplan.frontend.pytree import Tree, unflatten
from monoplan.frontend.specs import Spec
from monoplan.ir import records
from monoplan.ir.dims import Expr, FloorDiv
from monoplan.ir.errors import ArgumentError, CompileError, LoadError, MonoplanError
from monoplan.ir.garbage import kept
from monoplan.ir.graph import Loc, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.shape_constraints import ShapeConstraint
from monoplan.ir.types import Array, TensorType
from monoplan.options import Options
from monoplan.runtime.build import cache, cache_places, facts, toolchain
from monoplan.runtime.cpu import plan_file
from monoplan.runtime.cpu.executable import ABI, CDEF, CpuExecutable
from monoplan.runtime.cpu.plan_file import PlanFile
from monoplan.runtime.machine import features

if TYPE_CHECKING:  # codegen is imported by the functions that need it: a plan that is mapped does not
    from monoplan.codegen.formats import Layout
    from monoplan.frontend.parameter import Parameter
    from monoplan.ir.graph import Graph
    from monoplan.llm import CompiledLM

# Classes of arguments and results, besides containers, and the names of their parts.
_CACHES: dict[type, tuple[str, ...]] = {
    KVCache: ("k", "v", "lengths"),
    PagedKVCache: ("k", "v", "table", "lengths"),
    WindowKVCache: ("k", "v", "lengths", "starts"),
}
_OBJECTS = {cls.__name__: cls for cls in _CACHES}
_PLANS = ("generation", "positioned", "check", "paged")  # of a language model: all but those with adapters
_SCALARS = (str, int, float, bool, type(None))
_KINDS = ("leaf", "constant", "none", "dict", "list", "tuple", "object")
_CALL = (Value, TensorType, Expr, FloorDiv, ShapeConstraint, Loc)  # what a call needs of a plan is made of
_DEEPEST = 32  # containers in containers


# -- saving ----------------------------------------------------------------------------------------------------


def save(fast: Compiled | CompiledLM, path: str | os.PathLike[str]) -> Path:
    """Writes the plans of a compiled module and their weights; see Compiled.save."""
    digest = plan_file.write(Path(path), *_contents(fast))
    facts.remember("saved", digest, {})
    return Path(path)


def to_bytes(fast: Compiled | CompiledLM) -> bytes:
    """The same as bytes, for pickle."""
    stream = io.BytesIO()
    facts.remember("saved", plan_file.write_to(stream, *_contents(fast)), {})
    return stream.getvalue()


def from_bytes(data: bytes) -> Compiled | CompiledLM:
    """What to_bytes wrote; used without building it again only if this user's cache knows it."""
    return _loaded(PlanFile.of(data), trust=False)


def _contents(fast: Compiled | CompiledLM) -> tuple[dict[str, Any], dict[str, bytes], list[Array]]:
    """What the table says, the members, and the arrays."""
    members: dict[str, bytes] = {}
    arrays: list[Array] = []
    here = features.detect()
    about: dict[str, Any] = {
        "monoplan": monoplan.__version__,
        "form": _form(),
        "machine": {"system": sys.platform, "libc": features.libc(), "arch": here.arch, "isa": here.isa}
        | {"flags": list(here.flags)},
    }
    if isinstance(fast, Compiled):
        about["module"] = _described(fast, members, arrays)
    else:
        fast.compiled  # noqa: B018  (compiles it)
        kept = {name: plan for name, plan in fast._plans.items() if name in _PLANS}
        about["plans"] = {name: _described(plan, members, arrays) for name, plan in kept.items()}
        about["model"] = _model(fast, members)
    members["cffi"] = toolchain.tables(CDEF).encode()
    return about, members, arrays


def _described(fast: Compiled, members: dict[str, bytes], arrays: list[Array]) -> dict[str, Any]:
    """One module with its plans; their members and arrays are added to the others."""
    fast._latest()
    return {
        "class": type(fast.module).__name__,
        "signature": [
            [p.name, p.kind.name, p.default is not p.empty] for p in fast.module.signature().parameters.values()
        ],
        "declared": fast.declared,
        "threads": fast.options.threads,
        "plans": [_plan(tree, specs, built, members, arrays) for tree, specs, built in fast.built],
    }


def _plan(
    tree: Tree, specs: Sequence[Any], built: Built, members: dict[str, bytes], arrays: list[Array]
) -> dict[str, Any]:
    executable = built.executable
    if built.target != "cpu" or built.tp is not None:
        raise ArgumentError("only a plan for the CPU, of one rank, can be saved", fix="compile with target='cpu'")
    if executable.text != executable.source.text:
        raise ArgumentError("a plan with an edited source can't be saved", fix="compile it without source=")
    plan = executable.plan.whole
    from monoplan.ir.printer import print_graph

    graph, names = _closed(plan)
    _check_types(graph, specs, built.out_tree)
    binary = executable.entry.binary
    if not binary.exists():  # it left the cache meanwhile
        binary = executable._load()[1].binary
    number = f"{sum(name.endswith('.ir') for name in members)}"
    source = executable.source.load() if isinstance(executable.source, _Later) else executable.source
    made = dataclasses.replace(plan, graph=graph, notes=None)
    call = (
        (graph.name, graph.inputs, graph.outputs, graph.writes, graph.symbols),
        (plan.arena.slots, tuple(where if isinstance(where, int) else None for where in plan.outputs), plan.work),
        built.shape_constraints,
    )
    members[f"{number}.ir"] = print_graph(graph, locs=True).encode()
    members[f"{number}.plan"] = _recorded((made, source), classes())
    members[f"{number}.call"] = _recorded(call, _CALL)
    members[f"{number}.so"] = binary.read_bytes()
    params = []
    for use, array in zip(plan.params, executable.params, strict=True):
        at = next((i for i, a in enumerate(arrays) if _are_equal(a, array)), len(arrays))
        arrays += [array] if at == len(arrays) else []
        layout = None if use.layout is None else dataclasses.astuple(use.layout)
        params.append([names[use.value], at, layout])
    return {
        "number": number,
        "arguments": _tree_data(tree),
        "leaves": [_leaf_data(x) for x in specs],
        "results": _tree_data(built.out_tree),
        "params": params,
    }


def _recorded(value: Any, kinds: Sequence[type]) -> bytes:
    try:
        return json.dumps(records.dump(value, kinds)).encode()
    except records.RecordError as error:
        raise ArgumentError("the plan can't be saved", why=str(error)) from None


def _closed(plan: Any) -> tuple[Graph, dict[Any, str]]:
    """The graph over the weights as kernels get them, in place of those that setup ops make them of; their names."""
    from monoplan.codegen.cpu.render import weight_names
    from monoplan.ir.graph import Param

    names: dict[Any, str] = {}
    for use in plan.params:
        whole = weight_names(plan.graph, use.value)[1]
        if use.value not in names:
            names[use.value] = whole if whole not in names.values() else f"{whole} #{len(names)}"
    params = tuple(Param(value, name) for value, name in names.items())
    return plan.graph.replace(params=params, setup=()), names


def _are_equal(a: Array, b: Array) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


def _tree_data(tree: Tree) -> dict[str, Any]:
    """A structure as JSON."""
    if tree.cls is not None and tree.cls not in _OBJECTS.values():
        what = f"arguments and results of the class {tree.cls.__name__} can't be saved"
        raise ArgumentError(what, why="its code is not part of the file", fix="use dicts, lists and tuples")
    meta = list(tree.meta) if isinstance(tree.meta, tuple) else tree.meta
    for value in (*tree.keys, *(meta if isinstance(meta, list) else [meta])):
        _check_scalar(value)
    data = {"kind": tree.kind, "keys": list(tree.keys), "children": [_tree_data(c) for c in tree.children]}
    return data | {"meta": meta} | ({"class": tree.cls.__name__} if tree.cls is not None else {})


def _leaf_data(x: Any) -> dict[str, Any]:
    if isinstance(x, Spec):
        return {"type": str(x.type)}
    _check_scalar(x)
    return {"value": x}


def _check_scalar(x: Any) -> None:
    if type(x) not in _SCALARS or (isinstance(x, float) and not math.isfinite(x)):
        raise ArgumentError(f"the constant {x!r:.60} can't be saved", fix="pass it as an array")


def _model(lm: CompiledLM, members: dict[str, bytes]) -> dict[str, Any]:
    """What a language model is besides its plans."""
    from monoplan.models.text.tokenizer import MissingTokenizer, Tokenizer

    try:
        tokenizer = lm.tokenizer
    except MissingTokenizer:
        tokenizer = None
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise ArgumentError(f"a tokenizer of the class {type(tokenizer).__name__} can't be saved")
    if tokenizer is not None:
        members["tokenizer"] = _tokenizer_text(tokenizer).encode()
    config = {f.name: getattr(lm.config, f.name) for f in dataclasses.fields(lm.config)}
    numbers = {name: getattr(lm, name) for name in ("num_parameters", "weight_bytes", "bytes_per_token")}
    return {
        "class": type(lm.config).__name__,
        "config": {k: dict(v) if isinstance(v, Mapping) else v for k, v in config.items()},
        "name": os.path.basename(lm.name_or_path),
        "dtype": lm.dtype.name,
        "cache_dtype": lm.cache_dtype.name,
        "prefill_chunk": lm.prefill_chunk,
        "numbers": numbers,
        "tokenizer": None
        if tokenizer is None
        else {
            "bos_id": tokenizer.bos_id,
            "eos_ids": sorted(tokenizer.eos_ids),
            "add_bos": tokenizer.add_bos,
            "chat_template": tokenizer.chat_template,
            "special_tokens": tokenizer.special_tokens,
            "vocab_size": tokenizer.vocab_size,
        },
    }


def _tokenizer_text(tokenizer: Any) -> str:
    """tokenizer.json; merges in their older form, `a b`, are read in three quarters of the time."""
    from tokenizers import Tokenizer as Core

    text = str(tokenizer._core.to_str())
    data = json.loads(text)
    merges = data["model"].get("merges")
    if merges:
        data["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
        shorter = json.dumps(data, ensure_ascii=False)
        with contextlib.suppress(Exception):  # the library raises bare ones: a token has a space
            if Core.from_str(shorter).to_str() == text:
                return shorter
    return text


# -- loading ---------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Compiled | CompiledLM:
    """A compiled module, or a language model, from a file that `save` wrote.

    The file has machine code and describes memory that it reads and writes. `trust=True` says that you trust who made
    the file as you trust who made a program that you run: then, on the kind of machine that it was made for, the file
    is mapped and its code runs; nothing is traced, rendered or compiled. A file that this user saved with this cache
    directory is known, and used without being asked for. Any other file is data: the graph in it is checked and
    compiled anew, which needs a C compiler, and none of its code runs. The same happens on another kind of machine, and
    in another version of monoplan. Do not write to a file while a process has it mapped: make another and rename it.
    """
    return _loaded(PlanFile.open(path, mapped=trust), trust)


@kept()
def _loaded(file: PlanFile, trust: bool) -> Compiled | CompiledLM:
    try:
        about = file.about
        arrays = file.arrays(quickly=trust)
        believed = trust or facts.recall("saved", file.digest) is not None
        problem = _other_kind(about)
        if not believed:
            problem = "its code is not trusted: it was not saved by this user with this cache directory"
        if problem:
            _check_compiler(file, problem, believed)
        reader = _Reader(file, arrays, rebuild=bool(problem))
        if "model" in about:
            from monoplan.llm import LoadedLM

            plans = {str(name): reader.compiled(p) for name, p in about["plans"].items()}
            made: Any = LoadedLM(about["model"], plans, functools.partial(file.member, "tokenizer"), believed)
            if trust:
                made.tokenizer  # noqa: B018  (it is read while the weights are checked)
        else:
            made = reader.compiled(about["module"])
        file.finish()
        return made  # type: ignore[no-any-return]
    except MonoplanError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise file.refuse(f"its contents do not fit together ({type(error).__name__}: {error})") from None


def _check_compiler(file: PlanFile, problem: str, believed: bool) -> None:
    """Raises where a plan must be built again and there is no compiler."""
    from monoplan.runtime.build.compilers import find_compiler

    try:
        find_compiler()
    except CompileError as error:
        fix = "" if believed else "mp.load(path, trust=True), if you trust who made it as the maker of a program; or "
        what = "the saved plan must be compiled again, and there is no C compiler"
        raise CompileError(what, where=file.where, why=f"{problem}; {error.what}", fix=fix + error.fix) from None


def _other_kind(about: Mapping[str, Any]) -> str:
    """Why the code of a file can't run here; empty if it can."""
    m, asked = about["machine"], os.environ.get("MONOPLAN_ISA", "").strip().lower()
    if about["form"] != _form():
        return f"it was saved by monoplan {about['monoplan']!s:.20}, this is {monoplan.__version__}"
    if m["system"] != sys.platform or m["arch"] != features.machine():
        return f"it was saved for {m['system']!s:.20} on {m['arch']!s:.20}"
    if not _is_as_new(m["libc"]):
        return f"it was built with {m['libc']!s:.20}, here is {features.libc()}"
    _, flags = features.read_cpu()
    if m["isa"] not in features.levels(m["arch"], flags) or not flags.issuperset(m["flags"]):
        return f"this CPU lacks instructions that it was saved for ({m['isa']!s:.20})"
    if asked and asked != m["isa"]:
        return f"MONOPLAN_ISA is {asked}, it was saved for {m['isa']!s:.20}"
    if m["isa"] == "amx" and not features.request_tiles():
        return "the kernel refused the tile permission"
    return ""


def _is_as_new(libc: str) -> bool:
    """Whether the C library here is the same, or a newer one of the same kind."""
    (kind, wanted), (own, have) = ((re.sub(r"[\d.]+$", "", t), re.findall(r"\d+", t)) for t in (libc, features.libc()))
    return kind == own and list(map(int, have)) >= list(map(int, wanted))


@functools.cache
def _form() -> str:
    """What records and libraries depend on: this version, the fields of the classes, the functions of a library."""
    fields = [[c.__name__, *(f.name for f in dataclasses.fields(c))] for c in _CALL]
    return hashlib.sha256(json.dumps([monoplan.__version__, ABI, CDEF, fields]).encode()).hexdigest()[:16]


def classes() -> tuple[type, ...]:
    """The classes that a whole plan is made of."""
    from monoplan import plan_cache

    return plan_cache.classes()


@dataclass
class _Reader:
    """Makes compiled modules of what a file holds; `rebuild`: from its graph, else from its plan and code."""

    file: PlanFile
    arrays: Sequence[Array]
    rebuild: bool

    def compiled(self, data: Mapping[str, Any]) -> Compiled:
        made = Compiled(_module(data), options=Options(threads=_threads(data["threads"])))
        made.declared = bool(data["declared"])
        for described in data["plans"]:
            tree, leaves = _tree(described["arguments"]), [_leaf(x) for x in described["leaves"]]
            results = _tree(described["results"])
            unflatten(tree, leaves)  # raises unless they belong together
            made.built.append((tree, leaves, self.built(described, leaves, results, made.options)))
        if not made.built:
            raise self.file.refuse("it has no plan")
        return made

    def built(self, data: Mapping[str, Any], leaves: Sequence[Any], results: Tree, options: Options) -> Built:
        number, clock = str(data["number"]), Clock()

        def used() -> dict[str, tuple[Array, Any]]:  # of several layouts of a weight the first
            return {str(name): (self.arrays[at], _layout(layout)) for name, at, layout in reversed(data["params"])}

        if self.rebuild:
            planned, tensors = self.planned(number, used())
            _check_types(planned.graph, leaves, results)
            from monoplan.driver import build_stage, module_source

            executable = build_stage(planned, module_source(tensors), options, None, clock)
        else:
            planned = self.mapped(number)
            tensors = _Tensors(lambda: {p.path: p.value.type for p in planned.graph.params}, used)
            from monoplan.runtime.machine.threads import check_threads, default_threads

            threads = default_threads().count if options.threads is None else check_threads(options.threads)
            params = [self.arrays[at] for _, at, _ in data["params"]]
            executable = _SavedExecutable(self.file, number, planned.plan, planned.source, params, threads)
        clock.lap("load")
        remake = functools.partial(_stages, executable.plan)
        return Built(dataclasses.replace(planned, remake=remake), executable, results, tensors, "cpu", clock.laps)

    def mapped(self, number: str) -> Planned:
        """The plan of a file that is trusted. A call needs little of it: kernels and schedules are read when they are
        looked at, and so is the code that knows them."""

        @functools.cache
        def whole() -> Any:
            try:
                return records.load(json.loads(self.file.member(f"{number}.plan")), classes())
            except records.RecordError:
                raise self.file.refuse("the plan in it is that of other code") from None

        described, memory, constraints = records.load(json.loads(self.file.member(f"{number}.call")), _CALL)
        name, inputs, outputs, writes, symbols = described
        graph: Any = _Later(
            lambda: whole()[0].graph, name=name, inputs=inputs, outputs=outputs, writes=writes, symbols=symbols
        )
        slots, places, work = memory
        known = {"name": name, "graph": graph, "symbols": (*symbols, "threads")}
        plan = _Later(lambda: whole()[0], **known, arena=_Slots(slots), outputs=places, work=work)
        return Planned(graph, constraints, plan, _Later(lambda: whole()[1]))

    def planned(self, number: str, used: Mapping[str, tuple[Array, Layout | None]]) -> tuple[Planned, _Tensors]:
        """The plan of a graph that nobody vouches for, for this machine."""
        from monoplan.driver import plan_stage, source_stage
        from monoplan.ir.parser import parse_graph
        from monoplan.ir.shape_constraints import shape_constraints
        from monoplan.ir.verifier import verify

        graph = parse_graph(self.file.text(f"{number}.ir"))
        verify(graph)
        types = {p.path: p.value.type for p in graph.params}
        if graph.setup or types.keys() != used.keys() or len(types) < len(graph.params):
            raise self.file.refuse("its weights are not those of its graph")
        for path, (array, layout) in used.items():
            _check_weight(self.file, path, types[path], array, layout)
        plan = plan_stage(graph, "cpu", Options())
        return Planned(graph, shape_constraints(graph), plan, source_stage(plan)), _Tensors(lambda: types, lambda: used)


class _Later:
    """An object of which some attributes are known, and the rest is read when one of it is wanted."""

    def __init__(self, load: Callable[[], Any], **known: Any) -> None:
        self.__dict__.update(known, load=load)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)


@dataclass
class _Slots:
    """An arena of which only the places are known."""

    slots: tuple[tuple[Any, ...], ...]

    def layout(self, symbols: Mapping[str, int]) -> tuple[list[int], int]:
        return slot_offsets(self.slots, symbols)


def _stages(plan: Any) -> tuple[list[Any], Any]:
    """What can be shown of how a plan was made: its graph after all passes."""
    from monoplan.passes.manager import Stage

    return [Stage("trace", "the graph as it was saved", plan.whole.graph, 0, 0.0, (), True)], plan.whole


def _check_types(graph: Graph, leaves: Sequence[Any], results: Tree) -> None:
    """Raises unless arguments and results of a call are those of the graph."""
    unflatten(results, range(len(graph.outputs) - len(graph.writes)))  # raises unless they are as many
    if [x.type for x in leaves if isinstance(x, Spec)] != [v.type for v in graph.inputs]:
        raise ArgumentError(f"the arguments of {graph.name} are not the inputs of its graph")


def _check_weight(file: PlanFile, path: str, kind: TensorType, array: Array, layout: Layout | None) -> None:
    """Raises unless an array can be a weight of that type; panels of other sizes would be read beyond their end."""
    from monoplan.codegen.formats import FORMATS

    sizes = [n for n in kind.shape if isinstance(n, int)]
    if len(sizes) < len(kind.shape):
        raise file.refuse(f"the weight {path} has no fixed size")
    if layout is not None and layout.panel:
        count, depth = sizes[0], math.prod(sizes[1:])
        packed = next(f for f in FORMATS if f.name == layout.format)
        fits = len(sizes) > 1 and packed.dtype == kind.dtype and count % (layout.head_dim or 1) == 0
        columns = layout.rows(count).size if fits else 0
        least = columns // layout.panel * packed.panel_bytes(depth, layout.panel)
        fits = fits and least > 0 and (array.nbytes == least if packed.fixed_size else array.nbytes > least)
    elif kind.dtype.is_low_bit:
        size = kind.dtype.stored_bytes(sizes[-1]) if sizes else 0
        fits = array.dtype == np.uint8 and array.shape == (*sizes[:-1], size)
    else:
        fits = array.dtype == kind.dtype.numpy and list(array.shape) == sizes
    if not fits:
        raise file.refuse(f"the array of the weight {path} does not fit its type {kind}")


class _Tensors(Mapping[str, Any]):
    """The weights of a saved plan by their names, as parameters that are unpacked when they are read."""

    def __init__(
        self, types: Callable[[], Mapping[str, TensorType]], used: Callable[[], Mapping[str, tuple[Array, Any]]]
    ) -> None:
        self._types, self._used = types, used
        self.made: dict[str, Parameter] = {}

    def __getitem__(self, path: str) -> Parameter:
        if path not in self.made:
            self.made[path] = _parameter(path, self._types()[path], *self._used()[path])
        return self.made[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._types())

    def __len__(self) -> int:
        return len(self._types())


def _parameter(path: str, kind: TensorType, array: Array, layout: Layout | None) -> Parameter:
    from monoplan.codegen.formats import FORMATS
    from monoplan.frontend.parameter import Parameter, low_bit_part
    from monoplan.runtime.cpu.weights import unpack

    def whole() -> Array:
        try:
            return unpack(array, layout, kind)
        except (ValueError, IndexError, TypeError, MemoryError, OverflowError) as error:
            raise LoadError(f"the weight {path} of a saved plan can't be unpacked", why=str(error)) from None

    def blocks(part: Any = None) -> Array:
        return low_bit_part(whole(), part, kind.dtype)

    def values(part: Any = None) -> Array:
        found: Array = whole()
        if kind.dtype.is_low_bit:
            found = next(f for f in FORMATS if f.dtype == kind.dtype).values(found)  # type: ignore[attr-defined]
        return (found if part is None else part.cut(found)).copy()

    stored = kind.dtype.values.numpy
    made = Parameter(np.broadcast_to(np.zeros((), stored), kind.shape))  # type: ignore[arg-type]
    low = kind.dtype if kind.dtype.is_low_bit else None
    made.defer(values, None, low, blocks if low else None)
    return made


class _SavedExecutable(CpuExecutable):
    """A plan with the library of a file that is trusted."""

    def __init__(self, file: PlanFile, number: str, plan: Any, source: Any, params: Any, threads: int) -> None:
        self._file, self._number = file, number
        super().__init__(plan, source, params, threads)

    def _declared(self) -> Any:
        return toolchain.declared_by(self._file.text("cffi"))

    def _load(self) -> tuple[Any, Any]:
        binary, problems = self._file.member(f"{self._number}.so"), []
        for base in (None, os.environ.get("XDG_RUNTIME_DIR") or None):
            try:
                folder = cache_places.private_directory(base)
                path = folder / "plan.so"
                path.write_bytes(binary)
                library = self.ffi.dlopen(str(path))
            except OSError as error:  # a place without room, or where nothing may run
                problems.append(str(error))
                continue
            return library, cache.Entry(folder, folder / "plan.c", path, True, "")
        raise CompileError(
            "the library of the saved plan can't be loaded", where=self._file.where, why="; ".join(problems)
        )


class SavedModule(Module):
    """Stands for a module whose plan was saved: it has a name and arguments, and no code."""

    _signature: inspect.Signature

    def signature(self) -> inspect.Signature:
        return self._signature

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(
            f"{type(self).__name__} was loaded from a file, which has plans for certain arguments only",
            why="there is no forward to trace for others",
            fix="compile the module with mp.spec for sizes that differ, or call it with these arguments before saving",
        )


def _module(data: Mapping[str, Any]) -> Module:
    name, kinds = data["class"], inspect._ParameterKind.__members__
    parameters = []
    for given, kind, optional in data["signature"]:
        default = None if optional else inspect.Parameter.empty
        parameters.append(inspect.Parameter(given, kinds[kind], default=default))
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError("a class has no name")
    made: Module = type(name, (SavedModule,), {})()
    object.__setattr__(made, "_signature", inspect.Signature(parameters))
    return made


def _threads(given: Any) -> int | None:
    if given is not None and (type(given) is not int or not 0 < given < 4096):
        raise ValueError("no number of threads")
    return given


def _leaf(data: Mapping[str, Any]) -> Any:
    if "type" in data:
        from monoplan.ir.parser import parse_type

        return Spec(parse_type(data["type"]))
    if type(data["value"]) not in _SCALARS:
        raise ValueError("no constant")
    return data["value"]


def _tree(data: Mapping[str, Any], depth: int = 0) -> Tree:
    """The structure that JSON describes; raises where it describes none."""
    kind, keys, children = data["kind"], tuple(data["keys"]), data["children"]
    if (
        kind not in _KINDS
        or len(keys) != len(children)
        or depth > _DEEPEST
        or not all(type(k) in _SCALARS for k in keys)
    ):
        raise ValueError("no structure")
    meta = tuple(data["meta"]) if isinstance(data["meta"], list) else data["meta"]
    if not all(type(x) in _SCALARS for x in (meta if isinstance(meta, tuple) else (meta,))):
        raise ValueError("no structure")
    cls = _OBJECTS[data["class"]] if kind == "object" else None
    made = Tree(kind, keys, tuple(_tree(c, depth + 1) for c in children), cls, meta)
    if cls is not None and (keys != _CACHES[cls] or not _is_meta(cls, meta, made)):
        raise ValueError("no cache")
    return made


def _is_meta(cls: type, meta: Any, tree: Tree) -> bool:
    """Whether a cache of a class may have this beside its parts: no limit, and the layers that keep a window."""
    if cls is not WindowKVCache:
        return bool(meta == (() if cls is PagedKVCache else (None,)))
    layers = len(tree.children[0].children)
    return (
        isinstance(meta, tuple)
        and len(meta) > 2
        and meta[0] is None
        and all(type(n) is int for n in meta[1:])
        and meta[1] > 0
        and all(0 <= n < layers for n in meta[2:])
    )


def _layout(data: Any) -> Layout | None:
    from monoplan.codegen.formats import FORMATS, Layout

    if data is None:
        return None
    made = Layout(*data)
    known = made.format in (f.name for f in FORMATS) and made.order in ("plain", "stacked", "gated", "heads")
    numbers = (made.panel, made.panels, made.head_dim)
    if not known or any(type(n) is not int or not 0 <= n <= 1 << 16 for n in numbers) or not made.panels:
        raise ValueError("no layout")
    if (made.order == "heads") != (0 < made.head_dim <= made.width) or (made.order == "gated" and made.panel % 2):
        raise ValueError("no layout")
    return made
