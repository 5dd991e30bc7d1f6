"""Tokens for the two small expression languages of the IR: dims and pointwise expressions.

Python's own `ast` is not used: text may come from anywhere, and some releases of CPython raise SystemError from
`ast.parse` when a collection of garbage runs in the middle of it.
"""

from __future__ import annotations

import re

from monoplan.ir.errors import ParseError

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[^\W\d]\w*)|(?P<text>'[^']*')|(?P<mark>//|[-+*(),=]))"
)
DEEPEST = 200  # brackets inside brackets
LARGEST = 2**64 - 1  # of integers


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
            if token.isdecimal() and (len(token) > len(str(LARGEST)) or int(token) > LARGEST):
                raise self.wrong(f"{token[:24]} is larger than {LARGEST}")
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
