"""Ranks under a real mpirun that die, fail, leave or differ: all end, with a message that says why, and none hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.mpi_support import ROOT, mpirun, task
from tests.matrices import partly
from tests.models.support import tiny_checkpoint
from tests.needs import check


@pytest.fixture(autouse=True)
def _mpi() -> None:
    check("mpi")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "model").mkdir()
    (folder / "model-smaller").mkdir()
    tiny_checkpoint(folder / "model-smaller", num_hidden_layers=1)
    return tiny_checkpoint(folder / "model")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ranks", partly([2, 4], lambda n: n == 2))
def test_a_killed_rank_brings_the_others_down(model: Path, tmp_path: Path, ranks: int) -> None:
    """The launcher sees it, or the ranks themselves; whoever is first tells."""
    done = task("killed", ranks, model, tmp_path)
    assert done.returncode != 0 and names(tmp_path) == []
    said = done.stderr + done.stdout
    assert "rank 1" in said or "rank: 1" in said or "signal 9" in said or "KILLED BY SIGNAL: 9" in said


def test_an_error_is_told_and_ends_all(model: Path, tmp_path: Path) -> None:
    done = task("raising", 2, model, tmp_path)
    assert done.returncode != 0 and names(tmp_path) == []
    assert "the disk of rank 1 is full" in done.stderr and "rank 1 of 2 failed" in done.stderr


def test_ranks_that_differ_are_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    """Every rank is told, and what differs is named."""
    done = task("different", 2, model, tmp_path)
    assert done.returncode != 0 and names(tmp_path) == ["0.json", "1.json"]
    for rank in range(2):
        models, plans = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "the ranks do not compile the same model: they differ in model" in models
        assert "they differ in options" in plans
    assert "the ranks do not compile the same model: they differ in model, dtype" in done.stderr
    assert done.stderr.count("rank 0 of 2 failed") == 1 and "rank 1 of 2 failed" not in done.stderr  # told once
    done = task("other_isa", 2, model, tmp_path)
    assert done.returncode != 0 and "they differ in instruction set (MONOPLAN_ISA)" in done.stderr


@pytest.mark.parametrize("transport", partly(["shared", "mpi"], lambda transport: transport == "shared"))
def test_ranks_that_ask_for_different_things_are_stopped(model: Path, tmp_path: Path, transport: str) -> None:
    done = task("longer", 2, model, tmp_path, MONOPLAN_COMM=transport)
    assert done.returncode != 0 and names(tmp_path) == []
    said = ["the ranks do not do the same"]
    if transport == "mpi":  # there the library may be the first to see it, and MPICH then ends the ranks itself
        said += ["MPI_Allgather reported an error", "Message truncated"]
    assert any(text in done.stderr for text in said), done.stderr


@pytest.mark.parametrize("where", partly(["quitting", "quitting_before"], lambda w: w == "quitting"))
def test_a_rank_that_ends_early_is_not_waited_for(model: Path, tmp_path: Path, where: str) -> None:
    done = task(where, 2, model, tmp_path)
    assert done.returncode != 0 and "rank 1 has left: its program ended before this one's" in done.stderr
    assert names(tmp_path) == ["1.done"]


@pytest.mark.full
def test_between_hosts_a_rank_that_ends_early_gives_up_the_others(model: Path, tmp_path: Path) -> None:
    """There nobody sees that it has left; it is the one that waits, as long as it is told to."""
    done = task("quitting", 2, model, tmp_path, MONOPLAN_COMM="mpi", MONOPLAN_COMM_TIMEOUT="1")
    assert done.returncode != 0 and "rank 1 of 2 is done, others are not after 1 s" in done.stderr
    assert names(tmp_path) == ["1.done"]


def test_too_many_ranks_and_wrong_transports(model: Path) -> None:
    """An error that every rank has is told once."""
    command = ["-m", "monoplan", "generate", "a", "-m", model, "-n", "2"]
    done = mpirun(5, *command)
    assert done.returncode != 0 and done.stderr.count("4 query heads can't be divided between 5 ranks") == 1
    assert "use at most 4 ranks" in done.stderr
    done = mpirun(2, *command, MONOPLAN_COMM="boat")
    assert done.returncode != 0 and done.stderr.count("MONOPLAN_COMM='boat' is no transport between ranks") == 1


def test_a_launcher_of_another_mpi_is_noticed() -> None:
    """Its ranks would all be rank 0 of 1, and print what one process prints, several times."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPI_LOCALNRANKS": "2"}
    code = "from monoplan.runtime.ranks.comm import mpi; mpi()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert "the launcher started several ranks, but each sees itself alone" in done.stderr
