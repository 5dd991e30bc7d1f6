"""The command quantize: a model becomes a GGUF file with matrices of a few bits."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from monoplan.cli.common import CHECKPOINT, decoded, find_model
from monoplan.ir.errors import ArgumentError

# Those of monoplan.models.load.gguf_writer, which needs numpy.
TYPES = ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k_m", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k")
TOKENS = 512  # of the text that --check compares on


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """The options of quantize."""
    add = parser.add_argument
    add("source", metavar="SRC", help=CHECKPOINT)
    add("output", metavar="DST", help="the GGUF file to write")
    mixed = "of the matrices, but q6_k for the head (q8_0: all); q4_k_m: and for half of the value and down projections"
    add("--type", required=True, choices=TYPES, help=mixed)
    add("--force", action="store_true", help="replace DST where it exists")
    large = "measure on a text how large the numbers are that each column meets, and weigh errors by that"
    add("--statistics", metavar="FILE", help=large)
    add("--check", metavar="FILE", help=f"compare with SRC in float32 on the first {TOKENS} tokens of a text")


def quantize(args: argparse.Namespace) -> int:
    """Writes the file, and prints what it cost."""
    from monoplan.ir.types import LOW_BITS
    from monoplan.models.load.gguf_writer import FILE_TYPES, write_quantized
    from monoplan.progress import progress

    # Texts are read now: a wrong name should not take minutes to notice.
    measured, text = (_text(name) for name in (args.statistics, args.check))
    source = find_model(args.source)
    importance = None if measured is None else _importance(source, measured)
    tensors = write_quantized(
        source, args.output, args.type, force=args.force, importance=importance, progress=progress("quantizing")
    )
    wanted = LOW_BITS[FILE_TYPES[args.type][0]]
    if others := {t.kind for t in tensors if t.is_matrix and t.shape[-1] % wanted.block}:
        what = f"matrices whose rows are not whole blocks of {wanted} are {' and '.join(sorted(others))}"
        print(f"monoplan: {what}", file=sys.stderr)
    if any(t.blocks is not None and t.was != t.kind for t in tensors):
        print("monoplan: the source is quantized already: errors are those against its numbers", file=sys.stderr)
    if measured is not None:  # an embedding is read by rows
        bare = [t.name for t in tensors if t.is_matrix and t.importance is None and t.name != "token_embd.weight"]
        if bare:
            print(f"monoplan: no statistics for {len(bare)} matrices: {', '.join(bare[:3])} ...", file=sys.stderr)
    print(_table(tensors))
    if text is not None:
        print(_comparison(source, args.output, text))
    return 0


def _text(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return decoded(Path(name).read_bytes(), f"the text in {name}")
    except OSError as error:
        raise ArgumentError(f"can't read {name}", why=error.strerror or str(error)) from None


def _importance(source: str, text: str) -> dict[str, Any]:
    """How much errors in each column count, by the path of the weight."""
    from monoplan.models.auto import AutoModel
    from monoplan.progress import progress
    from monoplan.statistics import column_squares

    model = AutoModel.from_pretrained(source, dtype="float32")
    return column_squares(model, model.tokenizer.encode(text), progress("measuring"))


def _table(tensors: list[Any]) -> str:
    classes: dict[str, list[Any]] = {}
    for tensor in tensors:
        if tensor.is_matrix:
            classes.setdefault(tensor.label, []).append(tensor)
    rows: list[tuple[str, ...]] = [
        ("tensors", "count", "from", "to", "MB before", "after", "bits/weight", "squared error")
    ]
    rows += [_row(label, found) for label, found in classes.items()]
    rows.append(_row("all", tensors))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 2, 3)
    cells = [
        [t.ljust(w) if i in left else t.rjust(w) for i, (t, w) in enumerate(zip(r, widths, strict=True))] for r in rows
    ]
    return "\n".join("  ".join(row) for row in cells)


def _row(label: str, tensors: list[Any]) -> tuple[str, ...]:
    before, after = sum(t.bytes_before for t in tensors), sum(t.nbytes for t in tensors)
    matrices = [t for t in tensors if t.is_matrix]
    power = sum(t.power for t in matrices)
    error = f"{sum(t.error for t in matrices) / power:.2e}" if power else "0"
    bits = 8 * after / sum(math.prod(t.shape) for t in tensors)
    types = ["+".join(sorted({getattr(t, name) for t in matrices})) for name in ("was", "kind")]
    return label, str(len(tensors)), *types, f"{before / 1e6:.1f}", f"{after / 1e6:.1f}", f"{bits:.2f}", error


def _comparison(source: str, output: str, text: str) -> str:
    """Perplexity of both on a text, and the mean divergence of the new from the old."""
    import numpy as np

    import monoplan
    from monoplan.models.auto import AutoLlamaModel

    found, ids = [], None
    for path, dtype in ((source, "float32"), (output, None)):
        llm: Any = monoplan.compile(AutoLlamaModel.from_pretrained(path, dtype=dtype))
        if ids is None:
            ids = np.array([llm.tokenizer.encode(text)[: min(TOKENS, llm.max_length)]])
            if ids.shape[1] < 2:
                raise ArgumentError("the text of --check has less than two tokens")
        logits = llm(ids, all_logits=True)[0, :-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        found.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    assert ids is not None
    old, new = found
    before, after = (math.exp(-float(np.take_along_axis(p, ids[0, 1:, None], 1).mean())) for p in found)
    divergence = float((np.exp(old) * (old - new)).sum(-1).mean())
    same = float((old.argmax(-1) == new.argmax(-1)).mean())
    return (
        f"on {ids.shape[1]} tokens: perplexity {before:.3f} -> {after:.3f}, KL divergence {divergence:.5f}, "
        f"the same best token at {same:.1%}"
    )
