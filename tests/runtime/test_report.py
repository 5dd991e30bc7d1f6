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
from monoplan.inspect.report import Data, render_report, report_data, separate_groups
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
    loop = next(g for g in after["groups"] if g["id"].startswith("loop"))
    assert loop["title"] == f"layers 0–{LAYERS - 2}" and loop["open"]  # the last one ends with one row
    assert f"run {LAYERS - 1} times" in loop["note"]
    assert sum(n["group"] == loop["id"] for n in after["nodes"]) >= 5
    caches = next(n for n in after["nodes"] if n["title"].startswith("past_key_values.k"))
    assert caches["title"] == f"past_key_values.k.* × {LAYERS}"


def test_written_out_layers_are_stacked(data: Any) -> None:
    before = data["graphs"]["before"]
    groups = {g["id"]: g for g in before["groups"]}
    assert groups["model.layers.0"]["open"] and groups["model.layers.0"]["parent"] is None
    rest = groups["model.layers.rest"]
    assert rest["title"] == f"layers 1–{LAYERS - 1}" and groups["model.layers.0"]["note"] == "24 ops"
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


def test_kernels_of_rolled_layers_are_named_by_their_layers(llm: Any, data: Any) -> None:
    rolled = [s for s in data["steps"] if s["runs"] > 1]
    assert len(rolled) == 5 and {s["runs"] for s in rolled} == {LAYERS - 1}
    assert {s["layers"] for s in rolled} == {f"layers 0–{LAYERS - 2}"}
    assert f"model.layers.0–{LAYERS - 2}.mlp" in [s["path"] for s in rolled]
    assert [s["path"] for s in data["steps"] if s["layers"] == "" and "mlp" in s["path"]] == [
        f"model.layers.{LAYERS - 1}.mlp"
    ]


# -- groups that can be drawn as boxes --------------------------------------------------------------------------------


def graph_of(edges: str, groups: dict[str, str], parents: dict[str, str | None]) -> Data:
    """A graph from `"a>b b>c"`, the group of each node, and the parent of each group."""
    pairs = [e.split(">") for e in edges.split()]
    names = list(dict.fromkeys(n for pair in pairs for n in pair))
    nodes = [
        {"id": n, "group": groups.get(n), "from": [a for a, b in pairs if b == n], "title": n, "sub": "f32[4]"}
        | {"kind": "linear", "ir": n, "path": "", "steps": []}
        for n in names
    ]
    made = [{"id": g, "parent": p, "title": g, "note": "", "open": True} for g, p in parents.items()]
    separate_groups(nodes, made)
    return {"nodes": nodes, "groups": made}


def groups_of(graph: Data) -> dict[str, str | None]:
    return {n["id"]: n["group"] for n in graph["nodes"]}


def test_what_lies_between_the_ops_of_a_group_joins_it(data: Any) -> None:
    found = graph_of("x>a a>b b>s i>s s>c c>y", dict.fromkeys("abc", "L"), {"L": None})
    assert groups_of(found) == {**dict.fromkeys("abcs", "L"), "x": None, "i": None, "y": None}
    assert [g["note"] for g in found["groups"]] == ["4 ops"]
    last = f"model.layers.{LAYERS - 1}"
    assert {n["title"]: n["group"] for n in data["graphs"]["after"]["nodes"]}["select_rows"] == last


def test_a_group_with_another_inside_its_path_is_cut() -> None:
    found = graph_of("a>p p>b b>q q>c", {"a": "L", "b": "L", "c": "L", "p": "M", "q": "M"}, {"L": None, "M": None})
    assert groups_of(found) == {"a": "L", "p": "M", "b": "L/1", "q": "M/1", "c": "L/2"}
    assert [g["title"] for g in found["groups"]] == ["L, part 1", "L, part 2", "L, part 3", "M, part 1", "M, part 2"]


def test_two_groups_that_read_each_other_are_cut_though_no_path_returns() -> None:
    found = graph_of("a>p q>b", {"a": "L", "b": "L", "p": "M", "q": "M"}, {"L": None, "M": None})
    assert len(set(groups_of(found).values())) == 3


