"""Generated C under the address, undefined and thread sanitizers, in every instruction set of this machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import monoplan as mp
from monoplan.driver import build_graph_executable
from monoplan.ir.types import DTYPES
from monoplan.models import LlamaForCausalLM
from monoplan.runtime.build.compilers import find_compiler
from monoplan.runtime.machine.features import levels, machine, read_cpu
from tests.codegen.cases import CASES, SIZES
from tests.codegen.sanitizers import KINDS, compile_watched, recording, run_watched
from tests.codegen.test_ops import arrays_of, graph_of
from tests.integration.blocks import CONTEXT, VOCAB, Gpt2Block
from tests.models.support import tiny_config
from tests.modules import Block, ViT

THREADS = (1, 2, 3)
# Sanitizers do not see what tile instructions read and write: emulated tiles stand for those of amx.
ISAS = [isa for isa in (*levels(machine(), read_cpu()[1]), "tiles") if isa != "amx"]


def block(dtype: str) -> None:
    fast = mp.compile(Block(40, 72).to(dtype), mp.spec("batch", "seq", 40))
    rng = np.random.default_rng(0)
    for batch, seq in ((1, 1), (2, 7), (1, 67), (3, 45)):
        fast(rng.normal(size=(batch, seq, 40)).astype(np.float32))


def gpt2(dtype: str) -> None:
    made = Gpt2Block(dtype)
    fast = mp.compile(made, *made.specs(dtype))
    rng = np.random.default_rng(1)
    for batch, seq in ((1, 1), (3, 5), (2, CONTEXT - 1)):
        fast(rng.integers(0, VOCAB, (batch, seq)))


def vit(dtype: str) -> None:
    fast = mp.compile(ViT().to(dtype), mp.spec("batch", 3, 21, 35))
    for batch in (1, 3):
        fast(np.random.default_rng(batch).normal(size=(batch, 3, 21, 35)).astype(np.float32))


def llama(dtype: str) -> None:
    model = LlamaForCausalLM.from_config(tiny_config(dtype=dtype), seed=2)
    lm = mp.compile(model)
    lm.generate_ids([3, 4, 5, 6, 7], 2, eos_token_id=())
    lm.generate_ids([7], 2, eos_token_id=(), temperature=0.8, top_p=0.9, top_k=7, repetition_penalty=1.2)
    lm.generate_ids(list(range(2, 39)), 1, eos_token_id=())


def ops(dtype: str) -> None:
    """Every op: reductions, softmax, sorting, scans, gathers, sampling, products, views."""
    cases = [c for c in CASES if c.accepts(DTYPES[dtype])]
    graph, _ = graph_of(cases, dtype)
    run = build_graph_executable(graph, arrays_of(cases, dtype, SIZES[0], param=True))
    for sizes in SIZES:
        run(list(arrays_of(cases, dtype, sizes, param=False).values()))


PLANS: dict[str, tuple[Callable[[str], None], str]] = {
    "block": (block, "f32"),
    "block_bf16": (block, "bf16"),
    "gpt2": (gpt2, "f32"),
    "vit": (vit, "f32"),
    "llama_f32": (llama, "float32"),
    "llama_bf16": (llama, "bfloat16"),
    "ops": (ops, "f32"),
    "ops_bf16": (ops, "bf16"),
    "ops_i32": (ops, "i32"),
}


def missing(kind: str) -> str:
    """Why the compiler can't build programs with a sanitizer, if it can't."""
    command = [*find_compiler().command, *KINDS[kind], "-x", "c", "-", "-o", "/dev/null"]
    done = subprocess.run(command, input="int main(void) { return 0; }", capture_output=True, text=True)
    return done.stderr[:200] if done.returncode else ""


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    if why := missing(request.param):
        pytest.skip(f"no {request.param} sanitizer: {why}")
    return str(request.param)


@pytest.mark.nightly
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PLANS)
def test_plans_are_clean(name: str, isa: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_ISA", isa)
    make, dtype = PLANS[name]
    with recording() as plans:
        make(dtype)
    assert plans and all(recorded.calls for recorded in plans)
    for number, recorded in enumerate(plans):
        program = compile_watched(recorded.executable, tmp_path / str(number), kind)
        results = run_watched(program, recorded, THREADS)
        wanted = [call for call in recorded.calls for _ in THREADS]
        for call, (code, outputs) in zip(wanted, results, strict=True):
            assert code == 0
            for got, want in zip(outputs, call.outputs, strict=True):
                # The compiler vectorizes otherwise where it adds checks; a wrong element is off by more than that.
                exact = got.dtype.kind not in "fV"
                got, want = (a if exact else a.astype(np.float32) for a in (got, want))
                np.testing.assert_allclose(got, want, rtol=0 if exact else 2e-2, atol=0 if exact else 2e-2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind_of_bug", "bug", "report"),
    [
        ("address", "((volatile char *)out[0])[1 << 20] = 1;", "AddressSanitizer"),
        ("address", "volatile int m = 40; m = 1 << m;", "runtime error"),
        ("thread", "++*(volatile int *)out[0];", "ThreadSanitizer: data race"),
    ],
)
def test_bugs_are_found(kind_of_bug: str, bug: str, report: str, tmp_path: Path) -> None:
    if why := missing(kind_of_bug):
        pytest.skip(why)
    with recording() as plans:
        block("f32")
    executable = plans[0].executable
    text, count = re.subn(r"(?m)^(    char \*const arena .*)$", rf"\1\n    {bug}", executable.text)
    assert count == 1
    program = compile_watched(executable, tmp_path, kind_of_bug, text)
    with pytest.raises(AssertionError, match=report):
        run_watched(program, plans[0], THREADS)
