"""Damages files of a cache and compiles from it: every result must be right, and the damage gone after one rebuild.

    python -m tests.fuzz.cache_damage --cases 10000 --seed 1

One process imports everything and compiles nothing. For each case it damages one file of the cache and forks a child
that compiles, runs and compares: the child reads every fact, plan, binary and packed weight from disk as a new
process would. A second child then has to find all of it in order, without a word. A case fails if a child crashes,
hangs, raises, has another result, or if the second one still warns. The C compiler is a script that keeps what it
built: a rebuild is quick.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np

import monoplan as mp
from monoplan import driver as build  # noqa: F401  (children find it imported)
from monoplan import plan_cache
from monoplan.models import AutoLlamaModel, LlamaConfig, LlamaForCausalLM
from monoplan.models.load import weight_file
from monoplan.runtime.build import cache_places  # noqa: F401
from monoplan.runtime.cpu import executable as cpu  # noqa: F401
from monoplan.runtime.cpu import packed

SECONDS = 60  # after which a child counts as hung
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
IDS = np.array([[3, 1, 4, 1, 5]])
COMPILER = """#!/bin/sh
# The real compiler once for each command and its sources, then a copy of what it made.
out=; previous=
for word; do [ "$previous" = -o ] && out=$word; previous=$word; done
[ -n "$out" ] || exec {cc} "$@"
key=$( (echo "$@"; cat ./*.c ./*.h ./*.o) 2>/dev/null | cksum | tr ' ' -)
[ -f "{kept}/$key" ] || {{ {cc} "$@" || exit; cp "$out" "{kept}/$key.$$" && mv "{kept}/$key.$$" "{kept}/$key"; }}
cp "{kept}/$key" "$out"
"""


def compute(checkpoint: Path) -> bytes:
    """What a user does: load a model, compile it and run it."""
    model = AutoLlamaModel.from_pretrained(checkpoint)
    result = mp.compile(model, options={"threads": 2})(IDS)
    packed.wait_written()
    return np.asarray(result).tobytes()


def in_a_child(checkpoint: Path, wanted: bytes | None, *, quiet: bool) -> tuple[str, bytes]:
    """'' if a child computed what is wanted, else what happened; `quiet`: it may not warn of damage either."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(SECONDS)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                made = compute(checkpoint)
            if wanted is not None and made != wanted:
                raise AssertionError("another result")
            if quiet and caught:
                raise AssertionError(f"a warning: {caught[0].message}")
            os.write(writing, made)
            os._exit(0)
        except BaseException:  # noqa: B036  (a child says all that goes wrong, and ends here)
            os.write(writing, traceback.format_exc().encode()[-4000:])
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()
    status = os.waitpid(child, 0)[1]
    if status == 0:
        return "", said
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return "hung" if name == "SIGALRM" else f"died of {name}", b""
    return said.decode(errors="replace").strip(), b""


def damage(random: Random, path: Path) -> str:
    """Changes a file, and says how."""
    data = bytearray(path.read_bytes())
    way = random.choice(["bit", "bit", "bit", "bytes", "truncate", "empty", "grow", "zeros", "remove"])
    if not data:
        way = "grow"
    if way == "bit":
        at = random.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
    elif way == "bytes":
        for _ in range(random.randrange(1, 16)):
            data[random.randrange(len(data))] = random.randrange(256)
    elif way == "truncate":
        del data[random.randrange(len(data)) :]
    elif way == "empty":
        data.clear()
    elif way == "grow":
        data += random.randbytes(random.randrange(1, 64))
    elif way == "zeros":
        at = random.randrange(len(data))
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    mode = path.stat().st_mode
    path.unlink()  # what another process has mapped stays as it is
    if way != "remove":
        path.write_bytes(data)
        path.chmod(mode & 0o777)
    return way


def run(cases: int, seed: int, *, show: bool = False) -> tuple[Counter[str], list[str]]:
    """How often each kind of file was damaged, and what failed."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="monoplan-damage-") as name:
        folder = Path(name)
        (folder / "kept").mkdir()
        compiler = folder / "cc"
        compiler.write_text(COMPILER.format(cc=shutil.which("gcc") or shutil.which("cc"), kept=folder / "kept"))
        compiler.chmod(0o700)
        before = {n: os.environ.get(n) for n in ("CC", "MONOPLAN_CACHE_DIR")}
        os.environ |= {"CC": str(compiler), "MONOPLAN_CACHE_DIR": str(folder / "cache")}
        state, cache_places._state = cache_places._state, cache_places._State()
        settled, weight_file.SETTLED = weight_file.SETTLED, -1e9  # the checkpoint is new, and nobody writes to it
        plan_cache.makers()
        try:
            LlamaForCausalLM.from_config(CONFIG, seed=1).save_pretrained(folder / "model")
            trouble, wanted = in_a_child(folder / "model", None, quiet=False)
            if trouble:
                raise RuntimeError(f"the undamaged compile fails: {trouble}")
            if not list((folder / "cache").glob("weights/*.packed")):
                raise RuntimeError("no packed weights were kept")
            for number in range(cases):
                random = Random(f"{seed}/{number}")
                files = sorted(p for p in (folder / "cache").rglob("*") if p.is_file())
                # By kinds first: most files are copies of headers, and each packed weight counts more.
                kind = random.choice(sorted({p.suffix for p in files}))
                path = random.choice([p for p in files if p.suffix == kind])
                label = f"case {number} of seed {seed}: {path.relative_to(folder / 'cache')}"
                way = damage(random, path)
                counts[f"{path.name.rsplit('-', 1)[0] if path.suffix == '.sealed' else path.name} {way}"] += 1
                for quiet in (False, True):
                    trouble, _ = in_a_child(folder / "model", wanted, quiet=quiet)
                    if trouble:
                        failures.append(f"{label} ({way}, {'after one rebuild' if quiet else 'at once'}): {trouble}")
                if show and number % 100 == 99:
                    print(f"{number + 1} cases, {len(failures)} failed", flush=True)
        finally:
            cache_places._state, weight_file.SETTLED = state, settled
            for n, value in before.items():
                os.environ.pop(n) if value is None else os.environ.__setitem__(n, value)
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.perf_counter()
    counts, failures = run(args.cases, args.seed, show=True)
    for kind, count in sorted(counts.items()):
        print(f"{count:6}  {kind}")
    print(*failures, sep="\n")
    seconds = time.perf_counter() - begin
    print(f"{sum(counts.values())} cases, {len(failures)} failed, {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
