"""A plugin for `llm` (llm.datasette.io): `llm -m monoplan "..."` asks the server at MONOPLAN_URL."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import llm
from llm.default_plugins.openai_models import AsyncChat, Chat

from monoplan.serve import ALIAS


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[..., Any]) -> None:
    """One model, whatever the server has: its name in the protocol is the one that all servers answer to."""
    address = os.environ.get("MONOPLAN_URL", "http://127.0.0.1:8000").rstrip("/")
    key = os.environ.get("MONOPLAN_API_KEY")
    can = {"model_name": ALIAS, "api_base": f"{address}/v1", "supports_schema": True, "supports_tools": True}
    models: list[Any] = [kind(ALIAS, key=key, **can) for kind in (Chat, AsyncChat)]
    for model in models:
        model.needs_key = None if key is None else ALIAS
    register(*models)
