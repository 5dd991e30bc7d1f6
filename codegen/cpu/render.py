"""Plan to source: each kernel through its template, once for equal kernels, and the plan function around them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from monoplan.codegen.cpu.backend import CPU
from monoplan.codegen.cpu.schedule_linear import LinearSchedule
from monoplan.codegen.expressions import C_TYPES, c_dim, c_symbol
from monoplan.codegen.kernels import Linear
from monoplan.codegen.layout import wrap
from monoplan.codegen.operands import Operand
from monoplan.codegen.plan import Plan, Step, StepLoop
from monoplan.codegen.source import (
    Function,
    Source,
    call_statement,
    environment,
    kernel_comment,
    number_symbols,
    step_comment,
    title,
)
from monoplan.codegen.text import block_comment, identifier
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import symbols_of

Tables = dict[tuple[int, ...], str]


def render_cpu(plan: Plan, version: str) -> Source:
    """The C source of a plan."""
    env = environment()
    number_symbols(plan)
    functions: dict[str, Function] = {}
    used: dict[int, str] = {}
    for step, _ in plan.steps():
        k = step.kernel
        names = CPU.families[type(k)].variables(k, step.schedule)
        text = env.get_template(f"cpu/{k.family}.c.j2").render(k=k, s=step.schedule, name="@NAME@", **names)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in functions:
            name = f"{k.op.name}_{step.number}"
            functions[digest] = Function(name, kernel_comment(k), wrap(text.replace("@NAME@", name)))
        used[step.number] = functions[digest].name
    head = f'{block_comment(title(plan, version))}\n#include "mp_plan.h"\n#include "mp_call.h"\n\n'
    tail = env.get_template("cpu/plan.c.j2").render(body=wrap("\n".join(_body(plan, used))))
    return Source(head, tuple(functions.values()), tail, used)


def _body(plan: Plan, used: dict[int, str]) -> list[str]:
    products = [step.kernel for step, _ in plan.steps() if isinstance(step.schedule, LinearSchedule)]
    names = sorted({name for k in products if isinstance(k, Linear) for name in symbols_of(k.rows)})
    lines = [f"    const int64_t {c_symbol(n)} MP_UNUSED = run->args->symbols[{plan.symbols.index(n)}];" for n in names]
    tables = _tables(plan)
    for numbers, name in tables.items():
        lines.append(f"    static const int {name}[] = {{{', '.join(map(str, numbers))}}};")
    for item in plan.items:
        if isinstance(item, StepLoop):
            lines.append(f"    for (int turn = 0; turn < {item.count}; ++turn) {{")
            for i, step in enumerate(item.steps):
                lines += _call(plan, tables, step, _next_product(item.steps[i:]), used, "        ")
            lines.append("    }")
        else:
            lines += _call(plan, tables, item, _next_product([item]), used, "    ")
    return lines


def _next_product(steps: Sequence[Step]) -> Step | None:
    """The first step with packed weights, at or after the first of some."""
    return next((step for step in steps if isinstance(step.schedule, LinearSchedule)), None)


def _call(
    plan: Plan, tables: Tables, step: Step, product: Step | None, used: dict[int, str], indent: str
) -> list[str]:
    """Lines of C that run a step; `product` is the next one that reads weights."""
    k = step.kernel
    rows = [c_dim(k.rows)] if isinstance(k, Linear) else []
    args = [*(_pointer(plan, tables, o) for o in k.pointers), *rows]
    lines = [f"{indent}{_barrier(plan, tables, product)}"] if step.barrier else []
    return [*lines, step_comment(step, indent), call_statement(used[step.number], step, args, indent)]


def _barrier(plan: Plan, tables: Tables, product: Step | None) -> str:
    """Waits for the other threads; where rows are few, asks meanwhile for the weights that this one will read next."""
    if product is None:
        return "if (mp_phase(run, &t, &T)) return;"
    w, s = product.kernel.operand("w"), product.schedule
    assert isinstance(s, LinearSchedule) and isinstance(product.kernel, Linear)
    group = s.group_bytes(product.kernel.depth)
    bytes_ = f"{c_dim(product.kernel.rows)} <= {s.row_blocks[-1]} ? {group} : 0"
    return f"if (mp_phase_before(run, {_pointer(plan, tables, w)}, {s.groups - s.tail}, {bytes_}, &t, &T)) return;"


def _pointer(plan: Plan, tables: Tables, o: Operand) -> str:
    b = o.view.buffer
    ctype = C_TYPES[b.dtype.name] if b.layout is None else "void"  # a format's own type is known to its kernels alone
    cast = f"({'' if o.written else 'const '}{ctype} *)"
    if b.kind in ("arena", "scratch"):
        return f"{cast}(arena + at[{plan.arena.slot_of[b]}])"
    if b.kind == "table":
        array = "param" if b.table_kind == "param" else "in"
        return f"{cast}{array}[{_table_index(b, tables)}]"
    array = {"input": "in", "output": "out", "param": "param"}[b.kind]
    return f"{cast}{array}[{b.index}]"


def _table_index(b: Buffer, tables: Tables) -> str:
    """A step through consecutive numbers, or a lookup in a table of them."""
    if b.table in tables:
        return f"{tables[b.table]}[turn]"
    step = _step(b.table)
    return f"{b.table[0]} + turn" if step == 1 else f"{b.table[0]} + {step} * turn"


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
