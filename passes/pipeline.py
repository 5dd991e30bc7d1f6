"""The order of the passes, with the reason beside each."""

from __future__ import annotations

from monoplan.passes.manager import Pass
from monoplan.passes.rebuild import drop_dead

DCE = Pass("dce", "drops ops whose results nobody reads", lambda g, notes: drop_dead(g))

PIPELINE: tuple[Pass, ...] = (DCE,)
UNFUSED: tuple[Pass, ...] = (DCE,)
