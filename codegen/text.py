"""Text from outside, as it may stand in generated source.

Names of classes, tensors and sizes, paths of files, IR lines and messages are the user's, or those of whoever wrote the
file that is being compiled. They enter a source only through the functions here, which allow characters by a list.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

# Everything but the printable ASCII that a comment may hold. Left out are the backslash, which continues a line, and
# the question mark, of which trigraphs are made.
_UNUSUAL = re.compile(r"""[^A-Za-z0-9 !"#$%&'()*+,\-./:;<=>@\[\]^_`{|}~]""")
WIDTH = 118  # columns of a comment
_MARK = re.compile(r"\*(?=/)|/(?=\*)")  # the first character of what opens or ends a comment


def comment_text(text: str) -> str:
    """Text for the inside of a comment: one line that neither ends the comment, nor opens one, nor continues a line.

    Letters and digits of every script stay as they are; a backslash becomes a slash, so that paths stay readable.
    """
    # Marks are broken up last: what the replacement makes must not be one.
    return _MARK.sub(r"\g<0> ", _UNUSUAL.sub(_allowed, text))


def _allowed(found: re.Match[str]) -> str:
    c = found[0]
    if c.isalnum():  # no controls, separators, marks of direction or surrogates
        return c
    return "/" if c == "\\" else " " if c.isspace() else "_"


def block_comment(lines: Iterable[str], indent: str = "") -> str:
    """A whole comment, a line for each text; one that is too long goes on, indented by four spaces."""
    width = WIDTH - len(indent) - 6
    texts: list[str] = []
    for line in lines:
        first, *rest = _folded(comment_text(line).rstrip(), width)
        texts += [first, *(f"    {more}" for more in rest)]
    return f"{indent}/* " + "\n".join([texts[0], *(f"{indent} * {t}".rstrip() for t in texts[1:])]) + " */"


def _folded(text: str, width: int) -> list[str]:
    """Text cut at spaces into pieces of a width, those after the first four characters less; spaces go."""
    found = []
    while len(text) > width:
        at = text.rfind(" ", width // 2, width + 1)
        at = width if at < 0 else at
        found.append(text[:at].rstrip())
        text = text[at:].lstrip()
        width -= 4 if len(found) == 1 else 0
    return [*found, text]


def comment_lines(text: str) -> list[str]:
    """The lines of the comment that a text begins with, as `block_comment` was given them but for spaces."""
    found: list[str] = []
    for line in text.split("\n"):
        line, end, _ = line.strip().partition("*/")
        line = line.removeprefix("/*" if not found else "*").removeprefix(" ")
        if found and line.startswith("    "):
            found[-1] += f" {line.strip()}"
        elif found or line:
            found.append(line.strip())
        if end:
            break
    return found


def identifier(prefix: str, text: str, taken: Container[str] = ()) -> str:
    """An ASCII name for C and CUDA that begins with `prefix` and is none of `taken`: a number makes it another one.

    The prefix ends with `_`, so that the name is no keyword and no name of a template.
    """
    stem = prefix + re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    return name


def c_string(text: str) -> str:
    """A string literal of C: printable ASCII, and octal numbers for other bytes, quotes, backslashes and trigraphs."""
    plain = (
        chr(c) if 32 <= c < 127 and chr(c) not in '"\\?' else f"\\{c:03o}" for c in text.encode("utf-8", "replace")
    )
    return f'"{"".join(plain)}"'


def file_name(text: str) -> str:
    """A name for a file or folder: no separator, not hidden, neither `.` nor `..`."""
    return re.sub(r"[^\w.$-]|^\.+|^$", "_", text)[:60]


_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/|["\']|/\*', re.DOTALL)
# With these a compiler may see other comments than the search above: lines that go on, trigraphs, names of headers.
_UNCLEAR = re.compile(r"\\[ \t\r\f\v]*\n|\?\?|#[ \t]*include[ \t]*<")


def without_comments(source: str) -> str:
    """C with a space for each comment; as it is where that could take anything but comments away."""
    if _UNCLEAR.search(source):
        return source
    found = _TOKEN.findall(source)
    if any(token in ('"', "'", "/*") for token in found):  # not closed
        return source
    return _TOKEN.sub(lambda token: " " if token[0][0] == "/" else token[0], source)
