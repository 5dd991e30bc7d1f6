"""Compares monoplan.nn.functional with PyTorch on PyTorch's own samples (OpInfo). Needs torch and expecttest.

    python -m tests.integration.opinfo                 all ops of both, eager, six element types
    python -m tests.integration.opinfo scatter pad     some ops, with every sample that differs or is refused
    python -m tests.integration.opinfo --compiled      samples that agree, compiled, many to a plan (--every 5: a fifth)

A sample agrees when shape, element type and values are PyTorch's. It may be refused: with an error of monoplan, since
the function does not take that argument or element type. It must not differ, unless docs/pytorch.md says so.
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import MonoplanError
from monoplan.ir.types import as_dtype

DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")
# (relative, absolute): both sides round, and neither is exact.
TOLERANCE = {"float32": (3e-5, 3e-5), "float16": (4e-3, 4e-3), "bfloat16": (3e-2, 3e-2), "float64": (1e-7, 1e-7)}
# OpInfo's names where they are not ours; other names are looked up behind their last point.
NAMES = {
    "true_divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "absolute": "abs", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "special.expm1": "expm1",
    "take_along_dim": "", "bitwise_left_shift": "left_shift", "bitwise_right_shift": "right_shift", "fix": "trunc",
    "moveaxis": "movedim", "swapaxes": "transpose", "swapdims": "transpose", "hstack": "", "linalg.norm": "",
    "linalg.matmul": "matmul", "linalg.diagonal": "diagonal", "linalg.vector_norm": "", "linalg.cross": "", "to": "",
    "float_power": "", "ldexp": "", "masked.normalize": "", "normal": "",
}  # fmt: skip
MEANINGLESS = ("device", "layout", "requires_grad", "pin_memory", "memory_format")  # options of storage and training
# OpInfo gives these arguments in another order, or ours has another default (docs/pytorch.md).
ORDER: dict[str, Any] = {
    "einsum": lambda operands, equation: F.einsum(equation, *operands),
    "where": lambda x, condition, other: F.where(condition, x, other),
    "nn.functional.embedding": lambda weight, ids, **options: F.embedding(ids, weight, **options),
    "nn.functional.scaled_dot_product_attention": lambda *args, **options: F.scaled_dot_product_attention(
        *args, **options, causal_alignment="upper_left"
    ),
    "nn.functional.rms_norm": lambda x, shape, weight=None, eps=None: F.rms_norm(
        x, shape, weight, {"f16": 2**-10, "bf16": 2**-7}.get(x.dtype.name, 2**-23) if eps is None else eps
    ),
}


def documented(name: str, dtype: str, options: Any, got: Any, want: Any) -> bool:
    """Whether docs/pytorch.md explains a difference."""
    op, integers = name.rsplit(".", 1)[-1], dtype in ("int64", "int32", "bool")
    kinds = {a.dtype for a in got}
    if op in ("conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "avg_pool1d", "avg_pool2d"):
        return integers and kinds == {np.dtype(np.float32)}
    if op in ("sort", "topk"):  # of equal elements any may come first
        return not options.get("stable") and not difference(got[:1], want[:1])
    if op == "argsort":
        return not options.get("stable")
    if op == "einsum":
        return dtype == "int32" and not difference(got, [a.astype(np.int32) for a in want])
    if op == "arange" and dtype == "int64":  # older releases of PyTorch count without fractions
        return kinds == {np.dtype(np.int64)}
    return op == "dropout" or (op == "prod" and dtype == "bool" and kinds == {np.dtype(np.int64)})


def half_floats(op: Any, sample: Any, dtype: str, got: Any) -> bool:
    """Whether a result in half floats is nearer to the exact one than PyTorch's, which rounds more often."""
    import torch

    def wide(t: Any) -> Any:
        return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    if dtype not in ("float16", "bfloat16"):
        return False
    exact = sample.transform(wide)
    try:
        want = flat(op(exact.input, *exact.args, **exact.kwargs))
    except Exception:
        return False
    return not difference(got, [w.astype(g.dtype) for g, w in zip(got, want, strict=True)])


