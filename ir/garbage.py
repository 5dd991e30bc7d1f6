"""Python's search for garbage, put off while much is made that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """While this runs, Python does not look for garbage: what is made stays, and is counted as old at the end.

    Also a decorator. Modules, layers and vocabularies are many objects and no garbage: to search them takes longer than
    to compute the first token.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # else somebody else has frozen objects, and they would be released
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, without a search
            gc.enable()
