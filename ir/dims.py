"""Dimensions: an int, or a polynomial over named symbols (`batch * seq + 1`, `seq // 2`).

Enough algebra for shapes: sums and products are kept in a canonical form, so that equality is comparison;
`//` by an int divides exactly where it can and is otherwise kept as an atom. Every symbol is at least 1.
"""

from __future__ import annotations

import contextlib
import contextvars
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Union

from monoplan.ir.errors import ParseError
from monoplan.ir.lazy_dataclass import dataclass

# Tokens for the two small expression languages of the IR: dims and pointwise expressions.
#
# Python's own `ast` is not used: text may come from anywhere, and some releases of CPython raise SystemError from
# `ast.parse` when a collection of garbage runs in the middle of it.


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[^\W\d]\w*)|(?P<text>'[^']*')|(?P<mark>//|[-+*(),=]))"
)
DEEPEST = 200  # brackets inside brackets
LARGEST_INTEGER = 2**64 - 1  # of integers


class Scanner:
    """The tokens of a text, read one by one; every complaint names the text."""

    def __init__(self, text: str, what: str) -> None:
        self.text, self.what = text, what
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        self.depth = 0
        position = 0
        end = len(text.rstrip())
        while position < end:
            m = _TOKEN.match(text, position)
            if m is None or m.lastgroup is None:
                raise self.wrong()
            token = m[m.lastgroup]
            # Digits are counted first: Python refuses to convert thousands of them.
            if token.isdecimal() and (len(token) > len(str(LARGEST_INTEGER)) or int(token) > LARGEST):
                raise self.wrong(f"{token[:24]} is larger than {LARGEST_INTEGER}")
            self.tokens.append((m.lastgroup, token))
            position = m.end()

    def wrong(self, why: str = "") -> ParseError:
        shown = self.text if len(self.text) <= 200 else self.text[:200] + "…"
        return ParseError(f"{shown!r} is not {self.what}" + (f": {why}" if why else ""))

    def peek(self, ahead: int = 0) -> str:
        """The text of a token ahead, empty at the end."""
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        if self.at >= len(self.tokens):
            raise self.wrong()
        self.at += 1
        return self.tokens[self.at - 1][1]

    def skip(self, mark: str) -> bool:
        """Takes the next token if it is this mark."""
        if self.peek() == mark and self.kind() == "mark":
            self.at += 1
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.skip(mark):
            raise self.wrong()

    def open(self) -> None:
        """Enters brackets: no text may be nested so deeply that it exhausts the stack."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.wrong("it is nested too deeply")

    def close(self) -> None:
        self.expect(")")
        self.depth -= 1

    def end(self) -> None:
        if self.at != len(self.tokens):
            raise self.wrong()


def number(text: str) -> int | float:
    """A literal's value."""
    return int(text) if text.isdigit() else float(text)


Dim = Union[int, "Expr"]
Atom = Union[str, "FloorDiv"]
Monomial = tuple[Atom, ...]

LARGEST = 2**63 - 1  # of sizes: what a plan counts with
MOST_ATOMS = 256  # of an expression, nested ones counted: text may ask for a product of any size

# Makes the error for an undecidable text; True: a plain number was needed, not a comparison.
MakeError = Callable[[str, bool], Exception]

# Set by the tracer while user code runs: comparing a symbolic size with an int is then an error, not a silent
# False.
_undecided: contextvars.ContextVar[MakeError | None] = contextvars.ContextVar("undecided", default=None)


@contextlib.contextmanager
def comparisons_raise(make_error: MakeError | None) -> Iterator[None]:
    """Within it, an undecidable comparison or number of a symbolic size raises `make_error` (None: as usual)."""
    token = _undecided.set(make_error)
    try:
        yield
    finally:
        _undecided.reset(token)


