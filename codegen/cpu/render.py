"""Plan to source: each kernel through its template, once for equal kernels, and the plan function around them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby

from monoplan.codegen.cpu.backend import CPU
from monoplan.codegen.cpu.schedule_linear import LinearSchedule
from monoplan.codegen.expressions import C_TYPES, c_dim, c_index, c_symbol
from monoplan.codegen.kernels import Linear
from monoplan.codegen.operands import Operand
from monoplan.codegen.plan import Plan, Step, StepLoop
from monoplan.codegen.source import (
    WIDTH,
    Function,
    Source,
    banner,
    call_statement,
    environment,
    headers,
    kernel_comment,
    number_symbols,
    step_comment,
    title,
    wrap,
)
from monoplan.codegen.text import block_comment, identifier
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import symbols_of
from monoplan.ir.graph import Graph, Value

Tables = dict[tuple[int, ...], str]
# Operations and bytes of a scan's turn below which one worker runs them all: two barriers take longer than half of it.
ALONE = 1 << 17


def render_cpu(plan: Plan, version: str) -> Source:
    """The C source of a plan."""
    env = environment()
    number_symbols(plan)
    functions: dict[str, Function] = {}
    used: dict[int, str] = {}
    shared: dict[str, None] = {}  # lines of the head: functions that several kernels call
    for step, _ in plan.steps():
        k = step.kernel
        names = CPU.families[type(k)].variables(k, step.schedule)
        shared |= dict.fromkeys(names.get("m", {}).get("shared", ()))
        text = env.get_template(f"cpu/{k.family}.c.j2").render(k=k, s=step.schedule, name="@NAME@", **names)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in functions:
            name = f"{k.op.name}_{step.number}"
            functions[digest] = Function(name, kernel_comment(k), wrap(text.replace("@NAME@", name)))
        used[step.number] = functions[digest].name
    more = '#include "mp_functions_more.h"\n' if any(needs_more(f.text) for f in functions.values()) else ""
    lines = wrap("".join(f"{line}\n" for line in shared))
    head = f'{block_comment(title(plan, version))}\n#include "mp_plan.h"\n{more}{lines}\n'
    tail = env.get_template("cpu/plan.c.j2").render(body=wrap("\n".join(_body(plan, used))))
    return Source(head, tuple(functions.values()), tail, used)


@cache
def _functions_more() -> frozenset[str]:
    """Names of the functions in mp_functions_more.h."""
    texts = dict(headers("cpu"))
    first, more = texts["mp_functions_real.h"].split("#if defined(MP_MORE)")
    by_type = {name: _DEFINED.findall(text) for name, text in (("first", first), ("more", more))}
    names = [*by_type["first"], *by_type["more"], *(f"{n}f" for n in by_type["more"])]
    return frozenset(names) | frozenset(_DEFINED.findall(texts["mp_functions_more.h"]))


_DEFINED = re.compile(r"(?:MP_REAL MP_NAME\(|float |double |#define )(mp_\w+)\)?\(")  # the name that a definition gives


def needs_more(text: str) -> bool:
    """Whether a source calls functions that only mp_functions_more.h has."""
    return not _functions_more().isdisjoint(re.findall(r"mp_\w+", text))


def _body(plan: Plan, used: dict[int, str]) -> list[str]:
    """The statements of the plan's function: a section for each layer, with its weights by name."""
    products = [step.kernel for step, _ in plan.steps() if isinstance(step.schedule, LinearSchedule)]
    sizes = [k.rows for k in products if isinstance(k, Linear)]
    for item in plan.items:
        if isinstance(item, StepLoop) and item.scan:
            buffers = [o.view.buffer for s in item.steps for o in s.kernel.pointers]
            sizes += [item.count, item.work, *(d for b in buffers for d in (b.first, b.stride))]
    names = sorted({name for d in sizes for name in symbols_of(d)})
    lines = [f"    const int64_t {c_symbol(n)} MP_UNUSED = run->args->symbols[{plan.symbols.index(n)}];" for n in names]
    body = _Body(plan, used)
    for numbers, name in body.tables.items():
        lines.append(f"    static const int {name}[] = {{{', '.join(map(str, numbers))}}};")
    for section, items in groupby(plan.items, _section):
        lines += body.section(section, list(items))
    return lines


Section = tuple[str, str]  # the path of a layer, or "", and how many turns a loop has; "": no loop


