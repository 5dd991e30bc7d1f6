"""The CUDA path from mp.compile to results, on the emulated device; with -m cuda on a GPU, with its own arrays."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cuda_target
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.tensor import call
from monoplan.ir.errors import ArgumentError, CompileError, PlanError
from monoplan.models.config import LlamaConfig
from monoplan.models.llama import LlamaForCausalLM
from monoplan.runtime.cuda import build as cuda_build
from monoplan.runtime.cuda import device as cuda_device
from monoplan.runtime.cuda import executable as cuda
from monoplan.runtime.cuda import tune as cuda_tune
from monoplan.runtime.cuda.weights import gated_rows
from tests.codegen import cuda_emulator
from tests.needs import needs

emulated = needs("g++")


@pytest.fixture(params=[pytest.param("emulator", marks=emulated), pytest.param("gpu", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "gpu":
        yield cuda_device.gpu()
        return
    made = cuda_emulator.EmulatedDevice(library=True)
    monkeypatch.setattr(cuda, "gpu", lambda: made)
    yield made


class Block(Module):
    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.w = Parameter(rng.normal(size=(40, 24)).astype(np.float32))
        self.g = Parameter(rng.normal(size=24).astype(np.float32))

    def forward(self, x: Any) -> Any:
        y = call("linear", call("rms_norm", x, self.g), self.w)
        return {"y": call("silu", y) + 1.0, "sum": y.sum(dim=-1)}


def test_a_module_compiles_and_runs_at_any_size(device: Any) -> None:
    module = Block()
    fast = mp.compile(module, mp.spec("batch", "seq", 24), target="cuda")
    for shape in ((2, 3, 24), (1, 1, 24), (3, 30, 24), (2, 3, 24), (2, 3, 24)):
        x = np.random.default_rng(shape[1]).normal(size=shape).astype(np.float32)
        got, want = fast(x), module(mp.nn.Tensor(x) if hasattr(mp.nn, "Tensor") else x)
        for name, t in want.items():
            np.testing.assert_allclose(got[name], t.numpy(), rtol=2e-5, atol=2e-5)
    assert "__global__" in fast.source() and "linear" in str(fast.plan)


def small_lm(dtype: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=300,
        max_position_embeddings=64,
        attention_bias=False,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    return LlamaForCausalLM.from_config(config, seed=1)


def test_generation_equals_the_eager_models(device: Any) -> None:
    lm = small_lm("float32")
    compiled = mp.compile(lm, target="cuda")
    assert compiled.generate_ids([1, 2, 3], 6) == lm.generate_ids([1, 2, 3], 6)
    settings = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 5, "repetition_penalty": 1.2}
    assert compiled.generate_ids([1, 2, 3], 5, **settings) == lm.generate_ids([1, 2, 3], 5, **settings)


def test_the_numpy_cache_holds_what_the_device_wrote(device: Any) -> None:
    lm = small_lm("bfloat16")
    compiled, cache = mp.compile(lm, target="cuda"), None
    cache = compiled.new_cache(1, 16)
    compiled(np.array([[5, 6, 7]]), past_key_values=cache)
    compiled(np.array([[8]]), past_key_values=cache)
    other = compiled.new_cache(1, 16)
    compiled(np.array([[5, 6, 7, 8]]), past_key_values=other)
    for a, b in zip((*cache.k, *cache.v), (*other.k, *other.v), strict=True):
        x, y = a.numpy().astype(np.float32), b.numpy().astype(np.float32)
        assert np.abs(x[:, :, :4]).max() > 0 and not x[:, :, 4:].any()
        np.testing.assert_allclose(x, y, rtol=0.05, atol=0.02)


def test_bad_arguments_are_reported_as_on_the_cpu(device: Any) -> None:
    compiled = mp.compile(small_lm("float32"), target="cuda")
    with pytest.raises(ArgumentError, match=r"index 900 at position \[0, 1\] is out of range \[0, 300\)"):
        compiled(np.array([[1, 900]]))
    cache = compiled.new_cache(1, 16)
    with pytest.raises(ArgumentError, match="index 900"):
        compiled(np.array([[1, 900]]), past_key_values=cache)
    assert not any(t.numpy().any() for t in (*cache.k, *cache.v))  # no row was written
    assert np.isfinite(compiled(np.array([[1, 2]]))).all()  # the record is empty again


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("cupy"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    cuda_device.gpu.cache_clear()
    with pytest.raises(CompileError, match=r"CuPy") as caught:
        mp.compile(Block(), mp.spec(2, 24), target="cuda")
    assert "[cuda]'" in str(caught.value) and "pip install '" in str(caught.value)


class FakeCupy:
    """As much of CuPy as a device asks for before its first kernel."""

    class OutOfMemoryError(Exception):
        pass

    def __init__(self, capability: tuple[int, int] = (9, 0), trouble: str = "") -> None:
        error = type("CUDARuntimeError", (Exception,), {})

        def ask(number: int, device: int) -> int:
            if trouble:
                raise error(trouble)
            return {75: capability[0], 76: capability[1], 16: 132, 97: 232448}[number]

        def refuse(nbytes: int) -> None:
            raise self.OutOfMemoryError

        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=error,
                deviceGetAttribute=ask,
                getDeviceProperties=lambda n: {"name": b"Old GPU"},
                memGetInfo=lambda: (3_000_000_000, 80_000_000_000),
                free=lambda pointer: None,
            ),
            Device=lambda n=0: SimpleNamespace(id=n, use=lambda: None),
            Stream=lambda **options: contextlib.nullcontext(),
            memory=SimpleNamespace(OutOfMemoryError=self.OutOfMemoryError),
            alloc=refuse,
        )


def test_trouble_with_the_gpu_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {
        "no GPU can be used.*cudaErrorNoDevice.*monoplan doctor": FakeCupy(trouble="cudaErrorNoDevice"),
        "too old: Old GPU has compute capability 7.0.*7.5 .Turing..*target='cpu'": FakeCupy((7, 0)),
    }
    for message, fake in fakes.items():
        monkeypatch.setattr(cuda_device, "import_cupy", lambda fake=fake: fake)
        with pytest.raises(CompileError, match=f"(?s){message}"):
            cuda_device.GpuDevice()


def test_too_little_memory_is_explained() -> None:
    device = cuda_device.GpuDevice.__new__(cuda_device.GpuDevice)
    device.cupy = FakeCupy()
    device.runtime, device.number, device.stream = device.cupy.cuda.runtime, 0, contextlib.nullcontext()
    with pytest.raises(PlanError, match=r"(?s)no 5\.00 GB are left on GPU 0.*3\.00 of its 80\.00 GB are free.*smaller"):
        device.allocate(5_000_000_000)


def test_packed_cubins() -> None:
    parts = [b"abc", b"", b"0123456789"]
    assert cuda_build.unpack(cuda_build.pack(parts)) == parts
    assert cuda_build.unpack(b"\x7fELF rest") == [b"\x7fELF rest"]


def test_architectures_with_special_instructions() -> None:
    assert "--gpu-architecture=sm_90a" in cuda_build.options(cuda_target(90, 132, 232448))
    assert "--gpu-architecture=sm_75" in cuda_build.options(cuda_target(75, 40, 65536))


def test_gate_and_up_become_neighbours() -> None:
    assert gated_rows(8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_tunings_are_kept_by_device_and_source(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path))
    key = cuda_tune.tuning_key("H200", "source")
    cuda_tune.facts.remember("cuda-tuning", key, {"steps": {"5": {"ring": 3}}})
    assert cuda_tune.recall_tuning("H200", "source") == {"5": {"ring": 3}}
    assert cuda_tune.recall_tuning("H200", "other source") is None


def _tuner(layers: int = 1) -> cuda_tune.Tuner:
    """Of a small model, with an executable that can't run."""
    c = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=False,
        dtype="bfloat16",
    )
    built = mp.compile(LlamaForCausalLM.from_config(c), target="reference").prepare().compiled.built[0][2]
    plan = make_plan(built.stages[-1].graph, cuda_target(90, 132, 227 << 10, True))
    source = render_cuda(plan, "test")
    return cuda_tune.Tuner(SimpleNamespace(plan=plan, source=source, variants=source.variants), lambda: 1.0)