@dataclass(frozen=True)
class FloorDiv:
    """`numerator // denominator` that does not divide exactly; an atom of a monomial."""

    numerator: Expr
    denominator: int

    def __str__(self) -> str:
        return f"({self.numerator})//{self.denominator}"


@dataclass(frozen=True, eq=False)
class Expr:
    """A canonical polynomial: sorted (monomial, coefficient) pairs without zeros; never a plain int."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return _sum(self, other, -1)

    def __rsub__(self, other: Dim) -> Dim:
        return _sum(other, self, -1)

    def __neg__(self) -> Dim:
        return _sum(0, self, -1)

    def __mul__(self, other: Dim) -> Dim:
        if not isinstance(other, (int, Expr)):
            return NotImplemented
        result: dict[Monomial, int] = {}
        if isinstance(other, Expr) and len(self.terms) * len(other.terms) > 4 * MOST_ATOMS:
            raise _too_large()
        for m1, c1 in self.terms:
            for m2, c2 in _terms(other):
                key = tuple(sorted(m1 + m2, key=str))
                result[key] = result.get(key, 0) + c1 * c2
        return _make(result)

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        quotient = divide_exactly(self, other)
        if quotient is not None:
            return quotient
        if isinstance(other, Expr):
            raise ParseError(f"{self} // {other}: a symbolic divisor must divide exactly")
        if other <= 0:
            raise ParseError(f"{self} // {other}: a divisor must be 1 or more")
        return _make({(FloorDiv(self, other),): 1})

    def __rfloordiv__(self, other: int) -> Dim:
        quotient = divide_exactly(other, self)
        if quotient is None:
            raise ParseError(f"{other} // {self}: a symbolic divisor must divide exactly")
        return quotient

    def __mod__(self, other: int) -> Dim:
        return self - (self // other) * other

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Expr):
            if self.terms == other.terms:
                return True
        elif not isinstance(other, int):
            return NotImplemented
        make_error = _undecided.get()
        if make_error is not None and possible(self, other):
            raise make_error(f"{self} == {other}", False)
        return False

    def __hash__(self) -> int:
        return hash(self.terms)

    def _compare(self, other: Dim, sign: str) -> bool:
        low, high = bounds(self - other)
        decided = {
            "<": (high is not None and high < 0, low is not None and low >= 0),
            "<=": (high is not None and high <= 0, low is not None and low > 0),
            ">": (low is not None and low > 0, high is not None and high <= 0),
            ">=": (low is not None and low >= 0, high is not None and high < 0),
        }[sign]
        if decided[0] or decided[1]:
            return decided[0]
        make_error = _undecided.get()
        text = f"{self} {sign} {other}"
        raise make_error(text, False) if make_error else TypeError(f"{text} is not decided: the size is symbolic")

    def __lt__(self, other: Dim) -> bool:
        return self._compare(other, "<")

    def __le__(self, other: Dim) -> bool:
        return self._compare(other, "<=")

    def __gt__(self, other: Dim) -> bool:
        return self._compare(other, ">")

    def __ge__(self, other: Dim) -> bool:
        return self._compare(other, ">=")

    def __bool__(self) -> bool:
        return self > 0

    def __index__(self) -> int:
        make_error = _undecided.get()
        raise make_error(str(self), True) if make_error else TypeError(f"{self} is symbolic, not an int")

    @cached_property
    def atoms(self) -> int:
        """How many atoms there are, those inside of divisions as well."""
        return sum(1 + sum(1 if isinstance(a, str) else 1 + a.numerator.atoms for a in m) for m, _ in self.terms)

    @cached_property
    def text(self) -> str:
        parts: list[str] = []
        for monomial, coefficient in self.terms:
            # `2*(n+1)//2` would be read as `(2*(n+1))//2`: a division stands alone or in parentheses.
            alone = coefficient == 1 and len(monomial) == 1
            factors = [str(a) if alone or isinstance(a, str) else f"({a})" for a in monomial]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+" if parts else ""
            parts.append(f"{sign}{'*'.join(factors)}")
        return "".join(parts)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


# In the text of an attribute these are numbers or element types.
_RESERVED = re.compile(r"inf|nan|bool|bf16|[fiu](8|16|32|64)")


def symbol(name: str) -> Expr:
    """The symbol `name`."""
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or _RESERVED.fullmatch(name):
        raise ParseError(f"{name!r} is not a name for a symbolic dimension", fix="use a name such as seq")
    return Expr((((name,), 1),))


def as_dim(spec: int | str | Expr) -> Dim:
    """A Dim from an int, an expression in text, or a Dim."""
    if isinstance(spec, str):
        return parse_dim(spec)
    return spec if isinstance(spec, Expr) else int(spec)


def equal(a: Dim, b: Dim) -> bool:
    """Whether two dims are the same expression (never raises)."""
    if isinstance(a, Expr) and isinstance(b, Expr):
        return a.terms == b.terms
    return not isinstance(a, Expr) and not isinstance(b, Expr) and a == b


def same_dims(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are the same expressions."""
    return len(a) == len(b) and all(map(equal, a, b))


