"use strict";
/* The graph view: groups that open and close, pan and zoom, selection. */
const FAMILY = {
  linear: "linear", fused_linear: "linear", qkv_rope_cache: "linear", linear_argmax: "linear", matmul: "linear", fused_matmul: "linear",
  attention: "attention", norm: "norm", fused_norm: "norm", softmax: "norm", reduce: "norm", fused_reduce: "norm", scan: "norm",
  pointwise: "pointwise", fused_pointwise: "pointwise", rope: "pointwise", gather: "gather", fused_gather: "gather", kv_update: "gather",
  copy: "gather", sample: "sample", sort: "sample", view: "view", generate: "view", collective: "view", input: "io", output: "io",
};
const family = kind => FAMILY[kind] || "view";
const FAMILIES = {linear: "products", attention: "attention", norm: "norms, reductions", pointwise: "pointwise", gather: "lookups, copies", sample: "choices", view: "views", io: "in and out"};
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

  draw() {
    const top = {id: null, items: new Map(), edges: []};
    const boxes = new Map([[null, top]]), shown = new Map(), members = new Map();
    const box = id => {
      if (boxes.has(id)) return boxes.get(id);
      const made = {id, group: this.groups.get(id), items: new Map(), edges: []};
      boxes.set(id, made);
      box(this.groups.get(id).parent || null).items.set(id, made);
      return made;
    };
    for (const n of this.graph.nodes) {
      const chain = this.chain(n.group), closed = chain.find(g => !this.isOpen(g));
      const parent = closed === undefined ? n.group : this.groups.get(closed).parent;
      if (closed === undefined) {
        const item = {id: n.id, node: n, w: width(n), h: 44};
        box(parent || null).items.set(n.id, item);
        shown.set(n.id, item.id);
      } else {
        if (!members.has(closed)) {
          const g = this.groups.get(closed);
          box(parent || null).items.set(closed, {id: closed, stack: g, w: Math.max(190, 8 * g.title.length + 40), h: 50});
        }
        push(members, closed, n);
        shown.set(n.id, closed);
      }
    }
    const paths = new Map();
    const pathOf = id => {
      if (!paths.has(id)) {
        const n = this.graph.nodes.find(n => n.id === id), g = this.groups.get(id);
        paths.set(id, [null, ...this.chain(n ? n.group : g.parent), id]);
      }
      return paths.get(id);
    };
    const seen = new Set(), ends = new Map();
    for (const n of this.graph.nodes) for (const from of n.from) {
      const a = shown.get(from), b = shown.get(n.id);
      if (a === undefined || a === b || seen.has(a + ">" + b)) continue;
      seen.add(a + ">" + b);
      const pa = pathOf(a), pb = pathOf(b);
      let i = 0;
      while (pa[i + 1] === pb[i + 1] && i + 1 < pa.length - 1 && i + 1 < pb.length - 1) i++;
      const level = boxes.get(pa[i]), key = pa[i + 1] + ">" + pb[i + 1];
      if (!ends.has(level)) ends.set(level, new Map());
      push(ends.get(level), key, [a, b]);
      if (ends.get(level).get(key).length === 1) level.edges.push([pa[i + 1], pb[i + 1]]);
    }
    this.arrange(top);
    this.paint(top, ends);
  }

  /* Lays out a box from the inside out. */
  arrange(box) {
    const items = [...box.items.values()];
    for (const item of items) if (item.items) { this.arrange(item); item.w = Math.max(item.inner.w + 36, 8 * item.group.title.length + 7 * item.group.note.length + 60); item.h = item.inner.h + 62; }
    box.inner = layered(items, box.edges);
  }

  paint(top, ends) {
    const frames = svg("g", {}), edges = svg("g", {}), nodes = svg("g", {});
    this.at = new Map(); this.edgesOf = new Map(); this.elements = new Map();
    const visit = (box, ox, oy) => {
      for (const item of box.items.values()) {
        const x = ox + item.x - item.w / 2, y = oy + item.y - item.h / 2;
        this.at.set(item.id, {x, y, w: item.w, h: item.h});
        if (item.items) {
          frames.append(this.frame(item, x, y));
          visit(item, x + (item.w - item.inner.w) / 2, y + 44);
        } else nodes.append(this.box(item, x, y));
      }
    };
    visit(top, 0, 0);
    const route = (box, ox, oy) => {
      for (const r of box.inner.routes) for (const [a, b] of ends.get(box)?.get(r.from + ">" + r.to) || []) {
        const p = this.at.get(a), q = this.at.get(b);
        const points = [[p.x + p.w / 2, p.y + p.h], ...r.bends.map(([x, y]) => [ox + x, oy + y]), [q.x + q.w / 2, q.y]];
        const e = svg("path", {class: "edge", d: curve(points), "marker-end": "url(#arrow)"});
        edges.append(e);
        push(this.edgesOf, a, e); push(this.edgesOf, b, e);
      }
      for (const item of box.items.values()) if (item.items) { const p = this.at.get(item.id); route(item, p.x + (item.w - item.inner.w) / 2, p.y + 44); }
    };
    route(top, 0, 0);
    const arrow = svg("defs", {}, svg("marker", {id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto"}, svg("path", {d: "M0 0 8 4 0 8z", fill: "var(--muted)", "fill-opacity": ".6"})));
    this.view.replaceChildren(arrow, frames, edges, nodes);
    this.size = {w: top.inner.w, h: top.inner.h};
    this.mark(this.selected);
  }

  frame(item, x, y) {
    const g = svg("g", {class: "frame", "data-group": item.id}, svg("rect", {x, y, width: item.w, height: item.h, rx: 14}),
      svg("rect", {class: "hit-area", x, y, width: item.w, height: 36}), svg("text", {x: x + 16, y: y + 25}, "▾ " + item.group.title));
    g.append(svg("text", {class: "note", x: x + 36 + 8 * item.group.title.length, y: y + 25}, item.group.note));
    g.addEventListener("click", e => { if (!this.moved && e.target.matches(".hit-area, text")) this.toggle(item.id); });
    return g;
  }

  box(item, x, y) {
    const n = item.node, kind = n ? family(n.kind) : "loop", quiet = n && kind === "view";
    const g = svg("g", {class: "node" + (quiet ? " quiet" : ""), "data-id": item.id, tabindex: 0, role: "button"});
    if (item.stack) for (const d of [8, 4]) g.append(svg("rect", {class: "box", x: x + d, y: y - d, width: item.w, height: item.h, rx: 9}));
    g.append(svg("rect", {class: "box", x, y, width: item.w, height: item.h, rx: 9}));
    g.append(svg("rect", {x: x + 7, y: y + 9, width: 4, height: item.h - 18, rx: 2, fill: `var(--${kind})`}));
    g.append(svg("text", {x: x + 20, y: y + 19}, item.stack ? "▸ " + item.stack.title : n.title));
    g.append(svg("text", {class: "sub", x: x + 20, y: y + 35}, item.stack ? item.stack.note : cut(n.sub, Math.floor((item.w - 28) / 6.7))));
    const time = n && this.timeOf(n);
    if (time) g.append(svg("text", {class: "time", x: x + item.w - 10, y: y + 19}, time));
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
    for (const list of this.edgesOf.values()) for (const e of list) e.classList.remove("on");
    for (const e of this.edgesOf.get(id) || []) e.classList.add("on");
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
    // Tall graphs begin at a readable size at the top; the rest is a drag away.
    const whole = Math.min(r.width / (this.size.w + 60), r.height / (this.size.h + 60));
    this.t.k = Math.min(1.1, Math.max(whole, Math.min(0.8, r.width / (this.size.w + 60))));
    this.t.x = (r.width - this.size.w * this.t.k) / 2; this.t.y = 30;
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
function curve(points) {
  let d = `M${points[0][0]} ${points[0][1]}`;
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1], [x1, y1] = points[i], middle = (y0 + y1) / 2;
    d += Math.abs(x0 - x1) < 0.5 ? `L${x1} ${y1}` : `C${x0} ${middle} ${x1} ${middle} ${x1} ${y1}`;
  }
  return d;
}