def test_a_search_begins_with_the_untuned_constants() -> None:
    """Padding included; and trying another padding of attention leaves all but its decode kernels alone."""
    tuner = _tuner()
    executable, source = tuner.executable, tuner.executable.source
    rows = {n: s.schedule.row for n, s in tuner.steps.items()}
    assert len(rows) == 5 and any(row.pad for row in rows.values())
    for n, row in rows.items():
        start, *others = tuner.pool(n)
        assert start["pad"] == row.pad and len({tuple(c.items()) for c in others}) == len(others) <= cuda_tune.EACH
        near = [c for c in others if (c["warps"], c["slices"], c["batch"]) == (row.warps, row.slices, row.batch)]
        assert {c["late"] for c in near} == {0, *(c["ring"] for c in near)}
    ((number, start),) = tuner.attention.items()
    assert start == {"pad": 0}
    tuner.use({number: {"pad": 4096}})
    before, after = source.variants[number], executable.variants[number]
    changed = {a.name for a, b in zip(after, before, strict=True) if a != b}
    assert changed == {"decode"}
    assert all(a.actions[0].shared == 4096 for a in after if a.name in changed)


@pytest.mark.parametrize("gain", [0.01, 0.0])
def test_a_search_keeps_what_is_better(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product likes one of its candidates, and padding is too much beside another; or nothing is better."""
    tuner = _tuner()
    monkeypatch.setattr(tuner, "build", lambda n, c: None)
    monkeypatch.setattr(tuner, "use", lambda tuning: None)
    liked: dict[int, dict[str, int]] = {}

    def time(tuning: Any) -> float:
        for n, pool in tuner.pools.items():
            liked.setdefault(n, pool[7])
        if any(tuning[n].get("pad") and all(tuning[n][k] == v for k, v in c.items()) for n, c in liked.items()):
            return float("inf")
        return 1.0 - gain * sum(all(tuning[n][k] == v for k, v in c.items()) for n, c in liked.items())

    monkeypatch.setattr(tuner, "time", time)
    first = {n: tuner.pool(n)[0] for n in tuner.steps}
    tuner.random.seed(0)
    found = tuner.run(0.5)
    if not gain:
        assert all(found[n] == c for n, c in first.items())
    for n, c in liked.items() if gain else ():
        assert found[n] == {**c, "pad": 0}
        assert c in [{k: v for k, v in kept.items() if k != "pad"} for kept in tuner.pools[n]]
        assert len(tuner.pools[n]) <= 1 + cuda_tune.BEST


def test_products_of_the_same_shape_are_tuned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's products are steps of their own; q, k and v are not like others of their size."""
    tuner = _tuner(layers=4)
    monkeypatch.setattr(tuner, "build", lambda n, c: None)
    monkeypatch.setattr(tuner, "time", lambda tuning: 1.0)
    monkeypatch.setattr(tuner, "use", lambda tuning: None)
    assert sorted(map(len, tuner.alike.values())) == [1, 2, 2, 2, 2] and len(tuner.steps) == 9
    found = tuner.run(0.1)
    assert found.keys() == tuner.steps.keys() | tuner.attention.keys()
    for n, others in tuner.alike.items():
        kernels = [tuner.steps[other].kernel for other in others]
        assert all(found[other] == found[n] for other in others) and len({k.epilogue for k in kernels}) == 1


def test_a_model_is_tuned(device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The text stays the same, and another process finds the constants; other targets say that they have none."""
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_tune, "EACH", 1)
    if isinstance(device, cuda_emulator.EmulatedDevice):  # which can't build a kernel by itself: nothing is searched
        other = lambda self, seconds: {n: {**self.pool(n)[0], "late": 2} for n in self.steps} | self.attention  # noqa: E731
        monkeypatch.setattr(cuda_tune.Tuner, "run", other)
    c = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        attention_bias=False,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM.from_config(c)
    llm = mp.compile(model, target="cuda")
    text = llm.generate_ids([1, 2, 3], 6, eos_token_id=())
    before, after = llm.tune(seconds=0.1, context=20)
    assert before >= 0 and after >= 0  # the emulator has no clock
    assert llm.generate_ids([1, 2, 3], 6, eos_token_id=()) == text
    executable = llm._plan("greedy").built[0][2].executable
    found = cuda_tune.recall_tuning(executable.device.name, executable.untuned)
    assert found is not None and len(found) == 6  # five products and attention
    assert mp.compile(model, target="cuda").generate_ids([1, 2, 3], 6, eos_token_id=()) == text
    with pytest.raises(ArgumentError, match="context must be 1 to 63"):
        llm.tune(context=64)
    with pytest.raises(ArgumentError, match="tune needs target='cuda'"):
        mp.compile(model).tune()


@pytest.mark.cuda
def test_device_arrays_go_in_and_out() -> None:
    cupy = pytest.importorskip("cupy")
    module = Block()
    fast = mp.compile(module, mp.spec("batch", 24), target="cuda")
    x = cupy.random.standard_normal((5, 24), dtype=cupy.float32)
    outs, again = fast(x), fast(cupy.asnumpy(x))
    assert all(isinstance(o, cupy.ndarray) for o in outs.values())
    for name, a in outs.items():
        np.testing.assert_array_equal(cupy.asnumpy(a), again[name])
