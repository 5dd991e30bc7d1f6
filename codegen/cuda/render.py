"""Plan to CUDA source: every kernel through its templates, once for equal texts, with the launches of each step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monoplan.codegen.cpu.render import Function, environment, headers, kernel_comment, title
from monoplan.codegen.cuda.launches import (
    Action,
    Between,
    Exchange,
    Launch,
    Product,
    Variant,
    Word,
    ceil_div,
    pointer_word,
    stable_past,
    symbol_words,
)
from monoplan.codegen.cuda.linear import LinearVariants
from monoplan.codegen.cuda.schedule import CudaAttention, DecodeSchedule, Tuning, tuned
from monoplan.codegen.cuda.variables import facts_cuda
from monoplan.codegen.expressions import c_dim
from monoplan.codegen.formats import cuda_headers
from monoplan.codegen.kernels import (
    Attention,
    Collective,
    Gather,
    Kernel,
    KVUpdate,
    Linear,
    Matmul,
    Norm,
    Pointwise,
    Reduce,
    Rope,
    Sample,
    Scan,
    Softmax,
    Sort,
)
from monoplan.codegen.plan import Plan, Step
from monoplan.codegen.text import block_comment
from monoplan.ir.dims import Dim
from monoplan.ir.printer import print_op
from monoplan.ir.types import product

PART = 4  # functions in one part of a source


@dataclass(frozen=True)
class CudaSource:
    """The whole source, and for each step its variants in order of preference.

    `parts` are the same functions as several sources, which compilers take side by side.
    """

    text: str
    functions: tuple[Function, ...]
    variants: dict[int, tuple[Variant, ...]]

    @property
    def step_functions(self) -> dict[int, str]:
        """The function that does most of each step: the longest of its first variant, or the library's product."""
        texts = {f.name: len(f.text) for f in self.functions}
        found = {}
        for number, variants in self.variants.items():
            names = [a.function for a in variants[0].actions if isinstance(a, Launch)]
            found[number] = max(names, key=lambda n: texts.get(n, 0), default="library product")
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
            self.functions[digest] = Function(name, kernel_comment(k), text.replace("@NAME@", name))
        return self.functions[digest].name, tuple(w for _, w in given)


def render_cuda(plan: Plan, version: str, tuning: Tuning | None = None) -> CudaSource:
    """The CUDA source of a plan; `tuning` replaces constants of row products and of attention, by step number."""
    renderer = Renderer(plan, tuning or {})
    variants = {step.number: _variants(renderer, step) for step, _ in plan.steps()}
    functions = tuple(renderer.functions.values())
    steps = "Steps, each with the launches it may become; the number of rows decides."
    head = block_comment([*title(plan, version), "", steps, *_table(plan, variants)])
    text = environment().get_template("cuda/plan.cu.j2").render(head=head, body=with_headers(functions))
    return CudaSource(text, functions, variants)


def with_headers(functions: Sequence[Function]) -> str:
    """Functions behind the helpers they need: a source that includes nothing."""
    body = "\n".join(f"{f.comment}\n{f.text}" for f in functions)
    code = "\n".join(f.text for f in functions)
    texts = dict(headers("cuda"))
    needed = {
        "mp_vec.cuh": ("mp_vec", "mp_widen", "mp_dot", "mp_reduce_rows"),
        "mp_select.cuh": ("mp_select",),
        "mp_wgmma.cuh": ("mp_wgmma",),
    }
    for ctype, name, text in cuda_headers():
        needed[name], texts[name] = (ctype,), text
    wanted = ["mp_ptx.cuh", "mp_base.cuh", *(name for name, words in needed.items() if any(w in code for w in words))]
    return "\n".join([*(texts[name] for name in wanted), body])


def _variants(renderer: Renderer, step: Step) -> tuple[Variant, ...]:
    k, s = step.kernel, step.schedule
    if isinstance(k, Collective):
        return (Variant("collective", (_exchange(k),)),)
    if isinstance(k, Linear):
        return LinearVariants(renderer, k, s).all()  # type: ignore[arg-type]
    names = facts_cuda(k)
    words = [pointer_word(o) for o in k.pointers]
    if isinstance(k, Attention):
        return _attention(renderer, k, s, names, words)  # type: ignore[arg-type]
    function, all_words = renderer.function(k, k.family, words, s=s, **names)
    threads: int = getattr(s, "threads", 256)
    blocks, block = _geometry(k, s, threads, names)
    return (Variant(k.family, (Launch(function, (blocks, 1, 1), block, all_words),)),)


def _exchange(k: Collective) -> Exchange:
    """Ranks meet on the host, or through their own library: there is nothing to launch."""
    x, y = (Word("operand", o, offset=o.view.offset * o.dtype.itemsize) for o in (k.operand("x"), k.operand("y")))
    assert k.mode == "gather", "sums over ranks are lowered to a gather and a pointwise kernel"
    return Exchange(x, y, k.rows, k.columns, k.world, k.operand("x").dtype)


