"""The functional API: the seeds' signatures, out= and inplace= eager and traced, and every op reachable."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.specs import spec
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import ArgumentError, TypeRuleError
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import bf16, bool_, f16, f32, i32, i64
from tests.tolerances import check


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *xs: Any) -> Any:
        return self.fn(*xs)


def traced(fn: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """Results of the traced function, and after them the new contents of arguments that it wrote."""
    t = trace(Call(fn), *(spec(*a.shape, dtype=a.dtype) for a in arrays))
    return interpret(t.graph, list(arrays), {p: v.numpy() for p, v in t.params.items()})


SEEDS = {
    "causal_softmax": "(input, out=None)",
    "embedding": "(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, "
    "sparse=False, *, out=None)",
    "linear": "(input, weight, bias=None, *, out=None)",
    "random_sample": "(logits, random_val, topp, topk, temperature, *, min_p=None, out=None)",
    "rms_norm": "(input, normalized_shape, weight=None, eps=1e-05, *, out=None)",
    "rope": "(x, pos_ids, sin_table, cos_table, algo=<RopeAlgo.GPT_NEOX: 'gpt_neox'>, *, out=None)",
    "silu": "(input, inplace=False, *, out=None)",
    "swiglu": "(input, other, *, out=None)",
    "scaled_dot_product_attention": "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,"
    " enable_gqa=False, *, softcap=None, window=None, past=None, table=None, sinks=None,"
    " causal_alignment='lower_right')",
}


@pytest.mark.parametrize("name", SEEDS)
def test_signatures(name: str) -> None:
    signature = inspect.signature(getattr(F, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SEEDS[name]


# Ops under another name in PyTorch; ops that only passes make have none.
RENAMED = {
    "attention": "scaled_dot_product_attention", "transpose": "permute", "slice": "narrow", "gather": "index_select",
    "repeat": "repeat_interleave", "pool2d": "avg_pool2d", "adaptive_pool2d": "adaptive_avg_pool2d",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_op_is_a_function(name: str) -> None:
    if name == "scan":  # mp.scan: it takes a function
        return
    made_by_passes = REGISTRY[name].reference.__module__.endswith(("fused", "control"))
    found = getattr(F, RENAMED.get(name, name), None)
    assert made_by_passes or (found is not None and found.__doc__ and RENAMED.get(name, name) in F.__all__)


def test_all_names_exist() -> None:
    assert all(getattr(F, n).__doc__ for n in F.__all__) and len(set(F.__all__)) == len(F.__all__)


@pytest.mark.parametrize(
    "name",
    [
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "erf",
        "erfc",
        "exp2",
        "expm1",
        "log1p",
        "log2",
        "log10",
        "atan",
        "tan",
        "cbrt",
        "asinh",
        "softplus",
        "silu",
        "gelu",
        "softmax",
        "log_softmax",
        "mean",
    ],
)
def test_integers_become_floats(name: str) -> None:
    x = np.array([1, 2, 3], np.int32)
    got = getattr(F, name)(x)
    assert got.dtype is f32
    np.testing.assert_array_equal(got.numpy(), getattr(F, name)(x.astype(np.float32)).numpy())


RNG = np.random.default_rng(5)
A, B = (RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
W = RNG.standard_normal((4, 4)).astype(np.float32)
SIN, COS = (f(np.arange(8)[:, None] * [1.0, 0.1]).astype(np.float32) for f in (np.sin, np.cos))
WITH_OUT = {
    "causal_softmax": lambda out: F.causal_softmax(A, out),
    "embedding": lambda out: F.embedding(np.array([3, 0, 1]), W, out=out),
    "linear": lambda out: F.linear(A, W, B[0], out=out),
    "rms_norm": lambda out: F.rms_norm(A, [4], W[0], out=out),
    "layer_norm": lambda out: F.layer_norm(A, (4,), W[0], W[1], out=out),
    "silu": lambda out: F.silu(A, out=out),
    "relu": lambda out: F.relu(A, out=out),
    "swiglu": lambda out: F.swiglu(A, B, out=out),
    "softmax": lambda out: F.softmax(A, 0, out=out),
    "gelu": lambda out: F.gelu(A, "tanh", out=out),
    "add": lambda out: F.add(A, 1.5, out=out),
    "exp": lambda out: F.exp(A, out=out),
    "where": lambda out: F.where(A > 0, A, 0.0, out=out),
    "cat": lambda out: F.cat([A[:1], B[1:]], out=out),
    "cumsum": lambda out: F.cumsum(A, 1, out=out),
    "matmul": lambda out: F.matmul(A, W, out=out),
    "clamp": lambda out: F.clamp(A, -0.5, 0.5, out=out),
}


@pytest.mark.parametrize("name", WITH_OUT)
def test_out(name: str) -> None:
    call = WITH_OUT[name]
    wanted = call(None).numpy()
    for out in (Tensor(np.zeros((3, 4), np.float32)), np.zeros((3, 4), np.float32)):
        result = call(out)
        np.testing.assert_array_equal(np.asarray(out), wanted)
        assert result is out or result.numpy() is out
    # Traced: the argument takes the result over, and what is read from it later is the new contents.
    outs = traced(lambda o: (call(o), o * 1.0)[1], np.zeros((3, 4), np.float32))
    for got in outs:
        np.testing.assert_array_equal(got, wanted)
    assert len(outs) == 2


def test_out_of_another_type() -> None:
    with pytest.raises(ArgumentError, match=r"out is f32\[2, 4\], the result is f32\[3, 4\]"):
        F.silu(A, out=Tensor(np.zeros((2, 4), np.float32)))
    with pytest.raises(ArgumentError, match=r"out is f16\[3, 4\]"):
        F.linear(A, W, out=Tensor(np.zeros((3, 4), np.float16)))


def test_out_may_be_an_input() -> None:
    gate, up = A.copy(), B.copy()
    wanted = F.swiglu(F.silu(A), B).numpy()
    g = Tensor(gate)
    assert F.silu(g, inplace=True) is g
    assert F.swiglu(g, up, out=g) is g
    np.testing.assert_array_equal(gate, wanted)


def test_inplace_wins_over_out() -> None:
    x, out = Tensor(A.copy()), Tensor(np.zeros_like(A))
    assert F.silu(x, inplace=True, out=out) is x and not out.numpy().any()
    result, changed = traced(lambda x, o: F.silu(x, True, out=o), A, np.zeros_like(A))
    np.testing.assert_array_equal(changed, x.numpy())
    np.testing.assert_array_equal(result, x.numpy())


def test_the_seeds_memory_efficient_ffn() -> None:
    norm = W[0]

    def ffn(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        gate, up = F.linear(x, w_gate), F.linear(x, w_up)
        F.silu(gate, inplace=True)
        F.swiglu(gate, up, out=gate)
        output = F.linear(gate, w_down)
        F.rms_norm(output, [output.shape[-1]], norm, out=output)
        return output

    eager = ffn(*(Tensor(t) for t in (A, W, W.T.copy(), W)))
    (got,) = traced(ffn, A, W, W.T.copy(), W)
    np.testing.assert_array_equal(got, eager.numpy())

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    a, w = A.astype(np.float64), W.astype(np.float64)
    gate = a @ w.T
    gate = gate * sigmoid(gate)
    y = (gate * sigmoid(gate) * (a @ w)) @ w.T
    check(got, y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * norm, "f32", "matmul", scale=4)


@pytest.mark.parametrize(
    "options",
    [{"padding_idx": 0}, {"max_norm": 1.0}, {"norm_type": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}],
    ids=str,
)
def test_embedding_refuses_what_it_does_not_do(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"embedding: {next(iter(options))}=.* is not supported"):
        F.embedding(np.array([0]), W, **options)


def test_normalized_shape_must_match() -> None:
    with pytest.raises(ArgumentError, match=r"normalized_shape is \[3\], the input ends with the shape \[4\]"):
        F.rms_norm(A, [3], W[0, :3])
    with pytest.raises(ArgumentError, match=r"normalized_shape is \[4\], the weight has the shape \[3\]"):
        F.rms_norm(A, [4], W[0, :3])
    with pytest.raises(ArgumentError, match=r"normalized_shape is \[\]"):
        F.layer_norm(A, [])
    assert F.rms_norm(A, 4, None).shape == (3, 4) and F.layer_norm(A, (3, 4)).shape == (3, 4)


def test_rope_algorithms() -> None:
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    near = F.rope(x, [3, 5], SIN, COS, F.RopeAlgo.GPT_J).numpy()
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * (COS + 1j * SIN)[[3, 5]][:, None]
    np.testing.assert_allclose(near, np.stack([z.real, z.imag], -1).reshape(x.shape), rtol=1e-5, atol=1e-6)
    halves = F.rope(x, [3, 5], SIN, COS).numpy()
    z = (x[..., :2] + 1j * x[..., 2:]) * (COS + 1j * SIN)[[3, 5]][:, None]
    np.testing.assert_allclose(halves, np.concatenate([z.real, z.imag], -1), rtol=1e-5, atol=1e-6)
    out = Tensor(np.zeros_like(x))
    assert F.rope(x, [3, 5], SIN, COS, "gpt_neox", out=out) is out
    np.testing.assert_array_equal(out.numpy(), halves)


def test_random_sample() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4]))
    assert [F.random_sample(logits, u, 1.0, 0, 1.0).item() for u in (0.0, 0.39, 0.41, 0.71, 0.95)] == [3, 3, 2, 1, 0]
    assert (
        F.random_sample(logits, 0.99, 1.0, 1, 1.0).item() == 3 and F.random_sample(logits, 0.9, 1.0, 0, 0).item() == 3
    )
    assert F.random_sample(logits, 0.99, 1.0, 0, 1.0, min_p=0.7).item() == 2
    rows = np.stack([logits, logits[::-1]])
    got = F.random_sample(rows, Tensor([0.0, 0.0]), np.array([1.0, 0.5], np.float32), Tensor([0, 2]), 0.5)
    assert got.tolist() == [3, 0] and got.dtype is i64
    out = Tensor(np.zeros(2, np.int64))
    F.random_sample(rows, 0.0, 1.0, 0, 1.0, out=out)
    assert out.tolist() == [3, 0]
    (drawn,) = traced(lambda x: F.random_sample(x, 0.5, 0.9, 3, 0.8), logits.astype(np.float32))
    assert drawn == F.random_sample(logits, 0.5, 0.9, 3, 0.8).item()
    assert F.random_sample(np.array([1.0, -np.inf], np.float32), 0.99999999999, 1.0, 0, 1.0).item() == 0
    for bad in (1.0, -0.1, math.nan):
        with pytest.raises(ArgumentError, match=r"random_val one in \[0, 1\)"):
            F.random_sample(logits, bad, 1.0, 0, 1.0)


def test_attention(rng: np.random.Generator) -> None:
    q = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, 5, 8)).astype(np.float32) for _ in range(2))
    mask = rng.integers(0, 2, (2, 1, 3, 5)).astype(bool)
    mask[..., 0] = True
    got = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, scale=0.2)
    kr, vr = (F.repeat_kv(t, 2).numpy().astype(np.float64) for t in (k, v))
    scores = np.where(mask, np.einsum("bhqd,bhkd->bhqk", q, kr) * 0.2, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    check(got.numpy(), np.einsum("bhqk,bhkd->bhqd", weights, vr), "f32", "matmul")
    flat = F.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], is_causal=True)
    np.testing.assert_allclose(
        flat.numpy(), F.scaled_dot_product_attention(q[:1, :1], k[:1, :1], v[:1, :1], is_causal=True).numpy()[0, 0]
    )
    with pytest.raises(ArgumentError, match="dropout_p=0.1 is not supported"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_reductions_and_sorting() -> None:
    assert (
        F.sum(A, 1).shape == (3,) and F.mean(A, dim=(0, 1)).shape == () and F.amax(A, -1, keepdim=True).shape == (3, 1)
    )
    assert F.argmax(A).item() == A.argmax() and F.amin(A).item() == A.min()
    values, places = F.topk(A, 2)
    np.testing.assert_array_equal(values.numpy(), -np.sort(-A, -1)[:, :2])
    np.testing.assert_array_equal(F.gather(A, 1, places).numpy(), values.numpy())
    assert F.topk(A, 1).indices.shape == (3, 1) and F.sort(A, 0).values.shape == (3, 4)
    np.testing.assert_array_equal(F.argsort(A, descending=True).numpy(), np.argsort(-A, kind="stable"))
    values, places = F.topk(A, 2, largest=False)
    np.testing.assert_array_equal(values.numpy(), np.sort(A, -1)[:, :2])
    for found, wanted in ((F.max(A, 1), A.argmax(1)), (F.min(A, 1), A.argmin(1))):
        np.testing.assert_array_equal(found.indices.numpy(), wanted)
        np.testing.assert_array_equal(found.values.numpy(), A[np.arange(3), wanted])
    np.testing.assert_allclose(F.log_softmax(A, 0).numpy(), np.log(F.softmax(A, 0).numpy()), rtol=1e-5)


def test_new_tensors() -> None:
    assert (
        F.arange(4).tolist() == [0, 1, 2, 3]
        and F.arange(2, 9, 3).tolist() == [2, 5, 8]
        and F.arange(3, 1).tolist() == []
    )
    assert F.arange(4).dtype is i64 and F.arange(0.0, 1.0, 0.25).tolist() == [0, 0.25, 0.5, 0.75]
    assert F.arange(3, dtype="f16").dtype is f16 and F.arange(5, 2, -1).tolist() == [5, 4, 3]
    assert F.arange(-0.9, 2.1, 2.0, dtype=i64).tolist() == [0, 2]  # two numbers, of which the fractions are cut off
    assert F.arange(5, 4, -0.5, dtype="i32").tolist() == [5, 5] and F.arange(5.7, 1.2, -1.3, dtype=i64).shape == (4,)
    for bad in ((0, 4, 0), (0.0, 1.0, 0.0), (0, float("inf")), (float("nan"),)):
        with pytest.raises(ArgumentError, match="has no end"):
            F.arange(*bad, dtype=i64)
    assert F.linspace(4.9, -3.3, 7, dtype=i64).tolist() == [4, 2, 1, 0, 0, -1, -3]
    assert F.full((2,), 1.5).dtype is f32 and F.full(2, True).dtype is bool_ and F.full([1], 3).dtype is i64
    assert F.zeros(2, 3).shape == (2, 3) and F.ones((2,), dtype="i32").dtype is i32
    assert F.zeros_like(Tensor([1.0], "bf16")).dtype is bf16 and F.ones_like(A).shape == (3, 4)
    assert F.full_like(A, 2, dtype=i64).tolist() == [[2] * 4] * 3
    np.testing.assert_array_equal(F.tril(A, -1).numpy(), np.tril(A, -1))
    np.testing.assert_array_equal(F.triu(A, 1).numpy(), np.triu(A, 1))
    with pytest.raises(ArgumentError, match="needs ints and a positive step"):
        trace(Call(lambda x: F.arange(x.shape[0], 0, -1)), spec("n"))


def test_joining_and_choosing() -> None:
    np.testing.assert_array_equal(F.cat([A, B], -1).numpy(), np.concatenate([A, B], -1))
    np.testing.assert_array_equal(F.stack([A, B], 1).numpy(), np.stack([A, B], 1))
    np.testing.assert_array_equal(F.repeat_interleave(A, 2, 1).numpy(), np.repeat(A, 2, 1))
    np.testing.assert_array_equal(F.masked_fill(A, A > 0, -math.inf).numpy(), np.where(A > 0, -np.inf, A))
    np.testing.assert_array_equal(F.where(A > B, A, 0).numpy(), np.where(A > B, A, 0))
    assert F.where(A > 0, 1.0, 0.0).dtype is f32 and F.where(A > 0, 1, A).dtype is f32
    np.testing.assert_array_equal(F.clamp(A, max=0.3).numpy(), np.minimum(A, np.float32(0.3)))
    np.testing.assert_array_equal(F.index_select(A, 1, [3, 0]).numpy(), A[:, [3, 0]])
    np.testing.assert_array_equal(F.take_along(A, np.argsort(A)).numpy(), np.sort(A))
    np.testing.assert_array_equal(F.select_rows(A[None], [2]).numpy(), A[None, 2:3])
    assert F.repeat_kv(A, 1).numpy() is A and F.dropout(A).numpy() is A
    with pytest.raises(ArgumentError, match="at least one"):
        F.cat([])


def test_shapes_as_functions() -> None:
    assert F.reshape(A, (2, -1)).shape == (2, 6) and F.transpose(A, 0, 1).shape == (4, 3)
    assert F.permute(A, (1, 0)).shape == (4, 3) and F.narrow(A, 1, 1, 2).shape == (3, 2)
    assert F.expand(A, (2, 3, 4)).shape == (2, 3, 4) and len(F.chunk(A, 2, 1)) == 2 and len(F.split(A, 1)) == 3
    assert F.flatten(A).shape == (12,) and F.squeeze(F.unsqueeze(A, 0), 0).shape == (3, 4)
    assert F.all_reduce(A).shape == F.all_gather(A).shape == (3, 4) and F.cast(A, "bf16").dtype is bf16


def test_repetition_penalty() -> None:
    logits = np.array([[2.0, -2.0, 1.0]], np.float32)
    assert F.repetition_penalty(logits, [[0, 1]], [2], 2.0).tolist() == [[1, -4, 1]]


def test_updates_of_a_cache_are_functional() -> None:
    cache = np.zeros((1, 1, 4, 2), np.float32)
    new = F.kv_update(cache, np.ones((1, 2, 1, 2), np.float32), np.array([1]))
    assert new.numpy()[0, 0, :, 0].tolist() == [0, 1, 1, 0] and not cache.any()


def test_errors_say_where() -> None:
    with pytest.raises(TypeRuleError, match="the weight .* takes 5") as caught:
        F.linear(A, np.zeros((2, 5), np.float32))
    assert "test_functional.py" in str(caught.value.where)


def test_flips_of_a_symbolic_size_at_its_edges() -> None:
    class Flip(nn.Module):
        def forward(self, x: Any) -> Any:
            return F.flip(x, [0, 1]), x[::-2]

    fast = mp.compile(Flip(), mp.spec("n", 3))
    for rows in (0, 1, 2, 7):
        x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        for found, wanted in zip(fast(x), (x[::-1, ::-1], x[::-2]), strict=True):
            np.testing.assert_array_equal(found, wanted)
