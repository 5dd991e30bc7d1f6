"""Golden results of a compiled module: outputs, IR and source of a call, kept in a folder and compared later.

golden.json   types, tolerances, versions; digests of inputs and weights, of the IR after each pass and of each kernel
outputs.npz   what the plan gave
plan.ir       the IR after all passes, with the user's lines
inputs.npz    what it was called with (for the command line; a test makes its inputs anew)
"""

from __future__ import annotations

import difflib
import hashlib
import json
import linecache
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.inspect.verify import Subject
from monoplan.inspect.walk import compared_type, roundings, storable
from monoplan.ir.errors import ArgumentError, MonoplanError, writing
from monoplan.ir.graph import all_ops, definitions
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.printer import print_graph
from monoplan.ir.tolerances import EPSILON, UNITS, compare
from monoplan.ir.types import Array, as_dtype

FORMAT = 1
DIFF_LINES = 40
SAMPLED = 8  # elements of each input and weight that are kept, to say how far it moved
NAMED = 6  # inputs or weights that a report names
_LOC = re.compile(r' @ ("(?:[^"\\]|\\.)*") ("(?:[^"\\]|\\.)*"):(\d+)$')
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


class GoldenError(MonoplanError, AssertionError):
    """A result that is not the golden one, or a golden that is missing."""