def test_a_chain_of_groups_stays_as_it_is() -> None:
    found = graph_of("a>b b>c c>d d>e a>e", {"a": "L", "b": "L", "c": "M", "d": "M"}, {"L": "T", "M": "T", "T": None})
    assert groups_of(found) == {"a": "L", "b": "L", "c": "M", "d": "M", "e": None}
    assert [g["id"] for g in found["groups"]] == ["L", "M", "T"]


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
    assert page.js("document.querySelector('.frame text').textContent") == f"▾ layers 0–{LAYERS - 2}"
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
    assert "attention_" in parts["code"] and "of all kernels" in parts["time"]
    assert "model.layers.0.self_attn" in page.js("document.getElementById('drawer').innerText")
    page.click("#drawer .close")
    assert page.js("document.getElementById('drawer').hidden")


# What is wrong with the drawing on the screen, in words: nodes that overlap, links that go up, cross a node or a box
# that is not theirs, or do not reach their ends.
WRONG = """(() => {
  const wrong = [], all = selector => [...document.querySelectorAll(selector)];
  const boxOf = e => { const b = e.getBBox(); return {l: b.x, r: b.x + b.width, t: b.y, b: b.y + b.height}; };
  // The points of a path, those between the ends of a curve too. (getPointAtLength measures the path at each call.)
  const pointsOf = e => {
    const found = [], mix = (t, a, b) => a + t * (b - a);
    const cube = (t, a, b, c, d) => mix(t, mix(t, mix(t, a, b), mix(t, b, c)), mix(t, mix(t, b, c), mix(t, c, d)));
    for (const part of e.getAttribute('d').match(/[MLC][^MLC]*/g)) {
      const v = part.slice(1).split(' ').map(Number), p = found.at(-1);
      if (part[0] === 'C') for (let t = 1 / 16; t < 1; t += 1 / 16)
        found.push({x: cube(t, p.x, v[0], v[2], v[4]), y: cube(t, p.y, v[1], v[3], v[5])});
      found.push({x: v.at(-2), y: v.at(-1)});
    }
    return found;
  };
  const rects = all('.node').map(e => {
    const own = [...e.querySelectorAll('rect.box')].map(boxOf), least = s => Math.min(...own.map(b => b[s]));
    return {id: e.dataset.id, l: least('l'), t: least('t'), r: own.at(-1).r, b: own.at(-1).b};
  });
  const node = new Map(rects.map(r => [r.id, r]));
  const frames = all('[data-frame]').map(e => ({id: e.dataset.frame, ...boxOf(e)}));
  const groupOf = new Map(view.graph.nodes.map(n => [n.id, n.group]));
  const home = id => view.groups.has(id) ? view.groups.get(id).parent : groupOf.get(id);  // the group around it
  const around = id => view.chain(home(id));
  const meet = (a, b, d = 1) => a.l < b.r - d && b.l < a.r - d && a.t < b.b - d && b.t < a.b - d;
  for (const a of rects) for (const b of rects) if (a !== b && meet(a, b)) wrong.push(`${a.id} lies over ${b.id}`);
  for (const f of frames) for (const r of [...rects, ...frames]) {
    if (r === f || around(f.id).includes(r.id)) continue; // the second: seen from the other side
    const inside = r.l >= f.l && r.r <= f.r && r.t >= f.t && r.b <= f.b;
    if (around(r.id).includes(f.id) ? !inside : meet(f, r)) wrong.push(`${r.id} and the box ${f.id}`);
  }
  const between = (p, q) => ({l: Math.min(p.x, q.x), r: Math.max(p.x, q.x), t: p.y, b: q.y});
  const ends = new Map();
  for (const e of all('.edge')) {
    const mine = e.dataset.box ? [...around(e.dataset.box), e.dataset.box] : [];
    const name = `the link of ${e.dataset.source} in ${e.dataset.box}`;
    const over = boxOf(e), foreign = [...rects, ...frames.filter(f => !mine.includes(f.id))];
    const others = foreign.filter(r => meet(r, over, -1));
    const points = pointsOf(e);
    if (points.some((p, i) => i && p.y < points[i - 1].y - 0.01)) wrong.push(`${name} goes up`);
    const pieces = points.slice(1).map((p, i) => between(points[i], p));
    const hit = others.find(r => pieces.some(piece => meet(piece, r)));
    if (hit) wrong.push(`${name} crosses ${hit.id}`);
    ends.set(e, [points[0], points.at(-1)]);
  }
  const byId = new Map(view.graph.nodes.map(n => [n.id, n]));
  const shown = n => view.chain(n.group).find(g => !view.isOpen(g)) ?? n.id;
  const near = (p, x, y) => Math.abs(p.x - x) < 1 && Math.abs(p.y - y) < 1;
  let count = 0;
  for (const n of view.graph.nodes) for (const from of n.from) {
    const a = node.get(shown(byId.get(from))), b = node.get(shown(n));
    if (a === b) continue;
    count++;
    if (!(a.b < b.t)) wrong.push(`${a.id} is not above ${b.id}`);
    const [mine, theirs] = [a, b].map(r => new Set(view.linksOf.get(r.id)));
    const path = [...mine].filter(l => theirs.has(l) && l.source === a.id);
    let x = (a.l + a.r) / 2, y = a.b;
    for (const [p, q] of path.map(l => ends.get(l.element)).sort((p, q) => p[0].y - q[0].y)) {
      if (!near(p, x, y)) wrong.push(`a gap between ${a.id} and ${b.id}`);
      x = q.x; y = q.y;
    }
    if (!near({x, y}, (b.l + b.r) / 2, b.t)) wrong.push(`${a.id} is not linked to ${b.id}`);
  }
  return {wrong: [...new Set(wrong)].slice(0, 20), count};
})()"""


