"""Drafts: the text is that of plain decoding, token by token, sampled or not, whatever is guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.codegen.cpu.schedule_attention import few_queries
from monoplan.ir.errors import ArgumentError
from monoplan.models import AutoModel, LlamaForCausalLM
from monoplan.models.generate.generation import Session
from monoplan.models.generate.speculation import ROWS, Ledger, Lookup
from monoplan.runtime.cpu.executable import host_target
from tests.matrices import partly
from tests.models.support import tiny_checkpoint, tiny_config

REPEATED = [5, 9, 2, 7, 11, 3] * 4
PROMPTS = [REPEATED, [7], [3, 4, 5, 6], [8, 8, 8, 8, 8], list(range(2, 40))]
SETTINGS = [
    {},
    {"repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.5, "top_k": 3, "min_p": 0.1},
]


@pytest.fixture(scope="module")
def lm() -> Any:
    return mp.compile(LlamaForCausalLM.from_config(tiny_config(max_position_embeddings=160), seed=5))


@pytest.fixture
def eager_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Drafts are tried wherever there is one, as long as possible; gives rows and accepted tokens of each run."""
    runs: list[tuple[int, int]] = []
    note = Ledger.note

    def noted(self: Ledger, rows: int, given: int, *seconds: float) -> None:
        runs.append((rows, given))
        note(self, rows, given, *seconds)

    monkeypatch.setattr(Ledger, "note", noted)
    monkeypatch.setattr(Ledger, "may_try", True)
    monkeypatch.setattr(Ledger, "best", lambda self, chance, most, each=0.0: (2.0, most))
    return runs


def text(lm: Any, prompt: Any, count: int = 90, **settings: Any) -> tuple[list[int], list[float] | None, str | None]:
    stream = lm.generate(prompt, count, logprobs=True, **{"eos_token_id": (), **settings})
    for _ in stream:
        pass
    return stream.result.ids, stream.result.logprobs, stream.result.finish_reason


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_looked_up_drafts_change_nothing(lm: Any, settings: Any, eager_drafts: list[Any]) -> None:
    for prompt in PROMPTS:
        assert text(lm, prompt, lookup=True, **settings) == text(lm, prompt, **settings)
    assert any(given > 1 for _, given in eager_drafts)  # some were right
    assert any(given < rows for rows, given in eager_drafts)  # and some were not
    assert max(rows for rows, _ in eager_drafts) == lm.most_checked


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_draft_model_changes_nothing(lm: Any, settings: Any, eager_drafts: list[Any]) -> None:
    other = LlamaForCausalLM.from_config(tiny_config(max_position_embeddings=160, num_hidden_layers=1), seed=9)
    for prompt in PROMPTS[:3]:
        assert text(lm, prompt, draft=other, **settings) == text(lm, prompt, **settings)
    assert any(given < rows for rows, given in eager_drafts)


def test_a_draft_model_that_is_the_model_is_always_right(lm: Any, eager_drafts: list[Any]) -> None:
    plain = text(lm, [3, 4, 5], 60, temperature=0.8, seed=1)
    assert text(lm, [3, 4, 5], 60, temperature=0.8, seed=1, draft=lm) == plain
    assert all(given == rows for rows, given in eager_drafts[1:])
    assert len(eager_drafts) < 12


@pytest.mark.parametrize("dtype", partly(["bfloat16", "float32", "q4_0", "q8_0"], lambda d: d in ("float32", "q4_0")))
def test_rows_that_are_checked_together_have_the_bits_of_one(dtype: str) -> None:
    config = tiny_config(hidden_size=64, intermediate_size=128, max_position_embeddings=700)
    lm = mp.compile(LlamaForCausalLM.from_config(config, seed=2), dtype=dtype)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, 640))
    checked = [rows for rows in ROWS if rows <= few_queries(host_target())]
    for start in (1, 30, 300, 600):
        cache, single = lm.new_cache(1, 640), []
        lm(ids[:, :start], past_key_values=cache)
        for i in range(start, start + checked[-1]):
            single.append(lm(ids[:, i : i + 1], past_key_values=cache)[0, 0])
        for rows in checked:
            cache.truncate(start)
            together = lm(ids[:, start : start + rows], past_key_values=cache, all_logits=True)[0]
            np.testing.assert_array_equal(together, single[:rows])


