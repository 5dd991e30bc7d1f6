"""Answers that cost a compiler process: worked out once, by one thread."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

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