def assert_drawn_well(page: Page) -> None:
    found = page.js(WRONG)
    assert found["wrong"] == [] and found["count"] > 5


@needs_browser
def test_nodes_lie_below_what_they_read_and_links_go_around_nodes(page: Page) -> None:
    page.click("#nav-graph")
    page.wait("document.querySelectorAll('.node').length > 10")
    for name, layers in ("after", 1), ("before", LAYERS):
        page.js(f"setGraph('{name}')")
        assert_drawn_well(page)
        page.click("#open-all")
        assert page.js("document.querySelectorAll('.frame [class=hit-area]').length") >= layers
        assert_drawn_well(page)
        page.click("#close-all")
        assert_drawn_well(page)
        page.js("view.open = {}; view.name = null")  # as it was


@needs_browser
def test_what_follows_the_choice_of_the_last_row_is_below_it(page: Page) -> None:
    """The halves of the last layer with the choice between them are no cycle of boxes, which would have no order."""
    page.click("#nav-graph")
    page.js("view.name = null; setGraph('after'); view.setAll(true)")
    tops = page.js("Object.fromEntries(view.graph.nodes.map(n => [n.id, view.at.get(n.id).y]))")
    nodes = page.js("view.graph.nodes.map(n => [n.id, n.title, n.path])")
    by_title = {title: tops[name] for name, title, _ in nodes}
    order = [tops[name] for name, _, path in nodes if path in (f"model.layers.{LAYERS - 1}.mlp", "lm_head")]
    behind = [by_title["select_rows"], *order, by_title["random_sample"], by_title["output 0"], by_title["output 1"]]
    assert len(order) == 2 and behind == sorted(behind) and len(set(behind)) == len(behind)
    page.js("view.open = {}; view.name = null; setGraph('after')")


