"use strict";
/* Roofline and memory timeline. */
const TINY = 0.0005; // share of the time below which a kernel gets no dot
function rooflineChart(host, profile, steps, choose) {
  const W = chartWidth(host), H = Math.min(560, Math.max(340, 0.6 * W)), L = W < 600 ? 48 : 70, R = 30, T = 20, B = 50;
  const lim = profile.limits, spots = profile.steps.map(s => ({...s, step: steps[s.number]})).filter(s => s.flops > 0 && s.bytes > 0 && s.ns > profile.total * TINY);
  const roofs = [["memory", lim.memory, "var(--linear)", "memory"], ["cache", lim.cache, "var(--norm)", "last-level cache"]].filter(r => r[1]);
  const peaks = [[lim.flops, "f32 multiply-adds"], [lim.tile_bf16, "bf16 tiles"]].filter(p => p[0]);
  const xs = spots.map(s => s.flops / s.bytes), ys = spots.map(s => s.gflops), top = Math.max(...peaks.map(p => p[0])) / 1e9;
  const x0 = Math.min(0.05, ...xs) / 2, x1 = Math.max(64, ...xs) * 2, y0 = Math.max(1e-4, Math.min(top / 1e3, ...ys) / 2), y1 = Math.max(top, ...ys) * 2;
  const X = v => L + (W - L - R) * Math.log(v / x0) / Math.log(x1 / x0), Y = v => H - B - (H - T - B) * Math.log(v / y0) / Math.log(y1 / y0);
  const root = svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img"});
  for (let e = Math.ceil(Math.log10(x0)); e <= Math.log10(x1); e++) {
    const x = X(10 ** e);
    root.append(svg("line", {class: "axis", x1: x, x2: x, y1: T, y2: H - B}), svg("text", {x, y: H - B + 18, "text-anchor": "middle"}, power(e)));
  }
  for (let e = Math.ceil(Math.log10(y0)); e <= Math.log10(y1); e++) {
    const y = Y(10 ** e);
    root.append(svg("line", {class: "axis", x1: L, x2: W - R, y1: y, y2: y}), svg("text", {x: L - 8, y: y + 4, "text-anchor": "end"}, power(e)));
  }
  root.append(svg("text", {x: (L + W - R) / 2, y: H - 10, "text-anchor": "middle"}, "flops for each byte"), svg("text", {transform: `translate(18 ${(T + H - B) / 2}) rotate(-90)`, "text-anchor": "middle"}, "GFLOP/s"));
  for (const [flops, label] of peaks) {
    const y = Y(flops / 1e9);
    root.append(svg("line", {class: "roof", "data-roof": label, x1: L, x2: W - R, y1: y, y2: y, stroke: "var(--attention)", "stroke-width": 2}), svg("text", {x: W - R - 4, y: y - 6, "text-anchor": "end"}, `${label} ${round(flops / 1e9)} GFLOP/s`));
  }
  for (const [, rate, color, label] of roofs) {
    const knee = top / (rate / 1e9), from = Math.max(x0, y0 / (rate / 1e9)), to = Math.min(x1, knee);
    root.append(svg("path", {class: "roof", "data-roof": label, d: `M${X(from)} ${Y(from * rate / 1e9)} L${X(to)} ${Y(to * rate / 1e9)}`, stroke: color}));
    const at = from * (to / from) ** (W < 600 ? 0.5 : 0.24), shift = label === "memory" ? 16 : -8;
    const angle = -Math.atan2(Y(from * rate / 1e9) - Y(to * rate / 1e9), X(to) - X(from)) * 180 / Math.PI;
    root.append(svg("text", {transform: `translate(${X(at)} ${Y(at * rate / 1e9)}) rotate(${angle}) translate(0 ${shift})`, "text-anchor": "middle"}, `${label} ${round(rate / 1e9)} GB/s`));
  }
  for (const s of spots.sort((a, b) => b.ns - a.ns)) {
    const share = s.ns / profile.total, r = 4 + 16 * Math.sqrt(share);
    const dot = svg("circle", {class: "spot", "data-step": s.number, cx: X(s.flops / s.bytes), cy: Y(s.gflops), r, fill: `var(--${family(s.step.family)})`, "fill-opacity": .82, tabindex: 0});
    hint(dot, `step ${s.number}, ${s.step.function}\n${time(s.ns)} (${percent(share)} of all kernels)\n${round(s.gflops)} GFLOP/s, ${round(s.gbps)} GB/s\n${s.share > 1 ? "> 100 %" : percent(s.share)} of the ${s.bound} limit`);
    dot.addEventListener("click", () => choose(s.number));
    root.append(dot);
  }
  host.replaceChildren(root);
}

