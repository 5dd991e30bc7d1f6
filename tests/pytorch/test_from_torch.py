"""PyTorch's modules: operators, sizes, lines, what is refused, and the backend of torch.compile."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.ir.errors import ArgumentError, MonoplanError
from tests.needs import needs
from tests.tolerances import check

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError:  # the mark below says so
    torch = F = nn = None  # type: ignore[assignment]

pytestmark = [pytest.mark.full, needs("torch")]
Base: Any = object if nn is None else nn.Module


class Calls(Base):  # type: ignore[misc]
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class One(Calls):
    def forward(self, x: Any) -> Any:
        return self.function(x)


class Two(Calls):
    def forward(self, x: Any, y: Any) -> Any:
        return self.function(x, y)


def arrays(*tensors: Any) -> list[Any]:
    from monoplan.pytorch.program import as_array

    return [as_array(t) for t in tensors]


def matches(module: Any, *given: Any) -> Any:
    """Compiles, runs, and compares with PyTorch in float64."""
    module.eval()
    fast = mp.compile(mp.from_torch(module, *given))
    got = fast(*arrays(*given))
    with torch.no_grad():
        want = module.double()(*(x.double() if x.is_floating_point() else x for x in given))
    several = isinstance(want, tuple | list)
    for a, b in zip(got if several else [got], want if several else [want], strict=True):
        (expected,) = arrays(b)
        if a.dtype.kind in "biu":
            np.testing.assert_array_equal(a, expected)
        else:
            check(a, expected, a.dtype, "matmul", 4.0)
    return fast


UNARY = {
    "relu": lambda x: F.relu(x),
    "inplace": lambda x: F.relu(x.clone(), inplace=True).add_(1),
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "activations": lambda x: F.silu(x) + F.mish(x) + F.elu(x) + F.selu(x) + F.leaky_relu(x, 0.2) + F.softplus(x),
    "hard": lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.hardtanh(x) + F.relu6(x),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(1),
    "math": lambda x: x.sin() + x.abs().sqrt() + x.exp().log1p() + torch.erf(x) + x.tanh() * x.sigmoid(),
    "powers": lambda x: x**2 + x.abs() ** 0.5 + x.abs().rsqrt() + 2.0**x,
    "scalars": lambda x: (1 - x) * 3 / 2 + torch.add(x, x, alpha=0.5) - torch.sub(x, 1, alpha=2),
    "reductions": lambda x: (x.sum(-1), x.mean((0, 2)), x.amax(1), x.var(-1), x.std(0), x.logsumexp(2), x.norm(dim=-1)),
    "with_indices": lambda x: (*x.max(-1), *x.min(0), x.argmax(1), *x.topk(2, dim=-1), *x.sort(descending=True)),
    "truths": lambda x: ((x > 0).any(-1), (x < 1).all(1), torch.isnan(x), (x >= 0) & (x <= 1), ~(x == 0)),
    "cumulative": lambda x: (x.cumsum(-1), x.abs().cumprod(1), x.diff(dim=-1)),
    "views": lambda x: x.view(2, -1).reshape(3, -1).t().unsqueeze(0).squeeze(0).flatten(),
    "transposes": lambda x: x.transpose(0, 2).permute(2, 0, 1).contiguous().mT,
    "slices": lambda x: (x[:, 1:, ::2], x[..., -1], x[1], x[:, None], x.narrow(2, 1, 2), x.select(1, 0)),
    "splits": lambda x: (*x.split(2, 2), *x.chunk(2, 1), *x.unbind(0)),
    "joins": lambda x: (torch.cat([x, x + 1], 1), torch.stack([x, -x]), x.repeat(1, 2, 1), x.expand(4, 2, 3, 5)),
    "triangles": lambda x: (x.triu(1), x.tril(-1), x.flip(1), x.roll(2, -1), x.diagonal(dim1=1, dim2=2)),
    "pads": lambda x: (F.pad(x, (1, 2)), F.pad(x, (1, 1), "reflect"), F.pad(x, (2, 0), "replicate")),
    "where": lambda x: torch.where(x > 0, x, -1.0) + x.masked_fill(x > 1, 0.0) + x.clamp(-1, 1) + x.clamp(min=0),
    "new": lambda x: (torch.ones_like(x) + x.new_zeros(5) + torch.arange(5) + torch.full((5,), 2.0), torch.eye(3)),
    "types": lambda x: (x.to(torch.int32), x.half().float(), x.bool(), x.double().float(), x.bfloat16().float()),
    "products": lambda x: (
        x @ x.mT,
        torch.bmm(x, x.mT),
        torch.einsum("bij,bkj->bik", x, x),
        torch.matmul(x[0], x[1].t()),
    ),
    "norms": lambda x: F.layer_norm(x, (5,)) + F.rms_norm(x, (5,)) + F.group_norm(x, 3) + F.normalize(x, dim=-1),
    "index": lambda x: (
        x[:, torch.tensor([0, 2])],
        x.index_select(1, torch.tensor([1, 0])),
        x[torch.tensor([1, 0, 1])],
    ),
    "scatter": lambda x: x.scatter(2, torch.zeros(2, 3, 1, dtype=torch.long), 9.0),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 3),
    "rounding": lambda x: x.round() + x.floor() + x.ceil() + x.trunc() + (x / 0.3) % 2 + x // 0.7,
}


@pytest.mark.parametrize("name", UNARY)
def test_operators(name: str) -> None:
    torch.manual_seed(0)
    matches(One(UNARY[name]), torch.randn(2, 3, 5))


@pytest.mark.parametrize("masked", ["none", "causal", "float", "bool"])
def test_attention(masked: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 9, 16)
    bias, seen = torch.randn(2, 1, 6, 9), torch.rand(2, 1, 6, 9) < 0.8
    mask = {"float": bias, "bool": seen}.get(masked)

    def attend(q: Any, k: Any) -> Any:
        return F.scaled_dot_product_attention(
            q, k, k * 0.5, mask.to(q.dtype) if masked == "float" else mask, is_causal=masked == "causal"
        )

    fast = matches(Two(attend), q, k)
    assert "attention(" in fast.ir() and "softmax" not in fast.ir()
    if masked in ("none", "causal"):
        for one in (q[:1], q[0]):  # a batch of one goes with any
            matches(Two(attend), one, k)


def layers() -> dict[str, tuple[Any, Any]]:
    image, sound, rows = torch.randn(2, 6, 12, 10), torch.randn(2, 6, 15), torch.randn(3, 7, 16)
    attention = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    return {
        "conv2d": (nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2), image),
        "conv1d": (nn.Conv1d(6, 4, 5, dilation=2, padding="same"), sound),
        "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1), image),
        "block": (nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), image),
        "pools": (nn.Sequential(nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten()), image),
        "upsample": (nn.Upsample(scale_factor=2), image),
        "bilinear": (nn.Upsample(size=(20, 30), mode="bilinear"), image),
        "shuffle": (nn.Sequential(nn.Conv2d(6, 8, 1), nn.PixelShuffle(2)), image),
        "mlp": (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 16)), rows),
        "encoder": (nn.TransformerEncoder(attention, 2, enable_nested_tensor=False), rows),
        "groups": (nn.Sequential(nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True), nn.SiLU()), image),
    }


@pytest.mark.parametrize(
    "name",
    ["conv2d", "conv1d", "transposed", "block", "pools", "upsample", "bilinear", "shuffle", "mlp", "encoder", "groups"],
)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    module, x = layers()[name]
    matches(module, x)


class Net(Base):  # type: ignore[misc]
    """An embedding, a linear by the same weights, and structures in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(16))

    def forward(self, ids: Any, more: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        x = self.embed(ids) + self.shift * more["weight"]
        x = torch.tanh(self.inner(x)) * scale
        return {"logits": self.head(x), "parts": [x, (x.sum(-1), None)]}


def test_parameters_structures_and_lines() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    ids, more = torch.randint(50, (2, 5)), {"weight": torch.randn(2, 5, 16)}
    made = mp.from_torch(net, ids, more, scale=0.5)
    assert [name for name, _ in made.named_parameters()] == ["embed.weight", "inner.weight", "inner.bias"]
    fast = mp.compile(made)
    with torch.no_grad():
        want = net(ids, more, 0.5)
    got = fast(*arrays(ids), {"weight": more["weight"].numpy()}, 0.5)
    np.testing.assert_allclose(got["logits"], want["logits"].numpy(), atol=1e-5)
    np.testing.assert_allclose(got["parts"][1][0], want["parts"][1][0].numpy(), atol=1e-5)
    text = fast.ir("trace", locs=True)
    line = next(line for line in text.splitlines() if "tanh(" in line)
    assert re.search(r"test_from_torch\.py\":\d+", line)
    assert "embed.weight" in text and '@ "inner"' in text
    call = (*arrays(ids), {"weight": more["weight"].numpy()}, 0.5)
    assert fast.verify(*call).ok and fast.verify(*call, against=net).ok
    with torch.no_grad():
        net.inner.bias += 1
    assert not fast.verify(*call, against=net).ok
    for word in ("tanh", "linear"):
        assert word in fast.explain()
    assert "tanh" in str(fast.profile(*call))


def test_sizes_that_change() -> None:
    module = One(lambda x: x.unsqueeze(-1).expand(-1, -1, 2).reshape(x.shape[0], -1).sum(1) / x.shape[1]).eval()
    fast = mp.compile(mp.from_torch(module, torch.randn(3, 8), dynamic={"x": {0: "rows", 1: "columns"}}))
    for shape in ((3, 8), (1, 2), (7, 30)):
        x = torch.randn(*shape)
        np.testing.assert_allclose(fast(x.numpy()), module(x).numpy(), rtol=1e-5, atol=1e-6)
    assert fast.stats.compiles == 1


def decide(x: Any, y: Any) -> Any:
    """It goes several ways, by sizes."""
    z = x * 2 if x.shape[0] > 4 else x * 3
    z = z + 1 if x.shape[0] % 2 == 0 else z
    z = z - 1 if x.shape[0] <= 2 * y.shape[0] else z
    return z * 5 if x.shape[0] != y.shape[0] + 6 else z


def test_sizes_that_forward_decides_by() -> None:
    """A plan of one way refuses sizes for which forward goes another, symbols and numbers alike."""
    module = Two(decide).eval()
    dynamic = {"x": {0: "n"}, "y": {0: "m"}}
    captured = mp.from_torch(module, torch.randn(8, 3), torch.randn(6, 3), dynamic=dynamic)
    fast = mp.compile(captured)
    for n, m in ((8, 6), (6, 3), (20, 10)):
        x, y = torch.randn(n, 3), torch.randn(m, 3)
        np.testing.assert_allclose(fast(x, y), module(x, y).numpy(), rtol=1e-6)
    for n, m in ((4, 6), (9, 6), (14, 6), (12, 6)):
        x, y = np.ones((n, 3), np.float32), np.ones((m, 3), np.float32)
        with pytest.raises(ArgumentError, match="captured where"):
            fast(x, y)
        with pytest.raises(ArgumentError, match="captured where"):
            captured(mp.Tensor(x), mp.Tensor(y))
    inside = One(lambda x: x["a"][0] if x["a"][0].shape[1] > 2 else x["a"][0] + 1).eval()
    fast = mp.compile(mp.from_torch(inside, {"a": [torch.ones(3, 5)]}))
    assert np.array_equal(fast({"a": [np.ones((3, 5), np.float32)]}), np.ones((3, 5)))


def test_decisions_that_no_plan_can_check_are_refused() -> None:
    module = One(lambda x: x[: 20 % x.shape[0]] * 2).eval()
    with pytest.raises(ArgumentError, match="leave one of the sizes out of `dynamic`"):
        mp.compile(mp.from_torch(module, torch.ones(8, 3), dynamic={"x": {0: "n"}}))


def test_operators_by_pytorchs_rules() -> None:
    """What is not covered itself, but is made of what is."""

    def products(x: Any) -> Any:
        v = x[0, 0]
        return torch.mv(x[0], v), torch.dot(v, v), torch.kron(x[0], x[1]), torch.addcdiv(v, v, v), torch.trace(x[0])

    def changed(x: Any) -> Any:
        y = x.clone()
        y[:, ::2] = 0
        y[0, 0] = 5.0
        return y.mul_(2), torch.empty(3).fill_(2), torch.rot90(x[0]), x.unfold(2, 3, 2).sum(-1)

    def resized(x: Any) -> Any:
        return F.interpolate(x, 7, mode="linear"), F.interpolate(x[None], (7, 9), mode="bicubic"), F.unfold(x[None], 2)

    for function in (products, changed, resized):
        matches(One(function), torch.randn(2, 3, 5))
    numbers = torch.arange(12).reshape(3, 4)
    matches(One(lambda x: (x << 2, x >> 1, 2 << x)), numbers)
    matches(One(lambda x: (F.adaptive_max_pool1d(x, 2), F.adaptive_max_pool2d(x, 3))), torch.randn(2, 6, 8))


def test_operators_made_of_a_few() -> None:
    """With the edges that their formulas have: signed zeros, large squares, NaN, what beta = 0 hides, bools."""
    torch.manual_seed(0)

    def signs(x: Any, y: Any) -> Any:
        return torch.signbit(x), torch.copysign(x, y), torch.copysign(torch.arange(6), y), torch.hypot(x, y)

    special = torch.tensor([0.0, -0.0, 3.0, -4.0, float("inf"), 1e30])
    matches(Two(signs), special, torch.tensor([-0.0, 1.0, -4.0, 3.0, float("nan"), -1e30]))

    def with_nan(x: Any, y: Any) -> Any:
        hidden = torch.full((3,), float("nan"), dtype=x.dtype)
        return torch.fmax(x, y), torch.fmin(x, y), torch.addmv(hidden, y.outer(y)[:3, :3], y[:3], beta=0)

    nan = float("nan")
    matches(Two(with_nan), torch.tensor([1.0, nan, 2.0, nan]), torch.tensor([nan, 1.0, 3.0, nan]))

    def distances(x: Any) -> Any:
        return torch.cdist(x, x[:, :2]), torch.cdist(x, x, 1.0), torch.dist(x[0], x[1]), torch.addbmm(x[0], x, x.mT @ x)

    matches(One(distances), torch.randn(2, 3, 5))
    matches(nn.Bilinear(5, 5, 4), torch.randn(3, 5), torch.randn(3, 5))
    bools = torch.tensor([[True, False], [True, True]])
    matches(One(lambda m: (m * m[0], m + m[1], torch.maximum(m, m[0]), torch.min(m, m[0]), m.sgn())), bools)
    one = torch.randn(())
    matches(
        One(lambda x: (x.softmax(0), x.log_softmax(-1), torch.softmax(x.reshape(1)[:0], 0), x.unfold(0, 1, 1))), one
    )
    matches(One(lambda x: torch.diff(x, 0, prepend=x)), torch.randn(4))
    matches(nn.ConvTranspose2d(3, 2, 3), torch.randn(3, 5, 5))
    matches(nn.ConvTranspose1d(3, 2, 3), torch.randn(3, 5))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str) -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[1, 2, 4], [4, 3, 9], [0, 0, 0]])
    matches(nn.EmbeddingBag(10, 4, mode=mode, padding_idx=0), ids)
    offsets = torch.tensor([0, 4, 4, 8])  # the second bag is empty, and the last ends at 9
    matches(nn.EmbeddingBag(10, 4, mode=mode), ids.flatten(), offsets)
    if mode == "sum":
        matches(
            Two(lambda x, w: F.embedding_bag(ids, x, per_sample_weights=w, mode="sum")),
            torch.randn(10, 4),
            torch.rand(3, 3),
        )


