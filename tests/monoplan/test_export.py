"""Plans as C programs: what they compute, what they refuse, and how they build."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

import monoplan as mp
from monoplan.ir.errors import ArgumentError
from monoplan.models import LlamaForCausalLM
from monoplan.runtime.build.compilers import find_compiler, has_openmp
from tests.integration.support import small_config
from tests.modules import GPT2, MLP, Block, ViT
from tests.needs import needs

Array = np.ndarray[Any, Any]
STRICT = "-O3 -Wall -Wextra -Werror"
SANITIZED = "-g -O0 -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all"


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def words(batch: int, seq: int) -> dict[str, Array]:
    ids = np.random.default_rng(seq).integers(0, 61, (batch, seq))
    return {"ids": ids, "places": np.arange(seq, dtype=np.int64)}


# A module, specs, and arguments of odd sizes.
MODELS: dict[str, tuple[Any, dict[str, Any], list[dict[str, Array]]]] = {
    "block": (
        lambda: Block(72, 200),
        {"x": mp.spec("batch", "seq", 72)},
        [{"x": normal(1, 1, 72)}, {"x": normal(3, 7, 72)}],
    ),
    "gpt2": (
        lambda: GPT2(61, 48, 3),
        {"ids": mp.spec("batch", "seq", dtype="int64"), "places": mp.spec("seq", dtype="int64")},
        [words(1, 2), words(2, 13)],
    ),
    "mlp": (
        MLP,
        {"x": mp.spec("rows", 37), "scale": mp.spec("rows", 1)},
        [{"x": normal(n, 37), "scale": normal(n, 1)} for n in (1, 19)],
    ),
    "vit": (ViT, {"image": mp.spec("batch", 3, 21, 35)}, [{"image": normal(n, 3, 21, 35)} for n in (1, 3)]),
}


@functools.cache
def module(name: str) -> Any:
    return MODELS[name][0]()


def compiled(name: str) -> Any:
    return mp.compile(module(name), **MODELS[name][1], options={"threads": 2})


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def built(folder: Path, cflags: str = STRICT, **variables: str) -> None:
    command = find_compiler().command
    given = {"CC": " ".join(command), "OPENMP": "-fopenmp" if has_openmp(find_compiler()) else "", **variables}
    done = run(folder, "make", "-B", f"CFLAGS={cflags}", *(f"{k}={v}" for k, v in given.items()))
    assert done.returncode == 0, done.stderr


def called(folder: Path, arguments: dict[str, Array]) -> dict[str, Array]:
    """The outputs of main, by name."""
    given = []
    for name, a in arguments.items():
        a.tofile(folder / f"{name}.in")
        given.append(f"{name}={name}.in:{','.join(map(str, a.shape))}")
    done = run(folder, "./main", "-t", "2", "weights.bin", *given)
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        name, dtype, *sizes = line.split()
        shape = [int(n) for n in sizes[0].split(",")] if sizes else []
        found[name] = np.fromfile(folder / f"{name}.bin", {"f32": np.float32, "i64": np.int64}[dtype]).reshape(shape)
    return found


def assert_same(folder: Path, fast: Any, name: str, exact: bool = True) -> None:
    for arguments in MODELS[name][2]:
        want = fast(**arguments)
        leaves = want.values() if isinstance(want, dict) else want if isinstance(want, tuple) else [want]
        for got, wanted in zip(called(folder, arguments).values(), leaves, strict=True):
            assert got.shape == wanted.shape
            if exact:
                np.testing.assert_array_equal(got, wanted)
            else:
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_program_gives_the_bits_of_the_plan(name: str, tmp_path: Path) -> None:
    fast = compiled(name)
    fast.export(tmp_path)
    built(tmp_path)
    assert_same(tmp_path, fast, name)


def test_a_portable_program_gives_the_bits_of_a_portable_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled("gpt2").export(tmp_path, isa="generic")
    assert " -m" not in (tmp_path / "Makefile").read_text()
    built(tmp_path)
    monkeypatch.setenv("MONOPLAN_ISA", "generic")
    assert_same(tmp_path, compiled("gpt2"), "gpt2")


def test_a_language_model_goes_on_from_its_cache(tmp_path: Path) -> None:
    llm = mp.compile(LlamaForCausalLM.from_config(small_config(), seed=0), options={"threads": 2})
    llm.export(tmp_path, name="lm")
    ffi, library = loaded(tmp_path, "lm")
    plan = library.lm_create(str(tmp_path / "weights.bin").encode(), 2, ffi.NULL, 0)
    cache, ids = llm.new_cache(1, 16), np.array([[3, 1, 4]])
    state: dict[str, Array] = {}
    for _ in range(3):
        arguments = {**llm.step_arguments(ids), "past_key_values": cache.without_limit()}
        bound = llm.compiled._bind((), arguments)
        graph, arrays = bound[0].graph, bound[2]
        given = {v.name: np.array(state.get(v.name, a)) for v, a in zip(graph.inputs, arrays, strict=True)}
        code, outputs = call(ffi, library, plan, "lm", given)
        assert code == 0, ffi.string(library.lm_error(plan))
        want = llm.step(ids, cache)
        np.testing.assert_array_equal(outputs["logits"], want["logits"])
        state = {v.name: given[v.name] for v in graph.inputs if v.name.startswith("past_key_values")}
        ids = np.argmax(want["logits"], axis=-1)
    assert state["past_key_values.lengths"].tolist() == [5]
    code, _ = call(ffi, library, plan, "lm", {**given, "input_ids": np.array([[50]])})
    message = ffi.string(library.lm_error(plan)).decode()
    assert code == -1 and "index 50 at place 0 is out of range [0, 50)" in message
    library.lm_destroy(plan)


def loaded(folder: Path, name: str) -> tuple[FFI, Any]:
    """The plan as a library, by the declarations of its header."""
    flags = re.search(r"PLAN_FLAGS = (.*)", (folder / "Makefile").read_text())
    assert flags is not None
    openmp = ["-fopenmp"] if has_openmp(find_compiler()) else []
    options = ["-O3", *flags[1].split(), *openmp, "-shared", "-fPIC", "-o", f"{name}.so", f"{name}.c", "-lm"]
    done = run(folder, *find_compiler().command, *options)
    assert done.returncode == 0, done.stderr
    header = (folder / f"{name}.h").read_text()
    ffi = FFI()
    ffi.cdef(re.sub(r'(?m)^#.*$|^extern "C".*$|^\}$', "", header))
    return ffi, ffi.dlopen(str(folder / f"{name}.so"))


def call(ffi: FFI, library: Any, plan: Any, name: str, arrays: dict[str, Array]) -> tuple[int, dict[str, Array]]:
    """A run on arrays by name, in the reverse of the plan's order."""
    inputs = ffi.new(f"{name}_array[]", len(arrays))
    known = {ffi.string(a.name).decode(): a for i in range(len(arrays)) if (a := getattr(library, f"{name}_input")(i))}
    kept = []
    for a, (key, value) in zip(inputs, reversed(arrays.items()), strict=True):
        kept.append(ffi.new("char[]", key.encode()))
        a.name, a.dtype, a.rank = kept[-1], known[key].dtype, value.ndim
        a.shape[0 : value.ndim] = value.shape
        a.data = ffi.cast("void *", value.ctypes.data)
    count = next(i for i in range(99) if not getattr(library, f"{name}_output")(i))
    outputs = ffi.new(f"{name}_array[]", count)
    code = getattr(library, f"{name}_run")(plan, inputs, len(arrays), outputs)
    found = {}
    for a in outputs if code == 0 else ():
        shape = [a.shape[k] for k in range(a.rank)]
        if a.dtype == 1:
            data = np.frombuffer(ffi.buffer(a.data, 4 * int(np.prod(shape))), np.float32)
            found[ffi.string(a.name).decode()] = data.reshape(shape).copy()
    return code, found


