"""Who owns which page of a KV cache: pages of running texts, and those of earlier ones, kept for texts that begin so.

Kept pages form a tree: the child of a page holds the tokens that followed it. A text that begins as an earlier one
shares its pages; where they part inside a page, the shared rows are copied into a page of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import field

from monoplan.ir.lazy_dataclass import dataclass

LOOKED_AT = 64  # children of a page that may begin as a text goes on: the newest so many are compared with it


@dataclass(eq=False, slots=True)
class Page:
    """A page and the tokens in it. Those in the tree are never written again, except for a last one that grows."""

    number: int
    parent: Page | None = None
    tokens: tuple[int, ...] = ()
    users: int = 0
    children: dict[int, list[Page]] = field(default_factory=dict)  # by the first token

    def child(self, tokens: tuple[int, ...]) -> Page | None:
        """The child with just these tokens."""
        return next((c for c in self.children.get(tokens[0], ()) if c.tokens == tokens), None)

    def nearest(self, tokens: Sequence[int]) -> tuple[Page | None, int]:
        """The child that begins most like these tokens, and how many they share."""
        best: Page | None = None
        shared = 0
        for child in self.children.get(tokens[0], ())[-LOOKED_AT:] if tokens else ():
            pairs = zip(child.tokens, tokens, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(child.tokens), len(tokens)))
            if same > shared:
                best, shared = child, same
        return best, shared


class PagePool:
    """So many pages of `size` tokens. Page 0 belongs to nobody: rows that count for nothing are written there."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, 0, -1))
        self._root = Page(0, users=1)
        self._idle: OrderedDict[Page, None] = OrderedDict()  # kept, used by nobody; children before their parents

    @property
    def usage(self) -> float:
        """The share of the pages that running texts hold."""
        return 1 - (len(self._free) + len(self._idle)) / max(1, self.count - 1)

    @property
    def available(self) -> int:
        """Pages that a text can get now."""
        return len(self._free) + len(self._idle)

    def find(self, tokens: Sequence[int]) -> tuple[list[Page], Page | None, int]:
        """The pages that the beginning of a text shares with earlier ones, taken for it; then the page that has the
        next tokens as well, and how many of them: these must be copied, and the page given back with `release`."""
        found: list[Page] = []
        node, size = self._root, self.size
        while (at := len(found) * size) + size <= len(tokens):
            child = node.child(tuple(tokens[at : at + size]))
            if child is None:
                break
            found.append(child)
            node = child
        partly, shared = node.nearest(tokens[len(found) * size : (len(found) + 1) * size])
        for page in (*found, partly):
            if page is not None:
                self._take(page)
        return found, partly, shared

    def new(self) -> Page | None:
        """A page of its own for a text; None if all are in use. The page that was idle longest goes first."""
        if not self._free:
            if not self._idle:
                return None
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        return Page(self._free.pop(), users=1)

    def keep(self, page: Page, parent: Page | None, tokens: Sequence[int]) -> Page:
        """Puts a page of its own into the tree, with the tokens that are written in it.

        If the tree has the same page already, that one is taken instead, and this one is free again.
        """
        parent, content = parent or self._root, tuple(tokens)
        known = parent.child(content)
        if known is not None:
            self._free.append(page.number)
            self._take(known)
            return known
        page.parent, page.tokens = parent, content
        parent.children.setdefault(content[0], []).append(page)
        return page

    def release(self, pages: Sequence[Page]) -> None:
        """A text needs these pages no more. Those in the tree stay until their room is needed."""
        for page in reversed(pages):  # children first: they are forgotten before their parents
            page.users -= 1
            if page.users:
                continue
            if page.parent is None:
                self._free.append(page.number)
            else:
                self._idle[page] = None

    def clear(self) -> None:
        """Forgets all that is kept and not in use."""
        while self._idle:
            self._forget(self._idle.popitem(last=False)[0])

    def _take(self, page: Page) -> None:
        page.users += 1
        self._idle.pop(page, None)

    def _forget(self, page: Page) -> None:
        assert page.parent is not None and not page.children
        siblings = page.parent.children[page.tokens[0]]
        siblings.remove(page)
        if not siblings:
            del page.parent.children[page.tokens[0]]
        self._free.append(page.number)
