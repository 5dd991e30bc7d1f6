"""Tensor-parallel linears: one rank is the plain layer; shards make up the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from monoplan import nn
from monoplan.frontend.specs import spec
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import ArgumentError
from tests.tolerances import check


def plain(in_features: int = 6, out_features: int = 8) -> nn.Linear:
    nn.manual_seed(11)
    return nn.Linear(in_features, out_features)


@pytest.mark.parametrize("kind", [nn.ColumnParallelLinear, nn.RowParallelLinear])
def test_one_rank(kind: Any, rng: np.random.Generator) -> None:
    reference = plain()
    nn.manual_seed(11)
    layer = kind(6, 8)
    x, residual = rng.standard_normal((2, 6)).astype(np.float32), rng.standard_normal((2, 8)).astype(np.float32)
    np.testing.assert_array_equal(layer(x).numpy(), reference(x).numpy())
    np.testing.assert_array_equal(layer(x, residual).numpy(), reference(x, residual).numpy())
    assert [op.name for op in trace(layer, spec("n", 6)).graph.ops] == ["linear"]
    assert "tp_rank=0, tp_size=1" in repr(layer)


def test_columns_make_up_the_whole(rng: np.random.Generator) -> None:
    reference, x = plain(), rng.standard_normal((3, 6)).astype(np.float32)
    parts = []
    for rank in range(4):
        nn.manual_seed(11)
        layer = nn.ColumnParallelLinear(6, 8, tp_rank=rank, tp_size=4)
        assert layer.weight.shape == (2, 6) and layer.weight.full_shape == (8, 6) and layer.bias.shape == (2,)
        parts.append(layer(x).numpy())
    np.testing.assert_allclose(np.concatenate(parts, -1), reference(x).numpy(), rtol=1e-6)


def test_rows_are_summed(rng: np.random.Generator) -> None:
    reference, x = plain(), rng.standard_normal((3, 6)).astype(np.float32)
    total = np.zeros((3, 8))
    for rank in range(2):
        nn.manual_seed(11)
        layer = nn.RowParallelLinear(6, 8, tp_rank=rank, tp_size=2, communicator="handle")
        assert layer.weight.shape == (8, 3) and layer.bias.shape == (8,) and layer.communicator == "handle"
        graph = trace(layer, spec("n", 3), spec("n", 8)).graph
        # The bias comes after the sum: once, and not once for each rank.
        assert [op.name for op in graph.ops] == ["linear", "all_reduce", "add", "add"]
        assert graph.ops[1].attrs == {"world": 2}
        total += np.einsum("nk,ok->no", x[:, 3 * rank : 3 * rank + 3], layer.weight.numpy(), dtype=np.float64)
    check(reference(x).numpy(), total + reference.bias.numpy(), "f32", "matmul")


def test_loading_takes_the_shard() -> None:
    state = {k: t.numpy() for k, t in plain().state_dict().items()}
    column = nn.ColumnParallelLinear(6, 8, tp_rank=1, tp_size=2)
    column.load_state_dict(state)
    np.testing.assert_array_equal(column.weight.numpy(), state["weight"][4:])
    np.testing.assert_array_equal(column.bias.numpy(), state["bias"][4:])
    row = nn.RowParallelLinear(6, 8, tp_rank=1, tp_size=2)
    row.load_state_dict(state)
    np.testing.assert_array_equal(row.weight.numpy(), state["weight"][:, 3:])
    np.testing.assert_array_equal(row.bias.numpy(), state["bias"])


def test_more_ranks_do_not_run_eagerly() -> None:
    with pytest.raises(ArgumentError, match="all_reduce over 2 ranks needs a communicator"):
        nn.RowParallelLinear(6, 8, tp_size=2)(np.zeros((1, 3), np.float32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.ColumnParallelLinear(6, 10, tp_size=4), "out_features 10 can't be divided evenly between 4 ranks"),
        (lambda: nn.RowParallelLinear(10, 6, tp_size=3), "in_features 10 can't be divided evenly between 3 ranks"),
        (lambda: nn.ColumnParallelLinear(6, 8, tp_rank=2, tp_size=2), "tp_rank 2 is not a rank of a group of 2"),
        (lambda: nn.RowParallelLinear(6, 8, tp_size=0), "tp_size must be"),
    ],
)
def test_wrong_groups(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
