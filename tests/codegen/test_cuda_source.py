"""Generated CUDA is built for old and new devices wherever a compiler is, and says where each kernel comes from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monoplan.codegen.cuda import render
from monoplan.codegen.cuda.backend import narrowed
from monoplan.codegen.cuda.early import OVERLAPPED
from monoplan.codegen.cuda.render import PART, render_cuda
from monoplan.codegen.cuda.schedule import CudaLinear, few_shared, row_shared
from monoplan.codegen.kernels import Linear
from monoplan.codegen.moves import residuals
from monoplan.codegen.plan import make_plan
from monoplan.codegen.source import headers
from monoplan.codegen.target import Target, cuda_target
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import DTYPES
from tests.codegen.cases import CASES
from tests.codegen.test_cuda_llama import model
from tests.codegen.test_ops import graph_of
from tests.matrices import partly
from tests.needs import needs

H200, A100, RTX4090, T4 = (
    cuda_target(90, 132, 232448, library=True), cuda_target(80, 108, 166912, library=True),
    cuda_target(89, 128, 101376, library=True), cuda_target(75, 40, 65536),
)  # fmt: skip
TARGETS = {"sm_90a": H200, "sm_80": A100, "sm_75": T4}
needs_nvcc = needs("nvcc")


def compile_cubin(text: str, arch: str, folder: Path) -> str:
    """The assembler's report on registers and spills; fails with the compiler's messages."""
    source = folder / "plan.cu"
    source.write_text(text)
    command = [
        "nvcc",
        "-std=c++17",
        f"-arch={arch}",
        "-cubin",
        "-Xptxas",
        "-v",
        "-diag-suppress=177,550",
        "-o",
        str(folder / "plan.cubin"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return done.stderr


@needs_nvcc
@pytest.mark.parametrize("arch", partly(TARGETS, lambda arch: arch == "sm_90a"))
def test_llama_is_built(arch: str, tmp_path: Path) -> None:
    graph, _ = model("bf16")
    report = compile_cubin(render_cuda(make_plan(graph, TARGETS[arch]), "test").text, arch, tmp_path)
    assert all(int(n) == 0 for n in re.findall(r"(\d+) bytes spill stores", report))


@needs_nvcc
def test_every_part_is_a_source_of_its_own(tmp_path: Path) -> None:
    graph, _ = model("bf16")
    source = render_cuda(make_plan(graph, H200), "test")
    for i, part in enumerate(source.parts):
        compile_cubin(part, "sm_90a", tmp_path)
        data = (tmp_path / "plan.cubin").read_bytes()
        assert all(f".text.{f.name}\0".encode() in data for f in source.functions[i * PART : (i + 1) * PART])


@pytest.mark.full
@needs_nvcc
@pytest.mark.parametrize("dtype", ["f16", "u8", pytest.param("f64", marks=pytest.mark.nightly)])
def test_every_op_is_built(dtype: str, tmp_path: Path) -> None:
    """The emulator runs the types that are not here."""
    cases = [c for c in CASES if c.accepts(DTYPES[dtype])]
    plan = make_plan(graph_of(cases, dtype)[0], T4)
    compile_cubin(render_cuda(plan, "test").text, "sm_75", tmp_path)


def test_kernels_say_where_they_come_from() -> None:
    graph, _ = model("bf16")
    text = render_cuda(make_plan(graph, H200), "test").text
    heads = [m.start() for m in re.finditer(r'extern "C" __global__', text)]
    assert len(heads) > 20
    for at in heads:
        comment = text[text.rindex("/* ", 0, at) : at]
        assert " = " in comment and ":" in comment, comment[:200]
    assert "few8" not in text.split("*/")[0] and "library product" in text.split("*/")[0]


def test_the_same_text_every_time() -> None:
    graph, _ = model("qk_norm")
    first, second = (render_cuda(make_plan(graph, H200), "test").text for _ in range(2))
    assert first == second
    assert "0x7f" not in re.sub(r"0x7f(f|8)\w*", "", first)  # no addresses of Python objects


def schedules(target: Target) -> list[tuple[Linear, Any]]:
    graph, _ = model("bf16")
    steps = make_plan(graph, target).steps()
    return [(s.kernel, s.schedule) for s, _ in steps if isinstance(s.kernel, Linear)]


@pytest.mark.parametrize("target", [H200, A100, RTX4090, T4], ids=lambda t: t.isa)
def test_schedules_fit_the_device(target: Target) -> None:
    for k, s in schedules(target):
        assert isinstance(s, CudaLinear) and s.row is not None
        assert row_shared(k, s.row) + 1024 <= target.shared
        assert all(few_shared(k, f) <= target.shared for f in s.few)
        assert bool(s.few) == (target.capability >= 80)


@pytest.mark.parametrize("target", [H200, A100, RTX4090, cuda_target(120, 84, 101376)], ids=lambda t: t.isa)
def test_products_with_few_rows_fit_every_depth(target: Target) -> None:
    """As many rows as the memory allows; what a kernel leaves free for others it takes where it must."""
    for depth in (128, 896, 2048, 3584, 4096, 5120, 8192, 11008, 14336, 18944, 32768):
        text = f'graph g(%x: bf16[n, {depth}]) {{\n  param %w: bf16[512, {depth}] = "w"\n'
        graph = parse_graph(text + "  %y = linear(%x, %w, _) : bf16[n, 512]\n  return %y\n}")
        ((k, schedule),) = ((s.kernel, s.schedule) for s, _ in make_plan(graph, target).steps())
        assert isinstance(schedule, CudaLinear) and isinstance(k, Linear)
        assert all(few_shared(k, f) <= target.shared and f.gentle < f.ring - 1 for f in schedule.few)
        rows = [f.tiles for f in schedule.few]
        if target is H200 or depth <= 8192:
            assert rows == [1, 4], depth


@pytest.mark.parametrize("made", [True, False])
def test_a_norms_weights_are_read_early_if_no_kernel_makes_them(made: bool) -> None:
    graph = parse_graph(
        'graph g(%x: bf16[n, 256], %s: bf16[256]) {\n  param %w: bf16[512, 256] = "w"\n  param %p: bf16[256] = "p"\n'
        + "  %g = exp(%s) : bf16[256]\n" * made
        + f"  %y = fused_linear(%x, %w, _, %{'g' if made else 'p'}, _) "
        + '{norm="rms", eps=1e-5, gated=False, expr="x0"} : bf16[n, 512]\n'
        + f"  return %y{', %g' if made else ''}\n}}"
    )
    functions = {f.name: f.text for f in render_cuda(make_plan(graph, H200), "test").functions}
    found = [text for name, text in functions.items() if name.endswith(("row", "prepare"))]
    assert len(found) == 2  # one row, and the preparation of many
    assert all(("MP_GAMMA_COMPUTED" if made else "MP_GAMMA_CONSTANT") in text for text in found)


@pytest.mark.parametrize("header", ["mp_linear_row.cuh", "mp_linear.cuh"])
def test_only_constants_are_read_before_the_dependency(header: str) -> None:
    text = dict(headers("cuda"))[header]
    wait = text.index("mp_wait();")
    assert text.index("GAMMA == MP_GAMMA_CONSTANT") < text.index("mp_vec_const<G") < wait
    assert wait < text.index("GAMMA == MP_GAMMA_COMPUTED") < text.index("mp_vec_fresh<G")
    assert wait < text.index("mp_vec_fresh<X")


@pytest.mark.parametrize("late", [0, 3])
def test_the_next_kernel_starts_when_it_is_let(late: int) -> None:
    """Before the weights, or when a warp has so many batches left: its loop always comes there."""
    text = 'graph g(%x: bf16[1, 512]) {\n  param %w: bf16[4096, 512] = "w"\n'
    graph = parse_graph(text + "  %y = linear(%x, %w, _) : bf16[1, 4096]\n  return %y\n}")
    plan = make_plan(graph, H200)
    (step,) = (s for s, _ in plan.steps())
    source = render_cuda(plan, "test", {str(step.number): {"late": late}}).text
    assert f"LATE = {late}" in source[source.index("RING =") :]
    loop = dict(headers("cuda"))["mp_linear_row.cuh"]
    assert loop.index("if (!LATE) mp_release();") < loop.index("mp_wait();")
    assert loop.index("mp_wait();") < loop.index("if (LATE > 0 && b + LATE * GROUPS >= batches) mp_release();")


def test_chosen_matrices_are_prefetched_where_the_choice_is_known() -> None:
    """The second product with the same choices starts when the first one's dependency is met, and so are they."""
    types = "%x: bf16[1, 512], %ids: i64[1, 2], %other: i64[1, 2]"
    params = 'param %w: bf16[4, 512, 512] = "w"\n  param %v: bf16[4, 256, 512] = "v"\n'
    lines = '%y = expert_linear(%x, %w, %ids) {gate=""} : bf16[1, 2, 512]\n'
    for ids, known in (("ids", True), ("other", False)):
        last = f'%z = expert_linear(%y, %v, %{ids}) {{gate=""}} : bf16[1, 2, 256]\n'
        graph = parse_graph(f"graph g({types}) {{\n  {params}  {lines}  {last}  return %z\n}}")
        first, second = [
            f.text for f in render_cuda(make_plan(graph, H200), "test").functions if f.name.endswith("_row")
        ]
        assert "EARLY = 0" in first and "LATE = -1" in first
        assert ("EARLY = 0" in second) is not known


