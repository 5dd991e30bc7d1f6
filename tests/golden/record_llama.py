"""Record logits of small random LLaMA-like models from Hugging Face transformers.

    python tests/golden/record_llama.py [CASE ...]

Needs torch, transformers and safetensors; the tests that read the files need numpy only. Each case becomes
`tests/golden/llama/<case>.npz` with R records of the same shape (one for each start position):

    meta              JSON text: case, note, model_type, seed, chunks, starts, configs, shapes,
                      weights_sha256, versions. `configs` maps a spelling ("new", "old_type", ...) to a whole
                      config.json; all spellings of a case were loaded and gave the same bits.
    input_ids         int32 [R, batch, seq]
    position_ids      int32 [R, batch, seq]
    logits_f32        float32 [R, batch, seq, vocab]
    logits_f64        float64 [R, batch, seq, vocab]: the same weights, in double precision
    logits_f64_bf16w  float32 [R, batch, seq, vocab]: double precision from weights rounded to bfloat16,
                      what a bfloat16 run should be compared with (stored in float32 to stay small)
    bf16_error_max    float64 [R]: largest and mean |transformers in bfloat16 - logits_f64_bf16w|
    bf16_error_mean   float64 [R]
    inv_freq          float32 [R, head_dim / 2]: the frequencies in force after the record's last call
    attention_scaling float64 [R]: the factor on cos and sin

`chunks` lists the lengths of the successive calls through one KV cache; [] is one call without a cache.
Weights come from `weights.random_state_dict(shapes, seed)`. With tied embeddings there is no lm_head.weight.
Each record starts from a freshly loaded model, since dynamic RoPE remembers the longest sequence it has seen.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from llama_cases import CASES, Case
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from weights import fingerprint, random_state_dict

FOLDER = Path(__file__).parent / "llama"
Weights = Mapping[str, torch.Tensor]


class KeepDouble(TorchFunctionMode):
    """Let a float64 model stay in float64.

    transformers asks for float32 in norms and softmax, which raises bfloat16 but would lower float64. The
    RoPE angles are not touched: transformers defines them in float32, so all runs rotate by the same angles.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        return func(*args, **kwargs)


@dataclass
class Run:
    """One record's logits, and the RoPE state that made them."""

    logits: NDArray[np.float64]
    inv_freq: NDArray[np.float32]
    attention_scaling: float


@dataclass
class Records:
    """The arrays of a case, one entry for each start position."""

    arrays: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self.arrays.setdefault(name, []).append(value)

    def stacked(self) -> dict[str, NDArray[Any]]:
        return {name: np.stack(values) for name, values in self.arrays.items()}


def load(config: dict[str, Any], weights: Weights, dtype: torch.dtype) -> PreTrainedModel:
    """Load as a user would, from a directory: only then are old keys read, and inv_freq kept in float32."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file(dict(weights), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    wrong = {key: names for key, names in info.items() if names}
    if wrong:
        raise ValueError(f"weights do not fit the model: {wrong}")
    return model.eval()


@torch.no_grad()
def run(case: Case, config: dict[str, Any], weights: Weights, dtype: torch.dtype, ids: Any, positions: Any) -> Run:
    """Run one record with a fresh model, through a cache where the case has chunks."""
    model = load(config, weights, dtype)
    ids, positions = torch.from_numpy(ids).long(), torch.from_numpy(positions).long()
    # Without a mask transformers reads a jump in position_ids as the start of another, packed sequence.
    mask = torch.ones_like(ids)
    parts, past, done = [], None, 0
    for length in case.chunks or (ids.shape[1],):
        part = slice(done, done + length)
        done += length
        with KeepDouble():
            output = model(
                ids[:, part],
                attention_mask=mask[:, :done],
                position_ids=positions[:, part],
                past_key_values=past,
                use_cache=bool(case.chunks),
            )
        past = output.past_key_values
        parts.append(output.logits.double())
    rotary = model.model.rotary_emb
    return Run(torch.cat(parts, dim=1).numpy(), rotary.inv_freq.numpy(), float(rotary.attention_scaling))


def saved_config(case: Case) -> dict[str, Any]:
    """Return the config.json that this version of transformers writes for the case."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.config))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return json.loads(Path(folder, "config.json").read_text())


def state_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint with this config; tied embeddings are stored once."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    return shapes


def record(case: Case) -> dict[str, NDArray[Any]]:
    """Run every record of a case in every precision and return the arrays of its file."""
    config = saved_config(case)
    configs = {"new": config, **case.other_spellings(config)}
    shapes = state_shapes(config)
    arrays = random_state_dict(shapes, case.seed)
    weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    records = Records()
    for ids, positions in case.inputs():
        f32 = run(case, config, weights, torch.float32, ids, positions)
        for spelling, other in configs.items():
            again = run(case, other, weights, torch.float32, ids, positions)
            if not np.array_equal(f32.logits, again.logits):
                raise ValueError(f"{case.name}: config {spelling!r} describes another model")
        f64 = run(case, config, weights, torch.float64, ids, positions)
        reference = run(case, config, rounded, torch.float64, ids, positions)
        error = np.abs(run(case, config, rounded, torch.bfloat16, ids, positions).logits - reference.logits)
        records.add(
            input_ids=ids,
            position_ids=positions,
            logits_f32=f32.logits.astype(np.float32),
            logits_f64=f64.logits,
            logits_f64_bf16w=reference.logits.astype(np.float32),
            bf16_error_max=error.max(),
            bf16_error_mean=error.mean(),
            inv_freq=f32.inv_freq,
            attention_scaling=f32.attention_scaling,
        )
    meta = {
        "case": case.name,
        "note": case.note,
        "model_type": config["model_type"],
        "seed": case.seed,
        "chunks": case.chunks,
        "starts": case.starts,
        "configs": configs,
        "shapes": shapes,
        "weights_sha256": fingerprint(arrays),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
    }
    return {"meta": np.array(json.dumps(meta)), **records.stacked()}


def main(names: list[str]) -> None:
    """Record the named cases, or all of them."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Said once for each CPU without bfloat16 instructions; the matmul taken instead sums in float32 too.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    torch.use_deterministic_algorithms(True)
    # The order of float sums depends on the number of threads.
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        if names and case.name not in names:
            continue
        arrays = record(case)
        path = FOLDER / f"{case.name}.npz"
        np.savez_compressed(path, **arrays)
        largest = np.abs(arrays["logits_f64"]).max()
        f32_error = np.abs(arrays["logits_f32"] - arrays["logits_f64"]).max()
        print(
            f"{case.name:28} {path.stat().st_size / 1024:6.1f} KB  |logit| {largest:5.2f}"
            f"  f32 error {f32_error:.1e}  bf16 error {arrays['bf16_error_max'].max():.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
