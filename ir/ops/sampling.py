"""Choosing the next token from logits."""

from __future__ import annotations

import numpy as np

from monoplan.ir.dims import equal
from monoplan.ir.opdef import op, require
from monoplan.ir.rules import broadcasts_to, require_some
from monoplan.ir.types import Array, TensorType, i64


def _sample_type(
    logits: TensorType,
    random_val: TensorType,
    top_p: TensorType,
    top_k: TensorType,
    temperature: TensorType,
    min_p: TensorType | None,
) -> TensorType:
    require(
        logits.rank >= 1 and logits.dtype.is_float,
        f"random_sample: logits must be floats [..., vocabulary], got {logits}",
    )
    require_some("random_sample", logits, (logits.rank - 1,))
    lead = logits.shape[:-1]
    for name, t in (("random_val", random_val), ("top_p", top_p), ("temperature", temperature), ("min_p", min_p)):
        require(t is None or t.dtype.is_float, f"random_sample: {name} must be a float, got {t}")
    require(top_k.dtype.is_integer, f"random_sample: top_k must be an integer, got {top_k}")
    for t in (random_val, top_p, top_k, temperature, min_p):
        if t is not None:
            require(broadcasts_to(t.shape, lead), f"random_sample: {t} does not broadcast to {list(lead)}")
    return TensorType(i64, lead)


@op(_sample_type, "sample", bounded=True)
def random_sample(
    logits: Array, random_val: Array, top_p: Array, top_k: Array, temperature: Array, min_p: Array | None = None
) -> Array:
    """A token id per row, drawn by random_val after top_k, top_p and min_p.

    Logits are divided by the temperature; the top_k largest are kept (0: all), of those the smallest set that
    reaches top_p, of those the ones of at least min_p times the best; then the first id where the cumulative
    probability passes random_val. Temperature 0 (or less) takes the best, ties the lowest id.
    """
    lead = logits.shape[:-1]
    flat = logits.reshape(-1, logits.shape[-1]).astype(np.float64)
    extras = [np.broadcast_to(a, lead).reshape(-1) for a in (random_val, top_p, top_k, temperature)]
    least = np.zeros(len(flat)) if min_p is None else np.broadcast_to(min_p, lead).reshape(-1)
    out = [_sample_row(*row) for row in zip(flat, *extras, least, strict=True)]
    return np.array(out, np.int64).reshape(lead)


def _sample_row(x: Array, u: float, top_p: float, top_k: int, temperature: float, min_p: float) -> int:
    order = np.argsort(-x, kind="stable")
    if not temperature > 0:
        return int(order[0])
    kept = order[: int(top_k)] if 0 < top_k < len(order) else order
    p = np.exp((x[kept] - x[kept[0]]) / float(temperature))
    total = p.sum()
    count = len(p)
    if top_p < 1:
        count = int(np.searchsorted(np.cumsum(p), float(top_p) * total, side="left")) + 1
    p = p[: max(1, min(count, len(p)))]
    p = p[p >= float(min_p) * p[0]]
    return int(kept[min(int(np.searchsorted(np.cumsum(p), float(u) * p.sum(), side="right")), len(p) - 1)])


def _penalty_type(logits: TensorType, history: TensorType, counts: TensorType, penalty: TensorType) -> TensorType:
    require(
        logits.rank == 2 and logits.dtype.is_float,
        f"repetition_penalty: logits must be floats [batch, vocabulary], got {logits}",
    )
    require(
        history.dtype.is_integer and history.rank == 2 and equal(history.shape[0], logits.shape[0]),
        f"repetition_penalty: history must be integers [batch, tokens], got {history}",
    )
    for t in (counts, penalty):
        require(
            t.rank == 1 and equal(t.shape[0], logits.shape[0]),
            f"repetition_penalty: counts and penalty must be [batch], got {t}",
        )
    require(counts.dtype.is_integer and penalty.dtype.is_float, "repetition_penalty: integer counts, float penalty")
    return logits


@op(_penalty_type, "sample")
def repetition_penalty(logits: Array, history: Array, counts: Array, penalty: Array) -> Array:
    """Logits of ids in history[b, :counts[b]], divided by penalty[b] where positive, else multiplied."""
    out = logits.copy()
    for b in range(len(logits)):
        ids = np.unique(history[b, : int(counts[b])])
        ids = ids[(ids >= 0) & (ids < logits.shape[1])]
        out[b, ids] = np.where(out[b, ids] > 0, out[b, ids] / penalty[b], out[b, ids] * penalty[b])
    return out
