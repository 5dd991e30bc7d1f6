"""The report: one HTML file that needs nothing else, no network and no server."""

from __future__ import annotations

import html
import json
import linecache
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from monoplan import __version__
from monoplan.built import Built
from monoplan.codegen.text import comment_text
from monoplan.inspect.diff import stage_diff
from monoplan.inspect.profile import ABOVE, Profile
from monoplan.inspect.walk import number_range, rolled_layers, sizes_for
from monoplan.ir.dims import Dim, equal, evaluate
from monoplan.ir.errors import writing
from monoplan.ir.graph import Graph, Op, Value, all_ops, bodies, readers
from monoplan.ir.printer import print_op

ASSETS = Path(__file__).resolve().parent / "report_assets"
SCRIPTS = ("layout.js", "graph.js", "charts.js", "report.js")
Data = dict[str, Any]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NUMBERED = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")


def write_report(path: Path, built: Built, profiles: Mapping[str, Profile]) -> Path:
    """Writes the page; folders on the way are made."""
    page = render_report(report_data(built, profiles))
    with writing("the report", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="replace")
    return path


def render_report(data: Mapping[str, Any]) -> str:
    """The page for some data."""
    page = (ASSETS / "report.html").read_text(encoding="utf-8")
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # Inside a script element `</script` and `<!--` would not be text.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(f"{comment_text(data['name'])} for {data['target']} · monoplan")
    parts = {"@TITLE@": title, "@STYLE@": style, "@SCRIPT@": script, "@DATA@": text}
    # In one pass: a name may hold a mark.
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], page)


# What it shows, as plain data: graphs, passes, steps, memory, profiles, source.


def report_data(built: Built, profiles: Mapping[str, Profile]) -> Data:
    """The data of one compiled plan."""
    traced, final = built.stages[0].graph, built.stages[-1].graph
    sizes = sizes_for(final)
    data: Data = {
        "name": traced.name,
        "target": built.target,
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "symbols": list(final.symbols),
        "stages": _stages(built.stages),
        "source": "",
        "functions": [],
        "steps": [],
        "memory": None,
        "summary": _summary(built, traced, final),
        "above": ABOVE,
        "profiles": [_profile(label, p) for label, p in profiles.items()],
    }
    steps_of: dict[Op, list[int]] = {}
    if built.plan is not None:
        for step, _ in built.plan.steps():
            steps_of.setdefault(step.kernel.op, []).append(step.number)
        shown = _memory_sizes(profiles, sizes)
        data |= _code(built, shown[0][1])
        data["memory"] = [_memory(built.plan, label, s) for label, s in shown]
    final_nodes = _Nodes(final, steps_of)
    traced_nodes = _Nodes(traced, _traced_steps(built.stages, steps_of))
    data["graphs"] = {"before": traced_nodes.data(), "after": final_nodes.data()}
    data["lines"] = _user_lines([*traced_nodes.locs, *final_nodes.locs])
    return data


def _summary(built: Built, traced: Graph, final: Graph) -> list[list[str]]:
    """Pairs of a name and a text."""
    rows = [["ops in forward", str(_count(traced))]]
    if built.plan is not None:
        kernels = list(built.plan.steps())
        rows.append(["kernels", str(len(kernels))])
        runs: Dim = sum((n for _, n in kernels), 0)
        if not equal(runs, len(kernels)):
            rows.append(["kernel runs per call", str(runs)])
        rows.append(["functions in the source", str(len(built.source.functions))])
        rows.append(["lines of source", f"{built.source_text.count(chr(10)):,}"])
        rows.append(["weights", _size(sum(a.nbytes for a in built.executable.params))])
    rows.append(
        ["passes that changed something", f"{sum(s.changed for s in built.stages[1:])} of {len(built.stages) - 1}"]
    )
    rows.append(["symbolic sizes", ", ".join(final.symbols) or "none"])
    rows.append(
        ["compile", f"{sum(built.milliseconds.values()):.0f} ms" + (" (binary from the cache)" if built.hit else "")]
    )
    return rows


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _count(graph: Graph) -> int:
    return sum(sum(len(body.ops) for body in bodies(op)) if bodies(op) else 1 for op in graph.ops)


