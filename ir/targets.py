"""The names of what plans can be made for."""

from __future__ import annotations

from typing import Any

from monoplan.ir.errors import ArgumentError

TARGETS = ("cpu", "cuda", "reference")


def known_target(name: Any) -> str:
    """The name of a target; an error that lists the known ones if it is not one of them."""
    if name not in TARGETS:
        raise ArgumentError(f"unknown target {name!r}", fix="use one of " + ", ".join(TARGETS))
    return str(name)
