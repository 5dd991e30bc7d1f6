"""Tunes the constants of decode kernels on the time of the whole token: what one likes depends on its neighbours.

Ring, slices, warps, grid and padding of every row product are searched, and the padding of attention, which decides
whose blocks may sit beside its own: first each product's candidates by themselves, then the best of them together by
simulated annealing. Of products of the same shape one is searched for. Candidates are built by threads beforehand,
one small source each; the winner is kept as a fact of the cache, by device and source, and the next compile of that
source uses it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from monoplan.codegen.cuda.launches import Launch, Variant
from monoplan.codegen.cuda.linear import LinearVariants
from monoplan.codegen.cuda.render import CudaSource, Renderer, render_cuda, with_headers
from monoplan.codegen.cuda.schedule import CudaAttention, CudaLinear, RowSchedule, Tuning, row_shared
from monoplan.codegen.kernels import Attention, Linear
from monoplan.codegen.plan import Plan, Step
from monoplan.runtime.build import facts
from monoplan.runtime.build.background import side_by_side
from monoplan.runtime.cuda.build import unpack
from monoplan.runtime.cuda.device import Module

Constants = dict[str, int]
PADS = (0, 0, 8, 16, 32, 48, 64, 80, 96, 112)  # KB
EACH = 40  # candidates of each kernel
BEST = 8  # of them that the search goes on with
_POWERS = (1, 2, 4, 8, 16)
SURVEY = 0.5  # part of the time for finding them


def tuning_key(device_name: str, source: str) -> str:
    """What a tuning belongs to: the device and the untuned source, which holds all shapes."""
    return json.dumps([device_name, hashlib.sha256(source.encode()).hexdigest()])


def recall_tuning(device_name: str, source: str) -> Tuning | None:
    """The constants that were found for this device and source."""
    fact = facts.recall("cuda-tuning", tuning_key(device_name, source))
    return None if fact is None else dict(fact["steps"])  # type: ignore[call-overload]


def tuned_source(plan: Plan, version: str, device_name: str) -> CudaSource:
    """The source of a plan, with the constants that were found for it on a device, if there are any."""
    plain = render_cuda(plan, version)
    tuning = recall_tuning(device_name, plain.text)
    return plain if tuning is None else replace(render_cuda(plan, version, tuning), untuned=plain.text)


def candidates(k: Linear, row: RowSchedule, shared: int) -> Iterator[Constants]:
    """Constants worth trying: 60 to 220 KB in flight on an SM, 14 to 100 of them (or all) before the dependency, slices
    of whole 512-byte pieces (or tiles) where K allows it; the next kernel at once or when the last weights are asked
    for. A small weight in tiles may be less than that, all of it in flight."""
    pieces, tiles = k.depth * k.format.bits // 128, -(-k.depth // 256)
    sizes = ((7, 8, 14, 16), (1, 2, 4, 7, 8, 14, 16), (1, 2, 4)) if k.format.tile else ((8, 16), _POWERS, (2, 4, 8))
    for warps, slices, batch, ring in product(*sizes, (1, 2, 3, 4, 6, 8)):
        if warps % slices:
            continue
        made = replace(row, warps=warps, slices=slices, batch=batch, ring=ring, early=ring, pad=0)
        held = row_shared(k, made)
        if k.format.tile:
            each = -(-tiles // slices)
            idle = each > 8 or each % batch or slices * each > 1.2 * tiles
        else:
            vectors = made.vectors(pieces * 16)
            idle = vectors > 8 or batch * vectors > 16 or slices * vectors * 32 / pieces > 1.4
        if idle or not (40 if k.format.tile else 60) << 10 <= held <= min(220 << 10, shared - 1024):
            continue
        for blocks, early, late in product((1, 2 if warps == 16 else 3), {max(1, ring // 2), ring}, (0, ring)):
            for gentle in (0, *(n for n in range(1, early) if 14 << 10 <= n * held // ring <= 100 << 10)):
                yield {
                    "warps": warps,
                    "slices": slices,
                    "batch": batch,
                    "ring": ring,
                    "early": early,
                    "gentle": gentle,
                    "blocks": blocks,
                    "late": late,
                }


class Tuner:
    """One search: `measure` gives the milliseconds of a token with the executable's current variants.

    `values` are the sizes that it measures: what they do not run is left alone.
    """

    def __init__(
        self,
        executable: Any,
        measure: Callable[[], float],
        seed: int = 0,
        start: Tuning | None = None,
        values: Mapping[str, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.executable, self.measure, self.start = executable, measure, start or {}
        self.values, self.progress = values, progress
        self.plan: Plan = executable.plan
        self.random = random.Random(seed)
        self.steps: dict[int, Step] = {
            s.number: s
            for s, _ in self.plan.steps()
            if isinstance(s.kernel, Linear) and isinstance(s.schedule, CudaLinear) and s.schedule.row is not None
        }
        self.alike = self._alike()
        self.attention: dict[int, Constants] = {  # of it only the padding of the decode kernel is tuned
            s.number: {"pad": s.schedule.decode.pad, **self.start.get(str(s.number), {})}
            for s, _ in self.plan.steps()
            if isinstance(s.kernel, Attention) and isinstance(s.schedule, CudaAttention) and s.schedule.decode
            if self._runs(s.number, "decode")
        }
        self.pools: dict[int, list[Constants]] = {}
        self.built: dict[tuple[int, str], tuple[Variant, tuple[str, ...], bytes]] = {}

    def _runs(self, number: int, name: str) -> bool:
        """Whether a step runs this variant for the sizes that are measured."""
        if self.values is None:
            return True
        return next((v.name for v in self.executable.source.variants[number] if v.fits(self.values)), "") == name

    def _alike(self) -> dict[int, list[int]]:
        """Products of the same shape by the one that runs most often: others get the constants found for it."""
        counts, groups = {s.number: count for s, count in self.plan.steps()}, dict[Any, list[int]]()
        for n, s in self.steps.items():
            k = s.kernel
            assert isinstance(k, Linear) and isinstance(s.schedule, CudaLinear)
            groups.setdefault((k.epilogue, k.norm, k.depth, k.columns, k.format.name, s.schedule.row), []).append(n)
        return {max(found, key=lambda n: counts[n]): found for found in groups.values()}

    def pool(self, number: int) -> list[Constants]:
        """Candidates of a step."""
        step = self.steps[number]
        k, row = step.kernel, step.schedule.row  # type: ignore[attr-defined]
        assert isinstance(k, Linear)
        found = list(candidates(k, row, self.plan.target.shared))
        self.random.shuffle(found)
        # Half of them only change what is in flight, and when: that decides most.
        same = {name: value for name, value in _plain(row).items() if name in ("warps", "slices", "batch", "blocks")}
        near = [c for c in found if c["early"] == c["ring"] and all(c[name] == value for name, value in same.items())]
        found = near[: EACH // 2] + [c for c in found if c not in near]
        small = k.depth * k.columns < 1 << 24
        for c in found:
            c["grid"] = self.random.choice((row.grid, row.grid - row.grid % 32)) if small else row.grid
        return [{**_plain(row), **self.start.get(str(number), {})}, *found[:EACH]]

    def build(self, number: int, constants: Constants) -> None:
        """Compiles one candidate."""
        key = (number, json.dumps({k: v for k, v in constants.items() if k != "pad"}, sort_keys=True))
        if key in self.built:
            return
        step = self.steps[number]
        renderer = Renderer(self.plan, {str(number): {**constants, "pad": 0}})
        assert isinstance(step.kernel, Linear)
        variant = LinearVariants(renderer, step.kernel, step.schedule).one_row()  # type: ignore[arg-type]
        functions = tuple(renderer.functions.values())
        text = with_headers(functions)
        binary = self.executable.device.build(text).binary.read_bytes()
        self.built[key] = (variant, tuple(f.name for f in functions), binary)

    def load(self, key: tuple[int, str]) -> tuple[Launch, ...]:
        """A candidate's launches; its functions get names of their own in the executable."""
        variant, names, binary = self.built[key]
        tag = f"@{hashlib.sha256(binary).hexdigest()[:12]}"
        if names[0] + tag not in self.executable.functions:
            module = Module(unpack(binary), self.plan.target.shared)
            self.executable.functions.update({name + tag: module[name] for name in names})
        return tuple(replace(a, function=a.function + tag) for a in variant.actions if isinstance(a, Launch))

    def use(self, tuning: Mapping[int, Constants]) -> None:
        """Makes the executable run these candidates."""
        variants = dict(self.executable.source.variants)
        for number, constants in tuning.items():
            if number in self.attention:
                variants[number] = tuple(_padded(v, constants["pad"]) for v in variants[number])
                continue
            key = (number, json.dumps({k: v for k, v in constants.items() if k != "pad"}, sort_keys=True))
            first, *rest = self.load(key)
            padded = replace(first, shared=first.shared + constants.get("pad", 0))
            others = [v for v in variants[number] if v.name != "row"]
            variants[number] = (replace(self.built[key][0], actions=(padded, *rest)), *others)
        self.executable.variants = variants

    def time(self, tuning: Mapping[int, Constants]) -> float:
        self.use(tuning)
        try:
            return self.measure()
        except Exception:  # too much shared memory for this pair of constants
            return math.inf

    def survey(
        self, current: dict[int, Constants], now: float, goes_on: Callable[[], bool]
    ) -> tuple[dict[int, Constants], float]:
        """Times each product's candidates, one product after the other, and keeps the best few of them for the search.

        Gives the best constants of each, where they are better than what was there, and their time.
        """
        for n in self.alike:
            times: list[tuple[float, int, Constants]] = []
            for c in self.pools[n][1:]:
                if not goes_on():
                    return current, now
                for pad in sorted({current[n].get("pad", 0), 0}, reverse=True):  # it may be too much beside this one
                    trial = {**c, "pad": pad}
                    if (took := self.time({**current, n: trial})) < math.inf:
                        times.append((took, len(times), trial))
                        break
            times.sort()
            self.pools[n] = [self.pools[n][0], *(c for _, _, c in times[:BEST])]
            if times and times[0][0] < now * 0.9995:
                better = {**current, n: times[0][2]}
                if (again := self.time(better)) < now * 0.9995:
                    current, now = better, max(times[0][0], again)
        return current, now

    def run(self, seconds: float) -> dict[int, Constants]:
        """The best constants found in about that time, builds included."""
        start = time.monotonic()
        self.pools = {n: self.pool(n) for n in self.alike}
        jobs = [(n, c) for n, cs in self.pools.items() for c in cs]
        side_by_side(lambda job: self.build(*job), jobs, os.cpu_count() or 4, daemon=False)
        current = {n: dict(cs[0]) for n, cs in self.pools.items()} | self.attention
        begun = time.monotonic()
        end = max(start + seconds, begun + 0.25 * seconds)

        def left() -> float:
            """The part of the search's time that is left."""
            at = time.monotonic()
            if self.progress is not None:
                self.progress(int(1e3 * (at - start)), int(1e3 * (end - start)))
            return (end - at) / max(end - begun, 1e-6)

        good, best = self.survey(current, self.time(current), lambda: left() > 1 - SURVEY)
        current, now = good, best
        while (part := left()) > 0:
            trial = dict(current)
            for _ in range(self.random.choice((1, 1, 2, 3))):
                n = self.random.choice(list(trial))
                if n in self.attention or self.random.random() < 0.4:
                    trial[n] = {**trial[n], "pad": self.random.choice(PADS) << 10}
                else:
                    trial[n] = {**self.random.choice(self.pools[n]), "pad": trial[n].get("pad", 0)}
            took = self.time(trial)
            heat = best * (0.006 * part + 0.0003)
            if took < now or self.random.random() < math.exp(min(0.0, (now - took) / heat)):
                current, now = trial, took
                if took < best * 0.9995 and (again := self.time(trial)) < best * 0.9995:
                    good, best = trial, max(took, again)
        whole = {**good, **{other: good[n] for n, others in self.alike.items() for other in others}}
        side_by_side(
            lambda job: self.build(*job), [(n, whole[n]) for n in self.steps], os.cpu_count() or 4, daemon=False
        )
        if self.time(whole) < best * 1.001:
            good = whole
        if self.progress is not None:
            self.progress(1, 1)
        self.use(good)
        return good


def _plain(row: RowSchedule) -> Constants:
    return {
        "warps": row.warps,
        "slices": row.slices,
        "batch": row.batch,
        "ring": row.ring,
        "early": row.early,
        "gentle": row.gentle,
        "blocks": row.blocks,
        "late": row.late,
        "grid": row.grid,
        "pad": row.pad,
    }


def _padded(variant: Variant, pad: int) -> Variant:
    """A variant of attention; the clusters of one sequence ask for so much shared memory that they do not use."""
    if variant.name != "decode":
        return variant
    launches = (replace(a, shared=pad) if isinstance(a, Launch) else a for a in variant.actions)
    return replace(variant, actions=tuple(launches))


def tune(
    executable: Any,
    measure: Callable[[], float],
    seconds: float = 30.0,
    seed: int = 0,
    values: Mapping[str, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Constants]:
    """Searches, remembers the result for later processes, and leaves the executable with it."""
    found = Tuner(executable, measure, seed, values=values, progress=progress).run(seconds)
    steps = {str(n): c for n, c in found.items()}
    facts.remember("cuda-tuning", tuning_key(executable.device.name, executable.untuned), {"steps": steps})
    return steps
