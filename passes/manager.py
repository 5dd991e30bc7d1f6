"""Runs the pipeline: every pass is timed, counted, verified, and its graph kept for diffs and dumps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field

from monoplan.ir.errors import MonoplanError, VerifyError
from monoplan.ir.graph import Graph, Loc, Op, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.printer import print_op
from monoplan.ir.verifier import verify
from monoplan.passes.rebuild import change_bodies, check_fusions


@dataclass(frozen=True)
class NearMiss:
    """A rewrite that almost fired at an op, and why it did not."""

    rule: str
    op: Op
    reason: str

    @property
    def where(self) -> str:
        """The op's line and the user's place."""
        place = str(self.op.loc)
        return f"{print_op(self.op)} ({place})" if place else print_op(self.op)

    def __str__(self) -> str:
        return f"{self.rule} did not fire at {self.where}: {self.reason}"


@dataclass(frozen=True)
class Fired:
    """A rewrite that was made: the rule, what it made, and the user's place.

    A value that is made anew under another name has the name `result`, and is `part_of` the old one.
    """

    rule: str
    what: str
    loc: Loc
    result: str = ""
    part_of: str = ""


@dataclass
class Notes:
    """What a pass tells about itself while it runs."""

    rewrites: int = 0
    misses: list[NearMiss] = field(default_factory=list)
    done: list[Fired] = field(default_factory=list)

    def fired(self, rule: str, op: Op, part_of: Value | None = None) -> None:
        """Counts a rewrite; `op` is what it made or changed, its result rows of `part_of`, if that is made anew."""
        self.rewrites += 1
        self.done.append(
            Fired(rule, op.name, op.loc)
            if part_of is None
            else Fired(rule, op.name, op.loc, op.results[0].name, part_of.name)
        )

    def add(self, other: Notes) -> None:
        """Takes over what was noted elsewhere."""
        self.rewrites += other.rewrites
        self.misses += other.misses
        self.done += other.done

    def missed(self, rule: str, op: Op, reason: str) -> None:
        """Notes that a rule almost fired at an op."""
        self.misses.append(NearMiss(rule, op, reason))


@dataclass(frozen=True)
class Pass:
    """A named Graph -> Graph function with its rule in one line; `bodies`: it runs on those of scans as well."""

    name: str
    rule: str
    run: Callable[[Graph, Notes], Graph]
    bodies: bool = True

    def apply(self, graph: Graph, notes: Notes) -> Graph:
        """The graph after the pass has run on the bodies of its scans, and on itself."""

        def inside(body: Graph) -> Graph:
            own = Notes()
            changed = self.apply(body, own)
            notes.add(own)
            return changed

        loops = self.bodies and any(op.opdef.kind == "loop" for op in graph.ops)
        changed = change_bodies(graph, inside) if loops else graph
        own = Notes()
        changed = self.run(changed, own)
        notes.add(own)
        return changed


@dataclass(frozen=True)
class Stage:
    """The graph after a pass, how many rewrites it made, how long it took, and its near misses."""

    name: str
    rule: str
    graph: Graph
    rewrites: int
    seconds: float
    misses: tuple[NearMiss, ...]
    changed: bool
    done: tuple[Fired, ...] = ()


_LEAVE_OUT = "this is a bug of the pass; `options={'passes': ...}` can leave it out"


def run_passes(
    graph: Graph, pipeline: Sequence[Pass], stop_after: str | None = None, *, check: bool = False
) -> list[Stage]:
    """All stages, the traced graph first. A failing pass is named; `check` tests every fusion by graph theory too."""
    stages = [Stage("trace", "the graph as forward wrote it", graph, 0, 0.0, (), True)]
    checked: set[Op] = set()  # ops whose types a former verification has seen
    for p in pipeline:
        notes = Notes()
        start = time.perf_counter()
        try:
            new = p.apply(graph, notes)
            if new is not graph:
                verify(new, checked)
            if check and p.name.startswith("fuse-"):  # other passes copy views and constants, which is no fusion
                check_fusions(graph, new, p.name)
        except VerifyError as error:
            what = f"pass {p.name} made a wrong graph: {error.what}"
            raise VerifyError(what, where=error.where, why=error.why, fix=_LEAVE_OUT) from error
        except MonoplanError as error:
            what = f"pass {p.name}: {error.what}"
            raise type(error)(what, where=error.where, why=error.why, fix=error.fix) from error
        except Exception as error:
            raise VerifyError(f"pass {p.name} failed: {type(error).__name__}: {error}", fix=_LEAVE_OUT) from error
        seconds = time.perf_counter() - start
        misses, done = tuple(notes.misses), tuple(notes.done)
        stages.append(Stage(p.name, p.rule, new, notes.rewrites, seconds, misses, new is not graph, done))
        graph = new
        if p.name == stop_after:
            break
    return stages
