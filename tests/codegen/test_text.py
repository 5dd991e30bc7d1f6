"""Text from outside in generated source: whatever names, paths and IR lines hold, the code stays the same."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import string
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.expressions import c_symbol
from monoplan.codegen.plan import make_plan
from monoplan.codegen.source import HERE, environment, headers, origin, wrap
from monoplan.codegen.target import cuda_target
from monoplan.codegen.text import block_comment, comment_text, file_name, identifier, without_comments
from monoplan.driver import build_graph_executable
from monoplan.inspect.override import override_text
from monoplan.inspect.repro import _PASS_SCRIPT, function_text
from monoplan.ir.errors import CompileError, ParseError
from monoplan.ir.graph import Graph, Loc, Op, Param, Value
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.runtime.build.cache import BuildKey
from monoplan.runtime.cpu.executable import flags_for, host_target
from tests.codegen.cuda_emulator import HEADER
from tests.codegen.mixed import mixed_graph, rolled_graph
from tests.needs import COMPILERS, needs

HOSTILE = (
    "layers.\u0663.weight", "layers.7.weight", "layers." + "7" * 300 + ".weight",
    "*\\ int own; /\\*", "*/ int own(void); /*", "*??/", "a??/\nb", "x\\", "\\\n", "\n#error own\n", "\r\n#error own",
    "*\u2028/", "\u202e*/\u2066", "\"*/\"", "'", '"', "*", "/", "//", "/*/*/", "**//", "\0*/", "*\x1b[2J/", "\udc80*/",
    "mp_vec mp_wgmma mp_select", "static void plan_run(", "int mp_run_plan(", "@NAME@", "{{ 7 * 7 }}", "ß.é.层", "",
    "    exp_0(run, t, T, 0);", "#include <own>", "%:include", "_Pragma(\"own\")", "$(own)", "`own`", "a" * 300,
)  # fmt: skip
anything = st.text() | st.text(alphabet="*/\\?\"'\n\r\0 a\u2028\u202e\ud800é") | st.sampled_from(HOSTILE)


@given(anything)
@example("*\\")
@example("*?/")
def test_text_stays_inside_its_comment(text: str) -> None:
    safe = comment_text(text)
    assert comment_text(safe) == safe
    assert "*/" not in safe and "/*" not in safe and not set("\\?\n\r\0\x0b\x0c\x85\u2028\u2029") & set(safe)
    assert all(c.isalnum() or c in string.punctuation + " " for c in safe) and safe.isprintable()
    safe.encode()
    assert len(safe.splitlines()) <= 1


@given(anything)
def test_readable_text_stays(text: str) -> None:
    plain = "".join(c for c in text if c.isalnum() or c in " .:_-[]%=,") + "/é/层.py:12 in model.layers.0"
    assert comment_text(plain) == plain


@given(st.lists(anything, min_size=1, max_size=4))
def test_a_comment_is_one_comment(lines: list[str]) -> None:
    for indent in ("", "    "):
        text = block_comment(lines, indent)
        assert text.startswith(f"{indent}/* ") and text.endswith(" */") and text.count("\n") == len(lines) - 1
        assert text.count("/*") == text.count("*/") == 1
        assert wrap(f"{text}\nint x;") == f"{text}\nint x;"
        if not re.search(r"#[ \t]*include[ \t]*<", text):  # then nothing is taken away
            assert without_comments(f"a{text}b") == f"a{indent} b"


@given(st.lists(anything, max_size=8))
def test_identifiers_are_ascii_and_differ(texts: list[str]) -> None:
    found: list[str] = []
    for text in texts:
        found.append(identifier("table_", text, found))
    assert len(set(found)) == len(found)
    assert all(re.fullmatch(r"table_[A-Za-z0-9_]*", name) for name in found)


@given(anything)
def test_symbols_are_identifiers_or_refused(text: str) -> None:
    try:
        assert re.fullmatch(r"n_[A-Za-z_][A-Za-z0-9_]*", c_symbol(text))
    except CompileError:
        assert not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text)


@given(anything)
def test_files_stay_in_their_folder(text: str) -> None:
    name = file_name(text)
    assert Path("folder", name).parent == Path("folder") and not name.startswith(".") and len(name.encode()) < 255


# -- digests ----------------------------------------------------------------------------------------------------------


def digest(source: str) -> str:
    return BuildKey(source, (), "cc", (), "generic", 1).digest()


def test_comments_do_not_count_for_the_digest() -> None:
    a, b = (block_comment(["%x = exp", path]) + "\nint f(void) { return 1; }" for path in ("a.py:1", "it's.py"))
    assert digest(a) == digest(b)


@pytest.mark.parametrize(
    "source",
    [
        "/\\\n* // */ {};",
        "#include <a//{}>",
        "#include <a/*{}*/b>",
        'char *s = "??/" // {}";',
        "// ??/\n{}",
        "// \\\n{}",
        "// \\ \n{}",
        'char *s = "/* {} */";',
        'int c = \'"\'; char *s = "// {}";',
        "#error don't // \" {}",
        "/* {}",
        "' // {}",
        '" // {}',
    ],
)
def test_what_may_be_code_counts_for_the_digest(source: str) -> None:
    assert digest(source.replace("{}", "one")) != digest(source.replace("{}", "two"))


# -- whole plans ------------------------------------------------------------------------------------------------------


def with_text(graph: Graph, text: Callable[[], str]) -> Graph:
    """The graph with every name and location made anew; only sizes and operators keep their names."""
    new: dict[Value, Value] = {}

    def value(v: Value) -> Value:
        return new.setdefault(v, Value(v.type, text()))

    def renamed(op: Op) -> Op:
        attrs = {k: with_text(v, text) if isinstance(v, Graph) else v for k, v in op.attrs.items()}
        operands = tuple(None if v is None else value(v) for v in op.operands)
        return Op(op.opdef, operands, attrs, tuple(map(value, op.results)), Loc(text(), text(), 3))

    return Graph(
        text(),
        tuple(map(value, graph.inputs)),
        tuple(Param(value(p.value), text()) for p in graph.params),
        tuple(map(renamed, graph.ops)),
        tuple(map(value, graph.outputs)),
        tuple(map(renamed, graph.setup)),
        graph.writes,
    )


def hostile() -> Callable[[], str]:
    return itertools.cycle(HOSTILE).__next__


GRAPHS = {"mixed": mixed_graph, "rolled": lambda: rolled_graph()[0]}
SOURCES = {
    "cpu": lambda graph: render_cpu(make_plan(graph, host_target()), "*/ own").text,
    "cuda": lambda graph: render_cuda(make_plan(graph, cuda_target(90, 132, 232448, library=True)), "*/ own").text,
}


def code(source: str, folder: Path, language: str) -> str:
    """The tokens of a source, as the compiler itself sees them, trigraphs included."""
    command = ["gcc", "-x", language, "-fpreprocessed", "-trigraphs", "-w", "-E", "-P", "-"]
    done = subprocess.run(command, input=source, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return _without_names_of_weights(done.stdout)


def _without_names_of_weights(text: str) -> str:
    """C with `param[3]` in place of the variable that stands for it: its name is made of the weight's."""
    declared = r"const (?:mp_weights|\w+ \*const) (w\d*_\w*) = (?:\(const \w+ \*\))?(param\[.*?\]);"
    names, found = dict[str, str](), []
    for piece in re.split(rf"({declared.replace('(w', '(?:w').replace('(param', '(?:param')})", text):
        if m := re.fullmatch(declared, piece):
            assert len(m[1]) < 60
            names[m[1]] = m[2]
        else:
            found.append(re.sub(r"\bw\d*_\w*", lambda w: names.get(w[0], w[0]), piece))
    return " ".join("".join(found).split())


