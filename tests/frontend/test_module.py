"""Module: registration, names like PyTorch's, loading, printing."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from monoplan import nn
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import bf16, f16, f32


class Block(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.register_buffer("steps", np.zeros(1, np.int64))
        self.register_buffer("scratch", np.zeros(2, np.float32), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.proj(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(4, 7)
        self.plain = 3

    def forward(self, ids: Any, scale: float = 1.0, *, shift: Any = None) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * scale if shift is None else self.head(x) * scale + shift


KEYS = [
    "embed.weight", "layers.0.steps", "layers.0.norm.weight", "layers.0.proj.weight", "layers.1.steps",
    "layers.1.norm.weight", "layers.1.proj.weight", "head.weight", "head.bias",
]  # fmt: skip


def test_names_like_pytorch() -> None:
    net = Net()
    assert list(net.state_dict()) == KEYS
    assert [n for n, _ in net.named_parameters()] == [k for k in KEYS if "steps" not in k]
    assert [n for n, _ in net.named_buffers()][:2] == ["layers.0.steps", "layers.0.scratch"]
    assert [n for n, _ in net.named_modules()][:5] == ["", "embed", "layers", "layers.0", "layers.0.norm"]
    assert [n for n, _ in net.named_children()] == ["embed", "layers", "head"]
    assert len(list(net.modules())) == 10 and len(list(net.parameters())) == 7 and len(list(net.buffers())) == 4
    assert len(list(net.children())) == 3 and net.plain == 3 and net.layers[1] is list(net.layers)[1]


def test_printing_like_pytorch() -> None:
    assert repr(nn.Linear(768, 3072)) == "Linear(in_features=768, out_features=3072, bias=True)"
    assert repr(Net()) == (
        "Net(\n"
        "  (embed): Embedding(num_embeddings=7, embedding_dim=4)\n"
        "  (layers): ModuleList(\n"
        "    (0-1): 2 x Block(\n"
        "      (norm): RMSNorm((4,), eps=1e-06, elementwise_affine=True)\n"
        "      (proj): Linear(in_features=4, out_features=4, bias=False)\n"
        "    )\n"
        "  )\n"
        "  (head): Linear(in_features=4, out_features=7, bias=True)\n"
        ")"
    )
    assert repr(nn.Module()) == "Module()" and repr(nn.ModuleList()) == "ModuleList()"


def test_registration() -> None:
    m = nn.Module()
    p = m.register_parameter("weight", nn.Parameter([1.0]))
    assert m.weight is p and m.register_parameter("bias", None) is None and m.bias is None
    m.bias = nn.Parameter([2.0])
    assert list(m.state_dict()) == ["weight", "bias"]
    m.bias = None
    assert list(m.state_dict()) == ["weight"]
    child = m.register_module("child", nn.Linear, 2, 3)
    assert m.child is child and m.add_module("other", nn.Identity()) is m.other
    made = m.register_modules(2, "layers", nn.Linear, 2, 2, bias=False)
    assert m.layers[1] is made[1] and "layers.1.weight" in m.state_dict()
    assert isinstance(m.register_buffer("table", [1.0, 2.0]), Tensor)
    m.table = np.array([3.0], np.float32)
    assert isinstance(m.table, Tensor) and m.state_dict()["table"].tolist() == [3]
    del m.table
    assert "table" not in m.state_dict() and not hasattr(m, "table")


def test_replacing_what_a_name_stands_for() -> None:
    m = nn.Module()
    m.thing = 5
    m.thing = nn.Parameter([1.0])
    assert list(m.state_dict()) == ["thing"]
    m.thing = nn.Identity()
    assert list(m.state_dict()) == [] and [n for n, _ in m.named_children()] == ["thing"]
    m.thing = None
    assert m.thing is None and not list(m.children())
    net = Net()
    net.embed = nn.Embedding(7, 4)
    assert list(net.state_dict()) == KEYS, "the order is kept"


def test_registration_errors() -> None:
    m = nn.Linear(2, 2)
    with pytest.raises(KeyError, match="has a dot"):
        m.register_buffer("a.b", None)
    with pytest.raises(KeyError, match="already has an attribute 'forward'"):
        m.register_parameter("forward", None)
    with pytest.raises(TypeError, match="expected a Parameter or None, got Tensor"):
        m.register_parameter("extra", Tensor([1.0]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight is a parameter, which can't become a Tensor"):
        m.weight = Tensor([1.0])
    with pytest.raises(TypeError, match="expected a Module, got int"):
        m.add_module("child", 3)  # type: ignore[type-var]
    with pytest.raises(AttributeError, match="Linear has no attribute 'nothing'"):
        m.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute"):
        del m.nothing

    class Early(nn.Module):
        def __init__(self) -> None:
            self.layer = nn.Identity()

    with pytest.raises(AttributeError, match=r"call super\(\).__init__\(\) before setting layer in Early"):
        Early()
    with pytest.raises(NotImplementedError, match="has no forward"):
        nn.Module()(1)


def test_loading() -> None:
    source, target = Net(), Net()
    state = {k: t.numpy() + 1 for k, t in source.state_dict().items()}
    assert target.load_state_dict(state) == ([], [])
    for k, t in target.state_dict().items():
        np.testing.assert_array_equal(t.numpy(), state[k])
        assert t.dtype is source.state_dict()[k].dtype
    target.load_state_dict({k: t.astype(np.float64) for k, t in state.items()})
    assert target.head.weight.dtype is f32, "values are cast to the parameter's own type"
    tensors = source.state_dict()
    target.load_state_dict(tensors)
    assert target.head.weight.numpy() is not tensors["head.weight"].numpy()


def test_strict_loading_lists_names_and_changes_nothing() -> None:
    net = Net()
    state = {k: t.numpy() + 1 for k, t in net.state_dict().items()}
    before = net.head.bias.numpy().copy()
    del state["embed.weight"], state["layers.1.norm.weight"]
    state["lm_head.weight"] = np.zeros(3)
    with pytest.raises(LoadError) as caught:
        net.load_state_dict(state)
    text = str(caught.value)
    assert "does not fit Net" in text
    assert "missing: embed.weight, layers.1.norm.weight" in text and "unexpected: lm_head.weight" in text
    np.testing.assert_array_equal(net.head.bias.numpy(), before)
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert missing == ["embed.weight", "layers.1.norm.weight"] and unexpected == ["lm_head.weight"]
    np.testing.assert_array_equal(net.head.bias.numpy(), before + 1)


def test_wrong_shapes_are_refused_even_when_not_strict() -> None:
    net = Net()
    before = net.head.bias.numpy().copy()
    with pytest.raises(LoadError, match=r"wrong shape: head.weight is \[7, 4\], got \[4, 7\]"):
        net.load_state_dict({"head.bias": np.ones(7), "head.weight": np.ones((4, 7))}, strict=False)
    np.testing.assert_array_equal(net.head.bias.numpy(), before)


def test_tied_parameters() -> None:
    net = Net()
    net.head.weight = net.embed.weight
    assert set(net.state_dict()) == set(KEYS), "both names are there"
    assert [n for n, _ in net.named_parameters()].count("head.weight") == 0, "but it is one parameter"
    state = {k: t.numpy() for k, t in net.state_dict().items() if k != "head.weight"}
    state["embed.weight"] = np.full((7, 4), 3.0, np.float32)
    assert net.load_state_dict(state) == ([], []), "it came under its other name"
    assert (net.head.weight.numpy() == 3).all() and net.head.weight is net.embed.weight


def test_shared_modules_appear_under_each_name() -> None:
    shared = nn.Linear(2, 2)
    both = nn.Sequential(shared, shared)
    assert list(both.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [n for n, _ in both.named_modules()] == ["", "0"]


def test_single_parameters() -> None:
    net = Net()
    values = np.arange(7, dtype=np.float32)
    net.load_parameter_from_blob("head.bias", values.tobytes())
    np.testing.assert_array_equal(net.head.bias.numpy(), values)
    net.load_parameter_from_blob("head.bias", values * 2)
    net.load_parameter("layers.0.norm.weight", [1, 2, 3, 4])
    np.testing.assert_array_equal(net.head.bias.numpy(), values * 2)
    assert net.layers[0].norm.weight.tolist() == [1, 2, 3, 4]
    with pytest.raises(LoadError, match=r"head.bias: expected 28 bytes for f32\[7\], got 27"):
        net.load_parameter_from_blob("head.bias", values.tobytes()[:-1])
    with pytest.raises(LoadError, match="Net has no parameter named head.wait\n  to do: names are: embed.weight,"):
        net.load_parameter("head.wait", values)
    with pytest.raises(LoadError, match=r"head.bias is \[7\], got \[6\]"):
        net.load_parameter("head.bias", values[1:])


def test_element_types() -> None:
    net = Net().to("bfloat16")
    assert {t.dtype for t in net.parameters()} == {bf16} and net.to("cpu") is net and net.eval() is net
    assert net.layers[0].steps.dtype.name == "i64", "integers stay"
    assert net.layers[0].scratch.dtype is f32, "tables that are not saved stay"
    net.load_parameter_from_blob("head.bias", np.ones(7, ml_dtypes.bfloat16))
    assert net.head.bias.tolist() == [1] * 7
    assert net.to(f16).head.weight.dtype is f16


def test_arguments_by_name() -> None:
    net = Net()
    assert net.bind_arguments((1,), {"scale": 2.0}) == {"ids": 1, "scale": 2.0}
    assert net.unbind_arguments({"ids": 1, "shift": 3}) == ((1,), {"shift": 3})
    with pytest.raises(ArgumentError, match=r"Net.forward\(ids.*missing a required argument: 'ids'") as caught:
        net.bind_arguments((), {})
    assert "test_module.py" in str(caught.value.where) and caught.value.fix
    with pytest.raises(ArgumentError, match="too many positional arguments"):
        net.bind_arguments((1, 2, 3), {})
    assert net(np.array([[0, 1]]), 0.5, shift=1.0).shape == (1, 2, 7)


def test_signatures_follow_forward() -> None:
    class Other(Net):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            return x

    net = Net()
    assert list(net.signature().parameters)[0] == "ids" and list(Other().signature().parameters) == ["x"]
    assert net.signature() is Net().signature(), "read once for a class"
    object.__setattr__(net, "forward", lambda one, two: one)
    assert net.bind_arguments((1, 2), {}) == {"one": 1, "two": 2}
    object.__setattr__(net, "forward", lambda three: three)
    assert net.bind_arguments((1,), {}) == {"three": 1}
    assert net.unbind_arguments({"three": 4}) == ((4,), {})


def test_forward_sees_tensors() -> None:
    class Show(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    array, text, numbers = np.zeros(2), np.array(["a"]), [1, 2]
    (one, two, three, four), named = Show()(array, text, numbers, (1, {"k": [array]}), other=array)
    assert isinstance(one, Tensor) and one.numpy() is array and two is text and three is numbers
    assert isinstance(four[1]["k"][0], Tensor) and isinstance(named["other"], Tensor)


def test_lists_of_modules() -> None:
    layers = nn.ModuleList([nn.Linear(1, 1)])
    layers.append(nn.Identity()).extend([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert len(layers) == 4 and isinstance(layers[-1], nn.Linear) and len(layers[1:3]) == 2
    layers[0] = nn.Identity()
    assert list(layers.state_dict()) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert repr(layers).splitlines()[1:3] == [
        "  (0-1): 2 x Identity()",
        "  (2-3): 2 x Linear(in_features=2, out_features=2, bias=True)",
    ]
