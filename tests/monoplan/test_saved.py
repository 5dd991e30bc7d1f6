"""Plans as files: what loads, from whom, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.ir.errors import ArgumentError, CompileError, LoadError, MonoplanError
from monoplan.models import LlamaForCausalLM
from monoplan.runtime.build import compilers
from monoplan.runtime.cpu import plan_file
from monoplan.runtime.cpu.plan_file import PlanFile
from monoplan.saved import _SavedExecutable
from monoplan.serve.engine import Engine
from monoplan.serve.request import Sampling
from tests.integration.support import small_config
from tests.modules import GPT2, MLP, Block, ViT
from tests.needs import default_model, needs

Array = np.ndarray[Any, Any]
BLOCK = mp.spec("batch", "seq", 48)


def block() -> tuple[mp.Compiled, Array]:
    fast = mp.compile(Block(48, 80), BLOCK)
    return fast, np.random.default_rng(0).standard_normal((2, 5, 48), np.float32)


def is_mapped(fast: Any) -> bool:
    """Whether the code of the file runs, and nothing was built."""
    return isinstance(fast.built[0][2].executable, _SavedExecutable)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """From its call on this is another user's process, whose cache knows nothing."""

    def leave() -> None:
        (tmp_path / "other").mkdir(mode=0o700, exist_ok=True)
        monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "other"))

    return leave


def test_a_saved_plan_gives_the_same_bits_however_it_is_loaded(tmp_path: Path, stranger: Callable[[], None]) -> None:
    fast, x = block()
    path, expected = fast.save(tmp_path / "block.mpz"), fast(x)
    trusted, known = mp.load(path, trust=True), mp.load(path)
    assert is_mapped(trusted) and is_mapped(known)
    stranger()
    rebuilt = mp.load(path)
    assert not is_mapped(rebuilt)
    for loaded in (trusted, known, rebuilt):
        assert np.array_equal(loaded(x), expected) and np.array_equal(loaded(x[:1, :3]), fast(x[:1, :3]))
        assert loaded.verify(x).ok
        with pytest.raises(ArgumentError, match="expected f32"):
            loaded(x.astype(np.float64))
    assert repr(trusted) == "<Compiled Block for cpu, 1 plans>"


def test_structures_constants_and_several_plans_come_back(tmp_path: Path, stranger: Callable[[], None]) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, pair: dict[str, Any], scale: float = 2.0, *, twice: bool = False) -> dict[str, Any]:
            y = self.linear(pair["x"]) * scale
            return {"sum": y + pair["bias"], "rest": [y * 2 if twice else y, None, (pair["x"], 7)]}

    fast = mp.compile(Mixed())
    pair = {"x": np.ones((2, 5), np.float32), "bias": np.arange(3, dtype=np.float32)}
    calls: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"twice": True}]
    expected = [fast(pair, **call) for call in calls]
    path = fast.save(tmp_path / "mixed.mpz")
    stranger()
    for loaded in (mp.load(path, trust=True), mp.load(path)):
        for call, wanted in zip(calls, expected, strict=True):
            got = loaded(pair, **call)
            assert list(got) == ["sum", "rest"] and np.array_equal(got["sum"], wanted["sum"])
            assert np.array_equal(got["rest"][0], wanted["rest"][0])
            assert got["rest"][1] is None and got["rest"][2][1] == 7 and type(got["rest"][2]) is tuple
        with pytest.raises(ArgumentError, match="plans for certain arguments only"):
            loaded({"x": np.ones((3, 5), np.float32), "bias": pair["bias"]}, scale=0.25)
        with pytest.raises(ArgumentError, match="scales"):
            loaded(pair, scales=3.0)


def test_pickle_and_copy_go_through_the_same_file(stranger: Callable[[], None]) -> None:
    fast, x = block()
    data = pickle.dumps(fast)
    for made in (pickle.loads(data), copy.copy(fast), copy.deepcopy(fast)):
        assert is_mapped(made) and np.array_equal(made(x), fast(x))
    stranger()
    other = pickle.loads(data)
    assert not is_mapped(other) and np.array_equal(other(x), fast(x))
    with pytest.raises(ArgumentError, match="nothing is compiled yet"):
        pickle.dumps(mp.compile(Block(48, 80)))


