"""What the engine is asked for and what it answers: one request, its settings, its pieces of text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

import numpy as np

from monoplan.ir.errors import ArgumentError, MonoplanError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array
from monoplan.models.generate.decoding import Row, Settings, is_real, is_whole


class Constraint(Protocol):
    """What a text must follow: a grammar that says which tokens may come next."""

    def mask(self) -> Array:
        """The tokens that may come next, bool [vocab]. Runs in a thread of its own, while a step runs."""

    def accept(self, token: int) -> bool:
        """Takes the token that was chosen; True if the text is complete and may end here without another token."""


@dataclass(frozen=True)
class Sampling(Settings):
    """Settings, and what only a server's clients ask for."""

    presence_penalty: float = 0.0  # taken from the score of every token that was answered
    frequency_penalty: float = 0.0  # the same, for each time that it was
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the scores of tokens
    logprobs: int | None = None  # with each token its log probability, and those of so many best ones
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("presence_penalty", "frequency_penalty"):
            if not (is_real(getattr(self, name)) and -2 <= getattr(self, name) <= 2):
                raise ArgumentError(f"{name} must be a number from -2 to 2, got {getattr(self, name)!r}")
        if not all(
            is_whole(token) and is_real(bias) and -100 <= bias <= 100 for token, bias in self.logit_bias.items()
        ):
            raise ArgumentError(f"logit_bias must be numbers from -100 to 100 by token id, got {self.logit_bias!r:.80}")
        if self.logprobs is not None and not (is_whole(self.logprobs) and 0 <= self.logprobs <= 20):
            raise ArgumentError(f"logprobs must be a whole number from 0 to 20, got {self.logprobs!r}")


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log probability, and the best ones in its place with theirs, the best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What a step added to an answer: text that is certain now (it may be empty), and in the end why it ended.

    finish_reason is None, eos, stop, length, cancelled or error; `error` has the words of an error.
    """

    text: str = ""
    token: TokenLogprob | None = None  # None: nothing was chosen, as when a request is cancelled
    finish_reason: str | None = None
    error: MonoplanError | None = None


class Busy(MonoplanError):
    """The queue is full, or the engine is closing: ask again later."""


class Request:
    """One answer in the making. The engine's thread writes it; others read it and may cancel it."""

    def __init__(self, number: int, row: Row, sampling: Sampling, on_piece: Callable[[Piece], Any]) -> None:
        self.number, self.row, self.sampling, self.on_piece = number, row, sampling, on_piece
        self.cancelled = False
        self.cached_tokens = 0  # of the prompt, which an earlier request had computed
        self.arrived = time.monotonic()
        self.started: float | None = None  # when its first token of the prompt ran
        self.first: float | None = None  # when its first token was chosen
        self.ended: float | None = None

    @property
    def prompt_ids(self) -> list[int]:
        return self.row.result.prompt_ids

    @property
    def ids(self) -> list[int]:
        """The answer so far."""
        return self.row.result.ids

    @property
    def finish_reason(self) -> str | None:
        return self.row.result.finish_reason

    def cancel(self) -> None:
        """Ends it before the next step; its last piece says cancelled."""
        self.cancelled = True


class EmbeddingRequest(Request):
    """A request for the vector of a text, f32 [hidden] of length 1, which is there with the last piece."""

    vector: Array | None = None


def unit(vector: Array) -> Array:
    """A vector of length 1, f32; zeros stay zeros."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / (length or 1.0)).astype(np.float32)
