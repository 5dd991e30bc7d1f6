"""Runs a graph op by op, with rolled layers and scans unrolled: what verify and bisect look through.

Weights are fetched when an op reads them and dropped again, so a model of any size can be walked in f64.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from monoplan.ir.dims import Dim, evaluate, symbols_of
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph, Loc, Op, Value, bodies
from monoplan.ir.interpreter import bind_symbols, run_op, run_scan
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.tolerances import CACHE, CACHE_EPSILON, EPSILON, LOW_BIT_EPSILON
from monoplan.ir.types import Array, DType, TensorType, f64, i8

Params = Callable[[str], Array]

_CAST = re.compile(r"dtype=(f32|f16|bf16)\b")
_EXPRESSIONS = ("expr", "pre", "post")


@dataclass(frozen=True, eq=False)
class Node:
    """One op as it runs; `turn` is the number of the layer inside rolled layers, or of the turn of a scan."""

    op: Op
    turn: int | None
    loc: Loc  # the op's own, with the layer's number put right
    scan: bool = False

    def name(self, result: int = 0) -> str:
        """The value's name; inside rolled layers with the turn: `%add_3[7]`."""
        text = str(self.op.results[result])
        return text if self.turn is None else f"{text}[{self.turn}]"

    @property
    def where(self) -> str:
        """Module path and user line."""
        known = self.turn is None or (not self.scan and str(self.turn) in self.loc.path.split("."))
        what = "turn" if self.scan else "layer"
        return str(self.loc.short) if known else f"{self.loc.short} ({what} {self.turn})".strip()


# Sees an op, its operands and results; arrays it returns go on in place of the results.
Visit = Callable[[Node, Sequence[Array | None], Sequence[Array]], Sequence[Array] | None]


def walk(
    graph: Graph,
    inputs: Sequence[Array],
    params: Params,
    *,
    exact: bool = True,
    visit: Visit | None = None,
    casts: bool = False,
) -> list[Array]:
    """Outputs of the graph; `exact` computes every float in f64, and then casts between floats round only if asked."""
    return _Walk(graph, inputs, params, exact, visit, casts).run()