def bounds(d: Dim) -> tuple[int | None, int | None]:
    """The range that `d` can take when every symbol is at least 1 (None: unbounded)."""
    low: int | None = 0
    high: int | None = 0
    for monomial, c in _terms(d):
        if not monomial:
            low = None if low is None else low + c
            high = None if high is None else high + c
            continue
        least = _least(monomial)
        if least is None:
            return None, None
        if c > 0:
            low, high = (None if low is None else low + c * least), None
        else:
            low, high = None, (None if high is None else high + c * least)
    return low, high


def _least(monomial: Monomial) -> int | None:
    """The smallest value of a product of atoms, or None where an atom may be negative."""
    least = 1
    for atom in monomial:
        if not isinstance(atom, str):
            low, _ = bounds(atom.numerator)
            if low is None or low < 0:
                return None
            least *= low // atom.denominator
    return least


def possible(a: Dim, b: Dim) -> bool:
    """Whether a == b can hold for some values of the symbols."""
    low, high = bounds(a - b)
    return (low is None or low <= 0) and (high is None or high >= 0)


def divide_exactly(a: Dim, b: Dim) -> Dim | None:
    """a / b when the division leaves nothing, else None."""
    if isinstance(b, int) and b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a % b == 0 else None
    divisor = _terms(b)
    if len(divisor) != 1:
        return 1 if equal(a, b) else _divide_polynomial(a, b)
    (mono, coefficient) = divisor[0]
    result: dict[Monomial, int] = {}
    for m, c in _terms(a):
        rest = list(m)
        for atom in mono:
            if atom not in rest:
                return None
            rest.remove(atom)
        if c % coefficient:
            return None
        result[tuple(rest)] = c // coefficient
    return _make(result)


def _divide_polynomial(a: Dim, b: Dim) -> Dim | None:
    """Long division by the leading term; shapes need only a step or two."""
    quotient: Dim = 0
    rest: Dim = a
    lead = _make({_terms(b)[0][0]: _terms(b)[0][1]})
    for _ in range(8):
        if isinstance(rest, int) and rest == 0:
            return quotient
        head = _terms(rest)[0]
        step = divide_exactly(_make({head[0]: head[1]}), lead)
        if step is None:
            return None
        quotient, rest = quotient + step, rest - step * b
    return None


def symbols_of(d: Dim) -> set[str]:
    """The names of the symbols in `d`."""
    found: set[str] = set()
    for monomial, _ in _terms(d):
        for atom in monomial:
            found |= {atom} if isinstance(atom, str) else symbols_of(atom.numerator)
    return found


def symbols_in(attr: object) -> set[str]:
    """The names of the symbols in an attribute: a dim, or tuples of them."""
    if isinstance(attr, tuple):
        return set().union(*map(symbols_in, attr))
    return symbols_of(attr) if isinstance(attr, Expr) else set()


