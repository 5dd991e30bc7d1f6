"use strict";
/* The graph view: groups that open and close, pan and zoom, selection. */
const FAMILY = {
  linear: "linear", fused_linear: "linear", qkv_rope_cache: "linear", linear_argmax: "linear", linear_norm: "linear", matmul: "linear", fused_matmul: "linear",
  attention: "attention", norm: "norm", fused_norm: "norm", softmax: "norm", reduce: "norm", fused_reduce: "norm", scan: "norm",
  pointwise: "pointwise", fused_pointwise: "pointwise", rope: "pointwise", gather: "gather", fused_gather: "gather", kv_update: "gather",
  copy: "gather", sample: "sample", sort: "sample", view: "view", generate: "view", collective: "view", input: "io", output: "io",
};
const family = kind => FAMILY[kind] || "view";
const FAMILIES = {linear: "products", attention: "attention", norm: "norms, reductions", pointwise: "pointwise", gather: "lookups, copies", sample: "choices", view: "views", io: "in and out"};
const HEAD = 32, FOOT = 14, STACK = 8; // of frames and of the sheets behind a closed group
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const e = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(attributes || {})) if (v !== null && v !== undefined) e.setAttribute(k, v);
  for (const c of children) if (c !== null) e.append(c);
  return e;
}

class GraphView {
  constructor(host, select, timeOf) {
    this.select = select; this.timeOf = timeOf; this.host = host;
    this.view = svg("g", {});
    this.svg = svg("svg", {role: "img"}, this.view);
    host.replaceChildren(this.svg);
    this.t = {x: 0, y: 0, k: 1};
    this.open = {};
    this.bindMouse();
  }

  show(name, graph) {
    this.name = name; this.graph = graph;
    this.open[name] ||= new Map(graph.groups.map(g => [g.id, g.open]));
    this.groups = new Map(graph.groups.map(g => [g.id, g]));
    this.draw();
    this.fit();
  }

  isOpen(id) { return this.open[this.name].get(id); }
  toggle(id) { this.open[this.name].set(id, !this.isOpen(id)); this.draw(); }
  setAll(value) { for (const g of this.graph.groups) this.open[this.name].set(g.id, value); this.draw(); this.fit(); }

  /* The chain of groups of a node, outermost first. */
  chain(group) {
    const found = [];
    for (let g = group; g; g = this.groups.get(g)?.parent) found.unshift(g);
    return found;
  }

  /* The tree of open groups as boxes. A link that enters or leaves a box goes through a port on its border, one for each
     source: the box is laid out with it, so that the link finds its way around the nodes inside. */
  draw() {
    const top = box0(null, null), boxes = new Map([[null, top]]), shown = new Map();
    this.members = new Map();
    const box = id => {
      if (!boxes.has(id)) {
        boxes.set(id, box0(id, this.groups.get(id)));
        box(this.groups.get(id).parent || null).items.set(id, boxes.get(id));
      }
      return boxes.get(id);
    };
    for (const n of this.graph.nodes) {
      const chain = this.chain(n.group), closed = chain.find(g => !this.isOpen(g));
      for (const g of chain) push(this.members, g, n);
      shown.set(n.id, closed ?? n.id);
      if (closed === undefined) box(n.group || null).items.set(n.id, {id: n.id, node: n, w: width(n), h: 44});
      else if (this.members.get(closed).length === 1) {
        const g = this.groups.get(closed);
        box(g.parent || null).items.set(closed, {id: closed, stack: g, w: Math.max(190, 8 * g.title.length + 90, 6.4 * g.note.length + 34), h: 50 + STACK});
      }
    }
    const groupOf = new Map(this.graph.nodes.map(n => [n.id, n.group])), seen = new Set();
    const path = id => [null, ...this.chain(this.groups.has(id) ? this.groups.get(id).parent : groupOf.get(id)), id];
    this.linksOf = new Map();
    for (const n of this.graph.nodes) for (const from of n.from) {
      const a = shown.get(from), b = shown.get(n.id);
      if (a === undefined || a === b || seen.has(a + ">" + b)) continue;
      seen.add(a + ">" + b);
      const pa = path(a), pb = path(b), out = "out:" + a, into = "in:" + a;
      let i = 0;
      while (pa[i + 1] === pb[i + 1] && i + 1 < pa.length - 1 && i + 1 < pb.length - 1) i++;
      const add = (where, x, fromPort, y, toPort) => {
        const level = boxes.get(where), key = `${x}>${y}>${a}`;
        if (!level.links.has(key)) level.links.set(key, {from: x, fromPort, to: y, toPort, source: a});
        for (const end of [a, b]) push(this.linksOf, end, level.links.get(key));
      };
      for (let j = pa.length - 2; j > i; j--) { boxes.get(pa[j]).ports.set(out, "out"); add(pa[j], pa[j + 1], j + 2 < pa.length ? out : null, out, null); }
      add(pa[i], pa[i + 1], i + 2 < pa.length ? out : null, pb[i + 1], i + 2 < pb.length ? into : null);
      for (let j = i + 1; j < pb.length - 1; j++) { boxes.get(pb[j]).ports.set(into, "in"); add(pb[j], into, null, pb[j + 1], j + 2 < pb.length ? into : null); }
    }
    this.arrange(top);
    this.paint(top);
  }

