"""Made from the op registry by op_functions.stub(). Do not edit."""

from typing import Any

from monoplan.frontend.tensor import Tensor

__all__ = [
    "add",
    "sub",
    "mul",
    "div",
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
    "logical_and",
    "logical_or",
    "logical_not",
    "sum",
    "mean",
    "max",
    "min",
    "argmax",
]

WRITTEN_OUT: tuple[str, ...]

def write(result: Tensor, out: Any, inplace_of: Any = None) -> Tensor: ...
def stub() -> str: ...
def add(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a + b."""

def sub(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a - b."""

def mul(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a * b."""

def div(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a / b, of floats."""

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

def logical_and(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a and b, of bools."""

def logical_or(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """a or b, of bools."""

def logical_not(input: Any, *, out: Tensor | None = None) -> Tensor:
    """not x, of bools."""

def sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum over axes (None: all); integers and bools are summed in 64 bits."""

def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The mean over axes (None: all)."""

def max(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The largest element over axes (None: all); NaN wins."""

def min(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The smallest element over axes (None: all); NaN wins."""

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

    def div(self, other: Any) -> Tensor:
        """a / b, of floats."""

    def pow(self, other: Any) -> Tensor:
        """a to the power b, of floats."""

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

    def relu(self) -> Tensor:
        """max(x, 0); NaN stays NaN."""

    def silu(self) -> Tensor:
        """x * sigmoid(x)."""

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

    def logical_and(self, other: Any) -> Tensor:
        """a and b, of bools."""

    def logical_or(self, other: Any) -> Tensor:
        """a or b, of bools."""

    def logical_not(self) -> Tensor:
        """not x, of bools."""

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum over axes (None: all); integers and bools are summed in 64 bits."""

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean over axes (None: all)."""

    def max(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The largest element over axes (None: all); NaN wins."""

    def min(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The smallest element over axes (None: all); NaN wins."""

    def argmax(self, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The index of the largest element along an axis (None: of all elements); ties go to the lowest."""
