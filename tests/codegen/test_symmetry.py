"""Both targets have the same kernels: a template and a schedule for every family, headers that stand by themselves."""

from __future__ import annotations

import re

import pytest

from monoplan.codegen.cpu.backend import CPU
from monoplan.codegen.cuda.backend import CUDA
from monoplan.codegen.cuda.render import with_headers
from monoplan.codegen.kernels import Conv, Kernel
from monoplan.codegen.source import HERE, Function, headers

FAMILIES = {cls.family for cls in Kernel.__subclasses__()}
# Parts and variants that only one target has, beside the one template of each family.
ONLY_CPU = {"collective", "conv"}  # on a GPU a collective is no kernel, and a convolution a window
ONLY_CUDA = {
    "experts_few",
    "experts_finish",
    "experts_prepare",
    "experts_row",
    "experts_tiles_row",
    "gather_tiles",
    "linear_expand",
    "linear_tiles_row",
    "linear_row",
    "linear_few",
    "linear_prepare",
    "linear_finish",
    "linear_best",
    "linear_wgmma",
    "linear_choose",
    "norm_short",
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
    assert set(CPU.families) == {*CUDA.families, Conv} == set(Kernel.__subclasses__())


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


def test_cuda_sources_need_no_files() -> None:
    """Headers include each other by name; the source has their texts instead, each once and behind those it needs."""
    names = [name for name, _ in headers("cuda")]
    text = with_headers([Function("f", "", "void f() {}\n", tuple(reversed(names)))])
    assert re.findall("#include.*", text) == ["#include <math.h>", "#include <stdint.h>"]  # not under NVRTC
    assert text.index("#include <math.h>") > text.index("#if defined(__CUDACC_RTC__)")
    for name, header in headers("cuda"):
        code = re.sub('#include ".*\n', "", header)
        assert text.count(code) == 1, name
        assert all(
            text.index(dict(headers("cuda"))[other][:80]) < text.index(code)
            for other in re.findall('#include "(.*)"', header)
        )
