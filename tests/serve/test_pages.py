"""Pages of a KV cache: who shares them, who gets one, and that none is lost."""

from __future__ import annotations

import numpy as np

from monoplan.serve.pages import Page, PagePool

SIZE = 4


def text(pool: PagePool, tokens: list[int]) -> list[Page]:
    """The pages of a text that has run: shared ones, then its own."""
    pages, partly, _ = pool.find(tokens[:-1])
    if partly is not None:
        pool.release([partly])
    while len(pages) * SIZE < len(tokens):
        page = pool.new()
        assert page is not None
        parent = pages[-1] if pages else None
        pages.append(pool.keep(page, parent, tokens[len(pages) * SIZE : (len(pages) + 1) * SIZE]))
    return pages


def test_equal_beginnings_share_pages() -> None:
    pool = PagePool(9, SIZE)
    first = text(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    pages, partly, shared = pool.find([1, 2, 3, 4, 5, 6, 0, 0])
    assert pages == first[:1] and partly is first[1] and shared == 2
    assert pool.find([2, 2, 3, 4]) == ([], None, 0)


def test_a_page_that_is_there_already_is_taken_instead() -> None:
    pool = PagePool(9, SIZE)
    a, b = pool.new(), pool.new()
    assert a is not None and b is not None
    kept = pool.keep(a, None, [1, 2, 3, 4])
    assert pool.keep(b, None, [1, 2, 3, 4]) is kept is a
    assert a.users == 2 and pool.available == 7


def test_idle_pages_go_last_used_first_and_children_before_parents() -> None:
    pool = PagePool(6, SIZE)
    old = text(pool, list(range(8)))
    new = text(pool, list(range(50, 62)))
    pool.release(old)
    pool.release(new)
    assert pool.available == 5 and pool.usage == 0
    got = [pool.new() for _ in range(2)]
    assert [p.number for p in got if p] == [old[1].number, old[0].number]
    assert pool.find(list(range(50, 63)))[0] == new


def test_all_in_use() -> None:
    pool = PagePool(3, SIZE)
    pages = text(pool, list(range(8)))
    assert pool.new() is None and pool.usage == 1
    pool.release(pages)
    pool.clear()
    assert pool.available == 2 and pool.find(list(range(8))) == ([], None, 0)


def test_no_page_is_lost_or_given_twice() -> None:
    rng, pool = np.random.default_rng(0), PagePool(40, SIZE)
    running: list[list[Page]] = []
    for _ in range(2000):
        if running and (rng.random() < 0.5 or pool.available < 6):
            pool.release(running.pop(int(rng.integers(len(running)))))
            continue
        running.append(text(pool, rng.integers(2, size=int(rng.integers(1, 20))).tolist()))
        held = {page.number: page for pages in running for page in pages}
        assert 0 not in held and len(held) == len({id(p) for pages in running for p in pages})
        assert pool.available == 39 - len(held)
    for pages in running:
        pool.release(pages)
    assert pool.available == 39
