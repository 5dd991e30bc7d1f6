"""Generation step by step through the host: the road of the eager model, of the CPU, and of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.models.decoding import Array, Row, padded, pieces, random_value, sampling_arrays

if TYPE_CHECKING:
    from monoplan.models.generation import Session


class HostRoad:
    """The steps of one call of generate: arguments from the host and results to it, every time."""

    def __init__(self, lm: Any, rows: list[Row], session: Session | None) -> None:
        self.lm, self.rows, self.step = lm, rows, 0
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

    def next(self) -> tuple[list[int], list[float]]:
        """The next token of every row and its log probability."""
        s = self.rows[0].settings
        draws = [random_value(s.seed, row.number, self.step) if s.temperature > 0 else 0.0 for row in self.rows]
        choice = sampling_arrays(s, draws, [row.tokens for row in self.rows])
        out: dict[str, Array] = {}
        for ids, valid in pieces(self.ids, self.valid, self.cache, self.lm.prefill_chunk):
            out = self.lm._run_step(input_ids=ids, past_key_values=self.cache, num_valid=valid, **choice)
        self.step += 1
        return out["token"].tolist(), out["logprob"].tolist()

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, with the tokens that they got."""
        if 0 < len(rows) < len(self.rows):
            self.cache = self.cache.select(rows)
        self.rows = [self.rows[i] for i in rows]
        self.ids = np.array([[row.result.ids[-1]] for row in self.rows], np.int64)
        self.valid = np.ones(len(self.rows), np.int32)

    def close(self) -> None:
        """Nothing is under way."""
