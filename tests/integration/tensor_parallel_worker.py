"""One rank of tests/integration/test_tensor_parallel*.py: started by mpirun, it writes what it found to a folder.

mpirun -n 2 python tensor_parallel_worker.py TASK MODEL FOLDER
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import monoplan as mp
from monoplan.ir.errors import ArgumentError
from monoplan.models import AutoLlamaModel
from monoplan.runtime.ranks.comm import Communicator, mpi

IDS = np.array([[5, 9, 40, 7, 11, 3, 50]])
TOKENS = 20


def compiled(comm: Any, model: str, dtype: str = "float32", **options: Any) -> Any:
    target = os.environ.get("WORKER_TARGET", "cpu")
    loaded = AutoLlamaModel.from_pretrained(model, dtype=dtype)
    return mp.compile(loaded, target=target, tp=comm, options={"threads": 1, **options})


def numbers(comm: Communicator, model: str, folder: Path) -> None:
    """Logits of a prompt and of the token after it, greedy and sampled tokens, and the heads of the cache."""
    llm = compiled(comm, model, os.environ.get("WORKER_DTYPE", "float32"))
    cache = llm.new_cache()
    logits = [llm(IDS, past_key_values=cache), llm(IDS[:, :1], past_key_values=cache)]
    np.savez(
        folder / f"{comm.rank}.npz",
        logits=np.concatenate(logits),
        kv_heads=cache.kv_heads,
        transport=getattr(comm, "transport", ""),
        greedy=llm.generate_ids(IDS[0], TOKENS, eos_token_id=()),
        sampled=llm.generate_ids(IDS[0], TOKENS, temperature=0.9, seed=7, eos_token_id=()),
    )


def groups(comm: Communicator, model: str, folder: Path) -> None:
    """Two groups of two, at the same time: half of the ranks each, as communicators of mpi4py."""
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(comm.rank // 2, comm.rank)
    first = compiled(half, model)
    assert (first.tp.rank, first.tp.size) == (comm.rank % 2, 2) and mpi(half) is first.tp and mpi() is comm
    ids = IDS[:, : 4 + comm.rank // 2]  # the groups do different things
    np.savez(folder / f"{comm.rank}.npz", logits=first(ids))
    other = MPI.COMM_WORLD.Split(comm.rank % 2, comm.rank)  # the same ranks in other groups
    assert mpi(other) is not first.tp and mpi(other).collect(comm.rank) == [comm.rank % 2, comm.rank % 2 + 2]


def memory(comm: Communicator, model: str, folder: Path) -> None:
    """The most anonymous memory that loading and compiling took, and the bytes of this rank's weights.

    Pages of the mapped checkpoint don't count: the system can drop them at any time, and ranks share them.
    """

    def anonymous() -> int:
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]

    before = most = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    llm = compiled(comm, model, "bfloat16").prepare()
    llm(IDS)
    done.set()
    watcher.join()
    weights = sum(a.nbytes for a in llm.compiled.built[0][2].executable.params)
    text = json.dumps({"peak": most - before, "weights": weights})
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
    """Rank 1 has another model, another plan, and then the model in another element type."""

    def refused(make: Callable[[], Any]) -> str:
        try:
            make().prepare()
        except ArgumentError as error:
            return str(error)
        return "not refused"

    smaller = f"{model}-smaller"
    texts = [
        refused(lambda: compiled(comm, (model, smaller)[comm.rank])),
        refused(lambda: compiled(comm, model, tp_plan={"lm_head": ("colwise_gather", "replicated")[comm.rank]})),
    ]
    (folder / f"{comm.rank}.json").write_text(json.dumps(texts))
    compiled(comm, model, ("float32", "bfloat16")[comm.rank]).prepare()
    (folder / f"{comm.rank}.done").touch()


def other_isa(comm: Communicator, model: str, folder: Path) -> None:
    """Rank 1 is on a machine with another instruction set."""
    if comm.rank == 1:
        os.environ["MONOPLAN_ISA"] = "generic"
    compiled(comm, model).prepare()
    (folder / f"{comm.rank}.done").touch()


def longer(comm: Communicator, model: str, folder: Path) -> None:
    """Rank 1 asks for another prompt."""
    compiled(comm, model)(IDS[:, : 4 + comm.rank])
    (folder / f"{comm.rank}.done").touch()


def quitting(comm: Communicator, model: str, folder: Path) -> None:
    """Rank 1 ends its program early, without an error, while rank 0 is in the plan."""
    llm = compiled(comm, model).prepare()
    if comm.rank == 0:
        llm(IDS)
    (folder / f"{comm.rank}.done").touch()


def quitting_before(comm: Communicator, model: str, folder: Path) -> None:
    """The same while rank 0 compares what they compile."""
    if comm.rank == 0:
        compiled(comm, model).prepare()
    (folder / f"{comm.rank}.done").touch()


def verifying(comm: Communicator, model: str, folder: Path) -> None:
    """verify() compares all ranks' plans with the interpreter."""
    assert compiled(comm, model).verify(IDS)
    (folder / f"{comm.rank}.done").touch()


TASKS = {
    task.__name__: task
    for task in (
        numbers,
        groups,
        memory,
        killed,
        raising,
        different,
        other_isa,
        longer,
        quitting,
        quitting_before,
        verifying,
    )
}

if __name__ == "__main__":
    TASKS[sys.argv[1]](mpi(), sys.argv[2], Path(sys.argv[3]))
