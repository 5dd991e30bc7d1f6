"""compile(): a Module becomes a callable plan that shows every step of its making."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from monoplan.arguments import (
    KEPT,
    Call,
    KnownCalls,
    adopt,
    array_spec,
    as_compiled,
    assign,
    check_shared,
    is_array,
    match,
    read_only,
    same_constant,
)
from monoplan.built import Built
from monoplan.codegen.text import file_name
from monoplan.frontend.context import shortened
from monoplan.frontend.guards import Guards
from monoplan.frontend.module import HeldWeights, Module
from monoplan.frontend.parameter import changes
from monoplan.frontend.pytree import Tree, flatten, unflatten
from monoplan.frontend.specs import Spec
from monoplan.frontend.tensor import Tensor
from monoplan.inspect.inspection import Inspection
from monoplan.ir.dims import Expr, equal, symbol, symbols_of
from monoplan.ir.errors import ArgumentError, MonoplanError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.shape_constraints import SizeError
from monoplan.ir.types import TensorType, as_dtype, as_weight_dtype, plain_array
from monoplan.options import Options, debug_level, find_target
from monoplan.parallel import find_communicator
from monoplan.runtime.warn import warn

if TYPE_CHECKING:
    from monoplan.llm import CompiledLM
    from monoplan.models.llama import LlamaForCausalLM

KEPT_VALUES = 16  # sets of plain values of a module whose plans are kept
MANY_PLANS = 8  # for the values of one argument: then somebody should know


@dataclass
class Stats:
    """Counts of a Compiled: plans made, how many binaries came from the cache, and milliseconds of each stage."""

    compiles: int = 0
    cache_hits: int = 0
    calls: int = 0
    milliseconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, times: Mapping[str, float]) -> None:
        for name, value in times.items():
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + value


@dataclass(frozen=True)
class _Plans:
    """The plans for one set of plain values of the module, and what is known about calls of them."""

    built: list[tuple[Tree, list[Any], Built]]
    known: KnownCalls
    matched: dict[Any, tuple[Tree, Built, dict[str, int]]]
    guards: Guards


class Compiled(Inspection):
    """A compiled Module. Called like it, with arrays or Tensors; returns arrays in forward's structure.

    Arrays may be numpy's, or any library's that speaks DLPack or has __cuda_array_interface__ (CuPy, torch): those are
    used in place. Results are numpy arrays; with target="cuda" and an argument in the GPU's memory, CuPy arrays.

    Without specs it is traced at the first call, for just those shapes; a call with other sizes generalizes the
    dimensions that changed to symbols, so a second plan serves all further sizes.

    A plan has its own copy of the weights. When the module gets others (load_state_dict, load_parameter, another
    Parameter), the next call makes the plan anew; an array of weights that is changed in place is not noticed. Plain
    attributes that forward reads (numbers, strings, arrays, containers of them) are guarded: other values have other
    plans, which are kept beside those of the old ones.
    """

    def __init__(
        self,
        module: Module,
        *specs: Any,
        target: str | None = None,
        dtype: Any = None,
        options: Options | Mapping[str, Any] | None = None,
        tp: Any = None,
        **kw_specs: Any,
    ) -> None:
        if not isinstance(module, Module):
            raise _no_module(module)
        self.module, self.target = module, find_target(target, module)
        self.dtype = None if dtype is None else as_weight_dtype(dtype)
        self.options = Options.make(options)
        self.tp = find_communicator(tp, module)
        self.stats = Stats()
        self._lock = threading.RLock()
        self.built: list[tuple[Tree, list[Any], Built]] = []
        self._known = KnownCalls(module, self.target)
        self._matched: dict[Any, tuple[Tree, Built, dict[str, int]]] = {}
        self._weights = HeldWeights(module)
        self._guards = Guards()  # of all plans in `built`
        self._others: list[_Plans] = []  # for other values of what is guarded
        self.declared = bool(specs or kw_specs)
        if self.declared:
            given = module.bind_arguments(specs, kw_specs)
            leaves, tree = flatten(given)
            _check_specs(given, leaves)
            # An array stands for its type, as at the first call of a module that has no specs.
            self._build(unflatten(tree, [_spec_of(name, _adopted(name, x, self.target)) for name, x in leaves]))

    # -- calling ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if changes() != self._guards.settled:
                self._check_state()
            known, found = self._known.last, args
            if known is None or kwargs or not known.takes(self.module.forward, args):
                known, found = self._known.find(args, kwargs)
                if known is None:
                    return self._call_anew(args, kwargs, found)
            outputs = known.run(found)
        except MonoplanError as error:
            raise shortened(error) from error.__cause__
        self.stats.calls += 1
        for number, result in known.copied:
            assign(found[number], outputs[result])
        return known.result(outputs)

    def _check_state(self) -> None:
        """Finds the plans for what the module has now, if it has other weights or plain values since the last call."""
        guards, now = self._guards, changes()
        if self._weights.are_replaced() or not guards.hold():
            self._renew()
        else:
            guards.settle(now)

    def _renew(self) -> None:
        """Drops the plans of weights that the module has no longer, and finds those for its plain values."""
        with self._lock:
            replaced = self._weights.are_replaced()
            if not replaced and self._guards.hold():
                return  # another thread was first
            weights, old = HeldWeights(self.module), _Plans(self.built, self._known, self._matched, self._guards)
            others = [] if replaced else [*self._others, old]
            found = next((p for p in others if p.guards.hold()), None)
            if found is None:
                self._take(_Plans([], KnownCalls(self.module, self.target), {}, Guards()))
                try:
                    if self.declared:
                        self._build(unflatten(old.built[0][0], old.built[0][1]))
                except BaseException:
                    self._take(old)  # the next call tries again
                    raise
                self._count_states(others)
            else:
                self._take(found)
            self._weights, self._others = weights, [p for p in others if p is not found][-KEPT_VALUES:]

    def _take(self, plans: _Plans) -> None:
        self.built, self._known, self._matched, self._guards = plans.built, plans.known, plans.matched, plans.guards

    def _count_states(self, others: list[_Plans]) -> None:
        """Warns when a plain value that forward reads has had many values: each has plans of its own."""
        if len(others) == MANY_PLANS - 1:
            names = sorted({r.what for p in others for r in p.guards.reads if not r.holds()})
            what = f"{type(self.module).__name__}: {MANY_PLANS} plans were made for values of {', '.join(names)}"
            warn(f"{what}; an argument of forward that is an array has one plan for all of them")

    def _call_anew(self, args: Sequence[Any], kwargs: Mapping[str, Any], call: Call | None) -> Any:
        """A call whose arguments are matched with the plans, or brought into a form that a plan takes."""
        built, given, arrays, symbols = self._bind(args, kwargs)
        if call is not None and self._as_declared(args, kwargs):
            self._known.remember(call, built, symbols, arrays)
        writes = built.graph.writes
        for number, _ in writes:
            _check_writeable(given[number], built.graph.inputs[number].name)
        if writes:
            check_shared(built, [x.numpy() if isinstance(x, Tensor) else x for x in given])
        outputs = built.run(arrays, symbols)
        self.stats.calls += 1
        for number, result in writes:
            _write_back(given[number], outputs[result])
        returned = len(built.graph.outputs) - len(built.graph.writes)
        return unflatten(built.out_tree, list(outputs[:returned]))

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Built, list[Any], list[Any], dict[str, int]]:
        """The plan of a call, the caller's arrays and Tensors, the arrays to run on, and the values of the symbols."""
        self._check_state()
        arguments = self.module.bind_arguments(args, kwargs)
        leaves, tree = flatten(arguments)
        plain = all(isinstance(x, Tensor | np.ndarray) for _, x in leaves)
        if self.declared and not (plain and tree == self.built[0][0]):
            leaves, tree = flatten(as_compiled(arguments, self.built[0][0], iter(self.built[0][1])))
        values = [(name, _adopted(name, x, self.target)) for name, x in leaves]
        given = [_owner(x, v) for (_, x), (_, v) in zip(leaves, values, strict=True) if is_array(v)]
        arrays = [_contiguous(v) for _, v in values if is_array(v)]
        # A decode loop calls with the same shapes again and again: what was matched once is not matched again.
        key = tuple((a.shape, a.dtype) for a in arrays)
        known = self._matched.get(key) if len(arrays) == len(values) else None
        if known is not None and known[0] == tree:
            return known[1], given, arrays, known[2]
        with self._lock:  # two threads that need the same new plan make one
            built, symbols = self._find(tree, values)
        if len(self._matched) >= KEPT:
            self._matched.clear()
        self._matched[key] = (tree, built, symbols)
        return built, given, arrays, symbols

    def _as_declared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the arrays of a call come in the order of its plan: the keys of a dict may come in another."""
        return not self.declared or flatten(self.module.bind_arguments(args, kwargs))[1] == self.built[0][0]

    def _find(self, tree: Tree, values: list[tuple[str, Any]]) -> tuple[Built, dict[str, int]]:
        """The plan that fits these arguments, and its symbols' values; a lazily traced module gets a new one."""
        problem: MonoplanError | None = None
        alone = False  # whether a plan for any size does not take these
        for known_tree, specs, built in self.built:
            try:
                return built, match(tree, values, known_tree, specs, built)
            except MonoplanError as error:
                problem = error
                alone = alone or isinstance(error, SizeError)
        if self.declared:
            assert problem is not None
            raise problem
        specs = [_spec_of(name, v) for name, v in values]
        wider = None if alone else self._generalize(tree, values)
        for candidate in ([wider] if wider else []) + [specs]:
            try:
                built = self._build(unflatten(tree, candidate))
                self._count_values(tree, values)
                return built, built.check([v for _, v in values if is_array(v)])
            except MonoplanError:
                if candidate is specs:
                    raise
        raise AssertionError("unreachable")

    def _count_values(self, tree: Tree, values: list[tuple[str, Any]]) -> None:
        """Warns when arguments that are no arrays have had many values: each one has a plan of its own."""
        alike = [specs for known, specs, _ in self.built if known == tree]
        if len(alike) == MANY_PLANS:
            pairs = [(name, v, [specs[i] for specs in alike]) for i, (name, v) in enumerate(values) if not is_array(v)]
            names = [name for name, v, seen in pairs if not all(same_constant(x, v) for x in seen)]
            if names:
                what = f"{type(self.module).__name__}: {len(alike)} plans were made for values of {', '.join(names)}"
                warn(f"{what}; an array, as np.array(0.5, np.float32), has one plan for all of them")

    def _generalize(self, tree: Tree, values: list[tuple[str, Any]]) -> list[Any] | None:
        """Specs where sizes that differ from an earlier plan's are symbols; equal changes share one."""
        for known_tree, specs, _ in reversed(self.built):
            if known_tree != tree:
                continue
            names: dict[tuple[Any, int], Expr] = {}
            sizes = [d for s in specs if isinstance(s, Spec) for d in s.type.shape]
            taken = [name for d in sizes for name in symbols_of(d)]
            result: list[Any] = []
            for (_, v), s in zip(values, specs, strict=True):
                if not isinstance(s, Spec):
                    if not same_constant(s, v):
                        return None
                    result.append(s)
                    continue
                if not is_array(v) or len(v.shape) != s.type.rank or as_dtype(v.dtype) != s.type.dtype:
                    return None
                shape = []
                for old, new in zip(s.type.shape, v.shape, strict=True):
                    if new == 0:  # symbols are at least 1
                        return None
                    if isinstance(old, Expr) or equal(old, new):
                        shape.append(old)
                    else:
                        if (old, new) not in names:
                            taken.append(next(n for i in itertools.count() if (n := f"d{i}") not in taken))
                            names[(old, new)] = symbol(taken[-1])
                        shape.append(names[(old, new)])
                result.append(Spec(TensorType(s.type.dtype, tuple(shape))))
            return result if names else None
        return None

    def _build(self, arguments: dict[str, Any]) -> Built:
        from monoplan.driver import build

        built = build(self.module, arguments, self.target, self.dtype, self.options, self.tp)
        leaves, tree = flatten(arguments)
        self.built.append((tree, [x for _, x in leaves], built))
        if built.guards.reads:
            self._guards = self._guards.joined(built.guards)
        self.stats.compiles += 1
        self.stats.cache_hits += built.hit
        self.stats.add(built.milliseconds)
        folder = self.options.dump or os.environ.get("MONOPLAN_DUMP")
        if folder:
            suffix = "" if len(self.built) == 1 else f"_{len(self.built)}"
            built.dump(Path(folder) / f"{file_name(built.graph.name)}{suffix}")
        _report(built)
        return built

    # -- looking inside -----------------------------------------------------------------------------------------

    def _latest(self) -> Built:
        if not self.built:
            raise ArgumentError(
                "nothing is compiled yet: the module is traced at its first call",
                fix="call it once, or give specs to compile()",
            )
        return self.built[-1][2]

    def export(self, folder: str | os.PathLike[str], *, isa: str | None = None, name: str = "model") -> Path:
        """The plan and its weights as a C program that needs no Python: see docs/export.md.

        `isa`: the instruction set, "generic" for any CPU, None for this machine's. `name` begins the names of files and
        functions.
        """
        from monoplan.export import export

        return export(self._latest(), Path(folder), isa, name)

    def __repr__(self) -> str:
        state = f"{len(self.built)} plans" if self.built else "not traced yet"
        return f"<Compiled {type(self.module).__name__} for {self.target}, {state}>"


