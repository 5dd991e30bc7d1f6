"""Text from a language model: one step with sampling inside, and the loop that feeds it.

The loop is the same for the eager module and for the compiled plan: it needs `_run_step`, `new_cache`, `config`
and `tokenizer` of the class that it is mixed into. Every row of a batch has its own lengths and random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from monoplan.frontend import functional as F
from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import spec
from monoplan.ir.errors import ArgumentError

if TYPE_CHECKING:
    from monoplan.models.config import LlamaConfig

Array = NDArray[Any]
Ids = Sequence[int] | Array
Prompt = str | Ids


class GenerationStep(Module):
    """One step of generation as one graph: the model, the penalty, the choice of a token, and its probability."""

    def __init__(self, lm: Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self, input_ids: Tensor, past_key_values: KVCache, num_valid: Tensor, history: Tensor,
        history_count: Tensor, penalty: Tensor, random_val: Tensor, top_p: Tensor, top_k: Tensor,
        temperature: Tensor, min_p: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Token i64 [batch], its log probability before penalty and temperature f32 [batch], logits [batch, 1, vocab]."""
        logits = self.lm(input_ids, past_key_values=past_key_values, num_valid=num_valid)
        raw = logits.squeeze(1).float()
        scores = F.repetition_penalty(raw, history, history_count, penalty)
        token = F.random_sample(scores, random_val, top_p, top_k, temperature, min_p=min_p)
        # log softmax at one place only: the whole row of it is never stored.
        top = raw.max(dim=-1, keepdim=True)
        total = F.log(F.exp(raw - top).sum(dim=-1, keepdim=True)) + top
        logprob = (F.take_along(raw, token.unsqueeze(-1)) - total).squeeze(-1)
        return {"token": token, "logprob": logprob, "logits": logits}


def step_specs(config: LlamaConfig, dtype: Any) -> dict[str, Any]:
    """Placeholders for GenerationStep.forward: batch, seq, capacity and hist are symbols, so one graph serves all."""
    numbers = {"penalty": "float32", "random_val": "float32", "top_p": "float32", "top_k": "int32",
               "temperature": "float32", "min_p": "float32"}  # fmt: skip
    return {
        "input_ids": spec("batch", "seq", dtype="int64"),
        "past_key_values": cache_spec(config, dtype),
        "num_valid": spec("batch", dtype="int32"),
        "history": spec("batch", "hist", dtype="int64"),
        "history_count": spec("batch", dtype="int32"),
        **{name: spec("batch", dtype=kind) for name, kind in numbers.items()},
    }


@dataclass(frozen=True)
class Settings:
    """How to choose tokens and when to stop; checked when made."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: always the best token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, fits, expected in (
            (
                "max_new_tokens",
                _whole(self.max_new_tokens) and self.max_new_tokens > 0,
                "a whole number above 0",
            ),
            ("temperature", _real(self.temperature) and self.temperature >= 0, "a number of 0 or more"),
            ("top_k", _whole(self.top_k) and 0 <= self.top_k < 2**31, "a whole number of 0 or more"),
            ("top_p", _real(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", _real(self.min_p) and 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", _real(self.repetition_penalty) and self.repetition_penalty > 0, "above 0"),
            ("seed", _whole(self.seed), "a whole number"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "texts that are not empty"),
        ):
            if not fits:
                raise ArgumentError(f"{name} must be {expected}, got {getattr(self, name)!r}")


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return (
        not isinstance(value, bool | str)
        and isinstance(value, int | float | np.floating)
        and math.isfinite(value)
    )


def random_value(seed: int, row: int, step: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: the same text on any machine and thread count."""
    bits = int(np.random.Philox(key=seed % 2**128, counter=[step, row, 0, 0]).random_raw())
    return (bits >> 40) * 2.0**-24  # 24 bits, so that float32 can't round it up to 1


