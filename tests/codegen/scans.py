"""One module with scans of every sort, for compiled tests: its parts share one build."""

from __future__ import annotations

from typing import Any

import numpy as np

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn

WIDTH, HIDDEN = 6, 16


class Scans(nn.Module):
    """Each entry of the result is a scan that lowers in its own way."""

    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(3)
        self.cell = nn.GRUCell(WIDTH, HIDDEN)
        self.own = nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(-np.linspace(0.1, 1, WIDTH * 2, dtype=np.float32).reshape(WIDTH, 2))

    def forward(self, x: mp.Tensor, h: mp.Tensor) -> Any:  # [seq, batch, WIDTH], [batch, HIDDEN]
        first = x.sum(0)  # [batch, WIDTH]; an arena buffer that several scans start with
        rows, positions = x.unsqueeze(2).unsqueeze(2), F.arange(x.shape[0])
        cache = F.zeros((x.shape[1], 1, 3, WIDTH)) + 0.5

        def written(state: Any, xs: Any) -> Any:
            """A state that is updated in place, beside a cache that all turns share and none may change."""
            own, lengths = state
            other = F.kv_update(cache, xs, lengths)
            return (F.kv_update(own, xs, lengths), F.minimum(lengths + 1, 2)), other.sum((1, 2, 3))

        zeros = F.zeros((x.shape[1],), dtype="i32")
        return {
            "gru": mp.scan(lambda s, x: (self.cell(x, s),) * 2, h, x),
            "rnn": mp.scan(lambda s, x: (F.tanh(self.own(s) + x), s * 2), first, x),
            "rotated": mp.scan(
                lambda s, x: ({"a": s["b"], "b": s["c"], "c": s["a"]}, s["a"] + x),
                {"a": first, "b": first, "c": first * 2},
                x,
            ),
            "swapped": mp.scan(lambda s, x: ((s[1], s[0] + x), s[0]), (first, first), x),
            "back": mp.scan(lambda s, x: (s * 0.5 + x, (s, x * x.shape[0])), first, x, reverse=True),
            "columns": mp.scan(lambda s, x: (s * 0.5 + x, s[:, :1]), x[..., 0], x, dim=-1),
            "passed": mp.scan(lambda s, x: (s, x), first, x[:, :, ::2]),
            "counted": mp.scan(lambda s, i: (s + i, s > 3), 0, positions),
            "numbered": mp.scan(lambda s, _: (s * 0.9 + first.sum(), None), first[:, :2], length=x.shape[0]),
            "ssm": mp.scan(
                lambda s, x: (F.exp(self.decay) * s + x.unsqueeze(-1), (s * s).sum(-1)),
                F.zeros((x.shape[1], WIDTH, 2)),
                x,
            ),
            "written": mp.scan(written, (cache * 2, zeros), rows),
            "first": first + 1,
        }


SPECS = (mp.spec("seq", "batch", WIDTH), mp.spec("batch", HIDDEN))


def arguments(seq: int, batch: int = 2) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seq)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((seq, batch, WIDTH), (batch, HIDDEN)))  # type: ignore[return-value]