def test_sampled_text_has_the_models_distribution(eager_drafts: list[Any]) -> None:
    config = tiny_config(vocab_size=4, bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    lm, prompt, count = mp.compile(LlamaForCausalLM.from_config(config, seed=4)), [1, 2, 3] * 3, 800
    settings = {"temperature": 1.0, "lookup": True}
    found = Counter(tuple(text(lm, prompt, 5, seed=seed, **settings)[0]) for seed in range(count))
    assert sum(rows > 1 for rows, _ in eager_drafts) > count / 4

    def chances(begun: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(begun) == 5:
            yield begun, chance
            return
        logits = np.asarray(lm(np.array([[*prompt, *begun]])), np.float64)[0, 0]
        each = np.exp(logits - logits.max())
        for token, p in enumerate(each / each.sum()):
            yield from chances((*begun, token), chance * p)

    cells, rest = [], np.zeros(2)
    for tokens, chance in chances((), 1.0):
        both = np.array([found[tokens], count * chance])
        if both[1] < 5:  # cells that are too small count as one
            rest += both
        else:
            cells.append(both)
    seen, expected = np.array([*cells, rest]).T
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert len(cells) > 20
    assert statistic < len(cells) + 4 * (2 * len(cells)) ** 0.5  # chi-square: mean `cells`, variance twice that


def test_drafts_end_where_plain_text_ends(lm: Any, eager_drafts: list[Any]) -> None:
    plain, *_ = text(lm, REPEATED, 40)
    for count in range(1, 12):
        assert text(lm, REPEATED, count, lookup=True)[0] == plain[:count]
    end = plain[7]
    assert text(lm, REPEATED, 40, lookup=True, eos_token_id=end) == text(lm, REPEATED, 40, eos_token_id=end)
    some: list[int] = []
    stream = lm.generate(
        REPEATED, 40, lookup=True, eos_token_id=(), callback=lambda r, t, p: some.append(t) or len(some) < 6
    )
    assert list(stream) == [] and some == plain[:6] and stream.result.finish_reason == "callback"
    assert len(text(lm, REPEATED, -1, lookup=True)[0]) == lm.max_length - len(REPEATED) + 1  # the context is full


def test_a_session_goes_on_behind_drafts(lm: Any, eager_drafts: list[Any]) -> None:
    session, prompt = Session(), list(REPEATED)
    for _ in range(3):
        found = text(lm, prompt, 9, session=session, lookup=True)[0]
        assert found == text(lm, prompt, 9)[0]
        assert session.shared([*prompt, *found]) >= len(prompt)
        prompt += [*found, 4, 5]


def test_lookup_finds_the_longest_text_that_stood_before() -> None:
    lookup = Lookup()
    for token in [1, 2, 3, 4, 5, 9, 3, 4, 7, 1, 2, 3, 4]:
        lookup.push(token)
    assert lookup.find() == (4, 4)
    lookup.push(8)
    assert lookup.find() == (0, 0)


def test_the_longest_text_that_stood_before_counts() -> None:
    lookup = Lookup()
    for token in [1, 2, 3, 4, 5, 20, 9, 3, 4, 5, 21, 1, 2, 3, 4, 5]:
        lookup.push(token)
    assert lookup.find() == (5, 5), "not what followed 3, 4, 5 the last time"
    for token in [20, 9, 3, 4, 5]:
        lookup.push(token)
    assert lookup.find() == (10, 10)


def test_what_drafts_cost_ends_them() -> None:
    ledger = Ledger()
    for _ in range(100):
        ledger.note(1, 1, 1.0)
    assert ledger.best(0.99, 8)[1] > 1 and ledger.best(0.3, 8) == (1.0, 1)
    ledger.note(4, 1, 4.0)
    assert not ledger.may_try
    for _ in range(200):
        ledger.note(1, 1, 1.0)
    assert ledger.may_try
    assert ledger.best(0.9, 4) == (1.0, 1)  # four rows were seen to take as long as four steps


def test_wrong_drafts_are_refused_at_once(lm: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="50 tokens, the model 100"):
        lm.generate([1], draft=LlamaForCausalLM.from_config(tiny_config(vocab_size=50), seed=0))
    with pytest.raises(ArgumentError, match="draft must be a language model"):
        lm.generate([1], draft="small")
    with pytest.raises(ArgumentError, match="unknown setting lookup"):
        lm.generate_batch([[1], [2]], lookup=True)
    model = AutoModel.from_pretrained(tiny_checkpoint(tmp_path))
    other = AutoModel.from_pretrained(tmp_path)
    tokens = dict(enumerate("abc"))
    other.set_tokenizer(type("Other", (), {"token": lambda self, token: tokens.get(token)})())
    with pytest.raises(ArgumentError, match="token 0 is 'a' to the draft model, '<s>' to the model"):
        model.generate("x", draft=other)


@pytest.mark.full
@pytest.mark.needs("model")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_drafts_of_a_real_model_change_nothing(dtype: str, eager_drafts: list[Any]) -> None:
    from monoplan.models.load.default_model import default_model_path

    lm = mp.compile(AutoModel.from_pretrained(default_model_path(), dtype=dtype))
    story = "The cat sat on the mat. The dog sat on the log. "
    for prompt in (
        story * 3,
        "Once upon a time",
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
        "1, 2, 3, 4,",
    ):
        for settings in ({}, {"temperature": 0.8, "seed": 1}):
            assert text(lm, prompt, 64, lookup=True, **settings) == text(lm, prompt, 64, **settings)
    assert sum(given > 1 for _, given in eager_drafts) > 20
