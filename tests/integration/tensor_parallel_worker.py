"""One rank of tests/integration/test_tensor_parallel.py: started by mpirun, it writes what it found to a folder.

    mpirun -n 2 python tensor_parallel_worker.py TASK MODEL FOLDER
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import monoplan as mp
from monoplan.models import AutoLlamaModel
from monoplan.runtime.comm import Communicator, mpi

IDS = np.array([[5, 9, 40, 7, 11, 3, 50]])
TOKENS = 20


def compiled(comm: Communicator, model: str, dtype: str = "float32") -> Any:
    return mp.compile(AutoLlamaModel.from_pretrained(model, dtype=dtype), tp=comm, options={"threads": 1})


def numbers(comm: Communicator, model: str, folder: Path) -> None:
    """Logits, greedy and sampled tokens, and the heads of the cache."""
    llm = compiled(comm, model)
    logits, cache = llm(IDS), llm.new_cache()
    np.savez(
        folder / f"{comm.rank}.npz", logits=logits, kv_heads=cache.kv_heads, road=getattr(comm, "road", ""),
        greedy=llm.generate_ids(IDS[0], TOKENS, eos_token_id=()),
        sampled=llm.generate_ids(IDS[0], TOKENS, temperature=0.9, seed=7, eos_token_id=()),
    )  # fmt: skip


def memory(comm: Communicator, model: str, folder: Path) -> None:
    """The most private memory that loading and compiling took, and the bytes of this rank's weights."""

    def peak() -> int:
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]

    before = peak()
    llm = compiled(comm, model, "bfloat16").prepare()
    weights = sum(a.nbytes for a in llm.compiled.built[0][2].executable.params)
    text = json.dumps({"peak": peak() - before, "weights": weights})
    (folder / f"{comm.rank}.json").write_text(text)


def killed(comm: Communicator, model: str, folder: Path) -> None:
    """Rank 1 dies without a word in the middle of a text."""
    llm = compiled(comm, model)

    def each(row: int, token: int, piece: str) -> None:
        each.count += 1  # type: ignore[attr-defined]
        if comm.rank == 1 and each.count == 5:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    each.count = 0  # type: ignore[attr-defined]
    llm.generate_batch([IDS[0]], 80, callback=each, eos_token_id=())
    (folder / f"{comm.rank}.done").touch()


def raising(comm: Communicator, model: str, folder: Path) -> None:
    """Rank 1 raises while rank 0 is in the plan."""
    llm = compiled(comm, model).prepare()
    if comm.rank == 1:
        raise OSError("the disk of rank 1 is full")
    llm(IDS)
    (folder / f"{comm.rank}.done").touch()


def different(comm: Communicator, model: str, folder: Path) -> None:
    """Rank 1 has the model in another element type."""
    compiled(comm, model, ("float32", "bfloat16")[comm.rank]).prepare()
    (folder / f"{comm.rank}.done").touch()


def longer(comm: Communicator, model: str, folder: Path) -> None:
    """Rank 1 asks for another prompt."""
    compiled(comm, model)(IDS[:, : 4 + comm.rank])
    (folder / f"{comm.rank}.done").touch()


def quitting(comm: Communicator, model: str, folder: Path) -> None:
    """Rank 1 ends its program early, without an error."""
    llm = compiled(comm, model).prepare()
    if comm.rank == 0:
        llm(IDS)
    (folder / f"{comm.rank}.done").touch()


def verifying(comm: Communicator, model: str, folder: Path) -> None:
    """verify() compares all ranks' plans with the interpreter."""
    assert compiled(comm, model).verify(IDS)
    (folder / f"{comm.rank}.done").touch()


TASKS = {task.__name__: task for task in (numbers, memory, killed, raising, different, longer, quitting, verifying)}

if __name__ == "__main__":
    TASKS[sys.argv[1]](mpi(), sys.argv[2], Path(sys.argv[3]))
