"""Things that users write out: silu, swiglu, squares, norms, repeated heads, products by weights."""

from __future__ import annotations

import pytest

from monoplan.ir.graph import Graph
from monoplan.passes.idioms import IDIOMS, LINEAR_BIAS
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses

EPS = "%eps = full() {shape=(), value=1e-06, dtype=f32} : f32[]"
TWO = "%two = full() {shape=(), value=2.0, dtype=f32} : f32[]"


def graph(*lines: str, inputs: str = "%x: f32[n, 4], %z: f32[n, 4]", outputs: str = "%y") -> str:
    lines = ('param %w: f32[4] = "w"', 'param %b: f32[4] = "b"', 'param %m: f32[4, 3] = "m"', *lines)
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


def test_silu() -> None:
    lines = ("%s = sigmoid(%x) : f32[n, 4]", "%y = mul(%s, %x) : f32[n, 4]")
    assert names(fires(IDIOMS, graph(*lines), count=1)) == ["silu"]
    refuses(IDIOMS, graph("%s = sigmoid(%z) : f32[n, 4]", "%y = mul(%s, %x) : f32[n, 4]"))
    refuses(IDIOMS, graph(*lines, outputs="%y, %s"), "%s has 2 readers")


def test_swiglu() -> None:
    lines = ("%s = silu(%x) : f32[n, 4]", "%y = mul(%z, %s) : f32[n, 4]")
    after = fires(IDIOMS, graph(*lines), count=1)
    assert names(after) == ["swiglu"] and after.ops[0].operands == after.inputs
    refuses(IDIOMS, graph(*lines, outputs="%y, %s"), "%s has 2 readers")
    stretched = graph("%s = silu(%x) : f32[n, 4]", "%y = mul(%w, %s) : f32[n, 4]")
    refuses(IDIOMS, stretched, "gate and up differ in type")


def test_swiglu_from_sigmoid(golden: Golden) -> None:
    text = graph("%s = sigmoid(%x) : f32[n, 4]", "%t = mul(%x, %s) : f32[n, 4]", "%y = mul(%t, %z) : f32[n, 4]")
    fires(IDIOMS, text, golden, count=2)


def test_square() -> None:
    after = fires(IDIOMS, graph(TWO, "%y = pow(%x, %two) : f32[n, 4]"), count=1)
    assert names(after) == ["mul"]
    refuses(IDIOMS, graph(TWO.replace("2.0", "3.0"), "%y = pow(%x, %two) : f32[n, 4]"))
    refuses(IDIOMS, graph("%y = pow(%x, %z) : f32[n, 4]"))


def mean(of: str, axes: str = "(-1,)", keep: str = "True", size: str = "n, 1") -> str:
    return f"mean({of}) {{axes={axes}, keepdims={keep}}} : f32[{size}]"


SQUARES = {"product": ["%q = mul(%{v}, %{v}) : f32[n, 4]"], "power": [TWO, "%q = pow(%{v}, %two) : f32[n, 4]"]}
ROOTS = {
    "rsqrt": ["%r = rsqrt(%e) : f32[n, 1]", "%i = mul(%{v}, %r) : f32[n, 4]"],
    "sqrt": ["%r = sqrt(%e) : f32[n, 1]", "%i = div(%{v}, %r) : f32[n, 4]"],
}


def norm_lines(square: str, root: str, v: str = "x") -> list[str]:
    """x / sqrt(mean(x * x) + eps), as %i."""
    lines = [*SQUARES[square], f"%m1 = {mean('%q')}", EPS, "%e = add(%m1, %eps) : f32[n, 1]", *ROOTS[root]]
    return [line.replace("%{v}", f"%{v}") for line in lines]


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("tail", ["", "mul(%i, %w)", "mul(%w, %i)"], ids=["plain", "weight", "weight first"])
def test_rms_norm(square: str, root: str, tail: str) -> None:
    lines = norm_lines(square, root)
    text = graph(*lines, f"%y = {tail} : f32[n, 4]") if tail else graph(*lines, outputs="%i")
    (op,) = (after := fires(IDIOMS, text)).ops
    assert op.name == "rms_norm" and op.attrs["eps"] == 1e-6
    assert [v.name for v in op.reads] == (["x", "w"] if tail else ["x"]) and len(after.outputs) == 1


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("weights", [0, 1, 2])
def test_layer_norm(square: str, root: str, weights: int) -> None:
    lines = [f"%m0 = {mean('%x')}", "%c = sub(%x, %m0) : f32[n, 4]", *norm_lines(square, root, "c")]
    lines += ["%s = mul(%i, %w) : f32[n, 4]", "%y = add(%s, %b) : f32[n, 4]"][:weights]
    (op,) = fires(IDIOMS, graph(*lines, outputs=["%i", "%s", "%y"][weights])).ops
    assert op.name == "layer_norm" and [v.name for v in op.reads] == ["x", "w", "b"][: weights + 1]


