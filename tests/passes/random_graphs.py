"""Random graphs of the things models are made of, for tests that compare the pipeline with the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from monoplan.ir.builder import Builder
from monoplan.ir.dims import equal, symbol
from monoplan.ir.graph import Graph, Param, Value
from monoplan.ir.ops import attention as attn
from monoplan.ir.ops import elementwise as pw
from monoplan.ir.ops import linear as products
from monoplan.ir.ops import reduce as norms
from monoplan.ir.ops import reduce as reductions
from monoplan.ir.ops import shape as views
from monoplan.ir.ops.conv import conv2d
from monoplan.ir.ops.index import embedding, select_rows
from monoplan.ir.ops.scan import scan
from monoplan.ir.rules import broadcasts_to
from monoplan.ir.types import DType, TensorType, bf16, bool_, f32, f64, i32, i64

BATCH, SEQ, CAPACITY = symbol("batch"), symbol("seq"), symbol("capacity")
WIDTHS = (4, 8, 12)
HEADS, DIM = 2, 4  # a width of 8 is two heads


class Maker:
    """Grows a graph step by step; values of all kinds are kept, and any of them may be used again."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype: DType = bf16 if seed % 5 == 4 else f32
        self.inputs: dict[str, Value] = {}
        self.params: dict[str, Value] = {}
        self.writes: list[tuple[Value, Value]] = []
        self.pool: list[Value] = []  # floats, mostly [batch, seq, width]
        self.builder = Builder()
        self.lengths = self.input("lengths", i32, BATCH)
        self.pool.append(self.input("x", self.dtype, BATCH, SEQ, 8))

    # -- small tools -----------------------------------------------------------------------------------------

    def input(self, name: str, dtype: DType, *shape: Any) -> Value:
        self.inputs[name] = Value(TensorType(dtype, tuple(shape)), self.builder.fresh(name))
        return self.inputs[name]

    def param(self, *shape: Any) -> Value:
        name = f"p{len(self.params)}"
        self.params[name] = Value(TensorType(self.dtype, tuple(shape)), self.builder.fresh(name))
        return self.params[name]

    def constant(self, value: float, like: Value) -> Any:
        return views.full(value=value, dtype=like.type.dtype)

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def rows(self) -> Value:
        """A value [batch, seq, width], preferably a late one."""
        found = [v for v in self.pool if v.type.rank == 3 and equal(v.type.shape[1], SEQ) and v.type.shape[2] in WIDTHS]
        return found[-1 - min(int(self.rng.geometric(0.4)) - 1, len(found) - 1)]

    def keep(self, *values: Any) -> None:
        self.pool += values

    # -- steps -----------------------------------------------------------------------------------------------

    def unary(self) -> None:
        x = self.pick(*self.pool)
        op = self.pick(pw.tanh, pw.sigmoid, pw.neg, pw.silu, pw.relu, pw.abs_, pw.sin, pw.gelu, pw.cos)
        self.keep(op(x))

    def binary(self) -> None:
        x = self.pick(*self.pool)
        others = [v for v in self.pool if broadcasts_to(v.type.shape, x.type.shape)]
        last = x.type.shape[-1] if x.type.rank else None
        y = self.pick(*others, self.constant(0.5, x), *([self.param(last)] if isinstance(last, int) else []))
        op = self.pick(pw.add, pw.add, pw.mul, pw.sub, pw.maximum, pw.minimum)
        self.keep(op(y, x) if self.chance(0.3) else op(x, y))

    def chain(self) -> None:
        """Several pointwise ops in a row, with casts and choices."""
        x = self.pick(*self.pool)
        for _ in range(int(self.rng.integers(2, 6))):
            kind = self.pick("unary", "scale", "shift", "where", "cast", "square", "self")
            if kind == "unary":
                x = self.pick(pw.tanh, pw.sigmoid, pw.sin)(x)
            elif kind == "scale":
                x = pw.mul(x, self.constant(0.75, x))
            elif kind == "shift":
                x = pw.add(self.constant(0.25, x), x)
            elif kind == "where":
                x = pw.where(pw.gt(x, self.constant(0.1, x)), x, self.pick(pw.neg(x), self.constant(-0.3, x)))
            elif kind == "cast":
                x = pw.cast(pw.cast(x, dtype=f64), dtype=self.dtype)
            elif kind == "square":
                x = pw.tanh(pw.pow_(x, self.constant(2.0, x)))
            else:
                x = pw.mul(x, pw.sigmoid(x))
        self.keep(x)

    def linear(self) -> None:
        x = self.rows()
        if self.chance(0.4):
            x = self._norm(x)
        width = self.pick(*WIDTHS)
        bias = self.param(width) if self.chance(0.4) else None
        y = products.linear(x, self.param(width, x.type.shape[-1]), bias)
        if self.chance(0.2):
            y = products.matmul(x, self.param(x.type.shape[-1], width))
        if self.chance(0.4):
            y = self.pick(pw.gelu, pw.relu, pw.tanh)(y)
        same = [v for v in self.pool if v.type == y.type]
        if same and self.chance(0.6):
            y = pw.add(self.pick(*same), y)
        self.keep(y)

    def conv1d(self) -> None:
        """Flattened, multiplied, given a bias, and back."""
        x = self._norm(self.rows()) if self.chance(0.5) else self.rows()
        width, out = x.type.shape[-1], self.pick(*WIDTHS)
        y = products.matmul(views.reshape(x, shape=(BATCH * SEQ, width)), self.param(width, out))
        back, bias = (lambda v: views.reshape(v, shape=(BATCH, SEQ, out))), self.param(out)
        y = back(pw.add(y, bias)) if self.chance(0.6) else pw.add(back(y), bias)
        y = pw.gelu(y) if self.chance(0.5) else y
        self.keep(pw.add(x, y) if out == width else y)

    def _norm(self, x: Value) -> Any:
        width = x.type.shape[-1]
        if self.chance(0.3):
            return norms.layer_norm(x, self.param(width), self.param(width), eps=1e-5)
        if self.chance(0.4):
            return norms.rms_norm(x, self.param(width) if self.chance(0.8) else None, eps=1e-6)
        centred = x
        if self.chance(0.5):
            centred = pw.sub(x, reductions.mean(x, axes=(-1,), keepdims=True))
        var = reductions.mean(pw.mul(centred, centred), axes=(2,), keepdims=True)
        var = pw.add(var, self.constant(1e-3, x))
        y = pw.mul(centred, pw.rsqrt(var)) if self.chance(0.5) else pw.div(centred, pw.sqrt(var))
        return pw.mul(self.param(width), y) if self.chance(0.7) else y

    def norm(self) -> None:
        self.keep(self._norm(self.rows()))

    def mlp(self) -> None:
        """Gate and up over a norm, and down with the residual."""
        x = self.rows()
        width = x.type.shape[-1]
        n, hidden = self._norm(x), self.pick(6, 16)
        a, b = (products.linear(n, self.param(hidden, width)) for _ in range(2))
        inner = self.pick(lambda: pw.mul(pw.silu(a), b), lambda: pw.mul(b, pw.gelu(a)), lambda: pw.swiglu(a, b))()
        self.keep(pw.add(x, products.linear(inner, self.param(width, hidden))))

    def experts(self) -> None:
        """A router and experts that read one norm."""
        x = self.rows()
        width = x.type.shape[-1]
        n = norms.rms_norm(x, self.param(width), eps=1e-6)
        chosen = self.inputs.get("rows") or self.input("rows", i64, BATCH, SEQ)
        ids, flat = views.reshape(chosen, shape=(BATCH * SEQ, 1)), views.reshape(n, shape=(BATCH * SEQ, width))
        y = products.expert_linear(flat, self.param(5, 8, width), ids, self.param(5, 8, width), gate="silu")
        self.keep(views.reshape(y, shape=(BATCH, SEQ, 8)))
        if self.dtype != f32 or self.chance(0.5):
            self.keep(products.linear(n, self.param(5, width)))
            return
        scores = views.reshape(products.linear(n, self.param(6, width)), shape=(BATCH * SEQ, 6))
        share, _ = products.route(scores, k=2)  # whose choice beside an expert of all rows
        gate, up = (products.linear(n, self.param(8, width)) for _ in range(2))
        self.keep(views.reshape(share, shape=(BATCH, SEQ, 2)), pw.mul(pw.silu(gate), up))

    def norm_behind(self) -> None:
        """A norm of what a product gives, and the residual."""
        x = self.rows()
        width = x.type.shape[-1]
        y = products.linear(x, self.param(width, width))
        self.keep(pw.add(x, norms.rms_norm(y, self.param(width), eps=1e-6)))

    def latent(self) -> None:
        """Latent attention: a normed latent and a rotated key in one cache."""
        x = self.rows()
        cache = self.input("latents", self.dtype, BATCH, 1, CAPACITY, 6 + DIM)
        positions = self.inputs.get("positions") or self.input("positions", i64, BATCH, SEQ)
        sin, cos = self.param(6, DIM // 2), self.param(6, DIM // 2)

        def product(*shape: int) -> Any:
            y = products.linear(x, self.param(int(np.prod(shape)), x.type.shape[-1]))
            return views.reshape(y, shape=(BATCH, SEQ, *shape))

        latent = views.reshape(norms.rms_norm(product(6), self.param(6), eps=1e-6), shape=(BATCH, SEQ, 1, 6))
        q, k = (attn.rope(product(n, DIM), positions, sin, cos, algo="gpt_j") for n in (HEADS, 1))
        first = product(HEADS, 6)
        if self.chance(0.5):  # by a matrix for each head
            shape = (BATCH * SEQ, HEADS)
            ids = views.expand(views.reshape(views.arange(length=HEADS), shape=(1, HEADS)), shape=shape)
            part = views.slice_(product(HEADS, DIM + 2), axis=3, start=0, length=DIM, step=1)
            plain = views.reshape(part, shape=(*shape, DIM))
            made = products.expert_linear(plain, self.param(HEADS, 6, DIM), ids)
            first = views.reshape(made, shape=(BATCH, SEQ, HEADS, 6))
        new = attn.kv_update(cache, views.concat(latent, k, axis=-1), self.lengths)
        self.writes.append((cache, new))
        values = views.slice_(new, axis=3, start=0, length=6, step=1)
        joined = views.concat(first, q, axis=-1)
        y = attn.attention(joined, new, values, None, self.lengths, causal=True, layout="bshd")
        self.keep(views.reshape(y, shape=(BATCH, SEQ, HEADS * 6)))

    def reduction(self) -> None:
        x = self.rows()
        if self.chance(0.5):
            x = pw.mul(x, self.pick(x, pw.sin(x)))
        keepdims, axis = self.chance(0.7), self.pick(-1, 2, 1)
        op = self.pick(reductions.sum_, reductions.mean, reductions.max_, reductions.min_)
        y = op(x, axes=(axis,), keepdims=keepdims)
        self.keep(pw.tanh(y) if self.chance(0.7) else pw.mul(y, self.constant(0.1, y)))

    def softmax(self) -> None:
        self.keep(reductions.softmax(self.rows(), axis=self.pick(-1, 1)))

    def view(self) -> None:
        """There and back, or just there."""
        x = self.rows()
        width = x.type.shape[-1]
        kind = self.pick("heads", "transpose", "slice", "split", "concat", "identity", "repeat")
        if kind == "heads":
            y = views.reshape(x, shape=(BATCH, SEQ, width // 4, 4))
            y = views.transpose(y, axes=(0, 2, 1, 3))
            y = views.transpose(pw.tanh(y) if self.chance(0.5) else y, axes=(0, 2, 1, 3))
            self.keep(views.reshape(y, shape=(BATCH, SEQ, width)))
        elif kind == "transpose":
            self.keep(views.transpose(x, axes=(0, 2, 1)))
        elif kind == "slice":
            y = views.slice_(x, axis=1, start=SEQ - 1, length=1)
            self.keep(y, views.slice_(x, axis=2, start=0, length=4))
        elif kind == "split":
            self.keep(*views.split(x, sizes=(width // 2, width - width // 2), axis=-1))
        elif kind == "concat":
            self.keep(views.slice_(views.concat(x, pw.neg(x), axis=-1), axis=-1, start=2, length=width))
        elif kind == "identity":
            y = views.reshape(views.reshape(x, shape=(BATCH * SEQ, width)), shape=(BATCH, SEQ, width))
            self.keep(pw.cast(views.expand(y, shape=(BATCH, SEQ, width)), dtype=y.type.dtype))
        else:
            y = views.repeat(views.slice_(x, axis=2, start=0, length=4), repeats=2, axis=2)
            self.keep(y)

    def convolution(self) -> None:
        """Over the sequence, with a scale for each channel behind it."""
        x, out = self.rows(), self.pick(*WIDTHS)
        width = x.type.shape[-1]
        image = views.reshape(views.transpose(x, axes=(0, 2, 1)), shape=(BATCH, width, SEQ, 1))
        y = conv2d(image, self.param(out, width, 3, 1), None, padding=(1, 1, 0, 0))
        y = pw.mul(y, self.param(out, 1, 1))
        self.keep(views.transpose(views.reshape(y, shape=(BATCH, out, SEQ)), axes=(0, 2, 1)))

    def recurrence(self) -> None:
        """A scan over the sequence, with products over its slices and over its state."""
        x = self.rows()
        width = x.type.shape[-1]
        shared = [self.param(width, width), self.param(width, width), self.param(width)]
        types = [TensorType(x.type.dtype, (BATCH, width))] * 2 + [p.type for p in shared]
        inputs = [Value(t, self.builder.fresh(n)) for n, t in zip("svwub", types, strict=True)]
        with self.builder.nested() as inner:
            s, v, w, u, b = inputs
            new = pw.tanh(pw.add(products.linear(v, w, b), products.linear(s, u, None)))
            if self.chance(0.5):
                new = pw.add(new, pw.mul(pw.sigmoid(pw.mul(v, b)), pw.sub(s, new)))
            y = self.pick(new, s, pw.mul(new, v))
        body = Graph("cell", tuple(inputs), (), tuple(inner.ops), (new, y))
        first, xs = reductions.mean(x, axes=(1,)), views.transpose(x, axes=(1, 0, 2))
        attrs = {"length": SEQ, "state": 1, "slices": 1, "reverse": self.chance(0.3), "body": body}
        last, ys = scan(first, xs, *shared, **attrs)
        self.keep(last, views.transpose(ys, axes=(1, 0, 2)))

    def embed(self) -> None:
        ids = self.inputs.get("rows") or self.input("rows", i64, BATCH, SEQ)
        self.keep(embedding(ids, self.param(5, 8)))

    def _heads(self, x: Value) -> tuple[Any, Any, Any]:
        width = x.type.shape[-1]
        shape = (BATCH, SEQ, HEADS, DIM)
        return tuple(views.reshape(products.linear(x, self.param(8, width)), shape=shape) for _ in range(3))  # type: ignore[return-value]

    def attention(self) -> None:
        """Written out, with a scale, a mask or causal."""
        x = self.rows()
        q, k, v = (views.transpose(t, axes=(0, 2, 1, 3)) for t in self._heads(self._norm(x)))
        scores = products.matmul(q, views.transpose(k, axes=(0, 1, 3, 2)))
        scores = pw.mul(scores, self.constant(0.5, scores)) if self.chance(0.7) else scores
        if self.chance(0.5):
            weights = reductions.causal_softmax(scores)
        else:
            mask = self.inputs.get("mask") or self.input("mask", self.dtype, SEQ, SEQ)
            weights = reductions.softmax(pw.add(scores, mask) if self.chance(0.5) else scores, axis=-1)
        y = views.transpose(products.matmul(weights, v), axes=(0, 2, 1, 3))
        y = products.linear(views.reshape(y, shape=(BATCH, SEQ, 8)), self.param(x.type.shape[-1], 8))
        self.keep(pw.add(x, y))

    def cached(self) -> None:
        """Attention over two caches, with rotated queries and keys."""
        x = self.rows()
        number = len(self.writes)
        caches = [self.input(f"cache{number + i}", self.dtype, BATCH, HEADS, CAPACITY, DIM) for i in range(2)]
        positions = self.inputs.get("positions") or self.input("positions", i64, BATCH, SEQ)
        sin, cos = self.param(6, DIM // 2), self.param(6, DIM // 2)
        q, k, v = self._heads(self._norm(x))
        if self.chance(0.3):
            q, k = (norms.rms_norm(t, self.param(DIM), eps=1e-5) for t in (q, k))
        algo = self.pick("gpt_neox", "gpt_j")
        q, k = (attn.rope(t, positions, sin, cos, algo=algo) for t in (q, k))
        before = self.chance(0.2) and pw.tanh(caches[0])
        new = [attn.kv_update(c, t, self.lengths) for c, t in zip(caches, (k, v), strict=True)]
        self.writes += list(zip(caches, new, strict=True))
        if before:
            self.keep(reductions.sum_(pw.neg(before), axes=(1, 2), keepdims=False))
        y = attn.attention(views.transpose(q, axes=(0, 2, 1, 3)), *new, None, self.lengths, causal=True)
        y = views.reshape(views.transpose(y, axes=(0, 2, 1, 3)), shape=(BATCH, SEQ, 8))
        self.keep(pw.add(x, products.linear(y, self.param(x.type.shape[-1], 8))))

    def head(self) -> None:
        x = self.rows()
        if self.chance(0.5):
            x = select_rows(x, self.lengths_in_range())
        y = products.linear(self._norm(x) if equal(x.type.shape[1], SEQ) else x, self.param(5, x.type.shape[-1]))
        self.keep(pw.cast(reductions.argmax(y, axis=-1), dtype=self.dtype))

    def lengths_in_range(self) -> Value:
        return self.inputs.get("valid_rows") or self.input("valid_rows", i32, BATCH)

    def equal_ops(self) -> None:
        x = self.rows()
        self.keep(pw.add(pw.sin(x), pw.cos(x)), pw.mul(pw.sin(x), self.constant(2.0, x)))

    def weights(self) -> None:
        """Ops over weights only."""
        x = self.rows()
        w = pw.mul(self.param(x.type.shape[-1]), self.constant(0.5, x))
        self.keep(pw.mul(x, pw.add(w, self.param(x.type.shape[-1]))))


STEPS: tuple[Callable[[Maker], None], ...] = (
    Maker.unary, Maker.binary, Maker.binary, Maker.chain, Maker.chain, Maker.linear, Maker.linear, Maker.conv1d,
    Maker.norm, Maker.mlp, Maker.reduction, Maker.softmax, Maker.view, Maker.view, Maker.embed, Maker.attention,
    Maker.cached, Maker.head, Maker.equal_ops, Maker.weights, Maker.recurrence,
    Maker.convolution,
)  # fmt: skip


def random_graph(seed: int, steps: int = 12) -> Graph:
    """A graph of `steps` random steps; every value that nobody reads is an output, and a few others."""
    m = Maker(seed)
    layers = m.pick(0, 0, 0, 2, 3) if steps >= 12 else 0
    with m.builder:
        for _ in range(steps):
            m.pick(*STEPS)(m)
        for _ in range(layers):  # equal layers, which may become a loop
            m.rng, kept = np.random.default_rng(seed), m.rng
            m.pool = [v for v in m.pool if v.type.shape == (BATCH, SEQ, 8)][-1:] or m.pool
            m.mlp()
            m.cached()
            m.rng = kept
        if seed % 20 in (7, 12, 17):
            {7: m.experts, 12: m.norm_behind, 17: m.latent}[seed % 20]()
    read = {v for op in m.builder.ops for v in op.reads}
    results = [r for op in m.builder.ops for r in op.results if r not in read and r.type.dtype != bool_]
    states = {new for _, new in m.writes}
    outputs = [v for v in results if v not in states][1 if seed % 3 == 0 else 0 :]  # now and then something is dead
    outputs += [v for v in m.pool[:: max(len(m.pool) // 3, 1)] if v not in outputs]
    inputs = tuple(m.inputs.values())
    writes = tuple((inputs.index(c), len(outputs) + j) for j, (c, _) in enumerate(m.writes))
    params = tuple(Param(v, path) for path, v in m.params.items())
    values = (*outputs, *(new for _, new in m.writes))
    return Graph(f"random_{seed}", inputs, params, tuple(m.builder.ops), values, writes=writes)
