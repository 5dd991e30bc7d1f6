"""Mean squares of what a model multiplies with its weights, and files whose errors are weighed by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan.statistics as statistics
from monoplan.cli.main import main
from monoplan.ir.errors import ArgumentError
from monoplan.models.auto import AutoModel
from monoplan.models.load.gguf import Header
from tests.models.test_families import gguf_pair
from tests.models.test_quantize import checkpoint


def test_squares_are_those_of_each_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from monoplan.frontend.layers import Linear

    model = AutoModel.from_pretrained(checkpoint(tmp_path / "hf"), dtype="float32")
    monkeypatch.setattr(statistics, "WINDOW", 16)  # 16 and 9 tokens
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 25).tolist()
    found = statistics.column_squares(model, ids)
    seen: dict[int, list[Any]] = {}
    forward = Linear.forward

    def watched(self: Linear, x: Any) -> Any:
        seen.setdefault(id(self.weight), []).append(x.numpy().astype(np.float64)[0])
        return forward(self, x)

    monkeypatch.setattr(Linear, "forward", watched)
    for begin in (0, 16):
        model(np.array([ids[begin : begin + 16]]), all_logits=True)
    linears = {name: p for name, p in model.named_parameters() if id(p) in seen}
    assert linears.keys() == found.keys() and len(found) > 10
    for name, p in linears.items():
        np.testing.assert_allclose(found[name], (np.concatenate(seen[id(p)]) ** 2).mean(0), rtol=1e-4)
    with pytest.raises(ArgumentError, match="less than two tokens"):
        statistics.column_squares(model, [1])


def test_errors_are_smaller_where_numbers_are_large(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, text = checkpoint(tmp_path / "hf"), tmp_path / "text.txt"
    text.write_text("hello hell, he said")
    for name, more in (("plain", []), ("measured", ["--statistics", str(text)])):
        assert main(["quantize", str(source), str(tmp_path / name), "--type", "q4_0", *more]) == 0
    assert "no statistics for" not in capfd.readouterr().err
    model = AutoModel.from_pretrained(source, dtype="float32")
    squares = statistics.column_squares(model, model.tokenizer.encode(text.read_text()))
    errors = []
    for name in ("plain", "measured"):
        other = AutoModel.from_pretrained(tmp_path / name, dtype="float32")
        pairs = [
            (p.numpy(), dict(other.named_parameters())[path].numpy(), squares[path])
            for path, p in model.named_parameters()
            if path in squares
        ]
        errors.append(sum((((a - b).astype(np.float64) ** 2) * w).sum() / (a**2 * w).sum() for a, b, w in pairs))
    assert errors[1] < 0.97 * errors[0]
    assert main(["quantize", str(source), str(tmp_path / "x"), "--type", "q4_0", "--statistics", "/nowhere.txt"]) == 1
    assert "/nowhere.txt" in capfd.readouterr().err


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    _, path = gguf_pair("qwen3_moe", tmp_path)
    assert main(["quantize", str(path), str(tmp_path / "made"), "--type", "q8_0"]) == 0
    kinds = {name: tensor.kind for name, tensor in Header(tmp_path / "made").tensors.items()}
    assert {kind for name, kind in kinds.items() if "_exps" in name} == {"Q8_0"}
    assert {kind for name, kind in kinds.items() if "gate_inp" in name} == {"F32"}
    before, after = (AutoModel.from_pretrained(p, dtype="float32") for p in (path, tmp_path / "made"))
    for name, p in before.named_parameters():
        a, b = p.numpy(), dict(after.named_parameters())[name].numpy()
        assert np.abs(a - b).max() <= np.abs(a).max() / 150, name