def test_a_loaded_plan_can_be_looked_at_saved_and_exported(tmp_path: Path) -> None:
    fast, x = block()
    loaded = mp.load(fast.save(tmp_path / "a.mpz"), trust=True)
    assert loaded.source() == fast.source() and str(loaded.plan) == str(fast.plan)
    assert loaded.ir().startswith("graph Block") and loaded.explain() and loaded.profile(x)
    assert (loaded.dump(tmp_path / "dump") / "plan.c").is_file()
    again = mp.load(loaded.save(tmp_path / "b.mpz"), trust=True)
    assert np.array_equal(again(x), fast(x))
    assert (loaded.export(tmp_path / "c") / "model.c").is_file()
    assert (mp.load(tmp_path / "b.mpz", trust=True).export(tmp_path / "d", isa="generic") / "model.c").is_file()


def test_another_instruction_set_rebuilds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [
        mp.compile(GPT2(31, 24, 3), ids := mp.spec("b", "t", dtype="int64"), ids),
        mp.compile(MLP(), mp.spec("n", 37), mp.spec(11)),
        mp.compile(ViT(), mp.spec("batch", 3, 21, 35)),
    ]
    rng = np.random.default_rng(1)
    ids, places = rng.integers(0, 31, (2, 7)), np.tile(np.arange(7), (2, 1))
    row, image = rng.standard_normal((3, 37), np.float32), rng.standard_normal((2, 3, 21, 35), np.float32)
    calls: list[tuple[Any, ...]] = [(ids, places), (row, np.ones(11, np.float32)), (image,)]
    for number, (fast, call) in enumerate(zip(models, calls, strict=True)):
        path = fast.save(tmp_path / f"{number}.mpz")
        with monkeypatch.context() as patch:
            patch.setenv("MONOPLAN_ISA", "scalar")
            loaded = mp.load(path, trust=True)
            assert not is_mapped(loaded) and "f32x" not in loaded.source() and loaded.verify(*call).ok


def test_without_a_compiler_only_trust_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: Callable[[], None]
) -> None:
    fast, x = block()
    path = fast.save(tmp_path / "block.mpz")
    stranger()

    def missing() -> Any:
        raise CompileError("no C compiler was found", fix="install one")

    monkeypatch.setattr(compilers, "find_compiler", missing)
    assert np.array_equal(mp.load(path, trust=True)(x), fast(x))
    with pytest.raises(CompileError, match="no C compiler") as caught:
        mp.load(path)
    assert "trust=True" in caught.value.fix
    monkeypatch.setenv("MONOPLAN_ISA", "scalar")
    with pytest.raises(CompileError, match="no C compiler") as caught:
        mp.load(path, trust=True)
    assert "trust=True" not in caught.value.fix and "scalar" in caught.value.why


_LOAD = """
import sys
import monoplan as mp
fast = mp.load(sys.argv[1], trust=True)
if hasattr(fast, "generate_ids"):
    print(fast.generate_ids([1, 2, 3], 4))
else:
    import numpy as np
    print(float(fast(np.ones((1, 2, 48), np.float32)).sum()))
heavy = "jinja2 cffi pycparser subprocess monoplan.frontend.tracer monoplan.frontend.functional monoplan.models.llama"
heavy += " monoplan.driver monoplan.passes.pipeline monoplan.codegen.plan monoplan.codegen.cpu.render"
print([name for name in heavy.split() if name in sys.modules])
"""


