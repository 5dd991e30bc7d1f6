"""Generation that stays on a GPU: the host sends ahead what each step needs and reads the tokens as they come.

One captured graph serves every token. It reads the token that the run before it chose, so the host need not have seen
it: up to AHEAD runs are under way while it turns tokens into text. When a text ends, what was begun in vain is dropped;
it wrote behind the cache's lengths only. All settings of generate are served: greedy, temperature, top_k, top_p, min_p,
repetition_penalty, stop texts, logprobs and callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.frontend.kv_cache import KVCache, WindowKVCache, grown
from monoplan.frontend.tensor import Tensor
from monoplan.ir.cache_rows import row_numbers, row_width
from monoplan.ir.dims import evaluate
from monoplan.ir.graph import Graph
from monoplan.ir.types import DType
from monoplan.models.generate.decoding import Row, padded, pieces, random_values, sampling_arrays
from monoplan.runtime.cuda.decode import AHEAD, Block, DecodeLoop, may_share

if TYPE_CHECKING:
    from monoplan.models.generate.generation import Session

# A KV cache that lives on a GPU: what KVCache does between calls, done by the device.


STEP = 64  # capacities are multiples of it, up to the limit


class DeviceCache:
    """Keys and values [batch, kv_heads, capacity, head_dim] of each layer in device memory; lengths on the host."""

    def __init__(
        self,
        device: Any,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: DType,
        limit: int,
        values: bool = True,
    ) -> None:
        self.device, self.layers, self.batch, self.kv_heads, self.head_dim = device, layers, batch, kv_heads, head_dim
        self.dtype, self.limit, self.values = dtype, limit, values
        self.capacity = min(-(-max(capacity, 1) // STEP) * STEP, limit)
        self.memory = [self._zeros(self.capacity) for _ in range((1 + values) * layers)]  # all keys, then all values
        self.lengths = Tensor(np.zeros(batch, np.int32))
        self.loops: dict[Any, Any] = {}  # what was captured for this memory, by its owner's key

    @property
    def row(self) -> int:
        """Bytes of one token in one head."""
        return int(row_width(self.head_dim, self.dtype)) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return len(self.memory) * self.batch * self.kv_heads * self.capacity * self.row

    @property
    def addresses(self) -> list[int]:
        """Of the keys of all layers, then of their values."""
        return [int(m.address) for m in self.memory]

    def _zeros(self, capacity: int, batch: int | None = None) -> Any:
        nbytes = (self.batch if batch is None else batch) * self.kv_heads * capacity * self.row
        memory = self.device.allocate(nbytes)
        self.device.clear(memory.address, nbytes)  # what no token wrote is multiplied by 0, so it must be finite
        return memory

    def reserve(self, extra: int) -> None:
        """Makes room for `extra` more tokens of the longest row; capacity doubles, up to the limit."""
        capacity = grown(int(self.lengths.numpy().max()), extra, self.capacity, self.limit)
        if capacity > self.capacity:
            self._replace(capacity, range(self.batch))

    def select(self, rows: Sequence[int]) -> DeviceCache:
        """This cache with these rows only, in this order."""
        self._replace(self.capacity, rows)
        self.lengths = Tensor(self.lengths.numpy()[list(rows)])
        self.batch = len(rows)
        return self

    def _replace(self, capacity: int, rows: Sequence[int]) -> None:
        """New memory with the tokens of some rows, one tensor at a time; nothing may be under way."""
        self.device.synchronize()
        self.loops.clear()
        lengths = self.lengths.numpy()
        for i, old in enumerate(self.memory):
            new = self._zeros(capacity, len(rows))
            for at, row in enumerate(rows):
                self.device.copy_rows(
                    new.address + at * self.kv_heads * capacity * self.row,
                    capacity * self.row,
                    old.address + row * self.kv_heads * self.capacity * self.row,
                    self.capacity * self.row,
                    int(lengths[row]) * self.row,
                    self.kv_heads,
                )
            self.device.synchronize()  # the old memory is given back now
            self.memory[i] = new
        self.capacity = capacity

    def truncate(self, n: Any) -> None:
        """Forgets all but the first n tokens of each row (a number, or one for each row)."""
        keep = np.broadcast_to(np.asarray(n), (self.batch,))
        self.lengths = Tensor(np.minimum(self.lengths.numpy(), keep).astype(np.int32))

    def can_keep(self, n: int) -> bool:
        """Whether the cache can be cut to the first n tokens of each row."""
        return True

    def on_host(self) -> KVCache:
        """A copy in numpy arrays; places behind a row's length are 0."""
        sizes = (self.layers, self.batch, self.kv_heads, self.head_dim, self.capacity)
        made = KVCache(*sizes, self.dtype, self.limit, self.values)
        for t, memory in zip((*made.k, *made.v), self.memory, strict=True):
            self.device.download(t.numpy(), memory.address)
        self.device.synchronize()
        for t in (*made.k, *made.v):
            for row, length in enumerate(self.lengths.numpy()):
                t.numpy()[row, :, length:] = 0
        made.lengths = Tensor(self.lengths.numpy().copy())
        return made

    @classmethod
    def from_host(cls, device: Any, cache: KVCache, limit: int) -> DeviceCache:
        """The same tokens on the device."""
        size = cache.layers, cache.batch, cache.kv_heads, cache.head_dim, cache.capacity
        made = cls(device, *size, cache.dtype, limit, bool(cache.v))
        for t, memory in zip((*cache.k, *cache.v), made.memory, strict=True):
            padded = np.zeros((*t.shape[:2], made.capacity, t.shape[3]), t.numpy().dtype)
            padded[:, :, : min(t.shape[2], made.capacity)] = t.numpy()[:, :, : made.capacity]
            device.upload(memory.address, padded)
            device.synchronize()
        made.lengths = Tensor(cache.lengths.numpy().copy())
        return made


