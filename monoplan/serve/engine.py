"""The engine: many texts at once on one compiled language model.

Every step runs the plan for what is there: one new token of each text that is being answered, together, and pieces of
the prompts that wait, at most `step_tokens` tokens in all, so that a long prompt never stalls running answers. Texts
share the pages of one KV cache (see pages.py). A text does not depend on its neighbours: neither its tokens' bits nor
its random numbers do.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from monoplan.frontend.kv_cache import PagedKVCache
from monoplan.frontend.tensor import Tensor
from monoplan.ir.cache_rows import row_width
from monoplan.ir.errors import ArgumentError, MonoplanError, in_words
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, aligned
from monoplan.llm import PAGE, CompiledLM
from monoplan.models.generate.decoding import Row
from monoplan.models.rope_scaling import table_key
from monoplan.models.text.tokenizer import MissingTokenizer
from monoplan.serve.choice import choice_arrays, choose, is_for_host, is_plain, logprob_of
from monoplan.serve.pages import Page, PagePool
from monoplan.serve.request import Busy, EmbeddingRequest, Piece, Request, Sampling, TokenLogprob, unit

if TYPE_CHECKING:
    from types import TracebackType

LEAST = 16  # tokens of prompts that a step has room for, however many answers there are
STEP_TOKENS = {"cpu": 256, "cuda": 1024}
KEPT = 32  # numbers of rows and widths of a table whose runs ahead are kept
POOLINGS = ("mean", "last")
WIDTH = 8  # what the width of a table grows by: its size is then the same for many steps


AnyRequest = TypeVar("AnyRequest", bound=Request)


class EngineError(MonoplanError):
    """A step failed: the requests that were in it are answered with this."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine does and has done."""

    running: int
    waiting: int
    cache_usage: float  # the share of the cache's pages that running texts hold
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int  # tokens of prompts
    prefix_hits: int  # those that earlier texts had computed
    preemptions: int
    finished: Mapping[str, int]  # by finish_reason
    failure: str | None  # why the engine runs no more


@dataclass(eq=False)
class _Text:
    """A request that has pages: its tokens are in the cache up to `done`."""

    request: Request
    pages: list[Page] = field(default_factory=list)
    kept: int = 0  # pages from the first on that are in the pool's tree
    done: int = 0
    total: Array = field(default_factory=lambda: np.zeros(1))  # of an embedding: the sum of the model's last states

    @property
    def embeds(self) -> bool:
        """Whether the request is for a vector, not for an answer."""
        return isinstance(self.request, EmbeddingRequest)

    @property
    def answers(self) -> bool:
        """Whether the prompt is through but for the token that the next one is chosen behind."""
        return self.left == 1 and not self.embeds

    @property
    def left(self) -> int:
        """Tokens that must run before the next one can be chosen; 1 while an answer is under way."""
        return len(self.request.prompt_ids) + len(self.request.ids) - self.done


