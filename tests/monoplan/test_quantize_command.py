"""The command quantize: its table, its comparison, and what it says of blocks that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from monoplan.cli import quantize as command
from monoplan.cli.main import main
from monoplan.models.load.gguf_writer import FILE_TYPES
from tests.models.test_quantize import checkpoint


def test_quantize_prints_sizes_errors_and_a_comparison(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, made, text = checkpoint(tmp_path / "hf"), tmp_path / "made.gguf", tmp_path / "text.txt"
    text.write_text("hello hell, he said")
    arguments = ["quantize", str(source), str(made), "--type", "q4_k"]
    assert main([*arguments, "--check", str(text)]) == 0
    out, err = capfd.readouterr()
    assert "rows are not whole blocks of q4_k are q5_0" in err and "Traceback" not in err
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    assert rows["ffn_down"][1:4] == ["2", "float32", "q4_k"] and rows["ffn_down"][6] == "4.50"
    assert rows["attn_q"][3] == "q5_0" and 0 < float(rows["attn_q"][-1]) < 0.01
    assert "perplexity" in rows["on"] and float(rows["on"][rows["on"].index("divergence") + 1].strip(",")) < 1
    assert main(arguments) == 1 and "exists already" in capfd.readouterr().err
    assert main([*arguments, "--force"]) == 0


def test_wrong_names_are_messages(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.TYPES == tuple(FILE_TYPES)
    assert main(["quantize", "/nowhere", str(tmp_path / "x"), "--type", "q4"]) == 2
    assert "--type must be one of q8_0" in capfd.readouterr().err
    assert main(["quantize", "/nowhere", str(tmp_path / "x"), "--type", "q4_0", "--check", "/nowhere.txt"]) == 1
    assert "/nowhere.txt" in capfd.readouterr().err
    assert main(["quantize", str(checkpoint(tmp_path / "hf")), "/dev/null/x", "--type", "q4_0"]) == 1
    assert "can't write the model to /dev/null/x" in capfd.readouterr().err