@pytest.mark.parametrize("kind", ["module", "model"])
def test_loading_needs_no_compiler_no_templates_and_no_tracing(kind: str, tmp_path: Path) -> None:
    fast: Any
    if kind == "module":
        fast = block()[0]
        expected = str(float(fast(np.ones((1, 2, 48), np.float32)).sum()))
    else:
        fast = mp.compile(LlamaForCausalLM.from_config(small_config(2), seed=1))
        expected = str(fast.generate_ids([1, 2, 3], 4))
    path = fast.save(tmp_path / "plan.mpz")
    empty = tmp_path / "cache"
    empty.mkdir(mode=0o700)
    environ = {**os.environ, "PATH": "/nonexistent", "MONOPLAN_CACHE_DIR": str(empty)}
    environ.pop("CC", None)
    done = subprocess.run([sys.executable, "-c", _LOAD, str(path)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [expected, "[]"]


def test_language_models_come_back_whole(tmp_path: Path, stranger: Callable[[], None]) -> None:
    lm = mp.compile(
        LlamaForCausalLM.from_config(small_config(2, eos_token_id=(3, 4), tie_word_embeddings=True), seed=1)
    )
    ids = np.array([[1, 2, 3]])
    expected = lm.generate_ids([5, 6, 7], 12)
    sampled = lm.generate_ids([5, 6, 7], 12, temperature=0.9, top_p=0.9, seed=3)
    path = lm.save(tmp_path / "lm.mpz")
    loaded: Any
    everything = lm(ids, all_logits=True)
    more = lm.save(tmp_path / "more.mpz")
    stranger()
    for loaded in (mp.load(path, trust=True), mp.load(path), pickle.loads(pickle.dumps(lm)), copy.copy(lm)):
        assert isinstance(loaded, mp.CompiledLM) and loaded.config == lm.config and loaded.dtype == lm.dtype
        assert loaded.generate_ids([5, 6, 7], 12) == expected and loaded.tokenizer is None
        assert loaded.generate_ids([5, 6, 7], 12, temperature=0.9, top_p=0.9, seed=3) == sampled
        assert loaded.num_parameters == lm.num_parameters and loaded.bytes_per_token == lm.bytes_per_token
    with pytest.raises(ArgumentError, match="no plan for this"):
        mp.load(path, trust=True)(ids, all_logits=True)
    both: Any = mp.load(more, trust=True)
    assert np.array_equal(both(ids, all_logits=True), everything)


@needs("model")
@pytest.mark.full
def test_the_default_model_keeps_tokenizer_and_template(tmp_path: Path, stranger: Callable[[], None]) -> None:
    from monoplan.models import AutoModel

    source = default_model()
    assert source is not None
    lm = mp.compile(AutoModel.from_pretrained(source))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    expected = [list(lm.generate("Once upon", 8)), lm.tokenizer.chat(chat)]
    path = lm.save(tmp_path / "lm.mpz")
    stranger()
    for loaded in (mp.load(path, trust=True), mp.load(path)):
        assert isinstance(loaded, mp.CompiledLM)
        assert [list(loaded.generate("Once upon", 8)), loaded.tokenizer.chat(chat)] == expected
        assert loaded.tokenizer.eos_ids == lm.tokenizer.eos_ids and loaded.tokenizer.bos_id == lm.tokenizer.bos_id


class Pair(NamedTuple):
    one: Any
    two: Any


def test_what_a_file_can_t_hold_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Named(nn.Module):
        def forward(self, x: Any) -> Any:
            return Pair(x, x + 1)

    x = np.ones(3, np.float32)
    named = mp.compile(Named())
    named(x)
    with pytest.raises(ArgumentError, match="class Pair can't be saved"):
        named.save(tmp_path / "a.mpz")
    with pytest.raises(ArgumentError, match="only a plan for the CPU"):
        mp.compile(Block(48, 80), BLOCK, target="reference").save(tmp_path / "b.mpz")
    with pytest.raises(ArgumentError, match="nothing is compiled yet"):
        mp.compile(Block(48, 80)).save(tmp_path / "c.mpz")
    fast, _ = block()
    source = fast.dump(tmp_path / "dump") / "plan.c"
    source.write_text(source.read_text("utf-8") + "\n/* edited */\n", "utf-8")
    with pytest.raises(ArgumentError, match="edited source"):
        mp.compile(Block(48, 80), BLOCK, source=source).save(tmp_path / "d.mpz")
    with pytest.raises(ArgumentError, match="can't write"):
        fast.save(tmp_path / "none" / "e.mpz")
    assert not list(tmp_path.glob("*.mpz")) and not list(tmp_path.glob(".*"))


# -- hostile files ---------------------------------------------------------------------------------------------------


def parts_of(path: Path) -> tuple[dict[str, Any], dict[str, bytes], list[Array]]:
    """What a file was written from."""
    file = PlanFile.open(path, mapped=False)
    members = {name: file.member(name) for name in file._members if name not in ("sums", "weights")}
    return file.about, members, file.arrays(quickly=False)


@pytest.mark.parametrize("trust", [True, False])
def test_damage_is_found_in_every_part(trust: bool, tmp_path: Path) -> None:
    fast, x = block()
    path = fast.save(tmp_path / "block.mpz")
    data, file = path.read_bytes(), PlanFile.open(path, mapped=False)
    places = {"head": (0, 56), "table": (plan_file.HEAD, file._begin // 2)}
    places |= {name: (file._begin + at, n) for name, (at, n, _) in file._members.items()}
    length = int.from_bytes(data[16:24], "little")
    places["table"] = (plan_file.HEAD, length)
    broken = tmp_path / "broken.mpz"
    for name, (at, count) in places.items():
        for place in (at, at + count // 2, at + count - 1):
            changed = bytearray(data)
            changed[place] ^= 0x10
            broken.write_bytes(changed)
            try:
                loaded = mp.load(broken, trust=trust)
                loaded.source(), loaded.explain()
            except LoadError:
                continue
            unread = ("0.ir",) if trust else ("0.ir", "sums")  # by plans that are trusted, or known
            assert name in unread, f"{name} at {place}"
    for cut in (0, 1, 40, 63, 64, 200, len(data) // 2, len(data) - 1, len(data) - 4096):
        broken.write_bytes(data[:cut])
        with pytest.raises(LoadError, match="saved plan"):
            mp.load(broken, trust=trust)
    broken.write_bytes(data + bytes(64))
    with pytest.raises(LoadError, match="cut, or was changed"):
        mp.load(broken, trust=trust)
    with pytest.raises(LoadError):
        mp.load(tmp_path, trust=trust)
    with pytest.raises(LoadError, match="can't read"):
        mp.load(tmp_path / "absent.mpz", trust=trust)
    assert np.array_equal(mp.load(path, trust=trust)(x), fast(x))


def _table(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another table, of which the digest is right."""
    length = int.from_bytes(data[16:24], "little")
    table = json.loads(data[64 : 64 + length])
    begin = -(-(64 + length) // 16384) * 16384
    change(table)
    text = json.dumps(table).encode()
    head = data[:16] + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + bytes(8)
    return head + text + bytes(-(64 + len(text)) % 16384) + data[begin:]


_CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a huge member": lambda t: t["members"].update(weights=[t["members"]["weights"][0], 2**62, "0"]),
    "a negative place": lambda t: t["members"]["0.ir"].__setitem__(0, -64),
    "a huge array": lambda t: t["arrays"][0].__setitem__(2, [2**40, 2**40]),
    "a negative shape": lambda t: t["arrays"][0].__setitem__(2, [-1, -48]),
    "another dtype": lambda t: t["arrays"][0].__setitem__(1, "object"),
    "a smaller array": lambda t: t["arrays"][-1].__setitem__(2, [1]),
    "a path as a name": lambda t: t["members"].update({"../../x": t["members"].pop("0.ir")}),
    "no members": lambda t: t.update(members={}),
    "no plan": lambda t: t["about"]["module"].update(plans=[]),
    "fewer arguments": lambda t: t["about"]["module"]["plans"][0].update(leaves=[]),
    "another type": lambda t: t["about"]["module"]["plans"][0].update(leaves=[{"type": "f32[batch, seq, 4800]"}]),
    "more results": lambda t: t["about"]["module"]["plans"][0]["results"].update(kind="tuple", keys=[0], children=[{}]),
    "another class": lambda t: t["about"]["module"].update({"class": "os; import sys"}),
    "weights of others": lambda t: [p.__setitem__(1, 0) for p in t["about"]["module"]["plans"][0]["params"]],
    "fewer weights": lambda t: t["about"]["module"]["plans"][0]["params"].pop(),
    "an array that is not there": lambda t: t["about"]["module"]["plans"][0]["params"][0].__setitem__(1, 99),
    "a layout of huge panels": lambda t: [
        p.__setitem__(2, ["f32", 2**40, 1, "plain", 0]) for p in t["about"]["module"]["plans"][0]["params"]
    ],
    "an unknown format": lambda t: [
        p.__setitem__(2, ["f31", 16, 1, "plain", 0]) for p in t["about"]["module"]["plans"][0]["params"]
    ],
    "deep structures": lambda t: t["about"]["module"]["plans"][0].update(results=_deep(40)),
}


def _deep(n: int) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": "leaf", "keys": [], "children": [], "meta": None}
    for _ in range(n):
        found = {"kind": "tuple", "keys": [0], "children": [found], "meta": None}
    return found


@pytest.mark.parametrize("what", _CHANGES)
def test_hostile_tables_are_refused(what: str, tmp_path: Path) -> None:
    path = block()[0].save(tmp_path / "block.mpz")
    broken = tmp_path / "broken.mpz"
    broken.write_bytes(_table(path.read_bytes(), _CHANGES[what]))
    with pytest.raises(MonoplanError):
        mp.load(broken)
    assert not list(tmp_path.parent.glob("x"))


def test_the_code_of_a_stranger_never_runs(tmp_path: Path, stranger: Callable[[], None]) -> None:
    fast, x = block()
    about, members, arrays = parts_of(fast.save(tmp_path / "block.mpz"))
    # Neither the library, nor the records of a plan, nor cffi's tables are looked at.
    members |= {"0.so": b"\x7fELF", "0.plan": b"[]", "0.call": b"[]", "cffi": b"__import__('os')"}
    plan_file.write(tmp_path / "other.mpz", about, members, arrays)
    stranger()
    assert np.array_equal(mp.load(tmp_path / "other.mpz")(x), fast(x))
    with pytest.raises((CompileError, LoadError)):
        mp.load(tmp_path / "other.mpz", trust=True)


def test_weights_of_another_model_are_refused(tmp_path: Path, stranger: Callable[[], None]) -> None:
    about, members, _ = parts_of(block()[0].save(tmp_path / "a.mpz"))
    _, _, arrays = parts_of(mp.compile(Block(48, 96), BLOCK).save(tmp_path / "b.mpz"))
    plan_file.write(tmp_path / "c.mpz", about, members, arrays)
    stranger()
    with pytest.raises(LoadError, match="does not fit its type"):
        mp.load(tmp_path / "c.mpz")


ALL = [pytest.param(t, marks=pytest.mark.full) for t in ("float32", "bfloat16", "float16", "q4_0", "q4_k")]


@pytest.mark.parametrize("dtype", ["q8_0", *ALL])
def test_weights_of_all_formats_are_packed_again(dtype: str, tmp_path: Path, stranger: Callable[[], None]) -> None:
    config = small_config(1, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256)
    lm = mp.compile(LlamaForCausalLM.from_config(config, seed=2), dtype=dtype)
    expected = lm(np.array([[1, 2, 3]]))
    path = lm.save(tmp_path / "lm.mpz")
    stranger()
    loaded: Any = mp.load(path)
    assert np.array_equal(loaded(np.array([[1, 2, 3]])), expected)


def test_a_saved_model_guesses_and_serves(tmp_path: Path) -> None:
    lm = mp.compile(LlamaForCausalLM.from_config(small_config(2), seed=1))
    prompt = [1, 2, 3] * 6
    want = lm.generate_ids(prompt, 12, eos_token_id=())
    for _ in (text := lm.generate(prompt, 12, lookup=True, eos_token_id=())):
        pass
    lm.paged_plan()
    loaded = mp.load(lm.save(tmp_path / "lm.mpz"))
    for _ in (again := loaded.generate(prompt, 12, lookup=True, eos_token_id=())):
        pass
    assert again.result.ids == text.result.ids == want
    pieces: list[Any] = []
    with Engine(loaded, streams=2) as engine:
        engine.submit(prompt, Sampling(12), pieces.append)
    assert [p.token.token for p in pieces] == want
    with pytest.raises(ArgumentError, match="takes no adapters"):
        loaded.load_adapter("a", tmp_path)


def test_schedules_can_be_kept() -> None:
    from monoplan.codegen.cpu import schedule_attention, schedule_conv, schedule_linear
    from monoplan.plan_cache import classes

    modules = (schedule_attention, schedule_conv, schedule_linear)
    made = {x for m in modules for n, x in vars(m).items() if n.endswith("Schedule") and x.__module__ == m.__name__}
    assert len(made) > 3 and made <= set(classes())