def test_indices_of_pools_are_refused() -> None:
    def pooled(x: Any) -> Any:
        return F.max_pool2d(x, 2, return_indices=True)

    for module in (One(pooled), One(lambda x: pooled(x)[1] + 1)):
        with pytest.raises(MonoplanError, match="is not covered"):
            mp.compile(mp.from_torch(module.eval(), torch.ones(1, 2, 4, 4)))


def test_operators_that_are_not_covered_are_all_named() -> None:
    def strange(x: Any) -> Any:
        y = torch.special.bessel_j0(x)
        return torch.linalg.inv(y) + torch.special.i0(x) + torch.mv(x, x[0])

    with pytest.raises(ArgumentError) as caught:
        mp.from_torch(One(strange).eval(), torch.eye(3))
    text = str(caught.value)
    for name in ("special_bessel_j0", "linalg_inv", "special_i0"):
        assert re.search(rf"aten\.{name}\w*\.default at .*test_from_torch\.py:\d+", text)
    table = mp.coverage(One(strange).eval(), torch.eye(3))
    assert "4 of 7 operators are covered" in table and re.search(r"aten\.add\.Tensor +2 +yes", table)
    assert "aten.mv" not in text and "aten.mv" not in table  # it is made of others


def test_refusals() -> None:
    x = torch.randn(2, 3)
    linear = nn.Linear(3, 3)
    with pytest.raises(ArgumentError, match=r"call module\.eval\(\) first"):
        mp.from_torch(linear.train(), x)
    with pytest.raises(ArgumentError, match="needs a torch.nn.Module, got function"):
        mp.from_torch(lambda x: x, x)
    linear.eval()
    for dynamic, words in (
        ({"y": {0: "n"}}, "y, which is no argument"),
        ({"input": {5: "n"}}, "5 is not one of 2 dimensions"),
        ({"input": ["n"]}, "must be a dictionary"),
    ):
        with pytest.raises(ArgumentError, match=words):
            mp.from_torch(linear, x, dynamic=dynamic)
    with pytest.raises(ArgumentError, match="has size 1"):
        mp.from_torch(linear, x[:1], dynamic={"input": {0: "n"}})
    with pytest.raises(ArgumentError, match="could not capture One as one graph"):
        mp.from_torch(One(lambda x: x if x.sum() > 0 else -x).eval(), x)

    class Counter(Base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.count += 1
            return x + self.count

    with pytest.raises(ArgumentError, match="the module changes count"):
        mp.from_torch(Counter().eval(), x)
    with pytest.raises(MonoplanError):  # another number of tensors than at the capture
        mp.compile(mp.from_torch(linear, x))(x.numpy(), x.numpy())


def test_torch_compile() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    fast = torch.compile(net, backend="monoplan", fullgraph=True)
    with torch.no_grad():
        for rows in (3, 5, 6, 1, 9):  # from the second on Dynamo takes the size as a symbol
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-5, atol=1e-5)
        net[0].weight.mul_(2.0)
        torch.testing.assert_close(fast(x), net(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match="the backend monoplan is for inference"):
        fast(torch.randn(3, 8))


def test_torch_compile_in_bf16() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval().bfloat16()
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        got = torch.compile(net, backend="monoplan")(x)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), net.float()(x.float()), rtol=2e-2, atol=2e-2)


