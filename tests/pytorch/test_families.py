"""Models of transformers as plans: their outputs are PyTorch's, for all sizes by one plan."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from tests.needs import needs
from tests.tolerances import check

pytestmark = [pytest.mark.full, needs("transformers")]
NAMES = (
    "bert", "roberta", "distilbert", "pooled", "clip_text", "gpt2", "t5", "llama", "qwen3", "vit", "dinov2",
    "clip_vision", "whisper", "resnet", "convnext",
)  # fmt: skip


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [x for v in value for x in leaves(v)]
    return [] if value is None else [value]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_for_many_sizes(name: str) -> None:
    import torch

    from monoplan.pytorch.program import as_array
    from tests.pytorch.families import FAMILIES

    torch.manual_seed(0)
    module, example = FAMILIES[name]()
    module.eval()
    exact = copy.deepcopy(module).double()
    text = "input_ids" in example
    dynamic = {key: {0: "batch", 1: "seq"} if text else {0: "batch"} for key in example}
    fast = mp.compile(mp.from_torch(module, dynamic=dynamic, **example))
    for batch, seq in ((2, 7), (1, 1), (3, 23)):
        given: dict[str, Any] = {}
        for key, x in example.items():
            shape = (batch, seq) if text else (batch, *x.shape[1:])
            given[key] = torch.randint(2, 90, shape) if x.dtype == torch.long else torch.randn(shape)
            if key == "attention_mask":
                given[key] = torch.ones(shape, dtype=torch.long)
                given[key][0, seq // 2 + 1 :] = 0
        with torch.no_grad():
            result = exact(**{k: x.double() if x.is_floating_point() else x for k, x in given.items()})
        want = leaves(dict(result) if hasattr(result, "keys") else result)
        got = leaves(fast(**{key: as_array(x) for key, x in given.items()}))
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            check(a, as_array(b), np.float32, "matmul", 8.0)  # several layers after each other
    assert fast.stats.compiles == 1
