"""benchmarks/serving.py on a tiny model: every load runs, and the table has its rows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.support import tiny_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_serving", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_all_loads_run_and_are_told(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint(tmp_path / "tiny", max_position_embeddings=2048)
    sizes = "--streams 2 --prompt 8 --answer 6 --requests 4 --rate 50 --repeats 1 --threads 1"
    script.main(["--model", str(model), "--peers", "monoplan", "--json", str(tmp_path / "out.json"), *sizes.split()])
    rows = [line for line in capsys.readouterr().out.splitlines() if "| monoplan |" in line]
    assert len(rows) == 6 and all(float(cell) >= 0 for row in rows for cell in row.split("|")[3:-1])
    found = json.loads((tmp_path / "out.json").read_text())
    assert all(turn["tokens/s"] > 0 for peers in found.values() for turns in peers.values() for turn in turns)


def test_a_row_has_what_clients_saw(script: Any) -> None:
    seen = [script.Seen(0.0, 1.0, [1.0, 1.5, 2.0], 3), script.Seen(1.0, 3.0, [3.0, 4.0], 2)]
    row = script.row(seen)
    assert row["tokens/s"] == 5 / 4.0 and row["first p99"] == 2000.0 and row["between p99"] == 1000.0
