"""How one prompt's tokens are chosen and become text: settings, random numbers, stop texts, results."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.ir.errors import ArgumentError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array
from monoplan.models.rope_scaling import table_key

if TYPE_CHECKING:
    from monoplan.models.config import LlamaConfig

HISTORY = 64  # what a history grows by: its size is then the same for many steps


@dataclass(frozen=True)
class Settings:
    """How to choose tokens and when to stop; checked when made."""

    max_new_tokens: int = 128  # -1: until the text ends or the context is full
    temperature: float = 0.0  # 0: always the best token
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # of the best tokens that together have this probability
    min_p: float = 0.0  # of those with this share of the best one's probability
    repetition_penalty: float = 1.0  # above 1: less of what was said
    seed: int = 0  # same seed, same text
    stop: tuple[str, ...] = ()  # texts before which to end
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        count, heat, k, p, least = self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.min_p
        penalty, texts = self.repetition_penalty, self.stop
        for name, fits, expected in (
            ("max_new_tokens", is_whole(count) and (count > 0 or count == -1), "a whole number above 0, or -1"),
            ("temperature", is_real(heat) and heat >= 0, "a number of 0 or more"),
            ("top_k", is_whole(k) and 0 <= k < 2**31, "a whole number of 0 or more"),
            ("top_p", is_real(p) and 0 < p <= 1, "a number above 0 and at most 1"),
            ("min_p", is_real(least) and 0 <= least <= 1, "a number from 0 to 1"),
            ("repetition_penalty", is_real(penalty) and penalty > 0, "a number above 0"),
            ("seed", is_whole(self.seed), "a whole number"),
            ("stop", all(isinstance(s, str) and s for s in texts), "texts that are not empty"),
            ("eos_ids", all(map(is_whole, self.eos_ids)), "token ids"),
        ):
            if not fits:
                raise ArgumentError(f"{name} must be {expected}, got {getattr(self, name)!r}")


def is_whole(value: Any) -> bool:
    """Whether it is an integer, of Python or numpy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)


