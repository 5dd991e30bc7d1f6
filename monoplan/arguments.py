"""Arguments of a call beside those that a plan was compiled for: what fits, and what an error says of the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import and_, attrgetter, eq, is_, itemgetter
from typing import Any

import numpy as np

from monoplan.built import Built
from monoplan.frontend.module import Module
from monoplan.frontend.pytree import NoOutline, Tree, outline, unflattener
from monoplan.frontend.specs import Spec, spec_of
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import exactly
from monoplan.ir.types import TensorType, address, as_dtype, torch_types


def as_compiled(x: Any, tree: Tree, specs: Iterator[Any], name: str = "") -> Any:
    """Arguments in the form that a plan was compiled for, as far as they have it.

    Lists and numbers become arrays where the plan takes arrays, and dicts get its order of the keys.
    """
    if tree.kind == "leaf":
        spec = next(specs)
        if not isinstance(spec, Spec) or not isinstance(x, list | tuple | int | float | np.generic):
            return x
        try:
            made = np.asarray(x)
            wanted = spec.type.dtype
            if made.dtype.kind in "iub" or (made.dtype.kind == "f" and wanted.is_float):
                return np.asarray(x, wanted.numpy)
            return made
        except (ValueError, OverflowError) as error:
            what = f"argument {name}: expected {spec.type}, got a {type(x).__name__}"
            raise ArgumentError(what, why=str(error)) from None
    if isinstance(x, dict) and tree.kind == "dict" and x.keys() == set(tree.keys):
        parts = zip(tree.keys, tree.children, strict=True)
        return {k: as_compiled(x[k], t, specs, _path(name, k)) for k, t in parts}
    if type(x) in (list, tuple) and tree.kind == type(x).__name__ and len(x) == len(tree.children):
        children = zip(tree.keys, x, tree.children, strict=True)
        return type(x)(as_compiled(v, t, specs, _path(name, i)) for i, v, t in children)
    for _ in range(_count_leaves(tree)):
        next(specs)
    return x


def _count_leaves(tree: Tree) -> int:
    return 1 if tree.kind == "leaf" else sum(map(_count_leaves, tree.children))


def match(tree: Tree, values: list[tuple[str, Any]], known: Tree, specs: list[Any], built: Built) -> dict[str, int]:
    """The values of a plan's symbols; raises unless arguments have its structure, constants, types and sizes."""
    if tree != known:
        problem = _difference(tree, known, iter(values), iter(specs))
        assert problem is not None, "trees that differ do so somewhere"
        raise problem
    arrays = []
    for (name, v), s in zip(values, specs, strict=True):
        if isinstance(s, Spec):
            if not is_array(v):
                raise ArgumentError(f"argument {name}: expected an array {s.type}, got {type(v).__name__}")
            if v.dtype != s.type.dtype.numpy:
                shown = f"dtype {v.dtype} with shape {list(v.shape)}"
                raise ArgumentError(f"argument {name}: expected {s.type}, got {shown}")
            arrays.append(v)
        elif not same_constant(s, v):
            raise ArgumentError(f"argument {name}: this plan was compiled for {s!r}, got {v!r}")
    return built.check(arrays)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two leaves that are no arrays are the same: 1, 1.0 and True are not, nor are 0.0 and -0.0."""
    return type(a) is type(b) and bool(exactly(a) == exactly(b))


def _difference(
    got: Tree, known: Tree, values: Iterator[tuple[str, Any]], specs: Iterator[Any], name: str = ""
) -> ArgumentError | None:
    """The first place where two structures differ, as an error; None if they are equal there and below."""
    if got.kind == known.kind == "leaf":
        next(values), next(specs)  # types and sizes are compared later
        return None
    if got.kind == known.kind == "dict" and set(got.keys) != set(known.keys):
        return _wrong_keys(got, known, list(values), list(specs), name)
    if (got.kind, got.cls, got.meta, got.keys) != (known.kind, known.cls, known.meta, known.keys):
        expected = _described(known, next(specs) if known.kind == "leaf" else None)
        shown = _described(got, next(values)[1] if got.kind == "leaf" else None)
        if expected == shown:  # objects that hold something besides arrays, such as the limit of a KVCache
            expected, shown = f"{expected} with {known.meta}", f"{shown} with {got.meta}"
        return ArgumentError(f"argument {name}: expected {expected}, got {shown}")
    for key, ours, theirs in zip(known.keys, got.children, known.children, strict=True):
        found = _difference(ours, theirs, values, specs, _path(name, key))
        if found is not None:
            return found
    return None


def _wrong_keys(got: Tree, known: Tree, values: list[tuple[str, Any]], specs: list[Any], name: str) -> ArgumentError:
    """The error for a missing or a surplus key; the lists begin with the leaves of the two dicts."""
    for i, key in enumerate(known.keys):
        if key not in got.keys:
            at = sum(map(_count_leaves, known.children[:i]))
            expected = _described(known.children[i], specs[at] if known.children[i].kind == "leaf" else None)
            what = f"argument {_path(name, key)} is missing: expected {expected}, as the plan was compiled with"
            return ArgumentError(what, fix="give it, or compile without it")
    i, key = next((i, key) for i, key in enumerate(got.keys) if key not in known.keys)
    at = sum(map(_count_leaves, got.children[:i]))
    shown = _described(got.children[i], values[at][1] if got.children[i].kind == "leaf" else None)
    what = f"argument {_path(name, key)} is one too many: got {shown}, but the plan was compiled without it"
    return ArgumentError(what, fix="leave it out, or compile with it")


def _described(tree: Tree, leaf: Any = None) -> str:
    """A part of the arguments in words; `leaf` is the Spec or the value of one that has no parts."""
    if tree.kind == "leaf":
        if isinstance(leaf, Spec):
            return f"an array {leaf.type}"
        return f"an array {leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else f"{leaf!r:.60}"
    if tree.kind == "none":
        return "None"
    if tree.kind == "dict":
        return f"a dict with {', '.join(map(str, tree.keys)) or 'no keys'}"
    return tree.cls.__name__ if tree.cls is not None else f"a {tree.kind} of {len(tree.children)}"


def _path(name: str, key: Any) -> str:
    """The name of a part, as `flatten` gives it."""
    return f"{name}.{key}" if name else str(key)


# Calls like earlier ones: recognised by structure and types alone, without matching them to a plan again.
#
# Nothing is taken on trust: shape, dtype and flags of every array are read at every call, since arrays can be changed
# in place. What is saved is finding the names of the arguments, their tree and the plan that fits.


KEPT = 1024  # calls of different sizes that are remembered
_SHAPE, _DTYPE, _FLAGS = attrgetter("shape"), attrgetter("dtype"), attrgetter("flags.num")
_NUMPY, _ARRAYS = np.ndarray, frozenset((np.ndarray, np.memmap))
_DENSE, _WRITEABLE = 0x0101, 0x0400  # C_CONTIGUOUS and ALIGNED, WRITEABLE: bits of numpy's flags.num


@dataclass(frozen=True, slots=True)
class KnownCall:
    """What was found out about a call: it holds for every call of the same structure, shapes and dtypes."""

    forward: Any
    built: Built
    run: Callable[[Sequence[Any]], list[Any]]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    types: tuple[tuple[tuple[int, ...], Any, Any], ...]  # both of each array, and torch's dtype
    torch: Any  # the library, if the plan can take addresses of its tensors in place of arrays
    writes: bool  # whether forward writes into arguments
    copied: tuple[tuple[int, int], ...]  # those whose new contents are an output of their own, and that output
    result: Callable[[Sequence[Any]], Any]  # forward's result from the outputs

    @classmethod
    def of(cls, forward: Any, built: Built, symbols: dict[str, int], arrays: Sequence[Any]) -> KnownCall:
        """A call of a plan whose arrays can go to it as they are."""
        writes = built.graph.writes
        returned, whole = len(built.graph.outputs) - len(writes), unflattener(built.out_tree)
        places = built.executable.plan.outputs if built.executable is not None else ()
        copied = tuple((i, j) for i, j in writes if not places or places[j] != i)
        # Equal shapes as one object: comparing those of a cache with itself then touches little memory.
        one: dict[tuple[int, ...], tuple[int, ...]] = {}
        shapes = tuple(one.setdefault(a.shape, a.shape) for a in arrays)
        dtypes = tuple(map(_DTYPE, arrays))
        result = (lambda outputs: whole(outputs[:returned])) if writes else whole
        torch = (
            sys.modules.get("torch") if built.target == "cpu" and not any(isinstance(w, int) for w in places) else None
        )
        theirs = {} if torch is None else {ours: dtype for dtype, ours in torch_types(torch).items()}
        types = tuple((shape, dtype, theirs.get(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True))
        return cls(forward, built, built.runner(symbols), shapes, dtypes, types, torch, bool(writes), copied, result)

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Whether arrays in the same structure are of the same shapes and dtypes."""
        return (
            len(arrays) == len(self.shapes)
            and all(map(eq, map(_SHAPE, arrays), self.shapes))
            and all(map(is_, map(_DTYPE, arrays), self.dtypes))
        )

    def takes(self, forward: Any, args: tuple[Any, ...]) -> bool:
        """Whether it is a call of the same forward with dense numpy arrays of the same shapes and dtypes alone."""
        if len(args) != len(self.types) or forward != self.forward:
            return False
        number = 0
        for x in args:  # four times as quick as map and zip for one or two
            shape, dtype, _ = self.types[number]
            if type(x) is not _NUMPY or x.shape != shape or x.dtype is not dtype or x.flags.num & _DENSE != _DENSE:
                return False
            number += 1
        return True

    def accepted(self, values: Sequence[Any]) -> list[Any] | None:
        """Arrays, and addresses of torch tensors, to run on; None unless all are dense, of these shapes and dtypes."""
        found: list[Any] = []
        torch = self.torch
        for x in values:
            shape, dtype, theirs = self.types[len(found)]
            if type(x) is _NUMPY:
                if x.shape != shape or x.dtype is not dtype or x.flags.num & _DENSE != _DENSE:
                    return None
                found.append(x)
                continue
            if torch is None or type(x) is not torch.Tensor or x.dtype is not theirs or x.shape != shape:
                return None
            if not x.is_cpu or x.layout is not torch.strided or x.requires_grad or x.is_neg() or not x.is_contiguous():
                return None
            try:
                found.append(x.data_ptr())  # x.numpy() takes ten times as long
            except RuntimeError:  # a wrapper of torch.func, which has no memory
                return None
            if found[-1] % dtype.itemsize:
                return None
        return found

    def check_writeable(self, arrays: Sequence[Any]) -> None:
        """Raises if forward writes into an array that is read-only."""
        for number, _ in self.built.graph.writes:
            if not is_device(arrays[number]) and not arrays[number].flags.writeable:
                raise read_only(self.built.graph.inputs[number].name)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that nothing is known about yet, whose arrays may be fit for a plan as they are."""

    structure: Any
    arrays: Sequence[Any]


class KnownCalls:
    """The calls of one Compiled. Two Python threads may use it at once: its tables only gain or lose entries."""

    def __init__(self, module: Module, target: str) -> None:
        self.module, self.target = module, target
        self._orders: dict[Any, Callable[[Sequence[Any]], Sequence[Any]] | None] = {}
        self._latest: dict[Any, KnownCall] = {}  # by structure alone: a decode loop has the same shapes every time
        self._calls: dict[Any, KnownCall] = {}
        self._plain: dict[Any, KnownCall] = {}  # the latest ones with nothing but arrays, none of which is written
        self.last: KnownCall | None = None  # of those the latest by position

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[KnownCall | None, Any]:
        """What is known about a call like this one, with the arrays to run on; or None, with the Call to remember.

        Raises if the plan would write into an array that is read-only.
        """
        forward = self.module.forward
        form = (getattr(forward, "__func__", forward), len(args), *kwargs)
        try:
            order = self._orders[form]
        except KeyError:
            order = self._orders[form] = self._order(len(args), tuple(kwargs))
        if order is None:
            return None, None
        if (known := self._plain.get(form)) is not None:
            found = known.accepted(order((*args, *kwargs.values())))
            if found is not None:
                return known, found
        arrays: Sequence[Any]
        adopted: list[Any] = []
        if order is tuple and not kwargs and _ARRAYS.issuperset(map(type, args)):  # nothing but arrays: no outlines
            structure, arrays, numpys = (form, *(None,) * len(args)), args, args
        else:
            arrays = []

            def take(x: Any) -> Any:
                adopted.append(adopt(x, self.target))
                return adopted[-1]

            try:
                structure = (form, *[outline(x, arrays, take) for x in order((*args, *kwargs.values()))])
            except (NoOutline, ArgumentError):  # the long way has the names for an error
                return None, None
            foreign = set(map(type, arrays)) - _ARRAYS
            if not all(hasattr(kind, "__cuda_array_interface__") for kind in foreign):
                return None, None  # a traced tensor, a parameter that is not loaded
            numpys = [a for a in arrays if type(a) in _ARRAYS] if foreign else arrays
        flags = _FLAGS(numpys[0]) if len(numpys) == 1 else reduce(and_, set(map(_FLAGS, numpys)), -1)
        if flags & _DENSE != _DENSE:
            return None, None
        known = self._latest.get(structure)
        if known is None or not known.fits(arrays):
            known = self._calls.get(_key(structure, arrays))
            if known is None:
                return None, Call(structure, arrays)
            self._latest[structure] = known
        if not known.writes and not any(structure[1:]):  # nothing but arrays, which stay as they are
            self._plain[form] = known
            if arrays is args:
                self.last = known
        if not flags & _WRITEABLE:
            known.check_writeable(arrays)
        if known.writes and (adopted or len(set(map(id, arrays))) < len(arrays)):
            check_shared(known.built, arrays)
        return known, arrays

    def remember(self, call: Call, built: Built, symbols: dict[str, int], arrays: Sequence[Any]) -> None:
        """Notes which plan a call went to, if it went with these very arrays."""
        if len(arrays) != len(call.arrays) or not all(map(_same, arrays, call.arrays)):
            return
        if len(self._calls) >= KEPT:
            self._calls.clear()
            self._latest.clear()
            self._plain.clear()
            self.last = None
        self._calls[_key(call.structure, arrays)] = KnownCall.of(self.module.forward, built, symbols, arrays)

    def _order(self, count: int, names: tuple[str, ...]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        """Brings the values of a call into the order of forward's parameters; None where that can't be said."""
        marks = range(count + len(names))
        try:
            bound = self.module.signature().bind(*marks[:count], **dict(zip(names, marks[count:], strict=True)))
        except TypeError:
            return None
        places = list(bound.arguments.values())
        if not all(isinstance(i, int) for i in places) or sorted(places) != list(marks):  # forward takes *args, **kw
            return None
        if places == list(marks):
            return tuple
        return itemgetter(*places)


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays are one, or one array of another library that was adopted twice."""
    if a is b:
        return True
    if is_device(a) or is_device(b):
        return is_device(a) and is_device(b) and bool(a.data.ptr == b.data.ptr) and a.strides == b.strides
    return a.flags.c_contiguous and b.flags.c_contiguous and address(a) == address(b)


