"""Steps of random graphs that move data: views, concat and repeat, with symbolic sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monoplan.ir.dims import Dim, Expr, equal, symbol

if TYPE_CHECKING:
    from tests.codegen.random_graphs import Grower

B, S = symbol("b"), symbol("s")
DIMS: tuple[Dim, ...] = (1, 2, 3, 5, B, S)


def step_view(g: Grower) -> None:
    """One op that only moves data."""
    n = g.choose(lambda m: True)
    rank = len(n.shape)
    kind = g.pick(("transpose", "transpose", "slice", "expand", "reshape", "reshape", "split", "repeat", "concat"))
    static = [i for i, d in enumerate(n.shape) if isinstance(d, int) and d > 1]
    made: Any = ()
    if kind == "transpose":
        axes = list(range(rank))
        for i in range(rank - 1, 0, -1):
            j = g.pick(range(i + 1))
            axes[i], axes[j] = axes[j], axes[i]
        made = g.emit("transpose", n, axes=tuple(axes))
    elif kind == "slice" and rank:
        axis = g.pick(range(rank))
        if axis in static:
            size = n.shape[axis]
            start = g.pick(range(size))
            step = g.pick((1, 1, 2))
            length = g.pick(range(1, (size - start - 1) // step + 2))
            made = g.emit("slice", n, axis=axis, start=start, length=length, step=step)
        else:
            made = g.emit("slice", n, axis=axis, start=n.shape[axis] - 1, length=1)
    elif kind == "expand":
        wide = tuple(g.pick(DIMS) if equal(d, 1) else d for d in n.shape)
        made = g.emit("expand", n, shape=(*((g.pick(DIMS),) if rank < 4 else ()), *wide))
    elif kind == "reshape":
        made = g.emit("reshape", n, shape=reshaped(g, n.shape))
    elif kind == "split" and static:
        axis = g.pick(static)
        first = g.pick(range(1, n.shape[axis]))
        made = g.emit("split", n, sizes=(first, n.shape[axis] - first), axis=axis)
    elif kind == "repeat" and rank:
        made = g.emit("repeat", n, repeats=g.pick((1, 2, 3)), axis=g.pick(range(rank)))
    elif kind == "concat" and rank:
        axis = g.pick(range(rank))
        other = g.leaf(n.dtype, [g.pick(DIMS) if i == axis else d for i, d in enumerate(n.shape)])
        parts = [n, other] if g.pick((True, False)) else [other, n, n]
        value = g.emit("concat", *parts, axis=axis)
        g.add(value, max(n.magnitude, other.magnitude), n.error, n.exact, "pointwise", min(n.low, other.low))
        return
    for value in made if isinstance(made, tuple) else (made,):
        g.keep(value, n)


def reshaped(g: Grower, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Adjacent dimensions joined, ones dropped or added, a static dimension cut in two."""
    dims = list(shape)
    for _ in range(g.pick((1, 2, 3))):
        if len(dims) > 1 and g.pick((True, True, False)):
            i = g.pick(range(len(dims) - 1))
            dims[i : i + 2] = [dims[i] * dims[i + 1]]
        elif len(dims) < 4:
            dims.insert(g.pick(range(len(dims) + 1)), 1)
        pairs = [(i, f) for i, d in enumerate(dims) for f in (2, 3, 5) if len(dims) < 4 and splits(d, f)]
        if pairs and g.pick((True, False)):
            i, f = g.pick(pairs)
            dims[i : i + 1] = [dims[i] // f, f] if g.pick((True, False)) else [f, dims[i] // f]
    return tuple(dims)


def splits(d: Dim, factor: int) -> bool:
    if isinstance(d, Expr):
        return all(c % factor == 0 for _, c in d.terms)
    return d % factor == 0 and d > factor
