"""monoplan.ir.lazy_dataclass beside the standard dataclass: what can be told of a class must be alike."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
import threading
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import monoplan
from monoplan.ir import lazy_dataclass

MAKERS = {"standard": dataclasses.dataclass, "lazy": lazy_dataclass.dataclass}
FLAGS = [
    {}, {"frozen": True}, {"slots": True}, {"frozen": True, "slots": True}, {"eq": False}, {"repr": False},
    {"frozen": True, "eq": False}, {"kw_only": True}, {"frozen": True, "slots": True, "kw_only": True},
]  # fmt: skip


def classes(maker: Any, **flags: Any) -> tuple[type, type]:
    @maker(**flags)
    class Base:
        a: int
        b: str = field(default="b", compare=False)
        c: list[int] = field(default_factory=list, repr=False, hash=False)
        d: int = field(init=False, default=4)

    @maker(**flags)
    class Inner(Base):
        """Its text."""

        e: float = 0.5
        f: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "f", self.a + 1)

    return Base, Inner


def told(action: Any) -> Any:
    """A result, or the class and the words of the error."""
    try:
        return action()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
@pytest.mark.parametrize("which", [0, 1])
def test_the_same_can_be_told_as_of_the_standard_class(flags, which):
    found = {}
    for name, maker in MAKERS.items():
        cls = classes(maker, **flags)[which]
        one = cls(a=1)
        same, other = dataclasses.replace(one), cls(a=2, b="x", c=[3])
        found[name] = [
            [(f.name, f.default, f.init, f.kw_only) for f in dataclasses.fields(cls)],
            dataclasses.asdict(other),
            cls.__match_args__,
            (one == same, one == other, one != other, one == 1, one == one),
            told(lambda: hash(one) == hash(same)),  # noqa: B023
            one.c is cls(a=1).c,  # noqa: B023
            told(lambda: cls()),  # noqa: B023
            told(lambda: cls(1, 2, 3, 4, 5, 6)),  # noqa: B023
            told(lambda: cls(a=1, z=2)),  # noqa: B023
            told(lambda: setattr(one, "a", 7)),  # noqa: B023
            told(lambda: delattr(cls(a=1), "b")),  # noqa: B023
            repr(one) if flags.get("repr", True) else "",
            copy.copy(other).c is other.c,
            copy.deepcopy(other).c,
            hasattr(one, "__dict__"),
        ]
    assert found["lazy"] == found["standard"]


def test_what_a_class_defines_itself_stays():
    @lazy_dataclass.dataclass(frozen=True)
    class Own:
        a: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

        def __hash__(self) -> int:
            return 5

        @cached_property
        def double(self) -> int:
            return 2 * self.a

    assert Own(1) == 3 and repr(Own(1)) == "own" and hash(Own(2)) == 5 and Own(4).double == 8


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("makers", [("lazy", "standard"), ("standard", "lazy")])
def test_classes_of_both_kinds_inherit_from_each_other(makers, frozen):
    outer, inner = (MAKERS[name](frozen=frozen) for name in makers)

    @outer
    class Base:
        a: int

    @inner
    class Inner(Base):
        b: int = 2

    one = Inner(1)
    assert (one, repr(one)) == (Inner(1, 2), f"{Inner.__qualname__}(a=1, b=2)") and Base(1) != one
    assert Base.__dataclass_params__.frozen is Inner.__dataclass_params__.frozen is frozen
    for value in (one, Base(1)):
        if frozen:
            with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
                value.a = 3
        else:
            value.a = 3
            assert value.a == 3


def test_a_value_that_holds_itself_can_be_shown():
    @lazy_dataclass.dataclass
    class Node:
        next: Any = None

    node = Node()
    node.next = node
    assert repr(node) == f"{Node.__qualname__}(next=...)"


@lazy_dataclass.dataclass(frozen=True, slots=True)
class Kept:
    a: int
    b: tuple[int, ...] = ()


def test_values_are_pickled():
    assert pickle.loads(pickle.dumps(Kept(1, (2,)))) == Kept(1, (2,))


def test_threads_make_first_instances_at_once():
    for _ in range(50):

        @lazy_dataclass.dataclass(frozen=True)
        class New:
            a: int

        begin, made = threading.Barrier(4), []

        def work(cls: Any = New, begin: Any = begin, made: list[Any] = made) -> None:
            begin.wait()
            made.append(cls(3))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [New(3)] * 4


def test_importing_the_package_compiles_hardly_any_method():
    count = """if True:
        import dataclasses
        made, compile_method = [], dataclasses._create_fn
        dataclasses._create_fn = lambda name, *a, **k: made.append(name) or compile_method(name, *a, **k)
        import monoplan.codegen.kernels, monoplan.codegen.plan, monoplan.ir.graph, monoplan.runtime.cpu.executable
        print(len(made))
    """
    if not hasattr(dataclasses, "_create_fn"):
        pytest.skip("this Python compiles the methods of a class at once")
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60


def test_the_package_uses_it():
    root = Path(monoplan.__file__).resolve().parents[1]
    folders = ("codegen", "frontend", "ir", "models", "monoplan", "passes", "runtime")
    standard = re.compile(r"^from dataclasses import .*\bdataclass\b|^ *@dataclasses\.dataclass", re.M)
    files = [path for folder in folders for path in (root / folder).rglob("*.py") if path.name != "lazy_dataclass.py"]
    found = [path for path in files if standard.search(path.read_text("utf-8"))]
    texts = {path.name: path.read_text("utf-8") for path in found}
    # Configurations of models have an InitVar, and users read their signature.
    configurations = re.compile(r"^class (Llama|.*\(.*)Config\b", re.M)
    assert [name for name, text in texts.items() if not configurations.search(text)] == []


def test_a_class_with_an_initvar_is_refused():
    with pytest.raises(TypeError, match="Half: a class with an InitVar takes the standard dataclass"):

        @lazy_dataclass.dataclass
        class Half:
            a: dataclasses.InitVar[int]
