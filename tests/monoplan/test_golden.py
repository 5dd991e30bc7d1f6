"""Golden results: recorded, compared, refused where they must be; the plugin as a user's own tests see it."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.cli.main import main
from monoplan.inspect.golden import Golden, GoldenError
from monoplan.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]


class Block(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        rng = np.random.default_rng(5)
        self.up = nn.Linear(12, 20, bias=False)
        self.up.load_state_dict({"weight": rng.normal(size=(20, 12)).astype("f4")})
        self.factor = factor

    def forward(self, x: Any) -> Any:
        return {"y": F.silu(self.up(x)) * self.factor, "best": self.up(x).argmax(-1)}


def compiled(factor: float = 1.0) -> Any:
    return mp.compile(Block(factor), mp.spec("batch", 12))


@pytest.fixture
def x() -> Any:
    return np.random.default_rng(0).normal(size=(3, 12)).astype("f4")


@pytest.fixture
def recorded(tmp_path: Path, x: Any) -> Golden:
    golden = Golden(tmp_path / "block")
    golden.record(compiled().subject(x), seed=0)
    return golden


def test_what_is_stored(recorded: Golden) -> None:
    meta = json.loads((recorded.folder / "golden.json").read_text())
    assert [(o["name"], o["dtype"], o["shape"]) for o in meta["outputs"]] == [
        ("y", "f32", [3, 20]),
        ("best", "i64", [3]),
    ]
    assert meta["outputs"][0]["relative"] > 0 and meta["outputs"][1]["relative"] == 0
    assert meta["seed"] == 0 and set(meta["versions"]) == {"monoplan", "numpy", "python", "machine"}
    assert (recorded.folder / "plan.ir").read_text().startswith("graph Block(")
    assert "test_golden.py" in (recorded.folder / "plan.ir").read_text()
    assert list(meta["weights"]) == ["up.weight"] and list(meta["input_prints"]) == ["x"]
    assert meta["weights"]["up.weight"]["type"] == "f32[20, 12]" and len(meta["weights"]["up.weight"]["sample"]) == 8
    assert not (recorded.folder / "inputs.npz").exists()


def test_the_same_results_pass(recorded: Golden, x: Any) -> None:
    recorded.check(compiled().subject(x), ir=True, source=True)


def test_another_result_is_reported_in_full(recorded: Golden, x: Any) -> None:
    with pytest.raises(GoldenError) as caught:
        recorded.check(compiled(1.001).subject(x))
    text = str(caught.value)
    assert isinstance(caught.value, AssertionError)
    assert re.search(r"y: \d+ of 60 elements are wrong; worst at \[", text)  # which output, where, by how much
    assert "best:" not in text
    assert "recorded 20" in text and "the traced graph is not the same as then" in text
    assert "kernels whose source changed:" in text
    assert "graphs and all" in text and "kernel runs are right" in text  # what bisect says
    assert "\n  changed: IR; as recorded: weights, inputs\n" in text
    # The lines that changed, with the user's; those of then only with their place.
    line = next(n for n, s in enumerate(Path(__file__).read_text().splitlines(), 1) if "* self.factor," in s)
    user = f'tests/monoplan/test_golden.py:{line}: return {{"y": F.silu(self.up(x)) * self.factor, '
    assert re.search(rf'\n  \+  %\w+ = .*1\.001.*\n +# {re.escape(user)}"best"', text)
    assert re.search(rf"\n  -  %\w+ = .*\n +# then tests/monoplan/test_golden.py:{line}\n", text)
    assert text.endswith("\n  to do: if it is meant: pytest --golden-update, or monoplan golden record")


def test_other_weights_are_named_with_how_far_they_moved(recorded: Golden, x: Any) -> None:
    other = Block()
    weight = np.array(other.up.weight.numpy())
    weight[0, 0] += 0.125
    other.up.load_state_dict({"weight": weight})
    with pytest.raises(GoldenError) as caught:
        recorded.check(mp.compile(other, mp.spec("batch", 12)).subject(x))
    text = str(caught.value)
    assert (
        "\n  changed: weights; as recorded: inputs, IR\n  weights that changed:\n    up.weight: f32[20, 12], " in text
    )
    assert re.search(r"rms \d\.\d+ → \d\.\d+, largest change 0\.125 in the sampled elements\n", text)
    assert re.search(r"y: 3 of 60 elements are wrong;.*; at most \S+ or \S+ % off\n", text)


def test_numbers_alone(recorded: Golden, x: Any) -> None:
    found = dict(np.load(recorded.folder / "outputs.npz"))
    np.savez(recorded.folder / "outputs.npz", **{**found, "0": found["0"] + np.float32(0.5)})
    with pytest.raises(GoldenError, match="only numbers changed; as recorded: weights, inputs, IR\n") as caught:
        recorded.check(compiled().subject(x))
    assert "60 of 60 elements are wrong" in str(caught.value) and "at most 0.5 or " in str(caught.value)
    meta = json.loads((recorded.folder / "golden.json").read_text())
    del meta["weights"], meta["input_prints"]  # as goldens were before
    (recorded.folder / "golden.json").write_text(json.dumps(meta))
    with pytest.raises(
        GoldenError, match="only numbers changed; as recorded: inputs, IR\n  whether the weights changed"
    ):
        recorded.check(compiled().subject(x))


def test_a_wrong_kernel_is_named(recorded: Golden, x: Any) -> None:
    fast = compiled()
    subject = fast.subject(x)
    weight = max(subject.executable.params, key=lambda a: int(a.nbytes))
    kept = weight.copy()
    try:
        weight *= 1.5
        with pytest.raises(GoldenError, match="the linear kernel of step 0"):
            recorded.check(subject)
    finally:
        weight[...] = kept


def test_other_ir_or_source_is_an_error_only_if_asked(recorded: Golden, x: Any) -> None:
    other = mp.compile(Block(), mp.spec("batch", 12), options={"fuse": False}).subject(x)
    recorded.check(other)
    with pytest.raises(GoldenError, match=r"another IR than its golden(.|\n)*\n  [-+]  %"):
        recorded.check(other, ir=True)
    with pytest.raises(GoldenError, match="another source than its golden"):
        recorded.check(other, source=True)


MOVED = """
import monoplan as mp
from monoplan import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def forward(self, x):
        return x * self.factor

