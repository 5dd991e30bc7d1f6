"""The public face: names and their types, errors of compile(), short tracebacks, code that no file holds, reference."""

from __future__ import annotations

import importlib.util
import linecache
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import models, nn
from monoplan.ir.errors import ArgumentError, MonoplanError
from monoplan.options import ENVIRONMENT
from tests.models.support import tiny_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [mp, models])
def test_every_public_name_is_there(module: Any) -> None:
    own = {*module._HOMES, *getattr(module, "_MODULES", ()), *({"__version__"} if module is mp else ())}
    assert set(module.__all__) == own == set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_completion_shows_what_a_compiled_model_can_tell() -> None:
    tells = {"ir", "diff", "source", "plan", "dump", "stats", "explain", "verify", "bisect", "profile", "report"}
    assert tells <= set(dir(mp.compile(nn.Linear(2, 3))))
    lm = mp.compile(models.LlamaForCausalLM.from_config(tiny_config()), target="reference")
    assert tells <= set(dir(lm))
    assert lm.ir("trace") == lm.compiled.ir("trace") and lm.stats is lm.compiled.stats and lm.plan is None


@pytest.mark.full  # mypy reads the whole package first
def test_compile_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(
        "import monoplan as mp\n"
        "from monoplan import nn\n"
        "from monoplan.models import AutoLlamaModel\n"
        "model = AutoLlamaModel.from_pretrained('x')\n"
        "reveal_type(mp.compile(nn.Linear(2, 3), mp.spec('n', 2)))\n"
        "reveal_type(mp.compile(model, target='cpu'))\n"
        "reveal_type(mp.compile(model, mp.spec('n', 2)))\n"
        "reveal_type(mp.compile(model).generate('a').result.text)\n"
        "mp.compile(3)\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", str(tmp_path / "use.py")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600).stdout
    lines = [line.split(": ", 1)[1] for line in found.splitlines() if "use.py:" in line]
    kinds = ("monoplan.api.Compiled", "monoplan.llm.CompiledLM", "monoplan.api.Compiled", "str")
    assert [re.sub("builtins.", "", line) for line in lines[:4]] == [f'note: Revealed type is "{k}"' for k in kinds]
    assert lines[4].startswith("error: No overload variant")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(6, 7)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any) -> Any:
        return self.block(x)


class Failing(nn.Module):
    def forward(self, x: Any) -> Any:
        return {}["missing"]


X = np.zeros((2, 4), np.float32)
CALLS = {
    "compile": (lambda: mp.compile(Outer(), mp.spec("n", 4)), ["compile", "forward", "forward"]),
    "first call": (lambda: mp.compile(Outer())(X), ["__call__", "forward", "forward"]),
    "later call": (lambda: mp.compile(nn.Linear(4, 5), mp.spec("n", 4), target="reference")(X[:, 1:]), ["__call__"]),
    "eager": (lambda: Outer()(mp.Tensor(X)), ["__call__", "forward", "forward"]),
    "options": (lambda: mp.compile(nn.Linear(4, 5), options={"fuze": False}), ["compile"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_traceback_has_the_users_lines_and_the_one_door(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, expected = CALLS[name]
    monkeypatch.delenv("MONOPLAN_DEBUG", raising=False)
    with pytest.raises(MonoplanError) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)[2:]  # without this test and its lambda
    assert [frame.name for frame in frames] == expected
    assert all(frame.filename == __file__ for frame in frames[1:])
    monkeypatch.setenv("MONOPLAN_DEBUG", "1")
    with pytest.raises(MonoplanError) as whole:
        call()
    assert len(traceback.extract_tb(whole.value.__traceback__)) > len(frames) + 3


def test_the_cause_of_an_error_stays_and_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONOPLAN_DEBUG", raising=False)
    with pytest.raises(MonoplanError, match="KeyError: 'missing'") as caught:
        mp.compile(Failing(), mp.spec(2))
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["forward"]


TYPED = """\
from monoplan import nn
class Typed(nn.Module):
    def forward(self, x):
        y = x + 1
        return y @ y
"""


@pytest.mark.parametrize("name", ["<stdin>", "<string>", "<ipython-input-7-0123456789ab>"])
def test_code_that_no_file_holds_keeps_its_lines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = name.startswith("<ipython")
    if kept:
        monkeypatch.setitem(linecache.cache, name, (len(TYPED), None, TYPED.splitlines(True), name))
    space: dict[str, Any] = {}
    exec(compile(TYPED, name, "exec"), space)
    with pytest.raises(MonoplanError) as caught:
        mp.compile(space["Typed"](), mp.spec(2, 3))
    assert str(caught.value).endswith(f"where: {name}:5" + (": return y @ y" if kept else ""))
    fast = mp.compile(space["Typed"](), mp.spec(3, 3))
    assert f'"{name}":4' in fast.ir("trace", locs=True) and f"{name}:5" in fast.explain()
    assert f"{name}:5" in fast.source()
    assert ("y = x + 1" in fast.report(tmp_path / "report.html").read_text("utf-8")) == kept


def test_compile_says_what_to_do_instead() -> None:
    def fake(name: str, home: str, **attributes: Any) -> Any:
        return type(name, (), {"__module__": home, "__call__": lambda self: 0, **attributes})()

    for wrong, what, fix in (
        (fake("Net", "torch.nn.modules.module"), "got the torch module Net", "mp.from_torch(module"),
        (
            fake("Llama", "transformers.models.llama", name_or_path="org/name"),
            "got Llama",
            "from_pretrained('org/name')",
        ),
        (Block, "got the class Block", "mp.compile(Block(...))"),
        (lambda x: x, "got function", "put it into forward of a monoplan.nn.Module"),
        (3, "got int", ""),
    ):
        with pytest.raises(ArgumentError) as caught:
            mp.compile(wrong)
        assert what in caught.value.what and fix in caught.value.fix


def test_a_shape_is_no_spec() -> None:
    for shape, fix in (
        ((2, 4), "mp.spec(2, 4)"),
        ([None, 4], 'mp.spec("batch", 4)'),
        ((-1, "n"), "mp.spec(\"batch\", 'n')"),
    ):
        with pytest.raises(ArgumentError, match="is no spec: the numbers of a tuple are constants") as caught:
            mp.compile(nn.Linear(4, 5), shape)
        assert fix in caught.value.fix

    class Scaled(nn.Module):
        def forward(self, x: Any, sizes: Any) -> Any:
            return x * sizes[0]

    # Beside an array, or for arguments that are no shapes, constants are constants.
    assert mp.compile(Scaled(), mp.spec(2), (3, 4), target="reference")(X[:, 0], (3, 4)).shape == (2,)


def _reference() -> Any:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["ops.md", "options.md"])
def test_the_reference_is_current(page: str) -> None:
    """`python docs/reference.py` writes it."""
    assert (ROOT / "docs" / page).read_text("utf-8") == _reference().PAGES[page]()


def test_every_variable_is_in_the_reference() -> None:
    folders = ("frontend", "ir", "passes", "codegen", "runtime", "models", "monoplan")
    texts = [path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"\bMONOPLAN_[A-Z_]+[A-Z]\b", text)}
    assert found - {"MONOPLAN_GOLDEN_UPDATE"} == {name for name in ENVIRONMENT if name.startswith("MONOPLAN_")}