  /* Lays out a box from the inside out. */
  arrange(box) {
    for (const item of box.items.values()) if (item.items) {
      this.arrange(item);
      const note = this.note(item);
      item.w = Math.max(item.inner.w + 36, 8 * item.group.title.length + 6.4 * note.length + 70);
      item.h = item.inner.h + HEAD + FOOT;
    }
    const ports = [...box.ports].map(([id, port]) => ({id, port, w: LANE, h: 0})), links = [...box.links.values()];
    const dx = (id, port) => port ? box.items.get(id).dx.get(port) : 0;
    box.inner = layered([...box.items.values(), ...ports], links.map(l => ({from: l.from, to: l.to, fromDx: dx(l.from, l.fromPort), toDx: dx(l.to, l.toPort)})));
    box.dx = new Map(ports.map(p => [p.id, p.x - box.inner.w / 2]));
    links.forEach((l, k) => { l.route = box.inner.routes[k]; });
  }

  note(item) { const spent = this.timeOf(this.members.get(item.id)); return item.group.note + (spent ? ", " + spent : ""); }

  paint(top) {
    const frames = svg("g", {}), edges = svg("g", {}), titles = svg("g", {}), nodes = svg("g", {});
    this.at = new Map(); this.elements = new Map();
    this.first = null;
    const visit = (box, ox, oy, from, to) => {
      for (const l of box.links.values()) {
        const points = l.route.map(([x, y]) => [ox + x, oy + y]);
        if (box.ports.has(l.from)) points[0][1] = from;
        if (box.ports.has(l.to)) points.at(-1)[1] = to;
        const ends = !l.toPort && !box.ports.has(l.to);
        l.element = svg("path", {class: "edge", d: curve(points), "data-source": l.source, "data-box": box.id, "marker-end": ends ? "url(#arrow)" : null});
        edges.append(l.element);
      }
      for (const item of box.items.values()) {
        const x = ox + item.x - item.w / 2, y = oy + item.y - item.h / 2;
        this.at.set(item.id, {x, y, w: item.w, h: item.h});
        if (item.items) {
          this.first ??= item.id;
          frames.append(svg("g", {class: "frame", "data-frame": item.id}, svg("rect", {x, y, width: item.w, height: item.h, rx: 14})));
          titles.append(this.title(item, x, y));
          visit(item, x + (item.w - item.inner.w) / 2, y + HEAD, y, y + item.h);
        } else nodes.append(this.box(item, x, y));
      }
    };
    visit(top, 0, 0, 0, 0);
    const arrow = svg("defs", {}, svg("marker", {id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto"}, svg("path", {d: "M0 0 8 4 0 8z", fill: "var(--muted)", "fill-opacity": ".6"})));
    this.view.replaceChildren(arrow, frames, edges, titles, nodes);
    this.size = {w: top.inner.w, h: top.inner.h};
    this.mark(this.selected);
  }

  title(item, x, y) {
    const g = svg("g", {class: "frame", "data-group": item.id}, svg("rect", {class: "hit-area", x, y, width: item.w, height: HEAD}), svg("text", {x: x + 16, y: y + 22}, "▾ " + item.group.title));
    g.append(svg("text", {class: "note", x: x + 40 + 8 * item.group.title.length, y: y + 22}, this.note(item)));
    g.addEventListener("click", () => { if (!this.moved) this.toggle(item.id); });
    return g;
  }

  box(item, x, y) {
    const n = item.node, kind = n ? family(n.kind) : "loop", quiet = n && kind === "view", lift = item.stack ? STACK : 0, h = item.h - lift;
    const g = svg("g", {class: "node" + (quiet ? " quiet" : ""), "data-id": item.id, tabindex: 0, role: "button"});
    if (item.stack) for (const d of [STACK, STACK / 2]) g.append(svg("rect", {class: "box", x: x + d / 2, y: y + lift - d, width: item.w - d, height: h, rx: 9}));
    y += lift;
    g.append(svg("rect", {class: "box", x, y, width: item.w, height: h, rx: 9}));
    g.append(svg("rect", {x: x + 7, y: y + 9, width: 4, height: h - 18, rx: 2, fill: `var(--${kind})`}));
    g.append(svg("text", {x: x + 20, y: y + 19}, item.stack ? "▸ " + item.stack.title : n.title));
    g.append(svg("text", {class: "sub", x: x + 20, y: y + 35}, item.stack ? item.stack.note : cut(n.sub, Math.floor((item.w - 28) / 6.7))));
    const spent = this.timeOf(n ? [n] : this.members.get(item.id));
    if (spent) g.append(svg("text", {class: "time", x: x + item.w - 10, y: y + 19}, spent));
    g.append(svg("title", {}, n ? n.ir : "open"));
    const act = () => { if (this.moved) return; if (item.stack) this.toggle(item.id); else this.choose(item.id); };
    g.addEventListener("click", act);
    g.addEventListener("keydown", e => { if (e.key === "Enter") { this.moved = false; act(); } });
    this.elements.set(item.id, g);
    return g;
  }

  choose(id) { this.mark(id); const n = this.graph.nodes.find(n => n.id === id); if (n) this.select(n); }

  mark(id) {
    this.selected = id;
    for (const [key, e] of this.elements) e.classList.toggle("sel", key === id);
    for (const links of this.linksOf.values()) for (const l of links) l.element.classList.remove("on");
    for (const l of this.linksOf.get(id) || []) l.element.classList.add("on");
  }

  /* Opens what hides a node, selects it and brings it to the middle. */
  reveal(id) {
    const n = this.graph.nodes.find(n => n.id === id);
    if (!n) return;
    for (const g of this.chain(n.group)) this.open[this.name].set(g, true);
    this.draw();
    const p = this.at.get(id), r = this.svg.getBoundingClientRect();
    this.t.k = Math.max(this.t.k, 0.7);
    this.t.x = r.width / 2 - (p.x + p.w / 2) * this.t.k; this.t.y = r.height / 2 - (p.y + p.h / 2) * this.t.k;
    this.move();
    this.choose(id);
  }

  find(text) {
    const wanted = text.trim().toLowerCase();
    for (const n of this.graph.nodes) {
      const hit = wanted && (n.ir + " " + n.path).toLowerCase().includes(wanted);
      this.elements.get(n.id)?.classList.toggle("hit", Boolean(hit));
    }
  }

  fit() {
    const r = this.svg.getBoundingClientRect();
    if (!r.width) return;
    // A graph larger than the window begins at a readable size, at the top, with its first open group in the middle.
    const {w, h} = this.size, wide = r.width / (w + 60), first = this.at.get(this.first);
    this.t.k = Math.min(1.1, Math.max(Math.min(wide, r.height / (h + 60)), Math.min(0.8, Math.max(0.5, wide))));
    const centre = first ? first.x + first.w / 2 : w / 2, room = r.width - w * this.t.k;
    this.t.x = room >= 0 ? room / 2 : Math.min(20, Math.max(room - 20, r.width / 2 - centre * this.t.k)); this.t.y = 30;
    this.move();
  }

  zoom(factor, cx, cy) {
    const r = this.svg.getBoundingClientRect(), k = Math.min(3, Math.max(0.05, this.t.k * factor));
    const x = cx === undefined ? r.width / 2 : cx - r.left, y = cy === undefined ? r.height / 2 : cy - r.top;
    this.t.x = x - (x - this.t.x) * k / this.t.k; this.t.y = y - (y - this.t.y) * k / this.t.k; this.t.k = k;
    this.move();
  }

  move() { this.view.setAttribute("transform", `translate(${this.t.x} ${this.t.y}) scale(${this.t.k})`); }

  bindMouse() {
    let start = null;
    this.host.addEventListener("pointerdown", e => { start = {x: e.clientX, y: e.clientY, tx: this.t.x, ty: this.t.y}; this.moved = false; });
    window.addEventListener("pointermove", e => {
      if (!start) return;
      const dx = e.clientX - start.x, dy = e.clientY - start.y;
      if (Math.abs(dx) + Math.abs(dy) > 4) { this.moved = true; this.host.classList.add("drag"); }
      if (this.moved) { this.t.x = start.tx + dx; this.t.y = start.ty + dy; this.move(); }
    });
    window.addEventListener("pointerup", () => { start = null; this.host.classList.remove("drag"); });
    this.host.addEventListener("wheel", e => {
      e.preventDefault();
      if (e.ctrlKey || e.metaKey || !e.shiftKey && Math.abs(e.deltaY) >= 40 && e.deltaMode === 0 && !e.deltaX) this.zoom(Math.exp(-e.deltaY / 500), e.clientX, e.clientY);
      else { this.t.x -= e.deltaX; this.t.y -= e.deltaY; this.move(); }
    }, {passive: false});
  }
}

function width(n) { return Math.min(250, Math.max(120, 8 * n.title.length + 100, 6.7 * Math.min(n.sub.length, 30) + 34)); }
function cut(text, length) { return text.length <= length ? text : text.slice(0, length - 1) + "…"; }
/* Vertical stretches, two points each, with a curve from one to the next. */
function curve(points) {
  let d = "";
  for (let i = 0; i < points.length; i += 2) {
    const [x, y] = points[i], [ex, ey] = points[i + 1];
    if (i) { const [px, py] = points[i - 1], middle = (py + y) / 2; d += Math.abs(px - x) < 0.5 ? `L${x} ${y}` : `C${px} ${middle} ${x} ${middle} ${x} ${y}`; }
    else d = `M${x} ${y}`;
    if (ey - y > 0.01) d += `L${ex} ${ey}`;
  }
  return d;
}
const box0 = (id, group) => ({id, group, items: new Map(), links: new Map(), ports: new Map()});
