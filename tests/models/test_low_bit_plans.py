"""Language models whose weights stay in the low-bit types of their file: the same text, in the file's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import monoplan as mp
from monoplan.models.auto import AutoLlamaModel
from tests.models.test_gguf import VOCAB, weights, write

IDS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5]])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of three types: q and k are joined, v is not of their type; two layers that are not alike."""
    state = {name: a * np.float32(0.2) if a.ndim == 2 else a for name, a in weights().items()}
    kinds = {n: Kind.Q4_0 for n, a in state.items() if a.ndim == 2}
    kinds |= {n: Kind.Q8_0 for n in kinds if n.endswith("v_proj.weight") or "embed" in n or "lm_head" in n}
    kinds["model.layers.1.mlp.down_proj.weight"] = Kind.Q5_1
    return write(tmp_path / "m.gguf", state, kinds=kinds)


def logits(llm: Any, ids: Any = IDS) -> Any:
    return np.asarray(llm(ids, all_logits=True))


def test_the_numbers_are_those_of_the_file(file: Path) -> None:
    kept, wide = (AutoLlamaModel.from_pretrained(file, dtype=dtype) for dtype in (None, "float32"))
    low, full = mp.compile(kept), mp.compile(wide)
    expected = logits(full)
    # Activations of 15 bits, where bf16 has 8.
    rounded = np.abs(logits(mp.compile(kept, dtype="bfloat16")) - expected).max()
    assert np.abs(logits(low) - expected).max() < rounded / 8
    assert np.array_equal(wide(IDS, all_logits=True).numpy(), kept(IDS, all_logits=True).numpy())  # eager: its values
    assert low.weight_bytes < 0.4 * full.weight_bytes
    assert "q4_0[" in low.ir() and "q5_1[" in low.ir() and low.verify().ok


def test_bits_depend_on_neither_batch_nor_threads(file: Path) -> None:
    model = AutoLlamaModel.from_pretrained(file)
    one, two = (mp.compile(model, options={"threads": n}) for n in (1, 2))
    rows = np.concatenate([IDS, IDS[:, ::-1], IDS + 2]) % VOCAB
    together = logits(one, rows)
    assert np.array_equal(together, logits(two, rows))
    for i in range(len(rows)):
        assert np.array_equal(logits(one, rows[i : i + 1]), together[i : i + 1])


def test_a_dtype_expands_and_a_gpu_computes_in_bf16(file: Path) -> None:
    model = AutoLlamaModel.from_pretrained(file)
    own = {str(p.type.dtype) for p in model.parameters() if p.type.dtype.is_low_bit}
    assert own
    for llm, kinds in (
        (mp.compile(model, dtype="float32"), {"f32"}),
        (mp.compile(model, dtype="bfloat16", target="cuda"), {"bf16"}),
        (mp.compile(model, target="cuda"), {"bf16", *own}),
        (mp.compile(model, dtype="q8_0", target="cuda"), {"bf16", "q8_0"}),
    ):
        assert {str(p.type.dtype) for p in llm.model.parameters()} == kinds


def test_a_stored_plan_is_found_again(file: Path) -> None:
    _, again = (mp.compile(AutoLlamaModel.from_pretrained(file)).prepare() for _ in range(2))
    assert again.stats.cache_hits == 1 and "codegen" not in again.stats.milliseconds


def test_other_ops_refuse_a_low_bit_weight(file: Path) -> None:
    model = AutoLlamaModel.from_pretrained(file)

    class Doubled(mp.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = model.model.layers[0].mlp.up_proj.weight

        def forward(self, x: Any) -> Any:
            return mp.nn.functional.linear(x, self.weight * 2)

    with pytest.raises(mp.MonoplanError, match="mul takes no low-bit weight, got q4_0"):
        mp.compile(Doubled())(np.zeros((1, 64), np.float32))
