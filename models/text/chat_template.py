"""Chat templates: programs that come with a model and make one text of messages."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from monoplan.ir.errors import ArgumentError, LoadError, in_words


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


class Refused(Exception):  # noqa: N818
    """The template itself does not accept the messages."""


def _refuse(message: str) -> None:
    raise Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.cache
def _environment() -> Any:
    from monoplan.models.text.template_sandbox import BoundedEnvironment

    functions = {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return BoundedEnvironment({"tojson": _to_json}, functions)


def render_chat(template: str, values: Mapping[str, Any], where: object) -> str:
    """Render a chat template in a sandbox with a budget: it comes with the model and is not trusted."""
    import jinja2

    from monoplan.models.text.template_sandbox import BudgetExceeded, render

    try:
        return render(_environment(), template, values)
    except Refused as error:
        raise ArgumentError("the model's chat template refuses the messages", why=str(error)) from None
    except jinja2.TemplateSyntaxError as error:
        raise LoadError("the chat template is damaged", where=where, why=str(error)) from None
    except BudgetExceeded as error:
        fix = "use another one: tokenizer.chat_template = ..."
        raise LoadError("the chat template wants too much", where=where, why=str(error), fix=fix) from None
    except Exception as error:  # a template is a program: it may fail in any way
        raise LoadError("the chat template failed", where=where, why=in_words(error)) from None
