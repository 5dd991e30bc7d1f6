"""compile() as users meet it: structures, sizes, errors and dumps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.tensor import Tensor, call
from monoplan.ir.errors import ArgumentError


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Block(Module):
    """A small linear layer with an activation."""

    def __init__(self, dim: int = 6, hidden: int = 4) -> None:
        super().__init__()
        self.weight = Parameter(normal(hidden, dim))

    def forward(self, x: Any) -> Any:
        return call("silu", call("linear", x, self.weight))


def eager(module: Module, *args: Any, **kwargs: Any) -> Any:
    return module(*(Tensor(a) if isinstance(a, np.ndarray) else a for a in args), **kwargs)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want.numpy() if isinstance(want, Tensor) else want, rtol=1e-5, atol=1e-5)


# -- structure --------------------------------------------------------------------------------------------------


class Nest(Module):
    """Results in a nest of dicts, lists and tuples, with leaves that are no tensors."""

    def forward(self, a: Any, parts: Any, scale: Any = 2.0, *, extra: Any = None) -> Any:
        b, (c, d) = parts["b"], parts["cd"]
        total = a * scale + b
        if extra is not None:
            total = total + extra
        rest = {"constant": "text", "number": 3, "input": a, "twice": total}
        return {"sum": total, "none": None, "pair": (c, [d, d]), **rest}


def test_results_have_the_structure_of_forward() -> None:
    fast = mp.compile(Nest())
    a, b, c, d = normal(2, 3), normal(3, seed=1), normal(seed=2), np.arange(4)
    got = fast(a, {"b": b, "cd": (c, d)})
    assert list(got) == ["sum", "none", "pair", "constant", "number", "input", "twice"]
    assert got["none"] is None and got["constant"] == "text" and got["number"] == 3
    close(got["sum"], a * 2 + b)
    close(got["twice"], a * 2 + b)
    assert isinstance(got["pair"], tuple) and isinstance(got["pair"][1], list)
    assert got["pair"][0].shape == () and got["pair"][0] == c
    np.testing.assert_array_equal(got["pair"][1][1], d)
    leaves = [got["sum"], got["twice"], got["input"], got["pair"][1][0], got["pair"][1][1]]
    assert all(isinstance(x, np.ndarray) for x in leaves)
    for i, x in enumerate(leaves):
        assert not any(np.shares_memory(x, y) for y in (*leaves[:i], a, b, d))


def test_constants_and_keywords_choose_their_plan() -> None:
    fast = mp.compile(Nest())
    a, parts = normal(2, 3), {"b": normal(3), "cd": (normal(2), normal(2))}
    close(fast(a, parts, 3.0)["sum"], a * 3 + parts["b"])
    close(fast(a, parts, 0.5)["sum"], a * 0.5 + parts["b"])
    close(fast(a, parts, scale=3.0, extra=a)["sum"], a * 4 + parts["b"])
    close(fast(a, parts, extra=None)["sum"], a * 2 + parts["b"])
    assert fast.stats.compiles == 4
    close(fast(a, parts, 3.0)["sum"], a * 3 + parts["b"])
    assert fast.stats.compiles == 4 and fast.stats.calls == 5


def test_many_values_of_a_plain_number_are_mentioned() -> None:
    class Scale(Module):
        def forward(self, x: Any, by: Any) -> Any:
            return x * by

    x = np.ones(3, np.float32)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fast = mp.compile(Scale(), target="reference")
        for i in range(9):
            fast(x, by=float(i))
        one = mp.compile(Scale(), target="reference")
        for i in range(9):
            one(x, by=np.array(i, np.float32))
    assert fast.stats.compiles == 9 and one.stats.compiles == 1
    (only,) = seen
    assert "Scale: 8 plans were made for values of by; an array" in str(only.message) and only.filename == __file__


def test_what_may_be_given_for_an_array() -> None:
    block = Block()
    fast = mp.compile(block, mp.spec("n", 6))
    x = normal(4, 6)
    want = eager(block, x)
    close(fast(x), want)
    close(fast(Tensor(x)), want)
    close(fast(x.tolist()), want)
    close(fast(np.asfortranarray(x)), want)
    close(fast(np.repeat(x, 2, axis=0)[::2]), want)
    close(fast(x.astype(">f4")), want)
    raw = np.zeros(x.nbytes + 1, np.uint8)
    raw[1:] = x.view(np.uint8).reshape(-1)
    close(fast(raw[1:].view(np.float32).reshape(4, 6)), want)  # not aligned
    read_only = x.copy()
    read_only.flags.writeable = False
    close(fast(read_only), want)
    assert fast.stats.compiles == 1


def test_an_array_given_as_a_spec_stands_for_its_type() -> None:
    block = Block()
    x = normal(4, 6)
    want = eager(block, x)
    for given in (x, Tensor(x), np.zeros((4, 6), ">f4"), np.asfortranarray(x)):
        fast = mp.compile(block, given)
        assert fast.ir("trace").startswith("graph Block(%x: f32[4, 6]") and fast.stats.compiles == 1
        close(fast(x), want)
        close(fast(x * 0), eager(block, x * 0))  # its values are no constants
    with pytest.raises(ArgumentError, match="argument x: expected f32"):
        fast(normal(5, 6))
    parts = {"b": normal(3), "cd": (mp.spec(2), normal(2))}
    nest = mp.compile(Nest(), mp.spec("n", 3), parts, 3.0)
    given = {"b": normal(3, seed=1), "cd": (normal(2), normal(2))}
    close(nest(normal(2, 3), given, 3.0)["sum"], normal(2, 3) * 3 + given["b"])
    with pytest.raises(ArgumentError, match="argument x: .*not an element type"):
        mp.compile(block, np.zeros((4, 6), complex))


def test_integer_powers_compiled_are_those_of_eager_mode() -> None:
    class Powers(Module):
        def forward(self, x: Any) -> Any:
            return x**0, x**1, x**2, x**3, x**10

    for dtype in ("int64", "int32", "int8"):
        x = np.array([-3, 0, 1, 2, 77, 3_000_001 % 128 if dtype == "int8" else 3_000_001], dtype)
        for got, want in zip(mp.compile(Powers(), mp.spec("n", dtype=dtype))(x), Powers()(x), strict=True):
            assert got.dtype == x.dtype and got.tolist() == want.tolist()
    assert mp.compile(Powers())(np.array([3_000_001]))[3].tolist() == [3_000_001**3 - (3_000_001**3 >> 64 << 64)]


def test_numbers_for_scalar_arguments() -> None:
    class Scale(Module):
        def forward(self, x: Any, by: Any) -> Any:
            return x * by

    fast = mp.compile(Scale(), mp.spec(3), mp.spec())
    x = normal(3)
    for by in (2.0, 2, np.float32(2), np.array(2, np.float32), True + 1):
        close(fast(x, by), x * 2)
    lazy = mp.compile(Scale())
    close(lazy(x, np.array(4, np.float32)), x * 4)
    assert lazy(np.float32(3).reshape(()), np.array(2, np.float32)).shape == ()


def test_memory_mapped_arrays(tmp_path: Path) -> None:
    block = Block()
    x = normal(4, 6)
    np.save(tmp_path / "x.npy", x)
    close(mp.compile(block)(np.load(tmp_path / "x.npy", mmap_mode="r")), eager(block, x))


# -- sizes ------------------------------------------------------------------------------------------------------


def test_a_lazy_plan_generalizes_the_sizes_that_change() -> None:
    block = Block()
    fast = mp.compile(block)
    for n, compiles in ((3, 1), (3, 1), (5, 2), (7, 2), (3, 2), (1, 2)):
        x = normal(2, n, 6, seed=n)
        close(fast(x), eager(block, x))
        assert fast.stats.compiles == compiles, n
    x = normal(4, 9, 6)
    close(fast(x), eager(block, x))
    assert fast.stats.compiles == 3
    close(fast(normal(5, 2, 6)), eager(block, normal(5, 2, 6)))
    assert fast.stats.compiles == 3
    with pytest.raises(TypeError, match="features"):
        fast(normal(2, 5))


@pytest.mark.parametrize("lazy", [True, False])
def test_empty_batches(lazy: bool) -> None:
    block = Block()
    fast = mp.compile(block) if lazy else mp.compile(block, mp.spec("batch", "seq", 6))
    for batch, seq in ((2, 3), (0, 3), (0, 5), (2, 0), (1, 1)):
        assert fast(np.zeros((batch, seq, 6), np.float32)).shape == (batch, seq, 4)


# -- errors -----------------------------------------------------------------------------------------------------

SPECS = (mp.spec("batch", "seq", 6),)
BAD_CALLS = [
    ((np.zeros((2, 6), np.float32),), r"argument x: expected f32\[batch, seq, 6\] \(rank 3\), got shape \[2, 6\]"),
    ((np.zeros((2, 3, 5), np.float32),), r"argument x: expected f32\[batch, seq, 6\], got size 5 at dimension 2"),
    ((np.zeros((2, 3, 6)),), r"argument x: expected f32\[batch, seq, 6\], got dtype float64"),
    ((np.zeros((2, 3, 6), object),), "argument x: expected .* got dtype object"),
    (("text",), "argument x: expected an array .* got str"),
    ((None,), r"argument x: expected an array f32\[batch, seq, 6\], got None"),
    (({"x": 1},), r"argument x: expected an array f32\[batch, seq, 6\], got a dict with x"),
    (([[1.0], [2.0, 3.0]],), r"argument x: expected f32\[batch, seq, 6\], got a list"),
    ((), "x"),
    ((np.zeros((2, 3, 6), np.float32),) * 2, "argument"),
]


@pytest.mark.parametrize(("args", "message"), BAD_CALLS, ids=[m[:24] for _, m in BAD_CALLS])
def test_bad_arguments_are_named(args: tuple[Any, ...], message: str) -> None:
    fast = mp.compile(Block(), *SPECS)
    with pytest.raises((ArgumentError, TypeError), match=message):
        fast(*args)
    assert fast(np.zeros((1, 1, 6), np.float32)).shape == (1, 1, 4)  # nothing is lost


def test_two_arguments_must_agree_in_their_symbols() -> None:
    class Add(Module):
        def forward(self, left: Any, right: Any) -> Any:
            return left + right

    fast = mp.compile(Add(), mp.spec("n"), mp.spec("n"))
    message = r"argument right: expected f32\[n\], got size 3 at dimension 0, not 2 \(n with n=2\)"
    with pytest.raises(ArgumentError, match=message):
        fast(normal(2), normal(3))


def test_bad_arguments_of_compile() -> None:
    with pytest.raises(ArgumentError, match=r"unknown target 'tpu'[\s\S]*cpu, cuda, reference"):
        mp.compile(Block(), target="tpu")
    with pytest.raises(ArgumentError, match=r"unknown options: fusion[\s\S]*fuse"):
        mp.compile(Block(), options={"fusion": True})
    with pytest.raises(ArgumentError, match="needs a monoplan.nn.Module, got function"):
        mp.compile(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no pass named 'nothing'"):
        mp.compile(Block(), *SPECS, options={"stop_after": "nothing"})
    with pytest.raises(ArgumentError, match="threads"):
        mp.compile(Block(), *SPECS, options={"threads": -1})
    with pytest.raises(ArgumentError, match="nothing is compiled yet"):
        mp.compile(Block()).source()
    with pytest.raises(ArgumentError, match=r"argument x: .*complex128.* is not an element type"):
        mp.compile(Block())(np.zeros((2, 6), complex))


# -- looking inside -----------------------------------------------------------------------------------------------


def test_inside(tmp_path: Path) -> None:
    fast = mp.compile(Block(), *SPECS)
    assert "linear(%x, %weight)" in fast.ir("trace") and fast.ir() and "test_api.py" in fast.ir("trace", locs=True)
    assert "mp_run_plan" in fast.source()
    assert "kernels" in str(fast.plan) and "arena" in str(fast.plan)
    with pytest.raises(ArgumentError, match="stages are: trace"):
        fast.ir("nonsense")
    for again in (fast, mp.compile(Block(), *SPECS)):  # the second from the cache
        folder = again.dump(tmp_path / str(again.stats.cache_hits))
        names = {p.name for p in folder.iterdir()}
        assert {"00_trace.ir", "kernels.txt", "plan.txt", "plan.c", "build.sh", "build.log"} <= names
        assert (folder / "plan.c").read_text() == again.source()
        assert "$ " in (folder / "build.log").read_text()


def test_a_dumped_folder_builds(tmp_path: Path) -> None:
    folder = mp.compile(Block(), *SPECS).dump(tmp_path)
    done = subprocess.run(["sh", str(folder / "build.sh")], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert (folder / "plan.so").stat().st_size > 0


def test_a_dump_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"can't write the dump to .*file[\s\S]*MONOPLAN_DUMP"):
        mp.compile(Block(), *SPECS, options={"dump": str(tmp_path / "file")})


_LIMITED = """
import resource, sys, warnings
import numpy as np
import monoplan as mp
from monoplan import nn
from monoplan.inspect.golden import Golden
from monoplan.models import LlamaForCausalLM
from tests.models.support import tiny_config