def _key(structure: Any, arrays: Sequence[Any]) -> Any:
    return structure, tuple(map(_SHAPE, arrays)), tuple(map(_DTYPE, arrays))


def check_shared(built: Built, arrays: Sequence[Any]) -> None:
    """Raises if forward writes into memory that another argument has too: the plan would read it before or after."""
    names = [v.name for v in built.graph.inputs]
    for number, _ in built.graph.writes:
        for other, array in enumerate(arrays):
            if other != number and _overlap(arrays[number], array):
                both = f"{names[number]} and {names[other]}"
                raise ArgumentError(
                    f"arguments {both} share memory, and forward writes into {names[number]}",
                    why="a plan has no order in which it reads one and writes the other",
                    fix="pass a copy of one of them",
                )


def _overlap(a: Any, b: Any) -> bool:
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b)):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=10_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:  # strange strides: nobody meant them to meet
        return False


def read_only(name: str) -> ArgumentError:
    """The error for an array that forward would write into."""
    return ArgumentError(
        f"argument {name}: forward writes into it, but the array is read-only", fix="pass a copy of it"
    )


# Arrays of other libraries as arguments: used where they lie, through DLPack or __cuda_array_interface__.


_HOST = (1, 3)  # kDLCPU, kDLCUDAHost


def is_array(x: Any) -> bool:
    """Whether it is an array of a plan: numpy's, or after `adopt` a device array."""
    return isinstance(x, np.ndarray) or (not isinstance(x, Tensor | Spec) and hasattr(x, "__cuda_array_interface__"))