@dataclass
class Generation:
    """What became of one prompt. finish_reason: eos, stop (a stop text), length, callback; None: not finished."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)  # without the end-of-text id; a stop text's ids are included
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


class _Row:
    """One prompt of a batch: what it has so far, and how its tokens become text."""

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
        self.limit = min(
            settings.max_new_tokens, room - len(prompt) + 1
        )  # the last token needs no place in the cache
        self.decoder = None if tokenizer is None else tokenizer.stream(prompt)
        self.stops = StopText(settings.stop)

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
        if result.finish_reason in ("eos", "length") and self.decoder is not None:
            last, stopped = self.stops.push(self.decoder.finish())
            piece += last + self.stops.finish()
            result.finish_reason = "stop" if stopped else result.finish_reason
        result.text += piece
        if self.callback is not None and self.callback(self.number, token, piece) is False:
            result.finish_reason = result.finish_reason or "callback"
        return piece


class TextStream:
    """An iterator over pieces of text as they are made; `result` tells the rest when it has ended."""

    def __init__(self, result: Generation, pieces: Iterator[str]) -> None:
        self.result, self._pieces = result, pieces

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)


class GenerationMixin:
    """`generate` for a class with config, tokenizer, new_cache and _run_step."""

    config: LlamaConfig
    tokenizer: Any

    def new_cache(self, batch: int = 1, capacity: int = 0) -> KVCache:
        """An empty cache for `batch` rows."""
        raise NotImplementedError

    def _run_step(self, **arguments: Any) -> dict[str, Array]:
        """Runs GenerationStep on arrays and a cache, which it writes; gives token, logprob and logits."""
        raise NotImplementedError

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and answer together: dynamic RoPE stretches the trained length."""
        rope = self.config.rope_scaling or {}
        factor = rope["factor"] if rope.get("rope_type") == "dynamic" else 1
        return int(self.config.max_position_embeddings * factor)

    def generate(
        self, prompt: Prompt, max_new_tokens: int = 128, *, callback: Callable[..., Any] | None = None,
        logprobs: bool = False, add_special_tokens: bool = True, **settings: Any,
    ) -> TextStream:  # fmt: skip
        """Continues a text (or token ids) and gives pieces of text as they are made.

        Settings: temperature=0.0 (greedy), top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0,
        stop=None (texts), eos_token_id=None (the model's own; () for none). `callback(row, token, piece)` is called
        for each token; False ends the row. Wrong arguments are reported at once, not at the first piece.
        """
        if not _is_one(prompt):
            raise ArgumentError("generate takes one prompt", fix="use generate_batch for several")
        rows = self._rows([prompt], max_new_tokens, callback, logprobs, add_special_tokens, settings)
        return TextStream(rows[0].result, (piece for _, piece in self._loop(rows) if piece))

    def generate_batch(
        self, prompts: Sequence[Prompt], max_new_tokens: int = 128, *, callback: Callable[..., Any] | None = None,
        logprobs: bool = False, add_special_tokens: bool = True, **settings: Any,
    ) -> list[Generation]:  # fmt: skip
        """Continues several prompts of any lengths together; each gets the tokens that it gets alone."""
        if _is_one(prompts):
            raise ArgumentError("generate_batch takes a list of prompts", fix="use generate for one")
        rows = self._rows(prompts, max_new_tokens, callback, logprobs, add_special_tokens, settings)
        for _ in self._loop(rows):
            pass
        return [row.result for row in rows]

    def generate_ids(self, ids: Ids, max_new_tokens: int = 128, **settings: Any) -> list[int]:
        """The ids that follow a prompt of ids, without the end-of-text id."""
        return self.generate_batch([ids], max_new_tokens, **settings)[0].ids

    def _rows(
        self, prompts: Sequence[Prompt], max_new_tokens: int, callback: Any, logprobs: bool, special: bool,
        given: dict[str, Any],
    ) -> list[_Row]:  # fmt: skip
        tokenizer = self.tokenizer
        settings = self._settings(max_new_tokens, given, tokenizer)
        if settings.stop and tokenizer is None:
            raise ArgumentError("stop texts need a tokenizer", why="the model was made without one")
        rows = []
        for number, prompt in enumerate(prompts):
            ids = self._prompt_ids(prompt, special)
            rows.append(_Row(number, ids, settings, self.max_length, tokenizer, callback, logprobs))
        if not rows:
            raise ArgumentError("there is no prompt to continue")
        return rows

    def _settings(self, max_new_tokens: int, given: dict[str, Any], tokenizer: Any) -> Settings:
        stop, eos = given.pop("stop", None) or (), given.pop("eos_token_id", None)
        known = Settings.__dataclass_fields__.keys() - {"stop", "eos_ids", "max_new_tokens"}
        if unknown := given.keys() - known:
            names = ", ".join(sorted(known | {"stop", "eos_token_id"}))
            raise ArgumentError(f"unknown setting {', '.join(sorted(unknown))}", fix=f"settings are: {names}")
        if eos is None:
            eos = {*self.config.eos_ids, *(() if tokenizer is None else tokenizer.eos_ids)}
        eos_ids = frozenset([eos] if _whole(eos) else eos)
        return Settings(
            max_new_tokens, stop=(stop,) if isinstance(stop, str) else tuple(stop), eos_ids=eos_ids, **given
        )

    def _prompt_ids(self, prompt: Prompt, special: bool) -> list[int]:
        """Checked token ids of a prompt."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError(
                    "a text prompt needs a tokenizer",
                    why="the model was made without one",
                    fix="give token ids, or load the model from a directory with tokenizer.json",
                )
            prompt = self.tokenizer.encode(prompt, add_special_tokens=special)
        if not all(map(_whole, prompt)):
            raise ArgumentError("a prompt is a text or a list of token ids")
        ids, size = [int(token) for token in prompt], self.config.vocab_size
        if not ids:
            raise ArgumentError(
                "the prompt is empty",
                why="the model needs at least one token to start from",
                fix="give a text, or the id of the beginning-of-text token",
            )
        for place, token in enumerate(ids):
            if not 0 <= token < size:
                raise ArgumentError(
                    f"token id {token} at position {place} of the prompt is out of range [0, {size})"
                )
        if len(ids) > self.max_length:
            raise ArgumentError(
                f"the prompt has {len(ids)} tokens, the model's context {self.max_length}",
                fix="shorten the prompt",
            )
        return ids

    def _loop(self, rows: list[_Row]) -> Iterator[tuple[_Row, str]]:
        """Runs the batch until every row is finished; gives each row's piece of text after each token."""
        longest = max(len(row.result.prompt_ids) for row in rows)
        cache = self.new_cache(len(rows), min(self.max_length, longest + 64))
        ids, valid = _padded([row.result.prompt_ids for row in rows])
        active, step = rows, 0
        while active:
            out = self._run_step(
                input_ids=ids, past_key_values=cache, num_valid=valid, **_choice(active, step)
            )
            chosen = zip(active, out["token"].tolist(), out["logprob"].tolist(), strict=True)
            yield from [(row, row.push(token, logprob)) for row, token, logprob in chosen]
            # A finished row leaves the batch: its mates go on without paying for it.
            keep = [i for i, row in enumerate(active) if row.result.finish_reason is None]
            if 0 < len(keep) < len(active):
                cache = take_rows(cache, keep)
            active = [active[i] for i in keep]
            ids = np.array([[row.result.ids[-1]] for row in active], np.int64)
            valid = np.ones(len(active), np.int32)
            step += 1


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or all(map(_whole, prompt))


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Prompts side by side, padded on the right with 0, and how many tokens of each count."""
    valid = np.array([len(p) for p in prompts], np.int32)
    ids = np.zeros((len(prompts), valid.max()), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids, valid


def _choice(rows: Sequence[_Row], step: int) -> dict[str, Array]:
    s = rows[0].settings
    draws = [random_value(s.seed, row.number, step) if s.temperature > 0 else 0.0 for row in rows]
    return sampling_arrays(s, draws, [row.result.prompt_ids + row.result.ids for row in rows])


def sampling_arrays(
    settings: Settings, draws: Sequence[float], histories: Sequence[Sequence[int]] | None = None
) -> dict[str, Array]:
    """The arguments of GenerationStep that say how to choose: one entry for each row, which `draws` counts."""
    batch, s = len(draws), settings
    # Without a penalty the history is not read, so it need not travel to the plan.
    used = histories if histories is not None and s.repetition_penalty != 1 else None
    history, count = _padded([[0]] * batch if used is None else used)
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