class PlusOne(mp.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1.0


def test_tensors_as_arguments() -> None:
    """Strided ones and bf16 are taken; what is not just its memory is refused, at every call."""
    fast, ones = mp.compile(PlusOne()), torch.ones(4)
    for taken in (ones, ones[::2], ones.to(torch.bfloat16), torch.nn.Parameter(ones, requires_grad=False), ones + 1):
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(fast(taken), np.float32), taken.float().numpy() + 1)
    negative = torch.view_as_complex(torch.ones(4, 2)).conj().imag
    for refused in (negative, torch.eye(2).to_sparse(), torch.ones(4, requires_grad=True)):
        for _ in range(2):
            with pytest.raises(MonoplanError, match=r"argument x: .* can't be used in place"):
                fast(refused)


class Minus(mp.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x - y


def test_tensors_that_are_others_or_were_changed() -> None:
    """A known call reads the address, sizes and type of a tensor every time."""
    fast, x, y = mp.compile(Minus()), torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    given = [(x, y), (x, y.numpy()), (x.numpy(), y), (x + 1, y), (x, y.T.contiguous().T), (x.to(torch.float64),) * 2]
    given += [(torch.ones(7)[1:].reshape(2, 3), y), (torch.arange(9.0).reshape(3, 3)[:2], torch.ones(2, 3))]
    for _ in range(3):
        for a, b in given:
            expected = np.asarray(a) - np.asarray(b)
            for got in (fast(a, b), fast(y=b, x=a), fast(a, y=b)):
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected)
    x.set_(torch.full((2, 3), 5.0))  # the same object with other memory
    np.testing.assert_array_equal(fast(x, y), np.full((2, 3), 4.0))
    x.resize_(4, 3).fill_(2.0)
    np.testing.assert_array_equal(fast(x, torch.ones(4, 3)), np.ones((4, 3)))
    crooked = torch.frombuffer(bytearray(25), dtype=torch.float32, offset=1)
    assert crooked.data_ptr() % 4
    np.testing.assert_array_equal(fast(crooked.reshape(2, 3), y), -np.ones((2, 3)))


def test_results_that_are_tensors_given() -> None:
    class Both(mp.nn.Module):
        def forward(self, x: Any) -> Any:
            return x, x + 1.0

    fast, x = mp.compile(Both()), torch.ones(3)
    for _ in range(4):
        same, more = fast(x)
        np.testing.assert_array_equal(same, np.ones(3))
        np.testing.assert_array_equal(more, np.full(3, 2.0))