def function(name: str) -> Any:
    """Our function for an op of PyTorch, if there is one."""
    if name in ORDER:
        return ORDER[name]
    own = NAMES.get(name, name.rsplit(".", 1)[-1])
    special = name.startswith(("masked.", "linalg.", "signal.", "fft.", "special.", "_")) and name not in NAMES
    return None if not own or special or own not in F.__all__ else getattr(F, own)


def ours(x: Any) -> Any:
    """Arguments of PyTorch as ours."""
    import torch

    if isinstance(x, torch.Tensor):
        return Tensor(array(x))
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    if isinstance(x, torch.Size):
        return tuple(x)
    if isinstance(x, tuple | list):
        return type(x)(ours(i) for i in x)
    return {k: ours(v) for k, v in x.items()} if isinstance(x, dict) else x


def array(t: Any) -> Any:
    """A tensor's numbers, in memory of their own."""
    import torch

    t = t.detach().resolve_conj().resolve_neg().contiguous()
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16).numpy().copy().view(as_dtype("bf16").numpy)
    return t.numpy().copy()


def flat(x: Any) -> list[Any]:
    import torch

    if isinstance(x, torch.Tensor):
        return [array(x)]
    if isinstance(x, Tensor):
        return [x.numpy()]
    return [a for i in x for a in flat(i)] if isinstance(x, tuple | list) else [np.asarray(x)]


def difference(got: Any, want: Any) -> str:
    """What differs, if anything does."""
    if len(got) != len(want):
        return f"{len(got)} results for {len(want)}"
    for a, b in zip(got, want, strict=True):
        if a.dtype != b.dtype:
            return f"element type {a.dtype} for {b.dtype}"
        if a.shape != b.shape:
            return f"shape {a.shape} for {b.shape}"
        relative, absolute = TOLERANCE.get(a.dtype.name, (0, 0))
        wide = np.float64 if a.dtype.name in TOLERANCE else a.dtype
        x, y = a.astype(wide), b.astype(wide)
        same = np.isclose(x, y, relative, absolute, equal_nan=True) if a.dtype.name in TOLERANCE else x == y
        if not np.all(same):
            at = tuple(np.argwhere(~same)[0])
            return f"{x[at]} for {y[at]} at {list(map(int, at))} of {a.dtype}{list(a.shape)}"
    return ""


def samples(op: Any, dtype: str) -> Iterator[Any]:
    import torch

    kind = getattr(torch, dtype)
    if kind in op.supported_dtypes("cpu"):
        torch.manual_seed(0)
        yield from op.sample_inputs("cpu", kind)


class Samples(nn.Module):
    """Many calls in one forward: one plan, one run of the compiler."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors: Any) -> Any:
        rest = iter(tensors)
        return [call(*_filled((args, kwargs), rest)) for call, args, kwargs in self.calls]


def _filled(x: Any, rest: Iterator[Any]) -> Any:
    """Arguments with the next tensors in place of those that they hold."""
    if isinstance(x, Tensor):
        return next(rest)
    if isinstance(x, tuple | list):
        return type(x)(_filled(i, rest) for i in x)
    return {k: _filled(v, rest) for k, v in x.items()} if isinstance(x, dict) else x


class _Apply:
    """A function of its arguments as a pair."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, args: Any, kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _tensors(x: Any) -> list[Any]:
    if isinstance(x, Tensor):
        return [x.numpy()]
    if isinstance(x, tuple | list):
        return [a for i in x for a in _tensors(i)]
    return [a for v in x.values() for a in _tensors(v)] if isinstance(x, dict) else []


