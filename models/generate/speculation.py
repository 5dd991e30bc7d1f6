"""Drafts: tokens that are guessed and then checked several at a time: a pass over the weights may give more than one.

Every token is the one that plain decoding gives, sampled or not: a draft counts as far as it says what the model itself
chooses, with the random number of that step. Guesses come from the text so far (n-gram lookup) or from a smaller model.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import field
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.models.generate.decoding import Row, may_be_cut, random_values, sampling_arrays
from monoplan.models.generate.generation import HostSteps, Session

ROWS = (4, 6, 8, 12, 24)  # tokens of a run that checks a draft
SIZES = (16, 8, 5, 3, 2)  # tokens at the end of a text that are looked up: the more of them are found, the better
LONGEST = 32  # tokens that are compared at most
GUESSED_COST = 0.5  # of another row, in single steps, as long as none was timed
GROWTH = 0.9  # power of the number of rows that a run's time is guessed to grow with
WEIGHT = 0.25  # of the latest time or result in an average
GAIN = 1.03  # a draft is tried if it promises so much more speed
LOSS, START = 0.012, 1.0  # what drafts may have cost: a share of all time, and single steps to begin with
PROBE = 48  # tokens after which a draft model that did not pay is tried again


class Lookup:
    """Guesses that the text goes on as it did where its last tokens stood before."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # where the text went on behind these tokens, the last time
        # How often a guess was right, by the length of what it rests on.
        self._chances = {SIZES[-1]: 0.2, 3: 0.4, 4: 0.5, 6: 0.6, 9: 0.7, 16: 0.8, LONGEST: 0.9}

    def push(self, token: int) -> None:
        """The next token of the text."""
        for size in SIZES:
            if len(self.tokens) >= size:
                self._places[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)

    def find(self) -> tuple[int, int]:
        """Where the text stood in the same way before, and for how many tokens; 0, 0: nowhere."""
        for size in SIZES:
            place = self._places.get(tuple(self.tokens[-size:]), 0) if len(self.tokens) >= size else 0
            if place:
                while size < min(LONGEST, place) and self.tokens[place - size - 1] == self.tokens[-size - 1]:
                    size += 1
                return place, size
        return 0, 0

    def chance(self, size: int) -> float:
        """The probability that the next guess is right."""
        return self._chances[self._known(size)]

    def learn(self, size: int, right: bool) -> None:
        """Notes whether a guess was right."""
        known = self._known(size)
        self._chances[known] += (right - self._chances[known]) * WEIGHT / 2

    def _known(self, size: int) -> int:
        return max(s for s in self._chances if s <= max(size, SIZES[-1]))


class DraftModel:
    """Guesses what a smaller model would say, with the same settings and random numbers."""

    def __init__(self, lm: Any, row: Row) -> None:
        self.lm, self.row = lm, row
        self.cache = lm.new_cache(1, len(row.result.prompt_ids) + 64)
        self.fed: list[int] = []
        self.chance, self.seconds = 0.7, 0.0  # of a right guess; of a step, 0: never timed

    def guess(self, tokens: list[int], step: int, count: int) -> list[int]:
        """The next tokens."""
        shared = next((i for i, (a, b) in enumerate(zip(self.fed, tokens, strict=False)) if a != b), len(self.fed))
        shared = min(shared, len(tokens) - 1)
        self.cache.truncate(shared)
        settings, found, new = self.row.settings, list(tokens), np.array([tokens[shared:]], np.int64)
        draws = random_values(settings.seed, self.row.number, step, count)
        for draw in draws:
            begin = time.perf_counter()
            choice = sampling_arrays(settings, [draw], [found])
            valid = np.array([new.shape[1]], np.int32)
            out = self.lm._run_step(input_ids=new, past_key_values=self.cache, num_valid=valid, **choice)
            if new.shape[1] == 1:
                self.seconds = averaged(self.seconds, time.perf_counter() - begin)
            found.append(int(out["token"][0]))
            new = np.array([found[-1:]], np.int64)
        self.fed = found[:-1]
        return found[len(tokens) :]


def averaged(old: float, new: float) -> float:
    """A running average, which begins with the first number."""
    return new if old == 0 else old + WEIGHT * (new - old)


@dataclass
class Ledger:
    """What runs take, and what drafts have cost or saved so far: they are tried only where that promises a gain."""

    seconds: dict[int, float] = field(default_factory=dict)  # by tokens of a run
    total: float = 0.0
    saved: float = 0.0

    def cost(self, rows: int) -> float:
        known = max(n for n in self.seconds if n <= rows)
        return self.seconds[known] * ((rows / known) ** GROWTH if known > 1 else 1 + (rows - 1) * GUESSED_COST)

    def note(self, rows: int, given: int, seconds: float, drafting: float = 0.0) -> None:
        """A run of so many tokens gave `given` of them; making its draft took `drafting` more."""
        self.seconds[rows] = averaged(self.seconds.get(rows, 0.0), seconds)
        self.total += seconds + drafting
        if rows > 1 or drafting:
            self.saved += given * self.seconds[1] - seconds - drafting

    @property
    def may_try(self) -> bool:
        return self.saved > -LOSS * self.total - START * self.seconds[1]

    def best(self, chance: float, most: int, each: float = 0.0) -> tuple[float, int]:
        """How many times faster than single steps drafts are, and how many rows they should be."""
        rates = [(1.0, 1)]
        for rows in ROWS:
            if rows <= most:
                expected = rows if chance >= 1 else (1 - chance**rows) / (1 - chance)
                rates.append((expected * self.seconds[1] / (self.cost(rows) + (rows - 1) * each), rows))
        return max(rates)


