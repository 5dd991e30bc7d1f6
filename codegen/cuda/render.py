"""Plan to CUDA source: every kernel through its templates, once for equal texts, with the launches of each step."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

from monoplan.codegen.cuda.backend import FAMILIES
from monoplan.codegen.cuda.launches import Action, Launch, Product, Variant, Word, symbol_words
from monoplan.codegen.cuda.schedule import Tuning
from monoplan.codegen.expressions import c_dim
from monoplan.codegen.kernels import Kernel
from monoplan.codegen.plan import Plan
from monoplan.codegen.source import Function, environment, headers, kernel_comment, step_line, title, wrap
from monoplan.codegen.text import block_comment
from monoplan.ir.lazy_dataclass import dataclass

PART = 4  # functions in one part of a source
_INCLUDE = re.compile(r'^#include "(\w+\.(?:cuh|h))"\n', re.MULTILINE)


@dataclass(frozen=True)
class CudaSource:
    """The whole source, and for each step its variants in order of preference.

    `parts` are the same functions as several sources, which compilers take side by side.
    """

    text: str
    functions: tuple[Function, ...]
    variants: dict[int, tuple[Variant, ...]]
    untuned: str | None = None  # its text without tuning, if it is tuned

    @property
    def step_functions(self) -> dict[int, str]:
        """The function that does most of each step: in its first variant, that which reads the weights."""
        found = {}
        for number, (first, *_) in self.variants.items():
            readers = (a for a in first.actions if isinstance(a, Product) or isinstance(a, Launch) and a.reads("w"))
            main = next(readers, first.actions[0])
            found[number] = main.function if isinstance(main, Launch) else "library product"
        return found

    @property
    def parts(self) -> tuple[str, ...]:
        groups = [self.functions[i : i + PART] for i in range(0, len(self.functions), PART)]
        return tuple(map(with_headers, groups))


@dataclass
class Renderer:
    """Renders kernels of one plan; a text that was made before keeps its name."""

    plan: Plan
    tuning: Tuning
    functions: dict[str, Function] = field(default_factory=dict)

    def function(
        self, k: Kernel, template: str, words: Iterable[tuple[str, Word]], **names: Any
    ) -> tuple[str, tuple[Word, ...]]:
        """The name of a kernel's function and the words of its launch."""
        given = [*words, *symbol_words(k), ("mp_error *error", Word("error")), ("const int64_t step", Word("step"))]
        env = environment()
        text = env.get_template(f"cuda/{template}.cu.j2").render(
            k=k, name="@NAME@", params=", ".join(t for t, _ in given), **names
        )
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in self.functions:
            suffix = template.removeprefix(k.family)
            name = f"{k.op.name}_{k.step}{suffix}"
            taken = {f.name for f in self.functions.values()}
            name = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 99))) if n not in taken)
            code = wrap(_INCLUDE.sub("", text).replace("@NAME@", name))
            self.functions[digest] = Function(name, kernel_comment(k), code, tuple(_INCLUDE.findall(text)))
        return self.functions[digest].name, tuple(w for _, w in given)


def render_cuda(plan: Plan, version: str, tuning: Tuning | None = None) -> CudaSource:
    """The CUDA source of a plan; `tuning` replaces constants of row products and of attention, by step number."""
    renderer = Renderer(plan, tuning or {})
    variants = {s.number: FAMILIES[type(s.kernel)].variants(renderer, s.kernel, s.schedule) for s, _ in plan.steps()}
    functions = tuple(renderer.functions.values())
    steps = "Steps, each with the launches it may become; the number of rows decides."
    head = block_comment([*title(plan, version), "", steps, *_table(plan, variants)])
    text = environment().get_template("cuda/plan.cu.j2").render(head=head, body=with_headers(functions))
    return CudaSource(text, functions, variants)


def with_headers(functions: Sequence[Function], text: str = "") -> str:
    """Functions and a text behind the headers that they need, each header once: a source that includes nothing."""
    texts, found = dict(headers("cuda")), dict[str, str]()

    def add(names: Iterable[str]) -> None:
        for name in names:
            if name not in found:
                add(_INCLUDE.findall(texts[name]))
                found[name] = _INCLUDE.sub("", texts[name])

    add(["mp_ptx.cuh", "mp_base.cuh", *(name for f in functions for name in f.headers), *_INCLUDE.findall(text)])
    return "\n".join([*found.values(), *(f"{f.comment}\n{f.text}" for f in functions), _INCLUDE.sub("", text)])


def _table(plan: Plan, variants: dict[int, tuple[Variant, ...]]) -> list[str]:
    lines = []
    for step, count in plan.steps():
        lines.append(step_line(step, count))
        for v in variants[step.number]:
            when = f"{' and '.join(map(str, v.conditions)) or 'else'}: " if len(variants[step.number]) > 1 else ""
            lines.append(f"    {when}{', '.join(map(_show, v.actions))}")
    return lines


def _show(a: Action) -> str:
    if isinstance(a, Launch):
        grid = ", ".join(c_dim(g) for g in a.grid if g != 1) or "1"
        return f"{a.function}<<<({grid}), {a.block}>>>"
    if isinstance(a, Product):
        return f"library product {c_dim(a.rows)} x {a.columns} x {a.depth}"
    return f"exchange of {c_dim(a.rows * a.columns)} elements between {a.world} ranks"
