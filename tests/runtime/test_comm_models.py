"""Models that ranks share: the same bits on every rank, one source, plain modules and layers written for ranks."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import bf16
from monoplan.models import LlamaForCausalLM
from monoplan.runtime.ranks import comm as comms
from monoplan.runtime.ranks.comm import Communicator, single, threads
from tests.models.support import tiny_config
from tests.ranks import run_ranks
from tests.runtime.test_comm import drawn

IDS = np.array([[5, 9, 40, 7, 11, 3]])


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (4, {}),
        (2, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        (3, {"num_key_value_heads": 4, "vocab_size": 103, "attention_bias": True, "mlp_bias": True, "qk_norm": True}),
    ],
)
def test_a_divided_model(size: int, config: dict[str, Any]) -> None:
    """Logits of every rank equal each other in every bit, and the single process's closely; tokens are the same."""
    model = LlamaForCausalLM.from_config(tiny_config(**config), seed=1)
    alone = mp.compile(model, options={"threads": 1})
    wanted, text = alone(IDS), alone.generate_ids(IDS[0], 24, eos_token_id=())
    drawn_text = alone.generate_ids(IDS[0], 24, temperature=0.8, seed=5, eos_token_id=())

    def work(c: Communicator) -> Any:
        llm = mp.compile(model, tp=c, options={"threads": 1})
        batch = llm.generate_batch([IDS[0], IDS[0][:3]], 8, eos_token_id=())
        return (
            llm(IDS),
            llm.generate_ids(IDS[0], 24, eos_token_id=()),
            llm.generate_ids(IDS[0], 24, temperature=0.8, seed=5, eos_token_id=()),
            batch[0].ids,
        )

    results = run_ranks(threads(size), work)
    for logits, ids, sampled, row in results:
        np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
        assert logits.tobytes() == results[0][0].tobytes()
        assert (ids, sampled, row) == (text, drawn_text, text[:8])


def test_ranks_with_equal_parts_build_one_source(tmp_path: Path) -> None:
    """Where a part of the vocabulary begins is a number of the weights, not of the source. Dumps lie side by side."""
    model = LlamaForCausalLM.from_config(tiny_config(), seed=1)

    def work(c: Communicator) -> str:
        llm = mp.compile(model, tp=c, options={"threads": 1})
        llm.dump(tmp_path)
        return str(llm.source())

    first, second = run_ranks(threads(2), work)
    assert first == second == (tmp_path / "rank0" / "plan.c").read_text() == (tmp_path / "rank1" / "plan.c").read_text()


def test_models_that_differ_are_refused() -> None:
    def refused(first: Any, second: Any, **options: Any) -> str:
        def work(c: Communicator) -> str:
            with pytest.raises(ArgumentError) as caught:
                mp.compile((first, second)[c.rank], tp=c, **{k: v[c.rank] for k, v in options.items()}).prepare()
            return str(caught.value)

        texts = run_ranks(threads(2), work)
        assert all("the ranks do not compile the same model" in text for text in texts)
        return texts[0]

    model = LlamaForCausalLM.from_config(tiny_config(), seed=1)
    assert "differ in weights" in refused(model, LlamaForCausalLM.from_config(tiny_config(), seed=2))
    assert "differ in model" in refused(model, LlamaForCausalLM.from_config(tiny_config(num_hidden_layers=3), seed=1))
    assert "dtype" in refused(model, model, dtype=[None, "bfloat16"])
    assert "differ in options" in refused(model, model, options=[{}, {"fuse": False}])


def test_a_plain_module_with_a_plan_of_its_own() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.relu(self.up(x)))

    block, x = Block(), drawn(0, (4, 6))
    plan = {"up": "colwise", "down": "rowwise"}
    wanted = mp.compile(block)(x)

    def work(c: Communicator) -> Any:
        return mp.compile(block, tp=c, options={"tp_plan": plan})(x)

    for got in run_ranks(threads(2), work):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    block.tp_plan = plan
    assert len(run_ranks(threads(2), lambda c: mp.compile(block, tp=c)(x))) == 2
    assert np.array_equal(mp.compile(block, tp=single())(x), wanted)

    plain = nn.Linear(4, 4)

    def unnamed(c: Communicator) -> None:
        with pytest.raises(ArgumentError, match="the model has no tp_plan"):
            mp.compile(plain, tp=c)(x[:, :4])

    run_ranks(threads(2), unnamed)


def test_layers_that_are_written_for_ranks() -> None:
    """They run eagerly and compiled, through the communicator that they were given."""

    class Model(nn.Module):
        def __init__(self, c: Communicator) -> None:
            super().__init__()
            nn.manual_seed(3)
            group = {"tp_rank": c.rank, "tp_size": c.size, "communicator": c if c.size > 1 else None}
            self.embed = nn.VocabParallelEmbedding(12, 8, **group)
            self.up = nn.ColumnParallelLinear(8, 16, **group)
            self.down = nn.RowParallelLinear(16, 8, **group)
            self.head = nn.ColumnParallelLinear(8, 12, bias=False, gather_output=True, **group)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            return self.head(self.down(nn.functional.silu(self.up(x)), x))

    ids = np.array([[0, 5, 6, 11]])
    wanted = Model(single())(ids).numpy()
    one_at_a_time = Lock()  # the random numbers of a process are drawn by all its threads

    def work(c: Communicator) -> Any:
        with one_at_a_time:
            model = Model(c)
        with pytest.raises(ArgumentError, match="index 12"):
            model.embed(np.array([12]))
        return model(ids).numpy(), mp.compile(model)(ids), mp.compile(model, tp=c, target="reference")(ids)

    for results in run_ranks(threads(2), work):
        for got in results:
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    def wrong(c: Communicator) -> None:
        with pytest.raises(ArgumentError, match="over 2 ranks, there are 3"):
            mp.compile(nn.RowParallelLinear(8, 4, tp_size=2), tp=c)(np.zeros((1, 4), np.float32))

    run_ranks(threads(3), wrong)


@pytest.mark.cuda
def test_nccl_with_one_gpu() -> None:
    import cupy

    comm = comms.nccl()
    x = drawn(0, (5, 7))
    assert (comm.rank, comm.size, comm.kind) == (0, 1, "nccl")
    half = x.astype(bf16.numpy)
    assert np.array_equal(comm.all_reduce(x), x) and np.array_equal(comm.gather(half)[0], half)
    on_device = comm.all_reduce(cupy.asarray(x))
    assert isinstance(on_device, cupy.ndarray) and np.array_equal(on_device.get(), x)
    model = LlamaForCausalLM.from_config(tiny_config(), seed=1)
    assert np.array_equal(mp.compile(model, target="cuda", tp=comm)(IDS), mp.compile(model, target="cuda")(IDS))
    comm.close()