def adopt(x: Any, target: str) -> Any:
    """An array of another library as numpy's or, in a GPU's memory, as the device's own; it shares the memory."""
    if isinstance(x, np.ndarray | Tensor | Spec | str | int | float | bool | None):
        return x
    torch = sys.modules.get("torch")
    if torch is not None and type(x) is torch.Tensor:  # ten times as quick as DLPack
        if x.is_neg():
            what = "a Tensor whose memory has the negative numbers can't be used in place"
            raise ArgumentError(what, fix="pass x.resolve_neg()")
        if x.is_cpu and x.layout is torch.strided and x.dtype in torch_types(torch) and not x.requires_grad:
            return x.numpy()
        if x.is_cuda and target == "cuda":
            return _gpu().adopt(x)
    # A torch tensor on a GPU has both; its interface can say neither bfloat16 nor a stream.
    has_dlpack = hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")
    if has_dlpack and int(x.__dlpack_device__()[0]) in _HOST:
        return _from_host(x)
    if not has_dlpack and not hasattr(x, "__cuda_array_interface__"):
        return x
    if target != "cuda":
        raise ArgumentError(
            f"a {type(x).__name__} is on a GPU, the plan runs on the CPU",
            fix="copy it to the host (cupy.asnumpy(x), x.cpu()), or compile with target='cuda'",
        )
    return _gpu().adopt(x)


