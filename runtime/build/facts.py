"""Facts about this machine that cost time to find out, kept in the cache directory for later processes.

A fact is a sealed JSON file. One that is damaged, or that somebody else could have written, is not there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from monoplan.runtime.build import cache_places, trusted

DAY = 86400.0  # a negative fact is asked again after this: the user may have installed what was missing


def recall(name: str, key: str) -> dict[str, object] | None:
    """A fact that this or an earlier process remembered and that has not expired."""
    fact = recall_file(_fact_name(name, key))
    try:
        if fact is not None and fact["key"] == key and (fact["expires"] is None or time.time() < fact["expires"]):
            return dict(fact["value"])
    except (KeyError, TypeError, ValueError):  # of another version
        pass
    return None


def remember(name: str, key: str, value: dict[str, object], seconds: float | None = None) -> None:
    """Keeps a fact for later processes, for ever or for `seconds`; failing to write it is no error."""
    expires = None if seconds is None else time.time() + seconds
    remember_file(_fact_name(name, key), {"key": key, "value": value, "expires": expires})


def recall_file(name: str, *, used: bool = False) -> Any:
    """The JSON value in facts/`name`, or None; `used` sets its time to now, for who removes the longest unused."""
    for root in cache_places.read_roots():
        try:
            body = trusted.unseal(f"facts/{name}", trusted.read(root, f"facts/{name}"))
        except OSError:
            continue
        try:
            value = None if body is None else json.loads(body)
        except (ValueError, RecursionError):
            value = None
        if value is None:
            cache_places.warn_damaged(f"file {root / 'facts' / name}")
            with contextlib.suppress(OSError):
                os.unlink(root / "facts" / name)
            continue
        if used:
            with contextlib.suppress(OSError):
                os.utime(root / "facts" / name)
        return value
    return None


def remember_file(name: str, value: Any) -> None:
    """Keeps a JSON value as facts/`name`; failing to write it is no error."""
    place = f"facts/{name}"
    with contextlib.suppress(OSError), trusted.replacing(cache_places.cache_root(), place) as stream:
        stream.write(trusted.seal(place, json.dumps(value).encode()))


def _fact_name(name: str, key: str) -> str:
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name}-{digest[:24]}.sealed"


# Answers that cost a compiler process: worked out once, by one thread.


P = ParamSpec("P")
T = TypeVar("T")


class Once(Generic[P, T]):
    """functools.cache whose threads wait for the one that is at work. Exceptions are not kept."""

    def __init__(self, function: Callable[P, T]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._known: dict[Any, T] = {}
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)  # the thread that holds it does not live in the child

    def _renew(self) -> None:
        self._at_work = threading.RLock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(kwargs.items()))
        with self._at_work:
            if key not in self._known:
                self._known[key] = self._function(*args, **kwargs)
            return self._known[key]

    def knows(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether the answer is there."""
        return (args, tuple(kwargs.items())) in self._known

    def cache_clear(self) -> None:
        """Forgets all answers."""
        self._known.clear()