def model(): return Scale()
def specs(): return mp.spec("n")
"""


def test_the_source_is_the_same_in_another_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its comments hold paths and lines, which say nothing about the code."""
    for name, text in (("a", MOVED), ("b_is_longer", "# moved down\n\n" + MOVED)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "moved_one.py").write_text(text)
    golden = str(tmp_path / "golden")
    assert main(["golden", "record", golden, str(tmp_path / "a" / "moved_one.py")]) == 0
    assert main(["golden", "check", golden, str(tmp_path / "b_is_longer" / "moved_one.py"), "--source", "--ir"]) == 0
    meta = json.loads((tmp_path / "golden" / "golden.json").read_text())
    (kernel,) = meta["kernels"]
    meta["source"], meta["kernels"] = "other", {kernel: "other"}
    (tmp_path / "golden" / "golden.json").write_text(json.dumps(meta))
    assert main(["golden", "check", golden, "--source"]) == 1
    assert f"kernels whose source changed: {kernel}" in capsys.readouterr().err


def test_an_edited_kernel_is_named(recorded: Golden, x: Any, tmp_path: Path) -> None:
    fast = compiled()
    name = fast._latest().source.functions[0].name
    edit = fast.source().replace(f"{name}_finish(const void *c,", f"{name}_finish(const void *const c,")
    (tmp_path / "plan.c").write_text(edit)
    assert (tmp_path / "plan.c").read_text() != fast.source()
    edited = mp.compile(Block(), mp.spec("batch", 12), source=tmp_path / "plan.c").subject(x)
    with pytest.raises(GoldenError, match=rf"another source than its golden(.|\n)*source changed: .*{name}"):
        recorded.check(edited, source=True)


