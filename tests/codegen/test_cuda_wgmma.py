"""Products by Hopper's warpgroups: tiles, parts of K and epilogues, on the emulator and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.cuda.schedule import CudaLinear
from monoplan.codegen.kernels import Linear
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cuda_target
from monoplan.ir.errors import MonoplanError
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import DTYPES, bf16
from monoplan.runtime.cuda.executable import CudaExecutable, choose_variant
from monoplan.runtime.cuda.weights import upload_params
from tests.codegen.test_cuda_ops import make_device
from tests.needs import needs

DEVICES = [pytest.param("emulator", marks=needs("g++")), pytest.param("gpu", marks=pytest.mark.cuda)]


def constants(groups: int, columns: int, stages: int, splits: int = 1) -> dict[str, int]:
    return {"groups": groups, "columns": columns, "stages": stages, "splits": splits, "band": 2}


# rows, depth, columns; norm, body, type of x and y; constants and the epilogue's loop. x1 is a matrix; c is a bias.
Case = tuple[tuple[int, int, int], str, str, str, dict[str, int], str]
CASES: dict[str, Case] = {
    "tails": ((150, 136, 200), "none", "x0", "bf16", constants(2, 64, 2), "words"),
    "bands": ((200, 200, 328), "rms", "add(x0, x1)", "bf16", constants(1, 128, 3), "words"),
    "a bias": ((70, 72, 96), "none", "gelu(x0, approximate='none')", "bf16", constants(1, 96, 2), "words"),
    "gates": ((140, 136, 400), "rms", "swiglu(x0, x1)", "bf16", constants(2, 192, 2), "gated"),
    "f32": ((70, 72, 64), "none", "relu(x0)", "f32", constants(1, 32, 2), "pairs"),
    "parts of K": ((70, 520, 128), "none", "add(x0, x1)", "bf16", constants(1, 64, 2, splits=2), "words"),
    "many parts": ((70, 1032, 72), "none", "x0", "bf16", constants(1, 64, 3, splits=4), "pairs"),
}
QUICK = ("gates", "f32", "parts of K")  # each is built by itself


def executable(graph: Graph, params: dict[str, Any], device: Any, wanted: dict[str, int], loop: str) -> CudaExecutable:
    """A plan of one product with these constants."""
    plan = make_plan(graph, device.target)
    ((step, _),) = ((s, n) for s, n in plan.steps() if isinstance(s.kernel, Linear))
    assert isinstance(step.schedule, CudaLinear) and step.schedule.many
    source = render_cuda(plan, "test", {str(step.number): wanted})
    variant = choose_variant(source.variants[step.number], {})
    assert variant.name == "many" and f"mp_wgmma_{loop}<" in source.text
    return CudaExecutable(plan, source, upload_params(plan, lambda path: np.asarray(params[path]), device), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in CASES])
def test_products(device: str, name: str) -> None:
    (rows, depth, columns), norm, body, dtype, wanted, loop = CASES[name]
    rng = np.random.default_rng(0)
    gated = loop == "gated"
    e, c, g = "x1" in body and not gated, "gelu" in body, norm == "rms"
    text = f"""graph g(%x: {dtype}[{rows}, {depth}]{f", %e: bf16[{rows}, {columns}]" if e else ""}) {{
      param %w: bf16[{columns}, {depth}] = "w"
      {f'param %g: bf16[{depth}] = "g"' if g else ""}
      {f'param %c: bf16[{columns}] = "c"' if c else ""}
      %y = fused_linear(%x, %w, {"%c" if c else "_"}, {"%g" if g else "_"}, _{", %e" if e else ""}) \
{{norm="{norm}", eps=1e-5, gated={gated}, expr="{body}"}} : {dtype}[{rows}, {columns // (1 + gated)}]
      return %y
    }}"""
    graph = parse_graph("\n".join(line for line in text.splitlines() if line.strip()))
    shapes = {"w": (columns, depth), "g": (depth,), "c": (columns,)}
    params = {n: rng.normal(size=s).astype(bf16.numpy) for n, s in shapes.items()}
    kind = DTYPES[dtype].numpy
    inputs = [rng.normal(size=s).astype(kind) for s in [(rows, depth), *([(rows, columns)] if e else [])]]
    (got,) = executable(graph, params, make_device(device), wanted, loop).run(inputs, {})
    (want,) = interpret(graph, inputs, params, exact=True)
    want = want.astype(np.float64)
    assert (np.abs(got.astype(np.float64) - want) <= 0.01 * np.abs(want) + 0.002 * np.abs(want).max()).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "scores", "loop"), [(132, 8, "gated"), (130, 12, "pairs")])
def test_scores_behind_a_gated_product(width: int, scores: int, loop: str, device: str) -> None:
    """The choice is a launch of its own; results go four at a time where they are whole fours."""
    rows, depth, columns = 140, 136, 2 * width + scores
    rng = np.random.default_rng(0)
    graph = parse_graph(f"""graph g(%x: bf16[{rows}, {depth}]) {{
      param %w: bf16[{columns}, {depth}] = "w"
      %y, %s, %i = linear_route(%x, %w) {{scores={scores}, k=3, norm="none", eps=0.0, expr="swiglu(x0, x1)", \
score="softmax", normalize=True, groups=1, kept_groups=1, scale=1.0, gates=0}} : bf16[{rows}, {width}], \
f32[{rows}, 3], i64[{rows}, 3]
      return %y, %s, %i
    }}""")
    params = {"w": rng.normal(size=(columns, depth)).astype(bf16.numpy)}
    inputs = [rng.normal(size=(rows, depth)).astype(bf16.numpy)]
    made = executable(graph, params, make_device(device), constants(1, 96, 2), loop)
    y, share, ids = made.run(inputs, {})
    wanted = interpret(graph, inputs, params, exact=True)
    np.testing.assert_array_equal(ids, wanted[2])
    np.testing.assert_allclose(share, wanted[1].astype(np.float64), rtol=1e-3)
    want = wanted[0].astype(np.float64)
    assert (np.abs(y.astype(np.float64) - want) <= 0.01 * np.abs(want) + 0.002 * np.abs(want).max()).all()


HEADS = """graph g(%x: bf16[2, 70, 72], %p: i64[2, 70], %k: bf16[2, 2, 128, 64], %v: bf16[2, 2, 128, 64], \
%n: i64[2], %t: i32[2]) {
  param %w: bf16[384, 72] = "w"
  param %s: f32[256, 32] = "s"
  param %c: f32[256, 32] = "c"
  %q, %k1, %v1 = qkv_rope_cache(%x, %w, %p, %s, %c, %k, %v, %n, %t) {heads=2, kv_heads=2, algo="gpt_neox", \
norm="none", eps=0.0, qk_eps=0.0} : bf16[2, 70, 2, 64], bf16[2, 2, 128, 64], bf16[2, 2, 128, 64]
  return %q, %k1 -> %k, %v1 -> %v
}"""


def run_heads(device: str, lengths: list[int], valid: list[int], position: int) -> None:
    graph, rng = parse_graph(HEADS), np.random.default_rng(0)
    params = {"w": rng.normal(size=(384, 72)).astype(bf16.numpy)}
    params |= {n: rng.uniform(-1, 1, size=(256, 32)).astype(np.float32) for n in "sc"}
    x, caches = rng.normal(size=(2, 70, 72)).astype(bf16.numpy), rng.normal(size=(2, 2, 2, 128, 64)).astype(bf16.numpy)
    positions = rng.integers(0, 256, size=(2, 70))
    positions[1, 69] = position
    inputs = [x, positions, caches[0], caches[1], np.array(lengths), np.array(valid, np.int32)]
    wanted = interpret(graph, inputs, params, exact=True) if position < 256 and max(lengths) < 60 else []
    made = executable(graph, params, make_device(device), constants(1, 192, 2), "heads")
    before = caches.copy()
    try:
        got = made.run(inputs, {})
    except MonoplanError:
        np.testing.assert_array_equal(caches.view(np.uint16), before.view(np.uint16))
        raise
    for a, b in zip(got, wanted, strict=True):
        b = b.astype(np.float64)
        assert (np.abs(a.astype(np.float64) - b) <= 0.01 * np.abs(b) + 0.002 * np.abs(b).max()).all()


@pytest.mark.parametrize("device", DEVICES)
def test_heads(device: str) -> None:
    run_heads(device, [3, 40], [70, 20], 255)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "valid", "position", "said"),
    [([3, 60], [70, 70], 9, "cache"), ([3, 4], [70, 71], 9, "71"), ([3, 4], [70, 70], 256, "256")],
)
def test_wrong_rows_of_heads_are_refused(
    device: str, lengths: list[int], valid: list[int], position: int, said: str
) -> None:
    with pytest.raises(MonoplanError, match=said):
        run_heads(device, lengths, valid, position)


# rows, columns, depth, what comes behind: groups, columns, stages, splits; None: the library has it.
@pytest.mark.parametrize(
    ("shape", "kind", "tile"),
    [
        ((128, 2304, 768), "plain", (1, 64, 8, 1)),
        ((128, 3072, 768), "gelu", (1, 64, 8, 1)),
        ((128, 768, 768), "plain", (1, 64, 8, 1)),
        ((128, 768, 3072), "plain", (1, 64, 8, 4)),
        ((197, 2304, 768), "plain", (1, 128, 6, 1)),
        ((197, 3072, 768), "gelu", (1, 128, 6, 1)),
        ((197, 768, 3072), "plain", (1, 64, 8, 2)),
        ((4096, 3072, 768), "gelu", (2, 192, 5, 1)),
        ((4096, 3072, 768), "plain", None),
        ((2048, 16384, 2048), "gated", (2, 256, 4, 1)),
        (("n", 16384, 2048), "gated", (2, 256, 4, 1)),
        (("n", 28672, 4096), "gated", None),
        ((300, 768, 768), "plain", None),
        ((300, 3072, 768), "gelu", (1, 128, 6, 1)),
        (("n", 3072, 768), "gelu", (2, 192, 5, 1)),
        (("n", 4096, 4096), "plain", None),
    ],
)
def test_shapes(shape: tuple[int | str, int, int], kind: str, tile: tuple[int, ...] | None) -> None:
    rows, columns, depth = shape
    target = cuda_target(90, 132, 232448, library=True)
    body = {"plain": "x0", "gelu": "gelu(x0, approximate='none')", "gated": "swiglu(x0, x1)"}[kind]
    gated = kind == "gated"
    made = columns // (1 + gated)
    graph = parse_graph(f"""graph g(%x: bf16[{rows}, {depth}]) {{
      param %w: bf16[{columns}, {depth}] = "w"
      %y = fused_linear(%x, %w) {{norm="none", eps=1e-5, gated={gated}, expr="{body}"}} : bf16[{rows}, {made}]
      return %y
    }}""")
    ((step, _),) = make_plan(graph, target).steps()
    assert isinstance(step.schedule, CudaLinear)
    s = step.schedule.many
    assert tile == (s and (s.groups, s.columns, s.stages, s.splits))
    if s is not None:
        assert s.shared <= target.shared - 1024 and s.least == (513 if rows == "n" else 1)
