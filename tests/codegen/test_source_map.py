"""Compiler errors name the IR line and the user's line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.codegen.source_map import origin, origins


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
