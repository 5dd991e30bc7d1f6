"""Both targets have the same kernels: a template and a schedule for every family, headers that stand by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from monoplan.codegen.cpu.backend import CPU
from monoplan.codegen.cuda.backend import CUDA
from monoplan.codegen.kernels import Kernel
from monoplan.codegen.source import HERE, headers

FAMILIES = {cls.family for cls in Kernel.__subclasses__()}
# Parts and variants that only one target has, beside the one template of each family.
ONLY_CPU = {"collective"}  # on a GPU a collective is no kernel
ONLY_CUDA = {
    "linear_row",
    "linear_few",
    "linear_prepare",
    "linear_finish",
    "linear_best",
    "attention_decode",
    "attention_hopper",
    "attention_prefill",
}


def templates(target: str, suffix: str) -> set[str]:
    folder = HERE / target / "templates"
    return {
        p.name.removesuffix(suffix) for p in folder.iterdir() if p.name.endswith(suffix) and not p.name.startswith("_")
    }


def test_every_family_has_a_row_in_both_tables() -> None:
    assert set(CPU.families) == set(CUDA.families) == set(Kernel.__subclasses__())


def test_the_same_templates() -> None:
    cpu, cuda = templates("cpu", ".c.j2"), templates("cuda", ".cu.j2")
    assert ONLY_CUDA <= cuda
    assert {n for n in cpu if "_" not in n or n in FAMILIES} - ONLY_CPU == cuda - ONLY_CUDA


@pytest.mark.parametrize("family", sorted(FAMILIES - ONLY_CPU))
@pytest.mark.parametrize(("target", "suffix"), [("cpu", ".c.j2"), ("cuda", ".cu.j2")])
def test_every_family_has_a_template(family: str, target: str, suffix: str) -> None:
    assert (HERE / target / "templates" / f"{family}{suffix}").exists()


def test_the_same_epilogues() -> None:
    for epilogue in ("pointwise", "gated", "heads", "argmax"):
        assert (HERE / "cpu" / "templates" / f"_epilogue_{epilogue}.c.j2").exists()
        assert (HERE / "cuda" / "templates" / f"_epilogue_{epilogue}.cu.j2").exists()


def test_cuda_headers_include_nothing_under_nvrtc() -> None:
    for name, text in headers("cuda"):
        outside = text.split("#else\n#include <math.h>")[0] if "#include <math.h>" in text else text
        assert "#include" not in outside, name


@pytest.mark.parametrize("path", sorted((HERE / "cuda" / "templates").glob("*.j2")), ids=lambda p: p.name)
def test_templates_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 160
