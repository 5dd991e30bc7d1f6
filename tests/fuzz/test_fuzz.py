"""Damaged inputs never end in anything but a result or a MonoplanError; the fuzzer finds what it looks for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from monoplan.ir.errors import LoadError
from tests.fuzz import engine
from tests.fuzz.engine import Files, Target, find_target, fuzz, target_names, write

CASES = int(os.environ.get("MONOPLAN_FUZZ_CASES", "20000"))  # of each target, in the long run
SEED = os.environ.get("MONOPLAN_FUZZ_SEED", "1")
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """Fuzzes in a process of its own, whose workers are forked before it has threads."""
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("cases", [100, pytest.param(250, marks=pytest.mark.full)])
def test_mutated_inputs_of_every_target(cases: int) -> None:
    found = run("--cases", str(cases))
    assert f"{cases * len(target_names())} cases, 0 failures" in found


@pytest.mark.nightly
@pytest.mark.parametrize("name", target_names())
def test_many_mutated_inputs(name: str) -> None:
    print(run(name, "--cases", str(CASES), "--seed", SEED))


@pytest.mark.parametrize("name", target_names())
def test_what_mutations_begin_with_is_loaded(name: str, tmp_path: Path) -> None:
    target = find_target(name)
    for number, files in enumerate(target.seeds()):
        target.load(write(tmp_path / str(number), files))


@pytest.mark.parametrize("name", target_names())
def test_a_case_is_the_same_whenever_it_is_made(name: str) -> None:
    target = find_target(name)
    seeds = target.seeds()
    made = [engine.make_case(name, target, seeds, 3, number) for number in range(40)]
    again = [engine.make_case(name, target, target.seeds(), 3, number) for number in range(40)]
    assert made == again and any(changed != seeds[chosen] for chosen, changed in made)


def _fail(directory: Path) -> None:
    """Fails in the way that the file names, one in ten: the rest is refused or loaded."""
    number = int((directory / "case").read_bytes())
    if number == 3:
        raise KeyError("a raw error")
    if number == 4:
        os.abort()
    if number == 5:
        while True:
            pass
    if number == 6:
        bytearray(2 * engine.BYTES)
    if number == 7:
        raise SystemExit("no Exception")
    if number >= 8:
        raise LoadError("refused")


def test_the_fuzzer_finds_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SECONDS", 0.1)
    monkeypatch.setattr(engine, "BATCH", 17)

    def mutate(random: Random, files: Files) -> Files:
        return {"case": str(random.randrange(10)).encode()}

    target = Target(lambda: [{"case": b"0"}], mutate, _fail)
    found = fuzz("own", 40, target=target, keep=tmp_path)
    counts = [0] * 10
    for number in range(40):
        counts[int(engine.make_case("own", target, target.seeds(), 0, number)[1]["case"])] += 1
    assert min(counts) > 0
    assert (found.ran, found.loaded, found.refused) == (40, sum(counts[:3]), sum(counts[8:]))
    kinds: Counter[str] = Counter()
    for failure in found.failures:
        kinds[failure.kind] += failure.count
    expected = {"KeyError": 3, "signal 6": 4, "hang": 5, "MemoryError": 6, "SystemExit": 7}
    assert kinds == {kind: counts[number] for kind, number in expected.items()}
    hang = next(failure for failure in found.failures if failure.kind == "hang")
    first = hang.cases[0]
    assert (tmp_path / f"own-0-{first}" / "case").read_bytes() == b"5"
    assert f"python -m tests.fuzz own --seed 0 --case {first}" in str(found) and "in _fail" in hang.detail