def compiled(calls: list[tuple[Any, Any, Any, Any, Any]], size: int = 150) -> tuple[int, int, list[str]]:
    """How many of (name, function, arguments, eager results, test) agree when compiled, and of how many; what does not.

    The test says whether results in half floats are exact, where they differ from the eager ones.
    """
    fine, total, bad = 0, 0, []
    kept: list[tuple[Any, ...]] = []
    for name, call, given, want, exact in calls:
        one = Samples([(_Apply(call), *given)])
        arrays = _tensors(given)
        try:
            trace(one, *(mp.spec(*a.shape, dtype=a.dtype) for a in arrays))
        except MonoplanError as error:  # the values matter: repeats, a mask
            bad.append(f"{name} is not traced: {error.what}")
            continue
        kept.append((name, call, given, want, exact, arrays))
    for at in range(0, len(kept), size):
        part = kept[at : at + size]
        module = Samples([(_Apply(call), *given) for _, call, given, *_ in part])
        results = mp.compile(module)(*(a for *_, arrays in part for a in arrays))
        for (name, _, _, want, exact, _), result in zip(part, results, strict=True):
            total += 1
            got = [np.asarray(a) for a in _leaves(result)]
            wrong = difference(got, want)
            wrong = "" if wrong and exact(got) else wrong
            fine += not wrong
            bad += [f"{name} compiled: {wrong}"] if wrong else []
    return fine, total, bad


def _leaves(x: Any) -> list[Any]:
    return [a for i in x for a in _leaves(i)] if isinstance(x, tuple | list) else [x]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="compile one of so many samples")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what is refused, too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    dtypes = args.dtype or DTYPES
    counts: dict[str, collections.Counter[str]] = {}
    notes: collections.Counter[str] = collections.Counter()
    calls: list[tuple[Any, Any, Any, Any, Any]] = []
    for op in op_db:
        own = function(op.name)
        if own is None or (args.ops and op.name not in args.ops and op.name.rsplit(".", 1)[-1] not in args.ops):
            continue
        count = counts.setdefault(op.name, collections.Counter())
        for dtype in dtypes:
            for sample in samples(op, dtype):
                try:
                    want = flat(op(sample.input, *sample.args, **sample.kwargs))
                except Exception:
                    continue
                label = f"{op.name}{f'.{op.variant_test_name}' if op.variant_test_name else ''} {dtype}"
                options = {k: v for k, v in sample.kwargs.items() if k not in MEANINGLESS}
                if "max_pool" in op.name:  # values only
                    options.pop("return_indices", None)
                    want = want[:1]
                given = ours((sample.input, *sample.args)), ours(options)
                try:
                    got = flat(own(*given[0], **given[1]))
                except (MonoplanError, TypeError) as error:
                    count["refused"] += 1
                    notes[f"{label} refused: {getattr(error, 'what', error)}"] += 1
                    continue
                except Exception as error:  # an error of ours must say what is wrong
                    count["differ"] += 1
                    notes[f"{label} differ: {type(error).__name__} {error}"] += 1
                    continue
                wrong = difference(got, want)
                known = wrong and (
                    documented(op.name, dtype, sample.kwargs, got, want) or half_floats(op, sample, dtype, got)
                )
                outcome = "agree" if not wrong else "documented" if known else "differ"
                count[outcome] += 1
                if wrong and (outcome == "differ" or args.ops):
                    notes[f"{label} {outcome}: {wrong}"] += 1
                if not wrong:
                    calls.append((label, own, given, got, partial(half_floats, op, sample, dtype)))
    total: collections.Counter[str] = collections.Counter()
    for name, count in counts.items():
        total.update(count)
        if count["differ"] or count["refused"] or args.ops:
            print(f"{name:45} {dict(count)}")
    if args.ops or args.verbose:
        print(*(f"{n} x {text}" for text, n in notes.most_common()), sep="\n")
    else:
        print(*(f"{n} x {text}" for text, n in notes.items() if " differ: " in text), sep="\n")
    everything = sum(total.values())
    print(f"{len(counts)} ops, {everything} samples: {dict(total)}")
    failed = total["differ"]
    if args.compiled:
        fine, tried, bad = compiled(calls[:: args.every])
        print(*bad, sep="\n")
        print(f"compiled: {fine} of {tried} agree")
        failed += tried - fine
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