@overload
def compile(  # type: ignore[overload-overlap]  # a language model with specs is a plain module
    module: LlamaForCausalLM,
    *,
    target: str | None = None,
    dtype: Any = None,
    options: Options | Mapping[str, Any] | None = None,
    source: str | os.PathLike[str] | None = None,
    tp: Any = None,
) -> CompiledLM: ...


@overload
def compile(
    module: Module,
    *specs: Any,
    target: str | None = None,
    dtype: Any = None,
    options: Options | Mapping[str, Any] | None = None,
    source: str | os.PathLike[str] | None = None,
    tp: Any = None,
    **kw_specs: Any,
) -> Compiled: ...


def compile(  # noqa: A001  (the public name)
    module: Module,
    *specs: Any,
    target: str | None = None,
    dtype: Any = None,
    options: Options | Mapping[str, Any] | None = None,
    source: str | os.PathLike[str] | None = None,
    tp: Any = None,
    **kw_specs: Any,
) -> Compiled | CompiledLM:
    """A compiled form of a Module: traced now if specs are given, else at the first call.

    `target`: cpu, cuda or reference; None: the device that a model was loaded for, and for other modules the CPU.
    `dtype`: of the weights, None: their own. For a language model on a CPU also fp8, q8_0 (int8), q4_0 (int4), q4_k
    and other types of GGUF files, to which matrices are rounded when they are packed. `options`: see docs/options.md.
    `source`: an edited plan.c to build in place of the generated one. `tp`: a communicator (or "mpi"), for a model that
    is divided between several ranks: see docs/parallel.md.
    """
    try:
        if source is not None:
            options = dataclasses.replace(Options.make(options), source=os.fspath(source))
        if hasattr(module, "generation_step") and not specs and not kw_specs:
            from monoplan.llm import CompiledLM

            dtype = None if dtype is None else as_weight_dtype(dtype, low_bits=True)
            return CompiledLM(module, target=target, dtype=dtype, options=options, tp=tp)
        if not specs and not kw_specs:
            kw_specs = getattr(module, "specs", {})  # of a module that knows them, as from_torch's do
        return Compiled(module, *specs, target=target, dtype=dtype, options=options, tp=tp, **kw_specs)
    except MonoplanError as error:
        raise shortened(error) from error.__cause__


