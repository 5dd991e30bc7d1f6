"""The registry: every op has a doc, a rule and a reference, and completes its operands and attributes."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest

from monoplan.ir import ops
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.opdef import REGISTRY, REQUIRED, op
from monoplan.ir.types import TensorType, f32
from tests.ir.support import run

HERE = Path(__file__).parent


def _same(x: TensorType) -> TensorType:
    return x


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_op_is_complete(name: str) -> None:
    opdef = REGISTRY[name]
    assert opdef.name == name and callable(opdef.rule) and callable(opdef.reference) and opdef.kind
    first = opdef.doc.splitlines()[0]
    assert first.endswith(".") or first.endswith("…"), f"the first line of the doc is a sentence: {first!r}"
    assert len(first) <= 110
    taken = inspect.signature(opdef.reference).parameters
    assert set(opdef.operand_names) | set(opdef.attr_defaults) <= set(taken)
    assert set(opdef.optional) <= set(opdef.operand_names)
    assert set(opdef.inplace.values()) <= set(opdef.operand_names)
    assert all(v is REQUIRED or not isinstance(v, list | dict) for v in opdef.attr_defaults.values())


def test_every_op_is_tested() -> None:
    """Each op's name stands as a string in a test beside this one: run("add", …)."""
    words: set[str] = set()
    for path in HERE.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    run_by_name = {n for n in REGISTRY if n in words}
    assert set(REGISTRY) - run_by_name - {"repeat_layers"} == set()


def test_attributes_are_completed_in_order() -> None:
    softmax = REGISTRY["softmax"]
    assert softmax.complete_attrs({}) == {"axis": -1}
    full = REGISTRY["sum"].complete_attrs({"keepdims": np.bool_(True), "axes": [np.int64(1)]})
    assert list(full.items()) == [("axes", (1,)), ("keepdims", True)] and type(full["axes"][0]) is int
    with pytest.raises(TypeRuleError, match="unknown attributes dim"):
        softmax.complete_attrs({"dim": 1})
    with pytest.raises(TypeRuleError, match="attributes dtype are required"):
        REGISTRY["cast"].complete_attrs({})


def test_operands_are_completed() -> None:
    attention = REGISTRY["attention"]
    full, rest = attention.complete_operands([1, 2, 3], {"past": 4, "causal": True})
    assert full == [1, 2, 3, None, 4, None, None] and rest == {"causal": True}
    assert (
        attention.signature() == "(q, k, v, mask?, past?, table?, sinks?)" and REGISTRY["concat"].signature() == "(*xs)"
    )
    with pytest.raises(TypeRuleError, match="operand v is missing"):
        attention.check_operands([1, 2, None, None, None, None, None])
    with pytest.raises(TypeRuleError, match="got 8 operands"):
        attention.check_operands([1] * 8)
    assert repr(REGISTRY["add"]) == "<op add(a, b)>"


def test_definitions_are_checked() -> None:
    with pytest.raises(ValueError, match="needs a one-line doc"):

        @op(_same, "pointwise")
        def undocumented(x):  # type: ignore[no-untyped-def]
            return x

    with pytest.raises(ValueError, match="exp: defined twice"):

        @op(_same, "pointwise")
        def exp(x):  # type: ignore[no-untyped-def]
            """Again."""
            return x

    assert "undocumented" not in REGISTRY


def test_half_floats_are_rounded_once() -> None:
    big = np.array([200.0, 250.0], np.float16)
    # 200² and 250² overflow nothing in f32; their mean is 51 250.
    assert run("mean", big * big / 2).dtype == np.float16
    assert run("rms_norm", np.array([300.0, 400.0], np.float16), eps=0.0).tolist() == [0.8486328125, 1.1318359375]


def test_all_families_are_listed() -> None:
    files = {p.stem for p in Path(ops.__file__).parent.glob("*.py")} - {"__init__"}
    assert files <= set(ops.__all__) and f32 is not None


def test_pointwise_ops_have_their_c() -> None:
    with pytest.raises(ValueError, match="needs its C expression"):

        @op(_same, "pointwise")
        def no_expression(x):  # type: ignore[no-untyped-def]
            """Nothing."""

    with pytest.raises(ValueError, match="p: complex is not a type of attributes"):

        @op(_same, "pointwise", c="{0}")
        def strange(x, *, p: complex):  # type: ignore[no-untyped-def]
            """Nothing."""

    assert "no_expression" not in REGISTRY and "strange" not in REGISTRY
