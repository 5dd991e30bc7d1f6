"""uvicorn's server, which goes on answering while it shuts down: what runs is finished, and new requests get 503."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import uvicorn


class GracefulServer(uvicorn.Server):
    """Serves an application until a signal comes and its requests are answered; a second signal ends it at once.

    `fails`: it ends, too, when the engine has failed and everybody was told.
    """

    def __init__(self, config: uvicorn.Config, state: Any, fails: bool = False) -> None:
        super().__init__(config)
        self._state, self._fails = state, fails  # the Server of make_app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGINT and SIGTERM."""
        if self._state.closing:
            self.force_exit = self.should_exit = True
            return
        self._state.closing = True
        print("monoplan: finishing what runs; once more ends it", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Several times a second: whether to stop listening."""
        ending = self._state.closing or (self._fails and self._state.engine.stats.failure is not None)
        if ending and self._state.active == 0:
            self.should_exit = True
        return await super().on_tick(counter)
