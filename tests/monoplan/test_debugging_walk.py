"""The walk of docs/debugging.md, run as it is written: from a planted wrong number to its line in five commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"<!-- walk: (\S+) -->\n```\w+\n(.*?)```(?:\n```\n(.*?)```)?", re.DOTALL)


def blocks() -> dict[str, tuple[str, str]]:
    """By name: the commands, and what they print according to the page."""
    page = (ROOT / "docs" / "debugging.md").read_text("utf-8")
    return {name: (commands, printed) for name, commands, printed in _BLOCK.findall(page)}


def lines_not_printed(promised: str, out: str) -> list[str]:
    """Lines of the page that the commands did not print, in that order; `...` is anything, columns may be wider."""
    missing, rest = [], out.splitlines()
    for line in promised.splitlines():
        words = [".*" if word == "..." else re.escape(word).replace(re.escape("..."), ".*") for word in line.split()]
        pattern = re.compile(r"\s*" + r"\s+".join(words) + r"\s*")
        at = next((i for i, printed in enumerate(rest) if pattern.fullmatch(printed)), None)
        if at is None:
            missing.append(line)
        else:
            rest = rest[at + 1 :]
    return missing


@pytest.fixture
def shell(tmp_path: Path) -> subprocess.Popen[str]:
    """What a reader has: a folder of their own and `monoplan` on the path."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in (("monoplan", "-m monoplan"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(  # noqa: S602
        ["bash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment,
    )


def test_the_walk(shell: subprocess.Popen[str], tmp_path: Path) -> None:
    found = blocks()
    assert list(found) == ["block.py", "plant", "1", "2", "3", "4", "5"]
    block = found["block.py"][0]
    (tmp_path / "block.py").write_text(block)
    script = [found["plant"][0]]
    for number in "12345":
        script += [f"echo '=== {number}'", found[number][0], 'echo "status $?"']
    out, _ = shell.communicate("\n".join(script), timeout=300)
    steps = dict(re.findall(r"=== (\d)\n(.*?)(?==== |\Z)", out, re.DOTALL))
    assert set(steps) == set("12345"), out
    for number in "12345":
        assert found[number][1] and lines_not_printed(found[number][1], steps[number]) == [], steps[number]
    wrong = next(i for i, line in enumerate(block.splitlines(), 1) if "return x +" in line)

    assert "WRONG in 1 of 1" in steps["1"] and "status 1" in steps["1"]
    assert "Block is built from edited/Block/plan.c" in steps["1"]
    values = [line for line in steps["2"].splitlines() if line.startswith("%")]
    assert [("wrong" in line) for line in values] == [False, True]
    assert values[-1].endswith(f"block.py:{wrong}")
    assert "the linear kernel of step 1" in steps["3"] and "status 1" in steps["3"]
    assert f"your line:         block.py:{wrong}" in steps["3"]
    assert "to repeat it alone: python found/repro.py" in steps["3"]
    assert "elements are wrong" in steps["4"] and "status 1" in steps["4"]
    changed = re.findall(r"^([<>]) (.*)$", steps["5"], re.MULTILINE)
    assert [mark for mark, _ in changed] == ["<", ">"]
    assert "(sum + a.e0" in changed[0][1] and "(sum - a.e0" in changed[1][1]
    # What the page says in between: the recorded C is wrong, today's template is not.
    fresh = subprocess.run(
        [sys.executable, tmp_path / "found" / "repro.py", "--fresh"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert fresh.returncode == 0 and "within tolerance" in fresh.stdout
    assert (tmp_path / "found" / "plan.c").read_text().count("(sum - a.e0") == 1