def _no_module(given: Any) -> ArgumentError:
    """The error for what compile() can't take, with what to do instead."""
    homes = {c.__module__.partition(".")[0] for c in type(given).__mro__}
    what, why, fix = f"compile needs a monoplan.nn.Module, got {type(given).__name__}", "", ""
    if isinstance(given, type):
        what, fix = f"compile needs a Module, got the class {given.__name__}", f"mp.compile({given.__name__}(...))"
    elif "transformers" in homes:
        path = getattr(given, "name_or_path", "") or "path"
        why = "a plan is made of a Module's own ops, which this one does not call"
        fix = f"mp.compile(monoplan.models.AutoLlamaModel.from_pretrained({path!r}))"
    elif "torch" in homes:
        what = f"compile needs a monoplan.nn.Module, got the torch module {type(given).__name__}"
        why = "a plan is made of a Module's own ops, which this one does not call"
        fix = "mp.compile(mp.from_torch(module, example)): see docs/pytorch.md"
    elif callable(given):
        fix = "put it into forward of a monoplan.nn.Module"
    return ArgumentError(what, why=why, fix=fix)


def _check_specs(given: Mapping[str, Any], leaves: Sequence[tuple[str, Any]]) -> None:
    """Refuses a shape that stands for a spec: its numbers would be constants, and the module would have no inputs."""
    if any(isinstance(x, Spec | Tensor) or is_array(x) or hasattr(x, "__dlpack__") for _, x in leaves):
        return
    for name, value in given.items():
        sizes = isinstance(value, tuple | list) and value and all(x is None or isinstance(x, int | str) for x in value)
        if sizes:
            text = ", ".join('"batch"' if x is None or x == -1 else repr(x) for x in value)
            what = f"{value!r} for the argument {name} is no spec: the numbers of a tuple are constants"
            raise ArgumentError(what, fix=f"write mp.spec({text}) for an array of these sizes")


