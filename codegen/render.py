"""Plan to source: each kernel through its template, once for equal kernels, and the plan function around them."""

from __future__ import annotations

import contextvars
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from monoplan.codegen.expressions import C_TYPES, c_dim, c_literal, c_symbol
from monoplan.codegen.facts import facts, unravel_lines
from monoplan.codegen.formats import format_headers
from monoplan.codegen.kernels import Kernel, Linear
from monoplan.codegen.layout import wrap
from monoplan.codegen.operands import Operand
from monoplan.codegen.plan import Plan, Step, StepLoop
from monoplan.codegen.schedule_linear import LinearSchedule
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import symbols_of
from monoplan.ir.printer import print_op
from monoplan.ir.types import f32

HERE = Path(__file__).resolve().parent
# C names of the symbols of the plan being rendered, and their numbers among its arguments.
_numbers: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar("symbol_numbers")


@dataclass(frozen=True)
class Function:
    """A kernel's source and the comment that says where it comes from."""

    name: str
    comment: str
    text: str


@dataclass(frozen=True)
class Source:
    """The whole translation unit; `lines` maps each source line of a kernel to its step."""

    text: str
    functions: tuple[Function, ...]
    step_functions: dict[int, str]


@cache
def environment() -> Any:
    """The one Jinja environment: files only, undefined names are errors."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(HERE / "templates"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )
    env.filters.update(
        dim=c_dim, unravel_lines=unravel_lines, c_float=lambda x: c_literal(x, f32), symbols_used=_symbols_used,
        symbol_number=lambda name: _numbers.get()[name],
    )
    return env


def is_pristine() -> bool:
    """Whether templates come from the package's own files, and from nowhere else."""
    if not environment.cache_info().currsize:
        return True
    from jinja2 import FileSystemLoader

    loader = environment().loader
    return type(loader) is FileSystemLoader and loader.searchpath == [str(HERE / "templates")]


def _symbols_used(k: Kernel) -> list[str]:
    """C names of the symbols that a kernel's index arithmetic mentions."""
    return sorted(c_symbol(name) for name in k.mentioned)


def number_symbols(plan: Plan) -> contextvars.Token[Mapping[str, int]]:
    """Makes `symbol_number` answer for a plan, in this thread; the token undoes it."""
    return _numbers.set({c_symbol(name): i for i, name in enumerate(plan.symbols)})


def headers(target: str) -> tuple[tuple[str, str], ...]:
    """Names and texts of the headers that generated source includes."""
    folder = HERE / "include" / target
    found = [(p.name, p.read_text("utf-8")) for p in sorted(folder.iterdir()) if p.suffix in (".h", ".cuh")]
    return (*found, *(format_headers() if target == "cpu" else ()))


def render_cpu(plan: Plan, version: str) -> Source:
    """The C source of a plan."""
    env = environment()
    number_symbols(plan)
    functions: dict[str, Function] = {}
    used: dict[int, str] = {}
    for step, _ in plan.steps():
        k = step.kernel
        template = env.get_template(f"cpu/{k.family}.c.j2")
        text = template.render(k=k, s=step.schedule, name="@NAME@", **facts(k, step.schedule))
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in functions:
            name = f"{k.op.name}_{step.number}"
            functions[digest] = Function(name, _comment(k), wrap(text.replace("@NAME@", name)))
        used[step.number] = functions[digest].name
    body = wrap("\n".join(_body(plan, used)))
    text = env.get_template("cpu/plan.c.j2").render(
        plan=plan, functions=list(functions.values()), body=body, version=version, target=plan.target
    )
    return Source(text, tuple(functions.values()), used)


def _comment(k: Kernel) -> str:
    lines = [print_op(k.op)]
    if str(k.op.loc):
        lines.append(str(k.op.loc))
    return "/* " + "\n * ".join(map(_uncommented, lines)) + " */"


def _uncommented(text: str) -> str:
    """Text that neither ends nor opens a C comment, nor continues a line."""
    return text.replace("*/", "* /").replace("/*", "/ *").replace("\\", "/").replace("\n", " ")


