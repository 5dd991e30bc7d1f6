"""Ranks on a GPU under a real mpirun: two that share it meet in the host's memory, and give the one rank's numbers.

pytest -m cuda tests/integration/test_tensor_parallel_cuda.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.models import AutoLlamaModel
from tests.integration.mpi_support import mpirun, task
from tests.integration.tensor_parallel_worker import IDS, TOKENS
from tests.models.support import tiny_checkpoint
from tests.needs import check
from tests.tolerances import FACTOR

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _mpi() -> None:
    check("mpi")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), hidden_size=128, intermediate_size=256, dtype="bfloat16")


def alone(model: Path, dtype: str) -> tuple[Any, list[int]]:
    """The logits of a prompt and of one more token, and the greedy text, of one rank."""
    llm = mp.compile(AutoLlamaModel.from_pretrained(model, dtype=dtype), target="cuda")
    cache = llm.new_cache()
    logits = [llm(IDS, past_key_values=cache), llm(IDS[:, :1], past_key_values=cache)]
    return np.concatenate(logits), llm.generate_ids(IDS[0], TOKENS, eos_token_id=())


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu(model: Path, tmp_path: Path, ranks: int) -> None:
    """Within 1e-5 of the one rank, relatively, and its tokens; the same bits on every rank."""
    done = task("numbers", ranks, model, tmp_path, WORKER_TARGET="cuda")
    assert done.returncode == 0, done.stderr
    wanted, text = alone(model, "float32")
    results = [np.load(tmp_path / f"{rank}.npz") for rank in range(ranks)]
    for got in results:
        assert np.abs(got["logits"] - wanted).max() <= 1e-5 * np.abs(wanted).max()
        assert got["greedy"].tolist() == text
        assert all(got[what].tobytes() == results[0][what].tobytes() for what in ("logits", "greedy", "sampled"))


def test_bf16(model: Path, tmp_path: Path) -> None:
    """Not further from the f32 numbers than one rank is, by the table; ranks agree in every bit."""
    done = task("numbers", 2, model, tmp_path, WORKER_TARGET="cuda", WORKER_DTYPE="bfloat16")
    assert done.returncode == 0, done.stderr
    (exact, _), (plain, _) = alone(model, "float32"), alone(model, "bfloat16")
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    assert np.abs(first["logits"] - exact).max() <= FACTOR * np.abs(plain - exact).max()
    assert all(first[what].tobytes() == second[what].tobytes() for what in ("logits", "greedy", "sampled"))


def test_a_killed_rank_brings_the_other_down(model: Path, tmp_path: Path) -> None:
    done = task("killed", 2, model, tmp_path, WORKER_TARGET="cuda")
    assert done.returncode != 0 and not list(tmp_path.iterdir())


def test_the_command_line(model: Path) -> None:
    """Two ranks by MPI; NCCL refuses two ranks on one GPU, and runs with one."""
    command = [
        "-m",
        "monoplan",
        "generate",
        "Once upon",
        "--raw",
        "-m",
        model,
        "-n",
        "12",
        "--dtype",
        "float32",
        "--target",
        "cuda",
    ]
    two, one = mpirun(2, *command), mpirun(1, *command, "--tp", "nccl")
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    assert two.stdout == one.stdout and two.stdout.strip()
    import cupy

    if cupy.cuda.runtime.getDeviceCount() == 1:
        refused = mpirun(2, *command, "--tp", "nccl")
        assert refused.returncode != 0 and "two ranks of an NCCL group share a GPU" in refused.stderr
