"use strict";
/* The page: tabs, tables, the drawer with the details of a node or a kernel. */
const DATA = JSON.parse(document.getElementById("data").textContent);
const STEPS = Object.fromEntries(DATA.steps.map(s => [s.number, s]));
const FUNCTIONS = Object.fromEntries(DATA.functions.map(f => [f.name, f]));
const $ = id => document.getElementById(id);
const state = {profile: 0, memory: 0, graph: "after", pass: null, sort: DATA.profiles.length ? {key: "ns", down: true} : {key: "number", down: false}};

function el(tag, attributes, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes || {})) {
    if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
    else if (k === "html") e.innerHTML = v;
    else if (v !== null && v !== undefined && v !== false) e.setAttribute(k, v === true ? "" : v);
  }
  for (const c of children.flat(Infinity)) if (c !== null && c !== undefined) e.append(c);
  return e;
}
const escape = text => text.replace(/[&<>]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;"}[c]));
const profile = () => DATA.profiles[state.profile] || null;
const measured = number => profile()?.steps.find(s => s.number === number) || null;
const dot = kind => el("i", {class: "dot", style: `background:var(--${family(kind)})`});

/* -- colours in text ------------------------------------------------------------------------------------------ */
function irHtml(text) {
  return escape(text).replace(/"[^"]*"|%[\w.$-]+|= [a-z_]\w*(?=\()|\b\d+(\.\d+)?(e-?\d+)?\b/g, m =>
    m[0] === '"' ? `<span class="st">${m}</span>` : m[0] === "%" ? `<span class="va">${m}</span>` : m[0] === "=" ? `= <span class="op">${m.slice(2)}</span>` : `<span class="nu">${m}</span>`);
}
const C_TOKENS = /\/\*[\s\S]*?\*\/|\/\/[^\n]*|"[^"\n]*"|^[ \t]*#[^\n]*|\b(?:static|const|void|int|float|double|char|for|while|if|else|return|enum|struct|typedef|inline|unsigned|restrict|int64_t|int32_t|uint16_t|uint32_t|extern|sizeof|switch|case|break|continue|__global__|__shared__|__device__)\b|\b(?:0x[0-9a-fA-F]+|\d+(?:\.\d*)?(?:e[+-]?\d+)?)[uUlLfF]*\b/gm;
function cHtml(text) {
  let out = "", at = 0;
  for (const m of text.matchAll(C_TOKENS)) {
    const t = m[0], c = t.startsWith("/") ? "cm" : t[0] === '"' ? "st" : t.trimStart()[0] === "#" ? "pp" : /\d/.test(t[0]) ? "nu" : "kw";
    out += escape(text.slice(at, m.index)) + `<span class="${c}">${escape(t)}</span>`;
    at = m.index + t.length;
  }
  return out + escape(text.slice(at));
}

/* -- the drawer ----------------------------------------------------------------------------------------------- */
function openDrawer(title, kind, ...parts) {
  const close = el("button", {class: "close", title: "close", onclick: closeDrawer}, "✕");
  $("drawer").replaceChildren(close, el("h2", {}, dot(kind), title), ...parts.flat(Infinity).filter(Boolean));
  $("drawer").hidden = false;
  $("drawer").scrollTop = 0;
}
function closeDrawer() { $("drawer").hidden = true; view?.mark(null); }