def test_weights_and_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    compiled("mlp").export(tmp_path)
    compiled("block").export(tmp_path / "other")
    built(tmp_path, "-O1")
    good = (tmp_path / "weights.bin").read_bytes()
    damaged = bytearray(good)
    damaged[len(good) // 2] ^= 1
    cases = {
        good[:30]: "cut short: 30 bytes",
        b"": "cut short: 0 bytes",
        b"x" * len(good): "this is no file of weights",
        good[:-64]: f"have {len(good) - 64} bytes, not {len(good)}",
        good + bytes(1): f"have {len(good) + 1} bytes, not {len(good)}",
        bytes(damaged): "the weights are damaged",
        (tmp_path / "other" / "weights.bin").read_bytes(): "belong to another model",
    }
    for content, message in cases.items():
        (tmp_path / "bad.bin").write_bytes(content)
        refused(tmp_path, message, "bad.bin")
    refused(tmp_path, "can't be opened", "none.bin")
    scale = "scale=:5,1"
    refused(tmp_path, "takes 2 inputs, got 1", "weights.bin", scale)
    refused(tmp_path, "there is no input x", "weights.bin", scale, scale)
    refused(tmp_path, "size 36 of axis 1 must be 37", "weights.bin", scale, "x=:5,36")
    refused(tmp_path, "size 5 of axis 0 must be 4", "weights.bin", scale, "x=:4,37")
    refused(tmp_path, "has 1 dimensions, not 2", "weights.bin", scale, "x=:37")
    refused(tmp_path, "no rows of 1 or more", "weights.bin", "scale=:0,1", "x=:0,37")


def refused(folder: Path, message: str, *arguments: str) -> None:
    done = run(folder, "./main", *arguments)
    assert done.returncode == 1 and message in done.stderr, done.stderr


def test_sizes_that_an_op_can_not_take_are_refused(tmp_path: Path) -> None:
    compiled("gpt2").export(tmp_path)
    built(tmp_path, "-O1")
    refused(tmp_path, "these sizes do not fit", "weights.bin", "ids=:1,1", "places=:1")


def test_only_functions_of_the_header_are_seen_from_outside(tmp_path: Path) -> None:
    compiled("mlp").export(tmp_path, name="my_mlp")
    command = find_compiler().command
    assert run(tmp_path, *command, "-O1", "-c", "my_mlp.c", "-o", "plan.o").returncode == 0
    lines = run(tmp_path, "nm", "-g", "plan.o").stdout.splitlines()
    header = re.sub(r"/\*.*?\*/", "", (tmp_path / "my_mlp.h").read_text(), flags=re.DOTALL)
    seen = {line.split()[-1].lstrip("_") for line in lines if " U " not in line}
    assert seen == set(re.findall(r"\b(my_mlp_\w+)\(", header))


def test_what_can_not_be_exported_is_an_error(tmp_path: Path) -> None:
    fast = mp.compile(MLP(), mp.spec("rows", 37), mp.spec("rows", 1), target="reference")
    with pytest.raises(ArgumentError, match="only a plan for the CPU"):
        fast.export(tmp_path)
    for arguments, message in (
        ({"isa": "z80"}, "no instruction set 'z80'"),
        ({"name": "a b"}, "can't begin the names"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compiled("mlp").export(tmp_path, **arguments)


@needs("gcc", "clang", "g++")
@pytest.mark.parametrize("name", MODELS)
def test_sanitizers_and_other_compilers(name: str, tmp_path: Path) -> None:
    """With and without OpenMP, as C and as C++, and model.h from C++."""
    fast = compiled(name)
    for isa, compiler, flags, openmp in (
        (None, "gcc", SANITIZED, "-fopenmp"),
        ("generic", "gcc", STRICT, ""),
        ("generic", "clang", STRICT, ""),
    ):
        fast.export(tmp_path, isa=isa)
        built(tmp_path, flags, CC=compiler, OPENMP=openmp)
        assert_same(tmp_path, fast, name, exact=False)
    plain = run(tmp_path, "gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-c", "model.c")  # no other flags
    assert plain.returncode == 0, plain.stderr
    assert run(tmp_path, "gcc", "-O1", "-c", "main.c").returncode == 0
    for compiler in ("g++", "clang++"):
        for more in ([], ["-fopenmp"]) if compiler == "g++" else ([],):
            flags = ["-std=c++17", "-x", "c++", "-O1", "-Wall", "-Wextra", "-Werror", "-fopenmp-simd", *more]
            done = run(tmp_path, compiler, *flags, "-c", "model.c", "-o", "model.o")
            assert done.returncode == 0, done.stderr
            assert run(tmp_path, compiler, *more, "-o", "main", "main.o", "model.o", "-lm").returncode == 0
            assert_same(tmp_path, fast, name, exact=False)
    (tmp_path / "use.cpp").write_text('#include "model.h"\nint main() { return model_input(0) == nullptr; }\n')
    assert run(tmp_path, "g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-c", "use.cpp").returncode == 0
    done = run(tmp_path, "g++", "use.o", "model.o", "-o", "use", "-lm")
    assert done.returncode == 0 and run(tmp_path, "./use").returncode == 0, done.stderr


def test_cmake_builds_it(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    fast = compiled("mlp")
    fast.export(tmp_path, name="my_mlp")
    done = run(tmp_path, "sh", "-c", "cmake -B build && cmake --build build && cp build/main main")
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path, fast, "mlp", exact=False)
