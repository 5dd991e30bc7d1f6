"""Weights that several plans of one model have in common: in device memory once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from monoplan.ir.graph import Graph, Value

_STORE: ContextVar[dict[str, Any] | None] = ContextVar("weights", default=None)


@contextmanager
def sharing(store: dict[str, Any]) -> Iterator[None]:
    """Plans that are made inside take the weights they have in common from the store, and put new ones there.

    They must be plans of the same parameters: a store knows these by their paths.
    """
    token = _STORE.set(store)
    try:
        yield
    finally:
        _STORE.reset(token)


def shared_weights() -> dict[str, Any]:
    """The store of the plan that is being made; an empty one of its own if nothing is shared."""
    store = _STORE.get()
    return {} if store is None else store


def weight_key(graph: Graph, value: Value, order: bytes, layout: object) -> str:
    """The name of a weight: the parameters it is made of, how, its type and layout, and the order of its rows."""
    paths = {p.value: p.path for p in graph.params}
    made = {result: op for op in graph.setup for result in op.results}

    def describe(v: Value) -> str:
        if v in paths:
            return f"{paths[v]}: {v.type}"
        op = made[v]
        parts = ", ".join(map(describe, op.reads))
        return f"{op.name}[{op.results.index(v)}]({parts}) {sorted(map(str, op.attrs.items()))}: {v.type}"

    return f"{describe(value)} {layout} {hashlib.sha256(order).hexdigest() if order else ''}"