def _gpu() -> Any:
    from monoplan.runtime.cuda.device import gpu  # loads CuPy's wrappers

    return gpu()


def _from_host(x: Any) -> Any:
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        if str(getattr(x, "dtype", "")) == "torch.bfloat16" and not getattr(x, "requires_grad", False):
            return np.from_dlpack(x.view(sys.modules["torch"].int16)).view(as_dtype("bfloat16").numpy)
        raise ArgumentError(
            f"a {type(x).__name__} can't be used in place", why=str(error), fix="detach() it, or pass a numpy array"
        ) from None


def array_spec(x: Any) -> Any:
    """The static Spec of an array on either side; other leaves stay as they are."""
    if is_array(x) and not isinstance(x, np.ndarray):
        return Spec(TensorType(as_dtype(x.dtype), tuple(x.shape)))
    return spec_of(x)


def assign(target: Any, value: Any) -> None:
    """Puts a plan's result into an argument that forward changed, on whichever side each of them is."""
    if target is value or (is_device(target) and is_device(value) and target.data.ptr == value.data.ptr):
        return
    if is_device(target) == is_device(value):
        target[...] = value
    elif is_device(value):
        target[...] = value.get()
    else:
        target.set(value)


def is_device(x: Any) -> bool:
    """Whether an array of a plan is in a GPU's memory."""
    return not isinstance(x, np.ndarray)
