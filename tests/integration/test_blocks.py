"""Fused and unfused plans of whole blocks against the float64 interpreter, f32 and bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.pytree import flatten
from monoplan.frontend.tensor import Tensor
from monoplan.ir.interpreter import interpret
from monoplan.ir.types import as_dtype
from tests.integration.blocks import BLOCKS, CONTEXT, DIM, HIDDEN, VOCAB
from tests.matrices import partly
from tests.tolerances import check, check_no_worse

# batch, tokens, capacity, past lengths, valid counts
CASES = {
    "prompt": (2, 5, 16, (0, 0), (5, 5)),
    "uneven": (3, 4, 12, (2, 7, 0), (4, 1, 3)),
    "token": (1, 1, 16, (9,), (1,)),
}


def arguments(name: str, dtype: str, case: tuple[Any, ...], rng: np.random.Generator) -> list[Any]:
    """Arguments of a block, in the order of its forward."""
    batch, seq, capacity, past, valid = case
    kind = as_dtype(dtype).numpy
    if name in ("gpt2", "gpt"):
        ids = rng.integers(0, VOCAB, (batch, seq))
        return [ids] if name == "gpt2" else [ids, rng.integers(0, CONTEXT, seq)]
    x = rng.standard_normal((batch, seq, HIDDEN)).astype(kind)
    if name == "mlp":
        return [x]
    kv_heads = 4 if name == "gptj" else BLOCKS[name].kv_heads
    cache = KVCache(1, batch, kv_heads, DIM, capacity, dtype=dtype)
    for tensors in (cache.k, cache.v):
        tensors[0] = Tensor(rng.standard_normal(tensors[0].shape).astype(kind))
    cache.lengths = Tensor(np.array(past, np.int32))
    return [x, cache, np.array(valid, np.int32)]


def written(args: list[Any]) -> list[np.ndarray[Any, Any]]:
    """Every array among the arguments, as the graph's inputs are ordered."""
    leaves, _ = flatten(args)
    return [x.numpy() if isinstance(x, Tensor) else x for _, x in leaves]


def randomize(module: nn.Module, rng: np.random.Generator) -> None:
    """Weights of a size that keeps activations near 1, and norms and biases that are not 1 and 0."""
    for name, p in module.named_parameters():
        shape = tuple(int(n) for n in p.shape)
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        values = rng.standard_normal(shape) * scale + (len(shape) == 1 and "bias" not in name)
        p.load(values.astype(np.float32))


@pytest.mark.parametrize("fuse", partly([True, False], bool), ids=["fused", "unfused"])
@pytest.mark.parametrize("dtype", partly(["f32", "bf16"], lambda dtype: dtype == "f32"))
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, dtype: str, fuse: bool, rng: np.random.Generator) -> None:
    module = BLOCKS[name](dtype)
    randomize(module, rng)
    fast = mp.compile(module, *module.specs(dtype), options={"fuse": fuse})
    traced = fast.built[0][2].stages[0].graph
    tensors = {path: t.numpy() for path, t in fast.built[0][2].tensors.items()}
    for case in CASES.values():
        args = arguments(name, dtype, case, rng)
        inputs = [a.copy() for a in written(args)]
        exact = interpret(traced, inputs, tensors, exact=True)
        plain = interpret(traced, inputs, tensors)
        y = fast(*args)
        valid = case[4] if name in ("llama", "qwen", "gptj") else [case[1]] * case[0]
        rows = np.arange(case[1])[None, :, None] < np.array(valid)[:, None, None]  # padding computes anything
        check(np.where(rows, y, 0).astype(y.dtype), np.where(rows, exact[0], 0), dtype, "model")
        check_no_worse(*(np.where(rows, a, 0).astype(a.dtype) for a in (y, plain[0], exact[0])), dtype, "matmul")
        after = written(args)
        for i, j in traced.writes:
            check(after[i], exact[j], str(as_dtype(after[i].dtype)), "model")
    assert fast.stats.compiles == 1


def test_fusion_leaves_few_kernels() -> None:
    """What each block becomes: numbers that may only get smaller."""
    for name, most in {"llama": 8, "qwen": 8, "gpt2": 10, "gptj": 9, "mlp": 2, "gpt": 6}.items():
        module = BLOCKS[name]("f32")
        fast = mp.compile(module, *module.specs("f32"))
        kernels = [step.kernel.op.name for step, _ in fast.plan.steps()]
        assert len(kernels) <= most, f"{name}: {kernels}\n{fast.explain()}"


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_decoder_layer_is_five_kernels(name: str) -> None:
    module = BLOCKS[name]("f32")
    fast = mp.compile(module, *module.specs("f32"))
    names = [s.kernel.op.name for s, _ in fast.plan.steps() if s.kernel.op.loc.path.startswith("layer")]
    assert names == ["qkv_rope_cache", "attention", "fused_linear", "fused_linear", "fused_linear"]