RESERVED = 512  # tokens of an answer for which a new cache has room at once
SPARE = 1 << 30  # bytes of a finished text's cache that are kept for the next one
DRAWN = 64  # random numbers that are made at once
_SENT = ("lengths", "history_count", "random_val")  # what changes from step to step
_FIXED = ("num_valid", "penalty", "top_p", "top_k", "temperature", "min_p")


class DeviceSteps:
    """The steps of one call of generate. `lm` has the limits, and in `spare` a cache for the next call."""

    def __init__(self, lm: Any, executable: Any, rows: list[Row], session: Session | None) -> None:
        self.lm, self.executable, self.device, self.rows = lm, executable, executable.device, rows
        self.graph = executable.plan.graph
        self.given = {v.name.rpartition(".")[2]: v.type.dtype.numpy for v in self.graph.inputs}
        self.settings = rows[0].settings
        self.penalized = self.settings.repetition_penalty != 1
        self.session, self.step = session, 0  # how many tokens of each row were given
        self.cache, self.start = self._begin(session)
        self.steps: Steps | None = None  # once the prompt is through

    def _begin(self, session: Session | None) -> tuple[DeviceCache, int]:
        prompts = [row.result.prompt_ids for row in self.rows]
        if session is not None and session.cache is not None and not isinstance(session.cache, WindowKVCache):
            cache: Any = session.cache
            if not isinstance(cache, DeviceCache):
                cache = DeviceCache.from_host(self.device, cache, self.lm.max_length)
            start = session.shared(prompts[0])
            cache.truncate(start)
        else:
            needed = max(len(p) for p in prompts) + min(max(row.limit for row in self.rows), RESERVED)
            cache, start = self._new_cache(len(prompts), needed), 0
        if session is not None:
            session.cache = cache
        return cache, start

    def _new_cache(self, batch: int, capacity: int) -> DeviceCache:
        """The last text's cache if it fits, else a new one."""
        spare: DeviceCache | None = self.lm.spare.pop("cache", None)
        if spare is not None and spare.batch == batch and capacity <= spare.capacity <= max(4 * capacity, 1024):
            spare.truncate(0)
            return spare
        del spare  # before more memory is allocated
        keys = [v.type for v in self.graph.inputs if ".k." in v.name]
        heads, dim = int(keys[0].shape[1]), int(row_numbers(keys[0].shape[3], keys[0].dtype))
        values = any(".v." in v.name for v in self.graph.inputs)
        sizes = (len(keys), batch, heads, dim, capacity)
        return DeviceCache(self.device, *sizes, keys[0].dtype, self.lm.max_length, values)

    # -- the prompt ---------------------------------------------------------------------------------------------

    def next(self) -> tuple[list[int], list[float]]:
        """The next token of every row and its log probability."""
        found = self._prompt() if self.step == 0 else self._token()
        self.step += 1
        return found

    def _prompt(self) -> tuple[list[int], list[float]]:
        ids, valid = padded([row.result.prompt_ids[self.start :] for row in self.rows])
        choice = sampling_arrays(self.settings, self._draws(), [row.tokens for row in self.rows])
        before = self.cache.lengths.numpy()
        self.cache.reserve(int((before + valid).max() - before.max()))
        chosen: tuple[list[int], list[float]] = ([], [])
        for piece, count in pieces(ids, valid, self.cache, self.lm.prefill_chunk, self.lm.config):
            lengths = self.cache.lengths.numpy()
            chosen = self._run({"input_ids": piece, "num_valid": count, "lengths": lengths, **choice})
            self.cache.lengths = Tensor((lengths + count).astype(np.int32))
        return chosen

    def _run(self, arrays: dict[str, Any]) -> tuple[list[int], list[float]]:
        """One run with everything from the host but the cache: the tokens, and their log probabilities."""
        batch, seq = arrays["input_ids"].shape
        values = self.values(batch, seq, arrays["history"].shape[1])
        arrays = {name: a for name, a in arrays.items() if name in self.given}
        given = Block(self.device, {name: (a.shape, a.dtype) for name, a in arrays.items()})
        for name, a in arrays.items():
            given.array(name)[...] = a
        chosen = returned(self.device, batch)
        with self.device.lock:
            given.upload()
            inputs = self.addresses({name: given.address(name) for name in arrays})
            outputs, scratch = self.outputs(values, chosen)
            self.executable.calls(values, inputs, outputs).enqueue()
            chosen.download()
            self._check(values)
        del scratch  # it was needed until now
        return chosen.array("token").tolist(), chosen.array("logprob").tolist()

    def _check(self, values: dict[str, int]) -> None:
        """Waits for the device; raises what it reported."""
        self.executable.error.fetch()
        self.device.synchronize()
        self.executable.check(values)

    def values(self, batch: int, seq: int, hist: int) -> dict[str, int]:
        """The plan's symbols."""
        sizes = {"batch": batch, "seq": seq, "capacity": self.cache.capacity, "hist": hist}
        return {**{s: sizes[s] for s in self.graph.symbols}, "threads": 1}

    def addresses(self, places: dict[str, int]) -> list[int]:
        """Of the plan's inputs in order."""
        return input_addresses(self.graph, self.cache.addresses, places)

    def outputs(self, values: dict[str, int], chosen: Block | None) -> tuple[list[int], list[Any]]:
        """Addresses of the plan's outputs, and memory for those that nobody wants: all but token and logprob."""
        addresses, scratch = [], []
        results = len(self.graph.outputs) - len(self.graph.writes)  # token alone, or token, logprob and logits
        for j, (v, where) in enumerate(zip(self.graph.outputs, self.executable.plan.outputs, strict=True)):
            if isinstance(where, int):  # an input itself
                addresses.append(0)
            elif chosen is not None and j < min(results, 2):
                addresses.append(chosen.address(("token", "logprob")[j]))
            else:
                scratch.append(self.device.allocate(evaluate(v.type.size, values) * v.type.dtype.itemsize))
                addresses.append(int(scratch[-1].address))
        return addresses, scratch

    def _draws(self) -> list[float]:
        s = self.settings
        return [float(random_values(s.seed, row.number, 0, 1)[0]) if s.temperature > 0 else 0.0 for row in self.rows]

    # -- tokens -------------------------------------------------------------------------------------------------

    def _token(self) -> tuple[list[int], list[float]]:
        lengths = self.cache.lengths.numpy()
        longest = max(lengths.tolist())
        if longest == self.cache.capacity:
            self._stop()
            self.cache.reserve(1)
        steps = self._begun() if self.steps is None else self.steps
        wanted = max(row.limit - len(row.result.ids) for row in self.rows)
        while steps.loop.under_way < min(AHEAD, wanted, self.cache.capacity - longest):
            steps.enqueue()
        found = steps.next()
        lengths += 1  # the cache's own array: so much of it is sure
        return found

    def _begun(self) -> Steps:
        """The loop, ready at the present state of the rows."""
        key = (id(self.executable), self.penalized)
        steps: Steps | None = self.cache.loops.get(key)
        if steps is None:
            steps = self.cache.loops[key] = Steps(self)
        steps.begin(self)
        self.steps = steps
        return steps

    def _stop(self) -> None:
        if self.steps is not None:
            self.steps.loop.drop()
        self.steps = None

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on."""
        if 0 < len(rows) < len(self.rows):
            self._stop()
            self.cache.select(rows)
        self.rows = [self.rows[i] for i in rows]

    def close(self) -> None:
        """Drops what is under way; the cache is the session's, or is kept for the next text."""
        self._stop()
        with self.device.lock:
            self._check({})
        if self.session is None and self.cache.nbytes <= SPARE:
            self.lm.spare["cache"] = self.cache


