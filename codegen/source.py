"""Generated source: its pieces, the environment that renders them, and the marks by which it is read back.

A source is a head, functions and a tail; compilers side by side get some of the functions each (`Source.parts`). What
is built may have been edited, so tools read these marks from its text, and nothing else:

* `/* %y = …` above a function: the IR line it computes, the user's line below it (`kernel_comment`);
* `/* 7: %y = … */` above a call in the plan's function: the step's number and its IR line (`step_comment`);
* `name(run, t, T, 7, …);` as a statement of its own: the call of step 7 (`call_statement`);
* `/* ---- layers.0 ---- */`: the steps of a layer follow, first of all its weights (`banner`);
* `MP_KERNEL name(…)` and a line that begins with `{`: a function that steps call.

Lines of a comment that are too long go on in lines indented by four more spaces.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from monoplan.codegen.expressions import c_dim, c_literal, c_symbol
from monoplan.codegen.formats import cuda_headers, format_headers
from monoplan.codegen.kernels import Kernel
from monoplan.codegen.plan import Plan, Step
from monoplan.codegen.text import block_comment, comment_lines
from monoplan.codegen.views import Buffer, View
from monoplan.ir.dims import Dim, equal
from monoplan.ir.expr import Call
from monoplan.ir.graph import Graph, Loc, Op, Param, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.printer import print_op
from monoplan.ir.types import f32, product

HERE = Path(__file__).resolve().parent
# What holds text of the user's, or of a file that is not trusted.
_GRAPH_TYPES = frozenset({Graph, Op, Value, Loc, Param, Plan, Buffer, View, Call})
LEAST = 24 << 10  # weight of a part: a smaller one takes longer to start than to compile
# How long compilers take for what headers hold, by its calls, in characters of plain text: loops that each function
# inlines, and those that all functions of a part share.
LOOPS = {"mp_attention": 48 << 10, "mp_linear_tiles_run(": 24 << 10, "mp_conv": 16 << 10}
SHARED = {"mp_linear_run(": 16 << 10, "mp_linear_blocks_run(": 24 << 10}
FEWEST, MOST = 2, 4  # parts


@dataclass(frozen=True)
class Function:
    """A kernel's source and the comment that says where it comes from."""

    name: str
    comment: str
    text: str
    headers: tuple[str, ...] = ()  # CUDA: those that the text needs; C includes them itself

    @property
    def weight(self) -> int:
        """How long a compiler takes for it, in characters of plain text, without loops that it shares."""
        return len(self.text) + sum(weight for call, weight in LOOPS.items() if call in self.text)

    @property
    def prototype(self) -> str:
        start = self.text.index(f"MP_KERNEL {self.name}(")
        return self.text[start : self.text.index("\n{", start)] + ";\n"


def weight_of(functions: Sequence[Function]) -> int:
    """How long a compiler takes for some functions, with the loops that they share."""
    shared = sum(weight for call, weight in SHARED.items() if any(call in f.text for f in functions))
    return shared + sum(f.weight for f in functions)