class Engine:
    """Answers requests by continuous batching; `submit` from any thread, `with Engine(lm) as engine` runs it."""

    def __init__(
        self,
        lm: CompiledLM,
        *,
        streams: int = 32,
        cache_tokens: int | None = None,
        step_tokens: int | None = None,
        queue: int = 256,
        pooling: str = "mean",
    ) -> None:
        if step_tokens is None:
            step_tokens = STEP_TOKENS.get(lm.target, 1)
        sizes = {"streams": streams, "step_tokens": step_tokens, "queue": queue, "cache_tokens": cache_tokens or 1}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"Engine: {name} must be a whole number of 1 or more, got {value!r}")
        if lm.target not in ("cpu", "cuda"):
            raise ArgumentError(f"Engine: target {lm.target!r} has no plans", fix="use target='cpu' or 'cuda'")
        if pooling not in POOLINGS:
            raise ArgumentError(f"Engine: pooling must be {' or '.join(POOLINGS)}, got {pooling!r:.60}")
        self.lm, self.streams, self.step_tokens, self.queue, self.pooling = lm, streams, step_tokens, queue, pooling
        self._ranks = lm.tp if lm.tp is not None and lm.tp.size > 1 else None
        config, dtype = lm.config, lm.cache_dtype
        heads, dim = config.cache_shape
        if self._ranks is not None:
            heads = lm.cache_heads("paged") or heads
        shape = (heads, PAGE, row_width(dim, dtype))
        counts = (config.num_hidden_layers, config.num_hidden_layers * (not config.latent))
        page_bytes = sum(counts) * int(np.prod(shape)) * dtype.itemsize
        if cache_tokens is None:
            # Of the system's memory a quarter: it is given when it is written, so unused pages cost nothing. Of a GPU's
            # most of what is free when the weights are there.
            room = _free_memory() // 4 if lm.target == "cpu" else int(0.8 * self._executable.device.free())
            cache_tokens = min(streams * lm.max_length, max(lm.max_length, room // page_bytes * PAGE))
        if self._ranks is not None:  # pages have the same numbers on all of them
            cache_tokens = min(self._ranks.collect(cache_tokens))
        self.pool = PagePool(-(-cache_tokens // PAGE) + 1, PAGE)
        self.cache_tokens = (self.pool.count - 1) * PAGE
        self._k, self._v = (
            [Tensor(aligned((self.pool.count, *shape), dtype.numpy, zero=True)) for _ in range(n)] for n in counts
        )
        self._runs: OrderedDict[tuple[int, int], Any] = OrderedDict()  # see ahead.py
        self._flight: tuple[list[_Text], Any] | None = None  # a run of these that was not read yet
        self._spare: Any = None  # memory of a GPU for logits that nobody reads
        self._places: list[int] = []  # where these lie on a GPU: there they are, and here they stay untouched
        # A rotation that follows the length of a text: its keys belong to nobody else, and its prompt runs whole.
        self._fixed_rope = table_key(config, 1) == table_key(config, lm.max_length)
        self._waiting: deque[Request] = deque()
        self._texts: list[_Text] = []  # in the order of their arrival
        self._turn: deque[_Text] = deque()  # those whose prompts run, in the order of their turns
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closing = self._cancelling = False
        self._failure: str | None = None
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="monoplan-masks")
        self._thread: threading.Thread | None = None
        self._compiling = threading.Lock()

    # -- from any thread ----------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Compiles what is not compiled yet and starts the thread that runs steps."""
        if self._thread is None:
            self._prepare()
            self._thread = threading.Thread(target=self._run, name="monoplan-engine", daemon=True)
            self._thread.start()
        return self

    def follow(self) -> None:
        """On ranks other than 0: does what the engine of rank 0 does, until that one ends."""
        assert self._ranks is not None
        self._prepare()
        work: dict[str, Callable[..., Any]] = {"run": self._call_plan, "copy": self._copy_rows}
        name, *given = self._ranks.share(None)
        while name is not None:
            work[name](*given)
            name, *given = self._ranks.share(None)

    def _prepare(self) -> None:
        self.lm.paged_plan()
        if self.lm.target == "cuda":
            self._places = self._executable.begin_caches([cache.numpy() for cache in (*self._k, *self._v)])

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(finish=kind is None)

    def submit(self, prompt: Sequence[int], sampling: Sampling, on_piece: Callable[[Piece], Any]) -> Request:
        """Asks for the continuation of a prompt. `on_piece` is called from the engine's thread, and must not block."""
        ids = self.lm.checked_ids(prompt)
        try:
            tokenizer = self.lm.tokenizer
        except MissingTokenizer:
            tokenizer = None
        if sampling.stop and tokenizer is None:
            raise ArgumentError("stop texts need a tokenizer", why="the model was made without one")
        for token in sampling.logit_bias:
            if not 0 <= token < self.lm.config.vocab_size:
                raise ArgumentError(f"logit_bias: token id {token} is out of range [0, {self.lm.config.vocab_size})")
        row = Row(0, ids, sampling, min(self.lm.max_length, self.cache_tokens), tokenizer, None, False)
        if row.limit < 1:
            what = f"the prompt has {len(ids)} tokens, the cache room for {self.cache_tokens}"
            raise ArgumentError(what, fix="shorten the prompt, or serve with a larger cache")
        return self._take(Request(next(self._numbers), row, sampling, on_piece))

    def prepare_embeddings(self) -> None:
        """Compiles the plan of `embed`, while steps run. On a GPU, and where ranks compile together, a step does it."""
        if self.lm.target == "cpu" and self._ranks is None:
            with self._compiling:
                self.lm.embedding_plan()

    def embed(self, prompt: Sequence[int], on_piece: Callable[[Piece], Any]) -> EmbeddingRequest:
        """Requests the vector of a text: the model's last states behind its norm, pooled, of length 1."""
        ids = self.lm.checked_ids(prompt)
        if len(ids) > self.cache_tokens:
            what = f"the text has {len(ids)} tokens, the cache room for {self.cache_tokens}"
            raise ArgumentError(what, fix="shorten the text, or serve with a larger cache")
        self.prepare_embeddings()
        row = Row(0, ids, Sampling(), self.lm.max_length, None, None, False)
        return self._take(EmbeddingRequest(next(self._numbers), row, Sampling(), on_piece))

    def _take(self, request: AnyRequest) -> AnyRequest:
        """Puts a request behind those that wait, or raises Busy."""
        with self._changed:
            if self._failure is not None:
                raise Busy("the engine has failed", why=self._failure, fix="restart the server")
            if self._closing:
                raise Busy("the engine is closing", fix="ask again when the server is back")
            if len(self._waiting) >= self.queue:
                raise Busy(f"{self.queue} requests are waiting already", fix="ask again later")
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step."""
        request.cancel()
        with self._changed:
            self._changed.notify_all()

    def close(self, finish: bool = True) -> None:
        """Takes no more requests; those that run and wait are answered first, or else cancelled. Then it ends."""
        with self._changed:
            self._closing = True
            self._cancelling = self._cancelling or not finish
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._masks.shutdown(wait=False)

    @property
    def stats(self) -> EngineStats:
        """A snapshot."""
        with self._changed:
            c = self._counts
            return EngineStats(
                running=len(self._texts),
                waiting=len(self._waiting),
                cache_usage=self.pool.usage,
                prompt_tokens=c["prompt_tokens"],
                generation_tokens=c["generation_tokens"],
                prefix_queries=c["prefix_queries"],
                prefix_hits=c["prefix_hits"],
                preemptions=c["preemptions"],
                finished=dict(self._finished),
                failure=self._failure,
            )

    # -- in the engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self.step()
                except Exception as error:  # whatever it is: those who wait must hear of it, and others go on
                    if self._ranks is not None:  # they may not be at the same place any more
                        raise
                    for text in list(self._texts):
                        self._end(text, "error", _told(error, "a step failed"))
            self._tell_ranks(None)
        except BaseException as error:
            words = in_words(error)
            if isinstance(error, MonoplanError):  # without the places in our files: clients read it
                words = ": ".join(filter(None, (error.what, error.why)))
            with self._changed:
                self._failure = words
            if self._ranks is not None:
                self._ranks.fail(words)
        finally:
            self._answer_all(self._failure)

    def _wait(self) -> bool:
        """Waits until there is something to do; False when the engine is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._texts or self._waiting or self._closing)
            return bool(not self._closing or ((self._texts or self._waiting) and not self._cancelling))

    def _answer_all(self, failure: str | None) -> None:
        """Nothing runs any more: everybody who still waits is told so."""
        error = None if failure is None else EngineError("the engine has failed", why=failure)
        reason = "cancelled" if failure is None else "error"
        for text in list(self._texts):
            self._end(text, reason, error)
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
        for request in waiting:
            self._tell_end(request, reason, error)

    def step(self) -> None:
        """One step: who was cancelled leaves, who waits comes in, prompts and answers move on."""
        for text in [t for t in self._texts if t.request.cancelled]:
            self._end(text, "cancelled")
        self._admit()
        answering = [t for t in self._texts if t.answers]
        self._run_prompts(max(self.step_tokens - len(answering), LEAST))
        answering = [t for t in answering if t in self._texts and self._give_room(t, 1)]
        answering = [t for t in answering if t in self._texts]  # another one's room may have been taken from it
        if not answering:
            self._flight = None
        elif self._places and self._ranks is None and self._fixed_rope:
            self._run_ahead(answering)
        else:
            self._run_plan(answering, 1)

    def _run_ahead(self, texts: list[_Text]) -> None:
        """One token of each, with the next run begun before they are looked at: on a GPU, which then never waits."""
        if self._flight is not None and self._flight[0] != texts:  # others than those whose run is under way
            self._land()
            return
        if self._flight is None:
            if not all(is_plain(t.request) for t in texts):
                self._run_plan(texts, 1)
                return
            runs = self._runs_of(texts)
            runs.begin(np.array([t.request.row.tokens[t.done] for t in texts], np.int64), self._answer_arrays(texts, 0))
            self._flight = texts, runs
        if self._may_go_on(texts):
            self._flight[1].enqueue(self._answer_arrays(texts, 1))
        self._land()

    def _may_go_on(self, texts: list[_Text]) -> bool:
        """Whether all have a token after the next one, with room for it in the same table, by taking nobody's."""
        if any(len(t.request.ids) + 1 >= t.request.row.limit for t in texts):
            return False
        full = [t for t in texts if len(t.pages) * PAGE < t.done + 2]
        if len(full) > self.pool.available or any(len(t.pages) % WIDTH == 0 for t in full):
            return False
        return all(self._give_room(t, 2) for t in full)

    def _land(self) -> None:
        """Takes the tokens of the run that is under way; those of texts that have left meanwhile are for nobody."""
        assert self._flight is not None
        (texts, runs), self._flight = self._flight, None
        out = runs.next()
        if runs.under_way:
            self._flight = texts, runs
        for i, text in enumerate(texts):
            if text in self._texts:
                self._move_on(text, 1)
                self._take_token(text, out, i, None)

    def _answer_arrays(self, texts: list[_Text], ahead: int) -> dict[str, Array]:
        """What a run for one token of each takes, if so many tokens are under way."""
        lengths = np.array([t.done + ahead for t in texts], np.int32)
        made = {"table": self._table(texts), "lengths": lengths, "num_valid": np.ones(len(texts), np.int32)}
        return made | choice_arrays([t.request for t in texts], ahead)

    def _runs_of(self, texts: list[_Text]) -> Any:
        from monoplan.serve.ahead import AnswerRuns

        x = self._executable
        if self._spare is None:
            self._spare = x.device.allocate(self.streams * self.lm.config.vocab_size * 4)
        key = len(texts), self._width(texts)
        if key not in self._runs:
            self._runs[key] = AnswerRuns(x, self._places, self.pool.count, *key, self._spare)
            if len(self._runs) > KEPT:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        return self._runs[key]

    def _admit(self) -> None:
        """Waiting requests in order, while there are streams and room for their prompts. One that begins as a prompt
        which still runs waits for its pages; others go before it."""
        while True:
            with self._changed:
                cancelled = [r for r in self._waiting if r.cancelled]
                for gone in cancelled:
                    self._waiting.remove(gone)
                request = next((r for r in self._waiting if not self._is_on_its_way(r)), None)
                if request is not None:
                    tokens = request.row.tokens
                    fits = not self._texts or len(tokens) // PAGE + 1 <= self.pool.available
                    if fits and len(self._texts) < self.streams:
                        self._waiting.remove(request)
                    else:
                        request = None
            for gone in cancelled:
                self._tell_end(gone, "cancelled")
            if request is None:
                return
            text = _Text(request)
            if not text.embeds:  # an embedding needs the states of all its tokens
                self._share(text, tokens[:-1])
            request.started = request.started or time.monotonic()
            with self._changed:
                self._texts.append(text)
                if not request.ids and not text.embeds:
                    request.cached_tokens = text.done
                    self._counts["prefix_queries"] += len(tokens)
                    self._counts["prefix_hits"] += text.done
            self._turn.append(text)

    def _is_on_its_way(self, request: Request) -> bool:
        """Whether a prompt that runs will soon have more pages of a request's tokens than are kept now."""
        if not self._fixed_rope or isinstance(request, EmbeddingRequest):
            return False
        tokens = request.row.tokens
        for text in self._turn:
            at, other = text.kept * PAGE, text.request.row.tokens
            page = slice(at, at + PAGE)
            whole = at + PAGE < min(len(tokens), len(other) + 1)
            if whole and text in self._texts and tokens[page] == other[page] and tokens[:at] == other[:at]:
                return True
        return False

    def _share(self, text: _Text, tokens: list[int]) -> None:
        """Gives a text the pages of earlier ones that begin like it; of the last one it gets a copy."""
        if not self._fixed_rope:
            return
        text.pages, partly, shared = self.pool.find(tokens)
        text.kept, text.done = len(text.pages), len(text.pages) * PAGE
        if partly is None:
            return
        own = self.pool.new()
        if own is not None:
            self._tell_ranks("copy", own.number, partly.number, shared)
            self._copy_rows(own.number, partly.number, shared)
            text.pages.append(own)
            text.done += shared
        self.pool.release([partly])

    def _copy_rows(self, target: int, source: int, rows: int) -> None:
        """Copies the first rows of a page to another one, in all layers."""
        caches = (*self._k, *self._v)
        if not self._places:
            for cache in caches:
                pages = cache.numpy()
                pages[target, :, :rows] = pages[source, :, :rows]
            return
        for place, cache in zip(self._places, caches, strict=True):
            _, heads, _, dim = cache.shape
            row = dim * cache.dtype.itemsize
            page, pitch = heads * PAGE * row, PAGE * row
            self._executable.copy_rows(place + target * page, place + source * page, pitch, rows * row, heads)

    def _tell_ranks(self, *order: Any) -> None:
        """What all ranks do now, or None: they end. See follow."""
        if self._ranks is not None:
            self._ranks.share(order)

    def _call_plan(self, embeds: bool, table: Array, lengths: Array, arrays: dict[str, Array]) -> dict[str, Array]:
        plan = self.lm.embedding_plan() if embeds else self.lm.paged_plan()
        if embeds and self._places:
            plan.built[0][-1].executable.share_caches(self._executable)
        cache = PagedKVCache(self._k, self._v, Tensor(table), Tensor(lengths))
        found: dict[str, Array] = plan(past_key_values=cache, **arrays)
        return found

    @property
    def _executable(self) -> Any:
        return self.lm.paged_plan().built[0][-1].executable

    def _run_prompts(self, budget: int) -> None:
        """Pieces of prompts, in turns: a short prompt does not wait for the whole of a long one."""
        for _ in range(len(self._turn)):
            text = self._turn.popleft()
            if text not in self._texts or text.answers:
                continue
            if budget < 1:
                self._turn.appendleft(text)
                return
            count = min(text.left, budget) if self._fixed_rope else text.left
            if not self._give_room(text, count):
                continue
            budget -= count
            with self._changed:
                self._counts["prompt_tokens"] += count
            self._run_plan([text], count)
            if text in self._texts and not text.answers:
                self._turn.append(text)

    def _give_room(self, text: _Text, count: int) -> bool:
        """Pages for `count` more tokens; the text that came last gives its own up where there are none left."""
        while len(text.pages) * PAGE < text.done + count:
            page = self.pool.new()
            if page is not None:
                text.pages.append(page)
                continue
            last = self._texts[-1]
            self._leave(last)
            with self._changed:
                self._counts["preemptions"] += 1
                self._waiting.appendleft(last.request)
            if last is text:
                return False
        return True

    def _leave(self, text: _Text) -> None:
        """A text stops running; what it has computed is kept for those who begin like it, itself among them."""
        if self._fixed_rope:
            self._keep(text, text.done)
        self.pool.release(text.pages)
        with self._changed:
            self._texts.remove(text)
        text.pages, text.kept, text.done = [], 0, 0

    def _keep(self, text: _Text, until: int) -> None:
        """Puts the pages of a text's first `until` tokens into the tree."""
        tokens = text.request.row.tokens
        while text.kept < len(text.pages) and text.kept * PAGE < until:
            content = tokens[text.kept * PAGE : min(until, (text.kept + 1) * PAGE)]
            parent = text.pages[text.kept - 1] if text.kept else None
            text.pages[text.kept] = self.pool.keep(text.pages[text.kept], parent, content)
            text.kept += 1

    def _run_plan(self, texts: list[_Text], count: int) -> None:
        """Runs the next `count` tokens of each text, and takes the tokens that are chosen."""
        requests = [t.request for t in texts]
        ids = np.array([t.request.row.tokens[t.done : t.done + count] for t in texts], np.int64)
        lengths = np.array([t.done for t in texts], np.int32)
        table = self._table(texts)
        chosen = [t.left == count for t in texts]
        masks = {i: self._mask(r) for i, r in enumerate(requests) if chosen[i] and r.sampling.constraint is not None}
        embeds = texts[0].embeds
        arrays: dict[str, Array] = {"input_ids": ids, "num_valid": np.full(len(texts), count, np.int32)}
        arrays |= {} if embeds else choice_arrays(requests)
        self._tell_ranks("run", embeds, table, lengths, arrays)
        out = self._call_plan(embeds, table, lengths, arrays)
        for i, text in enumerate(texts):
            self._move_on(text, count)
            if embeds:
                self._take_states(text, out)
            elif chosen[i]:
                self._take_token(text, out, i, masks.get(i))

    def _move_on(self, text: _Text, count: int) -> None:
        """So many more of its tokens are in the cache; pages that became full are kept."""
        before = text.done
        text.done += count
        if self._fixed_rope and text.done // PAGE > before // PAGE:
            self._keep(text, text.done // PAGE * PAGE)

    def _width(self, texts: list[_Text]) -> int:
        return -(-max(len(t.pages) for t in texts) // WIDTH) * WIDTH

    def _table(self, texts: list[_Text]) -> Array:
        """The numbers of the pages of each."""
        table = np.zeros((len(texts), self._width(texts)), np.int32)
        for row, t in zip(table, texts, strict=True):
            row[: len(t.pages)] = [page.number for page in t.pages]
        return table

    def _take_states(self, text: _Text, out: dict[str, Array]) -> None:
        """Adds what a piece of a text gives to its embedding, which is whole behind the last one."""
        text.total = text.total + out["total"][0].astype(np.float64)
        if text.left or not isinstance(text.request, EmbeddingRequest):
            return
        vector = text.total if self.pooling == "mean" else out["last"][0].astype(np.float64)
        text.request.vector = unit(vector)
        self._leave(text)
        self._tell_end(text.request, "stop")

    def _mask(self, request: Request) -> Future[Array]:
        assert request.sampling.constraint is not None
        return self._masks.submit(request.sampling.constraint.mask)

    def _take_token(self, text: _Text, out: dict[str, Array], i: int, mask: Future[Array] | None) -> None:
        """The token that row i of a step has chosen, or that is chosen now from its logits."""
        request, s = text.request, text.request.sampling
        try:
            token = int(out["token"][i])
            if is_for_host(request):
                token = choose(request, out["logits"][i, -1], None if mask is None else mask.result())
            complete = s.constraint is not None and s.constraint.accept(token)
        except Exception as error:  # a constraint is its user's: its failure is the failure of this text alone
            self._end(text, "error", _told(error, "the constraint failed"))
            return
        scored = TokenLogprob(token, float(out["logprob"][i]))
        if s.logprobs is not None:
            scored = logprob_of(token, out["logits"][i, -1], s.logprobs)
        request.first = request.first or time.monotonic()
        piece = request.row.push(token, scored.logprob)
        if complete and request.finish_reason is None:
            piece += request.row.finish()
        with self._changed:
            self._counts["generation_tokens"] += 1
        if request.finish_reason is None:
            self._tell(request, Piece(piece, scored))
            return
        self._leave(text)
        self._tell_end(request, request.finish_reason, None, piece, scored)

    def _end(self, text: _Text, reason: str, error: MonoplanError | None = None) -> None:
        """A running text ends before its time."""
        self._leave(text)
        self._tell_end(text.request, reason, error)

    def _tell_end(
        self,
        request: Request,
        reason: str,
        error: MonoplanError | None = None,
        piece: str = "",
        token: TokenLogprob | None = None,
    ) -> None:
        request.row.result.finish_reason, request.ended = reason, time.monotonic()
        with self._changed:
            self._finished[reason] += 1
        self._tell(request, Piece(piece, token, reason, error))

    def _tell(self, request: Request, piece: Piece) -> None:
        try:
            request.on_piece(piece)
        except Exception:  # nobody listens any more, as when an event loop is closed: the answer is for nobody
            request.cancel()


def _told(error: Exception, what: str) -> MonoplanError:
    return error if isinstance(error, MonoplanError) else EngineError(what, why=in_words(error))


def _free_memory() -> int:
    """Bytes of memory that this machine could give; half of all where it does not say."""
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")
