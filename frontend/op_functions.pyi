"""Made from the op registry by op_functions.stub(). Do not edit."""

from collections.abc import Callable, Sequence
from typing import Any

from monoplan.frontend.arrays import Sorted
from monoplan.frontend.tensor import Tensor
from monoplan.ir.dims import Dim

__all__ = [
    "add",
    "sub",
    "mul",
    "maximum",
    "minimum",
    "neg",
    "abs",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "atan2",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "cbrt",
    "tanh",
    "sigmoid",
    "erf",
    "erfc",
    "softplus",
    "swiglu",
    "gelu",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "floor",
    "ceil",
    "trunc",
    "sign",
    "floor_divide",
    "remainder",
    "fmod",
    "integer_pow",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_not",
    "left_shift",
    "right_shift",
    "isnan",
    "isinf",
    "isfinite",
    "sum",
    "mean",
    "amax",
    "amin",
    "prod",
    "any",
    "all",
    "argmin",
    "argmax",
]

METHODS: dict[str, Callable[..., Any]]
WRITTEN_OUT: tuple[str, ...]

def write(result: Tensor, out: Any, inplace_of: Any = None) -> Tensor: ...
def publish_methods(functions: dict[str, Callable[..., Any]]) -> None: ...
def stub() -> str: ...
def add(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a + b."""

def sub(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a - b."""

def mul(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a * b."""

def maximum(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """The larger of a and b; NaN if either is."""

def minimum(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """The smaller of a and b; NaN if either is."""

def neg(input: Any, *, out: Tensor | None = None) -> Tensor:
    """-x."""

def abs(input: Any, *, out: Tensor | None = None) -> Tensor:
    """|x|."""

def exp(input: Any, *, out: Tensor | None = None) -> Tensor:
    """e to the x."""

def exp2(input: Any, *, out: Tensor | None = None) -> Tensor:
    """2 to the x."""

def expm1(input: Any, *, out: Tensor | None = None) -> Tensor:
    """exp(x) - 1, exact near 0."""

def log(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The natural logarithm."""

def log2(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The logarithm to base 2."""

def log10(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The logarithm to base 10."""

def log1p(input: Any, *, out: Tensor | None = None) -> Tensor:
    """log(1 + x), exact near 0."""

def sqrt(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The square root."""

def rsqrt(input: Any, *, out: Tensor | None = None) -> Tensor:
    """1 / sqrt(x)."""

def sin(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The sine of x in radians."""

def cos(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The cosine of x in radians."""

def tan(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The tangent of x in radians."""

def asin(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The angle in radians whose sine is x."""

def acos(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The angle in radians whose cosine is x."""

def atan(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The angle in radians whose tangent is x."""

def atan2(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """The angle in radians of the point (b, a)."""

def sinh(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic sine."""

def cosh(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic cosine."""

def asinh(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The number whose hyperbolic sine is x."""

def acosh(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The number of at least 0 whose hyperbolic cosine is x."""

def atanh(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The number whose hyperbolic tangent is x."""

def cbrt(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The cube root."""

def tanh(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic tangent."""

def sigmoid(input: Any, *, out: Tensor | None = None) -> Tensor:
    """1 / (1 + exp(-x))."""

def erf(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The error function."""

def erfc(input: Any, *, out: Tensor | None = None) -> Tensor:
    """1 - erf(x), exact where x is large."""

def softplus(input: Any, beta: float = 1.0, threshold: float = 20.0, *, out: Tensor | None = None) -> Tensor:
    """log(1 + exp(beta x)) / beta; x where beta x is above the threshold."""

def swiglu(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up."""

def gelu(input: Any, approximate: str = "none", *, out: Tensor | None = None) -> Tensor:
    """x * Phi(x): "none" by erfc, "tanh", "fast" x*sigmoid(1.702x), "fast_tanh" 0.5x(1+tanh(1.702x))."""

def eq(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a == b."""

def ne(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a != b."""

def lt(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a < b."""

def le(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a <= b."""

def gt(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a > b."""

def ge(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a >= b."""

def floor(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The largest whole number that is not above x."""

def ceil(input: Any, *, out: Tensor | None = None) -> Tensor:
    """The smallest whole number that is not below x."""

def trunc(input: Any, *, out: Tensor | None = None) -> Tensor:
    """x without its fraction."""

def sign(input: Any, *, out: Tensor | None = None) -> Tensor:
    """-1, 0 or 1; 0 of NaN, as in PyTorch."""

def floor_divide(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a / b rounded down; integers divided by 0 are 0."""

def remainder(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a - floor(a / b) * b, with the sign of b; integers modulo 0 are 0."""

def fmod(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a - trunc(a / b) * b, with the sign of a; integers modulo 0 are 0."""

def integer_pow(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a to the power b, of integers; it wraps around as products do, and is 0 where it would be a fraction."""

def bitwise_and(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """The bits that both have, of integers or bools."""

def bitwise_or(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """The bits that one of both has, of integers or bools."""

def bitwise_xor(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """The bits in which both differ, of integers or bools."""

def bitwise_not(input: Any, *, out: Tensor | None = None) -> Tensor:
    """All bits turned over, of integers or bools."""

def left_shift(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a * 2**b in the bits of its type; 0 where b is negative or not below their number."""

def right_shift(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a / 2**b rounded down; 0 or -1, by the sign of a, where b is negative or not below the number of bits."""

def isnan(input: Any, *, out: Tensor | None = None) -> Tensor:
    """Whether x is NaN."""

def isinf(input: Any, *, out: Tensor | None = None) -> Tensor:
    """Whether x is infinite."""

def isfinite(input: Any, *, out: Tensor | None = None) -> Tensor:
    """Whether x is neither infinite nor NaN."""

def sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum over axes (None: all); integers and bools are summed in 64 bits."""

def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The mean over axes (None: all)."""

def amax(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The largest element over axes (None: all); NaN wins."""

def amin(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The smallest element over axes (None: all); NaN wins."""

def prod(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The product over axes (None: all); of integers and bools in 64 bits."""

def any(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Whether one element over axes (None: all) is not 0."""

def all(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Whether no element over axes (None: all) is 0."""

def argmin(input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The index of the smallest element along an axis (None: of all elements); ties go to the lowest."""

def argmax(input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The index of the largest element along an axis (None: of all elements); ties go to the lowest."""

class OpMethods:
    """The methods of Tensor that follow from the registry."""

    def add(self, other: Any) -> Tensor:
        """a + b."""

    def sub(self, other: Any) -> Tensor:
        """a - b."""

    def mul(self, other: Any) -> Tensor:
        """a * b."""

    def maximum(self, other: Any) -> Tensor:
        """The larger of a and b; NaN if either is."""

    def minimum(self, other: Any) -> Tensor:
        """The smaller of a and b; NaN if either is."""

    def neg(self) -> Tensor:
        """-x."""

    def abs(self) -> Tensor:
        """|x|."""

    def exp(self) -> Tensor:
        """e to the x."""

    def exp2(self) -> Tensor:
        """2 to the x."""

    def expm1(self) -> Tensor:
        """exp(x) - 1, exact near 0."""

    def log(self) -> Tensor:
        """The natural logarithm."""

    def log2(self) -> Tensor:
        """The logarithm to base 2."""

    def log10(self) -> Tensor:
        """The logarithm to base 10."""

    def log1p(self) -> Tensor:
        """log(1 + x), exact near 0."""

    def sqrt(self) -> Tensor:
        """The square root."""

    def rsqrt(self) -> Tensor:
        """1 / sqrt(x)."""

    def sin(self) -> Tensor:
        """The sine of x in radians."""

    def cos(self) -> Tensor:
        """The cosine of x in radians."""

    def tan(self) -> Tensor:
        """The tangent of x in radians."""

    def asin(self) -> Tensor:
        """The angle in radians whose sine is x."""

    def acos(self) -> Tensor:
        """The angle in radians whose cosine is x."""

    def atan(self) -> Tensor:
        """The angle in radians whose tangent is x."""

    def atan2(self, other: Any) -> Tensor:
        """The angle in radians of the point (b, a)."""

    def sinh(self) -> Tensor:
        """The hyperbolic sine."""

    def cosh(self) -> Tensor:
        """The hyperbolic cosine."""

    def asinh(self) -> Tensor:
        """The number whose hyperbolic sine is x."""

    def acosh(self) -> Tensor:
        """The number of at least 0 whose hyperbolic cosine is x."""

    def atanh(self) -> Tensor:
        """The number whose hyperbolic tangent is x."""

    def cbrt(self) -> Tensor:
        """The cube root."""

    def tanh(self) -> Tensor:
        """The hyperbolic tangent."""

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-x))."""

    def erf(self) -> Tensor:
        """The error function."""

    def erfc(self) -> Tensor:
        """1 - erf(x), exact where x is large."""

    def softplus(self, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
        """log(1 + exp(beta x)) / beta; x where beta x is above the threshold."""

    def swiglu(self, other: Any) -> Tensor:
        """silu(gate) * up."""

    def gelu(self, approximate: str = "none") -> Tensor:
        """x * Phi(x): "none" by erfc, "tanh", "fast" x*sigmoid(1.702x), "fast_tanh" 0.5x(1+tanh(1.702x))."""

    def eq(self, other: Any) -> Tensor:
        """a == b."""

    def ne(self, other: Any) -> Tensor:
        """a != b."""

    def lt(self, other: Any) -> Tensor:
        """a < b."""

    def le(self, other: Any) -> Tensor:
        """a <= b."""

    def gt(self, other: Any) -> Tensor:
        """a > b."""

    def ge(self, other: Any) -> Tensor:
        """a >= b."""

    def floor(self) -> Tensor:
        """The largest whole number that is not above x."""

    def ceil(self) -> Tensor:
        """The smallest whole number that is not below x."""

    def trunc(self) -> Tensor:
        """x without its fraction."""

    def sign(self) -> Tensor:
        """-1, 0 or 1; 0 of NaN, as in PyTorch."""

    def floor_divide(self, other: Any) -> Tensor:
        """a / b rounded down; integers divided by 0 are 0."""

    def remainder(self, other: Any) -> Tensor:
        """a - floor(a / b) * b, with the sign of b; integers modulo 0 are 0."""

    def fmod(self, other: Any) -> Tensor:
        """a - trunc(a / b) * b, with the sign of a; integers modulo 0 are 0."""

    def bitwise_and(self, other: Any) -> Tensor:
        """The bits that both have, of integers or bools."""

    def bitwise_or(self, other: Any) -> Tensor:
        """The bits that one of both has, of integers or bools."""

    def bitwise_xor(self, other: Any) -> Tensor:
        """The bits in which both differ, of integers or bools."""

    def bitwise_not(self) -> Tensor:
        """All bits turned over, of integers or bools."""

    def left_shift(self, other: Any) -> Tensor:
        """a * 2**b in the bits of its type; 0 where b is negative or not below their number."""

    def right_shift(self, other: Any) -> Tensor:
        """a / 2**b rounded down; 0 or -1, by the sign of a, where b is negative or not below the number of bits."""

    def isnan(self) -> Tensor:
        """Whether x is NaN."""

    def isinf(self) -> Tensor:
        """Whether x is infinite."""

    def isfinite(self) -> Tensor:
        """Whether x is neither infinite nor NaN."""

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum over axes (None: all); integers and bools are summed in 64 bits."""

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean over axes (None: all)."""

    def amax(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The largest element over axes (None: all); NaN wins."""

    def amin(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The smallest element over axes (None: all); NaN wins."""

    def prod(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The product over axes (None: all); of integers and bools in 64 bits."""

    def any(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """Whether one element over axes (None: all) is not 0."""

    def all(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """Whether no element over axes (None: all) is 0."""

    def argmin(self, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The index of the smallest element along an axis (None: of all elements); ties go to the lowest."""

    def argmax(self, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The index of the largest element along an axis (None: of all elements); ties go to the lowest."""

    def argsort(self, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
        """The indices that sort a dimension."""

    def bmm(self, other: Any, *, out: Tensor | None = None) -> Tensor:
        """Matrix product; one-dimensional operands are treated as in numpy."""

    def causal_softmax(self, out: Tensor | None = None) -> Tensor:
        """softmax over the last axis of scores [..., queries, keys], where a query sees no later key."""

    def celu(self, alpha: float = 1.0, inplace: bool = False) -> Tensor:
        """The input, alpha * (exp(input / alpha) - 1) where it is negative."""

    def clamp(self, min: Any = None, max: Any = None, *, out: Tensor | None = None) -> Tensor:
        """The input held between min and max."""

    def clip(self, min: Any = None, max: Any = None, *, out: Tensor | None = None) -> Tensor:
        """The input held between min and max."""

    def count_nonzero(self, dim: Any = None) -> Tensor:
        """How many elements over dimensions are not 0."""

    def cummax(self, dim: int) -> Sorted:
        """The largest element so far along a dimension, with the index of the last one that is."""

    def cummin(self, dim: int) -> Sorted:
        """The smallest element so far along a dimension, with the index of the last one that is."""

    def cumprod(self, dim: int, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
        """Running products along a dimension; of integers and bools in 64 bits."""

    def cumsum(self, dim: int, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
        """Running sums along a dimension; of integers and bools in 64 bits."""

    def div(self, other: Any, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
        """a / b; with rounding_mode "floor" or "trunc" a whole number, of integers an integer."""

    def elu(self, alpha: float = 1.0, inplace: bool = False) -> Tensor:
        """The input, alpha * (exp(input) - 1) where it is negative."""

    def frac(self, *, out: Tensor | None = None) -> Tensor:
        """What follows the point, with the sign of the input."""

    def gelu_tanh(self, *, out: Tensor | None = None) -> Tensor:
        """gelu with the tanh approximation."""

    def glu(self, dim: int = -1) -> Tensor:
        """The first half of a dimension times the sigmoid of the second."""

    def hardshrink(self, lambd: float = 0.5) -> Tensor:
        """The input, 0 where it is not farther than lambd from 0."""

    def hardsigmoid(self, inplace: bool = False) -> Tensor:
        """input / 6 + 0.5, held between 0 and 1."""

    def hardswish(self, inplace: bool = False) -> Tensor:
        """input * hardsigmoid(input)."""

    def hardtanh(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
        """The input held between min_val and max_val, in its own element type."""

    def leaky_relu(self, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
        """The input, negative_slope times it where it is negative."""

    def lerp(self, end: Any, weight: Any, *, out: Tensor | None = None) -> Tensor:
        """input + weight * (end - input)."""

    def log_softmax(self, dim: int = -1, *, dtype: Any = None) -> Tensor:
        """The logarithm of softmax, without its underflow."""

    def logical_and(self, other: Any, *, out: Tensor | None = None) -> Tensor:
        """a and b; what is not 0 counts as true."""

    def logical_not(self, *, out: Tensor | None = None) -> Tensor:
        """not x; what is not 0 counts as true."""

    def logical_or(self, other: Any, *, out: Tensor | None = None) -> Tensor:
        """a or b; what is not 0 counts as true."""

    def logical_xor(self, other: Any, *, out: Tensor | None = None) -> Tensor:
        """Either a or b; what is not 0 counts as true."""

    def logsigmoid(self) -> Tensor:
        """log(sigmoid(input)), without its underflow."""

    def logsumexp(self, dim: Any, keepdim: bool = False) -> Tensor:
        """The logarithm of the sum of exponentials over dimensions, without their overflow."""

    def matmul(self, other: Any, *, out: Tensor | None = None) -> Tensor:
        """Matrix product; one-dimensional operands are treated as in numpy."""

    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The largest element; along a dimension with its index, the first of equals; or the larger of two tensors."""

    def min(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The smallest element; along a dimension with its index, the first of equals; or the smaller of two tensors."""

    def mish(self, inplace: bool = False) -> Tensor:
        """input * tanh(log(1 + exp(input)))."""

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None, *, out: Tensor | None = None) -> Tensor:
        """The input with other numbers for NaN and infinities (those of largest size where none are given)."""

    def norm(self, p: Any = 2.0, dim: Any = None, keepdim: bool = False) -> Tensor:
        """The p-norm of the elements over dimensions: (sum |x|**p)**(1/p)."""

    def normalize(self, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, *, out: Tensor | None = None) -> Tensor:
        """The input divided by its p-norm over dimensions (by eps where that is smaller)."""

    def pow(self, other: Any, *, out: Tensor | None = None) -> Tensor:
        """a to the power b; of integers an integer, which wraps around as products do."""

    def prelu(self, weight: Any) -> Tensor:
        """The input, weight times it where it is negative; one weight, or one for each channel (dimension 1)."""

    def reciprocal(self, *, out: Tensor | None = None) -> Tensor:
        """1 / input."""

    def relu(self, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
        """max(input, 0)."""

    def relu6(self, inplace: bool = False) -> Tensor:
        """The input held between 0 and 6."""

    def round(self, decimals: int = 0, *, out: Tensor | None = None) -> Tensor:
        """The nearest number of so many decimals; halves go to the even one."""

    def selu(self, inplace: bool = False) -> Tensor:
        """elu with the slopes that keep mean 0 and variance 1."""

    def silu(self, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
        """input * sigmoid(input)."""

    def softmax(self, dim: int = -1, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
        """exp(input) / sum(exp(input)) along a dimension."""

    def softmin(self, dim: int = -1, *, dtype: Any = None) -> Tensor:
        """softmax of -input."""

    def softshrink(self, lambd: float = 0.5) -> Tensor:
        """The input moved towards 0 by lambd."""

    def softsign(self) -> Tensor:
        """input / (1 + |input|)."""

    def sort(self, dim: int = -1, descending: bool = False, stable: bool = True) -> Sorted:
        """Values in order along a dimension, with their indices; always stable."""

    def square(self, *, out: Tensor | None = None) -> Tensor:
        """input * input."""

    def std(self, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None) -> Tensor:
        """The square root of the variance."""

    def std_mean(self, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None) -> tuple[Tensor, Tensor]:
        """The square root of the variance, and the mean, over dimensions."""

    def tanhshrink(self) -> Tensor:
        """input - tanh(input)."""

    def threshold(self, threshold: float, value: float, inplace: bool = False) -> Tensor:
        """The input where it is above the threshold, else a value."""

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Sorted:
        """The k largest (or smallest) values along a dimension, in order, with their indices; ties go to the lowest."""

    def var(self, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None) -> Tensor:
        """The variance over dimensions: squares of distances from the mean, divided by their number less `correction`."""

    def var_mean(self, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None) -> tuple[Tensor, Tensor]:
        """The variance and the mean over dimensions."""

    def cast(self, dtype: Any) -> Tensor:
        """The input in another element type; floats to integers truncate."""

    def diag(self, diagonal: int = 0) -> Tensor:
        """A square matrix with the vector as its diagonal, or the diagonal of a matrix."""

    def diag_embed(self, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        """The last dimension as the diagonal of a new square one; zero elsewhere."""

    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """The diagonal of two dimensions, as the last one; it begins `offset` columns to the right, or rows below."""

    def flip(self, dims: Any, *more: int) -> Tensor:
        """The order of elements turned round along dimensions."""

    def full_like(self, fill_value: float | int | bool, *, dtype: Any = None) -> Tensor:
        """One value in the shape and element type of another tensor."""

    def gather(self, dim: int, index: Any) -> Tensor:
        """input[…, index[…], …] element by element, as torch.gather; other dimensions of the index may be smaller."""

    def index_add(self, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Tensor:
        """The input with alpha times the slices of source added at indices of a dimension, in order."""

    def index_copy(self, dim: int, index: Any, source: Any) -> Tensor:
        """The input with the slices of source at indices of a dimension; of several for one place the last counts."""

    def index_fill(self, dim: int, index: Any, value: Any) -> Tensor:
        """The input with one value in the slices at indices of a dimension."""

    def index_put(self, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
        """The input with `values` at the elements that one index for each of the first dimensions names."""

    def index_select(self, dim: int, index: Any) -> Tensor:
        """Slices of the input along a dimension, by an index of any rank (numpy's take)."""

    def masked_fill(self, mask: Any, value: Any) -> Tensor:
        """The input with `value` where the mask holds, in the input's element type."""

    def movedim(self, source: Any, destination: Any) -> Tensor:
        """Dimensions at other places; the others keep their order."""

    def one_hot(self, num_classes: int = -1) -> Tensor:
        """1 at the place that each integer names in a new last dimension, 0 elsewhere."""

    def ones_like(self, *, dtype: Any = None) -> Tensor:
        """Ones in the shape and element type of another tensor."""

    def outer(self, vec2: Any) -> Tensor:
        """All products of an element of one vector with one of another."""

    def pad(self, pad: Sequence[Dim], mode: str = "constant", value: float | int | bool | None = None) -> Tensor:
        """More elements before and after each of the last dimensions, the last one's sizes first; negative ones cut."""

    def repeat_interleave(self, repeats: Any, dim: int | None = None) -> Tensor:
        """Each element of a dimension `repeats` times in a row; without a dimension, of the flat tensor."""

    def roll(self, shifts: Any, dims: Any = None) -> Tensor:
        """Elements moved along dimensions (none: of the flat input); those that leave at the end come in at the front."""

    def scatter(self, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: str | None = None) -> Tensor:
        """The input with elements of src (or one value) at the places that the index names along a dimension."""

    def scatter_add(self, dim: int, index: Any, src: Any) -> Tensor:
        """The input with elements of src added at the places that the index names along a dimension, in order."""

    def scatter_reduce(self, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Tensor:
        """Elements of src joined at the places that the index names: "sum", "prod", "mean", "amax" or "amin"."""

    def select_rows(self, rows: Any) -> Tensor:
        """input[b, rows[b]] for each b, the dimension kept: the last valid token of each sequence."""

    def take(self, index: Any) -> Tensor:
        """Elements of the flat input; negative indices count from the end."""

    def take_along(self, index: Any, dim: int = -1) -> Tensor:
        """The same as gather, with the index first."""

    def tile(self, dims: Any, *more: Dim) -> Tensor:
        """The input so many times along each of the last dimensions."""

    def tril(self, diagonal: int = 0) -> Tensor:
        """The lower triangle of the last two dimensions; zero elsewhere."""

    def triu(self, diagonal: int = 0) -> Tensor:
        """The upper triangle of the last two dimensions; zero elsewhere."""

    def unflatten(self, dim: int, sizes: Sequence[Dim]) -> Tensor:
        """One dimension as several, of which one may be -1."""

    def zeros_like(self, *, dtype: Any = None) -> Tensor:
        """Zeros in the shape and element type of another tensor."""

    def integer_pow(self, other: Any, *, out: Tensor | None = None) -> Tensor:
        """a to the power b, of integers; it wraps around as products do, and is 0 where it would be a fraction."""