def _section(item: Step | StepLoop) -> Section:
    """What an item of a plan belongs to: its layer is where a path has a number."""
    step = item.steps[0] if isinstance(item, StepLoop) else item
    parts = step.kernel.op.loc.path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isascii() and part.isdigit() and len(part) < 5), None)
    layer = "" if number is None else ".".join(parts[: number + 1])
    return layer, str(item.count) if isinstance(item, StepLoop) else ""


class _Body:
    """Renders the sections of one plan."""

    def __init__(self, plan: Plan, used: dict[int, str]) -> None:
        self.plan, self.used, self.tables = plan, used, _tables(plan)
        self.weights: dict[tuple[int, ...], str] = {}  # names that are declared, by the numbers of the params

    def section(self, section: Section, items: Sequence[Step | StepLoop]) -> list[str]:
        """A banner, and then the steps of one layer, of equal layers in a loop, or of what stands outside of layers."""
        layer, count = section
        steps = [s for item in items for s in (item.steps if isinstance(item, StepLoop) else (item,))]
        paths = dict.fromkeys(s.kernel.op.loc.path or s.kernel.op.name for s in steps)
        head = layer if layer else ", ".join(list(paths)[:4]) + (", ..." if len(paths) > 4 else "")
        if count:
            scan = isinstance(items[0], StepLoop) and items[0].scan
            head += f", {count} turns" if scan else f" and {int(count) - 1} more like it"
        lines = [banner(head, "    ")]
        if not count:
            lines += self._weights(steps, layer, "    ")
            for step in steps:
                lines += self._call(step, _next_product([step]), "    ")
            return lines
        for item in items:
            assert isinstance(item, StepLoop)
            lines += self._scan(item, layer) if item.scan else self._layers(item)
        return lines

    def _layers(self, item: StepLoop) -> list[str]:
        """The loop over equal layers; its weights change with the turn."""
        outside = dict(self.weights)
        lines = [f"    for (int turn = 0; turn < {c_dim(item.count)}; ++turn) {{"]
        lines += self._weights(item.steps, "", "        ")
        for i, step in enumerate(item.steps):
            lines += self._call(step, _next_product(item.steps[i:]), "        ")
        self.weights = outside
        return [*lines, "    }"]

    def _scan(self, item: StepLoop, layer: str) -> list[str]:
        """The loop of a scan. Where a turn has little to do, one worker runs all of them and waits for nobody."""
        lines = self._weights(item.steps, layer, "    ")
        lines += [
            "    if (mp_phase(run, &t, &T)) return;",
            "    {",
            f"        const int all = T, alone = T > 1 && {c_dim(item.work)} < {ALONE};",
            "        if (alone && t == 0) T = 1;",
            f"        for (int64_t turn = 0; turn < {c_dim(item.count)} && (!alone || t == 0); ++turn) {{",
        ]
        for i, step in enumerate(item.steps):
            lines += self._call(step, _next_product(item.steps[i:]), "            ", "{ if (alone) break; return; }")
        return [*lines, "        }", "        if (alone) T = all;", "    }"]

    def _weights(self, steps: Sequence[Step], layer: str, indent: str) -> list[str]:
        """Declarations of the weights that some steps read, named after their modules; outside of loops a layer's own
        have its number."""
        lines: list[str] = []
        for b in (o.view.buffer.root for step in steps for o in step.kernel.pointers):
            key = b.table if b.kind == "table" else (b.index,)
            if "param" not in (b.kind, b.table_kind) or key in self.weights:
                continue
            value = self.plan.params[key[0]].value
            short, full = weight_names(self.plan.graph, value)
            number = layer.rpartition(".")[2] if full.startswith(f"{layer}.") else ""
            name = self.weights[key] = identifier(f"w{number}_", short[:40], self.weights.values())
            place = f"param[{self._table_index(b) if b.kind == 'table' else b.index}]"
            kind = _c_type(b)
            is_packed = kind == "void"
            kind = "const mp_weights" if is_packed else f"const {kind} *const"
            cast = "" if is_packed else f"(const {_c_type(b)} *)"
            text = f"{indent}{kind} {name} = {cast}{place};"
            comment = block_comment([f"{full} {value.type}"])
            lines += [f"{text} {comment}"] if len(text) + len(comment) < WIDTH else [f"{indent}{comment}", text]
        return lines

    def _call(self, step: Step, product: Step | None, indent: str, leave: str = "return;") -> list[str]:
        """Lines of C that run a step; `product` is the next one that reads weights, `leave` ends an interrupted run."""
        k = step.kernel
        rows = [c_dim(k.rows)] if isinstance(k, Linear) else []
        args = [*map(self._pointer, k.pointers), *rows]
        lines = [f"{indent}if ({self._barrier(product)}) {leave}"] if step.barrier else []
        return [*lines, step_comment(step, indent), call_statement(self.used[step.number], step, args, indent)]

    def _barrier(self, product: Step | None) -> str:
        """Waits for the other workers; where rows are few, prefetches meanwhile what this one reads next."""
        if product is None:
            return "mp_phase(run, &t, &T)"
        w, s = product.kernel.operand("w"), product.schedule
        assert isinstance(s, LinearSchedule) and isinstance(product.kernel, Linear)
        group = s.group_bytes(product.kernel.depth)
        bytes_ = f"{c_dim(product.kernel.rows)} <= {s.row_blocks[-1]} ? {group} : 0"
        return f"mp_phase_before(run, {self._pointer(w)}, {s.groups - s.tail}, {bytes_}, &t, &T)"

    def _pointer(self, o: Operand) -> str:
        return self._buffer(o.view.buffer, o.written)

    def _buffer(self, b: Buffer, written: bool) -> str:
        if b.of is not None:
            place = c_index([("turn", b.stride)], b.first)
            return self._buffer(b.of, written) + (f" + {place}" if place != "0" else "")
        if "param" in (b.kind, b.table_kind):
            return self.weights[b.table if b.kind == "table" else (b.index,)]
        cast = f"({'' if written else 'const '}{_c_type(b)} *)"
        if b.kind in ("arena", "scratch"):
            return f"{cast}(arena + at[{self.plan.arena.slot_of[b]}])"
        if b.kind == "table":
            return f"{cast}in[{self._table_index(b)}]"
        array = {"input": "in", "output": "out"}[b.kind]
        return f"{cast}{array}[{b.index}]"

    def _table_index(self, b: Buffer) -> str:
        """A step through consecutive numbers, or a lookup in a table of them."""
        if b.table in self.tables:
            return f"{self.tables[b.table]}[turn]"
        step = _step(b.table)
        return f"{b.table[0]} + turn" if step == 1 else f"{b.table[0]} + {step} * turn"


