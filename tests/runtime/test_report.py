"""The report in a real browser: it draws, answers clicks, asks nothing of the network and complains about nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.inspect.report import render_report
from monoplan.inspect.report_data import report_data
from monoplan.nn import functional as F
from tests.browser import Page, browser_page
from tests.needs import needs
from tests.runtime.test_bisect import small_llama

needs_browser = needs("browser")
LAYERS = 32


@pytest.fixture(scope="module")
def llm() -> Any:
    return mp.compile(small_llama(layers=LAYERS))


@pytest.fixture(scope="module")
def written(llm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = llm.report(tmp_path_factory.mktemp("report") / "deep" / "report.html", np.arange(1, 9)[None])
    return path


@pytest.fixture(scope="module")
def data(written: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', written.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_it_is_one_file_that_needs_no_network(written: Path) -> None:
    page = written.read_text()
    assert not re.search(r"(?:src|href)\s*=", page)
    assert "@import" not in page and "url(http" not in page
    assert re.findall(r"https?://[^\s\"')]+", page) == ["http://www.w3.org/2000/svg"]
    assert "@DATA@" not in page and "@STYLE@" not in page


def test_rolled_layers_appear_once(data: Any) -> None:
    after = data["graphs"]["after"]
    assert len(after["nodes"]) < 60
    loop = next(g for g in after["groups"] if g.get("loop"))
    assert loop["title"] == f"{LAYERS - 1} × layer" and loop["open"]  # the last one ends with one row
    assert sum(n["group"] == loop["id"] for n in after["nodes"]) >= 5
    caches = next(n for n in after["nodes"] if n["title"].startswith("past_key_values.k"))
    assert caches["title"] == f"past_key_values.k.* × {LAYERS}"


def test_written_out_layers_are_stacked(data: Any) -> None:
    before = data["graphs"]["before"]
    groups = {g["id"]: g for g in before["groups"]}
    assert groups["model.layers.0"]["open"] and groups["model.layers.0"]["parent"] is None
    rest = groups["model.layers.rest"]
    assert not rest["open"] and rest["note"] == f"{LAYERS - 1} more like model.layers.0"
    assert groups[f"model.layers.{LAYERS - 1}"]["parent"] == "model.layers.rest"


def test_every_node_knows_its_line_and_kernel(data: Any) -> None:
    ids = {n["id"] for n in data["graphs"]["after"]["nodes"]}
    for n in data["graphs"]["after"]["nodes"]:
        assert set(n["from"]) <= ids
        if n["kind"] in ("fused_linear", "attention", "qkv_rope_cache"):
            assert n["steps"] and "llama.py" in n["where"]
            assert f"{n['file']}:{n['line']}" in data["lines"]
    # An op that was fused away knows the kernel that computes it now, in every layer.
    fused = [n for n in data["graphs"]["before"]["nodes"] if n["title"] == "rms_norm"]
    assert len(fused) == 2 * LAYERS + 1 and all(n["steps"] for n in fused)


def test_memory_fits_the_plan(llm: Any, data: Any) -> None:
    (memory,) = data["memory"]
    assert memory["peak"] <= memory["unshared"] and memory["steps"] == len(data["steps"])
    for b in memory["buffers"]:
        assert 0 <= b["first"] <= b["last"] < memory["steps"] and b["offset"] + b["bytes"] <= memory["peak"]


def test_names_from_users_do_not_become_markup() -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return F.silu(x)

    fast = mp.compile(Odd(), mp.spec(4))
    page = render_report({**report_data(fast._latest(), {}), "name": "</script><b>&"})
    assert "</script><b>" not in page and "&lt;/script&gt;&lt;b&gt;&amp;" in page


def test_names_of_every_kind_leave_the_page_whole(tmp_path: Path) -> None:
    """Marks of the page, ends of elements, what no encoding holds: all of it is data."""
    space: dict[str, Any] = {}
    text = "def forward(self, x):\n    return x * self.w\n"
    exec(compile(text, "</script><!--\udc80\u2028@STYLE@.py", "exec"), space)
    module = type("@DATA@</title>@SCRIPT@", (nn.Module,), {"forward": space["forward"]})()
    module.w = nn.Parameter(np.ones(4, np.float32))
    data = report_data(mp.compile(module, mp.spec("n", 4))._latest(), {})
    name = f"{type(module).__name__}\ud800"
    page = render_report({**data, "name": name})
    (tmp_path / "page.html").write_text(page, "utf-8")
    plain = render_report({**data, "graphs": {}, "lines": {}, "name": "plain"})
    for mark in ("<script", "</script", "<!--", "</title", "<style"):
        assert page.count(mark) == plain.count(mark)
    assert 'id="data">{' in page and '</script>\n<script>\n"use strict"' in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None and json.loads(found[1])["name"] == name


def test_without_arguments_there_are_no_times(tmp_path: Path) -> None:
    fast = mp.compile(nn.Linear(8, 8), mp.spec("n", 8))
    text = fast.report(tmp_path / "r.html").read_text()
    assert '"profiles":[]' in text


# -- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(written.as_uri() + "?theme=light")
        yield opened
        assert opened.problems == []
        assert [r for r in opened.requests if not r.startswith("file:")] == []


@needs_browser
def test_the_summary_comes_first(page: Page) -> None:
    page.wait("document.querySelector('#tab-summary.on .card') !== null")
    text = page.js("document.getElementById('tab-summary').innerText")
    assert "ops in forward" in text and "Where the time goes" in text and "looking costs" in text
    assert page.js("document.title").startswith("GenerationStep for cpu")


@needs_browser
def test_a_click_on_a_node_shows_all_about_it(page: Page) -> None:
    page.click("#nav-graph")
    page.wait("document.querySelectorAll('.node').length > 10")
    assert page.js("document.querySelector('.frame text').textContent") == f"▾ {LAYERS - 1} × layer"
    place = "[...document.querySelectorAll('.node')].find(n => n.textContent.startsWith('attention'))"
    page.js(f"{place}.setAttribute('id', 'wanted')")
    page.click("#wanted")
    page.wait("!document.getElementById('drawer').hidden")
    parts = {
        p: page.js(f"document.querySelector('#drawer [data-part={p}]')?.innerText")
        for p in ("ir", "user", "code", "time")
    }
    assert parts["ir"].startswith("%") and "= attention(" in parts["ir"]
    assert "o_proj" in parts["user"] or "attention" in parts["user"]
    assert "attention_" in parts["code"] and "of the call" in parts["time"]
    assert "model.layers.0.self_attn" in page.js("document.getElementById('drawer').innerText")
    page.click("#drawer .close")
    assert page.js("document.getElementById('drawer').hidden")


@needs_browser
def test_layers_open_and_close(page: Page, data: Any) -> None:
    groups = [n["group"] for n in data["graphs"]["after"]["nodes"]]
    last = groups.count(f"model.layers.{LAYERS - 1}")  # it stands behind the loop, folded into one node at first
    assert last >= 5
    page.click("#nav-graph")
    page.wait("document.querySelectorAll('.node').length > 10")
    count = page.js("document.querySelectorAll('.node').length")
    assert count == len(groups) - last + 1
    page.click(".frame text")
    assert page.js("document.querySelectorAll('.node').length") < count
    page.click("#open-all")
    assert page.js("document.querySelectorAll('.node').length") == len(groups)
    page.click("[data-graph=before]")
    page.wait("document.querySelectorAll('.node').length > 20")
    folded = page.js("document.querySelectorAll('.node').length")
    page.click("#open-all")
    assert page.js("document.querySelectorAll('.node').length") > folded + 20 * (LAYERS - 2)
    page.click("#close-all")
    assert page.js("document.querySelectorAll('.node').length") < folded
    page.click("[data-graph=after]")


@needs_browser
def test_zoom_and_pan(page: Page) -> None:
    page.click("#nav-graph")
    state = "document.querySelector('#canvas svg > g').getAttribute('transform')"
    before = page.js(state)
    page.js("document.querySelector('.toolbar button[title=larger]').click()")
    zoomed = page.js(state)
    assert zoomed != before
    for kind, x in (("mousePressed", 700), ("mouseMoved", 760), ("mouseMoved", 800), ("mouseReleased", 800)):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=700, button="left", buttons=1, clickCount=1)
    assert page.js(state) != zoomed
    page.click("#fit")


@needs_browser
def test_passes_can_be_switched(page: Page, data: Any) -> None:
    page.click("#nav-passes")
    page.wait("document.querySelectorAll('[data-pass]').length > 0")
    assert page.js("document.querySelectorAll('[data-pass]').length") == len(data["stages"])
    last = next(s for s in reversed(data["stages"]) if s["changed"])
    page.click(f'[data-pass="{last["number"]}"]')
    shown = page.js("document.getElementById('pass').innerText")
    assert last["name"] in shown and last["rule"] in shown
    assert page.js("document.querySelectorAll('#pass .a').length") > 0
    assert page.js("document.querySelectorAll('#pass .d').length") > 0


@needs_browser
def test_the_roofline_has_roofs_and_dots(page: Page) -> None:
    page.click("#nav-roofline")
    page.wait("document.querySelectorAll('#roofline .spot').length > 3")
    roofs = page.js("[...document.querySelectorAll('#roofline .roof')].map(r => r.dataset.roof)")
    assert set(roofs) >= {"memory", "last-level cache", "f32 multiply-adds"}
    page.click("#roofline .spot")
    page.wait("!document.getElementById('drawer').hidden")
    assert "GFLOP/s" in page.js("document.getElementById('drawer').innerText")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert page.js("document.getElementById('drawer').hidden")


@needs_browser
def test_memory_kernels_and_source(page: Page, data: Any) -> None:
    page.click("#nav-memory")
    page.wait("document.querySelectorAll('#memory .buf').length > 3")
    assert page.js("document.querySelectorAll('#memory .buf').length") == len(data["memory"][0]["buffers"])
    page.click("#nav-kernels")
    page.wait("document.querySelectorAll('#kernels tbody tr').length > 3")
    assert page.js("document.querySelectorAll('#kernels tbody tr').length") == len(data["steps"])
    page.click("#kernels [data-sort=number]")
    assert page.js("document.querySelector('#kernels tbody tr').dataset.step") == "0"
    page.click("#nav-source")
    page.wait("document.getElementById('source') !== null")
    last = data["functions"][-1]
    page.click(f'[data-function="{last["name"]}"]')
    assert page.js("document.querySelector('main').scrollTop") > 100
    assert (
        page.js("document.getElementById('source').textContent.split('\\n').length") == data["source"].count("\n") + 1
    )


@needs_browser
def test_light_and_dark(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.js(colour)
    page.click("#theme")
    assert page.js(colour) != light
    page.click("#theme")
    assert page.js(colour) == light