def test_norms(golden: Golden) -> None:
    lines = [*norm_lines("product", "rsqrt"), "%y = mul(%i, %w) : f32[n, 4]"]
    fires(IDIOMS, graph(*lines), golden)


def test_norms_that_are_none() -> None:
    lines = norm_lines("product", "rsqrt")

    def changed(old: str, new: str) -> str:
        return graph(*(line.replace(old, new) for line in lines), outputs="%i")

    refuses(IDIOMS, graph(*lines, outputs="%i, %m1"), "%m1 has 2 readers")
    refuses(IDIOMS, changed("%q = mul(%x, %x)", "%q = mul(%x, %z)"))  # not a square
    columns = changed("axes=(-1,)", "axes=(0,)").replace("[n, 1]", "[1, 4]")
    refuses(IDIOMS, columns, "the mean is over axes (0,), not the last")
    computed = changed("add(%m1, %eps)", "add(%m1, %late)").replace(", %z: f32[n, 4]", ", %late: f32[]")
    refuses(IDIOMS, computed.replace(f"  {EPS}\n", ""), "eps is not a constant")


def test_a_norm_of_another_value_keeps_its_centre() -> None:
    """The mean is of x, the squares are of z - mean: that is no layer norm, but an rms norm of the difference."""
    lines = [f"%m0 = {mean('%x')}", "%c = sub(%z, %m0) : f32[n, 4]", *norm_lines("product", "rsqrt", "c")]
    assert names(fires(IDIOMS, graph(*lines, outputs="%i"))) == ["mean", "sub", "rms_norm"]


def test_weights_of_another_shape_stay_a_product() -> None:
    norm = "%i = rms_norm(%x, _) {eps=1e-06, dims=1} : f32[n, 4]"
    refuses(IDIOMS, graph(norm, "%y = mul(%i, %z) : f32[n, 4]"))
    second = "%i = rms_norm(%x, %w) {eps=1e-06, dims=1} : f32[n, 4]"
    refuses(IDIOMS, graph(second, "%y = mul(%i, %b) : f32[n, 4]"))
    wide = "%i = rms_norm(%x, _) {eps=1e-06, dims=1} : f32[n, 4]"
    refuses(IDIOMS, graph(wide, "%y = mul(%i, %late) : f64[n, 4]", inputs="%x: f32[n, 4], %late: f64[4]"), "f32[n, 4]")


REPEAT = (
    "%a = reshape(%x) {{shape=({0})}} : f32[{0}]", "%o = expand(%a) {{shape=({1})}} : f32[{1}]",
    "%y = reshape(%o) {{shape=({2})}} : f32[{2}]",
)  # fmt: skip


def repeated(inputs: str, *shapes: str) -> str:
    return graph(*(line.format(*shapes) for line in REPEAT), inputs=f"%x: f32[{inputs}]")


@pytest.mark.parametrize(
    ("x", "middle", "wide", "out", "axis"),
    [
        ("seq, 2, 4", "seq, 2, 1, 4", "seq, 2, 3, 4", "seq, 6, 4", 1),
        ("batch, 2, keys, 4", "batch, 2, 1, keys, 4", "batch, 2, 3, keys, 4", "batch, 6, keys, 4", 1),
        ("batch, keys, 2, 4", "batch, keys, 2, 1, 4", "batch, keys, 2, 3, 4", "batch, keys, 6, 4", 2),
    ],
    ids=["sample", "heads first", "heads last"],
)
def test_repeat_kv(x: str, middle: str, wide: str, out: str, axis: int) -> None:
    (op,) = fires(IDIOMS, repeated(x, middle, wide, out), count=1).ops
    assert op.name == "repeat" and dict(op.attrs) == {"repeats": 3, "axis": axis}


