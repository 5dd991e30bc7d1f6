"""A plan's C source in parts, on which several compilers work side by side: the source itself stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monoplan.codegen.cpu.render import Function

LEAST = 24 << 10  # characters of a part: a smaller one takes longer to start than to compile
FEWEST, MOST = 2, 4


def parts(text: str, functions: Sequence[Function], cores: int = MOST) -> tuple[str, ...]:
    """Translation units that together are `text`; none where it is too small, or does not hold these functions.

    Each has some of the kernels, with the lines of the whole; the last one also has what calls them. See MP_PARTS. Not
    more than there are cores: every part reads the headers anew, which takes a quarter of its time.
    """
    spans = [(text.find(f.text), f) for f in functions]
    count = min(max(FEWEST, min(cores, MOST)), len(functions), sum(len(f.text) for f in functions) // LEAST)
    if count < 2 or any(at < 0 for at, _ in spans):
        return ()
    spans.sort(key=lambda span: span[0])
    last, final = spans[-1]
    head, tail = text[: text.index(spans[0][1].comment)], text[last + len(final.text) :]
    bins: list[list[tuple[int, Function]]] = [[] for _ in range(count)]
    sizes = [0] * count
    sizes[-1] = len(tail) // 3  # as many characters of calls are compiled in a third of the time
    for at, f in sorted(spans, key=lambda span: -len(span[1].text)):
        lightest = sizes.index(min(sizes))
        bins[lightest].append((at, f))
        sizes[lightest] += len(f.text)
    declared = "".join(_prototype(f) for _, f in spans)
    found = []
    for i, chosen in enumerate(bins):
        pieces = [f"{_line(text, at)}{f.text}" for at, f in sorted(chosen, key=lambda span: span[0])]
        if i == count - 1:
            pieces.append(f"{declared}{_line(text, last + len(final.text))}{tail}")
        found.append("#define MP_PARTS 1\n" + head + "\n".join(pieces))
    return tuple(found)


def _line(text: str, at: int) -> str:
    """What makes the compiler speak of the whole source's lines."""
    return f'#line {text.count(chr(10), 0, at) + 1} "plan.c"\n'


def _prototype(f: Function) -> str:
    start = f.text.index(f"MP_KERNEL {f.name}(")
    return f.text[start : f.text.index("\n{", start)] + ";\n"