def test_half_precision_is_rounded_where_it_is_made() -> None:
    graph, _ = model("bf16")
    plan = make_plan(graph, H200)
    kinds = {s.kernel.family: s.kernel.operand("y").dtype.name for s, n in plan.steps() if n > 1}
    assert kinds["attention"] == "bf16"
    first, *_, last = [s.kernel for s, n in plan.steps() if n > 1]
    assert first.operand("x").dtype.name == "f32" and last.operand("y").dtype.name == "f32"  # the residual stream
    assert first.operand("x").view.buffer is last.operand("y").view.buffer is last.operand("e0").view.buffer
    assert narrowed([]) == {} == residuals([])


def test_kernels_that_let_the_next_one_start_are_known() -> None:
    """`settled` relies on all others being over before the next kernel begins."""
    folder = Path(render.__file__).parent
    early = {p.name for p in (folder / "include").glob("*.cuh") if "mp_release()" in p.read_text()}
    early |= {p.name for p in (folder / "include").glob("*.cuh") if any(f'"{n}"' in p.read_text() for n in early)}
    for template in (folder / "templates").glob("*.cu.j2"):
        text = template.read_text()
        if "mp_release()" in text or any(f'"{name}"' in text for name in early - {"mp_ptx.cuh"}):
            family = template.name.lstrip("_").partition(".")[0].partition("_")[0].capitalize()
            assert family in {kernel.__name__ for kernel in OVERLAPPED}, template.name