function showNode(n) {
  const lines = DATA.lines[`${n.file}:${n.line}`];
  const facts = el("dl", {class: "facts"}, fact("module", n.path || "–"), fact("your line", n.where || "–"), fact("what it does", n.doc || "–"));
  const fused = state.graph === "before" && n.steps.length;
  openDrawer(n.title, n.kind, facts, el("h3", {}, "IR"), el("pre", {class: "wrap", "data-part": "ir", html: irHtml(n.ir)}),
    n.weights.length ? [el("h3", {}, "weights"), el("pre", {class: "wrap", html: irHtml(n.weights.join("\n"))})] : null,
    lines ? [el("h3", {}, `your source, ${n.file.split("/").pop()}`), userLines(lines, n.line)] : null,
    n.steps.length ? [el("h3", {}, fused ? "computed by" : n.steps.length > 1 ? "kernels" : "kernel"), n.steps.map(s => kernelCard(s))] :
      ["input", "output"].includes(n.kind) ? null : el("p", {class: "muted"}, "No kernel: it costs nothing (a view, a constant, or done when the weights are loaded)."));
}
function showStep(number) {
  const s = STEPS[number];
  openDrawer(`step ${number}: ${s.function}`, s.family, el("pre", {class: "wrap", "data-part": "ir", html: irHtml(s.ir)}), el("p", {class: "muted"}, s.where), kernelCard(number),
    el("p", {}, el("a", {onclick: () => { const n = DATA.graphs.after.nodes.find(n => n.steps.includes(number)); if (n) { go("graph"); setGraph("after"); view.reveal(n.id); } }}, "show it in the graph")));
}
function kernelCard(number) {
  const s = STEPS[number], m = measured(number), f = FUNCTIONS[s.function];
  const facts = el("dl", {class: "facts"}, fact("step", `${number} of ${DATA.steps.length}, ${s.family}`), s.runs > 1 ? fact("runs", `${s.runs} in a call${s.layers ? ", one for each of " + s.layers : ""}`) : null,
    m ? fact("time", el("span", {"data-part": "time"}, `${time(m.ns)}${s.runs > 1 ? ` in ${s.runs} runs of ${time(m.ns / s.runs)}` : ""}, ${percent(m.ns / profile().total)} of all kernels`)) : null,
    m ? fact("rate", `${round(m.gbps)} GB/s, ${round(m.gflops)} GFLOP/s: ${percent(m.share)} of the ${m.bound} limit${m.share > 1 ? ` (${ABOVE})` : ""}`) : null,
    fact("flops", s.flops), fact("bytes", s.bytes), fact("memory", `${s.reads.join(", ") || "–"} → ${s.writes.join(", ")}`), fact("schedule", s.schedule),
    fact("waits", s.barrier ? "for all threads before it starts" : "not at all"));
  return el("div", {}, facts, el("h3", {}, "generated code ", el("a", {onclick: () => { go("source"); showSource(s.function); }}, `line ${f.line} of the source`)),
    el("pre", {"data-part": "code", html: cHtml(f.text)}));
}
const ABOVE = DATA.above; // why a share may exceed 100 %
const limit = m => m.share > 1 ? `> 100 % ${m.bound}` : `${percent(m.share)} ${m.bound}`;
const above = p => p.steps.some(m => m.share > 1) ? el("p", {class: "muted remark", "data-remark": "above"}, `> 100 %: ${ABOVE}`) : null;
const fact = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
function userLines(lines, here) {
  return el("pre", {class: "lines", "data-part": "user"}, lines.map(([n, text]) => el("span", n === here ? {class: "here"} : {}, el("span", {class: "no"}, String(n)), text, n === here ? "" : "\n")));
}

