"""Text from a language model: one step with sampling inside, and the loop that feeds it.

The loop is the same for the eager module and for the compiled plan: it needs `_run_step`, `new_cache`,
`config` and `tokenizer` of the class that it is mixed into. Every row of a batch has a length and random
numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.frontend.kv_cache import MARGIN, STEP, KVCache, PagedKVCache, WindowKVCache
from monoplan.frontend.module import Module
from monoplan.frontend.specs import spec
from monoplan.frontend.tensor import Tensor
from monoplan.ir.cache_rows import row_width
from monoplan.ir.errors import ArgumentError, did_you_mean
from monoplan.ir.types import Array, as_dtype
from monoplan.models.generate.decoding import (
    Generation,
    Row,
    Settings,
    is_whole,
    padded,
    pieces,
    random_values,
    sampling_arrays,
)
from monoplan.models.rope_scaling import context_length
from monoplan.models.text.tokenizer import MissingTokenizer

if TYPE_CHECKING:
    from monoplan.models.config import LlamaConfig

# Generation step by step through the host: for the eager model, the CPU, and several ranks.


DRAWN = 64  # random numbers that are made at once


class HostSteps:
    """The steps of one call of generate: arguments from the host and results to it, every time.

    The arrays of arguments belong to this object. As long as the same rows go on they are reused, with new
    contents, which a plan is called with at little cost.
    """

    def __init__(self, lm: Any, rows: list[Row], session: Session | None, adapter: str | None = None) -> None:
        self.lm, self.rows, self.step = lm, rows, 0
        self.adapted = {} if adapter is None else {"adapter": adapter}
        if session is not None and session.adapter != adapter:  # keys and values were others
            session.adapter, session.tokens = adapter, []
        self.drawn = 0  # the step of the first random number in `draws`
        self.settings = rows[0].settings
        prompts = [row.result.prompt_ids for row in rows]
        if session is None or session.cache is None:
            self.cache: Any = lm.new_cache(len(rows), max(map(len, prompts)) + 64)
            start = 0
        else:
            self.cache, start = session.cache, session.shared(prompts[0])
            if hasattr(self.cache, "on_host"):  # it was a GPU's
                self.cache = self.cache.on_host()
            self.cache.truncate(start)
        if session is not None:
            session.cache = self.cache
        self.ids, self.valid = padded([p[start:] for p in prompts])
        self.choice, self.draws = self._choice(), np.zeros((len(rows), 0), np.float32)

    def next(self) -> tuple[list[int], list[float]]:
        """The next token of every row and its log probability."""
        if self.settings.temperature > 0:
            self.choice["random_val"][:] = self._draw()
        out: dict[str, Array] = {}
        for ids, valid in pieces(self.ids, self.valid, self.cache, self.lm.prefill_chunk, self.lm.config):
            given = {"input_ids": ids, "num_valid": valid, **self.choice, **self.adapted}
            out = self.lm._run_step(past_key_values=self.cache, **given)
        self.step += 1
        return out["token"].tolist(), out["logprob"].tolist()

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, with the tokens that they got."""
        fewer = len(rows) < len(self.rows)
        if fewer:
            self.cache = self.cache.select(rows) if rows else self.cache
            self.rows, self.draws = [self.rows[i] for i in rows], self.draws[rows]
        last = [row.result.ids[-1] for row in self.rows]
        if fewer or self.ids.shape[1] > 1:
            self.ids = np.array(last, np.int64)[:, None]
            self.valid = np.ones(len(last), np.int32)
        else:
            self.ids[:, 0] = last
        if rows and (fewer or not self._noted(last)):
            self.choice = self._choice()

    def close(self) -> None:
        """Nothing is under way."""

    def _choice(self) -> dict[str, Array]:
        """How to choose, with the tokens so far if there is a penalty for them."""
        penalized = self.settings.repetition_penalty != 1
        histories = [row.tokens for row in self.rows] if penalized else None
        return sampling_arrays(self.settings, [0.0] * len(self.rows), histories)

    def _noted(self, tokens: list[int]) -> bool:
        """Adds a token to the history of each row; False if there is no room for it."""
        if self.settings.repetition_penalty == 1:
            return True
        history, counts = self.choice["history"], self.choice["history_count"]
        if counts.max() == history.shape[1]:
            return False
        history[np.arange(len(tokens)), counts] = tokens
        counts += 1
        return True

    def _draw(self) -> Array:
        """A random number for each row: those of several steps are made at once."""
        at = self.step - self.drawn
        if at >= self.draws.shape[1]:
            s, self.drawn, at = self.settings, self.step, 0
            self.draws = np.array([random_values(s.seed, row.number, self.step, DRAWN) for row in self.rows])
        return self.draws[:, at]


