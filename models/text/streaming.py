"""Token ids that come one by one, as text in whole characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monoplan.models.text.tokenizer import Tokenizer

CONTEXT = 8  # tokens of the prompt that are decoded with what follows
HALF = "\ufffd"  # what bytes that make no character are shown as, and so an unfinished one
_LATER_BYTE = re.compile("<0x[89AB][0-9A-F]>")  # the second to fourth byte of a character, each its own token


class StreamDecoder:
    """Turns ids into text as they come and holds back what may still be half a character."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Some vocabularies drop a space where a text begins; after a few tokens this is no beginning.
        self._window = [int(token) for token in context[self._beginning(context) :]]
        self._fresh = 0  # how many ids of the window have not been part of a finished text
        text = self._text(len(self._window))
        self._given = len(text)  # how much of the window's text is out already
        self._prompt = text if text.endswith(HALF) else ""  # it may end inside a character

    def _beginning(self, context: Sequence[int]) -> int:
        """Where the window begins: never inside a character, which would make a whole run of bytes invalid."""
        at = max(len(context) - CONTEXT, 0)
        while at < len(context) and _LATER_BYTE.fullmatch(self._tokenizer.token(context[at]) or ""):
            at += 1
        return at

    def _text(self, count: int) -> str:
        return self._tokenizer.decode(self._window[:count])

    def push(self, token: int) -> str:
        """Take one id and return the text that is certain by now: often a word, sometimes nothing."""
        self._tokenizer._check(token)
        self._window.append(token)
        self._fresh += 1
        text = self._all()
        if not text.endswith(HALF):
            return self._release(text)
        # An unfinished character has at most three bytes, thus three tokens: what is before them is settled.
        settled = text.rstrip(HALF)
        if self._fresh > 3 and len(early := self._text(len(self._window) - 3)) > len(settled):
            settled = early
        piece = settled[self._given :]
        self._given += len(piece)
        return piece

    def finish(self) -> str:
        """Return what was held back: the replacement character stands for bytes that make no character."""
        return self._release(self._all())

    def _all(self) -> str:
        """The text of the window; what of it is new begins earlier if the prompt ended inside a character."""
        text = self._text(len(self._window))
        if not text.startswith(self._prompt):  # the character is whole now, and belongs to what follows
            held = self._unfinished(len(self._window) - self._fresh)
            self._fresh, self._prompt = self._fresh + held, ""
            self._given = len(self._text(len(self._window) - self._fresh))
        return text

    def _release(self, text: str) -> str:
        piece = text[self._given :]
        if piece:
            # Only the last ids stay, as context; their own text tells where the next piece begins.
            self._window, self._fresh, self._prompt = self._window[-self._fresh :], 0, ""
            self._given = len(self._text(len(self._window)))
        return piece

    def _unfinished(self, count: int) -> int:
        """How many of the first `count` ids of the window are an unfinished character at their end: three at most."""
        return next((n for n in range(1, min(count, 3) + 1) if not self._text(count - n).endswith(HALF)), 0)