function memoryChart(host, memory, steps) {
  const rows = memory.buffers, W = chartWidth(host), L = 72, R = 16, T = 14, B = 44, n = Math.max(memory.steps, 1);
  const H = Math.max(260, Math.min(620, 120 + 26 * memory.slots));
  const X = v => L + (W - L - R) * v / n, Y = v => H - B - (H - T - B) * v / Math.max(memory.peak, 1);
  const root = svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img"});
  for (let i = 0; i <= 4; i++) {
    const v = memory.peak * i / 4, y = Y(v);
    root.append(svg("line", {class: "axis", x1: L, x2: W - R, y1: y, y2: y}), svg("text", {x: L - 8, y: y + 4, "text-anchor": "end"}, bytes(v)));
  }
  const every = Math.ceil(n / ((W - L - R) / 34));
  for (let i = 0; i < n; i += every) root.append(svg("text", {x: X(i + .5), y: H - B + 18, "text-anchor": "middle"}, i));
  root.append(svg("text", {x: L - 8, y: H - B + 18, "text-anchor": "end"}, "step"));
  for (let i = 0; i < n; i++) {
    if (!(steps[i]?.runs > 1) || steps[i - 1]?.layers === steps[i].layers && steps[i - 1]?.runs > 1) continue;
    let end = i;
    while (steps[end + 1]?.runs > 1 && steps[end + 1].layers === steps[i].layers) end++;
    root.append(svg("path", {class: "loop", d: `M${X(i) + 3} ${H - B + 24}v5H${X(end + 1) - 3}v-5`}), svg("text", {x: X((i + end + 1) / 2), y: H - 3, "text-anchor": "middle"}, `${steps[i].layers || "a loop"}, ${steps[i].runs} runs`));
  }
  for (const b of rows) {
    const h = Math.max(2, Y(b.offset) - Y(b.offset + b.bytes));
    const bar = svg("rect", {class: "buf", x: X(b.first) + 1, y: Y(b.offset) - h, width: Math.max(2, X(b.last + 1) - X(b.first) - 2), height: h, rx: Math.min(3, h / 3), "stroke-width": h < 4 ? 0 : 1, fill: `var(--${b.kind === "scratch" ? "view" : bufferFamily(b, steps)})`, "fill-opacity": b.kind === "scratch" ? .45 : .8});
    hint(bar, `${b.name}: ${b.type}, ${bytes(b.bytes)}\nsteps ${b.first} – ${b.last}${b.kind === "scratch" ? ", scratch of one kernel" : ""}\nslot ${b.slot} at ${bytes(b.offset)}`);
    root.append(bar);
  }
  host.replaceChildren(root);
}

/* In the page's own units, so that letters keep their size on a small screen. */
const chartWidth = host => Math.max(320, Math.min(1300, host.clientWidth || 1100));
const bufferFamily = (b, steps) => family(steps[b.first]?.family || "view");
function power(e) { return e >= 0 && e < 4 ? String(10 ** e) : e < 0 && e > -4 ? (10 ** e).toFixed(-e) : `1e${e}`; }
function round(v) { return v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v >= 0.01 ? v.toFixed(2) : v.toPrecision(2); }
function percent(v) { return v > 0 && v < 0.0005 ? "< 0.1 %" : v >= 0.1 ? `${(100 * v).toFixed(0)} %` : `${(100 * v).toFixed(1)} %`; }
function time(ns) { return ns < 0 ? `-${time(-ns)}` : ns >= 1e9 ? `${round(ns / 1e9)} s` : ns >= 1e6 ? `${round(ns / 1e6)} ms` : ns >= 1e3 ? `${round(ns / 1e3)} µs` : `${Math.round(ns)} ns`; }
function bytes(v) { return v >= 1e6 ? `${round(v / 1e6)} MB` : v >= 1e3 ? `${round(v / 1e3)} kB` : `${Math.round(v)} B`; }

function hint(element, text) {
  const tip = document.getElementById("tip");
  const show = e => { tip.textContent = text; tip.hidden = false; const w = tip.offsetWidth, h = tip.offsetHeight; tip.style.left = Math.min(innerWidth - w - 8, e.clientX + 14) + "px"; tip.style.top = Math.min(innerHeight - h - 8, e.clientY + 14) + "px"; };
  element.addEventListener("pointermove", show);
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
}