@needs("gcc")
@pytest.mark.parametrize("target", SOURCES)
@pytest.mark.parametrize("name", GRAPHS)
def test_hostile_names_do_not_change_the_code(name: str, target: str, tmp_path: Path) -> None:
    """Each text at each place: the list is turned from one plan to the next."""
    graph, language = GRAPHS[name](), "c" if target == "cpu" else "c++"
    want = code(SOURCES[target](with_text(graph, itertools.cycle(["plain"]).__next__)), tmp_path, language)
    assert len(want) > 5_000
    for turn in range(0, len(HOSTILE), 5):
        source = SOURCES[target](with_text(graph, itertools.cycle(HOSTILE[turn:] + HOSTILE[:turn]).__next__))
        assert code(source, tmp_path, language) == want


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_plans_with_hostile_names_build_without_warnings(compiler: str, name: str, tmp_path: Path) -> None:
    for file, text in headers("cpu"):
        (tmp_path / file).write_text(text)
    (tmp_path / "plan.c").write_text(SOURCES["cpu"](with_text(GRAPHS[name](), hostile())), "utf-8")
    flags = ("-std=gnu11", "-fPIC", "-Wcomment", "-Wall", "-Wextra", "-Werror", *flags_for(host_target()))
    for more in ((), ("-trigraphs",)):
        command = [compiler, *flags, *more, "-fsyntax-only", "plan.c"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]


