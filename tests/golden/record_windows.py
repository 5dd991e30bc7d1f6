"""Record what PyTorch makes of random convolutions, pools and resamplings.

    python tests/golden/record_windows.py

windows.npz has `calls`, a JSON list of [function of torch.nn.functional, its arguments after the tensors], and for call
number i the input x<i>, weights w<i> and b<i> where there are any, and the result y<i>.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

EACH = 12  # calls of each kind
rng = np.random.default_rng(20)


def number(low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def pick(*choices: Any) -> Any:
    return choices[number(0, len(choices) - 1)]


def array(*shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape, np.float32)


def conv() -> tuple[str, dict[str, Any], list[Any]]:
    n, groups = pick(1, 2), pick(1, 1, 2, 3)
    kernel, stride, dilation = ([number(1, 3) for _ in range(n)] for _ in range(3))
    padding: Any = pick([number(0, 2) for _ in range(n)], "valid", "same")
    stride = [1] * n if padding == "same" else stride
    sizes = [max(number(1, 8), (k - 1) * d + 1) for k, d in zip(kernel, dilation, strict=True)]
    lead = [number(1, 2)] * number(0, 1)
    channels, columns = groups * number(1, 2), groups * number(1, 3)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    tensors = [array(*lead, channels, *sizes), array(columns, channels // groups, *kernel), array(columns)]
    return f"conv{n}d", options, tensors


def transposed() -> tuple[str, dict[str, Any], list[Any]]:
    n, groups = pick(1, 2), pick(1, 2)
    size, stride, dilation = ([number(1, most) for _ in range(n)] for most in (4, 4, 3))
    options = {
        "stride": stride, "padding": [number(0, (k - 1) * d // 2) for k, d in zip(size, dilation, strict=True)],
        "output_padding": [number(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)], "groups": groups,
        "dilation": dilation,
    }  # fmt: skip
    channels, columns = groups * number(1, 2), number(1, 3)
    x, w = array(2, channels, *(number(2, 7) for _ in range(n))), array(channels, columns, *size)
    return f"conv_transpose{n}d", options, [x, w, array(columns * groups)]


def pool() -> tuple[str, dict[str, Any], list[Any]]:
    n, kind = pick(1, 2), pick("max", "avg")
    kernel = [number(1, 4) for _ in range(n)]
    options: dict[str, Any] = {
        "kernel_size": kernel, "stride": pick(None, [number(1, 4) for _ in range(n)]),
        "padding": [number(0, k // 2) for k in kernel], "ceil_mode": pick(True, False),
    }  # fmt: skip
    dilation = [number(1, 2) if kind == "max" else 1 for _ in range(n)]
    options |= {"dilation": dilation} if kind == "max" else {"count_include_pad": pick(True, False)}
    if kind == "avg" and n == 2:
        options["divisor_override"] = pick(None, 3)
    sizes = [max(number(1, 9), (k - 1) * d + 1) for k, d in zip(kernel, dilation, strict=True)]
    return f"{kind}_pool{n}d", options, [array(2, *sizes) if pick(True, False) else array(2, 1, *sizes)]


def adaptive() -> tuple[str, dict[str, Any], list[Any]]:
    n = pick(1, 2)
    size: Any = [number(1, 7) for _ in range(n)]
    options = {"output_size": size if n == 2 else size[0]}
    return f"adaptive_{pick('max', 'avg')}_pool{n}d", options, [array(2, 2, *(number(1, 9) for _ in range(n)))]


def resampled() -> tuple[str, dict[str, Any], list[Any]]:
    n = pick(1, 2)
    mode = pick("nearest", "nearest-exact", "area", *(["linear", "bilinear"][n - 1],) * 3)
    options: dict[str, Any] = {"mode": mode}
    if "linear" in mode:
        options["align_corners"] = pick(None, False, True)
    if pick(True, False):
        options["size"] = [number(1, 12) for _ in range(n)]
    else:
        options["scale_factor"] = pick(2, 0.5, 1.5, 0.7, 2.3)
        options["recompute_scale_factor"] = None if mode == "area" else pick(None, True)
    return "interpolate", options, [array(1, 2, *(number(2, 6) for _ in range(n)))]


def main() -> None:
    calls, arrays = [], {}
    for make in (conv, transposed, pool, adaptive, resampled):
        for _ in range(EACH):
            name, options, tensors = make()
            i = len(calls)
            calls.append([name, options])
            y = getattr(F, name)(*map(torch.from_numpy, tensors), **options).numpy()
            arrays |= {f"{what}{i}": a for what, a in zip("xwb", tensors, strict=False)} | {f"y{i}": y}
    np.savez_compressed(Path(__file__).parent / "windows.npz", calls=json.dumps(calls), **arrays)


if __name__ == "__main__":
    main()