class _Walk:
    def __init__(
        self, graph: Graph, inputs: Sequence[Array], params: Params, exact: bool, visit: Visit | None, casts: bool
    ) -> None:
        self.graph, self.params, self.exact, self.visit = graph, params, exact, visit
        self.unrounded = exact and not casts
        self.symbols = bind_symbols(graph.inputs, [a.shape for a in inputs])
        self.env: dict[Value, Array] = dict(zip(graph.inputs, inputs, strict=True))
        self.paths = {p.value: p.path for p in graph.params}
        self.setup = {r: op for op in graph.setup for r in op.results}
        self.left = Counter(v for op in (*graph.setup, *graph.ops) for v in op.reads) + Counter(graph.outputs)

    def run(self) -> list[Array]:
        for op in self.graph.ops:
            if op.opdef.kind == "repeat":
                self.repeat(op)
            elif op.opdef.kind == "loop":
                self.env.update(zip(op.results, self.scan(op, [self.get(v) for v in op.reads]), strict=True))
            else:
                operands = [None if v is None else self.get(v) for v in op.operands]
                self.env.update(zip(op.results, self.one(Node(op, None, op.loc), operands), strict=True))
            for v in op.reads:
                self.drop(v)
        return [self.get(v) for v in self.graph.outputs]

    def get(self, v: Value) -> Array:
        if v in self.env:
            return self.env[v]
        if v in self.paths:
            wanted = v.type.dtype.numpy
            array = self.params(self.paths[v])
            return array if array.dtype == wanted else array.astype(wanted)
        op = self.setup[v]
        made = self.one(Node(op, None, op.loc), [None if x is None else self.get(x) for x in op.operands])
        found = dict(zip(op.results, made, strict=True))
        self.env.update({r: a for r, a in found.items() if self.left[r] > 1 or len(op.results) > 1})
        return found[v]

    def drop(self, v: Value) -> None:
        self.left[v] -= 1
        if self.left[v] <= 0:
            self.env.pop(v, None)

    def one(self, node: Node, operands: Sequence[Array | None]) -> Sequence[Array]:
        op = node.op
        env = {v: a for v, a in zip(op.operands, operands, strict=True) if v is not None and a is not None}
        run_op(without_rounding(op) if self.unrounded else op, env, self.symbols, exact=self.exact)
        results = [env[r] for r in op.results]
        if self.visit is not None:
            replaced = self.visit(node, operands, results)
            if replaced is not None:
                return list(replaced)
        return results

    def scan(self, op: Op, operands: Sequence[Array | None]) -> Sequence[Array]:
        """A scan, turn by turn; one inside of another is seen once for each turn of that."""
        body = op.attrs["body"]

        def run(turn: int, inputs: Sequence[Array]) -> list[Array]:
            env: dict[Value, Array] = dict(zip(body.inputs, inputs, strict=True))
            for inner in body.ops:
                given = [None if v is None else env[v] for v in inner.operands]
                node = Node(inner, turn, inner.loc, scan=True)
                made = self.scan(inner, given) if inner.opdef.kind == "loop" else self.one(node, given)
                env.update(zip(inner.results, made, strict=True))
            return [env[v] for v in body.outputs]

        return run_scan(op, operands, self.symbols, self.exact, run)

    def repeat(self, op: Op) -> None:
        """Rolled layers, turn by turn; the values of a layer live in an environment of their own."""
        a = op.attrs
        body, count, carried, shared = a["body"], a["count"], a["carried"], a["shared"]
        state = [self.get(v) for v in op.operands[:carried] if v is not None]
        fixed = [self.get(v) for v in op.operands[carried : carried + shared] if v is not None]
        columns = [op.operands[i : i + count] for i in range(carried + shared, len(op.operands), count)]
        places = turn_locs(op, self.paths)
        collected: list[list[Array]] = [[] for _ in range(len(body.outputs) - carried)]
        for turn in range(count):
            slices = [self.get(c[turn]) for c in columns if c[turn] is not None]  # type: ignore[arg-type]
            env: dict[Value, Array] = dict(zip(body.inputs, [*state, *fixed, *slices], strict=True))
            for inner in body.ops:
                operands = [None if v is None else env[v] for v in inner.operands]
                node = Node(inner, turn, places(inner.loc, turn))
                env.update(zip(inner.results, self.one(node, operands), strict=True))
            outs = [env[v] for v in body.outputs]
            state = outs[:carried]
            for column, array in zip(collected, outs[carried:], strict=True):
                column.append(array)
        values = [*state, *(x for column in collected for x in column)]
        self.env.update(zip(op.results, values, strict=True))


def without_rounding(op: Op) -> Op:
    """The op with casts to narrower floats made casts to f64, also inside of pointwise expressions."""
    if op.name == "cast":
        attrs = {**op.attrs, "dtype": f64} if op.attrs["dtype"].is_float else op.attrs
    else:
        attrs = {k: _CAST.sub("dtype=f64", v) if k in _EXPRESSIONS else v for k, v in op.attrs.items()}
    return Op(op.opdef, op.operands, attrs, op.results, op.loc)


def turn_locs(op: Op, paths: Mapping[Value, str]) -> Callable[[Loc, int], Loc]:
    """Locations inside rolled layers: a body has those of its first layer, the others differ in one number."""
    a = op.attrs
    start, count = a["carried"] + a["shared"], a["count"]
    stem, first = "", ""
    numbers: list[str] = []
    for i in range(start, len(op.operands), count):
        column = [paths.get(v, "") if v is not None else "" for v in op.operands[i : i + count]]
        found = _varying(column)
        if found is not None:
            stem, first, numbers = found
            break

    def place(loc: Loc, turn: int) -> Loc:
        number, dot, rest = loc.path[len(stem) :].partition(".")
        if not numbers or not loc.path.startswith(stem) or not number.isdigit():
            return loc
        # A body may hold several layers, or the end of one and the beginning of the next: they move by the same step.
        moved = int(number) + int(numbers[turn]) - int(first)
        return dataclasses.replace(loc, path=f"{stem}{moved}{dot}{rest}")

    return place