def input_addresses(graph: Graph, caches: Sequence[int], places: Mapping[str, int]) -> list[int]:
    """Of a plan's inputs in order: the caches come as keys and then values, others by their short names."""
    left = iter(caches)
    return [
        next(left) if ".k." in v.name or ".v." in v.name else places[v.name.rpartition(".")[2]] for v in graph.inputs
    ]


def returned(device: Any, batch: int, slots: int = 1) -> Block:
    """What comes back of a step."""
    return Block(device, {"token": ((batch,), np.int64), "logprob": ((batch,), np.float32)}, slots)


class Steps:
    """The loop of single tokens on one cache: its blocks, its graph, and the state that it begins from."""

    def __init__(self, steps: DeviceSteps) -> None:
        self.device, self.batch, self.penalized = steps.device, len(steps.rows), steps.penalized
        self.room = steps.cache.capacity if steps.penalized else 1  # places in the history
        each = (self.batch,)
        sent, fixed = ({n: (each, steps.given[n]) for n in names if n in steps.given} for names in (_SENT, _FIXED))
        self.sends, self.fixed = Block(self.device, sent, AHEAD + 1), Block(self.device, fixed)
        self.state = Block(self.device, {"input_ids": (each, np.int64), "history": ((self.batch, self.room), np.int64)})
        self.returns = returned(self.device, self.batch, AHEAD + 1)
        # A run's token is the next run's input: it is written to that very place, or copied there.
        executable, ids = steps.executable, [v.name for v in steps.graph.inputs].index("input_ids")
        self.shared = may_share(executable.plan, ids, 0)
        self.token = self.returns.address("token") if self.shared else self.state.address("input_ids")
        places = {
            **{n: self.sends.address(n) for n in sent},
            **{n: self.fixed.address(n) for n in fixed},
            "input_ids": self.token,
            "history": self.state.address("history"),
        }
        values, inputs = steps.values(self.batch, 1, self.room), steps.addresses(places)
        outputs, scratch = steps.outputs(values, self.returns)
        held = (scratch, self.fixed, self.state, steps.cache.memory[:])
        self.loop = DecodeLoop(executable, values, inputs, outputs, self.sends, self.returns, held)
        self.trial = (executable, values, inputs)

    def begin(self, steps: DeviceSteps) -> None:
        """Sends the state of the rows; the loop goes on from there."""
        settings, rows = steps.settings, steps.rows
        self.loop.drop()
        self.lengths, self.number = steps.cache.lengths.numpy().copy(), steps.step
        tokens = [row.tokens for row in rows]
        self.count = max(len(t) for t in tokens) if self.penalized else 0
        choice: dict[str, Any] = {"num_valid": 1, **sampling_arrays(settings, [0.0] * self.batch)}
        for name in self.fixed.parts:
            self.fixed.array(name)[:] = choice[name]
        self.fixed.upload()
        self.state.array("input_ids")[:] = [t[-1] for t in tokens]
        history = self.state.array("history")
        for row, known in enumerate(tokens if self.penalized else ()):
            # Rows get one length by naming a token again, which changes no penalty: one copy serves all of them.
            history[row, : self.count] = known + [known[0]] * (self.count - len(known))
        self.state.upload()
        if self.shared:
            self.device.copy(self.token, self.state.address("input_ids"), 8 * self.batch)
        self.seeds = [(settings.seed, row.number) for row in rows] if settings.temperature > 0 else []
        self.draws, self.drawn = np.zeros((self.batch, 0), np.float32), self.number
        self._fill(0)
        self.sends.upload(0)
        executable, values, inputs = self.trial
        outputs, scratch = steps.outputs(values, None)
        executable.settle(values, inputs, outputs)
        self.device.synchronize()  # the blocks may be written again, the scratch memory freed
        del scratch

    def enqueue(self) -> None:
        """One more step."""
        self.loop.enqueue(self._fill, self._after)
        self.lengths += 1
        self.count += self.penalized
        self.number += 1

    def _fill(self, slot: int) -> None:
        self.sends.array("lengths", slot)[:] = self.lengths
        if self.penalized:
            self.sends.array("history_count", slot)[:] = self.count
        if not self.seeds:
            return
        at = self.number - self.drawn
        if at >= self.draws.shape[1]:
            self.draws = np.array([random_values(*seed, self.number, DRAWN) for seed in self.seeds], np.float32)
            self.drawn, at = self.number, 0
        self.sends.array("random_val", slot)[:] = self.draws[:, at]

    def _after(self) -> None:
        """The chosen token becomes the next step's, and part of the history."""
        chosen = self.returns.address("token")
        if not self.shared:
            self.device.copy(self.token, chosen, 8 * self.batch)
        if self.penalized and self.count < self.room:
            place = self.state.address("history") + 8 * self.count
            self.device.copy_rows(place, 8 * self.room, chosen, 8, 8, self.batch)

    def next(self) -> tuple[list[int], list[float]]:
        """What the oldest step under way chose."""
        slot = self.loop.next()
        return self.returns.array("token", slot).tolist(), self.returns.array("logprob", slot).tolist()
