"""Tensor parallelism under a real mpirun: 2 and 4 ranks give what one process gives, each with its part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.models import AutoLlamaModel, LlamaForCausalLM
from tests.integration.mpi_support import mpirun, task
from tests.integration.tensor_parallel_worker import IDS, TOKENS
from tests.matrices import partly
from tests.models.support import tiny_checkpoint, tiny_config, tiny_tokenizer_files
from tests.needs import check
from tests.tolerances import FACTOR

# More query heads than key/value heads in each; `kv` is what a rank of 2 and of 4 holds of the latter.
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},  # 4 heads over 2: on 4 ranks, two hold the same key/value head
    "mqa": {"num_key_value_heads": 1, "vocab_size": 103, "tie_word_embeddings": True},
    # 3 key/value heads and 51 inner columns on two ranks; every layer has a bias
    "uneven": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 51,
               "vocab_size": 101, "attention_bias": True, "mlp_bias": True},
}  # fmt: skip
KV_HEADS = {"gqa": [1] * 4, "mqa": [1] * 4, "uneven": [1, 2]}


@pytest.fixture(autouse=True)
def _mpi() -> None:
    check("mpi")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose weights, and biases, are of bf16 numbers: they are the same in either type."""
    found = {}
    for name, changes in MODELS.items():
        folder = found[name] = tmp_path_factory.mktemp(name)
        model = LlamaForCausalLM.from_config(tiny_config(**changes, dtype="bfloat16"), seed=3)
        random = np.random.default_rng(5)
        for path, parameter in model.named_parameters():
            if path.endswith("bias"):
                parameter.load(random.standard_normal(parameter.full_shape).astype(np.float32))
        model.save_pretrained(folder)
        tiny_tokenizer_files(folder)
    return found


def alone(checkpoint: Path, dtype: str = "float32") -> Any:
    return mp.compile(AutoLlamaModel.from_pretrained(checkpoint, dtype=dtype), options={"threads": 1})


def both(llm: Any) -> Any:
    """Logits of the prompt and of one more token, as the worker's."""
    cache = llm.new_cache()
    return np.concatenate([llm(IDS, past_key_values=cache), llm(IDS[:, :1], past_key_values=cache)])


@pytest.mark.parametrize(
    ("name", "ranks", "transport"),
    partly(
        [
            ("gqa", 2, "shared"),
            ("gqa", 4, "shared"),
            ("gqa", 2, "mpi"),
            ("mqa", 2, "shared"),
            ("mqa", 4, "shared"),
            ("uneven", 2, "shared"),
        ],
        lambda case: case[:2] == ("gqa", 2),
    ),
)
def test_logits_and_tokens(checkpoints: dict[str, Path], tmp_path: Path, name: str, ranks: int, transport: str) -> None:
    """Within 1e-5 of the one process, relatively, and the same tokens; the same bits on every rank."""
    done = task("numbers", ranks, checkpoints[name], tmp_path, MONOPLAN_COMM=transport)
    assert done.returncode == 0, done.stderr
    llm = alone(checkpoints[name])
    wanted = both(llm)
    results = [np.load(tmp_path / f"{rank}.npz") for rank in range(ranks)]
    assert [int(got["kv_heads"]) for got in results] == KV_HEADS[name][:ranks]
    for got in results:
        assert str(got["transport"]) == transport
        error = np.abs(got["logits"] - wanted).max() / np.abs(wanted).max()
        assert error <= 1e-5, f"off by {error:.2e}"
        assert got["logits"].tobytes() == results[0]["logits"].tobytes()
        assert got["greedy"].tolist() == llm.generate_ids(IDS[0], TOKENS, eos_token_id=())
        sampled = llm.generate_ids(IDS[0], TOKENS, temperature=0.9, seed=7, eos_token_id=())
        assert got["sampled"].tolist() == sampled


def test_bf16(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Ranks agree in every bit, and are not further from the f32 numbers than the one process is, by the table."""
    done = task("numbers", 2, checkpoints["gqa"], tmp_path, WORKER_DTYPE="bfloat16")
    assert done.returncode == 0, done.stderr
    exact, plain = both(alone(checkpoints["gqa"])), both(alone(checkpoints["gqa"], "bfloat16"))
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    assert np.abs(first["logits"] - exact).max() <= FACTOR * np.abs(plain - exact).max()
    for what in ("logits", "greedy", "sampled"):
        assert first[what].tobytes() == second[what].tobytes()


@pytest.mark.full
def test_two_groups_of_two(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Groups of one job, at the same time and on the same host, do not meet each other."""
    done = task("groups", 4, checkpoints["gqa"], tmp_path)
    assert done.returncode == 0, done.stderr
    llm = alone(checkpoints["gqa"])
    for rank in range(4):
        wanted = llm(IDS[:, : 4 + rank // 2])
        got = np.load(tmp_path / f"{rank}.npz")["logits"]
        assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_the_command_line(tmp_path: Path) -> None:
    """mpirun -n 2 monoplan generate: rank 0 prints, once."""
    model = tiny_checkpoint(tmp_path)
    command = ["-m", "monoplan", "generate", "Once upon", "--raw", "-m", model, "-n", "12", "--dtype", "float32"]
    done = mpirun(2, *command)
    assert done.returncode == 0, done.stderr
    llm = alone(model)
    assert done.stdout == "".join(llm.generate("Once upon", 12)) + "\n"
    assert done.stderr.count("tokens/s") == 2 and "Traceback" not in done.stderr  # of the prompt and of the rest
    failed = mpirun(2, "-m", "monoplan", "generate", "Once upon", "-m", model / "nowhere")
    assert failed.returncode != 0 and failed.stderr.count("there is no such model") == 1 and not failed.stdout


@pytest.mark.full
def test_verify_on_all_ranks(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    done = task("verifying", 2, checkpoints["gqa"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_each_rank_loads_its_part(tmp_path: Path) -> None:
    """With 85 M weights, a rank of two never has more anonymous memory than its half of them and a little."""
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "vocab_size": 16000}
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
    assert one["weights"] > 110 << 20  # in 12 bits, which tile units decode, or in 16
    for rank in found[2]:
        assert rank["weights"] <= one["weights"] * 0.51
        # The rest is Python's objects, the tensors that are being packed, and what one process needs as well.
        more = max(0, one["peak"] - one["weights"])
        assert rank["peak"] <= rank["weights"] + more + (8 << 20), found
        assert rank["peak"] <= one["peak"] * 0.65, found
