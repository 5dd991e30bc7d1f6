"""The generated C: no warnings, every instruction set, comments that lead back, the same text every time."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.plan import make_plan
from monoplan.codegen.source import headers
from monoplan.codegen.target import cpu_target
from monoplan.ir.builder import build_graph
from monoplan.ir.graph import Graph
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.printer import print_op
from monoplan.ir.types import DTYPES, tensor_type
from monoplan.runtime.build.compilers import find_compiler
from monoplan.runtime.cpu.executable import flags_for, host_target
from monoplan.runtime.machine.features import (
    CpuFeatures,
    compile_flags,
    detect,
    levels,
    machine,
    read_cpu,
    vector_bytes,
)
from tests.codegen.cases import CASES
from tests.codegen.mixed import mixed_graph, rolled_graph
from tests.codegen.test_ops import graph_of
from tests.matrices import partly
from tests.needs import COMPILERS, needs

ROOT = Path(__file__).resolve().parents[2]
STRICT = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC")


def source_of(graph: Graph) -> str:
    return render_cpu(make_plan(graph, host_target()), "test").text


def compile_strictly(
    compiler: str, text: str, folder: Path, *flags: str, target_flags: tuple[str, ...] | None = None
) -> None:
    """Builds an object file; a warning is an error."""
    for name, header in headers("cpu"):
        (folder / name).write_text(header)
    (folder / "plan.c").write_text(text)
    for_target = flags_for(host_target()) if target_flags is None else target_flags
    command = [compiler, *STRICT, *flags, *for_target, "-c", "plan.c", "-o", "plan.o"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def test_headers_go_together(tmp_path: Path) -> None:
    """A plan may need any of them: no name has two meanings."""
    names = [name for name, _ in headers("cpu") if name != "mp_plan.h"]
    text = "".join(f'#include "{name}"\n' for name in ["mp_plan.h", *names])
    flags = ("-DMP_TILES_EMULATED", "-Wno-psabi", "-DMP_LANES=16", "-fwrapv", "-fopenmp-simd")
    compile_strictly(find_compiler().path, text, tmp_path, "-fsyntax-only", "-Wno-unused-function", target_flags=flags)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", ["mixed", "rolled", "pointwise"])
def test_a_plan_builds_without_warnings(compiler: str, name: str, tmp_path: Path) -> None:
    """With optimization, where compilers see more."""
    graph = mixed_graph("bf16") if name == "mixed" else rolled_graph()[0]
    if name == "pointwise":
        unary = [c for c in CASES if REGISTRY[c.op].kind == "pointwise" and len(c.operands) == 1]
        graph, _ = graph_of([c for c in unary if c.accepts(DTYPES["f32"]) and c.op != "cast"], "f32")
    openmp = ("-fopenmp",) if compiler == "gcc" else ()
    compile_strictly(compiler, source_of(graph), tmp_path, "-O3", "-ffp-contract=fast", *openmp)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("dtype", partly(["f32", "f64", "f16", "i8", "u32", "u64", "bool"], lambda d: d == "f32"))
def test_every_op_builds_without_warnings(compiler: str, dtype: str, tmp_path: Path) -> None:
    graph, _ = graph_of([c for c in CASES if c.accepts(DTYPES[dtype])], dtype)
    compile_strictly(compiler, source_of(graph), tmp_path, "-fsyntax-only")


@needs("x86_64-linux-gnu-gcc")
@pytest.mark.parametrize("isa", partly(["avx2", "avx512", "amx"], lambda isa: isa == "amx"))
def test_plans_for_x86_build_without_warnings(isa: str, tmp_path: Path) -> None:
    target = cpu_target(isa, vector_bytes(isa))
    flags = (*compile_flags(CpuFeatures("x86_64", isa, ())), f"-DMP_LANES={target.lanes}", "-fopenmp")
    for dtype in ("f32", "bf16", "f64"):
        graph, _ = graph_of([c for c in CASES if c.accepts(DTYPES[dtype])], dtype)
        text = render_cpu(make_plan(graph, target), "test").text
        compile_strictly("x86_64-linux-gnu-gcc", text, tmp_path, "-fsyntax-only", target_flags=flags)


@needs("x86_64-linux-gnu-gcc")
@pytest.mark.parametrize("options", [(), ("avx512_bf16", "avx512vbmi")])
def test_tile_units_read_coded_weights(options: tuple[str, ...], tmp_path: Path) -> None:
    """Products and lookups of 12 bits, with the instructions that such a CPU has and without them."""

    def forward(x: Any, ids: Any, w: Any) -> Any:
        return [REGISTRY["linear"](x, w), REGISTRY["embedding"](ids, w)]

    types = {"x": tensor_type("f32", "n", 64), "ids": tensor_type("i64", 3)}
    graph = build_graph("coded", forward, types, {"w": tensor_type("bf16", 96, 64)})
    target = cpu_target("amx", vector_bytes("amx"))
    flags = (*compile_flags(CpuFeatures("x86_64", "amx", options)), f"-DMP_LANES={target.lanes}", "-fopenmp")
    text = render_cpu(make_plan(graph, target), "test").text
    assert all(name in text for name in ("mp_linear_tiles_run", "mp_load_column_bf16_12"))
    compile_strictly("x86_64-linux-gnu-gcc", text, tmp_path, "-O2", "-S", target_flags=flags)
    assert ("vpermb" in (tmp_path / "plan.o").read_text()) == bool(options)


def variants() -> list[Any]:
    """Environment variables that make other code of a plan: lower instruction sets, another compiler."""
    lower = ("scalar", "generic", "avx2")
    isas = [isa for isa in levels(machine(), read_cpu()[1]) if isa in lower and isa != detect().isa]
    found = [("MONOPLAN_ISA", isa) for isa in isas]
    return [*found, pytest.param("CC", "clang", marks=needs("clang"))] if find_compiler().kind == "gcc" else found


@pytest.mark.full
@pytest.mark.parametrize(("name", "value"), variants())
def test_every_variant_gives_the_right_numbers(name: str, value: str) -> None:
    program = """
        import sys
        from monoplan.driver import build_graph_executable
        from monoplan.ir.interpreter import interpret
        from monoplan.runtime.machine.features import detect
        from monoplan.runtime.build.compilers import find_compiler
        from tests.codegen.mixed import mixed_arrays, mixed_graph
        from tests.tolerances import check

        assert sys.argv[1] in (detect().isa, find_compiler().kind)
        dtype = "f16" if sys.argv[1] == "scalar" else "f32"
        graph = mixed_graph(dtype)
        inputs, params = mixed_arrays(dtype, 2, 7)
        run = build_graph_executable(graph, params)
        for v, a, b in zip(graph.outputs, run(inputs), interpret(graph, inputs, params, exact=True)):
            if v.type.dtype.is_float:
                check(a, b, v.type.dtype, "model")
    """
    env = {**os.environ, name: value, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program), value]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_comments_lead_back_to_the_ir_and_to_the_user() -> None:
    graph = mixed_graph()
    plan = make_plan(graph, host_target())
    source = render_cpu(plan, "test")
    flat = " ".join(re.sub(r"\n *\* ", " ", source.text).split())  # comments are wrapped
    for step, _ in plan.steps():
        line = f"/* {step.number}: {print_op(step.kernel.op)} ({step.kernel.op.loc}) */"
        assert " ".join(line.split()) in flat
    for f in source.functions:
        assert f.comment in source.text and "user/model.py:" in f.comment
        at = source.text.index(f.comment)
        assert f" {f.name}(" in source.text[at : at + len(f.comment) + len(f.text)]
    assert len(source.functions) < len(list(plan.steps()))  # equal kernels of the two layers are written once


def test_the_text_is_the_same_every_time() -> None:
    first, second = source_of(mixed_graph()), source_of(mixed_graph())
    assert first == second
    assert not re.search(r"0x[0-9a-f]{7,}|\b20\d\d-\d\d-\d\d\b|/home/|/tmp/", first.split("#include")[1])
    program = """
        import hashlib
        from tests.codegen.test_source import mixed_graph, rolled_graph, source_of
        print(hashlib.sha256((source_of(mixed_graph()) + source_of(rolled_graph()[0])).encode()).hexdigest())
    """
    want = hashlib.sha256((first + source_of(rolled_graph()[0])).encode()).hexdigest()
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}  # another order of sets
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == want, done.stderr


def test_a_location_can_not_break_a_comment() -> None:
    import dataclasses

    from monoplan.ir.graph import Loc

    graph = mixed_graph()
    wild = Loc("a*/b", "dir/*/file\\", 3)
    ops = tuple(dataclasses.replace(op, loc=wild) for op in graph.ops)
    text = render_cpu(make_plan(graph.replace(ops=ops), cpu_target("generic", 16)), "test").text
    assert text.count("/*") == text.count("*/")
    assert "a* /b" in text