def evaluate(d: Dim, values: Mapping[str, int]) -> int:
    """The int that `d` is for these values of its symbols."""
    result = 0
    for monomial, coefficient in _terms(d):
        for atom in monomial:
            factor = values[atom] if isinstance(atom, str) else evaluate(atom.numerator, values) // atom.denominator
            coefficient *= factor
        result += coefficient
    return result


def substitute(d: Dim, values: Mapping[str, Dim]) -> Dim:
    """`d` with symbols replaced by other dims."""
    result: Dim = 0
    for monomial, coefficient in _terms(d):
        term: Dim = coefficient
        for atom in monomial:
            if isinstance(atom, str):
                term = term * values.get(atom, symbol(atom))
            else:
                term = term * (substitute(atom.numerator, values) // atom.denominator)
        result = result + term
    return result


def format_dim(d: Dim) -> str:
    """The text that parse_dim reads back."""
    return str(d)


@lru_cache(4096)  # the types of a graph have few dims, many times
def parse_dim(text: str) -> Dim:
    """A Dim from text such as `2*batch*seq+1` or `(seq+1)//2`."""
    scanner = Scanner(text, "a dimension")
    result = _parse_sum(scanner)
    scanner.end()
    if isinstance(result, int) and abs(result) > LARGEST:
        raise scanner.wrong(f"it is larger than {LARGEST}")
    return result


def _parse_sum(s: Scanner) -> Dim:
    result = _parse_product(s)
    while True:
        if s.skip("+"):
            result = result + _parse_product(s)
        elif s.skip("-"):
            result = result - _parse_product(s)
        else:
            return result


def _parse_product(s: Scanner) -> Dim:
    result = _parse_factor(s)
    while True:
        if s.skip("*"):
            result = result * _parse_factor(s)
            if isinstance(result, int) and abs(result) > LARGEST:
                raise s.wrong(f"it is larger than {LARGEST}")
        elif s.skip("//"):
            divisor = _parse_factor(s)
            if isinstance(divisor, Expr):
                result = result // divisor if isinstance(result, Expr) else divisor.__rfloordiv__(result)
            elif divisor == 0:
                raise s.wrong("it divides by 0")
            else:
                result = result // divisor
        else:
            return result


def _parse_factor(s: Scanner) -> Dim:
    if s.skip("-"):
        s.open()
        result = 0 - _parse_factor(s)
        s.depth -= 1
        return result
    if s.skip("("):
        s.open()
        inner = _parse_sum(s)
        s.close()
        return inner
    if s.kind() == "name":
        return symbol(s.take())
    if s.kind() == "number" and s.peek().isdigit():
        return int(s.take())
    raise s.wrong("ints, names, + - * // and parentheses are allowed")


def _terms(d: Dim) -> tuple[tuple[Monomial, int], ...]:
    return d.terms if isinstance(d, Expr) else (((), d),) if d else ()


def _sum(a: Dim, b: Dim, sign: int) -> Dim:
    if not isinstance(a, (int, Expr)) or not isinstance(b, (int, Expr)):
        return NotImplemented
    result = dict(_terms(a))
    for m, c in _terms(b):
        result[m] = result.get(m, 0) + sign * c
    return _make(result)


def _make(terms: Mapping[Monomial, int]) -> Dim:
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    if set(kept) == {()}:
        return kept[()]
    if len(kept) > MOST_ATOMS or any(abs(c) > LARGEST for c in kept.values()):
        raise _too_large()
    made = Expr(tuple(sorted(kept.items(), key=lambda item: (-len(item[0]), [str(a) for a in item[0]]))))
    if made.atoms > MOST_ATOMS:
        raise _too_large()
    return made


def _too_large() -> ParseError:
    why = f"it has more than {MOST_ATOMS} parts, or a number larger than {LARGEST}"
    return ParseError("the size of a dimension is too large an expression", why=why)