def _adopted(name: str, x: Any, target: str) -> Any:
    """A Tensor's array; an array of another library in place; numpy arrays in this machine's byte order."""
    if isinstance(x, Tensor):
        return x.numpy()
    try:
        if isinstance(x, np.ndarray):
            x = plain_array(x)
            return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
        return adopt(x, target)
    except ArgumentError as error:
        raise ArgumentError(f"argument {name}: {error.what}", why=error.why, fix=error.fix) from None


def _owner(given: Any, array: Any) -> Any:
    """Where a changed argument's new contents go: the caller's own array, in whose memory an adopted one lies."""
    return given if isinstance(given, Tensor | np.ndarray) else array


def _contiguous(a: Any) -> Any:
    """The array itself if it is dense and aligned, else a copy that is; device arrays are the device's business."""
    if not isinstance(a, np.ndarray):
        return a
    flags = a.flags
    return a if flags.c_contiguous and flags.aligned else np.require(a, None, ["C", "A"])


def _spec_of(name: str, v: Any) -> Any:
    try:
        return array_spec(v)
    except MonoplanError as error:
        raise ArgumentError(f"argument {name}: {error.what}", why=error.why, fix=error.fix) from None


def _check_writeable(leaf: Any, name: str) -> None:
    array = leaf.numpy() if isinstance(leaf, Tensor) else leaf
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise read_only(name)


def _write_back(leaf: Any, value: Any) -> None:
    """Puts the new contents of an argument that forward changed into the caller's own array."""
    assign(leaf.numpy() if isinstance(leaf, Tensor) else leaf, value)


def _report(built: Built) -> None:
    level = debug_level()
    if level >= 1:
        sys.stderr.write(built.describe(level))