Ids = Sequence[int] | Array
Prompt = str | Ids
Callback = Callable[[int, int, str], Any]
PREFILL_CHUNK = 2048
A_PROMPT = "a prompt is a text or a list of token ids"


class ModelStep(Module):
    """A module around a model that has its parameters under the names that checkpoints have."""

    lm: Any

    def __init__(self, lm: Module) -> None:
        super().__init__()
        object.__setattr__(self, "lm", lm)  # its parts are modules here, and not the model
        for name, child in lm.named_children():
            self.add_module(name, child)


class GreedyStep(ModelStep):
    """The best next token alone: the head's products need not be stored."""

    def forward(self, input_ids: Tensor, past_key_values: KVCache, num_valid: Tensor) -> dict[str, Tensor]:
        """token i64 [batch]."""
        logits = self.lm(input_ids, past_key_values=past_key_values, num_valid=num_valid)
        return {"token": logits.argmax(dim=-1).squeeze(1)}


class GenerationStep(ModelStep):
    """One step of generation as one graph: the model, the penalty, the choice of a token, its probability."""

    every_token = False

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: KVCache,
        num_valid: Tensor,
        history: Tensor,
        history_count: Tensor,
        penalty: Tensor,
        random_val: Tensor,
        top_p: Tensor,
        top_k: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        adapter: dict[str, dict[str, Tensor]] | None = None,
    ) -> dict[str, Tensor]:
        """token i64 [batch], logprob f32 [batch] (of the raw logits), logits [batch, 1, vocab].

        `adapter` has matrices a and b by the names of those that their product is added to.
        """
        from monoplan.frontend import functional as F
        from monoplan.frontend.layers import with_low_rank

        every, layers = self.every_token, dict(self.lm.named_modules()) if adapter else {}
        added = {layers[name.removesuffix(".weight")]: (m["a"], m["b"]) for name, m in (adapter or {}).items()}
        with with_low_rank(added):
            logits = self.lm(input_ids, past_key_values=past_key_values, num_valid=num_valid, all_logits=every)
        raw = logits.squeeze(0 if every else 1).float()
        scores = F.repetition_penalty(raw, history, history_count, penalty)
        token = F.random_sample(scores, random_val, top_p, top_k, temperature, min_p=min_p)
        # log softmax at one place only: the whole row of it is never stored.
        top = raw.amax(dim=-1, keepdim=True)
        total = F.log(F.exp(raw - top).sum(dim=-1, keepdim=True)) + top
        logprob = (F.take_along(raw, token.unsqueeze(-1)) - total).squeeze(-1)
        return {"token": token, "logprob": logprob} | ({} if every else {"logits": logits})


class EmbeddingStep(ModelStep):
    """What the head would read, without the head: its sum over a piece of a text, and its last row."""

    def forward(self, input_ids: Tensor, past_key_values: KVCache, num_valid: Tensor) -> dict[str, Tensor]:
        """total and last f32 [batch, hidden]. Rows have no padding."""
        states = self.lm.model(input_ids, None, past_key_values, num_valid=num_valid, all_tokens=True).float()
        return {"total": states.sum(dim=1), "last": states.narrow(1, states.shape[1] - 1, 1).squeeze(1)}


class CheckStep(GenerationStep):
    """The same for a draft, one row: a token behind each of its tokens, which have an entry each in how to choose."""

    every_token = True