class DraftedSteps(HostSteps):
    """The steps of one text, several at a time where a draft promises to be right."""

    def __init__(
        self, lm: Any, rows: list[Row], session: Session | None, lookup: bool, draft: Any, adapter: str | None = None
    ) -> None:
        if len(rows) != 1:
            raise ArgumentError("drafts are for one prompt at a time", fix="leave lookup and draft out of a batch")
        super().__init__(lm, rows, session, adapter)
        self.row, self.ready, self.ledger = rows[0], deque[tuple[int, float]](), Ledger()
        self.lookup, self.draft = Lookup(), None if draft is None else DraftModel(draft, self.row)
        self.looks_up, self.since = lookup, 0
        for token in self.row.result.prompt_ids:
            self.lookup.push(token)

    def next(self) -> tuple[list[int], list[float]]:
        """The next token and its log probability."""
        if not self.ready:
            self._run()
        token, logprob = self.ready.popleft()
        return [token], [logprob]

    def keep(self, rows: list[int]) -> None:
        """The row goes on, or does not: a run that is due prepares itself."""

    def _run(self) -> None:
        if self.step == 0:  # the prompt
            self._accept(*super().next())
            return
        place, size = self.lookup.find() if self.looks_up else (0, 0)
        begin = time.perf_counter()
        drafts, sizes = self._drafts(place, size)
        drafted = time.perf_counter()
        if drafts:
            tokens, logprobs = self._checked(drafts)
            self.step += len(tokens)
        else:
            self.ids, self.valid = np.array([self.lookup.tokens[-1:]], np.int64), np.ones(1, np.int32)
            if self.settings.repetition_penalty != 1:
                self.choice = self._choice()
            tokens, logprobs = super().next()
        end = time.perf_counter()
        guesses = drafts or self.lookup.tokens[place : place + 1] if place or drafts else []
        for i, guess in enumerate(guesses[: len(tokens)]):
            right = guess == tokens[i]
            if sizes:
                self.lookup.learn(sizes + i, right)
            elif self.draft is not None and drafts:
                self.draft.chance += (right - self.draft.chance) * WEIGHT / 2
        self.since = 0 if drafts and not sizes else self.since + len(tokens)
        making = drafted - begin if drafts and not sizes else 0.0
        self.ledger.note(len(drafts) + 1, len(tokens), end - drafted, making)
        self._accept(tokens, logprobs)

    def _accept(self, tokens: list[int], logprobs: list[float]) -> None:
        for token in tokens:
            self.lookup.push(token)
        self.ready.extend(zip(tokens, logprobs, strict=True))

    def _drafts(self, place: int, size: int) -> tuple[list[int], int]:
        """A draft, and the length of what it rests on if it was looked up. Empty: a single step is as good."""
        ledger, tokens = self.ledger, self.lookup.tokens
        if 1 not in ledger.seconds:
            return [], size
        # The last token is only shown, and needs no place in the cache.
        most = min(self.row.limit - len(self.row.result.ids), self.lm.most_checked)
        while most > 1 and not may_be_cut(self.lm.config, len(tokens) - 1, len(tokens) - 1 + most):
            most -= 1
        if not ledger.may_try:
            return [], size
        rate, rows = ledger.best(self.lookup.chance(size), most) if place else (1.0, 1)
        if self.draft is not None:
            each = self.draft.seconds or ledger.seconds[1] * GUESSED_COST
            chance = max(self.draft.chance, 0.7) if self.since >= PROBE else self.draft.chance
            theirs, count = ledger.best(chance, most, each)
            if theirs >= GAIN and theirs > rate:
                return self.draft.guess(tokens, self.step, count - 1), 0
        # Behind the end of the text follows what was guessed: what repeats itself goes on to do so.
        period, end = len(tokens) - place, rows - 1 if rate >= GAIN else 0
        return [tokens[place + i % period] for i in range(end)], size

    def _checked(self, drafts: list[int]) -> tuple[list[int], list[float]]:
        """What the model chooses behind the text and behind each token of a draft, as long as that one is right."""
        tokens, rows, s = self.lookup.tokens, len(drafts) + 1, self.settings
        draws = random_values(s.seed, self.row.number, self.step, rows) if s.temperature > 0 else np.zeros(rows)
        histories = [(tokens + drafts)[: len(tokens) + i] for i in range(rows)] if s.repetition_penalty != 1 else None
        before = len(tokens) - 1
        out = self.lm._run_check(
            input_ids=np.array([tokens[-1:] + drafts], np.int64),
            past_key_values=self.cache,
            num_valid=np.array([rows], np.int32),
            **sampling_arrays(s, draws.tolist(), histories),
            **self.adapted,
        )
        chosen = out["token"].tolist()
        right = next((i for i, (a, b) in enumerate(zip(drafts, chosen, strict=False)) if a != b), len(drafts))
        self.cache.truncate(before + 1 + right)
        return chosen[: right + 1], out["logprob"].tolist()[: right + 1]
