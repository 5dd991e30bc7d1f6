"""Files are UTF-8, whatever the locale says: in the package's text, and in a process with an ASCII locale."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("monoplan", "frontend", "ir", "passes", "codegen", "runtime", "models")
TEXT_ARGUMENTS = {"read_text": 1, "write_text": 2}  # with the encoding among them
MODULE = """
import monoplan as mp
from monoplan import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.größe = nn.Linear(8, 6)

    def forward(self, x):
        return self.größe(x) + 1

def model(): return Own()
def specs(): return mp.spec("n", 8)
"""


def without_encoding(path: Path) -> list[str]:
    """Calls that read or write text in the locale's encoding."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call) or any(k.arg in ("encoding", "errors") for k in node.keywords):
            continue  # with errors="replace" the output of another program may be read in any encoding
        if isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_ARGUMENTS:
            missing = len(node.args) < TEXT_ARGUMENTS[node.func.attr]
        elif isinstance(node.func, ast.Name) and node.func.id == "open":
            mode = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else "r"
            missing = "b" not in str(mode)
        else:
            missing = any(k.arg in ("text", "universal_newlines") for k in node.keywords)
        if missing:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_text_file_has_an_encoding() -> None:
    paths = [p for folder in FOLDERS for p in sorted((ROOT / folder).glob("**/*.py")) if not p.is_symlink()]
    assert len(paths) > 100
    assert [place for path in paths for place in without_encoding(path)] == []


@pytest.mark.parametrize("command", [("inspect", "--plan"), ("inspect", "--source"), ("verify", "--nodes")])
def test_an_ascii_locale(tmp_path: Path, command: tuple[str, str]) -> None:
    (tmp_path / "größe.py").write_text(MODULE, "utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "monoplan", command[0], "größe.py", *command[1:]],
        cwd=tmp_path,
        capture_output=True,
        env={
            **os.environ,
            **ascii_only,
            "PYTHONPATH": str(ROOT),
            "MONOPLAN_CACHE_DIR": str(tmp_path / "cache"),
            "MONOPLAN_DUMP": str(tmp_path / "dump"),
        },
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"gr??e" in done.stdout  # what ASCII does not have
    assert "größe" in (tmp_path / "dump" / "Own" / "plan.c").read_text("utf-8")