def check_specs(config: LlamaConfig, dtype: Any, windows: bool = False) -> dict[str, Any]:
    """Placeholders for CheckStep.forward."""
    own = {"input_ids": spec(1, "seq", dtype="int64"), "num_valid": spec(1, dtype="int32")}
    cache = cache_spec(config, dtype, 1, windows)
    return {**step_specs(config, dtype, rows="seq"), **own, "past_key_values": cache}


def adapter_specs(arrays: Mapping[str, Mapping[str, Array]], dtype: Any) -> dict[str, Any]:
    """Placeholders for the matrices of an adapter: its rank is a symbol."""
    return {
        name: {"a": spec("rank", m["a"].shape[1], dtype=dtype), "b": spec(m["b"].shape[0], "rank", dtype=dtype)}
        for name, m in arrays.items()
    }


def step_specs(config: LlamaConfig, dtype: Any, rows: str = "batch", windows: bool = False) -> dict[str, Any]:
    """Placeholders for GenerationStep.forward: batch, seq, capacity and hist are symbols."""
    floats = ("penalty", "random_val", "top_p", "temperature", "min_p")
    return {
        "input_ids": spec("batch", "seq", dtype="int64"),
        "past_key_values": cache_spec(config, dtype, windows=windows),
        "history": spec(rows, "hist", dtype="int64"),
        **{name: spec(rows, dtype="int32") for name in ("num_valid", "history_count", "top_k")},
        **{name: spec(rows, dtype="float32") for name in floats},
    }


def greedy_specs(config: LlamaConfig, dtype: Any) -> dict[str, Any]:
    """Placeholders for GreedyStep.forward."""
    return _without_choice(step_specs(config, dtype))


def _without_choice(specs: dict[str, Any]) -> dict[str, Any]:
    return {name: specs[name] for name in ("input_ids", "past_key_values", "num_valid")}


def bounded_layers(config: LlamaConfig) -> tuple[int, ...]:
    """The layers that keep only their window: none where the context is hardly longer than what they would keep."""
    layers = tuple(i for i in range(config.num_hidden_layers) if config.layer_window(i) is not None)
    long = layers and (config.sliding_window or 0) + MARGIN + 2 * STEP < context_length(config)
    return layers if long else ()


def cache_spec(config: LlamaConfig, dtype: Any, batch: Any = "batch", windows: bool = False) -> KVCache:
    """A KVCache of placeholders. It has no limit: that is for the host to watch over."""
    heads, dim = config.cache_shape
    width = row_width(dim, as_dtype(dtype))
    bounded = bounded_layers(config) if windows else ()
    rows = ["window" if layer in bounded else "capacity" for layer in range(config.num_hidden_layers)]
    k, v = ([spec(batch, heads, n, width, dtype=dtype) for n in some] for some in (rows, [] if config.latent else rows))
    parts: dict[str, Any] = {"k": k, "v": v, "lengths": spec(batch, dtype="int32")}
    if not bounded:
        return KVCache.tree_unflatten(parts, (None,))
    parts["starts"] = spec(batch, dtype="int32")
    return WindowKVCache.tree_unflatten(parts, (None, config.sliding_window, *bounded))


def paged_specs(config: LlamaConfig, dtype: Any, page: int) -> dict[str, Any]:
    """Placeholders for GenerationStep.forward whose cache lies in pages of so many tokens."""
    heads, dim = config.cache_shape
    counts = config.num_hidden_layers, 0 if config.latent else config.num_hidden_layers
    shape = ("pages", heads, page, row_width(dim, as_dtype(dtype)))
    k, v = ([spec(*shape, dtype=dtype) for _ in range(count)] for count in counts)
    rows = {"table": spec("batch", "width", dtype="int32"), "lengths": spec("batch", dtype="int32")}
    return {**step_specs(config, dtype), "past_key_values": PagedKVCache(k, v, **rows)}


def embedding_specs(config: LlamaConfig, dtype: Any, page: int) -> dict[str, Any]:
    """Placeholders for EmbeddingStep.forward, whose cache lies in pages of so many tokens."""
    return _without_choice(paged_specs(config, dtype, page))