@dataclass(frozen=True)
class Golden:
    """One golden folder; `command` is what records it anew."""

    folder: Path
    command: str = "pytest --golden-update, or monoplan golden record"

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
            "inputs": [_digest(a) for a in subject.inputs],
            "input_prints": {v.name: _fingerprint(a) for v, a in _named_inputs(subject)},
            "weights": _weights(subject),
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
            (self.folder / "plan.ir").write_text(print_graph(subject.final, locs=True), "utf-8")
            (self.folder / "golden.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
        return self.folder

    def meta(self) -> dict[str, Any]:
        """What golden.json says; raises when there is none."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "golden.json").read_text("utf-8"))
        except FileNotFoundError:
            raise GoldenError(f"there is no golden in {self.folder}", fix=f"record it: {self.command}") from None
        except ValueError as error:
            path = self.folder / "golden.json"
            raise GoldenError(f"{path} is damaged", why=str(error), fix=f"record it again: {self.command}") from None
        if found.get("format") != FORMAT:
            raise GoldenError(f"{self.folder} has another format", fix=f"record it again: {self.command}")
        return found

    def check(self, subject: Subject, *, ir: bool = False, source: bool = False) -> None:
        """Raises GoldenError with a report unless the outputs are the golden ones (and the IR and source, if asked)."""
        meta = self.meta()
        problems = self._compare(subject, meta)
        if problems:
            lines = [*problems, *self.changes(subject, meta), *self._since(subject, meta)]
            if meta["inputs"] == [_digest(a) for a in subject.inputs]:
                lines += ["bisect:", *("  " + line for line in str(_bisected(subject)).splitlines())]
            raise self._error(f"{subject.name} does not give its golden results", lines)
        if ir and (difference := self._ir_diff(subject)):
            raise self._error(f"{subject.name} has another IR than its golden", difference)
        if source and meta["source"] != _source_hash(subject):
            lines = self._since(subject, meta)
            if meta["kernels"] == _kernel_hashes(subject):
                lines.append("no kernel changed, but the plan function that calls them did")
            raise self._error(f"{subject.name} has another source than its golden", lines)

    def _error(self, what: str, lines: Sequence[str]) -> GoldenError:
        return GoldenError("\n  ".join([f"{what} ({self.folder})", *lines]), fix=f"if it is meant: {self.command}")

    def changes(self, subject: Subject, meta: Mapping[str, Any]) -> list[str]:
        """Which of weights, inputs and IR are not as recorded and how far they moved, with the diff of the IR."""
        weights = _moved(meta["weights"], _weights(subject)) if "weights" in meta else None
        now = {v.name: _fingerprint(a) for v, a in _named_inputs(subject)}
        inputs = _moved(meta["input_prints"], now) if "input_prints" in meta else []
        if meta["inputs"] != [_digest(a) for a in subject.inputs] and not inputs:
            inputs = ["which is not known: they were recorded without their values"]
        difference = self._ir_diff(subject)
        parts = {"weights": weights or [], "inputs": inputs, "IR": difference}
        other, same = ([n for n, found in parts.items() if bool(found) is moved] for moved in (True, False))
        if weights is None:
            same.remove("weights")
        kept = f"; as recorded: {', '.join(same)}" if same else ""
        lines = [f"changed: {', '.join(other)}{kept}" if other else f"only numbers changed{kept}"]
        if weights is None:
            lines.append("whether the weights changed is not known: the golden was recorded without them")
        for name in ("inputs", "weights"):
            found = parts[name]
            if found:
                more = [f"  … {len(found) - NAMED} more"] if len(found) > NAMED else []
                lines += [f"{name} that changed:", *(f"  {line}" for line in found[:NAMED]), *more]
        return lines + ([f"the IR, {self.folder / 'plan.ir'} → now:", *difference] if difference else [])

    def _compare(self, subject: Subject, meta: Mapping[str, Any]) -> list[str]:
        rows = meta["outputs"]
        if len(rows) != len(subject.final.outputs):
            return [f"it has {len(subject.final.outputs)} outputs, the golden {len(rows)}"]
        if meta["inputs"] != [_digest(a) for a in subject.inputs]:
            return ["the inputs are not those that the golden was recorded with: fix their seed, or record again"]
        recorded = self._stored("outputs.npz", len(rows))
        problems, made = [], definitions(subject.final)
        for row, v, got, want in zip(rows, subject.final.outputs, subject.run(), recorded, strict=True):
            dtype = as_dtype(row["dtype"])
            if got.dtype != dtype.numpy or list(got.shape) != row["shape"]:
                now = f"{as_dtype(got.dtype)}{list(got.shape)}"
                problems.append(f"{row['name']}: now {now}, recorded {row['dtype']}{row['shape']}")
                continue
            difference = compare(got, want, compared_type(made.get(v), v), "model", epsilon=row["epsilon"])
            if not difference.ok:
                how = f"at most {difference.max_abs:.3g} or {100 * difference.max_rel:.3g} % off"
                problems.append(f"{row['name']}: {difference}; {how}")
        return problems

    def _stored(self, name: str, count: int) -> list[Array]:
        """The arrays of a file of the golden, in their order."""
        from monoplan.cli.model_argument import load_npz

        try:
            found = load_npz(self.folder / name)
            return [found[str(i)] for i in range(count)]
        except (ArgumentError, KeyError) as error:
            why = error.why if isinstance(error, ArgumentError) else f"it has no array {error}"
            path = self.folder / name
            raise GoldenError(
                f"{path} is missing or damaged", why=why, fix=f"record it again: {self.command}"
            ) from None

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

    def _ir_diff(self, subject: Subject) -> list[str]:
        """The lines of the IR that changed, each with its place; those of now also with the user's text."""
        path = self.folder / "plan.ir"
        try:
            old = path.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            fix = f"record it again: {self.command}"
            raise GoldenError(f"{path} is missing or damaged", why=str(error), fix=fix) from None
        new = print_graph(subject.final, locs=True).splitlines()
        texts = [[_LOC.sub("", line) for line in lines] for lines in (old, new)]
        files = {str(op.loc.short.file): op.loc.file for op in all_ops(subject.final)}
        shown: list[str] = []
        for kind, a, b, c, d in difflib.SequenceMatcher(None, texts[0], texts[1], autojunk=False).get_opcodes():
            if kind != "equal":
                shown += [f"-{texts[0][i]}{_place(old[i], 'then ')}" for i in range(a, b)]
                shown += [f"+{texts[1][i]}{_place(new[i], '', files)}" for i in range(c, d)]
        return shown if len(shown) <= DIFF_LINES else [*shown[:DIFF_LINES], f"… {len(shown) - DIFF_LINES} more lines"]

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


def _digest(a: Array) -> str:
    return _sha(str(a.dtype).encode() + repr(a.shape).encode() + np.ascontiguousarray(a).tobytes())


def _fingerprint(a: Array) -> dict[str, Any]:
    """What tells an array from another one, and how far apart they are."""
    flat = a.reshape(-1)
    sample = flat[np.linspace(0, flat.size - 1, min(SAMPLED, flat.size)).astype(int)].astype(np.float64)
    values = flat.astype(np.float32)
    rms = float(np.sqrt(np.vdot(values, values) / max(flat.size, 1)))
    return {
        "digest": _digest(a),
        "type": f"{as_dtype(a.dtype)}{list(a.shape)}",
        "rms": float(f"{rms:.6g}"),
        "sample": [float(f"{x:.9g}") for x in sample],
    }


def _weights(subject: Subject) -> dict[str, Any]:
    return {p.path: _fingerprint(subject.params(p.path)) for p in subject.traced.params}


def _named_inputs(subject: Subject) -> list[tuple[Any, Array]]:
    return list(zip(subject.traced.inputs, subject.inputs, strict=True))


def _moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Arrays that are not the recorded ones, in words."""
    found = []
    for name in dict.fromkeys([*old, *new]):
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            found.append(f"{name}: {'gone' if b is None else 'new'}")
        elif a["type"] != b["type"]:
            found.append(f"{name}: {a['type']} → {b['type']}")
        elif a["digest"] != b["digest"]:
            steps = [abs(x - y) for x, y in zip(a["sample"], b["sample"], strict=True)]
            far = f"{max(steps):.3g} in the sampled elements" if any(steps) else "none in the sampled elements"
            found.append(f"{name}: {b['type']}, rms {a['rms']:.6g} → {b['rms']:.6g}, largest change {far}")
    return found


def _place(line: str, prefix: str, files: Mapping[str, str] | None = None) -> str:
    """A line's place for the eye, below it; with `files` also the text that is there now."""
    match = _LOC.search(line)
    if match is None:
        return ""
    path, file, number = json.loads(match[1]), json.loads(match[2]), int(match[3])
    text = linecache.getline(files.get(file, file), number).strip() if files else ""
    where = f"{file}:{number}" + (f" in {path}" if path else "")
    return f"\n        # {prefix}{where}" + (f": {text}" if text else "")


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


@dataclass
class GoldenFixture:
    """What the pytest fixture gives: `golden.check(fast, x)` compares, or records with --golden-update."""

    folder: Path
    update: bool
    test: str  # its id in the session
    taken: dict[Path, str] = field(repr=False)  # folders that tests of the session have used, and whose they are
    command: str  # what records the goldens of this test
    count: int = 0

    def check(
        self, fast: Any, *args: Any, ir: bool = False, source: bool = False, seed: int | None = None, **kwargs: Any
    ) -> None:
        """The call's outputs must be the golden ones; with `ir` and `source` those must not have changed either."""
        __tracebackhide__ = True  # pytest shows the line of the test
        self.count += 1
        name = self.folder if self.count == 1 else self.folder.with_name(f"{self.folder.name}_{self.count}")
        subject = fast.subject(*args, **kwargs)
        golden = Golden(name, self.command)
        try:
            self._take(name)
            if self.update:
                golden.record(subject, seed=seed)
            else:
                golden.check(subject, ir=ir, source=source)
        except GoldenError as error:
            raise error.with_traceback(None) from None

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


__all__ = ["Golden", "GoldenError", "GoldenFixture"]
