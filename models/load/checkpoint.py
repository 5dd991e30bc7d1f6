"""Opens every kind of checkpoint: a path becomes a configuration, weights, and a tokenizer."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from monoplan.frontend.parameter import no_init
from monoplan.ir.errors import ArgumentError, LoadError, located
from monoplan.ir.types import DType, Part
from monoplan.models.config import LlamaConfig
from monoplan.models.families import Family, family_of
from monoplan.models.load.config_json import DTYPES, read_json
from monoplan.models.load.hub import local_path
from monoplan.models.load.weight_file import Origin
from monoplan.models.text.tokenizer import Tokenizer


class Weights(Protocol):
    """What a checkpoint offers, whatever the format of its files."""

    path: Path

    def names(self) -> list[str]:
        """Return the Hugging Face names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype that `tensor` gives."""
        ...

    def tensor(self, name: str, part: Part | None = None) -> NDArray[Any]:
        """Return a tensor, or a part of it, read now: the caller's own copy."""
        ...

    def origin(self, name: str) -> Origin | None:
        """Return where a tensor comes from; None if that is more than one place."""
        ...

    def low_bit(self, name: str) -> DType | None:
        """Return the low-bit type that a matrix is stored in; None for others."""
        ...

    def blocks(self, name: str, part: Part | None = None) -> NDArray[Any]:
        """Return the rows of such a matrix as they are stored."""
        ...


class OpenModel(NamedTuple):
    """A model on disk: nothing but headers has been read, and the tokenizer is made on first use."""

    config: LlamaConfig
    weights: Weights
    tokenizer: Callable[[], Tokenizer]
    family: Family | None = None  # None: LLaMA-like


def open_model(path: str | Path) -> OpenModel:
    """Open a Hugging Face directory, a GGUF file, a directory with one GGUF file in it, or a model of the hub."""
    if not isinstance(path, str | os.PathLike):
        fix = "give a Hugging Face directory, a .gguf file or an id of the hub"
        raise ArgumentError(f"a model is loaded from a path, got {path!r:.60}", fix=fix)
    try:
        return _open_path(local_path(path).expanduser())
    except RuntimeError as error:  # ~ where nobody has a home, ~name of nobody
        raise LoadError("there is no such model", where=path, why=str(error), fix="give a full path") from None
    except OSError as error:
        raise LoadError("the model can't be read", where=path, why=error.strerror or str(error)) from None


def _open_path(path: Path) -> OpenModel:
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        fix = "give a Hugging Face directory, a .gguf file or org/name at the hub"
        raise LoadError("there is no such model", where=path, why="the path does not exist", fix=fix)
    gguf_files = sorted(path.glob("*.gguf"))
    # A repository of GGUF files may have a config.json as well; weights beside it decide what it describes.
    if (path / "config.json").is_file() and (any(path.glob("*.safetensors*")) or not gguf_files):
        return _open_directory(path)
    if len(gguf_files) == 1:
        return _open_gguf(gguf_files[0])
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files[:6])
        raise LoadError(f"{len(gguf_files)} GGUF files in the directory", where=path, fix=f"name one of {names}")
    if not any(path.iterdir()):
        raise LoadError("the directory is empty", where=path, fix="give one with config.json and weights")
    why, fix = "there is no config.json and no .gguf file", "give the directory that has one of them, or the .gguf file"
    raise LoadError("no model in the directory", where=path, why=why, fix=fix)


def _open_file(path: Path) -> OpenModel:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise LoadError(f"can't read {path.name}", where=path, why=str(error)) from None
    if magic == b"GGUF" or path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        why = "a pickle file may run any code when it is loaded"
        raise LoadError(f"{path.name} is a pickle file", where=path, why=why, fix="convert to safetensors")
    if path.suffix == ".safetensors":
        raise LoadError("weights alone are no model", where=path, fix=f"give the directory {path.parent}")
    raise LoadError(f"{path.name} is not a model", where=path, fix="give a Hugging Face directory or a .gguf file")


def _open_gguf(path: Path) -> OpenModel:
    from monoplan.models.load.gguf import open_gguf

    weights = open_gguf(path)
    size = weights.config.vocab_size

    def tokenizer() -> Tokenizer:
        return Tokenizer.from_gguf(weights.metadata, vocab_size=size, where=path)

    return OpenModel(weights.config, weights, tokenizer, weights.family)


def _open_directory(path: Path) -> OpenModel:
    from monoplan.models.load.quantized import open_quantized
    from monoplan.models.load.safetensors import open_checkpoint

    data = read_json(path / "config.json")
    quantization = data.pop("quantization_config", None)
    if isinstance(data.get("vision_config"), Mapping):
        kind, fix = data.get("model_type"), "use a checkpoint of the text model alone (…ForCausalLM)"
        raise LoadError(f"the {kind} model has a vision tower, which is not supported", where=path, fix=fix)
    family = family_of(data.get("model_type"))
    with located(path / "config.json", LoadError):
        config = (LlamaConfig.from_dict if family is None else family.config)(data)
    stored = open_checkpoint(path)
    weights: Weights = stored
    if quantization:
        names = own_shapes(config, family, len(stored.names()) + 1)
        weights = open_quantized(stored, quantization, names)
    if family is not None and family.layout is not None:
        weights = family.layout(config).open(weights, config)
    if data.get("dtype", data.get("torch_dtype")) is None:
        config = dataclasses.replace(config, dtype=_own_dtype(weights))

    def tokenizer() -> Tokenizer:
        return Tokenizer.from_pretrained(path, vocab_size=config.vocab_size)

    return OpenModel(config, weights, tokenizer, family)


def own_shapes(config: LlamaConfig, family: Family | None, most_layers: int) -> dict[str, Shape]:
    """The shapes that a checkpoint must hold, by name."""
    if family is None:
        return parameter_shapes(config, most_layers)
    if config.num_hidden_layers > most_layers:
        raise LoadError(f"num_hidden_layers is {config.num_hidden_layers}, and there are fewer tensors")
    with no_init():
        return {name: p.full_shape for name, p in family.model(config).named_parameters()}


def _own_dtype(weights: Weights) -> str:
    """The element type of most numbers in a checkpoint; float32 where it is one that no model has."""
    counts: Counter[str] = Counter()
    for name in weights.names():
        counts[weights.dtype(name).name] += math.prod(weights.shape(name))
    return next((name for name, _ in counts.most_common(1) if name in DTYPES), "float32")


# The parameters of a LlamaForCausalLM by name, from its configuration alone: what a checkpoint must hold.
#
# Loading compares them with a checkpoint's headers before the model is made: a damaged config.json may ask for more
# than any memory has.


Shape = tuple[int, ...]


def parameter_shapes(config: LlamaConfig, most_layers: int) -> dict[str, Shape]:
    """Shapes by name, as LlamaForCausalLM(config) has them; of `most_layers` layers where there are more."""
    vocabulary = (config.vocab_size, config.hidden_size)
    found: dict[str, Shape] = {"model.embed_tokens.weight": vocabulary}
    layer = _layer_shapes(config)
    for i in range(min(config.num_hidden_layers, most_layers)):
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (config.hidden_size,), "lm_head.weight": vocabulary}


def _layer_shapes(config: LlamaConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    found: dict[str, Shape] = {}
    for name, outputs, inputs, bias in (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.attention_out_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        found[f"{name}.weight"] = (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        found |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return found | {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
