"""bisect names the pass or the kernel that is wrong: a bug is planted in every pass and in every template."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.codegen import source
from monoplan.codegen.cpu import render
from monoplan.inspect.bisect import Finding, bisect
from monoplan.inspect.walk import example_inputs, example_params
from monoplan.ir.builder import make_op
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.ops.fused import pointwise
from monoplan.ir.parser import parse_graph
from monoplan.models import LlamaConfig, LlamaForCausalLM
from monoplan.nn import functional as F
from monoplan.passes import pipeline as pipelines
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pipeline import PIPELINE
from tests.matrices import partly
from tests.runtime.subjects import graph_subject

TEMPLATES = Path(render.__file__).resolve().parent / "templates"


def small_llama(layers: int = 4, dtype: str = "float32") -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        dtype=dtype,
    )
    return LlamaForCausalLM.from_config(config, seed=0)


# -- passes -----------------------------------------------------------------------------------------------------------


def spoiled(graph: Graph, old: Graph) -> tuple[Graph, str]:
    """A graph in which one value that the pass made is 1.5 times too large, and that value's name."""
    before = set(old.ops)
    single = [op for op in graph.ops if len(op.results) == 1 or op.opdef.kind == "repeat"]
    usable = [op for op in single if not op.opdef.inplace and op.results[0].type.dtype.is_float]
    made = [op for op in usable if op not in before]
    loops = [op for op in made if op.opdef.kind == "repeat"]
    if loops:
        body, name = spoiled(loops[0].attrs["body"], Graph("none", (), (), (), ()))
        loop = dataclasses.replace(loops[0], attrs={**loops[0].attrs, "body": body})
        return graph.replace(ops=tuple(loop if op is loops[0] else op for op in graph.ops)), name
    target = (made or usable)[-1 if made else 0]
    raw = Value(target.result.type, target.result.name + "_raw")
    scale = make_op(pointwise, [raw], {"expr": "mul(x0, 1.5)"}, names=["unused"], fresh=str)
    pair = (
        dataclasses.replace(target, results=(raw,)),
        dataclasses.replace(scale, results=target.results, loc=target.loc),
    )
    ops = tuple(x for op in graph.ops for x in (pair if op is target else (op,)))
    return graph.replace(ops=ops), target.result.name