@needs("g++")
def test_cuda_plans_with_hostile_names_build(tmp_path: Path) -> None:
    source = SOURCES["cuda"](with_text(mixed_graph("bf16"), hostile()))
    (tmp_path / "plan.cpp").write_text(f'#include "{HEADER}"\n{source}', "utf-8")
    command = ["g++", "-std=c++17", "-w", "-Werror=comment", "-trigraphs", "-fsyntax-only", "plan.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def test_templates_can_not_read_what_holds_text_of_a_graph() -> None:
    plan = make_plan(mixed_graph(), host_target())
    kernel = next(iter(plan.steps()))[0].kernel
    from jinja2 import TemplateRuntimeError

    assert environment().from_string("{{ k.family }}").render(k=kernel) == kernel.family
    for text in ("{{ k.op.loc }}", "{{ k['op'].name }}", "{{ k.operands[0].view.buffer.name }}", "{{ s.plan.name }}"):
        with pytest.raises(TemplateRuntimeError, match="names and paths of the user"):
            environment().from_string(text).render(k=kernel, s={"plan": plan})


def test_templates_write_no_text_of_a_graph() -> None:
    templates = sorted(HERE.glob("*/templates/*.j2"))
    assert templates
    for path in templates:
        inside = re.findall(r"\{\{.*?\}\}", path.read_text("utf-8"), re.DOTALL)
        found = [e for e in inside if re.search(r"\b(op|loc|path|summary|plan|graph|view|buffer|file)\b|\.title", e)]
        assert not found, (path.name, found)


# -- names from Python ------------------------------------------------------------------------------------------------


def test_a_class_and_its_children_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_DUMP", str(tmp_path / "a" / "dump"))
    text = "def forward(self, x):\n    return F.exp(x) * getattr(self, CHILD)\n"
    space: dict[str, Any] = {"F": F, "CHILD": "*\\ */ child"}
    exec(compile(text, "/home/*/ own; /*\\/\u202emodel?.py", "exec"), space)
    module = type("../*/ own", (nn.Module,), {"forward": space["forward"]})()
    setattr(module, space["CHILD"], nn.Parameter(np.full(4, 2, np.float32)))
    fast = mp.compile(module, mp.spec("n", 4))
    x = np.ones((3, 4), np.float32)
    np.testing.assert_allclose(fast(x), 2 * np.exp(x), rtol=1e-6)
    assert print_graph(parse_graph(fast.ir("trace"))) == fast.ir("trace")
    (dumped,) = (tmp_path / "a" / "dump").iterdir()
    assert (dumped / "plan.c").is_file() and list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "dump"]
    source = fast.source()
    call = next(i for i, line in enumerate(source.split("\n"), 1) if "/* 0: %" in line)
    assert "model_.py:2" in origin(source, call)


def test_overrides_of_a_plan_stay_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse_graph("graph g(%x: f32[4]) {\n  %y = exp(%x) : f32[4]\n  return %y\n}\n").replace(name="..")
    source = render_cpu(make_plan(graph, host_target()), "test").text
    (tmp_path / "inside").mkdir()
    (tmp_path / "plan.c").write_text(source.replace("mp_exp", "own"))
    monkeypatch.setenv("MONOPLAN_OVERRIDE", str(tmp_path / "inside"))
    assert override_text(None, graph.name, source) is None
    (tmp_path / "inside" / "plan.c").write_text(source.replace("mp_exp", "edited"))
    assert "edited" in str(override_text(None, graph.name, source))
    graph = graph.replace(name="*\\ own")
    source = render_cpu(make_plan(graph, host_target()), "test").text
    (tmp_path / "inside" / "plan.c").write_text(source.replace("mp_exp", "edited"))
    assert "edited" in str(override_text(None, graph.name, source))


@given(anything, anything)
def test_scripts_that_repeat_a_fault_hold_names_as_data(value: str, name: str) -> None:
    script = _PASS_SCRIPT.format(value=value, name=name)
    (line,) = (node for node in ast.parse(script).body if isinstance(node, ast.Assign) and "VALUE" in ast.dump(node))
    assert ast.literal_eval(line.value) == (value, name)
    plain = ast.parse(_PASS_SCRIPT.format(value="", name=""))
    assert len(plain.body) == len(ast.parse(script).body)


def test_a_kernel_is_found_by_its_code_not_by_a_comment() -> None:
    other = block_comment(["%a = exp(%x)", "static void plan_run( exp_1("]) + "\nvoid exp_0(int x)\n{\n}\n"
    wanted = "void exp_1(int x)\n{\n}\n"
    own = block_comment(["%b = exp(%a)"]) + f"\n{wanted}"
    assert function_text(f"{other}{own}\nstatic void plan_run(void)\n{{\n    exp_1(0);\n}}\n", "exp_1") == wanted


