"use strict";
/* Layered drawing of a directed acyclic graph. `nodes` are {id, w, h} and get x, y of their centre; `links` are
   {from, to, fromDx, toDx}, where dx is the distance of the link's end from the node's centre. A node with `port` "in"
   or "out" lies on the upper or lower border: links of an enclosing box go on there. A long link takes a lane through
   every row between its ends, as high as the row, and links bend only between rows: none crosses a node. */
const GAP_X = 26, LANE_GAP = 12, GAP_Y = 34, LANE = 6;

function layered(nodes, links) {
  const byId = new Map(nodes.map(n => [n.id, n])), rank = ranks(nodes, links), rows = [], pieces = [];
  for (const n of nodes) (rows[rank.get(n.id)] ||= []).push(n);
  const chains = links.map(link => {
    const chain = [byId.get(link.from)];
    for (let r = rank.get(link.from) + 1; r < rank.get(link.to); r++) {
      const lane = {w: LANE, h: 0, lane: true};
      rows[r].push(lane);
      chain.push(lane);
    }
    chain.push(byId.get(link.to));
    for (let i = 1; i < chain.length; i++) {
      pieces.push({a: chain[i - 1], b: chain[i], da: i === 1 ? link.fromDx || 0 : 0, db: i === chain.length - 1 ? link.toDx || 0 : 0});
    }
    return chain;
  });
  order(rows, pieces);
  place(rows, pieces);
  for (const chain of chains) straighten(chain.slice(1, -1), rows);
  const left = Math.min(...rows.flat().map(n => n.x - n.w / 2));
  for (const n of rows.flat()) n.x -= left;
  let width = 0, y = 0;
  const reach = new Map(rows.map(row => [row, 0]));
  for (const p of pieces) { const row = rows[p.a.row]; reach.set(row, Math.max(reach.get(row), Math.abs(p.a.x + p.da - p.b.x - p.db))); }
  for (const row of rows) {
    const h = Math.max(0, ...row.map(n => n.h));
    for (const n of row) { n.y = y + h / 2; n.top = y; n.bottom = y + h; width = Math.max(width, n.x + n.w / 2); }
    y += h + GAP_Y + Math.min(40, reach.get(row) / 20);
  }
  const height = rows.length ? rows.at(-1)[0].bottom : 0;
  // The ends of vertical stretches, two for each node or lane on the way.
  const routes = chains.map((chain, k) => chain.flatMap((n, i) => {
    const x = n.x + (i === 0 ? links[k].fromDx || 0 : i === chain.length - 1 ? links[k].toDx || 0 : 0);
    return i === 0 ? [[x, n.y + n.h / 2], [x, n.bottom]] : i === chain.length - 1 ? [[x, n.top], [x, n.y - n.h / 2]] : [[x, n.top], [x, n.bottom]];
  }));
  return {w: width, h: height, routes};
}

/* The longest path from a source. What feeds more than it reads then goes down to its readers: its many links are short. */
function ranks(nodes, links) {
  const out = new Map(nodes.map(n => [n.id, []])), into = new Map(nodes.map(n => [n.id, 0])), left = new Map(), rank = new Map();
  for (const l of links) { out.get(l.from).push(l.to); into.set(l.to, into.get(l.to) + 1); }
  const border = Number(nodes.some(n => n.port === "in"));
  for (const n of nodes) { left.set(n.id, into.get(n.id)); rank.set(n.id, n.port === "in" ? 0 : border); }
  const queue = nodes.filter(n => !into.get(n.id)).map(n => n.id);
  for (const id of queue) {
    for (const to of out.get(id)) {
      rank.set(to, Math.max(rank.get(to), rank.get(id) + 1));
      left.set(to, left.get(to) - 1);
      if (!left.get(to)) queue.push(to);
    }
  }
  if (queue.length < nodes.length) throw new Error("a cycle: " + nodes.filter(n => left.get(n.id)).map(n => n.id).join(", "));
  const last = Math.max(0, ...nodes.filter(n => n.port !== "out").map(n => rank.get(n.id)));
  const ports = new Map(nodes.map(n => [n.id, n.port]));
  for (const n of nodes) if (n.port === "out") rank.set(n.id, last + 1);
  for (const id of queue.reverse()) {
    const readers = out.get(id).map(to => rank.get(to));
    if (!ports.get(id) && readers.length && readers.length >= into.get(id)) rank.set(id, Math.max(rank.get(id), Math.min(...readers) - 1));
  }
  return squeezed(rank);
}