@dataclass(frozen=True)
class Rolled:
    """The layers that an op inside a loop stands for."""

    stem: str  # `model.layers.`
    numbers: tuple[int, ...]
    rest: str  # `.mlp`

    @property
    def path(self) -> str:
        """`model.layers.0–28.mlp`."""
        return f"{self.stem}{number_range(self.numbers)}{self.rest}"


def rolled_layers(graph: Graph) -> dict[Op, Rolled]:
    """For ops inside loops whose module is numbered."""
    paths = {p.value: p.path for p in graph.params}
    found: dict[Op, Rolled] = {}
    for op in graph.ops:
        if op.opdef.kind == "repeat":
            place = turn_locs(op, paths)
            for inner in op.attrs["body"].ops:
                varied = _varying([place(inner.loc, turn).path for turn in range(op.attrs["count"])])
                if varied is not None:
                    stem, first, numbers = varied
                    found[inner] = Rolled(stem, tuple(map(int, numbers)), inner.loc.path[len(stem + first) :])
    return found


def number_range(numbers: Iterable[int]) -> str:
    """`0–28`; `0, 2 … 28` where numbers are left out."""
    found = sorted(set(numbers))
    if len(found) < 2:
        return "".join(map(str, found))
    whole = found[-1] - found[0] + 1 == len(found)
    return f"{found[0]}–{found[-1]}" if whole else f"{found[0]}, {found[1]} … {found[-1]}"


