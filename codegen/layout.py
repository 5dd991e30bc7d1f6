"""The last touch on generated source: lines that no one would write are broken as a person would break them."""

from __future__ import annotations

WIDTH = 116


def wrap(text: str, width: int = WIDTH) -> str:
    """Long code lines broken after a comma or before an operator; comments (IR lines among them) stay whole."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines += [line] if len(line) <= width or _is_comment(line) else _broken(line, width)
    return "\n".join(lines)


def _is_comment(line: str) -> bool:
    start = line.lstrip()
    return start.startswith(("/*", "*", "//", "#")) or line.endswith("\\")


def _broken(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    found: list[str] = []
    rest = line
    while len(rest) > width:
        at = _break_at(rest, width, len(indent) if found else 0)
        if at <= 0:
            break
        found.append(rest[:at].rstrip())
        rest = indent + rest[at:].lstrip()
    return [*found, rest]


def _break_at(line: str, width: int, start: int) -> int:
    """Where to break: after the last comma, or before the last operator that fits, or after a bracket; not inside a
    comment; 0: nowhere."""
    limit = min([width, *(at for at in (line.find("/*"), line.find("//")) if at > 0)])
    for mark, shift in ((", ", 2), (" && ", 1), (" || ", 1), (" + ", 1), (" ? ", 1), (" = ", 3), (" * ", 1)):
        at = line.rfind(mark, start + 8, limit)
        if at > 0:
            return at + shift
    return line.rfind("(", start + 8, limit) + 1 if limit == width else 0