/* The same ranks without empty rows. */
function squeezed(rank) {
  const used = [...new Set(rank.values())].sort((a, b) => a - b), place = new Map(used.map((r, i) => [r, i]));
  return new Map([...rank].map(([id, r]) => [id, place.get(r)]));
}

/* Rows are sorted by the mean place of their neighbours, downwards and upwards in turn; the order with the fewest crossings wins. */
function order(rows, pieces) {
  const up = new Map(), down = new Map(), at = new Map();
  rows.forEach((row, r) => row.forEach(n => { n.row = r; }));
  for (const p of pieces) { push(down, p.a, [p.b, p.db]); push(up, p.b, [p.a, p.da]); }
  const number = row => row.forEach((n, i) => at.set(n, i));
  const spot = ([n, d]) => at.get(n) + d / (n.w + 1);
  const between = rows.map(() => []);
  for (const p of pieces) between[p.a.row].push(p);
  const crossings = () => {
    let count = 0;
    for (const list of between) {
      const ends = list.map(p => [spot([p.a, p.da]), spot([p.b, p.db])]);
      for (let i = 0; i < ends.length; i++) for (let j = 0; j < i; j++) if ((ends[i][0] - ends[j][0]) * (ends[i][1] - ends[j][1]) < 0) count++;
    }
    return count;
  };
  const sweep = (row, near) => {
    const key = new Map(row.map((n, i) => { const others = near.get(n); return [n, others ? others.reduce((s, o) => s + spot(o), 0) / others.length : i]; }));
    row.sort((a, b) => key.get(a) - key.get(b));
    number(row);
  };
  rows.forEach(number);
  let best = rows.map(row => [...row]), fewest = crossings();
  for (let round = 0; round < 8 && fewest; round++) {
    for (let r = 1; r < rows.length; r++) sweep(rows[r], up);
    for (let r = rows.length - 2; r >= 0; r--) sweep(rows[r], down);
    const count = crossings();
    if (count < fewest) { fewest = count; best = rows.map(row => [...row]); }
  }
  best.forEach((row, r) => { rows[r].splice(0, row.length, ...row); });
}

const gap = (a, b) => (a.w + b.w) / 2 + (a.lane && b.lane || a.port && b.port ? LANE_GAP : GAP_X);

function place(rows, pieces) {
  const near = new Map();
  for (const p of pieces) {
    const weight = p.a.lane && p.b.lane ? 8 : p.a.lane || p.b.lane ? 1 : 3;
    push(near, p.a, {n: p.b, d: p.db - p.da, weight}); push(near, p.b, {n: p.a, d: p.da - p.db, weight});
  }
  for (const row of rows) row.forEach((n, i) => { n.x = i ? row[i - 1].x + gap(row[i - 1], n) : n.w / 2; });
  const settle = row => {
    // The least squares distance to the neighbours that keeps order and gaps: pools of adjacent violators.
    let offset = 0;
    const pools = [];
    row.forEach((n, i) => {
      if (i) offset += gap(row[i - 1], n);
      let sum = 0, weight = 0;
      for (const o of near.get(n) || []) { sum += o.weight * (o.n.x + o.d); weight += o.weight; }
      const want = (weight ? sum / weight : n.x) - offset;
      pools.push({sum: want * (weight || 0.1), weight: weight || 0.1, from: i, to: i});
      n.shift = offset;
      while (pools.length > 1) {
        const b = pools[pools.length - 1], a = pools[pools.length - 2];
        if (a.sum / a.weight <= b.sum / b.weight) break;
        pools.splice(-2, 2, {sum: a.sum + b.sum, weight: a.weight + b.weight, from: a.from, to: b.to});
      }
    });
    for (const p of pools) for (let i = p.from; i <= p.to; i++) row[i].x = p.sum / p.weight + row[i].shift;
  };
  for (let round = 0; round < 12; round++) {
    for (let r = 0; r < rows.length; r++) settle(rows[r]);
    for (let r = rows.length - 1; r >= 0; r--) settle(rows[r]);
  }
}

/* The lanes of a link get one x where their rows have room for it. */
function straighten(lanes, rows) {
  let from = -Infinity, to = Infinity, sum = 0;
  for (const n of lanes) {
    const row = rows[n.row], i = row.indexOf(n);
    if (i) from = Math.max(from, row[i - 1].x + gap(row[i - 1], n));
    if (i + 1 < row.length) to = Math.min(to, row[i + 1].x - gap(n, row[i + 1]));
    sum += n.x;
  }
  if (from <= to) for (const n of lanes) n.x = Math.min(to, Math.max(from, sum / lanes.length));
}

function push(map, key, value) { if (!map.has(key)) map.set(key, []); map.get(key).push(value); }