def _body(plan: Plan, used: dict[int, str]) -> list[str]:
    products = [step.kernel for step, _ in plan.steps() if isinstance(step.schedule, LinearSchedule)]
    names = sorted({name for k in products if isinstance(k, Linear) for name in symbols_of(k.rows)})
    lines = [f"    const int64_t {c_symbol(n)} MP_UNUSED = run->args->symbols[{plan.symbols.index(n)}];" for n in names]
    for item in plan.items:
        if isinstance(item, StepLoop):
            lines += _tables(item.steps)
            lines.append(f"    for (int turn = 0; turn < {item.count}; ++turn) {{")
            for i, step in enumerate(item.steps):
                lines += _call(plan, step, _next_product(item.steps[i:]), used, "        ")
            lines.append("    }")
        else:
            lines += _call(plan, item, _next_product([item]), used, "    ")
    return lines


def _next_product(steps: Sequence[Step]) -> Step | None:
    """The first step with packed weights, at or after the first of some."""
    return next((step for step in steps if isinstance(step.schedule, LinearSchedule)), None)


def _call(plan: Plan, step: Step, product: Step | None, used: dict[int, str], indent: str) -> list[str]:
    """Lines of C that run a step; `product` is the next one that reads weights."""
    k = step.kernel
    where = f"  ({k.op.loc})" if str(k.op.loc) else ""
    head = f"{indent}/* {_uncommented(f'{step.number}: {print_op(k.op)}{where}')} */"
    rows = [c_dim(k.rows)] if isinstance(k, Linear) else []
    args = ", ".join(["run", "t", "T", str(step.number), *(_pointer(plan, o) for o in k.pointers), *rows])
    lines = [f"{indent}{_barrier(plan, product)}"] if step.barrier else []
    return [*lines, head, f"{indent}{used[step.number]}({args});"]


def _barrier(plan: Plan, product: Step | None) -> str:
    """Waits for the other threads; where rows are few, asks meanwhile for the weights that this one will read next."""
    if product is None:
        return "mp_barrier(run, T);"
    w, s = product.kernel.operand("w"), product.schedule
    assert isinstance(s, LinearSchedule) and isinstance(product.kernel, Linear)
    group = s.group_bytes(product.kernel.depth)
    bytes_ = f"{c_dim(product.kernel.rows)} <= {s.row_blocks[-1]} ? {group} : 0"
    return f"mp_barrier_before(run, {_pointer(plan, w)}, {s.groups - s.tail}, {bytes_}, t, T);"


def _pointer(plan: Plan, o: Operand) -> str:
    b = o.view.buffer
    ctype = C_TYPES[b.dtype.name] if b.layout is None else "void"  # a format's own type is known to its kernels alone
    cast = f"({'' if o.written else 'const '}{ctype} *)"
    if b.kind in ("arena", "scratch"):
        return f"{cast}(arena + at[{plan.arena.slot_of[b]}])"
    if b.kind == "table":
        array = "param" if b.table_kind == "param" else "in"
        return f"{cast}{array}[{_table_index(b)}]"
    array = {"input": "in", "output": "out", "param": "param"}[b.kind]
    return f"{cast}{array}[{b.index}]"


def _table_index(b: Buffer) -> str:
    """A step through consecutive numbers, or a lookup in a table of them."""
    step = b.table[1] - b.table[0]
    if all(n == b.table[0] + step * i for i, n in enumerate(b.table)):
        return f"{b.table[0]} + turn" if step == 1 else f"{b.table[0]} + {step} * turn"
    return f"{_table_name(b)}[turn]"


def _table_name(b: Buffer) -> str:
    return "table_" + "".join(c if c.isalnum() else "_" for c in b.name)


def _tables(steps: Sequence[Step]) -> list[str]:
    found: dict[str, str] = {}
    for step in steps:
        for o in step.kernel.pointers:
            b = o.view.buffer
            if b.kind == "table" and "table_" in _table_index(b):
                numbers = ", ".join(map(str, b.table))
                found[_table_name(b)] = f"    static const int {_table_name(b)}[] = {{{numbers}}};"
    return list(found.values())