def empty_cache(
    config: LlamaConfig, dtype: Any, batch: int, capacity: int, kv_heads: int | None = None, windows: bool = False
) -> KVCache:
    """A cache for `batch` rows, which grows up to the model's context; `kv_heads` where ranks share a model."""
    limit, (heads, dim) = context_length(config), config.cache_shape
    heads = heads if kv_heads is None else kv_heads
    capacity = min(max(capacity, 16), limit)
    sizes = (config.num_hidden_layers, batch, heads, dim, capacity)
    bounded = bounded_layers(config) if windows else ()
    if not bounded or config.sliding_window is None:
        return KVCache(*sizes, dtype=dtype, limit=limit, values=not config.latent)
    return WindowKVCache(*sizes, dtype=dtype, limit=limit, window=config.sliding_window, bounded=bounded)


def make_room(cache: KVCache, num_valid: Any) -> None:
    """Lets the cache grow before `num_valid` more tokens (of each row, or of all) are written."""
    lengths = cache.lengths.numpy()
    if isinstance(num_valid, np.ndarray) and num_valid.shape == lengths.shape:
        before = lengths.tolist()  # of so few numbers Python finds the largest sooner than numpy
        cache.reserve(max(map(add, before, num_valid.tolist())) - max(before))
    else:
        cache.reserve(int((lengths + num_valid).max() - lengths.max()))


class TextStream:
    """An iterator over pieces of text as they are made; `result` has all of it, and why it ended."""

    def __init__(self, result: Generation, pieces: Iterator[str]) -> None:
        self.result, self._pieces = result, pieces

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)


