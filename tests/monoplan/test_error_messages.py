"""Bad input gets a clear error: the texts, as users meet them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.inspect.override import override_text
from monoplan.ir.errors import MonoplanError
from monoplan.ir.parser import parse_graph
from monoplan.runtime.build import cache_places

HERE = Path(__file__).name


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(MonoplanError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def linear() -> Any:
    return mp.compile(nn.Linear(4, 3), mp.spec("n", 4))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros(4, "f4"), "argument input: expected f32[n, 4] (rank 2), got shape [4]"),
        (np.zeros((2, 5), "f4"), "argument input: expected f32[n, 4], got size 5 at dimension 1, not 4"),
        (np.zeros((2, 4)), "argument input: expected f32[n, 4], got dtype float64 with shape [2, 4]"),
    ],
    ids=["rank", "shape", "dtype"],
)
def test_a_wrong_argument_is_named_with_what_was_expected_and_got(linear: Any, x: Any, text: str) -> None:
    assert message(lambda: linear(x)) == text


def test_the_wrong_number_of_arguments(linear: Any) -> None:
    assert "too many positional arguments" in message(lambda: linear(np.zeros((2, 4), "f4"), None, 3))
    text = message(lambda: linear())
    assert "missing a required argument: 'input'" in text
    assert text.endswith("to do: give one spec or value for each argument of forward that has no default")


def test_a_token_out_of_range_names_its_position() -> None:
    embedding = mp.compile(nn.Embedding(7, 4), mp.spec("b", "s", dtype="int64"))
    text = message(lambda: embedding(np.array([[1, 2], [3, 9]])))
    assert text.startswith("embedding: index 9 at position [1, 1] is out of range [0, 7)\n  where: ")
    assert HERE in text and "to do: check the ids that go in" in text
    assert embedding(np.array([[1, 2], [3, 6]])).shape == (2, 2, 4)  # and nothing was lost


def test_normalized_shape_must_fit() -> None:
    text = message(lambda: mp.compile(nn.LayerNorm(8), mp.spec("n", 6)))
    assert text.startswith("layer_norm: normalized_shape is [8], the input ends with the shape [6]")


def test_rope_needs_an_even_head_dim() -> None:
    expected = "RoPE: head_dim must be even, since dimensions rotate in pairs; got 7"
    assert message(lambda: nn.RoPE(7, 64)) == expected


def test_a_position_beyond_the_table() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = nn.RoPE(8, 16)

        def forward(self, x: Any, positions: Any) -> Any:
            return self.rope(x, positions)

    fast = mp.compile(Rotated(), mp.spec("b", "s", 2, 8), mp.spec("b", "s", dtype="int64"))
    text = message(lambda: fast(np.zeros((1, 3, 2, 8), "f4"), np.array([[0, 1, 16]])))
    assert text.startswith("rope: position 16 is beyond the table of 16 positions\n  where: ")
    assert f"{HERE}:" in text and "in rope" in text
    assert "to do: use a longer table (max_position_embeddings) or a shorter sequence" in text
    text = message(lambda: fast(np.zeros((1, 3, 2, 8), "f4"), np.array([[0, 1, -5]])))
    assert text.startswith("rope: position -5 is negative\n  where: ")
    assert text.endswith("to do: positions lie between 0 and 15")


def test_an_unknown_target() -> None:
    text = message(lambda: mp.compile(nn.Linear(4, 3), target="tpu"))
    assert text == "unknown target 'tpu'\n  to do: use one of cpu, cuda, reference"


@pytest.mark.parametrize("given", [5, "fuse", ["fuse"], True, 0], ids=repr)
def test_options_of_another_kind(given: Any) -> None:
    text = message(lambda: mp.compile(nn.Linear(4, 3), options=given))
    assert text.startswith(f"options must be a dict or Options, got {type(given).__name__} {given!r}\n  to do: known")
    assert "unknown options: 3, fuze" in message(lambda: mp.compile(nn.Linear(4, 3), options={"fuze": True, 3: 4}))


def test_an_argument_that_forward_does_not_have(linear: Any) -> None:
    for call in (lambda: mp.compile(nn.Linear(4, 3), foo=mp.spec("n", 4)), lambda: linear(foo=np.zeros((2, 4), "f4"))):
        text = message(call)
        assert "Linear.forward(" in text and "got an unexpected keyword argument 'foo'" in text
        assert "missing" not in text and "to do: its arguments are input" in text


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    text = message(lambda: mp.compile(nn.Linear(5, 3), mp.spec("n", 5)))
    assert text.startswith(f"CC={str(tmp_path / 'cc')!r} can't be run")
    assert text.endswith("to do: correct CC, or unset it to search cc, gcc and clang")


def test_a_compiler_that_fails_shows_command_message_and_source(tmp_path: Path) -> None:
    source = mp.compile(nn.Linear(5, 3), mp.spec("n", 5)).source()
    (tmp_path / "plan.c").write_text(source.replace("\nint mp_run_plan(", "\nint more = nothing;\nint mp_run_plan("))
    text = message(lambda: mp.compile(nn.Linear(5, 3), mp.spec("n", 5), source=tmp_path / "plan.c"))
    assert text.startswith("the C compiler failed with status 1:")
    assert "nothing" in text and "undeclared" in text
    where = next(line for line in text.splitlines() if line.startswith("  where: ")).removeprefix("  where: ")
    assert Path(where).read_text() == (tmp_path / "plan.c").read_text()
    assert " -shared " in text and "plan.c -o plan.so" in text


def test_an_override_that_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def text_for(source: str) -> str:
        (tmp_path / "Linear").mkdir(exist_ok=True)
        (tmp_path / "Linear" / "plan.c").write_text(source, "utf-8")
        return message(lambda: mp.compile(nn.Linear(5, 3), mp.spec("n", 5)))

    source = mp.compile(nn.Linear(5, 3), mp.spec("n", 5)).source()
    monkeypatch.setenv("MONOPLAN_OVERRIDE", str(tmp_path))
    text = text_for("int x;\n")
    assert text.startswith(f"{tmp_path / 'Linear' / 'plan.c'} is not a source of this plan\n")
    assert "it has no function mp_run_plan" in text and "MONOPLAN_DUMP" in text
    assert "it has 0 steps, the plan 1" in text_for("int mp_run_plan(void) { return 0; }\n")
    (tmp_path / "Linear" / "plan.c").write_bytes(b"\xff\xfe")
    assert "can't read the source" in message(lambda: mp.compile(nn.Linear(5, 3), mp.spec("n", 5)))
    (tmp_path / "Linear" / "plan.c").write_text(source + "/* edited */\n", "utf-8")
    assert mp.compile(nn.Linear(5, 3), mp.spec("n", 5))(np.zeros((2, 5), "f4")).shape == (2, 3)


def test_an_override_of_a_gpu_plan_has_its_kernels(tmp_path: Path) -> None:
    kernel = 'extern "C" __global__ void __launch_bounds__(256)\nlinear_0(const float *x)\n{\n}\n'
    (tmp_path / "plan.cu").write_text(kernel)
    assert override_text(str(tmp_path / "plan.cu"), "g", kernel + "// generated\n", ["linear_0"], "cu") == kernel
    text = message(lambda: override_text(str(tmp_path / "plan.cu"), "g", kernel, ["linear_1"], "cu"))
    assert "it has no function linear_1" in text


def test_an_unwritable_cache_directory_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", "/proc/no/such")

    monkeypatch.setattr(cache_places, "_state", cache_places._State())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fast = mp.compile(nn.Linear(6, 3), mp.spec("n", 6))
        mp.compile(nn.Linear(7, 3), mp.spec("n", 7))
    assert [w.filename for w in seen if "cache directory" in str(w.message)] == [__file__]
    assert fast(np.zeros((1, 6), "f4")).shape == (1, 3)
    (text,) = [str(w.message) for w in seen if "cache directory" in str(w.message)]
    assert text.startswith("monoplan: cache directory /proc/no/such can't be used (")
    assert text.endswith("); using a temporary one")


def test_a_warning_of_a_thread_of_ours_names_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler runs beside the packing of the weights, in a thread whose stack ends before the user's code."""
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache_places, "_state", cache_places._State())  # damage is mentioned once per process
    mp.compile(nn.Linear(6, 3), mp.spec("n", 6))
    for binary in tmp_path.glob("plans/*/plan.so"):
        binary.unlink()  # this process has it mapped: it must not be changed in place
        binary.write_bytes(b"damaged")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mp.compile(nn.Linear(6, 3), mp.spec("n", 6))
    assert [w.filename for w in seen if "damaged cache entry" in str(w.message)] == [__file__]


def test_a_compiler_that_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "cc"
    silent.write_text("#!/bin/sh\necho fake 1.0\n")
    silent.chmod(0o755)
    monkeypatch.setenv("CC", str(silent))
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "cache"))
    text = message(lambda: mp.compile(nn.Linear(5, 3), mp.spec("n", 5)))
    assert text.startswith(f"the C compiler {silent} reported no error, but made no plan.so\n  where: ")
    assert Path(text.partition("  where: ")[2].splitlines()[0]).read_text("utf-8").startswith("/* Linear:")
    assert "set CC to a C compiler" in text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("%y = silu(%z) : f32[2]", "line 2, column 13: %z is not defined before this line"),
        ("%y = nope(%x) : f32[2]", "line 2, column 8: there is no op named nope"),
    ],
)
def test_ir_that_does_not_parse(line: str, text: str) -> None:
    got = message(lambda: parse_graph(f"graph g(%x: f32[2]) {{\n  {line}\n  return %y\n}}"))
    assert got == f"{text}\n  where: {line}"
