"""Finds the kernel that computes something else than its op: each one is judged on the inputs that it really had.

The plan runs once, instrumented. Then the graph is walked: every op's reference gets the values that the plan's
kernels wrote before, in f64, and its result is compared with what the plan's kernel made of them. So an error
is found where it is made, not where it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from monoplan.codegen.kernels import Pointwise
from monoplan.codegen.plan import Step
from monoplan.codegen.views import Buffer
from monoplan.inspect.probe import Event, Watched, read_view, same_buffer
from monoplan.inspect.walk import Node, Params, keeps_bytes, walk
from monoplan.ir.dims import equal
from monoplan.ir.expr import Arg
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.interpreter import concrete
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.tolerances import CACHE, EPSILON, LOW_BIT_EPSILON, Difference, compare, kind_of
from monoplan.ir.types import Array, TensorType, as_dtype, f64, i8, product

_CURVATURE = 16.0  # inside a function such as gelu, terms may be this many times larger than its result
_CANCELLATION = 1e4  # sums of terms that are larger than this many times their result are not trusted to cancel


@dataclass(frozen=True)
class KernelFault:
    """A kernel whose output is not what its op makes of the kernel's inputs."""

    node: Node
    result: int  # which of the op's results
    steps: tuple[Step, ...]  # that compute it; the last is the suspect unless copies before it are wrong
    difference: Difference
    operands: tuple[Array | None, ...]

    @property
    def step(self) -> Step:
        return self.steps[-1]


class Recorder:
    """Finds the value that each step wrote in the copies of a watched run."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.by_op: dict[tuple[Op, int | None], list[Event]] = {}
        for event in watched.events:
            self.by_op.setdefault((event.step.kernel.op, event.turn), []).append(event)

    def events(self, node: Node) -> list[Event]:
        return self.by_op.get((node.op, node.turn), [])

    def value(self, node: Node, number: int) -> Array | None:
        """What the plan computed for a result; None where no kernel wrote it (a view)."""
        value = node.op.results[number]
        copy = self._copy(node, value)
        if copy is None:
            return None
        shape = tuple(concrete(d, self.watched.symbols) for d in value.type.shape)
        number, view = copy
        return self.watched.read(view, number).reshape(shape)

    def _copy(self, node: Node, value: Value) -> tuple[int, Any] | None:
        """The last copy of the value's buffer among those that the op's own steps made."""
        view = self.watched.plan.views.get(value)
        writes = [w for event in self.events(node) for w in event.writes]
        for number, o in reversed(writes):
            if view is not None and same_buffer(o.view.buffer, view.buffer):
                return number, view
        if node.op.opdef.kind in ("view", "generate") or (view is not None and self._is_written(view.buffer)):
            return None
        # Storage that was replaced, or made narrower, after the values got their places: told by its size.
        alike = [
            (n, o)
            for n, o in writes
            if equal(product(o.shape), value.type.size) and o.dtype.kind == value.type.dtype.kind
        ]
        return (alike[0][0], alike[0][1].view) if len(alike) == 1 else None

    def _is_written(self, buffer: Buffer) -> bool:
        """Whether a step writes that buffer, and not one that took its place."""
        return any(same_buffer(o.view.buffer, buffer) for event in self.watched.events for _, o in event.writes)


def check_kernels(graph: Graph, inputs: Sequence[Array], params: Params, watched: Watched) -> KernelFault | None:
    """The first kernel that is wrong, or None."""
    recorder = Recorder(watched)
    setup = set(graph.setup)

    def visit(node: Node, operands: Sequence[Array | None], exact: Sequence[Array]) -> Sequence[Array]:
        op = node.op
        if op in setup:
            return _plain(op, operands, watched)
        events, made = recorder.events(node), []
        for i, (r, want) in enumerate(zip(op.results, exact, strict=True)):
            got = recorder.value(node, i) if events else None
            if got is None:
                with np.errstate(all="ignore"):
                    got = want.astype(r.type.dtype.numpy)
            else:
                difference = _judge(node, i, operands, got, want, watched)
                if not difference.ok:
                    steps = _blame(events, recorder, inputs)
                    raise _Found(KernelFault(node, i, steps, difference, tuple(operands)))
            made.append(got)
        return made

    try:
        outputs = walk(graph, inputs, params, exact=True, visit=visit, casts=True)
    except _Found as found:
        return found.fault
    return _check_outputs(graph, outputs, watched)


class _Found(Exception):
    def __init__(self, fault: KernelFault) -> None:
        self.fault = fault


def _check_outputs(graph: Graph, made: Sequence[Array], watched: Watched) -> KernelFault | None:
    """Outputs that are copies of values: the copy may be wrong too."""
    for j, (v, want, got) in enumerate(zip(graph.outputs, made, watched.outputs, strict=True)):
        if want.dtype == got.dtype and want.tobytes() == got.tobytes():
            continue
        difference = compare(got, want, v.type.dtype, "pointwise")
        where = watched.plan.outputs[j]
        writers = [e for e in watched.events if any(o.view.buffer.root is where for _, o in e.writes)]
        if not difference.ok and writers:
            last = writers[-1]
            node = Node(last.step.kernel.op, last.turn, last.step.kernel.op.loc)
            return KernelFault(node, 0, (last.step,), difference, ())
    return None


def _judge(
    node: Node, number: int, operands: Sequence[Array | None], got: Array, want: Array, watched: Watched
) -> Difference:
    """Compares by the table, and where that fails with the error of the plain reference as well."""
    op = node.op
    if keeps_bytes(op, op.results[number]):
        return compare(got, want, CACHE, kind_of(op.opdef.kind))
    dtype, kind = as_dtype(got.dtype), kind_of(op.opdef.kind)  # the storage's own type, which may be narrower
    # Products of codes take what they are multiplied with as integers of 15 bits: weights, and keys and values in i8.
    coded = any(v.type.dtype.is_low_bit or (op.name == "attention" and v.type.dtype == i8) for v in op.reads)
    epsilon = LOW_BIT_EPSILON if kind == "matmul" and coded else None
    difference = compare(got, want, dtype, kind, epsilon=epsilon)
    if difference.ok:
        return difference
    if op.name == "linear_argmax":
        return _judge_argmax(op, operands, got, difference)
    scale = _scale(op, number, operands, want, watched)
    # What becomes f64 at the end of an expression was f32 before.
    narrow = dtype == f64 and any(v.type.dtype.is_float and v.type.dtype != f64 for v in op.reads)
    plain = _plain(op, operands, watched)[number]
    epsilon = epsilon or (EPSILON["f32"] if narrow else None)
    return compare(got, want, dtype, kind, scale=scale, plain=plain, epsilon=epsilon)


def _plain(op: Op, operands: Sequence[Array | None], watched: Watched) -> tuple[Array, ...]:
    return _evaluate(op, operands, watched, exact=False)


def _evaluate(op: Op, operands: Sequence[Array | None], watched: Watched, *, exact: bool) -> tuple[Array, ...]:
    attrs = {k: concrete(v, watched.symbols) for k, v in op.attrs.items()}
    types = [TensorType(r.type.dtype, ()) for r in op.results]
    return op.opdef.evaluate(operands, attrs, types, exact=exact)


def _scale(op: Op, number: int, operands: Sequence[Array | None], want: Array, watched: Watched) -> float:
    """The size of the summed terms: the op applied to magnitudes, so that nothing cancels."""
    own = float(np.max(np.abs(want), where=np.isfinite(want), initial=0.0))
    if kind_of(op.opdef.kind) == "pointwise":
        return _CURVATURE * own
    with np.errstate(all="ignore"):
        sizes = [None if a is None else np.abs(a) if a.dtype.kind not in "iub" else a for a in operands]
        terms = np.abs(_evaluate(op, sizes, watched, exact=True)[number])
    largest = float(np.max(terms, where=np.isfinite(terms), initial=0.0))
    return max(own, min(largest, _CANCELLATION * own) if own else largest)


def _judge_argmax(op: Op, operands: Sequence[Array | None], got: Array, difference: Difference) -> Difference:
    """A chosen index is right when its score is as good as the best one's, up to rounding."""
    a = op.attrs
    fused = REGISTRY["fused_linear"].reference
    exact = [None if x is None else x.astype(np.float64) for x in operands]
    scores = fused(*exact, norm=a["norm"], eps=a["eps"])
    index = got if a["keepdims"] else got[..., None]
    if ((index < 0) | (index >= scores.shape[-1])).any():
        return difference
    chosen = np.take_along_axis(scores, index, axis=-1)
    x = op.operands[0]
    assert x is not None
    return compare(
        chosen.astype(np.float32), scores.max(-1, keepdims=True), "f32", "matmul", scale=float(np.abs(scores).max())
    )


