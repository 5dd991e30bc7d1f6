"""Generation step by step through the host: for the eager model, the CPU, and several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.models.generate.decoding import Array, Row, padded, pieces, random_values, sampling_arrays

if TYPE_CHECKING:
    from monoplan.models.generate.generation import Session

DRAWN = 64  # random numbers that are made at once


class HostSteps:
    """The steps of one call of generate: arguments from the host and results to it, every time.

    The arrays of arguments belong to this object. As long as the same rows go on they are reused, with new
    contents, which a plan is called with at little cost.
    """

    def __init__(self, lm: Any, rows: list[Row], session: Session | None) -> None:
        self.lm, self.rows, self.step = lm, rows, 0
        self.settings = rows[0].settings
        prompts = [row.result.prompt_ids for row in rows]
        if session is None or session.cache is None:
            self.cache: Any = lm.new_cache(len(rows), max(map(len, prompts)) + 64)
            start = 0
        else:
            self.cache, start = session.cache, session.shared(prompts[0])
            if hasattr(self.cache, "on_host"):  # it was a GPU's
                self.cache = self.cache.on_host()
            self.cache.truncate(start)
        if session is not None:
            session.cache = self.cache
        self.ids, self.valid = padded([p[start:] for p in prompts])
        self.choice, self.draws = self._choice(), np.zeros((len(rows), 0), np.float32)

    def next(self) -> tuple[list[int], list[float]]:
        """The next token of every row and its log probability."""
        if self.settings.temperature > 0:
            self.choice["random_val"][:] = self._draw()
        out: dict[str, Array] = {}
        for ids, valid in pieces(self.ids, self.valid, self.cache, self.lm.prefill_chunk, self.lm.config):
            out = self.lm._run_step(input_ids=ids, past_key_values=self.cache, num_valid=valid, **self.choice)
        self.step += 1
        return out["token"].tolist(), out["logprob"].tolist()

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, with the tokens that they got."""
        fewer = len(rows) < len(self.rows)
        if fewer:
            self.cache = self.cache.select(rows) if rows else self.cache
            self.rows, self.draws = [self.rows[i] for i in rows], self.draws[rows]
        last = [row.result.ids[-1] for row in self.rows]
        if fewer or self.ids.shape[1] > 1:
            self.ids = np.array(last, np.int64)[:, None]
            self.valid = np.ones(len(last), np.int32)
        else:
            self.ids[:, 0] = last
        if rows and (fewer or not self._noted(last)):
            self.choice = self._choice()

    def close(self) -> None:
        """Nothing is under way."""

    def _choice(self) -> dict[str, Array]:
        """How to choose, with the tokens so far if there is a penalty for them."""
        penalized = self.settings.repetition_penalty != 1
        histories = [row.tokens for row in self.rows] if penalized else None
        return sampling_arrays(self.settings, [0.0] * len(self.rows), histories)

    def _noted(self, tokens: list[int]) -> bool:
        """Adds a token to the history of each row; False if there is no room for it."""
        if self.settings.repetition_penalty == 1:
            return True
        history, counts = self.choice["history"], self.choice["history_count"]
        if counts.max() == history.shape[1]:
            return False
        history[np.arange(len(tokens)), counts] = tokens
        counts += 1
        return True

    def _draw(self) -> Array:
        """A random number for each row: those of several steps are made at once."""
        at = self.step % DRAWN
        if at == 0:
            s = self.settings
            self.draws = np.array([random_values(s.seed, row.number, self.step, DRAWN) for row in self.rows])
        return self.draws[:, at]