class Session:
    """The cache of a conversation: a prompt that begins as the last one did runs only its new part."""

    def __init__(self) -> None:
        self.cache: Any = None  # a KVCache, or on a GPU a DeviceCache
        self.adapter: str | None = None
        self.tokens: list[int] = []  # what was fed, in order; the cache's length says how much of it arrived

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt are in the cache already; the last one always runs again."""
        if self.cache is None:
            return 0
        known = self.tokens[: int(self.cache.lengths.numpy()[0])]
        pairs = zip(prompt[:-1], known, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt) - 1, len(known)))
        return shared if self.cache.can_keep(shared) else 0


class GenerationMixin:
    """`generate` for a class with config, tokenizer, new_cache and _run_step."""

    config: LlamaConfig
    tokenizer: Any
    adapters: dict[str, Any]  # that load_adapter brought, by name
    prefill_chunk = PREFILL_CHUNK  # tokens of a prompt that run at once, all rows together
    most_checked = 8  # tokens of one run that have the bits of a single one

    def new_cache(self, batch: int = 1, capacity: int = 0) -> KVCache:
        """An empty cache for `batch` rows."""
        raise NotImplementedError

    def _run_step(self, **arguments: Any) -> dict[str, Array]:
        """Runs GenerationStep on arrays and a cache, which it writes; gives token, logprob and logits."""
        raise NotImplementedError

    def _run_check(self, **arguments: Any) -> dict[str, Array]:
        """Runs CheckStep in the same way; gives token and logprob of every row."""
        raise NotImplementedError

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and answer together."""
        return context_length(self.config)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        *,
        callback: Callback | None = None,
        logprobs: bool = False,
        add_special_tokens: bool = True,
        session: Session | None = None,
        lookup: bool = False,
        draft: Any = None,
        adapter: str | None = None,
        **settings: Any,
    ) -> TextStream:
        """Continues a text (or token ids) and gives pieces of text as they are made.

        With max_new_tokens=-1 it goes on until the text ends or the context is full.
        Settings: temperature=0.0 (greedy), top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0,
        stop=None (texts), eos_token_id=None (the model's own; () for none). `callback(row, token, piece)` is
        called for each token, and False ends the text. A `session` keeps the cache for the next prompt. Wrong
        arguments are reported at once, not at the first piece. `lookup=True` guesses tokens from the text so far, and
        `draft`, a smaller model with the same tokenizer, guesses them too: several are then checked in one run, where
        that is faster. The text stays the same. `adapter` is the name of one that load_adapter brought.
        """
        if not _is_one(prompt):
            if any(hasattr(x, "__len__") for x in prompt):
                raise ArgumentError("generate takes one prompt", fix="use generate_batch for several")
            raise ArgumentError(A_PROMPT, why=f"it is {prompt!r:.60}")
        if session is not None and not isinstance(session, Session):
            raise ArgumentError("session must be a Session", why=f"it is {session!r:.60}")
        rows = self._rows([prompt], max_new_tokens, callback, logprobs, add_special_tokens, settings)
        how = self._drafts(bool(lookup), draft) if lookup or draft is not None else {}
        how |= {} if adapter is None else {"adapter": self._adapter(adapter)}
        return TextStream(rows[0].result, (piece for piece in self._loop(rows, session, **how) if piece))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        callback: Callback | None = None,
        logprobs: bool = False,
        add_special_tokens: bool = True,
        adapter: str | None = None,
        **settings: Any,
    ) -> list[Generation]:
        """Continues several prompts of any lengths together; each gets the tokens that it gets alone.

        Arguments are those of `generate`. With a temperature, row r draws its own random numbers. (In bf16 on
        tile units more than eight rows are rounded where fewer are not: near ties may then fall otherwise.)
        """
        given = _items(prompts, "generate_batch takes a list of prompts")
        if isinstance(prompts, str) or (given and _is_one(given)):
            raise ArgumentError("generate_batch takes a list of prompts", fix="use generate for one")
        rows = self._rows(given, max_new_tokens, callback, logprobs, add_special_tokens, settings)
        for _ in self._loop(rows, None, **({} if adapter is None else {"adapter": self._adapter(adapter)})):
            pass
        return [row.result for row in rows]

    def generate_ids(self, ids: Ids, max_new_tokens: int = 128, **settings: Any) -> list[int]:
        """The ids that follow a prompt of ids, without the end-of-text id."""
        return self.generate_batch([ids], max_new_tokens, **settings)[0].ids

    def _rows(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        callback: Callback | None,
        logprobs: bool,
        special: bool,
        given: dict[str, Any],
    ) -> list[Row]:
        if callback is not None and not callable(callback):
            raise ArgumentError("callback must be a function of row, token and piece", why=f"it is {callback!r:.60}")
        tokenizer = self._tokenizer_for(prompts, given.get("stop"))
        settings = self._settings(max_new_tokens, given, tokenizer)
        if settings.stop and tokenizer is None:
            raise ArgumentError("stop texts need a tokenizer", why="the model was made without one")
        rows = []
        for number, prompt in enumerate(prompts):
            ids = self.checked_ids(prompt, special)
            rows.append(Row(number, ids, settings, self.max_length, tokenizer, callback, logprobs))
        if not rows:
            raise ArgumentError("there is no prompt to continue")
        return rows

    def _tokenizer_for(self, prompts: Sequence[Prompt], stop: Any) -> Any:
        """The tokenizer; None if there is none, which ids can do without."""
        try:
            return self.tokenizer
        except MissingTokenizer:
            if stop or any(isinstance(prompt, str) for prompt in prompts):
                raise
            return None

    def _settings(self, max_new_tokens: int, given: dict[str, Any], tokenizer: Any) -> Settings:
        stop, eos = given.pop("stop", None) or (), given.pop("eos_token_id", None)
        known = Settings.__dataclass_fields__.keys() - {"stop", "eos_ids", "max_new_tokens"}
        if unknown := given.keys() - known:
            names = ", ".join(sorted(known | {"stop", "eos_token_id"}))
            near = did_you_mean(min(unknown), known | {"max_new_tokens"})
            raise ArgumentError(f"unknown setting {', '.join(sorted(unknown))}", fix=near or f"settings are: {names}")
        if eos is None:
            eos = {*self.config.eos_ids, *(() if tokenizer is None else tokenizer.eos_ids)}
        stop = (stop,) if isinstance(stop, str) else tuple(_items(stop, "stop must be a text or several"))
        ends = [eos] if is_whole(eos) else _items(eos, "eos_token_id must be a token id or several")
        if not all(map(is_whole, ends)):
            raise ArgumentError("eos_token_id must be a token id or several", why=f"it is {eos!r:.60}")
        return Settings(max_new_tokens, stop=stop, eos_ids=frozenset(ends), **given)

    def checked_ids(self, prompt: Prompt, special: bool = True) -> list[int]:
        """The token ids of a prompt, all of which the model has."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                fix = "give token ids, or load the model from a directory that has a tokenizer.json"
                raise ArgumentError("a text prompt needs a tokenizer", why="the model has none", fix=fix)
            # An empty text stays empty: what a BOS alone begins is hardly what its author wanted.
            prompt = self.tokenizer.encode(prompt, add_special_tokens=special) if prompt else []
        if not _is_one(prompt):
            raise ArgumentError(A_PROMPT, why=f"it is {prompt!r:.60}")
        ids, size = [int(token) for token in prompt], self.config.vocab_size
        if not ids:
            why = "the model needs at least one token to start from"
            raise ArgumentError("the prompt is empty", why=why, fix="give some text, or [bos_token_id]")
        for place, token in enumerate(ids):
            if not 0 <= token < size:
                what = f"token id {token} at position {place} of the prompt is out of range [0, {size})"
                raise ArgumentError(what)
        if len(ids) > self.max_length:
            what = f"the prompt has {len(ids)} tokens, the context of the model {self.max_length}"
            raise ArgumentError(what, fix="shorten the prompt")
        return ids

    def _drafts(self, lookup: bool, draft: Any) -> dict[str, Any]:
        """Where guesses come from, checked: the ids of a draft model must mean what those of this one mean."""
        if draft is None:
            return {"lookup": lookup, "draft": None}
        if not isinstance(draft, GenerationMixin):
            raise ArgumentError("draft must be a language model", why=f"it is {draft!r:.60}")
        sizes, theirs, own = [lm.config.vocab_size for lm in (draft, self)], draft.tokenizer, self.tokenizer
        what = f"the draft model has {sizes[0]} tokens, the model {sizes[1]}" if sizes[0] != sizes[1] else ""
        for token in range(0 if what or None in (theirs, own) or theirs is own else sizes[0]):
            if theirs.token(token) != own.token(token):
                what = f"token {token} is {theirs.token(token)!r} to the draft model, {own.token(token)!r} to the model"
                break
        if what:
            raise ArgumentError(what, why="both must have one tokenizer", fix="use a smaller model of the same family")
        return {"lookup": lookup, "draft": draft}

    def _adapter(self, name: str) -> str:
        """The name of an adapter, checked."""
        if name not in self.adapters:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise ArgumentError(f"there is no adapter {name!r:.60}", why=f"loaded are: {known}", fix="use load_adapter")
        return name

    def _loop(self, rows: list[Row], session: Session | None, **how: Any) -> Iterator[str]:
        """Runs the batch until every row is finished; gives the text that each token made certain."""
        steps, active = self._steps(rows, session, **how), rows
        try:
            while active:
                if session is not None:
                    session.tokens = rows[0].tokens
                chosen = zip(active, *steps.next(), strict=True)
                yield from [row.push(token, logprob) for row, token, logprob in chosen]
                # A finished row leaves the batch: its mates go on without paying for it.
                keep = [i for i, row in enumerate(active) if row.result.finish_reason is None]
                steps.keep(keep)
                active = [active[i] for i in keep]
        finally:
            steps.close()

    def _steps(self, rows: list[Row], session: Session | None, **how: Any) -> Any:
        """What runs the steps of a call: with `next`, `keep` and `close`, as HostSteps has them."""
        if "lookup" not in how:
            return HostSteps(self, rows, session, **how)
        from monoplan.models.generate.speculation import DraftedSteps

        return DraftedSteps(self, rows, session, **how)


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or all(map(is_whole, _items(prompt, A_PROMPT)))


def _items(value: Any, what: str) -> list[Any]:
    """What is in a list, an array or the like; the error says what was expected."""
    try:
        return list(value)
    except TypeError:
        raise ArgumentError(what, why=f"it is {value!r:.60}") from None
