"""What can't be traced: each error names the file, the line, the module path, and says what to do."""

from __future__ import annotations

import linecache
from typing import Any

import numpy as np
import pytest

import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.context import current
from monoplan.frontend.specs import spec
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import ArgumentError, MonoplanError, TraceError, TypeRuleError
from monoplan.ir.graph import Loc


class Inner(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn
        self.register_buffer("count", np.zeros(3, np.float32))

    def forward(self, x: Any) -> Any:
        return self.fn(self, x)


class Outer(nn.Module):
    """Calls a function two modules down, at layers.1.body."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.Sequential({"body": Inner(fn)})])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def branch(m: Any, x: Any) -> Any:
    if x.sum() > 0:  # HERE
        return x
    return -x


def loop(m: Any, x: Any) -> Any:
    while x.max() < 10:  # HERE
        x = x * 2
    return x


class Strange(Exception):  # noqa: N818  (as a user may name it)
    pass


def fails() -> None:
    raise Strange  # HERE


CASES: list[tuple[str, Any, str, str]] = [
    ("if", branch, "control flow depends on the value of a traced tensor", "F.where"),
    ("while", loop, "control flow depends on the value", "F.where"),
    ("item", lambda m, x: x.sum().item(), ".item() was called on a traced tensor", "as an argument"),  # HERE
    ("tolist", lambda m, x: x.tolist(), ".tolist() was called", "as an argument"),  # HERE
    ("float", lambda m, x: x * float(x.max()), "float() was called on a traced tensor", "as an argument"),  # HERE
    ("int", lambda m, x: x[: int(x.max())], "int() was called", "as an argument"),  # HERE
    ("range", lambda m, x: [x for _ in range(x.max())], "use as an index or a count was called", "argument"),  # HERE
    ("ufunc", lambda m, x: np.exp(x), "numpy.exp was called on a traced tensor", "monoplan.nn.functional"),  # HERE
    ("function", lambda m, x: np.concatenate([x, x]), "numpy.concatenate was called", "monoplan.nn.functional"),  # HERE
    ("sum", lambda m, x: np.sum(x), "numpy.sum was called", "monoplan.nn.functional"),  # HERE
    ("asarray", lambda m, x: np.asarray(x), "it can't become a numpy array", "outside of forward"),  # HERE
    ("numpy", lambda m, x: x.numpy(), "it can't become a numpy array", "outside of forward"),  # HERE
    ("compare", lambda m, x: x if x.shape[0] > 4 else -x, "`n > 4` is not decided", "fixed number in the spec"),  # HERE
    ("equal", lambda m, x: x if x.shape[0] == 4 else -x, "`n == 4` is not decided", "fixed number"),  # HERE
    ("iterate", lambda m, x: [r for r in x], "`n` is a size that is known only at the call", "fixed number"),  # HERE
    ("len", lambda m, x: x * len(x), "`n` is a size that is known only at the call", "x * x.shape[0]"),  # HERE
    ("count", lambda m, x: [x for _ in range(x.shape[0] + 1)], "`n+1` is a size that is known", "loop over"),  # HERE
    ("setitem", lambda m, x: x.__setitem__(0, 1.0), "can't be changed by index", "F.index_put"),  # HERE
    ("type", lambda m, x: x @ F.ones(5, 2), "matmul: f32[n, 3] has 3 columns", ""),  # HERE
    ("attribute", lambda m, x: x.cuda(), "AttributeError: a Tensor has no attribute 'cuda'", ""),  # HERE
    ("missing argument", lambda m, x: nn.Linear(3, 3)(), "TypeError", ""),  # HERE
    ("division", lambda m, x: x * (1 / 0), "ZeroDivisionError", ""),  # HERE
    ("name", lambda m, x: x * undefined_name, "NameError: name 'undefined_name' is not defined", ""),  # noqa: F821  HERE
    ("key", lambda m, x: {}["a"], "KeyError: 'a'", ""),  # HERE
    ("index", lambda m, x: [][1], "IndexError: list index out of range", ""),  # HERE
    ("file", lambda m, x: open("/no/such/file"), "FileNotFoundError", ""),  # HERE
    ("own error", lambda m, x: fails(), "failed while it was traced: Strange", ""),
    ("state", lambda m, x: m.count.assign(m.count + 1), "reads and then overwrites a tensor", "an argument"),  # HERE
    ("stale", lambda m, x: [F.silu(x[:, 0], inplace=True), x + 1][1], "a view that shares its", "inplace="),  # HERE
]


def named(error: MonoplanError) -> tuple[str, str]:
    """The module path that an error names, and the text of the line, which is one of this file."""
    where = error.where
    assert isinstance(where, Loc) and where.file == __file__
    return where.path, linecache.getline(where.file, where.line)


@pytest.mark.parametrize(("fn", "message", "fix"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_errors_name_everything(fn: Any, message: str, fix: str) -> None:
    with pytest.raises(MonoplanError) as caught:
        trace(Outer(fn), spec("n", 3))
    error = caught.value
    assert message in error.what and fix in error.fix, str(error)
    path, line = named(error)
    assert path == "layers.1.body" and "HERE" in line, f"{error.where}"
    for part in (message, fix, __file__, "layers.1.body"):
        assert part in str(error)
    assert current() is None


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((spec(1), spec(2)), {}, "too many positional arguments"),
        ((spec(1),), {"y": spec(2)}, "unexpected keyword argument 'y'"),
    ],
)
def test_wrong_number_of_arguments(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=r"Outer.forward\(x") as caught:
        trace(Outer(branch), *args, **kwargs)
    assert message in caught.value.what and caught.value.fix
    assert "def forward" in named(caught.value)[1]


def test_what_is_not_a_module() -> None:
    with pytest.raises(TraceError, match="trace needs a Module, got function"):
        trace(branch)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="another trace is running"):
        trace(Outer(lambda m, x: trace(nn.Identity(), spec(1))), spec(3))


def test_a_traced_tensor_outlives_its_trace() -> None:
    kept: list[Any] = []
    trace(Outer(lambda m, x: kept.append(x * 2) or x), spec(3))
    with pytest.raises(TraceError, match="used after its trace had ended") as caught:
        kept[0] + 1
    assert "test_tracer_errors.py" in str(caught.value.where)


@pytest.mark.parametrize("use", [lambda x, last: x + last, lambda x, last: F.cat([last, x])])
def test_a_tensor_of_another_trace(use: Any) -> None:
    kept: list[Any] = []
    first = Outer(lambda m, x: kept.append(x * 2) or x)
    trace(first, spec(3))
    with pytest.raises(TraceError, match=r"a tensor f32\[3\] belongs to another trace") as caught:
        trace(Outer(lambda m, x: use(x, kept[0])), spec(3))
    path, line = named(caught.value)
    assert path == "layers.1.body" and "lambda x, last" in line
    assert "pass them as arguments" in caught.value.fix
    with pytest.raises(TraceError, match="belongs to another trace") as caught:
        trace(Outer(lambda m, x: kept[0]), spec(3))
    assert "test_tracer_errors.py" in str(caught.value.where)


def test_the_cause_of_an_error_stays_and_exits_pass() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Outer(lambda m, x: {}["a"]), spec(3))
    assert isinstance(caught.value.__cause__, KeyError)

    def leaves(error: type[BaseException]) -> Any:
        def forward(m: Any, x: Any) -> Any:
            raise error

        return forward

    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            trace(Outer(leaves(error)), spec(3))
        assert current() is None


def test_replaced_buffers_are_put_back() -> None:
    def replace(m: Any, x: Any) -> Any:
        m.count = m.count + x
        return x

    net = Outer(replace)
    before = net.layers[1].body.count
    with pytest.raises(TraceError, match="forward replaced count of Inner") as caught:
        trace(net, spec(3))
    assert "as an argument" in caught.value.fix and net.layers[1].body.count is before


def test_state_is_refused_and_left_alone() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = nn.KVCache(1, 1, 1, 2, capacity=4)

        def forward(self, x: Any) -> Any:
            return self.cache.update(0, x, x)[0]

    net = Keeps()
    with pytest.raises(TraceError, match="reads and then overwrites a tensor that it keeps between calls"):
        trace(net, spec(1, 2, 1, 2))
    assert not net.cache.k[0].is_traced and not net.cache.k[0].numpy().any()
    net(np.ones((1, 2, 1, 2), np.float32))  # and it still works eagerly
    assert net.cache.k[0].numpy()[0, 0, 1, 0] == 1


def test_constant_arguments_are_not_written() -> None:
    state = Tensor(np.zeros(3, np.float32))

    class Adds(nn.Module):
        def forward(self, x: Any, total: Any) -> Any:
            return F.add(total, x, out=total)

    with pytest.raises(TraceError, match="reads and then overwrites"):
        trace(Adds(), spec(3), state)
    assert state.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda d: d.update(new=d["x"] + 1), "changed the structure of an argument"),
        (lambda d: [d.pop("x"), None][1], "changed the structure"),
        (lambda d: d.update(x=3), "replaced the argument args.0.x by a int"),
        (lambda d: d.update(x=F.cat([d["x"], d["x"]])), r"args.0.x: f32\[3\] by f32\[6\]"),
        (lambda d: F.silu(d["x"].view(1, 3), inplace=True), "a view that shares its storage"),
    ],
)
def test_arguments_that_change_too_much(fn: Any, message: str) -> None:
    class Call(nn.Module):
        def forward(self, *args: Any) -> Any:
            return fn(*args)

    with pytest.raises(TraceError, match=message) as caught:
        trace(Call(), {"x": spec(3)})
    assert "test_tracer_errors.py" in str(caught.value.where)


def test_errors_leave_nothing_behind() -> None:
    net = Outer(lambda m, x: [F.exp(x, out=m.count), x.item()])
    with pytest.raises(TraceError, match="item"):
        trace(net, spec(3))
    assert net.layers[1].body.count.tolist() == [0, 0, 0] and current() is None
    with pytest.raises(TypeRuleError):
        trace(Outer(lambda m, x: x + Tensor([1.0, 2.0])), spec(3))
