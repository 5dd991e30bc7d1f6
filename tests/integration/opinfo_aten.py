"""Compares from_torch's operators with PyTorch, on PyTorch's own samples: `python -m tests.integration.opinfo_aten`.

Every operator that PyTorch dispatches while a sample runs is run here as well, on the same tensors, and must give the
same results. What is not covered is counted; a difference that documented() does not know fails. It needs `torch` and
`expecttest`.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from monoplan.ir.errors import MonoplanError
from monoplan.ir.types import DType
from monoplan.pytorch.operators import find
from monoplan.pytorch.program import _DROPPED, _dtype
from tests.integration.opinfo import difference, flat, ours, samples

DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "empty", "rrelu", "new_empty")
_LOOSE = {"sort", "topk", "argsort", "cummax", "cummin", "kthvalue", "mode", "median"}  # equal elements, in any order


def main() -> int:
    import torch
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    differs: dict[str, str] = {}

    class Both(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in _leaves(args)]
            result = func(*args, **(kwargs or {}))
            self.compare(func, _with(args, iter(before)), kwargs or {}, result)
            return result

        def compare(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            name = str(func)
            if func._schema.is_mutable or any(word in name for word in _RANDOM) or not _fits(result):
                return
            function = find(name)
            if function is None:
                missing[name] += 1
                return
            counts["calls"] += 1
            try:
                given = {k: _own(v) for k, v in kwargs.items() if k not in _DROPPED}
                got = function(*(_own(a) for a in args), **given)
            except (MonoplanError, TypeError, ValueError, NotImplementedError, IndexError) as error:
                counts["refused"] += 1
                differs.setdefault(f"refused {name}", f"{type(error).__name__}: {error}".splitlines()[0][:150])
                return
            mine, theirs = flat(_some(got, result)), flat(result)
            if not (text := difference(mine, theirs)):
                counts["agree"] += 1
            elif documented(name, text):
                counts["documented"] += 1
            else:
                counts["differ"] += 1
                differs.setdefault(f"differs {name}", text)

    wanted = set(sys.argv[1:])
    for op in op_db:
        if wanted and op.name not in wanted:
            continue
        for dtype in DTYPES:
            if getattr(torch, dtype) not in op.supported_dtypes("cpu"):
                continue
            for sample in samples(op, dtype):
                try:
                    with Both(), torch.no_grad():
                        op(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # a sample that PyTorch itself refuses
                    counts["failed in torch"] += 1
    for name, text in sorted(differs.items()):
        print(f"{name}: {text}")
    print("not covered:", ", ".join(f"{name} {count}" for name, count in missing.most_common(60)))
    print(dict(counts))
    return 1 if counts["differ"] else 0


def documented(name: str, text: str) -> bool:
    """Whether docs/pytorch.md has the difference."""
    op = name.split(".")[1]
    integers = "element type float32 for int" in text and op in ("avg_pool2d", "convolution")
    halves = op == "convolution" and (
        "of bfloat16" in text or "of float16" in text
    )  # rounded once, not after each step
    return op in _LOOSE or integers or halves


def _own(value: Any) -> Any:
    import torch

    if isinstance(value, torch.dtype):
        return _dtype(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return None
    if isinstance(value, list | tuple):
        return [_own(v) for v in value]
    return ours(value)


def _some(got: Any, result: Any) -> Any:
    """Our results that PyTorch has, too: statistics of norms and indices of pools are not given."""
    if isinstance(result, tuple | list) and isinstance(got, tuple | list):
        return [a if a is not None else b for a, b in zip(got, result, strict=False)]
    return got


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [x for v in value for x in _leaves(v)]
    return [value]


def _with(value: Any, rest: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_with(v, rest) for v in value)
    return next(rest)


def _fits(result: Any) -> bool:
    """Whether there are only tensors of types that there are here."""
    import torch

    for t in _leaves(result):
        if isinstance(t, torch.Tensor):
            try:
                assert isinstance(_dtype(t.dtype), DType)
            except MonoplanError:
                return False
    return True


if __name__ == "__main__":
    sys.exit(main())
