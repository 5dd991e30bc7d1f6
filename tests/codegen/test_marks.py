"""The marks of generated source, by which tools read it back, edited or not; compiler errors name the user's line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.plan import make_plan
from monoplan.codegen.source import after_calls, origin, origins, step_line, step_lines
from monoplan.codegen.target import cpu_target, cuda_target
from monoplan.codegen.text import block_comment, comment_lines
from monoplan.ir.graph import Loc, _from_project
from monoplan.ir.printer import print_graph
from tests.codegen.mixed import mixed_graph
from tests.integration.support import small_config, step_graph

ROOT = Path(__file__).resolve().parents[2]


class Scaled(nn.Module):
    def forward(self, x: mp.Tensor) -> mp.Tensor:
        return F.exp(x) * 2.5  # the line that errors must name


def test_a_compiler_error_names_the_ir_line_and_the_users_line(tmp_path: Path) -> None:
    fast = mp.compile(Scaled(), mp.spec("n", 4))
    source = fast.source()
    assert "2.5f" in source
    edited = tmp_path / "plan.c"
    edited.write_text(source.replace("2.5f", "no_such_name"))
    with pytest.raises(mp.CompileError) as caught:
        mp.compile(Scaled(), mp.spec("n", 4), options={"source": str(edited)})
    text = str(caught.value)
    assert "no_such_name" in text
    assert "from %" in text and Path(__file__).name in text


def test_lines_outside_of_kernels_have_no_origin() -> None:
    fast = mp.compile(Scaled(), mp.spec(4))
    fast(np.ones(4, np.float32))
    source = fast.source()
    assert origin(source, 1) == ""
    assert origin(source, len(source.split("\n"))) == ""
    call = next(i for i, line in enumerate(source.split("\n"), 1) if "/* 0: %" in line)
    assert origins(source, f"plan.c:{call + 1}:5: error\nplan.c:{call + 1}:9: error")[0].startswith("0: %")


def test_every_step_is_read_back() -> None:
    """Calls and comments of a plan give its steps again, however their lines were broken."""
    plan = make_plan(mixed_graph(), cpu_target("avx2", 32))
    source = render_cpu(plan, "test")
    lines = [step_line(step) for step, _ in plan.steps()]
    assert step_lines(source.text) == [line[: line.rfind("]") + 1] for line in lines]
    seen: list[tuple[int, int]] = []
    marked = after_calls(source.text, "start();", lambda call: iter([f"after({call.number}, {len(call.arguments)});"]))
    for line in marked.splitlines():
        if line.strip().startswith("after("):
            number, count = line.strip().removeprefix("after(").removesuffix(");").split(", ")
            seen.append((int(number), int(count)))
    rows = {s.number: len(s.kernel.pointers) + (s.kernel.family == "linear") for s, _ in plan.steps()}
    assert dict(seen) == rows and len(seen) == len(rows)
    assert marked.count("    start();\n") == 1 and marked.index("start();") < marked.index("after(0")
    for f in source.functions:
        at = source.text[: source.text.index(f.text)].count("\n") + 3
        assert origin(source.text, at) == " | ".join(comment_lines(f.comment))
        assert f.prototype.startswith(f"MP_KERNEL {f.name}(") and f.prototype.endswith(");\n")


def test_long_comments_go_on_and_are_one_line_again() -> None:
    words = " ".join(f"%value{i}" for i in range(60))
    unbroken = "x" * 300
    for indent in ("", "        "):
        text = block_comment([words, "short", unbroken], indent)
        assert all(len(line) <= 120 for line in text.splitlines()) and len(text.splitlines()) > 6
        found = comment_lines(text + "\ncode();")
        assert found[:2] == [words, "short"] and found[2].replace(" ", "") == unbroken


def test_paths_begin_at_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources and IR have paths that do not depend on the machine; errors keep whole ones, which can be opened."""
    graph = step_graph(small_config(layers=2))
    for text in (
        render_cpu(make_plan(graph, cpu_target("avx2", 32)), "test").text,
        render_cuda(make_plan(graph, cuda_target(90, 132, 232448)), "test").text,
        print_graph(graph, locs=True),
    ):
        assert "monoplan/models/llama.py" in text and str(ROOT) not in text
    assert Loc("", str(Path(__file__)), 3).short.file == "tests/codegen/test_marks.py"
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    loc = Loc("up", str(project / "src" / "model.py"), 3)
    assert loc.short == loc  # neither a project nor below this folder
    (project / "pyproject.toml").touch()
    _from_project.cache_clear()
    assert loc.short == Loc("up", "src/model.py", 3) and str(project) in str(loc)
    monkeypatch.chdir(project / "src")
    assert loc.short.file == "model.py"
    assert Loc("", "user/model.py", 1).short.file == "user/model.py"
