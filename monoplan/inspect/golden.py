"""Golden results of a compiled module: outputs, IR and source of a call, kept in a folder and compared later.

golden.json   types, tolerances, versions, hashes of the inputs, of the IR after each pass and of each kernel
outputs.npz   what the plan gave
plan.ir       the IR after all passes
inputs.npz    what it was called with (for the command line; a test makes its inputs anew)
"""

from __future__ import annotations

import difflib
import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.inspect.verify import Subject
from monoplan.inspect.walk import roundings
from monoplan.ir.errors import ArgumentError, MonoplanError, writing
from monoplan.ir.printer import print_graph
from monoplan.ir.tolerances import EPSILON, UNITS, compare
from monoplan.ir.types import as_dtype

Array = np.ndarray[Any, Any]
FORMAT = 1
DIFF_LINES = 40
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


class GoldenError(MonoplanError, AssertionError):
    """A result that is not the golden one, or a golden that is missing."""


@dataclass(frozen=True)
class Golden:
    """One golden folder."""

    folder: Path

    def record(self, subject: Subject, *, seed: int | None = None, inputs: bool = False, about: Any = None) -> Path:
        """Runs the call and keeps what it gives."""
        outputs = subject.run()
        rough = roundings(subject.final)
        rows = [
            {"name": name, "dtype": v.type.dtype.name, "shape": list(a.shape), **_tolerance(v.type.dtype, rough.get(v))}
            for name, v, a in zip(subject.output_names, subject.final.outputs, outputs, strict=True)
        ]
        meta = {
            "format": FORMAT,
            "plan": subject.name,
            "target": subject.target,
            "symbols": subject.symbols,
            "seed": seed,
            "recorded": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": _versions(),
            "inputs": _input_hashes(subject),
            "outputs": rows,
            "stages": _stage_hashes(subject),
            "kernels": _kernel_hashes(subject),
            "source": _source_hash(subject),
            "about": about,
        }
        with writing("the golden", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            _save(self.folder / "outputs.npz", outputs)
            if inputs:
                _save(self.folder / "inputs.npz", subject.inputs)
            (self.folder / "plan.ir").write_text(print_graph(subject.final), "utf-8")
            (self.folder / "golden.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
        return self.folder

    def meta(self) -> dict[str, Any]:
        """What golden.json says; raises when there is none."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "golden.json").read_text("utf-8"))
        except FileNotFoundError:
            raise GoldenError(
                f"there is no golden in {self.folder}",
                fix="record it: pytest --golden-update, or monoplan golden record",
            ) from None
        except ValueError as error:
            raise GoldenError(f"{self.folder / 'golden.json'} is damaged", why=str(error)) from None
        if found.get("format") != FORMAT:
            raise GoldenError(f"{self.folder} has another format", fix="record it again")
        return found

    def check(self, subject: Subject, *, ir: bool = False, source: bool = False) -> None:
        """Raises GoldenError with a report unless the outputs are the golden ones (and the IR and source, if asked)."""
        meta = self.meta()
        problems = self._compare(subject, meta)
        if problems:
            lines = [f"{subject.name} does not give its golden results ({self.folder})", *problems]
            lines += self._since(subject, meta)
            lines += ["bisect:", *("  " + line for line in str(_bisected(subject)).splitlines())]
            raise GoldenError("\n  ".join(lines))
        if ir:
            self._check_ir(subject)
        if source and meta["source"] != _source_hash(subject):
            changed = self._since(subject, meta)
            if meta["kernels"] == _kernel_hashes(subject):
                changed.append("no kernel changed, but the plan function that calls them did")
            raise GoldenError(
                "\n  ".join([f"{subject.name} has another source than its golden ({self.folder})", *changed])
            )

    def _compare(self, subject: Subject, meta: Mapping[str, Any]) -> list[str]:
        rows = meta["outputs"]
        if len(rows) != len(subject.final.outputs):
            return [f"it has {len(subject.final.outputs)} outputs, the golden {len(rows)}"]
        if meta["inputs"] != _input_hashes(subject):
            return ["the inputs are not those that the golden was recorded with: fix their seed, or record again"]
        recorded = self._stored("outputs.npz", len(rows))
        problems = []
        for row, got, want in zip(rows, subject.run(), recorded, strict=True):
            dtype = as_dtype(row["dtype"])
            if got.dtype != dtype.numpy or list(got.shape) != row["shape"]:
                now = f"{as_dtype(got.dtype)}{list(got.shape)}"
                problems.append(f"{row['name']}: now {now}, recorded {row['dtype']}{row['shape']}")
                continue
            difference = compare(got, want, dtype, "model", epsilon=row["epsilon"])
            if not difference.ok:
                problems.append(f"{row['name']}: {difference}")
        return problems

    def _stored(self, name: str, count: int) -> list[Array]:
        """The arrays of a file of the golden, in their order."""
        from monoplan.cli.model_argument import load_npz

        try:
            found = load_npz(self.folder / name)
            return [found[str(i)] for i in range(count)]
        except (ArgumentError, KeyError) as error:
            why = error.why if isinstance(error, ArgumentError) else f"it has no array {error}"
            raise GoldenError(f"{self.folder / name} is missing or damaged", why=why, fix="record it again") from None

    def _since(self, subject: Subject, meta: Mapping[str, Any]) -> list[str]:
        """What changed since the golden was recorded."""
        found = [f"recorded {meta['recorded']} with {', '.join(f'{k} {v}' for k, v in meta['versions'].items())}"]
        now = _versions()
        if other := [f"{k} {v}" for k, v in now.items() if meta["versions"].get(k) != v]:
            found.append(f"now with {', '.join(other)}")
        before, after = meta["stages"], _stage_hashes(subject)
        if [n for n, _ in before] != [n for n, _ in after]:
            found.append("the passes are not the same as then")
        else:
            first = next((i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b), None)
            if first is not None:
                what = "the traced graph" if first == 0 else f"the graph after pass {first}, {after[first][0]},"
                found.append(f"{what} is not the same as then")
        kernels = _kernel_hashes(subject)
        changed = sorted(k for k in set(kernels) | set(meta["kernels"]) if kernels.get(k) != meta["kernels"].get(k))
        if changed:
            found.append(f"kernels whose source changed: {', '.join(changed)}")
        return found

    def _check_ir(self, subject: Subject) -> None:
        try:
            old = (self.folder / "plan.ir").read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            path = self.folder / "plan.ir"
            raise GoldenError(f"{path} is missing or damaged", why=str(error), fix="record it again") from None
        new = print_graph(subject.final).splitlines()
        lines = list(difflib.unified_diff(old, new, "golden", "now", lineterm="", n=1))
        if lines:
            shown = lines[:DIFF_LINES] + (
                [f"… {len(lines) - DIFF_LINES} more lines"] if len(lines) > DIFF_LINES else []
            )
            raise GoldenError("\n  ".join([f"{subject.name} has another IR than its golden ({self.folder})", *shown]))

    def stored_inputs(self, count: int, dtypes: Sequence[Any]) -> list[Array] | None:
        """The recorded inputs in their own types; None if they were not kept."""
        if not (self.folder / "inputs.npz").exists():
            return None
        found = self._stored("inputs.npz", count)
        return [a.astype(dtype, copy=False) for a, dtype in zip(found, dtypes, strict=True)]


def _bisected(subject: Subject) -> Any:
    import tempfile

    from monoplan.inspect.bisect import bisect

    try:
        return bisect(subject, Path(tempfile.mkdtemp(prefix="monoplan-bisect-")))
    except MonoplanError as error:
        return f"bisect failed: {error.what}"


def _tolerance(dtype: Any, epsilon: float | None) -> dict[str, Any]:
    if not dtype.is_float:
        return {"epsilon": None, "relative": 0.0, "absolute": 0.0}
    unit = max(EPSILON[dtype.name], epsilon or 0.0)
    relative, absolute = UNITS["model"]
    return {"epsilon": unit, "relative": relative * unit, "absolute": absolute * unit}


def _versions() -> dict[str, str]:
    from monoplan import __version__

    return {
        "monoplan": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _input_hashes(subject: Subject) -> list[str]:
    return [
        _sha(str(a.dtype).encode() + repr(a.shape).encode() + np.ascontiguousarray(a).tobytes()) for a in subject.inputs
    ]


def _stage_hashes(subject: Subject) -> list[list[str]]:
    return [[s.name, _sha(print_graph(s.graph).encode())] for s in subject.stages]


def _kernel_hashes(subject: Subject) -> dict[str, str]:
    if subject.executable is None:
        return {}
    built = subject.executable.text
    # A kernel of an edited source (MONOPLAN_OVERRIDE) is not where it was: then the whole text stands for it.
    texts = {f.name: f.text if f.text in built else built for f in subject.executable.source.functions}
    return {name: _sha(_code(text).encode()) for name, text in texts.items()}


def _source_hash(subject: Subject) -> str:
    return "" if subject.executable is None else _sha(_code(subject.executable.text).encode())


def _code(source: str) -> str:
    """C or CUDA without comments: they hold paths and lines, which differ from one checkout to another."""
    return _COMMENT.sub("", source)


def _save(path: Path, arrays: Sequence[Array]) -> None:
    named: dict[str, Any] = {str(i): storable(a) for i, a in enumerate(arrays)}
    np.savez_compressed(path, **named)


def storable(a: Array) -> Array:
    """Half floats as f32, which holds them exactly: npz knows no bf16."""
    return a.astype(np.float32) if a.dtype.itemsize == 2 and a.dtype.kind not in "iu" else a


@dataclass
class GoldenFixture:
    """What the pytest fixture gives: `golden.check(fast, x)` compares, or records with --golden-update."""

    folder: Path
    update: bool
    test: str  # its id in the session
    taken: dict[Path, str]  # folders that tests of the session have used, and whose they are
    count: int = 0

    def check(
        self, fast: Any, *args: Any, ir: bool = False, source: bool = False, seed: int | None = None, **kwargs: Any
    ) -> None:
        """The call's outputs must be the golden ones; with `ir` and `source` those must not have changed either."""
        self.count += 1
        name = self.folder if self.count == 1 else self.folder.with_name(f"{self.folder.name}_{self.count}")
        self._take(name)
        subject = fast.subject(*args, **kwargs)
        golden = Golden(name)
        if self.update:
            golden.record(subject, seed=seed)
        else:
            golden.check(subject, ir=ir, source=source)

    def _take(self, folder: Path) -> None:
        """Raises if the folder is another test's: `test_x[1]` and `test_x_1` have the same, and would overwrite it."""
        owner = self.taken.setdefault(folder, self.test)
        if owner != self.test:
            raise GoldenError(
                "two tests have the same golden folder",
                where=folder,
                why=f"{owner} and check number {self.count} of {self.test} are both kept there",
                fix="rename one of the tests, or give its parameters other ids; then record both with --golden-update",
            )


__all__ = ["Golden", "GoldenError", "GoldenFixture", "storable"]