def _c_type(b: Buffer) -> str:
    """The type behind a pointer in the plan's function; a format's own type is known to its kernels alone."""
    return C_TYPES[b.dtype.name] if b.layout is None else "void"


def weight_names(graph: Graph, value: Value) -> tuple[str, str]:
    """A short name and the whole one of a weight, or of several that became one: q_k_v, layers.0.attn.q|k|v.weight."""
    params = {p.value: p.path for p in graph.params}
    made = {r: op for op in graph.setup for r in op.results}

    def paths(v: Value) -> list[str]:
        if v in params or v not in made or not made[v].reads:
            return [params.get(v, v.name)]
        return [path for r in made[v].reads for path in paths(r)]

    found = [path.split(".") for path in dict.fromkeys(paths(value))]
    first, fewest = found[0], min(map(len, found))
    same = [all(p[i] == first[i] for p in found) for i in range(fewest)]
    if len(found) == 1 or fewest < max(map(len, found)) or same.count(False) != 1:  # nothing in common but one part
        module = first[-2] if len(first) > 1 and first[-1] == "weight" else "_".join(first[-2:])
        return module, " ".join(".".join(p) for p in found)
    at = same.index(False)
    differ = [p[at] for p in found]
    while len({d.rpartition("_")[2] for d in differ}) == 1 and all("_" in d for d in differ):
        differ = [d.rpartition("_")[0] for d in differ]  # q_proj, k_proj, v_proj
    return "_".join(differ), ".".join([*first[:at], "|".join(p[at] for p in found), *first[at + 1 :]])


def _next_product(steps: Sequence[Step]) -> Step | None:
    """The first step with packed weights, at or after the first of some."""
    return next((step for step in steps if isinstance(step.schedule, LinearSchedule)), None)


def _tables(plan: Plan) -> Tables:
    """Numbers of inputs and params without a common step, by turn of a loop, each with the name of its array."""
    found: Tables = {}
    for step, _ in plan.steps():
        for b in (o.view.buffer for o in step.kernel.pointers):
            if b.kind == "table" and b.table not in found and _step(b.table) is None:
                found[b.table] = identifier("table_", b.name, found.values())
    return found


def _step(numbers: Sequence[int]) -> int | None:
    """From each number to the next, where it is always the same."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    return step if all(n == numbers[0] + step * i for i, n in enumerate(numbers)) else None
