"""Tensor parallelism under a real mpirun: 2 and 4 ranks give what one process gives, and fail together.

Skipped where there is no mpirun or no mpi4py; `.ci/run` installs both where it can.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.models import AutoLlamaModel, LlamaForCausalLM
from tests.integration.tensor_parallel_worker import IDS, TOKENS
from tests.models.support import tiny_checkpoint, tiny_config

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun") or shutil.which("mpiexec")

pytestmark = [
    pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun: apt install openmpi-bin"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


def mpirun(ranks: int, *command: Any, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command on several ranks of this machine, whatever its number of cores."""
    assert MPIRUN is not None
    about = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=False).stdout
    options = []
    if "Open MPI" in about or "OpenRTE" in about:
        options = ["--oversubscribe", "--bind-to", "none"]
        options += ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [MPIRUN, *options, "-n", str(ranks), sys.executable, *map(str, command)], capture_output=True, text=True,
        timeout=timeout, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "MONOPLAN_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def task(name: str, ranks: int, model: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return mpirun(ranks, WORKER, name, model, folder, **environment)


@pytest.fixture(scope="module", params=["gqa", "mqa"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads over two key/value heads, or over one; the vocabulary is odd."""
    changes = {"gqa": {}, "mqa": {"num_key_value_heads": 1, "vocab_size": 103, "tie_word_embeddings": True}}
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), **changes[request.param])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("ranks", "road"), [(2, "shared"), (4, "shared"), (2, "mpi")])
def test_logits_and_tokens(checkpoint: Path, tmp_path: Path, ranks: int, road: str) -> None:
    """Within 1e-5 of the one process, relatively, and the same tokens; the same bits on every rank."""
    if road == "mpi" and checkpoint.name.startswith("mqa"):
        pytest.skip("one model is enough for the other road")
    done = task("numbers", ranks, checkpoint, tmp_path, MONOPLAN_COMM=road)
    assert done.returncode == 0, done.stderr
    alone = mp.compile(AutoLlamaModel.from_pretrained(checkpoint, dtype="float32"), options={"threads": 1})
    wanted = alone(IDS)
    results = [np.load(tmp_path / f"{rank}.npz") for rank in range(ranks)]
    for got in results:
        assert str(got["road"]) == road and int(got["kv_heads"]) == 1
        error = np.abs(got["logits"] - wanted).max() / np.abs(wanted).max()
        assert error <= 1e-5, f"off by {error:.2e}"
        assert got["logits"].tobytes() == results[0]["logits"].tobytes()
        assert got["greedy"].tolist() == alone.generate_ids(IDS[0], TOKENS, eos_token_id=())
        sampled = alone.generate_ids(IDS[0], TOKENS, temperature=0.9, seed=7, eos_token_id=())
        assert got["sampled"].tolist() == sampled


def test_the_command_line(model: Path) -> None:
    """mpirun -n 2 monoplan generate: rank 0 prints, once."""
    command = ["-m", "monoplan", "generate", "Once upon", "--raw", "-m", model, "-n", "12", "--dtype", "float32"]
    done = mpirun(2, *command)
    assert done.returncode == 0, done.stderr
    alone = mp.compile(AutoLlamaModel.from_pretrained(model, dtype="float32"), options={"threads": 1})
    assert done.stdout == "".join(alone.generate("Once upon", 12)) + "\n"
    assert done.stderr.count("tokens/s") == 2 and "Traceback" not in done.stderr  # of the prompt and of the rest
    done = mpirun(2, "-m", "monoplan", "generate", "Once upon", "-m", model / "nowhere")
    assert done.returncode != 0 and done.stderr.count("there is no such model") == 1 and not done.stdout


def test_a_killed_rank_brings_the_others_down(model: Path, tmp_path: Path) -> None:
    done = task("killed", 2, model, tmp_path)
    assert done.returncode != 0 and not list(tmp_path.iterdir())
    assert "rank 1" in done.stderr or "rank: 1" in done.stderr or "signal 9" in done.stderr + done.stdout


def test_an_error_is_told_and_ends_all(model: Path, tmp_path: Path) -> None:
    done = task("raising", 2, model, tmp_path)
    assert done.returncode != 0 and not list(tmp_path.iterdir())
    assert "the disk of rank 1 is full" in done.stderr and "rank 1 of 2 failed" in done.stderr


def test_ranks_that_differ_are_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    done = task("different", 2, model, tmp_path)
    assert done.returncode != 0 and not list(tmp_path.iterdir())
    assert "the ranks do not compile the same model" in done.stderr and "dtype" in done.stderr


def test_ranks_that_go_apart_are_stopped(model: Path, tmp_path: Path) -> None:
    done = task("longer", 2, model, tmp_path)
    assert done.returncode != 0 and "the ranks do not do the same" in done.stderr
    done = task("quitting", 2, model, tmp_path)
    assert done.returncode != 0 and "rank 1 has left" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["1.done"]


def test_verify_on_all_ranks(model: Path, tmp_path: Path) -> None:
    done = task("verifying", 2, model, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_each_rank_loads_its_part(tmp_path: Path) -> None:
    """A rank has its share of the weights, and reading them takes no more memory beside them than one process needs."""
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 8000}
    config = tiny_config(**size, num_attention_heads=8, num_key_value_heads=4, dtype="bfloat16")
    LlamaForCausalLM.from_config(config, seed=0).save_pretrained(tmp_path / "model")
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        done = task("memory", ranks, tmp_path / "model", folder)
        assert done.returncode == 0, done.stderr
        found[ranks] = [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks)]
    (one,) = found[1]
    for rank in found[2]:
        assert rank["weights"] <= one["weights"] * 0.51
        # 32 MB more would mean that the other rank's part was read, too. What ranks share takes 4.
        assert rank["peak"] - rank["weights"] <= one["peak"] - one["weights"] + (16 << 20), (rank, one)
