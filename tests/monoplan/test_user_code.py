"""Errors in a user's file: one message with the file and the line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monoplan.cli.main import main
from monoplan.cli.model_argument import import_module, load_file, users_errors
from monoplan.ir.errors import ArgumentError

GOOD = "import monoplan as mp\nfrom monoplan import nn\n"
CASES = {
    "syntax": ("x = 1\ndef model(:\n    pass\n", 2, "can't be loaded: SyntaxError: invalid syntax"),
    "import": ("\nimport no_such_package_here\n", 2, "ModuleNotFoundError: No module named 'no_such_package_here'"),
    "from": ("from monoplan import nothing_such\n", 1, "ImportError: cannot import name 'nothing_such'"),
    "name": ("x = 1\n\ny = undefined_name\n", 3, "NameError: name 'undefined_name' is not defined"),
    "library": ("import json\njson.loads('{')\n", 2, "JSONDecodeError: "),
    "model": (GOOD + "def model():\n    return {}['a']\n", 4, "model of "),
    "specs": (GOOD + "def model(): return nn.Linear(2, 2)\ndef specs():\n    return 1 / 0\n", 5, "specs() of "),
    "inputs": (
        GOOD + "def model(): return nn.Linear(2, 2)\ndef specs(): return mp.spec(1, 2)\ndef inputs(): assert False\n",
        5, "failed: AssertionError\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_error_in_the_file_names_file_and_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text, line, message = CASES[name]
    file = tmp_path / f"wrong_{name}_here.py"
    file.write_text(text)
    status = main(["verify", str(file), "--target", "reference"])
    err = capfd.readouterr().err
    assert status == 1 and err.startswith("monoplan: ") and message in err, err
    assert f"\n  where: {file}:{line}\n" in err and "  to do: " in err and "Traceback" not in err
    if "can't be loaded" in err:
        assert file.stem not in sys.modules


def test_the_cause_stays_for_those_who_ask(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOPLAN_DEBUG", "1")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong_debug_here.py").write_text("undefined_name\n")
    assert main(["verify", str(tmp_path / "wrong_debug_here.py")]) == 1
    assert "Traceback" in capfd.readouterr().err


def test_an_error_of_a_neighbour_names_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong_neighbour_here.py").write_text("\n\nx = [][1]\n")
    (tmp_path / "imports_wrong_here.py").write_text("import wrong_neighbour_here\n")
    with pytest.raises(ArgumentError, match="IndexError: list index out of range") as caught:
        load_file(tmp_path / "imports_wrong_here.py")
    assert str(caught.value.where) == f"{tmp_path / 'wrong_neighbour_here.py'}:3"
    with pytest.raises(ArgumentError, match="module imports_wrong_here can't be loaded: IndexError"):
        import_module("imports_wrong_here", fix="")
    with pytest.raises(ArgumentError, match="there is no Python module no_such_here"):
        import_module("no_such_here", fix="")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), BrokenPipeError(), ArgumentError("ours")])
def test_what_is_not_the_files_fault_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, users_errors("it failed"):
        raise error
    assert caught.value is error


def test_a_missing_extra_is_left_to_the_command_line() -> None:
    with pytest.raises(ModuleNotFoundError), users_errors("it failed"):
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")
