"""Texts that must follow a JSON schema, a grammar or a regular expression: masks over the vocabulary, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import Array

# A model that may write any number of spaces between two tokens of JSON sometimes writes nothing else.
_JSON: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
LARGEST = 1 << 18  # characters of a grammar


class GrammarConstraint:
    """The state of one text in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self) -> Array:
        """The tokens that may come next, bool [vocab]."""
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0
        self._check()
        return allowed

    def accept(self, token: int) -> bool:
        """Takes the token that was chosen; True if nothing can follow."""
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def copy(self) -> GrammarConstraint:
        """The same state, for another text."""
        return GrammarConstraint(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("<state>")[0].strip()
            raise ArgumentError("the grammar can't be followed any further", why=why, fix="use a simpler grammar")


class Grammars:
    """Makes constraints for the vocabulary of a tokenizer, which is prepared at the first use."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._source, self._eos_ids, self._vocab_size = tokenizer, sorted(eos_ids), vocab_size
        self._made: Any = None
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> Any:
        """llguidance's view of the vocabulary."""
        with self._lock:
            if self._made is None:
                from llguidance import LLTokenizer

                if self._source is None:
                    raise ArgumentError("a grammar needs a tokenizer", why="the model was made without one")
                try:
                    text = self._source.to_json()
                    self._made = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids or None)
                except ValueError as error:
                    what = "the model's tokenizer can't be held to a grammar"
                    raise LoadError(what, why=str(error)[:200]) from None
            return self._made

    def make(self, kind: str, value: Any) -> GrammarConstraint:
        """A constraint; kind is json (a schema), regex, choice (texts) or grammar (Lark or GBNF)."""
        from llguidance import LLMatcher, grammar_from

        try:
            if kind == "json":
                schema = value if isinstance(value, str) else json.dumps(value)
                made, size = LLMatcher.grammar_from_json_schema(schema, defaults=_JSON), len(schema)
            else:
                made, size = grammar_from(kind, value), len(json.dumps(value))  # type: ignore[arg-type]
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(f"the {_NAMES[kind]} can't be used", why=str(error)[:300]) from None
        if size > LARGEST:
            raise ArgumentError(f"the {_NAMES[kind]} has {size} characters, the limit is {LARGEST}")
        matcher = LLMatcher(self.vocabulary, made, log_level=0)
        if matcher.is_error():
            raise ArgumentError(f"the {_NAMES[kind]} can't be used", why=matcher.get_error()[:300])
        return GrammarConstraint(matcher)


_NAMES: Mapping[str, str] = {
    "json": "JSON schema",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
}
