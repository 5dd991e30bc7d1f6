"""Chat templates: programs that come with a model and make one text of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoplan.ir.errors import ArgumentError, LoadError


def read_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The template beside a model: a file of its own, or an entry of tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError("can't read chat_template.jinja", where=path, why=str(error)) from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


def render_chat(template: str, values: Mapping[str, Any], where: object) -> str:
    """Render a chat template in a sandbox: it comes with the model and is not trusted."""
    from datetime import datetime

    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it is only its contents."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Refused(Exception):
        """The template itself does not accept the messages."""

    def refuse(message: str) -> None:
        raise Refused(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**values)
    except Refused as error:
        raise ArgumentError("the model's chat template refuses the messages", why=str(error)) from None
    except jinja2.TemplateSyntaxError as error:
        raise LoadError("the chat template is damaged", where=where, why=str(error)) from None
    except Exception as error:  # a template is a program: it may fail in any way
        raise LoadError(
            "the chat template failed", where=where, why=f"{type(error).__name__}: {error}"
        ) from None