def _varying(paths: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """`model.layers.`, `0`, [`0`, `1`, …] when paths differ in one part that is a number."""
    parts = [p.split(".") for p in paths]
    if not all(paths) or len({len(p) for p in parts}) != 1:
        return None
    places = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if len(places) != 1 or not all(p[places[0]].isdigit() for p in parts):
        return None
    at = places[0]
    stem = "".join(part + "." for part in parts[0][:at])
    return stem, parts[0][at], [p[at] for p in parts]


def keeps_bytes(op: Op, result: Value) -> bool:
    """Whether a result of an op is a cache in 8 bits, whose bytes mean numbers (ir/cache_rows.py)."""
    if inner := bodies(op):
        return any(keeps_bytes(o, r) for g in inner for o in g.ops for r in o.results if r.type == result.type)
    return op.name in ("kv_update", "qkv_rope_cache") and result.type.dtype == i8


def compared_type(op: Op | None, result: Value) -> DType | str:
    """What `compare` takes a value for."""
    return CACHE if op is not None and keeps_bytes(op, result) else result.type.dtype


def roundings(graph: Graph) -> dict[Value, float]:
    """The roughest unit of rounding on the way to each value: a bf16 cache makes all that follows rough."""
    found: dict[Value, float] = {}

    def run(ops: Sequence[Op]) -> None:
        for op in ops:
            before = max((found.get(v, 0.0) for v in op.reads), default=0.0)
            for body in bodies(op):
                found.update(dict.fromkeys(body.inputs, before))
                for _ in range(2):  # what a turn leaves is where the next one starts
                    run(body.ops)
                    before = max([before, *(found[r] for o in body.ops for r in o.results)])
                    found.update(dict.fromkeys(body.inputs, before))
                found.update(dict.fromkeys(op.results, before))
            for r in op.results if not bodies(op) else ():
                moved = op.opdef.kind in ("view", "copy", "gather")
                own = EPSILON[r.type.dtype.name] if r.type.dtype.is_float and not moved else 0.0
                inner = [EPSILON[d] for k in _EXPRESSIONS for d in _CAST.findall(str(op.attrs.get(k, "")))]
                rounded = any(v.type.dtype.is_low_bit for v in op.reads) and not moved
                inner += [CACHE_EPSILON] if keeps_bytes(op, r) else []
                own = max([own, *inner, LOW_BIT_EPSILON if rounded else 0.0])
                found[r] = max(before, own)

    run((*graph.setup, *graph.ops))
    return found


# Inputs for a graph whose user gave none: random floats, and integers that the graph can bear.


SIZES = {"batch": 2, "seq": 5}  # of symbols, unless the user says otherwise
OTHER = 4
# operand that holds indices -> the operand and axis whose size they must stay below
_INDEXED = {"ids": ("weight", 0), "index": ("x", None), "rows": ("x", 1), "positions": ("sin", 0)}


def sizes_for(graph: Graph, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """A value for each symbol of the inputs."""
    known = {**dict.fromkeys(graph.symbols, OTHER), **{k: v for k, v in SIZES.items() if k in graph.symbols}}
    if unknown := sorted(set(given or {}) - set(known)):
        raise ArgumentError(
            f"{graph.name} has no symbol {unknown[0]!r}", fix="its symbols: " + (", ".join(known) or "none")
        )
    return {**known, **(given or {})}


def example_inputs(graph: Graph, sizes: Mapping[str, int] | None = None, seed: int = 0) -> list[Array]:
    """An array for each input of a graph."""
    full = sizes_for(graph, sizes)
    limits = _limits(graph, full)
    if seed < 0:
        raise ArgumentError(f"the seed of random inputs must be 0 or more, got {seed}")
    rng = np.random.default_rng(seed)
    return [random_array(v.type, rng, full, limits.get(v, OTHER)) for v in graph.inputs]


def example_params(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """An array for each parameter of a graph, by its path; small, so that sums of many stay in range."""
    rng = np.random.default_rng(seed + 1)
    return {p.path: random_array(p.value.type, rng, {}, OTHER, scale=0.1) for p in graph.params}


def random_array(
    t: TensorType, rng: np.random.Generator, sizes: Mapping[str, int], limit: int, scale: float = 1.0
) -> Array:
    """Normal floats, integers below a limit, or bools."""
    shape = tuple(evaluate(d, sizes) for d in t.shape)
    try:
        if t.dtype.is_float:
            return (rng.standard_normal(shape) * scale).astype(t.dtype.numpy)
        if t.dtype.is_integer:
            return rng.integers(0, max(limit, 1), shape).astype(t.dtype.numpy)
        return rng.integers(0, 2, shape).astype(np.bool_)
    except (MemoryError, ValueError) as error:  # too large for this machine, for any, or negative
        raise ArgumentError(f"there can be no random array of {t}", why=str(error), fix="give other sizes") from None


def storable(a: Array) -> Array:
    """Half floats as f32, which holds them exactly: npz knows no bf16."""
    return a.astype(np.float32) if a.dtype.itemsize == 2 and a.dtype.kind not in "iu" else a


def _limits(graph: Graph, sizes: Mapping[str, int]) -> dict[Value, int]:
    """Integers that are used as indices must lie inside what they index; views and casts in between are followed."""
    origin: dict[Value, Value] = {v: v for v in graph.inputs}
    found: dict[Value, int] = {}
    for op in graph.ops:
        source = op.operands[0] if op.operands else None
        if source in origin and (op.opdef.kind == "view" or op.name == "cast"):
            origin.update(dict.fromkeys(op.results, origin[source]))
        for name, (table, axis) in _INDEXED.items():
            names = op.opdef.operand_names
            if name not in names or table not in names:
                continue
            index, indexed = op.operand(name), op.operand(table)
            if index in origin and indexed is not None:
                at = axis if axis is not None else int(op.attrs.get("axis", 0)) % max(indexed.type.rank, 1)
                size: Dim = indexed.type.shape[at]
                if symbols_of(size) <= set(sizes):
                    root = origin[index]
                    found[root] = min(found.get(root, 1 << 30), evaluate(size, sizes))
    return found
