"""Plan to source: each kernel through its template, once for equal kernels, and the plan function around them."""

from __future__ import annotations

import contextvars
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from monoplan.codegen.cpu.schedule_linear import LinearSchedule
from monoplan.codegen.cpu.variables import facts, unravel_lines
from monoplan.codegen.expressions import C_TYPES, c_dim, c_literal, c_symbol
from monoplan.codegen.formats import format_headers
from monoplan.codegen.kernels import Kernel, Linear
from monoplan.codegen.layout import wrap
from monoplan.codegen.operands import Operand
from monoplan.codegen.plan import Plan, Step, StepLoop
from monoplan.codegen.text import block_comment, identifier
from monoplan.codegen.views import Buffer, View
from monoplan.ir.dims import symbols_of
from monoplan.ir.expr import Call
from monoplan.ir.graph import Graph, Loc, Op, Param, Value
from monoplan.ir.printer import print_op
from monoplan.ir.types import f32

HERE = Path(__file__).resolve().parents[1]
# What holds text of the user's, or of a file that is not trusted.
_GRAPH_TYPES = frozenset({Graph, Op, Value, Loc, Param, Plan, Buffer, View, Call})
Tables = dict[tuple[int, ...], str]
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
def _loader() -> Any:
    """Templates of both targets, as `cpu/linear.c.j2`."""
    from jinja2 import FileSystemLoader, PrefixLoader

    return PrefixLoader({target: FileSystemLoader(HERE / target / "templates") for target in ("cpu", "cuda")})


@cache
def environment() -> Any:
    """The one Jinja environment: files only, undefined names are errors, and no template reaches a user's text."""
    from jinja2 import Environment, StrictUndefined, TemplateRuntimeError

    read_attribute, read_item = Environment.getattr, Environment.getitem  # templates read thousands of them

    class Templates(Environment):
        """Text of a graph comes to templates as finished comments and names, see text.py; the graph itself does not."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            found = read_attribute(self, obj, attribute)
            return self._refuse(attribute) if type(found) in _GRAPH_TYPES else found

        def getitem(self, obj: Any, argument: Any) -> Any:
            found = read_item(self, obj, argument)
            return self._refuse(argument) if type(found) in _GRAPH_TYPES else found

        def _refuse(self, name: object) -> Any:
            raise TemplateRuntimeError(f"a template can't read {name}: it holds names and paths of the user")

    env = Templates(
        loader=_loader(), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
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
    return environment().loader is _loader()


def _symbols_used(k: Kernel) -> list[str]:
    """C names of the symbols that a kernel's index arithmetic mentions."""
    return sorted(c_symbol(name) for name in k.mentioned)


def number_symbols(plan: Plan) -> contextvars.Token[Mapping[str, int]]:
    """Makes `symbol_number` answer for a plan, in this thread; the token undoes it."""
    return _numbers.set({c_symbol(name): i for i, name in enumerate(plan.symbols)})


def headers(target: str) -> tuple[tuple[str, str], ...]:
    """Names and texts of the headers that generated source includes."""
    folder = HERE / target / "include"
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
            functions[digest] = Function(name, kernel_comment(k), wrap(text.replace("@NAME@", name)))
        used[step.number] = functions[digest].name
    body = wrap("\n".join(_body(plan, used)))
    text = env.get_template("cpu/plan.c.j2").render(
        head=block_comment(title(plan, version)), functions=list(functions.values()), body=body
    )
    return Source(text, tuple(functions.values()), used)


def title(plan: Plan, version: str) -> list[str]:
    """The first lines of a source."""
    target = plan.target
    return [f"{plan.name}: one plan, written by monoplan {version} for {target.name} ({target.isa}).", plan.summary]


def kernel_comment(k: Kernel) -> str:
    """The comment above a kernel: its IR line and the user's line."""
    return block_comment([print_op(k.op), *([str(k.op.loc)] if str(k.op.loc) else [])])


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
    where = f"  ({k.op.loc})" if str(k.op.loc) else ""
    head = block_comment([f"{step.number}: {print_op(k.op)}{where}"], indent)
    rows = [c_dim(k.rows)] if isinstance(k, Linear) else []
    args = ", ".join(["run", "t", "T", str(step.number), *(_pointer(plan, tables, o) for o in k.pointers), *rows])
    lines = [f"{indent}{_barrier(plan, tables, product)}"] if step.barrier else []
    return [*lines, head, f"{indent}{used[step.number]}({args});"]


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