@pytest.mark.parametrize(
    ("x", "middle", "wide", "out"),
    [
        ("seq, 2, 4", "seq, 1, 2, 4", "seq, 3, 2, 4", "seq, 6, 4"),  # tiles: 0 1 0 1 0 1
        ("seq, 2, 4", "seq, 2, 1, 4", "seq, 2, 3, 4", "seq, 2, 12"),  # repeats into another dimension
        ("2, 4", "2, 1, 4", "2, n, 4", "2*n, 4"),  # a symbolic number of times
    ],
    ids=["tile", "joined elsewhere", "symbolic"],
)
def test_stretched_in_another_way(x: str, middle: str, wide: str, out: str) -> None:
    reason = "the elements of no dimension are repeated one by one"
    refuses(IDIOMS, repeated(x, middle, wide, out).replace("%x: f32[2, 4]", "%x: f32[2, 4], %n: f32[n]"), reason)


def test_repeat_kv_with_a_second_reader() -> None:
    text = repeated("seq, 2, 4", "seq, 2, 1, 4", "seq, 2, 3, 4", "seq, 6, 4")
    refuses(IDIOMS, text.replace("return %y", "return %y, %o"), "%o has 2 readers")


def test_matmul_to_linear(golden: Golden) -> None:
    fires(IDIOMS, graph("%y = matmul(%x, %m) : f32[n, 3]"), golden, count=1)


def test_matmul_of_values_stays() -> None:
    late = "%x: f32[n, 4], %late: f32[4, 3]"
    refuses(IDIOMS, graph("%y = matmul(%x, %late) : f32[n, 3]", inputs=late), "the second operand is not a weight")
    batched = "%x: f32[2, n, 4], %late: f32[2, 4, 3]"
    refuses(IDIOMS, graph("%y = matmul(%x, %late) : f32[2, n, 3]", inputs=batched))
    integers = graph("%y = matmul(%x, %m) : i32[2, 3]", inputs="%x: i32[2, 4]")
    refuses(IDIOMS, integers.replace("f32[4, 3]", "i32[4, 3]"))


def test_linear_bias() -> None:
    linear = "%l = linear(%x, %t, _) : f32[n, 4]"
    inputs = "%x: f32[n, 4], %z: f32[n, 4], %t: f32[4, 4], %late: f32[4]"
    for bias in ("%b", "%late"):
        (op,) = fires(LINEAR_BIAS, graph(linear, f"%y = add({bias}, %l) : f32[n, 4]", inputs=inputs), count=1).ops
        assert op.name == "linear" and op.operands[2].name == bias[1:]
    refuses(LINEAR_BIAS, graph(linear, "%y = add(%l, %z) : f32[n, 4]", inputs=inputs))  # a residual
    twice = graph(linear.replace("_", "%w"), "%y = add(%l, %b) : f32[n, 4]", inputs=inputs)
    refuses(LINEAR_BIAS, twice)
    both = graph(linear, "%y = add(%l, %b) : f32[n, 4]", inputs=inputs, outputs="%y, %l")
    refuses(LINEAR_BIAS, both, "%l has 2 readers, it must have one")
    wide = graph(linear, "%y = add(%l, %far) : f64[n, 4]", inputs=f"{inputs}, %far: f64[4]")
    refuses(LINEAR_BIAS, wide, "the result would be f32[n, 4] in place of f64[n, 4]")


def patches(size: int = 8, stride: str = "(4, 4)", padding: str = "(0, 0, 0, 0)", count: int = 4) -> str:
    side = (size + sum(map(int, padding[1:-1].split(", "))) // 2 - 4) // int(stride[1]) + 1
    return graph(
        'param %k: f32[5, 3, 4, 4] = "k"',
        'param %c: f32[5] = "c"',
        f"%i = conv2d(%x, %k, %c) {{stride={stride}, padding={padding}, dilation=(1, 1), groups=1}}"
        f" : f32[n, 5, {side}, {side}]",
        f"%f = reshape(%i) {{shape=(n, 5, {count})}} : f32[n, 5, {count}]",
        f"%y = transpose(%f) {{axes=(0, 2, 1)}} : f32[n, {count}, 5]",
        inputs=f"%x: f32[n, 3, {size}, {size}]",
    )


def test_a_convolution_over_patches() -> None:
    after = fires(IDIOMS, patches(), count=1)
    assert names(after) == ["reshape", "transpose", "reshape", "reshape", "linear"]
    refuses(IDIOMS, patches(stride="(2, 2)", count=9), "do not lie side by side")
    refuses(IDIOMS, patches(padding="(2, 2, 2, 2)", count=9), "do not lie side by side")
    refuses(IDIOMS, patches(size=9), "do not cover the image")
