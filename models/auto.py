"""Models from disk and back: weights come tensor by tensor, and all that does not fit is in one error."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, no_init
from monoplan.ir.errors import LoadError, writing
from monoplan.ir.garbage import kept
from monoplan.ir.types import Part, as_dtype, f32, known_target
from monoplan.models.families import family_of
from monoplan.models.llama import LlamaForCausalLM, can_be_low_bit
from monoplan.models.load.checkpoint import Weights, open_model, parameter_shapes
from monoplan.models.load.hub import local_path
from monoplan.models.load.safetensors import FLOATS, save_checkpoint
from monoplan.models.text.tokenizer import MissingTokenizer

TIED, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Old checkpoints store the frequencies of RoPE, which follow from the configuration.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
_COMPARED = 1 << 20  # elements of two tensors that are compared at a time
_SHOWN = 12  # names of each kind in an error; a wrong configuration would list hundreds


class AutoModel:
    """Loads a Hugging Face directory (one file or shards), a GGUF file, or a model of the hub by its id (org/name)."""

    @classmethod
    @kept()
    def from_pretrained(
        cls,
        model_path: str | Path,
        device: str = "cpu",
        dtype: Any = None,
        *,
        adapter: str | Path | None = None,
        progress: bool = True,
        verbose: bool = False,
    ) -> LlamaForCausalLM:
        """The model with its weights in `dtype` (float32, bfloat16, float16; None: the checkpoint's own).

        The checkpoint's own is what config.json says, or else the dtype of most weights. Matrices of a GGUF file in one
        of its low-bit types stay so, as do those of a quantized Hugging Face checkpoint (see docs/formats.md), and
        the model computes in float32 on a CPU, in bfloat16 on a GPU; where experts alone are in such types, in the
        checkpoint's own. "auto" is that for such files, and bfloat16 for
        others. Headers are
        read now, each weight when it is wanted, as a copy: see load_weights. Loading that takes over a second shows a
        bar on stderr (progress=False: never); `verbose` says there what was loaded. The tokenizer is made when it is
        used first. `device` (cpu, cuda or reference) is where mp.compile(model) runs it unless told otherwise.
        `adapter` is a PEFT directory with a LoRA adapter, which is merged into the weights; low-bit ones are expanded.
        """
        target = known_target(str(device))
        begin = time.perf_counter()
        opened = open_model(model_path)
        family = opened.family
        if adapter is not None:
            from monoplan.models.load.adapter import MergedWeights, open_adapter

            merged = MergedWeights(opened.weights, open_adapter(adapter, opened.config))
            opened = opened._replace(weights=merged)
        found = [name for name in opened.weights.names() if target != "reference" and opened.weights.low_bit(name)]
        low_bit, experts_alone = bool(found), all(len(opened.weights.shape(name)) == 3 for name in found)
        if dtype == "auto":
            dtype = None if low_bit else "bfloat16"
        keep_blocks = dtype is None and low_bit
        wanted = dtype if not keep_blocks else "float32" if target == "cpu" else "bfloat16"
        if keep_blocks and experts_alone:
            wanted = None  # what is not an expert has its own type
        config = opened.config if wanted is None else dataclasses.replace(opened.config, dtype=wanted)
        if family is None:
            # The model itself may be too large for any memory where the configuration does not belong to the weights.
            # No checkpoint has more layers than tensors.
            shapes = parameter_shapes(config, most_layers=len(opened.weights.names()) + 1)
            _check_fit(shapes, config.tie_word_embeddings, opened.weights)
        with no_init():
            model: LlamaForCausalLM = (LlamaForCausalLM if family is None else family.model)(config)
        load_weights(model, opened.weights, keep_blocks=keep_blocks)
        model.device = target
        model.name_or_path = str(model_path)
        model.set_tokenizer(opened.tokenizer)
        if verbose:
            took = (time.perf_counter() - begin) * 1e3
            count = sum(math.prod(p.full_shape) for p in model.parameters())
            print(f"loaded {count / 1e6:.0f}M parameters as {config.dtype} in {took:.0f} ms", file=sys.stderr)
        return model


AutoLlamaModel = AutoModel  # the older name


def load_weights(model: Module, weights: Weights, *, keep_blocks: bool = False) -> None:
    """Binds every parameter to its tensor of a checkpoint, in its own dtype; nothing changes unless all names fit.

    keep_blocks: a matrix that the file has in a low-bit type is of that type in the model as well, and so are the
    embedding and the last matrix if they have 16 bits beside such matrices.

    The tensors are read when they are wanted: once by the compiler, which packs them one at a time, so that the
    weights are never in memory twice; or at the first eager call. What was read is a copy, and nothing that happens to
    the files afterwards changes it. The files stay open until then: one that is replaced is read as it was, one that
    was written to or cut since its header was read is a LoadError.
    """
    own = {name: t for name, t in model.state_dict().items() if isinstance(t, Parameter)}
    names = _names(weights)
    tied = TIED in own and any(own[TIED] is t for name, t in own.items() if name != TIED)
    _check_fit({name: t.full_shape for name, t in own.items()}, tied, weights)
    if tied and TIED in names:
        # A second copy of the embedding is harmless; another matrix under that name is a wrong configuration.
        embedding = next(name for name, t in own.items() if t is own[TIED] and name != TIED)
        if not _are_equal(weights, TIED, embedding):
            raise LoadError(
                f"{TIED} differs from {embedding}, but tie_word_embeddings is true",
                where=weights.path,
                fix="set tie_word_embeddings to false in config.json",
            )
        names.remove(TIED)
    for name in names:
        low_bit = weights.low_bit(name) if keep_blocks and can_be_low_bit(own[name]) else None
        if low_bit is not None and own[name].ndim == 3:  # a gate and what it multiplies are read together
            pairs = (("gate_proj", "up_proj"), ("up_proj", "gate_proj"))
            others = [other for a, b in pairs if (other := name.replace(a, b)) in names]
            low_bit = low_bit if all(weights.low_bit(other) == low_bit for other in others) else None
        blocks = None if low_bit is None else partial(weights.blocks, name)
        if keep_blocks and name in (TIED, EMBEDDING) and own[name].type.dtype == f32 and low_bit is None:
            stored = as_dtype(weights.dtype(name))
            low_bit = stored if stored.is_float and stored.bits == 16 else None
        own[name].defer(partial(weights.tensor, name), partial(weights.origin, name), low_bit, blocks)


def _are_equal(weights: Weights, one: str, other: str) -> bool:
    """Whether two matrices of a checkpoint have the same shape and values; they are read a few rows at a time."""
    if (shape := weights.shape(one)) != weights.shape(other):
        return False
    step = max(1, _COMPARED // max(1, math.prod(shape[1:])))
    parts = [Part(0, begin, min(step, shape[0] - begin)) for begin in range(0, shape[0], step)]
    return all(np.array_equal(weights.tensor(one, p), weights.tensor(other, p), equal_nan=True) for p in parts)


def _names(weights: Weights) -> list[str]:
    return [name for name in weights.names() if not _IGNORED.search(name)]


def _check_fit(own: Mapping[str, tuple[int, ...]], tied: bool, weights: Weights) -> None:
    """Compares names, shapes and dtypes with a checkpoint's headers; all that does not fit is in one error."""
    given = dict.fromkeys(_names(weights))
    missing = [name for name in own if name not in given and not (tied and name == TIED)]
    bare = {f"model.{name}" for name in given}  # LlamaModel's own names have no prefix
    if missing and {TIED, *bare}.issuperset(missing):
        fix = "use the checkpoint of the model for text generation (…ForCausalLM)"
        raise LoadError(f"it is a base model without a head: there is no {TIED}", where=weights.path, fix=fix)
    unexpected = [name for name in given if name not in own]
    wrong = [
        f"{name} is {list(weights.shape(name))}, not {list(own[name])}"
        for name in given
        if name in own and weights.shape(name) != own[name]
    ]
    # Codes of a quantized model would be taken for the values that they stand for.
    integers = [f"{name} is {kind}" for name in given if name in own and (kind := weights.dtype(name)) not in FLOATS]
    kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": wrong, "not floating point": integers}
    problems = [f"{label}: {_listed(found)}" for label, found in kinds.items() if found]
    if problems:
        what, fix = "the weights do not fit the configuration", "use a checkpoint in float32, bfloat16 or float16"
        raise LoadError(what, where=weights.path, why="; ".join(problems), fix=fix if integers else "")


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def save_model(model: LlamaForCausalLM, directory: str | Path, **options: Any) -> None:
    """Writes config.json, safetensors and the tokenizer as transformers and from_pretrained read them."""
    state = {name: t.numpy() for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state[TIED]  # stored once, as transformers does
    config = dataclasses.replace(model.config, dtype=model.dtype.numpy.name)
    family = family_of(config.model_type)
    if family is not None and family.layout is not None:
        state = family.layout(config).stored(state, config)
    save_checkpoint(directory, state, config.to_dict(), **options)
    with writing("the tokenizer", directory):
        _save_tokenizer(model, Path(directory))


def _save_tokenizer(model: LlamaForCausalLM, target: Path) -> None:
    source = local_path(model.name_or_path) if model.name_or_path else None
    if source is not None and (source / "tokenizer.json").is_file():
        for name in _TOKENIZER_FILES:
            if (source / name).is_file() and (source / name).resolve() != (target / name).resolve():
                shutil.copyfile(source / name, target / name)
        return
    try:
        tokenizer = model.tokenizer
    except MissingTokenizer:  # the model was loaded without one, and is saved without one
        return
    if tokenizer is None:
        return
    tokenizer._core.save(str(target / "tokenizer.json"))  # the object of the tokenizers library writes itself
    settings = {
        **tokenizer.special_tokens,
        "add_bos_token": tokenizer.add_bos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    ends = sorted(tokenizer.eos_ids)
    files = {"tokenizer_config.json": settings, "generation_config.json": {"eos_token_id": ends}}
    for name, data in files.items():
        (target / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
