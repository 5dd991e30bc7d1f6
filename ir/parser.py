"""Text to graph. Errors name line and column; `print(parse(print(g))) == print(g)`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.builder import make_op
from monoplan.ir.dims import LARGEST, Dim, parse_dim
from monoplan.ir.errors import MonoplanError, ParseError
from monoplan.ir.graph import Graph, Loc, Op, Param, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import REGISTRY, OpDef
from monoplan.ir.types import ALL_TYPES, DTYPES, TensorType, unfit

_NUMBER = re.compile(r"-?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DEEPEST = 16  # tuples in tuples, graphs in graphs
_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
_NAME = r"[\w.$-]+"
_TYPE = re.compile(r"(\w+)\[([^\]]*)\]")
_HEAD = re.compile(rf"graph ({_NAME})\((.*)\) \{{")
_PARAM = re.compile(rf"param %({_NAME}): (\w+\[[^\]]*\]) = (\".*\")")
_OP = re.compile(rf"((?:%{_NAME}(?:, )?)+) = (\w+)\(([^)]*)\)")
_LOC = re.compile(r' @ ("(?:[^"\\]|\\.)*") ("(?:[^"\\]|\\.)*"):([0-9]{1,9})$')


def parse_graph(text: str) -> Graph:
    """A graph from its text: types are inferred again and compared with those written."""
    parser = _Parser(text.splitlines())
    graph = parser.graph()
    parser.expect_end()
    return graph


def parse_type(text: str) -> TensorType:
    """A tensor type from its text, such as f32[2, n]."""
    return _Parser([text]).type(text)


@dataclass
class _Parser:
    lines: list[str]
    at: int = 0
    scopes: list[dict[str, Value]] = field(default_factory=list)

    def fail(self, what: str, fragment: str = "") -> ParseError:
        line = self.lines[self.at] if self.at < len(self.lines) else ""
        column = line.find(fragment) + 1 if fragment and fragment in line else len(line) - len(line.lstrip()) + 1
        return ParseError(f"line {self.at + 1}, column {column}: {what}", where=line.strip() or "end of text")

    def next_line(self) -> str:
        """The next line that is neither blank nor a comment, stripped."""
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            if line and not line.startswith("//"):
                return line
            self.at += 1
        raise self.fail("the text ends inside a graph; `}` is missing")

    def expect_end(self) -> None:
        for i in range(self.at, len(self.lines)):
            line = self.lines[i].strip()
            if line and not line.startswith("//"):
                self.at = i
                raise self.fail("text after the end of the graph")

    def graph(self) -> Graph:
        head = self.next_line()
        m = _HEAD.fullmatch(head)
        if m is None:
            raise self.fail("expected `graph name(%x: f32[…], …) {`")
        if len(self.scopes) >= _DEEPEST:
            raise self.fail("graphs are nested too deeply")
        self.scopes.append({})
        inputs = tuple(self.define(n, self.type(t)) for n, t in self.split_signature(m[2]))
        self.at += 1
        params: list[Param] = []
        setup: list[Op] = []
        ops: list[Op] = []
        while not (line := self.next_line()).startswith("return"):
            if line.startswith("param "):
                params.append(self.param(line))
                self.at += 1
            elif line.startswith("setup "):
                setup.append(self.op(line.removeprefix("setup ")))
            else:
                ops.append(self.op(line))
        outputs, writes = self.outputs(line.removeprefix("return"), inputs)
        self.at += 1
        if self.next_line() != "}":
            raise self.fail("expected `}` after return")
        self.at += 1
        self.scopes.pop()
        return Graph(m[1], inputs, tuple(params), tuple(ops), outputs, tuple(setup), writes)

    def outputs(self, text: str, inputs: tuple[Value, ...]) -> tuple[tuple[Value, ...], tuple[tuple[int, int], ...]]:
        """`%y, %cache_1 -> %cache`: results, and the inputs whose contents they replace."""
        found, writes = [], []
        for j, piece in enumerate(_pieces(text)):
            name, _, into = piece.partition(" -> ")
            found.append(self.value(name.strip()))
            if into:
                place = self.value(into.strip())
                if place not in inputs:
                    raise self.fail(f"{into.strip()} is not an input of the graph", into)
                writes.append((inputs.index(place), j))
        return tuple(found), tuple(writes)

    def split_signature(self, text: str) -> list[tuple[str, str]]:
        found = re.findall(rf"%({_NAME}): (\w+\[[^\]]*\])", text)
        rebuilt = ", ".join(f"%{n}: {t}" for n, t in found)
        if rebuilt != text.strip():
            raise self.fail("inputs are written `%name: f32[2, n]`, separated by commas", text)
        return found

    def param(self, line: str) -> Param:
        m = _PARAM.fullmatch(line)
        if m is None:
            raise self.fail('expected `param %name: f32[2, 3] = "state.dict.path"`')
        return Param(self.define(m[1], self.type(m[2])), self.string(m[3]))

    def string(self, text: str) -> str:
        try:
            return str(json.loads(text))
        except ValueError:
            raise self.fail(f"{text} is not a string", text) from None

    def op(self, line: str) -> Op:
        """One op line; a Graph attribute follows on the next lines."""
        loc = Loc()
        if lm := _LOC.search(line):
            loc = Loc(self.string(lm[1]), self.string(lm[2]), int(lm[3]))
            line = line[: lm.start()]
        m = _OP.match(line)
        if m is None:
            raise self.fail("expected `%result = op(%operand, …) {attr=value} : type`")
        opdef = REGISTRY.get(m[2])
        if opdef is None:
            raise self.fail(f"there is no op named {m[2]}", m[2])
        rest = line[m.end() :].strip()
        attrs: dict[str, Any] = {}
        if rest.startswith("{"):
            end = _closing(rest)
            if end < 0:
                raise self.fail("`{` is not closed", rest)
            attrs = self.attrs(rest[1:end])
            rest = rest[end + 1 :].strip()
        if not rest.startswith(":"):
            raise self.fail("expected `: type` at the end of the op", rest or line)
        types = [self.type(t) for t in _pieces(rest[1:])]
        operands: list[Value | None] = [None if t == "_" else self.value(t) for t in _pieces(m[3])]
        operands += [None] * (len(opdef.operand_names) - len(operands))
        here = self.at
        self.at += 1
        for name, default in opdef.attr_defaults.items():
            if name == "body" and name not in attrs and default is not None:
                attrs[name] = self.graph()
        after, self.at = self.at, here
        result = self.make(opdef, operands, attrs, [p[1:] for p in _pieces(m[1])], loc)
        for v, t in zip(result.results, types, strict=False):
            if v.type != t:
                raise self.fail(f"{v} is written as {t}, but the type rule of {opdef.name} gives {v.type}", str(t))
        if len(types) != len(result.results):
            raise self.fail(f"{opdef.name} has {len(result.results)} results, {len(types)} types are written")
        self.at = after
        return result

    def make(self, opdef: OpDef, operands: list[Value | None], attrs: dict[str, Any], names: list[str], loc: Loc) -> Op:
        try:
            op = make_op(opdef, operands, attrs, names=names, loc=loc, fresh=lambda stem: stem)
        except MonoplanError as error:
            raise self.fail(error.what) from None
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, OverflowError) as error:
            raise self.fail(f"{opdef.name}: attributes or operands do not fit ({error})") from None
        if len(names) != len(op.results):
            raise self.fail(f"{opdef.name} has {len(op.results)} results, {len(names)} names are written")
        for v in op.results:
            if why := unfit(v.type):
                raise self.fail(f"{v}: the type rule of {opdef.name} gives a type that can't be: {why}")
            self.register(v)
        return op

    def define(self, name: str, type_: TensorType) -> Value:
        v = Value(type_, name)
        self.register(v)
        return v

    def register(self, v: Value) -> None:
        if v.name in self.scopes[-1]:
            raise self.fail(f"{v} is defined twice", str(v))
        self.scopes[-1][v.name] = v

    def value(self, text: str) -> Value:
        if not text.startswith("%"):
            raise self.fail(f"expected a value such as %x, found {text!r}", text)
        v = self.scopes[-1].get(text[1:])
        if v is None:
            raise self.fail(f"{text} is not defined before this line", text)
        return v

    def type(self, text: str) -> TensorType:
        m = _TYPE.fullmatch(text.strip())
        if m is None or m[1] not in ALL_TYPES:
            raise self.fail(f"{text.strip()!r} is not a tensor type such as f32[2, n]", text.strip())
        found = TensorType(ALL_TYPES[m[1]], tuple(self.dim(d) for d in _pieces(m[2])))
        if why := unfit(found):
            raise self.fail(f"{text.strip():.60} is no type: {why}", text.strip())
        return found

    def dim(self, text: str) -> Dim:
        try:
            return parse_dim(text)
        except MonoplanError as error:
            raise self.fail(error.what, text) from None

    def attrs(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for piece in _pieces(text):
            name, equals, value = piece.partition("=")
            if not equals or not name.isidentifier():
                raise self.fail("attributes are written {name=value, …}", piece)
            found[name] = self.attr_value(value)
        return found

    def attr_value(self, text: str, depth: int = 0) -> Any:
        text = text.strip()
        closed = text.count("(") == text.count(")")
        if text == "()" or text.startswith("(") and ("," in text or not closed):  # else a dim such as (n+1)//2
            if not text.endswith(")"):
                raise self.fail("`(` is not closed", text)
            if depth >= _DEEPEST:
                raise self.fail("tuples are nested too deeply", text)
            return tuple(self.attr_value(t, depth + 1) for t in _pieces(text[1:-1]))
        if text in DTYPES:
            return DTYPES[text]
        if text in ("inf", "-inf", "nan"):
            return float(text)
        if text in _WORDS:
            return _WORDS[text]
        if _NUMBER.fullmatch(text):
            if not text.lstrip("-").isdigit():
                return float(text)
            if len(text) > 21 or abs(int(text)) > LARGEST:
                raise self.fail(f"{text[:24]} is larger than {LARGEST}", text)
            return int(text)
        if text.startswith('"'):
            try:
                return json.loads(text)
            except ValueError:
                raise self.fail(f"{text} is not a string", text) from None
        return self.dim(text)


def _pieces(text: str) -> list[str]:
    """Splits at commas outside of brackets and strings."""
    found: list[str] = []
    depth, start = 0, 0
    for i, c in _unquoted(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    if tail := text[start:].strip():
        found.append(tail)
    return found


def _unquoted(text: str) -> Iterator[tuple[int, str]]:
    """The characters outside of strings, with their places."""
    quoted = escaped = False
    for i, c in enumerate(text):
        if quoted:
            quoted, escaped = escaped or c != '"', c == "\\" and not escaped
        elif c == '"':
            quoted = True
        else:
            yield i, c


def _closing(text: str) -> int:
    """The index of the `}` that closes the `{` at 0, or -1."""
    depth = 0
    for i, c in _unquoted(text):
        if c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
            if depth == 0:
                return i
    return -1