/* -- tabs ----------------------------------------------------------------------------------------------------- */
const TABS = {summary: "Summary", graph: "Graph", passes: "Passes", kernels: "Kernels", roofline: "Roofline", memory: "Memory", source: "Source"};
const painted = new Set();
const hashed = () => location.hash.replace(/^#\/?/, ""); // "#/kernels": a browser would scroll to the element of "#kernels"
function go(name) {
  for (const [id] of Object.entries(TABS)) {
    $("tab-" + id).classList.toggle("on", id === name);
    $("nav-" + id).setAttribute("aria-selected", id === name);
  }
  $("nav-" + name).scrollIntoView({block: "nearest", inline: "nearest"});
  if (!painted.has(name)) { painted.add(name); PAINT[name](); }
  if (hashed() !== name) history.replaceState(null, "", "#/" + name);
}
const PAINT = {summary: paintSummary, graph: paintGraph, passes: paintPasses, kernels: paintKernels, roofline: paintRoofline, memory: paintMemory, source: paintSource};

function paintSummary() {
  const p = profile(), changed = DATA.stages.filter(s => s.changed);
  const flow = el("div", {class: "flow"}, step(DATA.stages[0].ops, "ops in forward"), arrow(), step(changed.length, "passes at work"), arrow(), step(DATA.stages.at(-1).ops, "ops left"), arrow(), step(DATA.steps.length, "kernels"), p ? [arrow(), step(time(p.plain), "for a call")] : null);
  const table = el("table", {}, el("tbody", {}, DATA.summary.map(([k, v]) => el("tr", {}, el("td", {class: "muted"}, k), el("td", {}, v))), p ? [row("profiled", `${p.label}${p.sizes ? ", " + p.sizes : ""}, ${p.threads} threads`), row("looking costs", p.overhead >= 0 ? `+${(100 * p.overhead).toFixed(1)} % of a call's time` : "less than the noise of the machine")] : null));
  $("tab-summary").replaceChildren(el("div", {class: "grid"}, el("div", {class: "card"}, flow), el("div", {class: "grid cols"}, el("div", {class: "card"}, el("h2", {}, "In numbers"), table),
    el("div", {class: "card"}, el("h2", {}, p ? "Where the time goes" : "Kernels"), p ? topTable(p, 10) : el("p", {class: "muted"}, "There are no times: the report was made without the arguments of a call."),
      p ? null : familyTable()))));
  function step(number, text) { return el("div", {class: "step"}, el("b", {}, String(number)), el("span", {class: "muted"}, text)); }
  function arrow() { return el("span", {class: "arrow"}, "→"); }
  function row(k, v) { return el("tr", {}, el("td", {class: "muted"}, k), el("td", {}, v)); }
}
function familyTable() {
  const count = {};
  for (const s of DATA.steps) count[s.family] = (count[s.family] || 0) + s.runs;
  return el("table", {}, el("tbody", {}, Object.entries(count).sort((a, b) => b[1] - a[1]).map(([f, n]) => el("tr", {}, el("td", {}, dot(f), f), el("td", {class: "num"}, `${n} runs`)))));
}
function topTable(p, count) {
  const rows = [...p.steps].sort((a, b) => b.ns - a.ns), shown = rows.length > count + 1 ? rows.slice(0, count) : rows, rest = rows.slice(shown.length);
  const head = el("tr", {}, el("th", {}, "kernel"), el("th", {class: "roomy"}, "module"), ["runs", "time", "share", "of limit"].map(text => el("th", {class: "num"}, text)), el("th", {class: "roomy"}));
  const body = shown.map(m => {
    const s = STEPS[m.number];
    return el("tr", {class: "link", "data-step": m.number, onclick: () => showStep(m.number)}, el("td", {}, kernelName(s)), el("td", {class: "muted roomy"}, s.path || "–"), el("td", {class: "num"}, String(s.runs)), el("td", {class: "num"}, time(m.ns)), el("td", {class: "num"}, percent(m.ns / p.total)), el("td", {class: "num"}, limit(m)), el("td", {class: "roomy"}, bar(m.ns / p.total, s.family)));
  });
  const others = rest.length ? [[`${rest.length} other kernels`, sum(rest, m => STEPS[m.number].runs), sum(rest, m => m.ns)]] : [];
  const foot = [...others, ...sums(p)].map(([text, runs, ns, why]) => el("tr", {}, el("td", {title: why}, text), el("td", {class: "roomy"}), el("td", {class: "num"}, runs === null ? "" : String(runs)), el("td", {class: "num"}, time(ns)), el("td", {class: "num"}, runs === null ? "" : percent(ns / p.total)), el("td"), el("td", {class: "roomy"})));
  return [el("div", {class: "scroll"}, el("table", {id: "top"}, el("thead", {}, head), el("tbody", {}, body), el("tfoot", {}, foot))), el("p", {class: "muted remark"}, whySums(p)), above(p)];
}
const sum = (rows, of) => rows.reduce((s, r) => s + of(r), 0);
const kernelName = s => [dot(s.family), s.function, el("div", {class: "muted narrow"}, s.path || "–")];
/* The lines under a table of kernels, [text, runs, nanoseconds, why]: the first two add up to the third. */
function sums(p) {
  const all = [`all ${p.steps.length} kernels`, sum(p.steps, m => STEPS[m.number].runs), p.total];
  if (p.alone) return [all, ["a call", null, p.plain, "launches overlap in a call"]];
  return [all, ["outside them", null, p.probed - p.total, "checking arguments, making results, starting threads"], ["an instrumented call", null, p.probed], ["a call", null, p.plain, "the plan without time stamps"]];
}
function whySums(p) {
  if (p.alone) return "Each kernel was timed alone. In a call launches overlap, so a call may take less than the sum.";
  const odd = p.probed < p.total ? " Here it is negative: each time is a median of its own runs, and the machine was not quiet." : "";
  return "Kernels and what is outside them (checking arguments, making results, starting threads) add up to an instrumented call. " + `A call has no time stamps, and no barrier after every kernel.${odd} A kernel of rolled layers is the sum of its runs.`;
}
const bar = (share, kind) => el("div", {class: "bar"}, el("i", {style: `width:${100 * Math.min(share, 1)}%;background:var(--${family(kind)})`}));

let view = null;
function paintGraph() {
  const find = el("input", {type: "search", placeholder: "find an op, a value, a module", size: 26});
  const which = el("span", {class: "seg", id: "which"}, ["before", "after"].map(name => el("button", {"data-graph": name, onclick: () => setGraph(name)}, name === "before" ? "as traced" : "after all passes")));
  const canvas = el("div", {class: "canvas", id: "canvas"});
  const used = Object.entries(FAMILIES).filter(([f]) => Object.values(DATA.graphs).some(g => g.nodes.some(n => family(n.kind) === f)));
  const tools = el("div", {class: "toolbar"}, which, el("button", {onclick: () => view.zoom(1.25), title: "larger"}, "+"), el("button", {onclick: () => view.zoom(0.8), title: "smaller"}, "−"), el("button", {id: "fit", onclick: () => view.fit()}, "fit"),
    el("button", {id: "open-all", onclick: () => view.setAll(true)}, "open all"), el("button", {id: "close-all", onclick: () => view.setAll(false)}, "close all"), find, el("span", {class: "legend"}, used.map(([f, t]) => el("span", {}, el("i", {class: "dot", style: `background:var(--${f})`}), t))));
  $("tab-graph").replaceChildren(el("div", {id: "graph"}, tools, canvas));
  view = new GraphView(canvas, showNode, nodes => { if (!profile() || state.graph === "before") return ""; const ns = [...new Set(nodes.flatMap(n => n.steps))].reduce((s, k) => s + (measured(k)?.ns || 0), 0); return ns ? time(ns) : ""; });
  find.addEventListener("input", () => view.find(find.value));
  find.addEventListener("keydown", e => { if (e.key === "Enter") { const wanted = find.value.toLowerCase(), n = view.graph.nodes.find(n => (n.ir + " " + n.path).toLowerCase().includes(wanted)); if (n) view.reveal(n.id); } });
  setGraph(state.graph);
}
function setGraph(name) {
  state.graph = name;
  for (const b of document.querySelectorAll("#which button")) b.classList.toggle("on", b.dataset.graph === name);
  if (view.name !== name) { view.selected = null; view.show(name, DATA.graphs[name]); }
}

function paintPasses() {
  const list = el("div", {class: "card list"}), body = el("div", {class: "card scroll", id: "pass"});
  for (const s of DATA.stages) {
    const note = s.number === 0 ? `${s.ops} ops` : s.changed ? `${s.rewrites} ×` : "–";
    list.append(el("button", {class: s.changed || !s.number ? "" : "still", "data-pass": s.number, onclick: () => showPass(s.number)}, el("span", {class: "no"}, String(s.number)), el("span", {}, s.name), el("span", {}, note)));
  }
  $("tab-passes").replaceChildren(el("div", {class: "passes"}, list, body));
  showPass((DATA.stages.find(s => s.changed) || DATA.stages[0]).number);
}
function showPass(number) {
  const s = DATA.stages[number];
  for (const b of document.querySelectorAll("[data-pass]")) b.classList.toggle("on", Number(b.dataset.pass) === number);
  const kinds = {"+": "a", "-": "d", "@": "h"};
  const diff = s.diff.length ? el("pre", {class: "diff"}, s.diff.map(line => el("span", {class: kinds[line[0]] || ""}, line || " "))) : el("p", {class: "muted"}, number ? "It changed nothing here." : "This is where it starts: what forward wrote, op by op. The Graph tab shows it.");
  const misses = s.misses.length ? [el("h3", {}, "almost"), el("ul", {}, s.misses.slice(0, 60).map(m => el("li", {class: "muted"}, m)))] : null;
  const facts = number ? `${s.rewrites} rewrites, ${s.ms} ms, ${DATA.stages[number - 1].ops} → ${s.ops} ops` : `${s.ops} ops`;
  $("pass").replaceChildren(el("h2", {}, `${number}. ${s.name}`), el("p", {}, s.rule), el("p", {class: "muted"}, facts), diff, ...(misses || []));
}

const COLUMNS = [["number", "step", true], ["function", "kernel", false], ["path", "module", false], ["runs", "runs", true], ["ns", "time", true], ["each", "a run", true], ["part", "share", true], ["gbps", "GB/s", true], ["gflops", "GFLOP/s", true], ["share", "of limit", true], ["ir", "IR", false]];
const ROOMY = ["path", "ir"]; // columns that small screens leave out
function paintKernels() {
  const p = profile(), rows = DATA.steps.map(s => { const m = measured(s.number); return {...s, ...(m ? {ns: m.ns, gbps: m.gbps, gflops: m.gflops, share: m.share, bound: m.bound, each: m.ns / s.runs, part: m.ns / p.total} : {})}; });
  const columns = COLUMNS.filter(([k]) => p || !["ns", "each", "part", "gbps", "gflops", "share"].includes(k));
  const {key, down} = state.sort;
  rows.sort((a, b) => (a[key] > b[key] ? 1 : a[key] < b[key] ? -1 : a.number - b.number) * (down ? -1 : 1));
  const head = el("tr", {}, columns.map(([k, text, num]) => el("th", {class: "sort" + (num ? " num" : "") + (ROOMY.includes(k) ? " roomy" : ""), "data-sort": k, onclick: () => { state.sort = {key: k, down: state.sort.key === k ? !state.sort.down : num && k !== "number"}; paintKernels(); }}, text + (k === key ? (down ? " ↓" : " ↑") : ""))));
  const cell = (r, k) => ({number: String(r.number), function: kernelName(r), path: r.path || "–", runs: String(r.runs), ns: r.ns && time(r.ns), each: r.ns && time(r.each), part: r.part !== undefined && [percent(r.part), bar(r.part, r.family)], gbps: r.gbps !== undefined && round(r.gbps), gflops: r.gflops !== undefined && round(r.gflops), share: r.share !== undefined && limit(r), ir: el("div", {class: "ir", title: r.ir}, r.ir)}[k]);
  const foot = ([text, runs, ns, why]) => el("tr", {title: why}, columns.map(([k, , num]) => el("td", {class: (num ? "num" : "") + (ROOMY.includes(k) ? " roomy" : "")}, k === "function" ? text : k === "runs" && runs !== null ? String(runs) : k === "ns" ? time(ns) : k === "part" && runs !== null ? percent(ns / p.total) : "")));
  const table = el("table", {id: "kernels"}, el("thead", {}, head), el("tbody", {}, rows.map(r => el("tr", {class: "link", "data-step": r.number, onclick: () => showStep(r.number)}, columns.map(([k, , num]) => el("td", {class: (num ? "num" : k === "path" ? "muted" : "") + (ROOMY.includes(k) ? " roomy" : "")}, cell(r, k) || "–"))))), p ? el("tfoot", {}, sums(p).map(foot)) : null);
  const note = p ? `${p.label}${p.sizes ? " at " + p.sizes : ""}, ${p.threads} threads. ${whySums(p)}` : "No times: the report was made without the arguments of a call.";
  $("tab-kernels").replaceChildren(el("div", {class: "card"}, el("h2", {}, `${rows.length} kernels`), el("p", {class: "muted"}, note), p ? above(p) : null, el("div", {class: "scroll"}, table)));
}

function paintRoofline() {
  const p = profile();
  if (!p) { $("tab-roofline").replaceChildren(el("div", {class: "card"}, el("h2", {}, "Roofline"), el("p", {class: "muted"}, "No times: the report was made without the arguments of a call."))); return; }
  const host = el("div", {class: "chart", id: "roofline"});
  $("tab-roofline").replaceChildren(el("div", {class: "card"}, el("h2", {}, "Roofline"), el("p", {class: "muted"}, `One dot for each kernel that computes; its size is its share of the time. The lines were measured on this machine with ${p.threads} threads: under the slope memory decides, under the flat the arithmetic.`), above(p), host));
  rooflineChart(host, p, STEPS, showStep);
}

function paintMemory() {
  const all = DATA.memory;
  if (!all) { $("tab-memory").replaceChildren(el("div", {class: "card"}, el("p", {class: "muted"}, "The reference target has no plan."))); return; }
  const m = all[Math.min(state.profile, all.length - 1)], host = el("div", {class: "chart", id: "memory"});
  const saved = m.unshared ? 1 - m.peak / m.unshared : 0;
  const kinds = new Set(m.buffers.filter(b => b.kind !== "scratch").map(b => bufferFamily(b, STEPS)));
  const legend = el("p", {class: "legend left", id: "arena-legend"}, Object.entries(FAMILIES).filter(([f]) => kinds.has(f)).map(([f, text]) => el("span", {}, el("i", {class: "dot", style: `background:var(--${f})`}), `written by ${text}`)),
    m.buffers.some(b => b.kind === "scratch") ? el("span", {}, el("i", {class: "dot", style: "background:var(--view);opacity:.45"}), "scratch of one kernel") : null, el("span", {}, el("i", {class: "dot hollow"}), "free"));
  $("tab-memory").replaceChildren(el("div", {class: "card"}, el("h2", {}, "The arena"), el("p", {class: "muted"}, `One block of memory for all intermediate values. A bar is a buffer: as high as its bytes, from the step that writes it to the last one that reads it. ${m.slots} slots for ${m.buffers.length} buffers: ${bytes(m.peak)} in all, ${bytes(m.unshared)} without sharing${saved > 0.005 ? ` (${percent(saved)} saved)` : ""}, at ${m.sizes}.`), legend, host));
  memoryChart(host, m, STEPS);
}

function paintSource() {
  const text = DATA.source;
  if (!text) { $("tab-source").replaceChildren(el("div", {class: "card"}, el("p", {class: "muted"}, "The reference target has no source."))); return; }
  const lines = text.split("\n"), list = el("div", {class: "card list"});
  list.append(...DATA.functions.map(f => el("button", {"data-function": f.name, onclick: () => showSource(f.name)}, el("span", {}, f.name), el("span", {class: "no"}, String(f.line)))));
  const code = el("pre", {id: "source", html: cHtml(text)}), numbers = el("pre", {class: "no"}, lines.map((_, i) => i + 1).join("\n"));
  $("tab-source").replaceChildren(el("div", {class: "source"}, list, el("div", {class: "code", id: "code"}, numbers, code)));
}
function showSource(name) {
  for (const b of document.querySelectorAll("[data-function]")) b.classList.toggle("on", b.dataset.function === name);
  const line = FUNCTIONS[name].line, height = $("source").getBoundingClientRect().height, count = DATA.source.split("\n").length;
  const top = $("code").getBoundingClientRect().top + document.querySelector("main").scrollTop - document.querySelector("main").getBoundingClientRect().top;
  document.querySelector("main").scrollTo({top: top + 12 + (height - 24) * (line - 1) / count - 14});
}

/* -- start ---------------------------------------------------------------------------------------------------- */
$("title").textContent = DATA.name;
$("subtitle").textContent = `${DATA.target} · monoplan ${DATA.version} · ${DATA.made}`;
$("tabs").append(...Object.entries(TABS).map(([id, text]) => el("button", {id: "nav-" + id, role: "tab", "aria-selected": "false", onclick: () => go(id)}, text)));
if (DATA.profiles.length) {
  $("profile").append(...DATA.profiles.map((p, i) => el("option", {value: i}, p.label)));
  $("profile-choice").hidden = DATA.profiles.length < 2;
  $("profile").addEventListener("change", e => { state.profile = Number(e.target.value); const on = Object.keys(TABS).find(id => $("tab-" + id).classList.contains("on")); for (const id of ["summary", "kernels", "roofline", "memory"]) painted.delete(id); if (painted.has("graph")) view.draw(); go(on); closeDrawer(); });
}
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = new URLSearchParams(location.search).get("theme") || (dark ? "dark" : "light");
$("theme").addEventListener("click", () => { const root = document.documentElement; root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });
addEventListener("keydown", e => { if (e.key === "Escape") closeDrawer(); });
addEventListener("resize", () => { for (const id of ["roofline", "memory"]) if (painted.has(id)) { painted.delete(id); if ($("tab-" + id).classList.contains("on")) go(id); } });
addEventListener("hashchange", () => { if (TABS[hashed()]) go(hashed()); });
go(TABS[hashed()] ? hashed() : "summary");
