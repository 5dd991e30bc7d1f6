"""inspect, verify, bisect, report and run-ir at the command line, on a user's own module and on a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monoplan.cli.main import main
from monoplan.inspect.walk import example_inputs, sizes_for
from monoplan.ir.errors import ArgumentError
from monoplan.ir.parser import parse_graph
from monoplan.models import LlamaForCausalLM
from tests.models.support import tiny_checkpoint, tiny_config

OWN = """
import numpy as np
import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 24, bias=False)

    def forward(self, ids, scale):
        return F.silu(self.up(self.norm(self.table(ids)))) * scale

def model():
    return Block()

block = Block()

def specs():
    return {"ids": mp.spec("batch", "seq", dtype="int64"), "scale": mp.spec(24)}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine_to_inspect.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process; gives its status and what it printed."""

    def call(*arguments: Any, status: int = 0) -> str:
        got = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert got == status, out + err
        return out if status == 0 else out + err

    return call


def test_without_options_it_lists_the_stages(own: Path, run: Any) -> None:
    out = run("inspect", own)
    assert "trace" in out and "fuse-norm-linear" in out and "kernels; symbols: batch, seq" in out
    assert "more: --diff" in out


@pytest.mark.parametrize("name", ["", ":Block", ":model", ":block"])
def test_a_module_may_be_given_in_several_ways(own: Path, run: Any, name: str) -> None:
    assert run("inspect", f"{own}{name}", "--ir", "--target", "reference").startswith(
        "graph Block(%ids: i64[batch, seq]"
    )


def test_a_module_on_the_path(own: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(own.parent)
    assert run("inspect", f"{own.stem}:Block", "--stage", "trace", "--no-locs").startswith("graph Block(")


def test_every_view_of_a_plan(own: Path, run: Any) -> None:
    assert "=== pass" in run("inspect", own, "--diff", "--color", "never")
    assert "\x1b[" in run("inspect", own, "--diff", "--color", "always")
    assert "mine_to_inspect.py" in run("inspect", own, "--stage", "trace")
    assert "plan Block:" in run("inspect", own, "--plan")
    assert '#include "mp_plan.h"' in run("inspect", own, "--source")
    assert run("inspect", own, "--dot").startswith('digraph "Block"')
    assert "rms_norm(" in run("inspect", own, "--stop-after", "idioms", "--ir")
    assert "rms_norm(" not in run("inspect", own, "--ir")
    assert "fuse-norm-linear" in run("inspect", own, "--explain")


def test_what_is_wrong_with_a_request_is_said(own: Path, run: Any, tmp_path: Path) -> None:
    assert "there is no stage 'nope'" in run("inspect", own, "--stage", "nope", status=1)
    assert "there is no pass named 'nope'" in run("inspect", own, "--stop-after", "nope", status=1)
    assert "has no Missing" in run("inspect", f"{own}:Missing", status=1)
    assert "there is no file" in run("inspect", tmp_path / "no.py", status=1)
    assert "there is no Python module no.such" in run("inspect", "no.such:thing", status=1)
    assert "--dtype must be one of auto, bfloat16, float16, float32" in run("verify", own, "--dtype", "int8", status=2)
    empty = tmp_path / "empty_one.py"
    empty.write_text("from monoplan import nn\ndef model(): return nn.Linear(2, 2)\n")
    assert "has no specs()" in run("inspect", empty, status=1)
    other = tmp_path / "other_one.py"
    other.write_text("def model(): return 3\n")
    assert "gave a int, not a Module" in run("inspect", other, status=1)
    (tmp_path / "needy_one.py").write_text("class Needy:\n    def __init__(self, dim): pass\n")
    text = run("verify", f"{tmp_path / 'needy_one.py'}:Needy", status=1)
    assert "can't be called without arguments" in text and "'dim'" in text and "def model()" in text
    assert "join of" in run("verify", "os.path:join", status=1)
    assert "is not a callable object" in run("verify", "os:path", status=1)


def test_verify_needs_no_tokenizer(run: Any, tmp_path: Path) -> None:
    LlamaForCausalLM.from_config(tiny_config()).save_pretrained(tmp_path)
    assert "GenerationStep on cpu" in run("verify", tmp_path, "--dtype", "float32")
    # A text that was asked for is not replaced by random ids.
    assert "there is no tokenizer.json" in run("verify", tmp_path, "--dtype", "float32", "--prompt", "Hi", status=1)


def test_verify_and_bisect(own: Path, run: Any, tmp_path: Path) -> None:
    assert "batch=2, seq=5: ok" in run("verify", own)
    assert "seq=3: ok" in run("verify", own, "--nodes", "--size", "seq=3")
    assert "kernel runs are right" in run("bisect", own, "-o", tmp_path / "found")
    assert not (tmp_path / "found").exists()
    np.savez(tmp_path / "in.npz", ids=np.array([[1, 10]]), scale=np.ones(24, "f4"))
    assert "batch=1, seq=2: ok" in run("verify", own, "--inputs", tmp_path / "in.npz")
    assert "--size 'seq' is not NAME=NUMBER" in run("verify", own, "--size", "seq", status=2)
    assert "has no symbol 'rows'" in run("verify", own, "--size", "rows=1", status=1)
    assert "--seed must be 0 or more, got -5" in run("verify", own, "--seed", "-5", status=2)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "in.npz").read_bytes()[:200])
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("cut.npz", "one.npy", "missing.npz"):
        assert "can't read the arrays of" in run("verify", own, "--inputs", tmp_path / name, status=1)
    np.savez(tmp_path / "odd.npz", idz=np.array([[1, 10]]))
    assert "'idz', which is no input" in run("verify", own, "--inputs", tmp_path / "odd.npz", status=1)


def test_report(own: Path, run: Any, tmp_path: Path) -> None:
    assert "written to" in run("report", own, "-o", tmp_path / "r.html")
    assert '"profiles":[{' in (tmp_path / "r.html").read_text()
    run("report", own, "-o", tmp_path / "r.html", "--no-profile")
    assert '"profiles":[]' in (tmp_path / "r.html").read_text()


def test_run_ir(own: Path, run: Any, tmp_path: Path) -> None:
    (tmp_path / "block.ir").write_text(run("inspect", own, "--ir"))
    first = run("run-ir", tmp_path / "block.ir", "-o", tmp_path / "out.npz")
    assert "f32[2, 5, 24]  (within tolerance" in first
    assert run("run-ir", tmp_path / "block.ir") == first  # the same seed, the same numbers
    assert run("run-ir", tmp_path / "block.ir", "--seed", "1") != first
    assert "f32[1, 5, 24]" in run("run-ir", tmp_path / "block.ir", "--size", "batch=1", "--target", "reference")
    np.savez(tmp_path / "in.npz", ids=np.zeros((1, 1), "i8"), scale=np.zeros(24, "f4"))
    assert "f32[1, 1, 24]" in run("run-ir", tmp_path / "block.ir", "--inputs", tmp_path / "in.npz")
    (tmp_path / "bad.ir").write_text("graph g(%x: f32[2]) {\n  %y = nope(%x) : f32[2]\n  return %y\n}\n")
    assert "line 2, column" in run("run-ir", tmp_path / "bad.ir", status=1)
    (tmp_path / "large.ir").write_text("graph g(%x: f32[1152921504606846976]) {\n  return %x\n}\n")
    assert "there can be no random array of f32[1152921504606846976]" in run("run-ir", tmp_path / "large.ir", status=1)
    np.savez(tmp_path / "short.npz", **{"table.weight": np.zeros((3, 16), "f4")})
    said = run("run-ir", tmp_path / "block.ir", "--inputs", tmp_path / "short.npz", status=1)
    assert "parameter table.weight: expected f32[11, 16], got shape [3, 16]" in said
    assert "can't read" in run("run-ir", tmp_path / "missing.ir", status=1)


def test_ir_text_runs_no_code_of_its_own(run: Any, tmp_path: Path) -> None:
    """A location that would end its comment, if anything did, defines a function that runs when the plan is loaded."""
    marker = tmp_path / "marker"
    code = f'int creat(const char *, int); __attribute__((constructor)) void own(void) {{ creat("{marker}", 0600); }}'
    for end, begin in (("*\\", "/\\*"), ("*/", "/*"), ("*\\/", "/"), ("*??/", "/*"), ("*\\\n/", "/*"), ("\n*/", "/*")):
        file = json.dumps(f"{end} {code} {begin}")
        graph = f"graph g(%x: f32[4]) {{\n  %y = exp(%x) : f32[4] @ {file} {file}:1\n  return %y\n}}\n"
        (tmp_path / "own.ir").write_text(graph)
        assert "within tolerance" in run("run-ir", tmp_path / "own.ir")
        assert not marker.exists()


def test_messages_do_not_steer_the_terminal(run: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.ir").write_text("graph g(%x: f32[2]) {\n  %y = \x1b[2J\u202enope(%x) : f32[2]\n  return %y\n}\n")
    said = run("run-ir", tmp_path / "bad.ir", status=1)
    assert "\\x1b[2J\\u202enope" in said and "\x1b" not in said and "\u202e" not in said


def test_run_ir_of_what_is_no_text(run: Any, tmp_path: Path) -> None:
    (tmp_path / "binary.ir").write_bytes(b"graph \xff")
    said = run("run-ir", tmp_path / "binary.ir", status=1)
    assert "can't read" in said and "binary.ir" in said and "byte 0xff at offset 6 is not UTF-8 text" in said


def test_a_checkpoint(checkpoint: Path, run: Any, tmp_path: Path) -> None:
    flags = ("--dtype", "float32")
    assert "kernels; symbols: batch, seq" in run("inspect", checkpoint, *flags)
    assert "GenerationStep on cpu" in run("verify", checkpoint, *flags, "--prompt", "Once upon a time")
    assert "kernel runs are right" in run("bisect", checkpoint, *flags)
    assert "written to" in run("report", checkpoint, *flags, "-o", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert '"label":"prompt"' in text and '"label":"one token"' in text


def test_indices_stay_inside_what_they_index() -> None:
    graph = parse_graph(
        'graph g(%i: i64[n, 50], %p: i64[n]) {\n  param %w: f32[3, 4] = "w"\n'
        "  %y = embedding(%i, %w) : f32[n, 50, 4]\n  return %y\n}"
    )
    ids, others = example_inputs(graph, {"n": 2})
    assert ids.shape == (2, 50) and ids.max() == 2 and ids.min() == 0 and others.shape == (2,)
    assert sizes_for(graph) == {"n": 4}
    with pytest.raises(ArgumentError, match="no symbol 'm'"):
        sizes_for(graph, {"m": 2})
