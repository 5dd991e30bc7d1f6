"use strict";
/* Layered drawing of a directed graph. `nodes` are {id, w, h}, `edges` [from, to]; nodes get x, y of their centre.
   Ranks by longest path, long edges through bends of their own, order by barycentre, x by isotonic regression. */
const GAP_X = 26, GAP_Y = 34, BEND = 10;

function layered(nodes, edges) {
  const byId = new Map(nodes.map(n => [n.id, n]));
  const links = edges.filter(([a, b]) => a !== b && byId.has(a) && byId.has(b));
  const rank = ranks(nodes, links);
  const layers = [];
  for (const n of nodes) (layers[rank.get(n.id)] ||= []).push(n);
  const bends = new Map(), pieces = [];
  links.forEach(([a, b], k) => {
    const chain = [byId.get(a)];
    for (let r = rank.get(a) + 1; r < rank.get(b); r++) {
      const bend = {id: "bend" + k + "_" + r, w: BEND, h: 1, bend: true};
      (layers[r] ||= []).push(bend);
      chain.push(bend);
    }
    chain.push(byId.get(b));
    bends.set(k, chain);
    for (let i = 1; i < chain.length; i++) pieces.push([chain[i - 1], chain[i]]);
  });
  for (let r = 0; r < layers.length; r++) layers[r] ||= [];
  order(layers, pieces);
  place(layers, pieces);
  let y = 0, width = 0;
  for (const layer of layers) {
    const h = Math.max(0, ...layer.map(n => n.h));
    for (const n of layer) { n.y = y + h / 2; width = Math.max(width, n.x + n.w / 2); }
    y += h + GAP_Y;
  }
  const routes = links.map(([a, b], k) => ({from: a, to: b, bends: bends.get(k).slice(1, -1).map(n => [n.x, n.y])}));
  return {w: width, h: Math.max(0, y - GAP_Y), routes};
}

function ranks(nodes, links) {
  const out = new Map(nodes.map(n => [n.id, []])), degree = new Map(nodes.map(n => [n.id, 0])), rank = new Map();
  for (const [a, b] of links) { out.get(a).push(b); degree.set(b, degree.get(b) + 1); }
  const sources = nodes.filter(n => !degree.get(n.id)).map(n => n.id), queue = [...sources];
  for (const id of queue) rank.set(id, 0);
  for (let i = 0; i < queue.length; i++) {
    for (const b of out.get(queue[i])) {
      rank.set(b, Math.max(rank.get(b) || 0, rank.get(queue[i]) + 1));
      degree.set(b, degree.get(b) - 1);
      if (!degree.get(b)) queue.push(b);
    }
  }
  for (const n of nodes) if (!rank.has(n.id)) rank.set(n.id, 0);
  // What nothing feeds goes right above its first reader.
  for (const id of sources) {
    const readers = out.get(id).map(b => rank.get(b));
    if (readers.length) rank.set(id, Math.max(0, Math.min(...readers) - 1));
  }
  return rank;
}

function order(layers, pieces) {
  const up = new Map(), down = new Map();
  for (const [a, b] of pieces) { push(down, a, b); push(up, b, a); }
  const index = new Map();
  const number = layer => layer.forEach((n, i) => index.set(n, i));
  layers.forEach(number);
  const sweep = (layer, near) => {
    const key = new Map(layer.map((n, i) => {
      const others = near.get(n) || [];
      return [n, others.length ? others.reduce((s, o) => s + index.get(o), 0) / others.length : i];
    }));
    layer.sort((a, b) => key.get(a) - key.get(b));
    number(layer);
  };
  for (let round = 0; round < 8; round++) {
    for (let r = 1; r < layers.length; r++) sweep(layers[r], up);
    for (let r = layers.length - 2; r >= 0; r--) sweep(layers[r], down);
  }
}

function place(layers, pieces) {
  const near = new Map();
  for (const [a, b] of pieces) { push(near, a, b); push(near, b, a); }
  for (const layer of layers) {
    let x = 0;
    for (const n of layer) { n.x = x + n.w / 2; x += n.w + GAP_X; }
  }
  const settle = layer => {
    // The least squares distance to the neighbours that keeps order and gaps: pools of adjacent violators.
    let offset = 0;
    const pools = [];
    layer.forEach((n, i) => {
      if (i) offset += (layer[i - 1].w + n.w) / 2 + GAP_X;
      const others = near.get(n) || [];
      let sum = 0, weight = 0;
      for (const o of others) { const w = n.bend && o.bend ? 6 : 1; sum += w * o.x; weight += w; }
      const want = (weight ? sum / weight : n.x) - offset;
      pools.push({sum: want * (weight || 0.1), weight: weight || 0.1, from: i, to: i});
      n.shift = offset;
      while (pools.length > 1) {
        const b = pools[pools.length - 1], a = pools[pools.length - 2];
        if (a.sum / a.weight <= b.sum / b.weight) break;
        pools.splice(-2, 2, {sum: a.sum + b.sum, weight: a.weight + b.weight, from: a.from, to: b.to});
      }
    });
    for (const p of pools) for (let i = p.from; i <= p.to; i++) layer[i].x = p.sum / p.weight + layer[i].shift;
  };
  for (let round = 0; round < 10; round++) {
    for (let r = 0; r < layers.length; r++) settle(layers[r]);
    for (let r = layers.length - 1; r >= 0; r--) settle(layers[r]);
  }
  const left = Math.min(...layers.flatMap(l => l.map(n => n.x - n.w / 2)));
  for (const layer of layers) for (const n of layer) n.x -= left;
}

function push(map, key, value) { if (!map.has(key)) map.set(key, []); map.get(key).push(value); }