@dataclass(frozen=True)
class Source:
    """The C source of a plan; `tail` calls the functions, `step_functions` has the one of each step."""

    head: str
    functions: tuple[Function, ...]
    tail: str
    step_functions: dict[int, str]

    @cached_property
    def text(self) -> str:
        """The whole translation unit."""
        return "".join([self.head, *(f"{f.comment}\n{f.text}\n" for f in self.functions), self.tail])

    def parts(self, cores: int = MOST) -> tuple[str, ...]:
        """Translation units that together are the source; none where it is too small.

        Each has some of the functions, with the lines of the whole; the last one also has the tail. See MP_PARTS. Not
        more than there are cores: every part reads the headers anew and compiles the loops that its functions share.
        """
        if len(self.functions) < 2:
            return ()
        total, heaviest = weight_of(self.functions), max(weight_of([f]) for f in self.functions)
        useful = -(-total // heaviest)  # with more parts, all of them wait for the heaviest function
        count = min(max(FEWEST, min(cores, MOST)), len(self.functions), total // LEAST, useful)
        if count < 2:
            return ()
        line, starts = self.head.count("\n") + 1, {}
        for f in self.functions:
            starts[f] = line + f.comment.count("\n") + 1
            line = starts[f] + f.text.count("\n") + 1
        bins: list[list[Function]] = [[] for _ in range(count)]
        calls = [0] * (count - 1) + [len(self.tail) // 3]  # as many characters are compiled in a third of the time
        for f in sorted(self.functions, key=lambda f: -f.weight):
            sizes = [weight_of([*chosen, f]) + more for chosen, more in zip(bins, calls, strict=True)]
            bins[sizes.index(min(sizes))].append(f)
        found = []
        for i, chosen in enumerate(bins):
            pieces = [f'#line {starts[f]} "plan.c"\n{f.text}' for f in self.functions if f in chosen]
            if i == count - 1:
                declared = "".join(f.prototype for f in self.functions)
                pieces.append(f'{declared}#line {line} "plan.c"\n{self.tail}')
            found.append("#define MP_PARTS 1\n" + self.head + "\n".join(pieces))
        return tuple(found)


# -- rendering ------------------------------------------------------------------------------------------------


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
        loader=_loader(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters.update(
        dim=c_dim,
        unravel_lines=unravel_lines,
        c_float=lambda x: c_literal(x, f32),
        symbols_used=lambda k: sorted(c_symbol(name) for name in k.mentioned),
        symbol_value=lambda name: f"run->args->symbols[{_numbers.get()[name]}]",
    )
    return env


def is_pristine() -> bool:
    """Whether templates come from the package's own files, and from nowhere else."""
    if not environment.cache_info().currsize:
        return True
    return environment().loader is _loader()


def unravel_lines(shape: Sequence[Dim], flat: str, prefix: str) -> list[str]:
    """C lines that turn a flat index into prefix0, prefix1, … over a shape."""
    lines = []
    for axis in range(len(shape)):
        below = product(shape[axis + 1 :])
        text = flat if equal(below, 1) else f"{flat} / ({c_dim(below)})"
        if axis > 0:
            text = f"{text} % ({c_dim(shape[axis])})"
        lines.append(f"const int64_t {prefix}{axis} MP_UNUSED = {text};")
    return lines


# C names of the symbols of the plan being rendered, and their numbers among its arguments.
_numbers: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar("symbol_numbers")


def number_symbols(plan: Plan) -> contextvars.Token[Mapping[str, int]]:
    """Makes `symbol_value` answer for a plan, in this thread; the token undoes it."""
    return _numbers.set({c_symbol(name): i for i, name in enumerate(plan.symbols)})


def headers(target: str) -> tuple[tuple[str, str], ...]:
    """Names and texts of the headers that generated source includes."""
    files = sorted((HERE / target / "include").iterdir())
    found = [(p.name, p.read_text("utf-8")) for p in files if p.suffix in (".h", ".cuh")]
    return (*found, *(format_headers() if target == "cpu" else cuda_headers()))


def included(text: str, known: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Those of some headers that a source includes, also by way of others and under conditions."""
    texts, found, unread = dict(known), set[str](), [text]
    while unread:
        names = {name for name in _INCLUDE.findall(unread.pop()) if name in texts} - found
        found |= names
        unread += [texts[name] for name in names]
    return tuple((name, content) for name, content in known if name in found)


_INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)


# -- marks: written --------------------------------------------------------------------------------------------


def title(plan: Plan, version: str) -> list[str]:
    """The first lines of a source."""
    target = plan.target
    return [f"{plan.name}: one plan, written by monoplan {version} for {target.name} ({target.isa}).", plan.summary]


def kernel_comment(k: Kernel) -> str:
    """The comment above a kernel: its IR line and the user's line."""
    loc = str(k.op.loc.short)
    return block_comment([print_op(k.op), *([loc] if loc else [])])


def step_line(step: Step, runs: Dim = 1) -> str:
    """A step's number, how often it runs, IR line and user's line."""
    times = "" if equal(runs, 1) else f" x {runs}"
    loc = str(step.kernel.op.loc.short)
    return f"{step.number}{times}: {print_op(step.kernel.op)}" + (f"  ({loc})" if loc else "")


def step_comment(step: Step, indent: str) -> str:
    """The comment above the call of a step."""
    return block_comment([step_line(step)], indent)


def banner(text: str, indent: str) -> str:
    """The comment at the head of a layer's steps."""
    return block_comment([f"---- {text} ----"], indent)


def call_statement(function: str, step: Step, arguments: Sequence[str], indent: str) -> str:
    """The call of a step."""
    return f"{indent}{function}({', '.join(['run', 't', 'T', str(step.number), *arguments])});"


# -- marks: read back ------------------------------------------------------------------------------------------

_MESSAGE = re.compile(r"plan\.(?:c|cu)[:(](\d+)")
_ORIGIN = re.compile(r"/\* (?:\d+: )?%")
_STEP = re.compile(r"^[ \t]*/\* (\d+: %(?:[^*]|\*(?!/))*)\*/", re.MULTILINE)
_CALL = re.compile(r"^([ \t]+)\w+\(run, t, T, (\d+)(?:,([^;]*))?\);[ \t]*$", re.MULTILINE)  # may go on over lines
_PLAN = "static void plan_run(mp_run *run, int t, int T)\n{\n"


def origin(text: str, line: int) -> str:
    """The comment above the kernel, or above the call, that a source line (from 1) belongs to; else nothing."""
    lines = text.split("\n")
    for at in range(min(line, len(lines)) - 1, -1, -1):
        if _ORIGIN.match(lines[at].strip()):
            return " | ".join(comment_lines("\n".join(lines[at:])))
        if lines[at].startswith("}") and at < line - 1 or lines[at].strip().startswith("/* ---- "):
            break  # the end of the function before, or the head of a layer: this line stands outside of all kernels
    return ""


def origins(text: str, message: str) -> list[str]:
    """Where the lines that a compiler complains of come from, each once, in its order."""
    found = (origin(text, int(n)) for n in _MESSAGE.findall(message))
    return list(dict.fromkeys(line for line in found if line))


def step_lines(text: str) -> list[str]:
    """Number and IR line of each step, without the place that it comes from: moving code is no change."""
    found = (comment_lines(f"/* {comment}*/")[0] for comment in _STEP.findall(text))
    return [line[: line.rfind("]") + 1] for line in found]


@dataclass(frozen=True)
class CallOfStep:
    """A step's call as it stands in a source: its number, arguments behind that, and indent."""

    number: int
    arguments: list[str]
    indent: str


def after_calls(text: str, first: str, more: Callable[[CallOfStep], Iterator[str]]) -> str:
    """A C source with the statement `first` at the start of the plan's function, and others behind the steps' calls."""

    def extend(call: re.Match[str]) -> str:
        found = CallOfStep(int(call[2]), _arguments(call[3] or ""), call[1])
        return "\n".join([call[0], *(f"{call[1]}{statement}" for statement in more(found))])

    kernels, head, body = text.partition(_PLAN)
    return f"{kernels}{head}    {first}\n{_CALL.sub(extend, body)}"


def _arguments(text: str) -> list[str]:
    """Arguments of a call, split at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text.strip() else []


# The last touch on generated source: lines that no one would write are broken as a person would break them.


WIDTH = 116


def wrap(text: str, width: int = WIDTH) -> str:
    """Long code lines broken after a comma or before an operator; comments (IR lines among them) stay whole."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines += [line] if len(line) <= width or _is_comment(line) else _broken(line, width)
    return "\n".join(lines)


def _is_comment(line: str) -> bool:
    start = line.lstrip()
    return start.startswith(("/*", "*", "//", "#")) or line.endswith("\\")


def _broken(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    found: list[str] = []
    rest = line
    while len(rest) > width:
        at = _break_at(rest, width, len(indent) if found else 0)
        if at <= 0:
            break
        found.append(rest[:at].rstrip())
        rest = indent + rest[at:].lstrip()
    return [*found, rest]


def _break_at(line: str, width: int, start: int) -> int:
    """Where to break: after the last comma, or before the last operator that fits, or after a bracket; not inside a
    comment; 0: nowhere."""
    limit = min([width, *(at for at in (line.find("/*"), line.find("//")) if at > 0)])
    for mark, shift in ((", ", 2), (" && ", 1), (" || ", 1), (" + ", 1), (" ? ", 1), (" = ", 3), (" * ", 1)):
        at = line.rfind(mark, start + 8, limit)
        if at > 0:
            return at + shift
    return line.rfind("(", start + 8, limit) + 1 if limit == width else 0