@needs_browser
@pytest.mark.parametrize("seed", range(6))
def test_any_graph_is_drawn_well(page: Page, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [f"n{i}" for i in range(40)]
    pairs = [(int(rng.integers(max(0, b - 12), b)), b) for b in range(1, 40) for _ in range(1 + int(rng.integers(3)))]
    parents = {"A": None, "B": None, "A.1": "A", "A.2": "A", "B.1": "B", "B.1.1": "B.1"}
    groups = {n: str(rng.choice([*parents])) for n in names if rng.random() < 0.7}
    graph = graph_of(" ".join(f"n{a}>n{b}" for a, b in pairs), groups, parents)
    page.click("#nav-graph")
    page.js(f"view.show('random{seed}', {json.dumps(graph)})")
    assert_drawn_well(page)
    for group in graph["groups"]:
        if rng.random() < 0.5:
            page.js(f"view.open[view.name].set({group['id']!r}, false)")
    page.js("view.draw()")
    assert_drawn_well(page)
    page.js("view.open = {}; view.name = null; setGraph('after')")


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


def nanoseconds(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]


@needs_browser
@pytest.mark.parametrize(("tab", "table"), [("summary", "top"), ("kernels", "kernels")])
def test_runs_and_times_add_up(page: Page, data: Any, tab: str, table: str) -> None:
    page.click(f"#nav-{tab}")
    page.wait(f"document.querySelector('#{table} tfoot') !== null")
    cells = page.js(
        f"[...document.querySelectorAll('#{table} tbody tr, #{table} tfoot tr')]"
        ".map(r => [...r.cells].map(c => c.innerText))"
    )
    head = page.js(f"[...document.querySelectorAll('#{table} th')].map(c => c.innerText.split(' ')[0])")
    runs, time = head.index("runs"), head.index("time")
    sums = {next(c for c in row if c): row for row in cells}
    whole = [name for name in sums if name.startswith("all ")]
    assert whole == [f"all {len(data['steps'])} kernels"]
    last = cells.index(sums[whole[0]])
    assert sum(int(r[runs]) for r in cells[:last]) == int(sums[whole[0]][runs]) == sum(s["runs"] for s in data["steps"])
    total, outside, call = (nanoseconds(sums[n][time]) for n in (whole[0], "outside them", "an instrumented call"))
    assert sum(nanoseconds(r[time]) for r in cells[:last]) == pytest.approx(total, rel=0.01)
    assert total + outside == pytest.approx(call, rel=0.02, abs=0.02 * total)
    assert "add up to an instrumented call" in page.js(f"document.getElementById('tab-{tab}').innerText")


@needs_browser
def test_memory_kernels_and_source(page: Page, data: Any) -> None:
    page.click("#nav-memory")
    page.wait("document.querySelectorAll('#memory .buf').length > 3")
    assert page.js("document.querySelectorAll('#memory .buf').length") == len(data["memory"][0]["buffers"])
    legend = page.js("document.getElementById('arena-legend').innerText")
    assert "written by products" in legend and "scratch of one kernel" in legend and "free" in legend
    colours = page.js("new Set([...document.querySelectorAll('#memory .buf')].map(b => getComputedStyle(b).fill)).size")
    assert page.js("document.querySelectorAll('#arena-legend .dot').length") == colours + 1  # and free memory
    assert f"layers 0–{LAYERS - 2}, {LAYERS - 1} runs" in page.js("document.getElementById('memory').textContent")
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


@needs_browser
def test_shares_above_the_limit_are_cut_and_explained(page: Page, written: Path, data: Any, tmp_path: Path) -> None:
    def opened(share: float) -> tuple[str, int]:
        (profile,) = data["profiles"]
        steps = [{**s, "share": share, "bound": "memory"} for s in profile["steps"]]
        path = tmp_path / f"{share}.html"
        path.write_text(render_report({**data, "profiles": [{**profile, "steps": steps}]}), "utf-8")
        page.open(path.as_uri() + "#/kernels")
        page.wait("document.querySelector('#kernels tfoot') !== null")
        remarks = page.js("document.querySelectorAll('#tab-kernels [data-remark=above]').length")
        return page.js("document.querySelector('#tab-kernels').innerText"), remarks

    text, remarks = opened(3.25)
    assert text.count("> 100 % memory") == len(data["steps"]) and "325" not in text and remarks == 1
    assert "> 100 %: faster than the limit" in text and "monoplan bench --limits" in text
    page.click("#kernels tbody tr")
    page.wait("!document.getElementById('drawer').hidden")
    assert "325 % of the memory limit (faster than" in page.js("document.getElementById('drawer').innerText")
    text, remarks = opened(0.5)
    assert "50 % memory" in text and "100 % memory" not in text and remarks == 0
    page.open(written.as_uri() + "?theme=light")


@needs_browser
def test_a_small_screen_shows_titles_and_readable_charts(page: Page, written: Path) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=380, height=760, deviceScaleFactor=1, mobile=False)
    try:
        for tab in ("summary", "graph", "kernels", "roofline", "memory"):
            page.open(written.as_uri() + f"?theme=light&small={tab}#/{tab}")
            page.wait(f"document.querySelector('#tab-{tab}.on') !== null")
            for shown in ("title", f"nav-{tab}"):
                box = page.js(f"document.getElementById('{shown}').getBoundingClientRect().toJSON()")
                assert box["left"] >= 0 and box["right"] <= 380 and box["top"] >= 0 and box["width"] > 20
            assert page.js("document.getElementById('title').innerText") == "GenerationStep"
            assert page.js("document.querySelector('header').getBoundingClientRect().height") < 120
            assert page.js("document.documentElement.scrollWidth") == 380
            assert page.js("document.querySelector('main').scrollTop") == 0  # its beginning, not the table of that name
        page.js("globalThis.chart = document.querySelector('#memory svg')")
        scale = page.js("chart.clientWidth / chart.viewBox.baseVal.width")
        assert 0.9 < scale < 1.1  # letters keep their size
        page.click("#nav-graph")
        assert page.js("view.t.k") >= 0.5
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
        page.open(written.as_uri() + "?theme=light")