def _blame(events: Sequence[Event], recorder: Recorder, inputs: Sequence[Array]) -> tuple[Step, ...]:
    """The steps of an op up to the first copy that is wrong; all of them when the copies are right."""
    steps = []
    for event in events:
        steps.append(event.step)
        if len(events) > 1 and not _copies_right(event, recorder, inputs):
            break
    return tuple(dict.fromkeys(steps))


def _copies_right(event: Event, recorder: Recorder, inputs: Sequence[Array]) -> bool:
    """Whether a step that only copies did so; other steps are not judged here."""
    k, watched = event.step.kernel, recorder.watched
    if not (isinstance(k, Pointwise) and isinstance(k.body.node, Arg) and len(k.reads) == 1):
        return True
    source = contents_before(event, k.reads[0].view.buffer, watched, inputs)
    if source is None:
        return True
    number, out = event.writes[0]
    want = read_view(k.reads[0].view, source, watched.symbols)
    return bool(
        np.array_equal(watched.read(out.view, number), want.astype(out.dtype.numpy), equal_nan=out.dtype.is_float)
    )


def contents_before(event: Event, buffer: Buffer, watched: Watched, inputs: Sequence[Array]) -> Array | None:
    """What a buffer held when a step began: the last copy of it, or the input itself."""
    for earlier in reversed(watched.events[: event.number]):
        for number, o in earlier.writes:
            if same_buffer(o.view.buffer, buffer) and (o.view.buffer.kind != "table" or earlier.turn == event.turn):
                return watched.copies[number]
    return inputs[buffer.index].reshape(-1) if buffer.kind == "input" else None