warnings.simplefilter("ignore")
fast, x = mp.compile(nn.Linear(64, 64), mp.spec("n", 64)), np.ones((2, 64), np.float32)
model = LlamaForCausalLM.from_config(tiny_config())
profile = fast.profile(x, repeat=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for name, write in {
    "dump": lambda: fast.dump("dump"), "report": lambda: fast.report("report.html"),
    "golden": lambda: Golden(__import__("pathlib").Path("golden")).record(fast.subject(x)),
    "trace": lambda: profile.save("trace.json"), "model": lambda: model.save_pretrained("model"),
}.items():
    try:
        write()
    except mp.MonoplanError as error:
        print(name, "|", str(error).replace(chr(10), "|"))
"""


def test_files_that_are_too_large_for_the_system(tmp_path: Path) -> None:
    """EFBIG, as `ulimit -f` gives it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # Python does not notice that the limit cuts those files short
    command = [sys.executable, "-c", _LIMITED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    for line in lines:
        assert re.match(r"(\w+) \| can't write the \1 to .*File too large.*to do: ", line), line


def test_a_second_dump_leaves_no_stages_of_the_first(tmp_path: Path) -> None:
    mp.compile(Block(), *SPECS).dump(tmp_path)
    (tmp_path / "07_other-pass.ir").write_text("of another graph")
    (tmp_path / "notes.ir").write_text("the user's own")
    mp.compile(Block(), *SPECS, options={"passes": ()}).dump(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("*.ir")) == ["00_trace.ir", "notes.ir"]


def test_target_reference() -> None:
    block = Block()
    slow = mp.compile(block, *SPECS, target="reference")
    x = normal(2, 3, 6)
    close(slow(x), eager(block, x))
    with pytest.raises(ArgumentError, match="reference"):
        slow.source()


def test_dtype_of_the_weights() -> None:
    block = Block()
    x = normal(2, 3, 6)
    fast = mp.compile(block, *SPECS, dtype="bfloat16")
    np.testing.assert_allclose(fast(x), eager(block, x).numpy(), rtol=0.05, atol=0.05)
    assert "bf16[4, 6]" in fast.ir("trace") and block.weight.dtype.name == "f32"


@pytest.mark.parametrize("dtype", ["int8", "bool", np.uint8, "fp4"])
def test_weights_are_not_cut_to_whole_numbers(dtype: Any) -> None:
    with pytest.raises(ArgumentError, match=r"dtype[\s\S]*use one of f64, f32, f16, bf16$"):
        mp.compile(Block(), *SPECS, dtype=dtype)
    with pytest.raises(ArgumentError, match="use one of f64, f32, f16, bf16$"):
        Block().to(dtype)


def test_imports_leave_the_collector_as_it_was() -> None:
    import gc

    from monoplan.ir.garbage import kept

    assert gc.isenabled() and not gc.get_freeze_count()
    with kept():
        assert not gc.isenabled()
    assert gc.isenabled() and not gc.get_freeze_count()
    gc.freeze()
    try:
        with kept():
            pass
        assert gc.get_freeze_count() > 0  # what the user froze stays so
        gc.disable()
        with kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
