"""Writes ops.md and options.md from signatures, docstrings and comments of the package: `python docs/reference.py`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import monoplan.nn as nn
from monoplan.cli.main import COMMANDS, make_parser
from monoplan.frontend import functional as F
from monoplan.frontend.tensor import Tensor
from monoplan.models.generate.decoding import Settings
from monoplan.options import ENVIRONMENT, Options

HERE = Path(__file__).parent
NOTE = "<!-- Made by `python docs/reference.py`. Do not edit. -->"


def ops() -> str:
    """Functions, methods and layers."""
    functions = [n for n in sorted(F.__all__) if inspect.isfunction(getattr(F, n))]
    methods = {n: m for n, m in vars(Tensor).items() if not n.startswith("_") and n != "traced"}
    others = sorted(n for n in methods if n not in functions)
    layers = [n for n in sorted(nn.__all__) if inspect.isclass(getattr(nn, n))]
    return "\n".join(
        [
            "# Ops",
            "",
            NOTE,
            "",
            "Names, arguments and meaning are PyTorch's where it has them. All of it works eagerly and in a compiled",
            "module. A dot marks functions that are methods of `Tensor` as well: `F.exp(x)`, `x.exp()`.",
            "",
            "## Functions: `import monoplan.nn.functional as F`",
            "",
            *table(
                ["function", "", "meaning"],
                ((signature(n, getattr(F, n)), "·" if n in methods else "", first(getattr(F, n))) for n in functions),
            ),
            "## Other methods and attributes of `Tensor`",
            "",
            *table(["method", "meaning"], ((signature(n, methods[n]), first(methods[n])) for n in others)),
            "## Layers: `from monoplan import nn`",
            "",
            *table(["layer", "meaning"], ((signature(n, getattr(nn, n)), first(getattr(nn, n))) for n in layers)),
        ]
    )


def options() -> str:
    """Options of compile() and generate(), environment variables, and those of each command."""
    parts = [
        "# Options",
        "",
        NOTE,
        "",
        '## `mp.compile(module, ..., options={"fuse": False})`',
        "",
        *table(["option", "default", "meaning"], fields(Options)),
        "## `llm.generate(prompt, max_new_tokens=128, temperature=0.7, ...)`",
        "",
        *table(["setting", "default", "meaning"], (row for row in fields(Settings) if row[0] != "`eos_ids`")),
        "Beside them `callback`, `logprobs`, `session`, and where guesses come from: `lookup`, `draft`",
        "([generation.md](generation.md)).",
        "",
        "## Environment",
        "",
        *table(["variable", "meaning"], ((f"`{name}`", text) for name, text in ENVIRONMENT.items())),
        "## Command line",
        "",
    ]
    _, parsers = make_parser()
    for name, (_, what) in COMMANDS.items():
        parts += [f"### `monoplan {name}`: {what}", ""]
        rows = list(flags(parsers[name]))
        parts += table(["option", "meaning"], rows) if rows else []
    return "\n".join(parts)


def flags(parser: argparse.ArgumentParser, before: str = "") -> Iterable[tuple[str, str]]:
    """The options of a command and of the commands in it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                about = next(a.help for a in action._choices_actions if a.dest == name)
                yield f"`{before}{name}`", about or ""
                yield from flags(inner, f"{before}{name} ")
        elif not isinstance(action, argparse._HelpAction):
            value = action.metavar or "|".join(action.choices or [])
            spelled = ", ".join(action.option_strings)
            text = " ".join(filter(None, [spelled, str(value) if action.nargs != 0 else ""]))
            yield f"`{before}{text}`", (action.help or "") % {"default": action.default}


def fields(kind: Any) -> Iterable[tuple[str, str, str]]:
    """Name, default and comment of each field of a dataclass."""
    comments = dict(re.findall(r"^    (\w+):.*?  # (.*)$", inspect.getsource(kind), re.M))
    for field in dataclasses.fields(kind):
        yield f"`{field.name}`", f"`{field.default!r}`", comments.get(field.name, "")


def signature(name: str, thing: Any) -> str:
    """`name(a, b=1, *, c=2)`, or the name alone of what is not called."""
    if isinstance(thing, property):
        return f"`{name}`"
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return f"`{name}`"
    shown, star = [], False
    for p in found.parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            shown.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        value = p.default.value if isinstance(p.default, Enum) else p.default
        shown.append(f"{prefix}{p.name}" + ("" if p.default is p.empty else f"={value!r}"))
    return f"`{name}({', '.join(shown)})`"


def first(thing: Any) -> str:
    """The first sentence or line of a docstring."""
    lines = (inspect.getdoc(thing) or "").split("\n\n")[0].splitlines()
    return " ".join(line.strip() for line in lines)


def table(head: list[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A Markdown table and an empty line."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {line} |" for line in lines), ""]


PAGES = {"ops.md": ops, "options.md": options}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
