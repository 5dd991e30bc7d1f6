"""Commands under mpirun: every rank runs the same command; rank 0 reads and prints, and an error ends all of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from monoplan.runtime.ranks.comm import Communicator

T = TypeVar("T")


def add_rank_argument(parser: argparse.ArgumentParser) -> None:
    """--tp."""
    what = "divide the model between the ranks of mpirun (default: auto, if there are several)"
    parser.add_argument("--tp", choices=("auto", "mpi", "nccl", "none"), default="auto", help=what)


def ranks(args: argparse.Namespace) -> Communicator | None:
    """The group of mpirun, if the command is to be divided. Ranks other than 0 print nothing but errors."""
    from monoplan.runtime.ranks.comm import communicator, launched

    if getattr(args, "group", None) is not None:  # made before, in this command
        return args.group  # type: ignore[no-any-return]
    mode = getattr(args, "tp", "none")
    if mode == "none" or (mode == "auto" and not launched()):
        return None
    comm = args.group = communicator("nccl" if mode == "nccl" else "mpi")
    assert comm is not None
    if comm.rank > 0 and sys.stdout.name != os.devnull:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        args.quiet = True
    return comm


def from_first(comm: Communicator | None, make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, which alone has the terminal."""
    if comm is None:
        return make()
    shared: T = comm.share(make() if comm.rank == 0 else None)
    return shared


def end_ranks(error: BaseException | None, status: int) -> None:
    """After a failure of this rank: tells of it and ends the others, which would wait; returns if there are none."""
    module: Any = sys.modules.get("monoplan.runtime.ranks.mpi")
    if module is not None:
        module.end_all(error, status)
