"""Functions and Tensor methods that follow from the op registry: signatures, docs, numbers, and the stub."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import monoplan.nn.functional as F
from monoplan.frontend import op_functions
from monoplan.frontend.tensor import Tensor
from monoplan.ir.opdef import REGISTRY

STUB = Path(op_functions.__file__).with_suffix(".pyi")
NAMES = [o.name for o in REGISTRY.values() if o.kind in ("pointwise", "reduce")]


def test_the_stub_is_up_to_date() -> None:
    if os.environ.get("MONOPLAN_GOLDEN_UPDATE"):
        STUB.write_text(op_functions.stub(), encoding="utf-8")
    assert STUB.read_text(encoding="utf-8") == op_functions.stub(), "MONOPLAN_GOLDEN_UPDATE=1 writes it"


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_a_function_and_a_method(name: str) -> None:
    assert name in F.__all__ and callable(getattr(F, name)) and getattr(F, name).__doc__
    if name in ("cast", "integer_pow", "where"):
        return
    method = getattr(Tensor, op_functions.public_name(REGISTRY[name]))
    if name in op_functions.WRITTEN_OUT:
        assert method is getattr(F, name)
        return
    assert method.__doc__ == REGISTRY[name].doc and next(iter(inspect.signature(method).parameters)) == "self"


def test_functions_of_one_tensor_are_methods() -> None:
    x = Tensor([[3.0, 1.0], [2.0, 5.0]])
    assert x.tanh().shape == x.softmax(-1).shape == x.roll(1, 0).shape == x.tril().shape == (2, 2)
    assert x.var(1).tolist() == [2.0, 4.5] and x.cumprod(1).tolist() == [[3, 3], [2, 10]] and x.max().item() == 5
    assert x.topk(1, largest=False).values.tolist() == [[1], [2]] and x.flip(1).tolist() == [[1, 3], [5, 2]]
    with pytest.raises(AttributeError, match=r"a Tensor has no attribute 'linear': use F\.linear"):
        x.linear  # noqa: B018
    with pytest.raises(AttributeError, match="a Tensor has no attribute 'nothing'$"):
        x.nothing  # noqa: B018
    assert not hasattr(x, "__array_struct__")


def test_signatures() -> None:
    def shown(f: object) -> str:
        return op_functions.signature_text(inspect.signature(f))  # type: ignore[arg-type]

    assert shown(F.exp) == "(input: Any, *, out: Tensor | None = None) -> Tensor"
    assert shown(F.gelu) == '(input: Any, approximate: str = "none", *, out: Tensor | None = None) -> Tensor'
    assert shown(F.add) == "(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor"
    assert shown(F.sum) == "(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor"
    assert shown(Tensor.maximum) == "(self, other: Any) -> Tensor"
    with pytest.raises(TypeError, match=r"maximum\(self, /, other.*missing a required argument: 'other'"):
        Tensor([1.0]).maximum()  # type: ignore[call-arg]


def test_methods_compute_what_functions_do() -> None:
    x = Tensor([[0.5, -2.0], [3.0, 0.25]])
    assert np.array_equal(x.exp().numpy(), F.exp(x).numpy())
    assert np.array_equal(x.gelu("tanh").numpy(), F.gelu(x, approximate="tanh").numpy())
    assert np.array_equal(x.maximum(0).numpy(), np.maximum(x.numpy(), 0)) and x.maximum(0).dtype == x.dtype
    assert np.array_equal(x.amax(1).numpy(), x.numpy().max(1))
    assert x.sum(dtype="f64").dtype.name == "f64" and Tensor([1, 2]).mean().dtype.name == "f32"
    assert Tensor([2, 3]).pow(2).tolist() == [4, 9] and Tensor([1, 4]).sqrt().tolist() == [1.0, 2.0]


LATE = '''
import numpy as np
import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.tensor import Tensor
from monoplan.ir.rules import pointwise

@pointwise({"float": "({0} > 0 ? {0} : {slope} * {0})", "any": "({0} > 0 ? {0} : 0)"})
def leaky(x, *, slope: float = 0.5):
    """x, or slope * x where it is negative; integers have no slope."""
    return np.where(x > 0, x, x * slope if x.dtype.kind == "f" else 0)

class M(nn.Module):
    def forward(self, x, n):
        return F.leaky(x.exp() - 2, slope=0.25), (x - 1).leaky(), n.leaky()

x, n = np.linspace(-3, 3, 40, dtype=np.float32).reshape(5, 8), np.arange(-5, 5, dtype=np.int8)
fast = mp.compile(M())
for got, want in zip(fast(x, n), M()(x, n)):
    assert np.allclose(got, want.numpy(), atol=1e-6) and got.dtype == want.numpy().dtype
assert "MP_LET(float, mp_0, (mp_expf(x0[i]) - 2.0f), (mp_0 > 0 ? mp_0 : 0.25f * mp_0))" in fast.source(), fast.source()
'''


def test_an_op_that_is_defined_later(tmp_path: Path) -> None:
    """In a process of its own: the registry of this one is compared with the tests of all ops."""
    env = {**os.environ, "MONOPLAN_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-W", "error", "-c", LATE], check=True, env=env)