def random_value(seed: int, row: int, step: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: the same text on any number of threads."""
    bits = int(np.random.Philox(key=seed % 2**128, counter=[step, row, 0, 0]).random_raw())
    return (bits >> 40) * 2.0**-24  # 24 bits, so that float32 can't round it up to 1


def random_values(seed: int, row: int, step: int, count: int) -> Array:
    """random_value for several steps in a row, float32: the generator's counter is the step."""
    bits = np.random.Philox(key=seed % 2**128, counter=[step, row, 0, 0]).random_raw(4 * count)[::4]
    return ((bits >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def padded(rows: Sequence[Sequence[int]], multiple: int = 1) -> tuple[Array, Array]:
    """Ids side by side, int64 [batch, longest], 0 on the right; and how many of each row count, int32.

    The width is the next multiple of a number.
    """
    counts = np.array([len(row) for row in rows], np.int32)
    ids = np.zeros((len(rows), -(-int(counts.max()) // multiple) * multiple), np.int64)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row)] = row
    return ids, counts


def pieces(
    ids: Array, valid: Array, cache: Any, chunk: int, config: LlamaConfig | None = None
) -> Iterator[tuple[Array, Array]]:
    """A prompt [batch, seq] in equal pieces of at most `chunk` tokens, all rows counted; `cache` grows between them.

    Memory for activations is thus bounded, whatever the prompt. A row that ends before the last piece gives its last
    token again, so that the last piece has the results of all rows. A prompt stays whole where the RoPE of `config`
    would turn the tokens of a shorter piece by other angles than those of the whole.
    """
    batch, seq = ids.shape
    count = -(-seq // max(chunk // batch, 1))
    numbers = valid.tolist()
    if count == 1 and 1 <= min(numbers) and max(numbers) <= seq:  # all in one, as every single token is
        yield np.ascontiguousarray(ids), valid.astype(np.int32, copy=False)
        return
    starts = cache.lengths.numpy()
    ends = starts + valid
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    if config is not None and not all(may_be_cut(config, start, end) for start, end in spans):
        count = 1
    width = -(-seq // count)
    for at in range(0, seq, width):
        piece = ids[:, at : at + width]
        left = np.minimum(valid - at, piece.shape[1])
        over = left < 1
        if over.any():
            cache.truncate(np.where(over, ends - 1, ends))
            piece = piece.copy()
            piece[over, 0] = ids[over, valid[over] - 1]
        yield np.ascontiguousarray(piece), np.where(over, 1, left).astype(np.int32)


def may_be_cut(config: LlamaConfig, start: int, end: int) -> bool:
    """Whether tokens get the same angles in every piece of a row: those of dynamic and longrope follow its length."""
    # A key that is the same for the shortest beginning and for the whole is the same for all between them.
    return table_key(config, start + 1) == table_key(config, end)


def sampling_arrays(
    settings: Settings, draws: Sequence[float], histories: Sequence[Sequence[int]] | None = None
) -> dict[str, Array]:
    """The arguments of GenerationStep that say how to choose: an entry for each row, which `draws` counts."""
    batch, s = len(draws), settings
    # Without a penalty the history is not read, so it need not travel to the plan.
    used = histories if histories is not None and s.repetition_penalty != 1 else None
    history, count = padded([[0]] * batch) if used is None else padded(used, HISTORY)
    return {
        "history": history,
        "history_count": np.zeros(batch, np.int32) if used is None else count,
        "penalty": np.full(batch, s.repetition_penalty, np.float32),
        "random_val": np.array(draws, np.float32),
        "top_p": np.full(batch, s.top_p, np.float32),
        "top_k": np.full(batch, s.top_k, np.int32),
        "temperature": np.full(batch, s.temperature, np.float32),
        "min_p": np.full(batch, s.min_p, np.float32),
    }


@functools.lru_cache(64)
def greedy_arrays(batch: int) -> Mapping[str, Array]:
    """sampling_arrays of the best token, the same ones for every call: to be read only."""
    return sampling_arrays(Settings(), [0.0] * batch)


@functools.lru_cache(64)
def whole_rows(batch: int, seq: int) -> Array:
    """num_valid where all tokens count, the same array for every call: to be read only."""
    return np.full(batch, seq, np.int32)


@dataclass
class Generation:
    """What became of one prompt; finish_reason is eos, stop (a stop text), length or callback in the end."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)  # without the end-of-text id, but with those of a stop text
    text: str = ""
    logprobs: list[float] | None = None
    finish_reason: str | None = None


class StopText:
    """Holds back the end of a text while it may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held = tuple(stops), ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop text was found; it and what follows are dropped."""
        self.held += text
        found = [at for s in self.stops if (at := self.held.find(s)) >= 0]
        if found:
            shown, self.held = self.held[: min(found)], ""
            return shown, True
        sizes = (n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n]))
        keep = len(self.held) - max(sizes, default=0)
        shown, self.held = self.held[:keep], self.held[keep:]
        return shown, False

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        shown, self.held = self.held, ""
        return shown


class Row:
    """One prompt of a batch: its tokens as they come, and the text that they become."""

    def __init__(
        self,
        number: int,
        prompt: list[int],
        settings: Settings,
        room: int,
        tokenizer: Any,
        callback: Any,
        logprobs: bool,
    ) -> None:
        self.number, self.settings, self.callback = number, settings, callback
        self.result = Generation(prompt, logprobs=[] if logprobs else None)
        # The last token is only shown and never fed back: it needs no room.
        most = room - len(prompt) + 1
        self.limit = most if settings.max_new_tokens == -1 else min(settings.max_new_tokens, most)
        self.decoder = None if tokenizer is None else tokenizer.stream(prompt)
        self.stops = StopText(settings.stop)

    @property
    def tokens(self) -> list[int]:
        """The prompt and what followed."""
        return self.result.prompt_ids + self.result.ids

    def push(self, token: int, logprob: float) -> str:
        """Takes the next token and returns the text that it makes certain."""
        result, piece, stopped = self.result, "", False
        if token in self.settings.eos_ids:
            result.finish_reason = "eos"
        else:
            result.ids.append(token)
            if result.logprobs is not None:
                result.logprobs.append(logprob)
            if self.decoder is not None:
                piece, stopped = self.stops.push(self.decoder.push(token))
            if stopped:
                result.finish_reason = "stop"
            elif len(result.ids) >= self.limit:
                result.finish_reason = "length"
        if result.finish_reason in ("eos", "length"):
            piece += self._rest()
        result.text += piece
        if self.callback is not None and self.callback(self.number, token, piece) is False:
            result.finish_reason = result.finish_reason or "callback"
        return piece

    def finish(self) -> str:
        """Ends the text here, as an end-of-text id would; returns what was held back of it."""
        self.result.finish_reason = "eos"
        piece = self._rest()
        self.result.text += piece
        return piece

    def _rest(self) -> str:
        if self.decoder is None:
            return ""
        last, stopped = self.stops.push(self.decoder.finish())
        if stopped:
            self.result.finish_reason = "stop"
        return last + self.stops.finish()
