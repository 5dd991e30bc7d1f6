"""A CPU plan as a C program of its own: `fast.export("out/")`. See docs/export.md.

The files lie in codegen/cpu/export and are written as they are, but for the model's name and a few marks. model.c is
the plan's source, then tables and functions that follow from the plan (here), then api.c.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from monoplan import __version__
from monoplan.codegen.cpu.render import render_cpu, weight_names
from monoplan.codegen.expressions import c_dim, c_symbol
from monoplan.codegen.plan import Plan, make_plan
from monoplan.codegen.source import HERE, headers
from monoplan.codegen.target import cpu_target
from monoplan.codegen.text import c_string, comment_text, without_comments
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import Dim, Expr, FloorDiv, bounds, substitute, symbols_of
from monoplan.ir.errors import ArgumentError, MonoplanError, writing
from monoplan.ir.shape_constraints import ShapeConstraint
from monoplan.ir.types import Array, TensorType
from monoplan.runtime.build.toolchain import BASE_FLAGS
from monoplan.runtime.cpu.block_sums import BLOCK, PIECE, sums
from monoplan.runtime.cpu.weights import prepare
from monoplan.runtime.machine import features

if TYPE_CHECKING:
    from monoplan.built import Built
    from monoplan.llm import CompiledLM

HEAD = 64  # bytes before the first array of weights.bin


def export(
    built: Built, folder: Path, isa: str | None = None, name: str = "model", chat: Mapping[str, bytes] | None = None
) -> Path:
    """Writes the plan for one instruction set (None: this machine's) as C files whose names begin with `name`.

    `chat` has the files that a language model adds.
    """
    from monoplan.inspect.inspection import output_names

    if built.target != "cpu" or built.tp is not None:
        raise ArgumentError("only a plan for the CPU, of one rank, can be exported", fix="compile with target='cpu'")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in ("main", "mp"):
        raise ArgumentError(f"{name!r} can't begin the names of C functions", fix="use small letters, digits and _")
    plan, text, params, found = _made_for(built, isa)
    outputs = [n.removesuffix(" (written)") for n in output_names(built)]
    table, total = [], HEAD
    for a in params:
        table.append((total, a.nbytes))
        total += -(-a.nbytes // HEAD) * HEAD
    digest = hashlib.sha256(f"{without_comments(text)} {table}".encode()).digest()
    standard = ("-std=gnu11", "-O3", "-fPIC", "-shared")
    own = (*features.compile_flags(found), "-fwrapv", "-fopenmp-simd")
    flags = ["-std=c11", *(f for f in BASE_FLAGS if f not in standard), *own]
    values = {
        "NAME": name,
        "TITLE": comment_text(plan.name),
        "SIGNATURE": _signature(plan, outputs),
        "INPUTS": str(len(plan.graph.inputs)),
        "OUTPUTS": str(len(plan.outputs) - len(plan.graph.writes)),
        "DIMS": str(max([8, *(v.type.rank for v in (*plan.graph.inputs, *plan.graph.outputs))])),
        "FLAGS": " ".join(flags),
        "FLAG_LIST": " ".join(flags[1:]),
        "ISA": f"{found.arch} ({found.isa})",
        "EXAMPLE": " ".join(
            f"{comment_text(v.name)}={comment_text(v.name)}.bin:{','.join(map(str, v.type.shape))}"
            for v in plan.graph.inputs[:3]
        )
        + (" ..." if len(plan.graph.inputs) > 3 else ""),
        "PROGRAMS": "main chat" if chat else "main",
        "CHAT": "    ./chat weights.bin tokenizer.bin    (a conversation; its options stand at the top of chat.c)\n\n"
        if chat
        else "",
    }
    with writing("the exported plan", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted((HERE / "cpu" / "export").iterdir()):
            if file.is_file() and file.name != "api.c":
                out = file.name.replace("model", name)
                (folder / out).write_text(_filled(file.read_text("utf-8"), name, values), "utf-8")
        api = _filled((HERE / "cpu" / "export" / "api.c").read_text("utf-8"), name, values)
        tables = "\n".join(_tables(plan, built.shape_constraints, outputs, table, total, digest, name))
        whole = f"{_HEAD_OF_SOURCE}#define MP_LANES {plan.target.lanes}\n#endif\n{text}\n{tables}\n{api}"
        (folder / f"{name}.c").write_text(whole, "utf-8")
        for header, content in _used_headers(text):
            (folder / header).write_text(content, "utf-8")
        for file_name, data in (chat or {}).items():
            of_model = _filled(data.decode(), name, values).encode() if file_name == "chat.c" else data
            (folder / file_name).write_bytes(of_model)
        (folder / "weights.txt").write_text(_described(plan, params, table, total), "utf-8")
        _write_weights(folder / "weights.bin", params, total, digest)
    return folder


def chat_files(lm: CompiledLM) -> dict[str, bytes]:
    """The files of a program that talks: none for a model without a tokenizer."""
    from monoplan.models.rope_scaling import table_key
    from monoplan.models.text.tables import conversation, tokenizer_bytes

    tokenizer = lm._tokenizer_for((), None)
    if tokenizer is None:
        return {}
    try:
        tables = tokenizer_bytes(tokenizer)
        texts = conversation(tokenizer) if tokenizer.chat_template is not None else {}
    except MonoplanError as error:
        raise type(error)(error.what, why=error.why, fix=error.fix or "export with chat=False") from None
    # A prompt is cut only where its parts have the angles of the whole.
    whole = table_key(lm.config, 1) != table_key(lm.config, lm.max_length)
    numbers = {
        "CHAT_CONTEXT": lm.max_length,
        "CHAT_CHUNK": lm.max_length if whole else lm.prefill_chunk,
        "CHAT_BOS": tokenizer.bos_id if tokenizer.add_bos else -1,
        "CHAT_HAS_TEMPLATE": int(bool(texts)),
    }
    ends = sorted({*lm.config.eos_ids, *tokenizer.eos_ids})
    kinds = ("with_system", "after_system", "without_system", "answered", "answer", "next")
    lines = [
        "/* What chat.c has to know of the model: sizes, tokens that end a text, and the texts around messages. */",
        "enum { " + ", ".join(f"{key} = {value}" for key, value in numbers.items()) + " };",
        f"static const int chat_ends[] = {{{', '.join(map(str, [*ends, -1]))}}};",
        *(f"static const char chat_{kind}[] = {c_string(texts.get(kind, ''))};" for kind in kinds),
    ]
    here = HERE / "cpu" / "export" / "chat"
    return {
        **{file.name: file.read_bytes() for file in sorted(here.iterdir())},
        "chat.h": ("\n".join(lines) + "\n").encode(),
        "tokenizer.bin": tables,
    }


_HEAD_OF_SOURCE = """\
#define _GNU_SOURCE 1
#define MP_EXPORTED 1
#if defined(__GNUC__) && !defined(_OPENMP)
#pragma GCC diagnostic ignored "-Wunknown-pragmas" /* `omp simd` means nothing to this build */
#endif
#ifndef MP_LANES /* floats of a vector */
"""


def _made_for(built: Built, isa: str | None) -> tuple[Plan, str, Sequence[Array], features.CpuFeatures]:
    """Plan, source and packed weights for an instruction set, and what its code may use."""
    from monoplan.driver import module_source

    here = features.detect()
    executable = built.executable
    isa = isa or executable.plan.target.isa
    if isa == executable.plan.target.isa == here.isa:
        return executable.plan.whole, executable.text, executable.params, here
    try:
        target = cpu_target(isa, features.vector_bytes(isa))
    except KeyError:
        raise ArgumentError(
            f"there is no instruction set {isa!r}", fix=f"known: {', '.join(features.known())}"
        ) from None
    plan = make_plan(executable.plan.whole.graph, target)
    params = prepare(plan.graph, plan.params, module_source(built.tensors), keep=False)
    return plan, render_cpu(plan, __version__).text, params, features.plain(isa)


def _filled(text: str, name: str, values: dict[str, str]) -> str:
    """A file of the folder with the model's name and what the marks stand for."""
    text = re.sub(r"\bmodel_|\bmodel(?=\.[cho]\b)", lambda m: m[0].replace("model", name), text)
    text = re.sub(r"\bMODEL_", f"{name.upper()}_", text)
    return re.sub(r"@(\w+)@", lambda m: values[m[1]], text)


def _signature(plan: Plan, outputs: Sequence[str]) -> str:
    """Lines of a comment that name inputs and outputs with their types."""
    written = {i for i, _ in plan.graph.writes}
    lines = ["Inputs:"]
    lines += [f"  {v.name}: {v.type}{' (written)' if i in written else ''}" for i, v in enumerate(plan.graph.inputs)]
    lines += ["Outputs:"]
    returned = len(plan.outputs) - len(plan.graph.writes)
    lines += [f"  {n}: {v.type}" for n, v in zip(outputs[:returned], plan.graph.outputs, strict=False)]
    return "\n".join(f" * {comment_text(line)}" for line in lines)


def _used_headers(text: str) -> Iterator[tuple[str, str]]:
    """The headers that a source includes, and those that they include."""
    texts, waiting, seen = dict(headers("cpu")), [text], set()
    while waiting:
        for header in re.findall(r'#include "(\w+\.h)"', waiting.pop()):
            if header in texts and header not in seen:
                seen.add(header)
                waiting.append(texts[header])
                yield header, texts[header]


# -- tables and functions that follow from the plan ------------------------------------------------------------


def _tables(
    plan: Plan,
    constraints: Sequence[ShapeConstraint],
    outputs: Sequence[str],
    table: Sequence[tuple[int, int]],
    total: int,
    digest: bytes,
    p: str,
) -> Iterator[str]:
    """C between the plan's source and api.c; `p` begins all names."""
    graph, q = plan.graph, p.upper()
    written = {j: i for i, j in graph.writes}
    yield f'/* ---- what {p}.h needs to know of the plan ---- */\n#include "{p}.h"\n'
    counts = {
        "PARAMS": len(table), "RESULTS": len(plan.outputs), "SYMBOLS": len(plan.symbols),
        "SLOTS": len(plan.arena.slots), "STEPS": max((s.number for s, _ in plan.steps()), default=-1) + 1,
    }  # fmt: skip
    yield "enum { " + ", ".join(f"{q}_{name} = {n}" for name, n in counts.items()) + " };"
    yield f"#define {q}_WEIGHT_BYTES INT64_C({total})"
    yield f"static const unsigned char {p}_digest[32] = {{{', '.join(map(str, digest))}}};"
    yield f"static const struct {{ int64_t at, bytes; }} {p}_params[] = {{"
    yield from (f"    {{{at}, {n}}}," for at, n in (*table, (0, 0)))
    yield f"}};\nstatic const {p}_array {p}_inputs[] = {{"
    yield from (_array(v.name, v.type, q) for v in graph.inputs)
    yield "    {0},\n};"
    yield f"static const {p}_array {p}_results[] = {{ /* first those that a run returns */"
    yield from (_array(n, v.type, q) for n, v in zip(outputs, graph.outputs, strict=True))
    yield "    {0},\n};"
    yield "/* The input that a result lies in, and the one that it is copied to after a run; -1: none. */"
    yield f"static const struct {{ int is, written; }} {p}_places[] = {{"
    for j, where in enumerate(plan.outputs):
        yield f"    {{{-1 if isinstance(where, Buffer) else where}, {written.get(j, -1)}}},"
    yield f"    {{-1, -1}},\n}};\nstatic const char *const {p}_steps[] = {{"
    texts = {s.number: f"{s.kernel.op.name} ({s.kernel.op.loc.short})" for s, _ in plan.steps()}
    yield from (f"    {c_string(texts.get(i, ''))}," for i in range(counts["STEPS"]))
    yield "    0,\n};\n"
    yield from _binding(plan, constraints, p)
    yield from _layout(plan, p)


def _array(name: str, t: TensorType, q: str) -> str:
    shape = ", ".join(str(d) if isinstance(d, int) else "-1" for d in t.shape) or "0"
    return f"    {{{c_string(name)}, {q}_{t.dtype.name.upper()}, {t.rank}, {{{shape}}}, 0}},"


def _binding(plan: Plan, constraints: Sequence[ShapeConstraint], p: str) -> Iterator[str]:
    """The function that finds the sizes of a call in the shapes of its inputs, as bind_symbols does."""
    yield f"static int {p}_solve({p}_plan *, const {p}_array *, int, int64_t, int64_t, const char *, int64_t *);"
    yield f"static int {p}_expect({p}_plan *, const {p}_array *, int, int64_t);"
    yield f"static int {p}_require({p}_plan *, int, const char *);\n"
    yield f"static int {p}_bind({p}_plan *plan, const {p}_array *const *in, int64_t *n)"
    yield "{\n    (void)plan, (void)in, (void)n;"
    yield from (f"    int64_t {c_symbol(s)} = 0;" for s in plan.graph.symbols)
    known: set[str] = set()
    waiting = [(i, k, d) for i, v in enumerate(plan.graph.inputs) for k, d in enumerate(v.type.shape)]
    while waiting:
        ready = next((w for w in waiting if len(symbols_of(w[2]) - known) <= 1), None)
        if ready is None:
            raise ArgumentError(f"the sizes of {plan.name} do not follow from its inputs one by one")
        waiting.remove(ready)
        i, k, d = ready
        if unknown := symbols_of(d) - known:
            (s,) = unknown
            plus = substitute(d, {s: 0})
            by = substitute(d, {s: 1}) - plus
            given = f'{c_dim(by)}, {c_dim(plus)}, "{s}", &{c_symbol(s)}'
            yield f"    if ({p}_solve(plan, in[{i}], {k}, {given})) return -1;"
            known.add(s)
        if not unknown or any(isinstance(a, FloorDiv) for m, _ in d.terms for a in m):  # type: ignore[union-attr]
            yield f"    if ({p}_expect(plan, in[{i}], {k}, {c_dim(d)})) return -1;"
    for text, dim in dict.fromkeys((c.text, d) for c in constraints for d in _not_negative(c)):
        if (low := bounds(dim)[0]) is None or low < 0:
            yield f"    if ({p}_require(plan, {c_dim(dim)} >= 0, {c_string(text)})) return -1;"
    yield from (f"    n[{i}] = {c_symbol(s)};" for i, s in enumerate(plan.graph.symbols))
    yield "    return 0;\n}\n"


def _not_negative(c: ShapeConstraint) -> Iterator[Dim]:
    """What must not be negative for an op's type rule to hold, where all sizes of the inputs are at least 1."""
    attrs = dict(c.attrs)
    results = c.opdef.apply_rule(c.types, attrs)
    for t in (*c.types, *(results if isinstance(results, tuple) else (results,))):
        yield from (d - 1 for d in t.shape) if t is not None else ()
    if c.opdef.name == "slice":
        t = c.types[0]
        assert t is not None
        start, last = attrs["start"], attrs["start"] + (attrs["length"] - 1) * attrs["step"]
        yield from (start, last, t.shape[attrs["axis"]] - 1 - start, t.shape[attrs["axis"]] - 1 - last)
    elif c.opdef.name == "pad":
        yield from (*attrs["before"], *attrs["after"])
    elif c.opdef.name == "scatter":
        x, index, _ = c.types
        assert x is not None and index is not None
        rooms = [a - b for a, b in zip(x.shape, index.shape, strict=True)]
        yield from (room for i, room in enumerate(rooms) if i != attrs["axis"] % x.rank)


def _layout(plan: Plan, p: str) -> Iterator[str]:
    """The function that places the arena's slots and sizes the results."""
    yield f"static void {p}_layout(const int64_t *n, int64_t *at, int64_t *end, {p}_array *made)"
    yield "{\n    (void)at, (void)made;"
    yield from (f"    const int64_t {c_symbol(s)} MP_UNUSED = n[{i}];" for i, s in enumerate(plan.symbols))
    yield "    *end = 0;"
    for i, sizes in enumerate(plan.arena.slots):
        largest = "0"
        for size in sizes:
            largest = f"mp_max({largest}, {c_dim(size)})"
        yield f"    at[{i}] = *end;\n    *end += ({largest} + 63) / 64 * 64;"
    for j, v in enumerate(plan.graph.outputs):
        for k, d in enumerate(v.type.shape):
            if isinstance(d, Expr):
                yield f"    made[{j}].shape[{k}] = {c_dim(d)};"
    yield "}\n"


# -- weights ---------------------------------------------------------------------------------------------------


def _described(plan: Plan, params: Sequence[Array], table: Sequence[tuple[int, int]], total: int) -> str:
    lines = [
        f"weights.bin: {total} bytes, little endian. A head of {HEAD} bytes, then arrays:",
        "their place, bytes, what they are made of, and the layout in which kernels read them.",
        "",
        "head: 16 bytes `monoplanweights1`, u64 bytes of the file, u64 sum of the arrays, 32 bytes digest of the plan",
    ]
    for (at, n), use, a in zip(table, plan.params, params, strict=True):
        layout = f"{a.dtype} {list(a.shape)}" if use.layout is None else str(use.layout)
        lines.append(f"{at} {n} {comment_text(weight_names(plan.graph, use.value)[1])} {use.value.type} as {layout}")
    return "\n".join(lines) + "\n"


def _write_weights(path: Path, params: Sequence[Array], total: int, digest: bytes) -> None:
    found = 0
    with path.open("wb") as stream:
        stream.write(bytes(HEAD))
        for i, a in enumerate(params):
            data = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
            stream.write(data.data)
            stream.write(bytes(-len(data) % HEAD))
            found += _sum(data) * (2 * i + 1)
        head = np.array([total, found % 2**64], "<u8").tobytes()
        stream.seek(0)
        stream.write(b"monoplanweights1" + head + digest)


def _sum(data: Array) -> int:
    """The sum of model_sum in api.c."""
    total = 0
    for begin in range(0, len(data), PIECE):
        piece = data[begin : begin + PIECE]
        if len(piece) % BLOCK:
            piece = np.concatenate([piece, np.zeros(-len(piece) % BLOCK, np.uint8)])
        inner = sums(piece)
        numbers = np.arange(len(inner), dtype=np.uint64) + np.uint64(begin // BLOCK)
        with np.errstate(over="ignore"):
            total += int((inner * (2 * numbers + 1).astype(np.uint64)).sum(dtype=np.uint64))
    return total % 2**64
