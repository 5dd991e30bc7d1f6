"""The CPU benchmark's runner on a tiny model: turns, skipping with a reason, the table and the JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules, which are no part of the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu_peers.client
    import cpu_peers.engine
    import cpu_peers.gguf_file
    import cpu_peers.report
    import cpu_peers.workload

    return cpu_peers


@pytest.mark.full
def test_a_run_has_figures_of_those_who_ran_and_reasons_for_the_others(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "cpu_llama.py"),
        "--model",
        "tiny",
        "--dtype",
        "f32",
        "--threads",
        "1",
        "--peers",
        "monoplan",
        "fake",
        "fake-missing",
        "fake-failing",
        "--repeats",
        "2",
        "--contexts",
        "128",
        "192",
        "--starts",
        "1",
        "--folder",
        str(tmp_path / "models"),
        "--json",
        str(out),
        "--timeout",
        "300",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["peers"]) == {"monoplan", "fake"}
    broken = "failed: RuntimeError: broken on purpose"
    reasons = {"fake-missing": "this peer is never installed", "fake-failing": broken}
    assert found["measured"]["skipped"] == reasons
    for peer, reason in reasons.items():
        assert f"skipped {peer}: {reason}" in done.stdout
    ours = found["measured"]["seconds"]["monoplan"]
    assert {name: [len(steps) for steps in each] for name, each in ours.items()} == {
        "decode": [16, 16],
        "prefill": [3, 3],
        "decode 128": [32, 32],
        "decode 192": [32, 32],
        "prefill long": [1, 1],
    }
    limits = found["measured"]["limits"].values()
    assert all(len(turns) == 2 and all(len(pair) == 2 for pair in turns) for turns in limits)
    figures = found["peers"]["monoplan"]
    assert 0 < figures["decode_of_read_bandwidth"] and 0 < figures["prefill_of_limit"]
    assert figures["start_cold_s"] > 0 and figures["anonymous_over_weights"] > 0
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows.count("monoplan") == 3 and rows.count("fake") == 3  # speed, growth with the context, start


def test_a_worker_is_stopped_between_its_commands(parts: Any, tmp_path: Path) -> None:
    work = parts.workload.Workload("tiny", "f32", tmp_path)
    cpus = sorted(os.sched_getaffinity(0))[:1]
    worker = parts.client.Worker(parts.engine.Job("fake", work, 1, cpus, 640, tmp_path), 60.0)
    try:
        answer = worker.ask("tokens", tokens=4, count=2, capacity=640)
        first = sum(work.prompt(4)) % 512
        assert answer["tokens"] == [first, (sum(work.prompt(4)) + first) % 512]
        for _ in range(1000):  # the signal arrives in its own time
            state = Path(f"/proc/{worker.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "T":
                break
        assert state == "T"
        with pytest.raises(parts.client.PeerError, match="no such command"):
            worker.ask("sing", tokens=4)
    finally:
        worker.close()
    assert worker.process.returncode == 0


def test_a_worker_that_dies_says_how(parts: Any, tmp_path: Path) -> None:
    work = parts.workload.Workload("tiny", "f32", tmp_path)
    job = parts.engine.Job("fake", work, 1, sorted(os.sched_getaffinity(0)), 640, tmp_path)
    worker = parts.client.Worker(job, 60.0)
    worker.process.kill()
    worker.process.wait()
    with pytest.raises(parts.client.PeerError, match="SIGKILL"):
        worker.ask("tokens", tokens=4, count=2, capacity=640)
    worker.close()


def test_the_gguf_file_holds_the_weights_of_the_checkpoint(parts: Any, tmp_path: Path) -> None:
    import numpy as np

    from monoplan.models.load.checkpoint import open_model

    for dtype in ("bf16", "f32"):
        work = parts.workload.Workload("tiny", dtype, tmp_path)
        parts.workload.write_files(work)
        parts.gguf_file.write_gguf(work)
        ours, theirs = open_model(work.checkpoint).weights, open_model(work.gguf).weights
        assert sorted(ours.names()) == sorted(theirs.names())
        for name in ours.names():
            a, b = (np.asarray(w.tensor(name)).astype(np.float32) for w in (ours, theirs))
            assert np.array_equal(a, b), name
        size = sum(np.asarray(ours.tensor(name)).nbytes for name in ours.names())
        assert size == work.weight_bytes


def test_growth_is_the_slope_of_the_times(parts: Any) -> None:
    assert parts.report.slope_of({100: 1.0, 200: 1.5, 400: 2.5}) == pytest.approx(0.005)
    rounds = {100: [[1.0, 9.0], [1.0]], 300: [[2.0, 10.0], [3.0]]}  # a slow moment, and an odd one
    assert parts.report.paired_slope(rounds) == pytest.approx(0.005)
    limits = [[{"read": 120.0, "tiles": None}, {"read": 80.0, "tiles": None}], [{"read": 40.0, "tiles": None}] * 2]
    assert parts.report.share(10.0, [[0.2, 0.2, 9.0], [0.5]], limits, "read") == pytest.approx(0.5)
    assert parts.report.share(10.0, [[0.2], [0.5]], limits, "tiles") is None


def test_no_worker_outlives_a_killed_runner(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from cpu_peers.client import Worker
from cpu_peers.engine import Job
from cpu_peers.workload import Workload
folder = Path(sys.argv[1])
worker = Worker(Job("fake", Workload("tiny", "f32", folder), 1, sorted(os.sched_getaffinity(0)), 640, folder), 60.0)
worker.ask("tokens", tokens=4, count=2, capacity=640)
print(worker.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == -9, done.stderr
    status = Path(f"/proc/{int(done.stdout)}/status")
    for _ in range(200):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the worker is still there: " + status.read_text().splitlines()[2])


@pytest.mark.full
def test_a_run_that_is_broken_off_shows_its_whole_rounds(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "cpu_llama.py"),
        "--model",
        "tiny",
        "--dtype",
        "f32",
        "--threads",
        "1",
        "--peers",
        "fake",
        "monoplan",
        "--repeats",
        "10000",
        "--folder",
        str(tmp_path / "models"),
        "--json",
        str(out),
    ]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert runner.stderr is not None
    said = [next(line for line in runner.stderr if "round 2 of" in line)]
    time.sleep(0.3)  # into the middle of a turn
    runner.terminate()
    text, rest = runner.communicate(timeout=60)
    said += rest.splitlines()
    found = json.loads(out.read_text())
    rounds = found["repeats"]
    assert runner.returncode == 1 and rounds >= 2
    assert any(f"broken off: the table has {rounds} of 10000 rounds" in line for line in said)
    assert f"{rounds} rounds" in text and "| monoplan |" in text
    for peer in ("fake", "monoplan"):
        times = found["measured"]["seconds"][peer]
        assert [len(each) for each in times.values()] == [rounds, rounds] and found["peers"][peer]
        assert len(found["measured"]["limits"][peer]) == rounds


def test_peers_that_do_not_fit_together_load_for_their_turn(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cpu_peers.rounds as rounds

    opened: list[str] = []

    class Counted(parts.client.Worker):  # type: ignore[misc, name-defined]
        def __init__(self, job: Any, *rest: Any) -> None:
            opened.append(job.peer)
            super().__init__(job, *rest)

    monkeypatch.setattr(rounds, "Worker", Counted)
    monkeypatch.setattr(rounds, "available_memory", lambda: 0)
    work = parts.workload.Workload("tiny", "f32", tmp_path)
    cpus = sorted(os.sched_getaffinity(0))[:1]
    plan = rounds.Plan(work, ["fake"], 1, cpus, repeats=2, cache=tmp_path / "cache", timeout=120.0)
    outcome = rounds.Outcome()
    rounds.run(plan, outcome, lambda text: None)
    assert not outcome.resident and opened == ["limits", "fake", "fake", "fake"]
    assert [len(steps) for steps in outcome.seconds["fake"]["decode"]] == [16, 16]