def test_other_inputs_are_not_compared(recorded: Golden, x: Any) -> None:
    with pytest.raises(GoldenError, match="the inputs are not those that the golden was recorded with") as caught:
        recorded.check(compiled().subject(x + 1))
    text = str(caught.value)
    assert "\n  changed: inputs; as recorded: weights, IR\n  inputs that changed:\n    x: f32[3, 12], rms " in text
    assert "largest change 1 in the sampled elements" in text and "bisect" not in text


def test_missing_and_damaged_goldens_fail(tmp_path: Path, x: Any) -> None:
    with pytest.raises(GoldenError, match="there is no golden in"):
        Golden(tmp_path / "nowhere").check(compiled().subject(x))
    (tmp_path / "golden.json").write_text("{")
    with pytest.raises(GoldenError, match="is damaged"):
        Golden(tmp_path).meta()


@pytest.mark.parametrize("keep", [0, 100, None])
def test_a_damaged_file_of_the_golden_is_named(recorded: Golden, x: Any, keep: int | None) -> None:
    recorded.record(compiled().subject(x), inputs=True)
    for name in ("outputs.npz", "inputs.npz", "plan.ir"):
        whole = (recorded.folder / name).read_bytes()
        if keep is None and name != "inputs.npz":  # those need not be kept
            (recorded.folder / name).unlink()
        elif name == "plan.ir":
            (recorded.folder / name).write_bytes(b"\xff")
        else:
            (recorded.folder / name).write_bytes(whole[:keep] if keep is not None else b"PK\x05\x06" + bytes(18))
        with pytest.raises(GoldenError, match=rf"{name} is missing or damaged(.|\n)*record it again"):
            recorded.stored_inputs(1, [x.dtype])
            recorded.check(compiled().subject(x), ir=True)
        (recorded.folder / name).write_bytes(whole)


def test_half_precision_survives_the_file(tmp_path: Path) -> None:
    fast = mp.compile(Block(), mp.spec("batch", 12, dtype="bfloat16"), dtype="bfloat16")
    x = np.ones((2, 12), fast._latest().graph.inputs[0].type.dtype.numpy)
    golden = Golden(tmp_path / "bf16")
    golden.record(fast.subject(x), inputs=True)
    golden.check(fast.subject(x))
    (stored,) = golden.stored_inputs(1, [x.dtype]) or []
    assert stored.dtype == x.dtype and np.array_equal(stored, x)


# -- the plugin -------------------------------------------------------------------------------------------------------

USER_TEST = """
import numpy as np
import monoplan as mp
from monoplan import nn

class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor

def check(golden, factor):
    fast = mp.compile(Scale(factor), mp.spec("n"))
    golden.check(fast, np.arange(4, dtype="float32"))
    golden.check(fast, np.arange(9, dtype="float32"))

def test_stays(golden):
    check(golden, 2.0)

def test_{name}(golden):
    check(golden, {factor})
"""


def run_pytest(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A user's pytest: the plugin comes by its module name, as the entry point would bring it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "monoplan.pytest_plugin", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
    )


def test_the_plugin(tmp_path: Path) -> None:
    test = tmp_path / "test_mine.py"
    test.write_text(USER_TEST.format(name="changes", factor=2.0))
    refused = run_pytest(tmp_path, "--golden-update", CI="true")
    assert refused.returncode == 4 and "--golden-update is refused because CI is set" in refused.stderr
    assert not (tmp_path / "golden").exists()
    assert run_pytest(tmp_path, "--golden-update", "--golden-force", CI="true").returncode == 0
    folders = sorted(p.name for p in (tmp_path / "golden" / "test_mine").iterdir())
    assert folders == ["test_changes", "test_changes_2", "test_stays", "test_stays_2"]
    test.write_text(USER_TEST.format(name="changes", factor=2.5) + "\ndef test_new(golden):\n    check(golden, 2.0)\n")
    done = run_pytest(tmp_path.parent, tmp_path.name)
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "return x * self.factor" in done.stdout and "changed: IR; as recorded: weights, inputs" in done.stdout
    for name in ("changes", "new"):  # what to do, from where it was started
        assert f": pytest {tmp_path.name}/test_mine.py::test_{name} --golden-update\n" in done.stdout
    assert "inspect/golden.py" not in done.stdout  # frames of the library say nothing about the test
    assert re.search(r"\n> +golden\.check\(fast, ", done.stdout)
    assert "result: 3 of 4 elements are wrong" in done.stdout  # test_changes
    assert "there is no golden in" in done.stdout  # test_new


