"""The floors of the architecture: no import runs upward, nothing imports ctypes, faces import lightly."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each package, and those of ours that it may import besides itself.
FLOORS: dict[str, set[str]] = {
    "ir": set(),
    "frontend": {"ir"},
    "passes": {"ir"},
    "codegen": {"ir"},
    "runtime": {"codegen", "ir"},
    "models": {"frontend", "runtime", "ir", "codegen"},
}
FILES = [(package, path) for package in FLOORS for path in sorted((ROOT / package).rglob("*.py"))]
FACE = [p for place in (".", "nn", "cli", "inspect", "serve") for p in sorted((ROOT / "monoplan" / place).glob("*.py"))]
EVERYTHING = [*(path for _, path in FILES), *FACE, *sorted((ROOT / "tests").rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that a file imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize(("package", "path"), FILES, ids=[str(p.relative_to(ROOT)) for _, p in FILES])
def test_no_import_runs_upward(package: str, path: Path) -> None:
    allowed = FLOORS[package] | {package}
    for line, name in imports(path):
        assert not name.startswith("."), f"{path}:{line}: {name} is relative; write `from monoplan.…`"
        parts = name.split(".")
        assert parts[0] not in FLOORS, f"{path}:{line}: {name} would be a second module; import monoplan.{name}"
        if parts[0] == "monoplan":
            assert len(parts) > 1 and parts[1] in allowed, f"{path}:{line}: {package} must not import {name}"


def test_no_ctypes() -> None:
    for path in EVERYTHING:
        for line, name in imports(path) if "ctypes" in path.read_text(encoding="utf-8") else ():
            assert name.split(".")[0] != "ctypes", f"{path}:{line} imports {name}: cffi is the way to C here"


def module_name(path: Path) -> str:
    parts = path.resolve().relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "monoplan" else ("monoplan", *parts))
    return name.removesuffix(".__init__")


def test_no_imports_in_circles() -> None:
    """Of two files at most one imports the other when it is loaded, however long the way around."""
    modules = {module_name(path): path for path in (*(p for _, p in FILES), *FACE)}
    graph = networkx.DiGraph()
    for name, path in modules.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = (f"{node.module}.{alias.name}" for alias in node.names)
                graph.add_edges_from((name, t if t in modules else node.module) for t in targets)
    circles = [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert circles == [] and graph.number_of_edges() > 500


def test_the_walk_finds_imports() -> None:
    """A check of the check: it sees this file's own imports and every package."""
    found = {name for _, name in imports(Path(__file__))}
    assert {"ast", "pathlib.Path"} <= found and {package for package, _ in FILES} == set(FLOORS)
    assert len(EVERYTHING) > len(FILES) > 30


def test_import_is_light() -> None:
    """`import monoplan` and its layers load neither cffi, CuPy, networkx, a tokenizer nor a loader."""
    heavy = ["cffi", "cupy", "networkx", "jinja2", "tokenizers", "safetensors", "gguf", "hypothesis"]
    code = f"import sys, monoplan, monoplan.nn.functional; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"
