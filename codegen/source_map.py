"""From a line of generated source back to the IR line and the user's line it was made from."""

from __future__ import annotations

import re

_MESSAGE = re.compile(r"plan\.(?:c|cu)[:(](\d+)")


def origin(source: str, line: int) -> str:
    """The comment above the kernel, or above the call, that a source line (from 1) belongs to; else nothing."""
    lines = source.split("\n")
    for at in range(min(line, len(lines)) - 1, -1, -1):
        text = lines[at].strip()
        if text.startswith("/* %") or re.match(r"/\* \d+: %", text):
            block = [text.removeprefix("/* ").removesuffix(" */")]
            for more in lines[at + 1 :]:
                if text.endswith("*/") or not more.strip().startswith("*"):
                    break
                text = more.strip()
                block.append(text.removeprefix("* ").removesuffix(" */"))
            return " | ".join(block)
        if lines[at].startswith("}") and at < line - 1:
            break  # the end of the function before: this line stands outside of all kernels
    return ""


def origins(source: str, message: str) -> list[str]:
    """Where the lines that a compiler complains of come from, each once, in its order."""
    found = (origin(source, int(n)) for n in _MESSAGE.findall(message))
    return list(dict.fromkeys(text for text in found if text))