CLASSES = """
class TestA:
    def test_same(self, golden):
        check(golden, 3.0)

class TestB:
    def test_same(self, golden):
        check(golden, 4.0)

    class TestInner:
        def test_same(self, golden):
            check(golden, 5.0)
"""


def test_a_test_of_the_same_name_in_another_class_has_its_own_golden(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(USER_TEST.format(name="same", factor=2.0) + CLASSES)
    assert run_pytest(tmp_path, "--golden-update").returncode == 0
    found = tmp_path / "golden" / "test_mine"
    folders = {str(p.parent.relative_to(found)) for p in found.rglob("golden.json")}
    tests = ("test_stays", "test_same", "TestA/test_same", "TestB/test_same", "TestB/TestInner/test_same")
    assert folders == {name + end for name in tests for end in ("", "_2")}
    done = run_pytest(tmp_path)
    assert "5 passed" in done.stdout, done.stdout


SHARED = """
import pytest

@pytest.mark.parametrize("n", [1])
def test_x(golden, n):
    check(golden, 3.0)

def test_x_1(golden):
    check(golden, 4.0)

def test_stays_2(golden):
    check(golden, 5.0)
"""


@pytest.mark.parametrize("option", ["--golden-update", "--strict-markers"], ids=["record", "check"])
def test_two_tests_of_one_golden_folder_are_an_error(tmp_path: Path, option: str) -> None:
    """The parameters of one test, and the second check of another, give the folder of a third."""
    (tmp_path / "test_mine.py").write_text(USER_TEST.format(name="other", factor=2.0) + SHARED)
    only = run_pytest(tmp_path, "--golden-update", "-k", "stays and not 2 or other or x and not x_1")
    assert "3 passed" in only.stdout, only.stdout
    done = run_pytest(tmp_path, option)
    assert "2 failed, 3 passed" in done.stdout, done.stdout
    assert done.stdout.count("GoldenError: two tests have the same golden folder") == 2
    assert "test_mine.py::test_x[1] and check number 1 of test_mine.py::test_x_1 are both kept there" in done.stdout
    assert "test_mine.py::test_stays and check number 1 of test_mine.py::test_stays_2 are" in done.stdout
    assert "3 passed" in run_pytest(tmp_path, "-k", "stays and not 2 or other or x and not x_1").stdout  # untouched


def test_it_is_an_entry_point() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.pytest11]\n")[2]
    assert section.startswith('"monoplan.pytest_plugin" = "monoplan.pytest_plugin"\n')


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "golden_one.py"
    text = "import monoplan as mp\nfrom monoplan import nn\ndef model(): return nn.Linear(4, 3)\n"
    text += (
        "def specs(): return mp.spec('n', 4)\ndef inputs():\n    import numpy as np\n    return np.ones((2, 4), 'f4')\n"
    )
    own.write_text(text)
    folder = str(tmp_path / "kept")
    from monoplan.frontend.parameter import manual_seed

    manual_seed(7)
    assert main(["golden", "record", folder, str(own)]) == 0
    assert (tmp_path / "kept" / "inputs.npz").exists()
    manual_seed(7)
    assert main(["golden", "check", folder]) == 0
    assert "as recorded in" in capsys.readouterr().out
    manual_seed(8)  # other weights
    assert main(["golden", "check", folder]) == 1
    assert "does not give its golden results" in capsys.readouterr().err


