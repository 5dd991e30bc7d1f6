"""Saved plans: the table, the members and the weights, with and without digests that are right.

Loading one that nobody vouches for ends before the C compiler: the plan is made, and its weights are packed.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

import monoplan as mp
from monoplan import driver, nn, saved
from monoplan.models import LlamaForCausalLM
from monoplan.runtime.build import compilers, facts
from monoplan.runtime.cpu import plan_file
from monoplan.runtime.cpu.plan_file import HEAD, PlanFile
from monoplan.runtime.cpu.weights import prepare
from tests.fuzz.engine import Files, Target
from tests.fuzz.mutations import INTEGERS, change_json, damage, dump_json, mutate_text
from tests.integration.support import small_config

NAME = "plan.mpz"
WORDS = ("f32", "bf16", "q4_0", "%x", "batch", "48", "0", "1", "graph", "param", "return", "(", ")", "[", "]", "->")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(40, 24), nn.Linear(24, 8, dtype="bfloat16")

    def forward(self, x: Any, flag: bool = True) -> Any:
        y = self.one(x)
        return {"y": self.two(y.to("bfloat16")), "x": (y, flag)}


@functools.cache
def _saved() -> tuple[bytes, ...]:
    config = small_config(1, hidden_size=64, intermediate_size=64, head_dim=16)
    lm = mp.compile(LlamaForCausalLM.from_config(config, seed=1), dtype="q8_0")
    return saved.to_bytes(mp.compile(Small(), mp.spec("batch", 40))), saved.to_bytes(lm.prepare())


def seeds() -> list[Files]:
    return [{NAME: data} for data in _saved()]


def mutate(random: Random, files: Files) -> Files:
    data = files[NAME]
    kind = random.randrange(8)
    if kind == 0:
        return {NAME: damage(random, data)}
    if kind == 1:
        return {NAME: damage(random, data, 4096)}
    if kind <= 5:  # a table whose digest is right
        length = int.from_bytes(data[16:24], "little")
        begin = -(-(HEAD + length) // 16384) * 16384
        table = json.loads(data[HEAD : HEAD + length])
        part = random.choice((table, table["about"], table["about"], table["about"], table["arrays"]))
        change_json(random, part)
        text = dump_json(table)
        head = data[:16] + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + bytes(8)
        return {NAME: head + text + bytes(-(HEAD + len(text)) % 16384) + data[begin:]}
    file = PlanFile.of(data)
    members = {name: file.member(name) for name in file._members if name not in ("sums", "weights")}
    arrays = [a.copy() for a in file.arrays(quickly=False)]
    if kind == 6:
        text = mutate_text(random, members["0.ir"].decode(), (*WORDS, str(random.choice(INTEGERS))))
        members["0.ir"] = text.encode("utf-8", "replace")
    else:
        i = random.randrange(len(arrays))
        size = random.randrange(arrays[i].size + 1)
        arrays[i] = np.resize(arrays[i], size) if random.random() < 0.5 else arrays[random.randrange(len(arrays))]
    stream = io.BytesIO()
    plan_file.write_to(stream, file.about, members, arrays)
    return {NAME: stream.getvalue()}


def _unbuilt(planned: Any, source: Any, *rest: Any) -> Any:
    prepare(planned.graph, planned.plan.params, source)
    return mock.Mock(plan=planned.plan)


def load(directory: Path) -> None:
    with (
        mock.patch.object(driver, "build_stage", _unbuilt),
        mock.patch.object(facts, "recall", lambda *key: None),
        mock.patch.object(compilers, "find_compiler", lambda: None),
    ):
        mp.load(directory / NAME)


TARGET = Target(seeds, mutate, load)