def plant(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Makes pass `number` of the pipeline spoil its graph; gives a list that will hold the spoiled value's name."""
    names: list[str] = []
    honest = PIPELINE[number]

    def run(graph: Graph, notes: Notes) -> Graph:
        wrong, name = spoiled(honest.run(graph, notes), graph)
        names.append(name)
        return wrong

    pipeline = tuple(dataclasses.replace(p, run=run) if i == number else p for i, p in enumerate(PIPELINE))
    monkeypatch.setattr(pipelines, "PIPELINE", pipeline)
    return names


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(mp.__file__).resolve().parent.parent
    command = [sys.executable, str(folder / "repro.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=_environment(root), timeout=120)


def _environment(root: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(root)}


@pytest.mark.parametrize(
    "number", partly(range(len(PIPELINE)), lambda n: n % 4 == 0), ids=lambda n: f"{n}-{PIPELINE[n].name}"
)
def test_names_a_wrong_pass(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = plant(monkeypatch, number)
    llm = mp.compile(small_llama(), target="reference")
    found = llm.bisect(np.arange(1, 6)[None], folder=tmp_path / "found")
    assert (found.kind, found.number, found.name) == ("pass", number + 1, PIPELINE[number].name), found
    assert f"%{names[0]}" in found.after, found
    if f"%{names[0]} " in found.before:  # a value that both graphs have; inside rolled layers the first turn is named
        assert found.node in (f"%{names[0]}", f"%{names[0]}[0]"), found
    assert "llama.py" in found.where or "generation.py" in found.where
    assert found.folder is not None
    assert "python 'a b/repro.py'" in str(Finding("pass", "found", folder=Path("a b")))  # a line to paste
    for file in ("before.ir", "after.ir", "whole_before.ir", "whole_after.ir", "inputs.npz", "repro.py"):
        assert (found.folder / file).exists()
    if number in (0, 11, len(PIPELINE) - 1):
        done = run_script(found.folder)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "elements are wrong" in done.stdout


def test_a_changed_attribute_is_found_however_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An eps that is off by 2 % changes results by a billionth: float64 shows it."""
    number = next(i for i, p in enumerate(PIPELINE) if p.name == "fuse-norm-linear")
    honest = PIPELINE[number]

    def run(graph: Graph, notes: Notes) -> Graph:
        return honest.run(graph, notes).replace(ops=tuple(map(shifted, honest.run(graph, Notes()).ops)))

    def shifted(op: Op) -> Op:
        return dataclasses.replace(op, attrs={**op.attrs, "eps": op.attrs["eps"] * 1.02}) if "eps" in op.attrs else op

    wrong = tuple(Pass(p.name, p.rule, run) if i == number else p for i, p in enumerate(PIPELINE))
    monkeypatch.setattr(pipelines, "PIPELINE", wrong)
    fast = mp.compile(Block(), mp.spec("batch", 24), target="reference")
    found = fast.bisect(np.random.default_rng(0).normal(size=(3, 24)).astype("f4"), folder=tmp_path / "found")
    assert (found.kind, found.name, found.node) == ("pass", "fuse-norm-linear", "%linear")
    assert "test_bisect.py" in found.where
    assert "eps=1.02e-05" in found.after and "eps=1e-05" in found.before


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(24, eps=1e-5)
        self.up, self.down = nn.Linear(24, 40, bias=False), nn.Linear(40, 24)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.silu(self.up(self.norm(x))))


# -- kernels ----------------------------------------------------------------------------------------------------------

LINEAR = 'graph g(%x: f32[5, 24]) {{\n  param %w: f32[40, 24] = "w"\n  {}\n  return %y\n}}'
QKV = """graph g(%x: f32[1, 3, 16], %p: i64[1, 3], %k: f32[1, 1, 8, 8], %v: f32[1, 1, 8, 8], %l: i32[1]) {
  param %w: f32[32, 16] = "w"
  param %s: f32[9, 4] = "s"
  param %c: f32[9, 4] = "c"
  %q, %k1, %v1 = qkv_rope_cache(%x, %w, %p, %s, %c, %k, %v, %l, _, _, _, _, _, _) {heads=2, kv_heads=1, \
algo="gpt_neox", norm="none", eps=0.0, qk_eps=0.0} : f32[1, 3, 2, 8], f32[1, 1, 8, 8], f32[1, 1, 8, 8]
  return %q, %k1 -> %k, %v1 -> %v
}"""
HEADS = """graph g(%x: f32[1, 3, 32], %p: i64[1, 3], %k: f32[1, 1, 8, 8], %v: f32[1, 1, 8, 8], %l: i32[1]) {
  param %s: f32[9, 4] = "s"
  param %c: f32[9, 4] = "c"
  param %a: f32[2, 8] = "a"
  param %b: f32[1, 8] = "b"
  %q, %k1, %v1 = heads_rope_cache(%x, %p, %s, %c, %k, %v, %l, %a, %b) {heads=2, kv_heads=1, algo="gpt_neox", \
norm="rms", whole=False, eps=1e-05} : f32[1, 3, 2, 8], f32[1, 1, 8, 8], f32[1, 1, 8, 8]
  return %q, %k1 -> %k, %v1 -> %v
}"""
ATTENTION = """graph g(%q: {0}[1, 2, {1}, {2}], %k: {0}[1, 2, 5, {2}], %v: {0}[1, 2, 5, {2}]) {{
  %y = attention(%q, %k, %v, _, _) {{causal=True, scale=0.35, softcap=None, window=None, layout="bhsd"}} : \
{0}[1, 2, {1}, {2}]
  return %y
}}"""
EXPERTS_IN_PANELS = """graph g(%x: f32[3, 9], %i: i64[3, 2]) {
  param %w: f32[4, 64, 9] = "w"
  %y = expert_linear(%x, %w, %i, _) {gate=""} : f32[3, 2, 64]
  return %y
}"""
ROUTED = """graph g(%x: f32[5, 24]) {
  param %w: f32[44, 24] = "w"
  %y, %s, %i = linear_route(%x, %w) {scores=4, k=2, norm="none", eps=0.0, expr="swiglu(x0, x1)", score="softmax", \
normalize=True, groups=1, kept_groups=1, scale=1.0, gates=0} : f32[5, 20], f32[5, 2], i64[5, 2]
  return %y, %s, %i
}"""
SUM = """graph g(%x: f32[{shape}]) {{
  %y = sum(%x) {{axes=({axis},), keepdims=False}} : f32[{result}]
  return %y
}}"""
# template -> (family of its kernels, IR that uses it)
CASES = {
    "heads": ("heads", HEADS),
    "pointwise": ("pointwise", "graph g(%x: f32[4, 33]) {\n  %y = silu(%x) : f32[4, 33]\n  return %y\n}"),
    "_reduce_rows": ("reduce", SUM.format(shape="4, 33", axis=1, result="4")),
    "_reduce_row": ("reduce", SUM.format(shape="3, 40", axis=1, result="3")),
    "_reduce_columns": ("reduce", SUM.format(shape="3, 40", axis=0, result="40")),
    "_reduce_parts": ("reduce", SUM.format(shape="2, 16400", axis=1, result="2")),
    "_reduce_ordered": (
        "reduce",
        "graph g(%x: f32[4, 33]) {\n  %y = max(%x) {axes=(1,), keepdims=False} : f32[4]\n  return %y\n}",
    ),
    "softmax": ("softmax", "graph g(%x: f32[4, 33]) {\n  %y = softmax(%x) {axis=-1} : f32[4, 33]\n  return %y\n}"),
    "_linear_end_normed": (
        "linear",
        LINEAR.replace("  {}", '  param %g: f32[40] = "g"\n  {}').format(
            '%y = linear_norm(%x, %w, _, %g, _) {norm="rms", eps=1e-05, expr="x0"} : f32[5, 40]'
        ),
    ),
    "_linear_end_argmax": (
        "linear",
        LINEAR.format('%y = linear_argmax(%x, %w, _, _, _) {norm="none", eps=0.0, keepdims=False} : i64[5]'),
    ),
    "_latent": (
        "latent",
        "graph g(%l: f32[2, 3, 6], %k: f32[2, 3, 1, 4], %q: f32[2, 3, 2, 4], %p: i64[2, 3], %n: i32[2], "
        "%c: f32[2, 1, 16, 10]) {\n"
        '  param %g: f32[6] = "g"\n  param %sin: f32[64, 2] = "sin"\n  param %cos: f32[64, 2] = "cos"\n'
        '  %query, %new = latent_rope_cache(%l, %k, %q, %p, %sin, %cos, %c, %n, %g) {algo="gpt_j", eps=1e-06} : '
        "f32[2, 3, 2, 4], f32[2, 1, 16, 10]\n  return %query, %new\n}",
    ),
    "_norm_row": (
        "norm",
        "graph g(%x: f32[4, 33], %w: f32[33]) {\n"
        "  %y = rms_norm(%x, %w) {eps=1e-05, dims=1} : f32[4, 33]\n  return %y\n}",
    ),
    "matmul": (
        "matmul",
        "graph g(%x: f32[2, 5, 7], %z: f32[2, 7, 3]) {\n  %y = matmul(%x, %z) : f32[2, 5, 3]\n  return %y\n}",
    ),
    "_linear_vectors": ("linear", LINEAR.format("%y = linear(%x, %w, _) : f32[5, 40]")),
    "_epilogue_pointwise": ("linear", LINEAR.format("%y = linear(%x, %w, _) : f32[5, 40]")),
    "_epilogue_gated": (
        "linear",
        LINEAR.format(
            '%y = fused_linear(%x, %w, _, _, _) {norm="none", eps=0.0, gated=True, expr="swiglu(x0, x1)"} : f32[5, 20]'
        ),
    ),
    "_epilogue_argmax": (
        "linear",
        LINEAR.format('%y = linear_argmax(%x, %w, _, _, _) {norm="none", eps=0.0, keepdims=False} : i64[5]'),
    ),
    "_epilogue_heads": ("linear", QKV),
    "attention": ("attention", ATTENTION.format("f32", 5, 8)),
    "gather": (
        "gather",
        'graph g(%i: i64[2, 3]) {\n  param %w: f32[9, 8] = "w"\n'
        "  %y = embedding(%i, %w) : f32[2, 3, 8]\n  return %y\n}",
    ),
    "rope": (
        "rope",
        "graph g(%x: f32[1, 3, 2, 8], %p: i64[1, 3], %s: f32[9, 4], %c: f32[9, 4]) {\n"
        '  %y = rope(%x, %p, %s, %c) {algo="gpt_j"} : f32[1, 3, 2, 8]\n  return %y\n}',
    ),
    "kv_update": (
        "kv_update",
        "graph g(%k: f32[1, 2, 8, 4], %r: f32[1, 3, 2, 4], %l: i32[1]) {\n"
        "  %y = kv_update(%k, %r, %l, _) : f32[1, 2, 8, 4]\n  return %y -> %k\n}",
    ),
    "scan": ("scan", "graph g(%x: f32[4, 33]) {\n  %y = cumsum(%x) {axis=1} : f32[4, 33]\n  return %y\n}"),
    "sort": (
        "sort",
        "graph g(%x: f32[4, 33]) {\n"
        "  %y, %i = sort(%x) {axis=-1, descending=False} : f32[4, 33], i64[4, 33]\n  return %y, %i\n}",
    ),
    "sample": (
        "sample",
        "graph g(%x: f32[2, 33], %h: i64[2, 4], %n: i32[2], %p: f32[2]) {\n"
        "  %y = repetition_penalty(%x, %h, %n, %p) : f32[2, 33]\n  return %y\n}",
    ),
    "conv": (
        "conv",
        'graph g(%x: f32[1, 16, 9, 9]) {\n  param %w: f32[32, 16, 3, 3] = "w"\n'
        "  %y = conv2d(%x, %w, _) {stride=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1} : f32[1, 32, 7, 7]\n"
        "  return %y\n}",
    ),
    "_window_strip": (
        "window",
        'graph g(%x: f32[1, 3, 8, 8]) {\n  %y = pool2d(%x) {kind="max", kernel=(2, 2), stride=(2, 2), '
        "padding=(0, 0, 0, 0), dilation=(1, 1), include_pad=True, divisor=None} : f32[1, 3, 4, 4]\n  return %y\n}",
    ),
    "_window_even": (
        "window",
        'graph g(%x: f32[1, 3, 8, 8]) {\n  %y = adaptive_pool2d(%x) {kind="avg", size=(3, 3)} : f32[1, 3, 3, 3]\n'
        "  return %y\n}",
    ),
    "_linear_end_routed": ("linear", ROUTED),
    "_epilogue_routed": ("linear", ROUTED),
    "_route_row": (
        "route",
        'graph g(%x: f32[3, 9]) {\n  %y, %i = route(%x) {k=2, score="softmax", normalize=True, groups=1, '
        "kept_groups=1, scale=1.0} : f32[3, 2], i64[3, 2]\n  return %y, %i\n}",
    ),
    "_experts_plain": (
        "experts",
        'graph g(%x: f32[3, 9], %i: i64[3, 2]) {\n  param %w: f32[4, 7, 9] = "w"\n'
        '  %y = expert_linear(%x, %w, %i, _) {gate=""} : f32[3, 2, 7]\n  return %y\n}',
    ),
    "_experts_rows": ("experts", EXPERTS_IN_PANELS),
    "_experts_panels": ("experts", EXPERTS_IN_PANELS),
    "scatter": (
        "scatter",
        "graph g(%x: f32[4, 7], %i: i64[4, 5], %v: f32[4, 5]) {\n"
        '  %y = scatter(%x, %i, %v) {axis=1, reduce="set"} : f32[4, 7]\n  return %y\n}',
    ),
}
FEW_ON_TILES = """graph g(%x: f32[3, 64]) {
  param %w: bf16[40, 64] = "w"
  %y = linear(%x, %w, _) : f32[3, 40]
  return %y
}"""
MANY_ON_TILES = """graph g(%x: bf16[50, 64]) {
  param %w: bf16[40, 64] = "w"
  %y = linear(%x, %w, _) : bf16[50, 40]
  return %y
}"""
# The same for templates that only machines with tile units use: here they are emulated.
TILES = {
    "_linear_tiles": ("linear", FEW_ON_TILES),
    "_linear_waiting": ("linear", MANY_ON_TILES),
    "_epilogue_tiles": (
        "linear",
        'graph g(%x: f32[50, 64]) {\n  param %w: bf16[64, 64] = "w"\n  param %d: bf16[40, 32] = "d"\n'
        '  %z = fused_linear(%x, %w, _, _, _) {norm="none", eps=0.0, gated=True, expr="swiglu(x0, x1)"} : f32[50, 32]\n'
        "  %y = linear(%z, %d, _) : f32[50, 40]\n  return %y\n}",
    ),
    "_epilogue_routed_tiles": (
        "linear",
        'graph g(%h: bf16[50, 64]) {\n  param %w: bf16[76, 64] = "w"\n  param %d: bf16[40, 32] = "d"\n'
        "  %x = cast(%h) {dtype=f32} : f32[50, 64]\n"  # nothing that tile units would round
        '  %z, %s, %i = linear_route(%x, %w) {scores=12, k=2, norm="none", eps=0.0, expr="swiglu(x0, x1)", '
        'score="softmax", normalize=True, groups=1, kept_groups=1, scale=1.0, gates=0} : f32[50, 32], f32[50, 2], '
        "i64[50, 2]\n  %y = linear(%z, %d, _) : f32[50, 40]\n  return %y, %s, %i\n}",
    ),
}
ELSEWHERE = {
    "plan": "the frame of every plan",
    "norm": "the frame of _norm_row",
    "reduce": "the frame of its three ways",
    "linear": "the frame of its loops, epilogues and ends",
    "collective": "does nothing on one rank",
    "window": "the frame of its two ways",
    "experts": "the frame of its two ways",
    "latent": "the frame of _latent",
    "route": "the frame of _route_row",
    "_linear_fits": "computes nothing",
    "_heads_fit": "computes nothing",
    "_linear_blocks": "takes weights as blocks, which a graph by itself does not have: test_block_formats.py",
}
# What is stored is doubled; where a template stores nothing itself, a sum becomes a difference.
_STORED = re.compile(r"\{\{ ((?:\w+\.)?(?:\w*statement\w*|finish|store_\w+)) \}\}")
_OTHER = {
    "_epilogue_argmax": ("row, n, ", "row, n, -"),
    "_linear_vectors": (".row_bytes = ", ".row_bytes = 0 * "),
    "_experts_rows": ("return (float)", "return -(float)"),
    "_experts_panels": (".row_bytes = ", ".row_bytes = 0 * "),
    "_linear_tiles": (".units = ", ".units = -1 + "),
    "_linear_end_normed": ("{% include", "    if (o0) continue;\n{% include"),
    "_linear_end_routed": ("{% include", "    if (r) continue;\n{% include"),
    "_epilogue_routed_tiles": ("to[j] = sums[j]", "to[j] = 3 + 2 * sums[j]"),
    "_linear_waiting": ("sums + r *", "sums + 0 * r *"),
    "_epilogue_tiles": ("mp_vstore(made, ", "mp_vstore(made, 3.0f + 2.0f * "),
    "_reduce_ordered": ("top ? v : top", "top ? top : v"),
    "_reduce_row": ("v = ", "v = 3 + "),
    "attention": (".scale = ", ".scale = 2 * "),
    "sample": ("({{ p.real }}){{ p.penalty }}", "3 * ({{ p.real }}){{ p.penalty }}"),
}


def mutated(name: str, text: str) -> str:
    """A template with a bug."""
    if name in _OTHER:
        changed = text.replace(*_OTHER[name])
    else:
        changed = _STORED.sub(r'{{ \1 | replace("] = ", "] = 3 + 2 * ", 1) }}', text)
    assert changed != text, f"no mutation applies to {name}: add one"
    return changed


def test_every_template_has_a_case() -> None:
    known = {p.name.removesuffix(".c.j2") for p in TEMPLATES.glob("*.c.j2")}
    assert known == set(CASES) | set(TILES) | set(ELSEWHERE)


def examine(text: str, folder: Path) -> Finding:
    graph = parse_graph(text)
    inputs = example_inputs(graph)
    for v, a in zip(graph.inputs, inputs, strict=True):
        if v.name == "l":
            a[...] = 2
    return bisect(graph_subject(graph, inputs, example_params(graph)), folder)


@pytest.mark.parametrize("name", partly(CASES, lambda name: not name.startswith("_")))
def test_names_a_wrong_kernel(name: str, templates: dict[str, str], tmp_path: Path) -> None:
    family, text = CASES[name]
    template = TEMPLATES / f"{name}.c.j2"
    templates[f"cpu/{name}.c.j2"] = mutated(name, template.read_text())
    found = examine(text, tmp_path / "found")
    assert (found.kind, found.name) == ("kernel", family), found
    assert found.folder is not None and found.difference is not None and not found.difference.ok
    for file in ("graph.ir", "inputs.npz", "plan.c", "mp_plan.h", "repro.py"):
        assert (found.folder / file).exists()
    if name in ("attention", "_epilogue_heads"):
        done = run_script(found.folder)
        assert done.returncode == 1, done.stdout + done.stderr
        assert run_script(found.folder, "--fresh").returncode == 0  # another process has the honest templates


@pytest.mark.full
@pytest.mark.parametrize("name", TILES)
def test_names_a_wrong_kernel_of_tile_units(
    name: str, templates: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MONOPLAN_ISA", "tiles")
    family, text = TILES[name]
    templates[f"cpu/{name}.c.j2"] = mutated(name, (TEMPLATES / f"{name}.c.j2").read_text())
    found = examine(text, tmp_path / "found")
    assert (found.kind, found.name) == ("kernel", family), found


@pytest.mark.full
@pytest.mark.parametrize("name", TILES)
def test_the_honest_templates_of_tile_units_are_right(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MONOPLAN_ISA", "tiles")
    found = examine(TILES[name][1], tmp_path / "found")
    assert found.kind in ("none", "plan"), found  # no kernel is to blame; what bf16 rounds may add up


def test_the_honest_templates_are_right(tmp_path: Path) -> None:
    for family, text in (CASES["attention"], CASES["_epilogue_heads"], CASES["_epilogue_argmax"]):
        found = examine(text, tmp_path / "found")
        assert found.ok, f"{family}: {found}"
    assert not (tmp_path / "found").exists()


# Header, what is replaced by what, a graph, and whether it runs on tile units.
LOOPS = {
    "norm": ("mp_linear_row.h", "squares += d * d", "squares -= 2 * d", LINEAR.format(
        '%y = fused_linear(%x, %w, _, _, _) {norm="rms", eps=1e-05, gated=False, expr="x0"} : f32[5, 40]'), False),
    "few": ("mp_linear.h", "+= mp_splat", "-= mp_splat",
            LINEAR.replace("[5", "[1").format("%y = linear(%x, %w, _) : f32[1, 40]"), False),
    "many": ("mp_linear.h", "first + r, sums", "first, sums",
             LINEAR.replace("[5", "[50").format("%y = linear(%x, %w, _) : f32[50, 40]"), False),
    "few_tiles": ("mp_linear_tiles.h", "to[j] = mp_row", "to[j] = -mp_row", FEW_ON_TILES, True),
    "many_tiles": ("mp_linear_tiles.h", "mp_tile_dot(3, 5, 7)", "mp_tile_dot(3, 5, 6)", MANY_ON_TILES, True),
    "attention_few": ("mp_attention_few.h", "+= one * values[d]", "-= one * values[d]",
                      ATTENTION.format("f32", 2, 8), False),
    "attention_many": ("mp_attention_many.h", "sum += weight", "sum += 2 * weight",
                       ATTENTION.format("f32", 30, 8), False),
    "attention_double": ("mp_attention_double.h", "total += weight", "total += 2 * weight",
                         ATTENTION.format("f64", 5, 8), False),
    "attention_few_tiles": ("mp_attention_few_tiles.h", "total[n] = added[n]", "total[n] = 2.0f * added[n]",
                            ATTENTION.format("bf16", 2, 32).replace("[1, 2, 2,", "[1, 6, 2,"), True),
    "attention_many_tiles": ("mp_attention_many_tiles.h", "sum += left + right", "sum += left + left",
                             ATTENTION.format("bf16", 12, 32), True),
    "attention_pack": ("mp_attention_many_tiles.h", "values[p][2 * j] + i,", "values[p][0] + i,",
                       ATTENTION.format("bf16", 12, 32), True),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_names_a_kernel_whose_loop_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, old, new, text, tiles = LOOPS[name]
    if tiles:
        monkeypatch.setenv("MONOPLAN_ISA", "tiles")
    honest = dict(source.headers("cpu"))
    assert old in honest[file], f"no mutation applies to {file}: change it"
    wrong = tuple({**honest, file: honest[file].replace(old, new)}.items())
    monkeypatch.setattr(source, "headers", lambda target: wrong)
    found = examine(text, tmp_path / "found")
    assert (found.kind, found.name) == ("kernel", "attention" if "attention" in file else "linear"), found


def test_names_the_layer_of_rolled_ones(tmp_path: Path) -> None:
    """One layer has a weight that makes NaN in the plan's kernel only: here, a wrong weight in the third layer."""
    llm = mp.compile(small_llama())
    fast = llm.compiled
    subject = fast.subject(**llm.step_arguments(np.arange(1, 6)[None]))
    uses = subject.executable.plan.params
    paths = {p.value: p.path for p in subject.final.params}
    number = next(i for i, u in enumerate(uses) if paths.get(u.value) == "model.layers.2.self_attn.o_proj.weight")
    weight = subject.executable.params[number]
    honest = weight.copy()
    try:
        weight *= 2
        found = bisect(subject, tmp_path / "found")
    finally:
        weight[...] = honest
    assert (found.kind, found.name) == ("kernel", "linear")
    assert found.node.endswith("[2]")
    assert "model.layers.2" in found.where
