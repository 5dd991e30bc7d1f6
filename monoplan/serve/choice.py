"""How the next tokens of several texts are chosen: by the plan itself, or on the host what the plan can't say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import Array
from monoplan.models.generate.decoding import HISTORY, padded, random_value
from monoplan.serve.request import Request, TokenLogprob


def choice_arrays(requests: Sequence[Request], ahead: int = 0) -> dict[str, Array]:
    """The arguments of GenerationStep that say how to choose, each row by the settings of its request.

    `ahead`: tokens of each that are chosen already and not known yet.
    """
    given = [r.sampling for r in requests]
    histories = [r.row.tokens if s.repetition_penalty != 1 else [] for r, s in zip(requests, given, strict=True)]
    history, counts = padded(histories, HISTORY) if any(histories) else (np.zeros((len(given), 1), np.int64), None)
    draws = [0.0 if s.temperature == 0 else _draw(r, ahead) for r, s in zip(requests, given, strict=True)]
    return {
        "history": history,
        "history_count": np.zeros(len(given), np.int32) if counts is None else counts,
        "penalty": np.array([s.repetition_penalty for s in given], np.float32),
        "random_val": np.array(draws, np.float32),
        "top_p": np.array([s.top_p for s in given], np.float32),
        "top_k": np.array([s.top_k for s in given], np.int32),
        "temperature": np.array([s.temperature for s in given], np.float32),
        "min_p": np.array([s.min_p for s in given], np.float32),
    }


def _draw(r: Request, ahead: int = 0) -> float:
    """As `generate` draws for its first row: a text depends on its seed, and not on its neighbours."""
    return random_value(r.sampling.seed, 0, len(r.ids) + ahead)


def is_for_host(r: Request) -> bool:
    """Whether the token must be chosen from the logits, on the host."""
    s = r.sampling
    return bool(s.constraint or s.logit_bias or s.presence_penalty or s.frequency_penalty)


def is_plain(r: Request) -> bool:
    """Whether nothing but the token and its probability is wanted, and the plan needs no earlier tokens to choose."""
    return not is_for_host(r) and r.sampling.logprobs is None and r.sampling.repetition_penalty == 1


def choose(r: Request, logits: Array, mask: Array | None) -> int:
    """The next token of a request from its logits [vocab]."""
    s, scores = r.sampling, logits.astype(np.float32)
    if s.repetition_penalty != 1:
        seen = np.unique(np.array(r.row.tokens, np.int64))
        penalty = np.float32(s.repetition_penalty)
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if s.presence_penalty or s.frequency_penalty:
        for token, count in Counter(r.ids).items():
            scores[token] -= np.float32(s.presence_penalty + s.frequency_penalty * count)
    for token, bias in s.logit_bias.items():
        scores[token] += np.float32(bias)
    if mask is not None:
        scores[~mask] = -np.inf
    if s.temperature == 0:
        return int(scores.argmax())
    numbers = (_draw(r), s.top_p, s.top_k, s.temperature, s.min_p)
    return int(REGISTRY["random_sample"].reference(scores, *map(np.asarray, numbers)))


def logprob_of(token: int, logits: Array, count: int) -> TokenLogprob:
    """The log probability of a token by the raw logits [vocab], and those of the `count` best."""
    raw = logits.astype(np.float64)
    total = raw.max() + np.log(np.exp(raw - raw.max()).sum())
    best = np.argpartition(-raw, count)[:count] if count else np.zeros(0, np.int64)
    best = best[np.lexsort((best, -raw[best]))]
    return TokenLogprob(token, float(raw[token] - total), tuple((int(i), float(raw[i] - total)) for i in best))