def test_record_asks_before_it_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, folder = tmp_path / "golden asked.py", tmp_path / "kept"
    own.write_text(sized())
    words = ["golden", "record", str(folder), str(own)]

    def answered(text: str) -> int:
        terminal = io.StringIO(text)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        return main(words)

    assert answered("") == 0  # nothing there: nothing to ask
    assert "overwrite" not in capsys.readouterr().out
    first = (folder / "outputs.npz").read_bytes()
    own.write_text(sized(inputs='np.full((2, 4), 3.0, "f4")'))
    for text in ("", "\n", "n\n", "maybe\n"):
        assert answered(text) == 1
    said = capsys.readouterr().out
    assert said.count("overwrite it? [y/N] ") == 4 and said.count("nothing was written") == 4
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    assert main(words) == 1
    assert "give --yes to overwrite it" in capsys.readouterr().err
    assert (folder / "outputs.npz").read_bytes() == first
    assert answered("y\n") == 0 and (folder / "outputs.npz").read_bytes() != first
    (folder / "outputs.npz").write_bytes(first)
    assert main(["golden", "check", str(folder)]) == 1
    (command,) = re.findall(r"if it is meant: (monoplan golden record .* --yes)\n$", capsys.readouterr().err)
    assert main(shlex.split(command)[1:]) == 0 and main(["golden", "check", str(folder)]) == 0


SIZED = """
import numpy as np
import monoplan as mp
from monoplan import nn

class Scale(nn.Module):
    def forward(self, x{more}):
        return x * 2.0

def model(): return Scale()
def specs(): return {specs}
def inputs(): return {inputs}
"""


def sized(specs: str = 'mp.spec("n", 4)', inputs: str = 'np.ones((2, 4), "f4")', more: str = "") -> str:
    return SIZED.format(specs=specs, inputs=inputs, more=more)


def test_the_command_line_wants_the_recorded_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, folder = tmp_path / "golden_sized.py", tmp_path / "kept"
    own.write_text(sized())
    assert main(["golden", "record", str(folder), str(own)]) == 0
    own.write_text(sized(inputs='np.zeros((2, 4), "f4")'))
    assert main(["golden", "check", str(folder)]) == 0  # with the recorded ones, not with those
    assert capsys.readouterr().err == ""

    def refused() -> str:
        assert main(["golden", "check", str(folder)]) == 1
        err = capsys.readouterr().err
        assert f"where: {folder}" in err and f"record it again: monoplan golden record {folder} MODEL" in err
        return err

    own.write_text(sized(inputs='np.ones((3, 4), "f4")'))
    found = refused()
    assert "Scale takes inputs of other shapes than the recorded ones" in found and "inputs.npz" in found
    assert "why:   x: recorded [2, 4], now [3, 4]" in found
    own.write_text(sized('(mp.spec("n", 4), mp.spec("n", 4))', '(np.ones((2, 4), "f4"),) * 2', ", y"))
    assert "Scale takes 2 inputs, the golden was recorded with 1" in refused()
    own.write_text(sized())
    (folder / "inputs.npz").unlink()
    assert "the recorded inputs are missing" in refused()


def test_the_command_line_checks_a_test_s_golden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A test keeps no inputs: the module's own inputs() must give the same."""
    own = tmp_path / "golden_of_test.py"
    own.write_text(sized())
    folder = str(tmp_path / "kept")
    assert main(["golden", "record", folder, str(own)]) == 0
    meta = json.loads((tmp_path / "kept" / "golden.json").read_text())
    (tmp_path / "kept" / "golden.json").write_text(json.dumps({**meta, "about": None}))
    (tmp_path / "kept" / "inputs.npz").unlink()
    assert main(["golden", "check", folder, str(own)]) == 0
    own.write_text(sized(inputs='np.zeros((2, 4), "f4")'))
    assert main(["golden", "check", folder, str(own)]) == 1
    assert "the inputs are not those that the golden was recorded with" in capsys.readouterr().err