def _geometry(k: Kernel, s: Any, threads: int, names: dict[str, Any]) -> tuple[Dim, int]:
    """Blocks and threads of the plain kernels."""
    if isinstance(k, Pointwise):
        return ceil_div(names["loop"].outer_size * names["loop"].inner, threads), threads
    if isinstance(k, Reduce):
        return ceil_div(product(k.outer) * s.team, threads), threads
    if isinstance(k, Norm | Softmax | Sort):
        return product(k.outer), threads
    if isinstance(k, Scan):
        return product(k.outer), 32
    if isinstance(k, Matmul):
        return product(k.batch) * ceil_div(k.rows, 16) * ceil_div(k.columns, 16), 256
    if isinstance(k, Gather):
        return ceil_div(product(k.outer) * product(k.inner), threads), threads
    if isinstance(k, Rope):
        return ceil_div(product(k.operand("x").shape[:3]) * 32, threads), threads
    if isinstance(k, KVUpdate):
        return ceil_div(product(k.operand("rows").shape), threads), threads
    assert isinstance(k, Sample)
    rows = product(k.rows)
    return (rows if k.mode == "sample" else ceil_div(rows * k.vocabulary, threads)), threads


def _attention(
    renderer: Renderer, k: Attention, s: CudaAttention, names: dict[str, Any], words: list[tuple[str, Word]]
) -> tuple[Variant, ...]:
    found: list[Variant] = []
    constants = renderer.tuning.get(str(k.step), {})
    decode, prefill = s.decode and tuned(s.decode, constants), s.prefill and tuned(s.prefill, constants)
    hopper = s.hopper and tuned(s.hopper, constants)
    if decode is not None:
        found += _decode(renderer, k, decode, names, words)
    if hopper is not None and hopper.groups:
        function, all_words = renderer.function(k, "attention_hopper", words, s=hopper, **names)
        blocks: tuple[Dim, Dim, Dim] = (k.heads // hopper.heads, ceil_div(k.seq, hopper.queries), k.batch)
        launch = Launch(function, blocks, hopper.groups * 128, all_words, shared=hopper.shared(k.head_dim))
        found.append(Variant("prefill", (launch,), (Between(k.seq, 2),)))
    elif prefill is not None:
        function, all_words = renderer.function(k, "attention_prefill", words, s=prefill, **names)
        blocks = (ceil_div(k.seq, prefill.queries), k.heads, k.batch)
        launch = Launch(function, blocks, prefill.warps * 32, all_words, shared=prefill.shared(k.head_dim))
        found.append(Variant("prefill", (launch,), (Between(k.seq, 2),)))
    if decode is not None and prefill is not None:
        return tuple(found)
    function, all_words = renderer.function(k, "attention", words, **names)
    launch = Launch(function, (k.batch * k.seq * k.heads, 1, 1), 128, all_words)
    return (*found, Variant("attention", (launch,)))


def _decode(
    renderer: Renderer, k: Attention, d: DecodeSchedule, names: dict[str, Any], words: list[tuple[str, Word]]
) -> list[Variant]:
    """One new token: more sequences need fewer blocks for each; long caches more than a cluster has."""
    attn = names["attn"] | {"early": stable_past(renderer.plan, k)}
    one = Between(k.seq, 1, 1)

    def clusters(splits: int, fixed: bool) -> Launch:
        function, all_words = renderer.function(
            k,
            "attention_decode",
            words,
            d=d,
            spread=False,
            splits=str(splits) if fixed else "(int)gridDim.x",
            attn=attn,
        )
        blocks, pad = (splits, k.kv_heads, k.batch), d.pad if fixed else 0
        return Launch(function, blocks, d.warps * 32, all_words, shared=pad, cluster=splits)

    partial = k.heads // k.kv_heads * (k.head_dim + 2)
    spread, spread_words = renderer.function(
        k,
        "attention_decode",
        [*words, ("float *partial", Word("workspace")), ("uint32_t *tickets", Word("tickets"))],
        d=replace(d, warps=d.long_warps, blocks=1),
        spread=True,
        splits=str(d.spread),
        attn=attn,
    )
    long = Launch(spread, (d.spread, k.kv_heads, k.batch), d.long_warps * 32, spread_words)
    few, some = -(-d.full // (8 * k.kv_heads)), 3 * d.full // (2 * k.kv_heads)
    return [
        Variant(
            "decode_long",
            (long,),
            (one, Between(k.keys, d.long + 1), Between(k.batch, 0, few)),
            k.batch * (k.kv_heads * d.spread * partial * 4),
        ),
        Variant("decode", (clusters(d.splits, True),), (one, Between(k.batch, 0, few))),
        Variant("decode_some", (clusters(2, False),), (one, Between(k.batch, 0, some))),
        Variant("decode_many", (clusters(1, False),), (one,)),
    ]


def _table(plan: Plan, variants: dict[int, tuple[Variant, ...]]) -> list[str]:
    lines = []
    for step, count in plan.steps():
        times = f" x {count}" if count > 1 else ""
        where = f"  ({step.kernel.op.loc})" if str(step.kernel.op.loc) else ""
        lines.append(f"{step.number}{times}: {print_op(step.kernel.op)}{where}")
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