def test_lines_are_not_broken_inside_a_comment() -> None:
    for comment in ("/* a, b" + ", c" * 60 + " */", "// a, b" + ", c" * 60):
        assert wrap(f"    call(x); {comment}") == f"    call(x); {comment}"


TABLES = """\
graph tables(%x: f32[n, 4]) {
  param %p: f32[4] = "p"
  param %q: f32[4] = "q"
  %y = repeat_layers(%x, %p, %q, %p, %p, %p, %q) {count=3, carried=1, shared=0} : f32[n, 4]
    graph layer(%x: f32[n, 4], %a.b: f32[4], %a_b: f32[4]) {
      %mul = mul(%x, %a.b) : f32[n, 4]
      %add = add(%mul, %a_b) : f32[n, 4]
      return %add
    }
  return %y
}
"""


def test_names_that_differ_in_punctuation_only_are_different_tables() -> None:
    graph = parse_graph(TABLES)
    params = {"p": np.arange(4, dtype=np.float32), "q": np.full(4, 3, np.float32)}
    x = np.ones((2, 4), np.float32)
    source = render_cpu(make_plan(graph, host_target()), "test").text
    assert re.findall(r"static const int (\w+)\[\]", source) == ["table_a_b", "table_a_b_2"]
    got = build_graph_executable(graph, params, "cpu")([x])[0]
    np.testing.assert_allclose(got, interpret(graph, [x], params)[0], rtol=1e-6)


# -- IR text ----------------------------------------------------------------------------------------------------------


@given(anything, anything)
def test_locations_and_paths_survive_ir_text(path: str, file: str) -> None:
    x = Value(parse_graph(TABLES).inputs[0].type, "x")
    w = Value(parse_graph(TABLES).params[0].value.type, "w")
    from monoplan.ir.ops.elementwise import mul

    op = Op(mul, (x, w), {}, (Value(x.type, "y"),), Loc(path, file, 7))
    text = print_graph(Graph("g", (x,), (Param(w, path),), (op,), op.results), locs=True)
    again = parse_graph(text)
    assert print_graph(again, locs=True) == text
    assert again.params[0].path == path and again.ops[0].loc == Loc(path, file, 7)


@pytest.mark.parametrize(
    "attributes",
    ["window=T", "window=(n+1)//2", "window=True", "window=inf", "scale=n", "softcap=n", 'window="1"', "causal=n"],
)
def test_numbers_of_ir_text_are_numbers(attributes: str) -> None:
    """What stands in the place of a number would be a variable of the source."""
    shape = "f32[1, 2, n, 8]"
    text = f"graph g(%q: {shape}) {{\n  %y = attention(%q, %q, %q, _, _) {{{attributes}}} : {shape}\n  return %y\n}}\n"
    with pytest.raises(ParseError, match=r"is not of type|do not fit"):
        parse_graph(text)
    assert parse_graph(text.replace(f" {{{attributes}}}", " {window=3, scale=2, softcap=1.5, causal=True}"))


def test_the_count_of_a_loop_is_a_number() -> None:
    text = TABLES.replace("%x, %p, %q, %p, %p, %p, %q", "%x").replace(", %a.b: f32[4], %a_b: f32[4]", "")
    text = text.replace("%a.b", "%x").replace("%a_b", "%x")
    assert parse_graph(text)
    with pytest.raises(ParseError, match="count=T is not of type int"):
        parse_graph(text.replace("count=3", "count=T"))


@pytest.mark.parametrize("op", ["fused_norm(%x, _, _) {norm=", "linear_argmax(%x, %w, _, _, _) {norm="])
def test_the_kind_of_a_norm_is_one_of_a_list(op: str) -> None:
    line = f'%y = {op}"*/", eps=0.1, expr="x0"}} : f32[4]'
    text = f"graph g(%x: f32[4, 4], %w: f32[4, 4]) {{\n  {line}\n  return %y\n}}\n"
    with pytest.raises(ParseError, match="is not one of none, rms, layer"):
        parse_graph(text if "fused" in op else text.replace(', expr="x0"', ""))


def test_kernels_hold_no_text_of_a_graph() -> None:
    """Operands have the names that lowering gives them, whatever the graph says; other texts are words of ours."""
    plan = make_plan(with_text(mixed_graph(), hostile()), host_target())
    names = {o.name for step, _ in plan.steps() for o in (*step.kernel.operands, *step.kernel.scratch)}
    assert all(re.fullmatch(r"[a-z_]+[0-9]*", name) for name in names)
    fields = {f.name for step, _ in plan.steps() for f in dataclasses.fields(step.kernel) if f.type == "str"}
    assert fields <= {"family", "kind", "norm", "tail_norm", "epilogue", "algo", "mode"}
