"""Runs work on ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from monoplan.runtime.ranks.comm import Communicator


def run_ranks(comms: Sequence[Communicator], work: Callable[[Communicator], Any]) -> list[Any]:
    """work(comm) for every rank of `threads(n)`, at once; the first error is raised."""
    results: list[Any] = [None] * len(comms)
    errors: list[BaseException] = []

    def run(comm: Communicator) -> None:
        try:
            results[comm.rank] = work(comm)
        except BaseException as error:
            errors.append(error)
            comm.fail(str(error))

    workers = [threading.Thread(target=run, args=(c,), name=f"rank {c.rank}") for c in comms]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if errors:
        raise errors[0]
    return results