def _stages(stages: Sequence[Any]) -> list[Data]:
    found = []
    for i, s in enumerate(stages):
        changed = i > 0 and s.graph is not stages[i - 1].graph
        found.append(
            {
                "number": i,
                "name": s.name,
                "rule": s.rule,
                "rewrites": s.rewrites,
                "ms": round(s.seconds * 1e3, 2),
                "ops": _count(s.graph),
                "changed": changed,
                "misses": [str(m) for m in s.misses],
                "diff": stage_diff(stages[i - 1], s, context=1) if changed else [],
            }
        )
    return found


class _Nodes:
    """The nodes of a graph, grouped: rolled layers by their loop, written-out ones by their numbered module."""

    def __init__(self, graph: Graph, steps: Mapping[Op, Sequence[int]]) -> None:
        self.graph, self.steps = graph, steps
        self.nodes: list[Data] = []
        self.groups: list[Data] = []
        self.locs: list[Any] = []
        self.where: dict[Value, str] = {}
        self.params = {p.value: p.path for p in graph.params}
        self.rolled = rolled_layers(graph)
        self.params |= {r: f"made at load by {op.name}" for op in graph.setup for r in op.results}

    def data(self) -> Data:
        used = readers(self.graph)
        for i, values in enumerate(_families([v for v in self.graph.inputs if used[v]])):
            title = values[0].name
            if len(values) > 1:
                title = f"{_NUMBER.sub('*', title)} × {len(values)}"
            self._node(f"in{i}", "input", title, "\n".join(f"{v}: {v.type}" for v in values), [], values)
        layers = self._layers()
        for i, op in enumerate(self.graph.ops):
            if op.opdef.kind == "repeat":
                self._loop(i, op)
            elif op.opdef.kind == "loop":
                self._scan(f"loop{i}", op, None, self.where)
            else:
                self._op(f"op{i}", op, layers.get(op), self.where)
        written = {j: self.graph.inputs[i].name for i, j in self.graph.writes}
        plain = [(j, v) for j, v in enumerate(self.graph.outputs) if j not in written]
        for j, v in plain:
            self._node(f"out{j}", "output", f"output {j}", f"return {v}: {v.type}", [v], [])
        if written:
            values = [self.graph.outputs[j] for j in written]
            names = ", ".join(written.values())
            self._node("written", "output", f"{len(written)} written", f"written into {names}", values, [])
        separate_groups(self.nodes, self.groups)
        return {"nodes": self.nodes, "groups": self.groups}

    def _layers(self) -> dict[Op, str]:
        """The group of each op of a repeated module, `model.layers.7`: the first alone, the others stacked."""
        found: dict[str, dict[int, list[Op]]] = {}
        loops = {r.stem.removesuffix(".") for r in self.rolled.values()}
        for op in self.graph.ops:
            match = _NUMBERED.match(op.loc.path)
            if match and op.opdef.kind != "repeat":
                found.setdefault(match[1], {}).setdefault(int(match[2]), []).append(op)
        groups: dict[Op, str] = {}
        for stem, layers in found.items():
            if len(layers) < 2 and stem not in loops or max(map(len, layers.values())) < 3:
                continue
            numbers = sorted(layers)
            shown = [] if stem in loops else numbers[:1]  # the loop shows what a layer looks like
            rest = [n for n in numbers if n not in shown]
            stack = f"{stem}.rest" if len(rest) > 1 else None
            if stack is not None:
                like = f" more like {stem}.{shown[0]}" if shown else " beside the rolled ones"
                self._group(stack, f"{_last(stem)} {number_range(rest)}", f"{len(rest)}{like}")
            for n in numbers:
                self._group(f"{stem}.{n}", f"{stem}.{n}", "", None if n in shown else stack, n in shown)
                groups.update(dict.fromkeys(layers[n], f"{stem}.{n}"))
        return groups

    def _group(self, name: str, title: str, note: str, parent: str | None = None, is_open: bool = False) -> None:
        self.groups.append({"id": name, "parent": parent, "title": title, "note": note, "open": is_open})

    def _loop(self, number: int, op: Op) -> None:
        a = op.attrs
        body, carried, shared = a["body"], a["carried"], a["shared"]
        group = f"loop{number}"
        note = f"{len(body.ops)} ops, run {a['count']} times over a table of weights"
        self._group(group, self._loop_title(op), note, is_open=True)
        inner: dict[Value, str] = {}
        for i, v in enumerate(body.inputs):
            first = i if i < carried + shared else carried + shared + (i - carried - shared) * a["count"]
            outer = op.operands[first]
            if outer in self.where:
                inner[v] = self.where[outer]
            elif outer in self.params:
                self.params[v] = self.params[outer] + (" (and its like)" if i >= carried + shared else "")
        for i, o in enumerate(body.ops):
            self._op(f"{group}_{i}", o, group, inner)
        outs = [inner.get(v) for v in body.outputs]
        for i, r in enumerate(op.results):
            source = outs[i] if i < carried else outs[carried + (i - carried) // a["count"]]
            if source is not None:
                self.where[r] = source

    def _loop_title(self, op: Op) -> str:
        """`layers 0–28`, by the layers that became the loop."""
        body, count = op.attrs["body"], op.attrs["count"]
        found = [self.rolled[o] for o in body.ops if o in self.rolled]
        if len({r.stem for r in found}) != 1:
            return f"{count} × {body.name}"
        return f"{_last(found[0].stem)} {number_range(n for r in found for n in r.numbers)}"

    def _scan(self, name: str, op: Op, parent: str | None, where: dict[Value, str]) -> None:
        """A scan as a box around its body; its results come from the ops that make them in a turn."""
        a, body = op.attrs, op.attrs["body"]
        title = f"scan, {a['length']} turns"
        note = f"{len(body.ops)} ops, run {a['length']} times"
        self.groups.append({"id": name, "parent": parent, "title": title, "open": True, "loop": True, "note": note})
        inner: dict[Value, str] = {}
        for v, outer in zip(body.inputs, op.operands, strict=True):
            if outer in where:
                inner[v] = where[outer]
            elif outer in self.params:
                self.params[v] = self.params[outer]
        for i, o in enumerate(body.ops):
            if o.opdef.kind == "loop":
                self._scan(f"{name}_{i}", o, name, inner)
            else:
                self._op(f"{name}_{i}", o, name, inner)
        for r, out in zip(op.results, body.outputs, strict=True):
            if out in inner:
                where[r] = inner[out]

    def _op(self, name: str, op: Op, group: str | None, where: dict[Value, str]) -> None:
        numbers = list(self.steps.get(op, ()))
        self.locs.append(op.loc)
        self.nodes.append(
            {
                "id": name,
                "kind": op.opdef.kind,
                "title": op.name,
                "ir": print_op(op),
                "group": group,
                "steps": numbers,
                "sub": ", ".join(str(r.type) for r in op.results),
                "path": self.rolled[op].path if op in self.rolled else op.loc.path,
                "file": op.loc.file,
                "line": op.loc.line,
                "where": str(op.loc.short),
                "doc": op.opdef.doc.split("\n")[0],
                "from": list(dict.fromkeys(where[v] for v in op.reads if v in where)),
                "weights": [f"{v}: {v.type}  {self.params[v]}" for v in op.reads if v in self.params],
            }
        )
        where.update(dict.fromkeys(op.results, name))

    def _node(self, name: str, kind: str, title: str, ir: str, reads: Sequence[Value], makes: Sequence[Value]) -> None:
        self.nodes.append(
            {
                "id": name,
                "kind": kind,
                "title": title,
                "ir": ir,
                "group": None,
                "steps": [],
                "path": "",
                "file": "",
                "line": 0,
                "where": "",
                "doc": "",
                "weights": [],
                "sub": ", ".join(str(v.type) for v in (makes or reads)[:1]),
                "from": list(dict.fromkeys(self.where[v] for v in reads if v in self.where)),
            }
        )
        self.where.update(dict.fromkeys(makes, name))


def separate_groups(nodes: list[Data], groups: list[Data]) -> None:
    """Makes groups that can be drawn as boxes: no path leaves a group and comes back.

    What lies between the ops of a group and is in none joins it, such as the choice of the last row inside the last
    layer. A group that more lies between, such as another group, is cut into parts.
    """
    parents = {g["id"]: g["parent"] for g in groups}

    def depth(name: str | None) -> int:
        return 0 if name is None else 1 + depth(parents[name])

    own = {n["id"]: n for n in nodes}
    box = {n["id"]: n["id"] for n in nodes}  # node -> itself, or the outermost group that is done
    for g in sorted(groups, key=lambda g: -depth(g["id"])):
        name, parent = g["id"], g["parent"]
        before: dict[str, set[str]] = {b: set() for b in box.values()}
        for n in nodes:
            before[box[n["id"]]] |= {box[f] for f in n["from"]} - {box[n["id"]]}
        order = list(TopologicalSorter(before).static_order())
        members = {b for b in before if (own[b]["group"] if b in own else parents[b]) == name}
        # The part of each member: one more than that of any member which reaches it through others.
        part: dict[str, int] = {}
        for b in order:
            if b in members:
                part[b] = max((part[f] + (f not in members) for f in before[b]), default=0)
            else:
                part[b] = max((part[f] for f in before[b]), default=-1)
        count = 1 + max((part[b] for b in members), default=0)
        if count > 1:
            leads: set[str] = set()
            for b in reversed(order):
                if b in members or b in leads:
                    leads |= before[b]
            between = {b for b in leads if b not in members and part[b] >= 0}
            if len(between) < len(members) and all(b in own and own[b]["group"] in (None, parent) for b in between):
                for b in between:
                    own[b]["group"] = name
                members |= between
                part.update(dict.fromkeys(members, 0))
            else:
                made = [{**g, "id": _part(name, i), "title": f"{g['title']}, part {i + 1}"} for i in range(count)]
                groups[groups.index(g) : groups.index(g) + 1] = made
                parents |= {m["id"]: parent for m in made}
                inside = {x["id"]: x for x in groups}
                for b in members:
                    if b in own:
                        own[b]["group"] = _part(name, part[b])
                    else:
                        inside[b]["parent"] = parents[b] = _part(name, part[b])
        for k, b in box.items():
            if b in members:
                box[k] = _part(name, part[b])
    held = Counter(n["group"] for n in nodes)
    for g in groups:
        g["note"] = g["note"] or f"{held[g['id']]} ops"


def _part(name: str, number: int) -> str:
    return f"{name}/{number}" if number else name


def _last(stem: str) -> str:
    """`layers` of `model.layers.`."""
    return stem.strip(".").rpartition(".")[2]


def _families(values: Sequence[Value]) -> list[list[Value]]:
    """Values that differ in a number only, such as the caches of all layers, together."""
    found: dict[tuple[str, str], list[Value]] = {}
    for v in values:
        found.setdefault((_NUMBER.sub("*", v.name), str(v.type)), []).append(v)
    return list(found.values())


def _traced_steps(stages: Sequence[Any], steps_of: Mapping[Op, Sequence[int]]) -> dict[Op, list[int]]:
    """The kernels that compute each op of the traced graph: its own, or those that its readers were fused into."""
    traced, final = stages[0].graph, stages[-1].graph
    kernels: dict[str, list[int]] = {}
    for op, numbers in _unrolled(stages, final):
        for r in op.results:
            kernels.setdefault(r.name, list(steps_of.get(numbers, ())))
    users: dict[Value, list[Op | None]] = {}
    for part in (traced, *(body for op in all_ops(traced) for body in bodies(op))):
        users |= readers(part)
    found: dict[Op, list[int]] = {}
    for op in reversed(list(all_ops(traced))):
        own = [n for r in op.results for n in kernels.get(r.name, ())]
        if not own:
            own = [n for r in op.results for reader in users[r] if reader is not None for n in found.get(reader, ())]
        found[op] = list(dict.fromkeys(own))[:4]
    return found


def _unrolled(stages: Sequence[Any], final: Graph) -> list[tuple[Op, Op]]:
    """Ops of the graph before layers were rolled, each with the op of the final graph that stands for it."""
    flat: list[Op] = []
    for op in final.ops:
        if op.opdef.kind == "repeat":
            flat += op.attrs["body"].ops * op.attrs["count"]
        else:
            flat += [op, *(o for body in bodies(op) for o in all_ops(body))]
    for s in reversed(stages):
        ops = list(all_ops(s.graph.replace(setup=())))
        if not any(op.opdef.kind == "repeat" for op in ops):
            if len(ops) == len(flat):
                return list(zip(ops, flat, strict=True))
            break
    return [(op, op) for op in flat]


def _code(built: Built, sizes: Mapping[str, int]) -> Data:
    """Source, functions with the line where they begin, steps with their runs at these sizes."""
    text = built.source_text
    functions = []
    for f in built.source.functions:
        at = text.find(f.comment)
        functions.append(
            {"name": f.name, "text": f.text, "comment": f.comment, "line": text.count("\n", 0, max(at, 0)) + 1}
        )
    steps = []
    rolled = rolled_layers(built.stages[-1].graph)
    for step, runs in built.plan.steps():
        k = step.kernel
        steps.append(
            {
                "number": step.number,
                "runs": evaluate(runs, sizes),
                "family": k.family,
                "function": built.source.step_functions[step.number],
                "ir": print_op(k.op),
                "path": rolled[k.op].path if k.op in rolled else k.op.loc.path,
                "where": str(k.op.loc.short),
                "layers": f"{_last(rolled[k.op].stem)} {number_range(rolled[k.op].numbers)}" if k.op in rolled else "",
                "schedule": str(step.schedule),
                "bytes": str(k.bytes),
                "flops": str(k.flops),
                "barrier": step.barrier,
                "reads": [o.view.buffer.name for o in k.reads if not o.view.is_virtual],
                "writes": [o.view.buffer.name for o in k.writes],
            }
        )
    return {"source": text, "functions": functions, "steps": steps}


def _memory_sizes(profiles: Mapping[str, Profile], sizes: Mapping[str, int]) -> list[tuple[str, dict[str, int]]]:
    """The sizes for which the arena is drawn: those of the profiles, else the usual ones."""
    found = []
    for label, p in profiles.items():
        values = dict(part.split("=") for part in p.sizes.split(", ")) if p.sizes else {}
        found.append((label, {**sizes, **{k: int(v) for k, v in values.items()}, "threads": p.threads}))
    return found or [(", ".join(f"{k}={v}" for k, v in sizes.items()) or "all sizes fixed", {**sizes, "threads": 1})]


def _memory(plan: Any, label: str, sizes: Mapping[str, int]) -> Data:
    offsets, peak = plan.arena.layout(sizes)
    buffers = []
    for life in plan.arena.lifetimes:
        b = life.buffer
        slot = plan.arena.slot_of[b]
        nbytes = evaluate(b.size, sizes) * b.dtype.itemsize
        buffers.append(
            {
                "name": b.name,
                "kind": b.kind,
                "type": f"{b.dtype}[{b.size}]",
                "first": life.first,
                "last": life.last,
                "offset": offsets[slot],
                "bytes": nbytes,
                "slot": slot,
            }
        )
    count = len(list(plan.steps()))
    return {
        "label": label,
        "sizes": ", ".join(f"{k}={v}" for k, v in sizes.items()),
        "peak": peak,
        "steps": count,
        "unshared": plan.arena.unshared(sizes),
        "slots": len(offsets),
        "buffers": buffers,
    }


def _profile(label: str, p: Profile) -> Data:
    m = p.limits
    return {
        "label": label,
        "sizes": p.sizes,
        "threads": p.threads,
        "total": p.total,
        "plain": p.plain,
        "probed": p.probed,
        "overhead": p.overhead,
        "alone": p.alone,
        "limits": {
            "memory": m.memory,
            "cache": m.cache,
            "flops": m.flops,
            "tile_bf16": m.tile_bf16,
            "cache_bytes": m.cache_bytes,
        },
        "steps": [
            {
                "number": s.number,
                "ns": s.nanoseconds,
                "bytes": s.bytes,
                "flops": s.flops,
                "gbps": s.gbps,
                "gflops": s.gflops,
                "share": s.share,
                "bound": s.bound,
            }
            for s in p.steps
        ],
    }


def _user_lines(locs: Sequence[Any], around: int = 2) -> dict[str, list[list[Any]]]:
    """The user's lines behind the nodes, with their neighbours: `file:line` -> [[number, text], …]."""
    found: dict[str, list[list[Any]]] = {}
    for loc in locs:
        key = f"{loc.file}:{loc.line}"
        if not loc.file or key in found:
            continue
        lines = [
            [n, linecache.getline(loc.file, n).rstrip("\n")]
            for n in range(max(1, loc.line - around), loc.line + around + 1)
        ]
        if any(text for _, text in lines):
            found[key] = lines
    return found
