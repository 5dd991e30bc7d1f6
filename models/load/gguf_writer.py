"""Writes a model, of a GGUF file or a Hugging Face directory, as a GGUF file with quantized matrices."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.formats.blocks import BLOCK_FORMATS
from monoplan.ir.errors import ArgumentError, LoadError, located, writing
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import LOW_BITS, Array, Part
from monoplan.models.config import LlamaConfig
from monoplan.models.load.checkpoint import OpenModel, open_model
from monoplan.models.load.gguf import KINDS, GGUFCheckpoint, Header, StoredTensor, gguf_name, permute
from monoplan.models.quantize import head_kind, quantize
from monoplan.models.rope_scaling import inverse_frequencies
from monoplan.models.text.gguf_tokenizer import PRE_TOKENIZERS
from monoplan.models.text.tokenizer import Tokenizer

CHUNK = 1 << 22  # numbers of a matrix that are read at a time
# What the command calls a file -> the type of most matrices, and what general.file_type calls it.
FILE_TYPES = {
    "q8_0": ("q8_0", 7), "q6_k": ("q6_k", 18), "q5_k": ("q5_k", 16), "q5_1": ("q5_1", 9), "q5_0": ("q5_0", 8),
    "q4_k_m": ("q4_k", 15), "q4_k": ("q4_k", 14), "q4_1": ("q4_1", 3), "q4_0": ("q4_0", 2), "q3_k": ("q3_k", 11),
    "q2_k": ("q2_k", 10),
}  # fmt: skip
# Where rows are not whole blocks of 256: what llama.cpp takes.
_SMALLER_BLOCKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_FLOATS: dict[str, Any] = {"f32": np.float32, "f16": np.float16}
_NUMBERS = {name.lower(): number for number, (name, _, _) in KINDS.items()}
_FORMATS = {found.name: found for found in BLOCK_FORMATS}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


@dataclass
class Written:
    """A tensor of the source and of the file: its types, its bytes and its errors."""

    name: str  # the file's
    path: str  # the model's
    shape: tuple[int, ...]
    was: str
    bytes_before: int
    read: Callable[[Part | None], Array]  # numbers, in the row order of the file
    unit: int = 1  # rows that are read together
    blocks: Callable[[], Array] | None = None  # as they are stored, where that is a low-bit type
    kind: str = "f32"
    importance: Array | None = None  # how much errors in each column count
    error: float = 0.0  # sums of squares
    power: float = 0.0

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or those of experts, and no norm or bias."""
        return len(self.shape) > 1

    @property
    def label(self) -> str:
        """The name without its layer: tensors of one class share it."""
        name = self.name.removesuffix(".weight")
        return name.split(".", 2)[-1] if name.startswith("blk.") else name

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = math.prod(self.shape)
        if self.kind in _FLOATS:
            return count * int(np.dtype(_FLOATS[self.kind]).itemsize)
        return LOW_BITS[self.kind].stored_bytes(count)


def write_quantized(
    source: str | Path,
    path: str | Path,
    file_type: str,
    *,
    force: bool = False,
    importance: Mapping[str, Array] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Written]:
    """Write the model of `source` to a GGUF file with its matrices in a low-bit type; norms and biases stay float32.

    importance: how much errors in each column of a weight count, by the weight's path in the model.
    """
    path = Path(path)
    if path.exists() and not force:
        raise ArgumentError(f"{path} exists already", fix="choose another name, or give --force")
    opened = open_model(source)
    if isinstance(opened.weights, GGUFCheckpoint):
        metadata, kinds, tensors = _from_gguf(opened.weights)
    else:
        metadata, kinds, tensors = _from_directory(opened)
    layers = opened.config.num_hidden_layers
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    for tensor in tensors:
        tensor.kind = _kind(tensor, file_type, layers, tied)
        tensor.importance = (importance or {}).get(tensor.path)
    metadata |= {"general.file_type": FILE_TYPES[file_type][1], "general.quantization_version": 2}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing("the model", path):
        try:
            _write(part, metadata, kinds, tensors, progress)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return tensors


def _kind(tensor: Written, file_type: str, layers: int, tied: bool) -> str:
    """The type of a tensor in the file."""
    if not tensor.is_matrix or "gate_inp" in tensor.label:  # a router is small, and its errors choose other experts
        return "f32"
    kind = FILE_TYPES[file_type][0]
    if tensor.name == ("token_embd.weight" if tied else "output.weight"):
        kind = head_kind(kind, tensor.shape[1])
    elif file_type == "q4_k_m" and tensor.label in ("attn_v", "ffn_down"):  # llama.cpp's mixture
        layer = int(tensor.name.split(".")[1])
        if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2:
            kind = "q6_k"
    if tensor.shape[-1] % LOW_BITS[kind].block:
        kind = _SMALLER_BLOCKS.get(kind, kind)
    return "f16" if tensor.shape[-1] % LOW_BITS[kind].block else kind


def _write(
    path: Path,
    metadata: dict[str, Any],
    kinds: dict[str, int],
    tensors: list[Written],
    progress: Callable[[int, int], None],
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key not in ("general.architecture", "general.alignment") and not (
            isinstance(value, (list, np.ndarray)) and not len(value)
        ):
            writer.add_key_value(key, *_typed(value, kinds.get(key)))
    for tensor in tensors:
        number = gguf.GGMLQuantizationType(_NUMBERS[tensor.kind])
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, number)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(math.prod(tensor.shape) for tensor in tensors)
        for tensor in tensors:
            writer.write_tensor_data(_data(tensor, lambda count: progress(done + count, total)))  # noqa: B023
            done += math.prod(tensor.shape)
    finally:
        writer.close()
        progress(1, 1)


def _typed(value: Any, kind: int | None) -> tuple[Any, Any, Any]:
    """A value for the gguf library: numbers keep the type that they had, others are 32 bits wide."""
    from gguf import GGUFValueType as Type

    if isinstance(value, np.ndarray):
        types = {"u": "UINT", "i": "INT", "f": "FLOAT"}
        name = "BOOL" if value.dtype.kind == "b" else f"{types[value.dtype.kind]}{8 * value.dtype.itemsize}"
        return value.tolist(), Type.ARRAY, Type[name]
    if isinstance(value, list):
        return value, Type.ARRAY, Type.STRING
    if kind is not None:
        return value, Type(kind), None
    names = {bool: Type.BOOL, int: Type.UINT32, float: Type.FLOAT32, str: Type.STRING}
    return value, names[type(value)], None


def _data(tensor: Written, progress: Callable[[int], None]) -> Array:
    """The bytes of a tensor, whose error is noted in it."""
    if tensor.kind in _FLOATS and not tensor.is_matrix:
        return np.asarray(tensor.read(None), _FLOATS[tensor.kind])
    if tensor.blocks is not None and tensor.kind == tensor.was:
        return tensor.blocks()
    rows, *_, depth = tensor.shape  # of several matrices: as many as there are
    each = math.prod(tensor.shape[1:])
    made, step = [], max(1, CHUNK // each // tensor.unit) * tensor.unit
    for begin in range(0, rows, step):
        x = np.asarray(tensor.read(Part(0, begin, min(step, rows - begin))), np.float32).reshape(-1, depth)
        if tensor.kind in _FLOATS:
            with np.errstate(over="ignore"):
                found = x.astype(_FLOATS[tensor.kind])
            meant = found.astype(np.float32)
        else:
            with located(f"tensor {tensor.name}", ArgumentError):
                found = quantize(x, tensor.kind, tensor.importance)
            meant = _FORMATS[tensor.kind].values(found)
        if not np.isfinite(meant).all():
            raise ArgumentError(f"numbers can't be of type {tensor.kind}", where=f"tensor {tensor.name}")
        tensor.power += float(np.vdot(x, x))
        meant -= x
        tensor.error += float(np.vdot(meant, meant))
        made.append(found)
        progress(begin * each + x.size)
    return np.concatenate(made)


# What is written: of a GGUF file all metadata, names and row orders; of a directory what llama.cpp's converter writes.

Source = tuple[dict[str, Any], dict[str, int], list[Written]]


def _from_gguf(weights: GGUFCheckpoint) -> Source:
    header = Header(weights.path)
    return (
        header.metadata,
        header.kinds,
        [_stored(tensor, weights.name_of(tensor)) for tensor in header.tensors.values()],
    )


def _stored(tensor: StoredTensor, path: str) -> Written:
    kind = tensor.kind.lower()
    blocks = tensor.blocks if kind in LOW_BITS and len(tensor.shape) > 1 else None
    return Written(tensor.name, path, tensor.shape, kind, tensor.nbytes, tensor.values, 1, blocks)


def _from_directory(opened: OpenModel) -> Source:
    config, weights = opened.config, opened.weights
    if opened.family is not None:
        fix = "convert it with llama.cpp, and quantize the GGUF file"
        raise LoadError(f"a {config.model_type} model can't be written from its Hugging Face files", fix=fix)
    arch = "llama" if config.model_type == "mistral" else config.model_type
    if config.hidden_act not in ("silu", "swish"):
        raise LoadError(f"a GGUF file of a {arch} model can't say hidden_act {config.hidden_act!r}")
    if config.layer_types is not None:
        raise LoadError(f"a GGUF file of a {arch} model can't say that layers differ in their windows")
    tensors = []
    names = [name for name in weights.names() if not name.endswith(".rotary_emb.inv_freq")]
    for name in names:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # a second copy of the embedding
        read: Callable[..., Array] = partial(weights.tensor, name)
        turned = arch == "llama" and (".q_proj." in name or ".k_proj." in name)
        kind, shape = weights.dtype(name), weights.shape(name)
        size = math.prod(shape) * kind.itemsize
        found = Written(gguf_name(name), name, shape, kind.name, size, read, config.head_dim if turned else 1)
        found.read = partial(_turned, read, config.head_dim) if turned else read
        tensors.append(found)
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": weights.path.name,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.rope.freq_base": float(config.rope_theta),
        f"{arch}.vocab_size": config.vocab_size,
    }
    if config.sliding_window is not None:
        metadata[f"{arch}.attention.sliding_window"] = config.sliding_window
    for key, value in _rope(config):
        if key.endswith(".weight"):
            values = np.asarray(value, np.float32)
            tensors.append(Written(key, key, values.shape, "f32", values.nbytes, lambda part, values=values: values))  # type: ignore[misc]
        else:
            metadata[f"{arch}.rope.scaling.{key}"] = value
    return metadata | _vocabulary(opened.tokenizer(), config, weights.path), {}, tensors


def _turned(read: Callable[..., Array], head_dim: int, part: Part | None) -> Array:
    array = read() if part is None else read(part)
    return permute(array, len(array) // head_dim)


def _rope(config: LlamaConfig) -> Iterator[tuple[str, Any]]:
    """The keys below rope.scaling and the tensors that say `rope_scaling`."""
    given = dict(config.rope_scaling or {})
    kind = given.pop("rope_type", "default")
    if kind == "default":
        return
    if kind == "llama3":  # one divisor for each frequency
        plain = dataclasses.replace(config, rope_scaling=None)
        yield "rope_freqs.weight", inverse_frequencies(plain)[0] / inverse_frequencies(config)[0]
        return
    factor = given.pop("factor", None)
    original = given.pop("original_max_position_embeddings", None)
    attention = given.pop("attention_factor", None)
    known = {"linear": (), "yarn": ("beta_fast", "beta_slow"), "longrope": ("short_factor", "long_factor")}
    if kind not in known or not given.keys() <= set(known[kind]):
        what = f"a GGUF file can't say the rope scaling {kind!r}"
        raise LoadError(what, why=f"it has {', '.join(sorted(given)) or 'frequencies that depend on the length'}")
    yield "type", kind
    if original is not None:
        yield "original_context_length", original
    if kind == "longrope":
        # Without an attention factor it follows from the lengths, which llama.cpp's converter writes out.
        yield "attn_factor", float(attention or inverse_frequencies(config, config.max_position_embeddings)[1])
        yield from ((f"rope_factors_{n}.weight", given[f"{n}_factor"]) for n in ("long", "short"))
        return
    if factor is None:
        factor = config.max_position_embeddings / original
    yield "factor", float(factor)
    if attention is not None:  # llama.cpp multiplies it with its own
        yield "attn_factor", float(attention) / (1.0 + 0.1 * math.log(max(factor, 1.0)))
    yield from ((f"yarn_{name}", float(value)) for name, value in given.items())


# Texts that tokenizers of different kinds cut differently.
_PROBES = (
    "Hello World, I'm here: we'LL see what they've DON'T.", "  two  spaces\n\n\tand\r\n lines   \n end ", "", " ",
    "12345 + 6.789 = 3,14", "def f(x):\n    return {'a': x**2}  # ok/\n\n", "a1b22c333 $%&!?...---|x|",
    "camelCase HTML",
    "\u00dcn\u00efc\u00f6d\u00e9 \u4e2d\u6587 \u304b\u306a \U0001f600\U0001f44d\U0001f3fd e\u0301 \u00bd \u00b2",
)  # fmt: skip


def _vocabulary(tokenizer: Tokenizer, config: LlamaConfig, where: Path) -> dict[str, Any]:
    """The metadata of a tokenizer, whose cuts of text are compared with its own; an error where none are the same."""
    data = json.loads(tokenizer._core.to_str())
    model, bare = data["model"], json.dumps(data.get("pre_tokenizer"))
    problem = LoadError(
        "a GGUF file can't say this tokenizer",
        where=where,
        why=f"it is {model['type']}, or cuts text in a way that has no name",
        fix="use llama.cpp's convert_hf_to_gguf.py, then quantize its file",
    )
    if model["type"] != "BPE":
        raise problem
    tokens, kinds = [f"[PAD{i}]" for i in range(config.vocab_size)], [_UNUSED] * config.vocab_size
    for text, index in tokenizer._core.get_vocab(with_added_tokens=True).items():
        is_byte = model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x")
        tokens[index], kinds[index] = text, _BYTE if is_byte else _NORMAL
    for token in data["added_tokens"]:
        kinds[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found: dict[str, Any] = {"tokens": tokens, "token_type": np.array(kinds, np.int32)}
    if "ByteLevel" in bare:
        found |= {"model": "gpt2", "merges": merges}
        variants = [{"pre": pre} for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "default")]
        assert all(variant["pre"] in PRE_TOKENIZERS for variant in variants)
    else:
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        if (unknown := model.get("unk_token")) in tokens:
            kinds[tokens.index(unknown)] = _UNKNOWN
            found |= {"unknown_token_id": tokens.index(unknown), "token_type": np.array(kinds, np.int32)}
        scores = [-float(ranks.get(text, len(ranks))) for text in tokens]
        found |= {"model": "llama", "pre": "default", "scores": np.array(scores, np.float32)}
        variants = [{"add_space_prefix": flag} for flag in (True, False)]  # type: ignore[dict-item]
    texts = {name: tokenizer.special_tokens.get(f"{key}_token") for name, key in (("eos", "eos"), ("padding", "pad"))}
    ids: dict[str, int | None] = {name: tokens.index(text) for name, text in texts.items() if text in tokens}
    ids = {"bos": tokenizer.bos_id, "eos": min(tokenizer.eos_ids, default=None), **ids}
    # A file names one end of text, one of a turn and one of a message; readers know others by their texts.
    others = sorted(tokenizer.eos_ids - {ids["eos"]}, key=lambda index: (kinds[index] == _CONTROL, index))
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    found |= {f"{name}_token_id": index for name, index in ids.items() if index is not None}
    found["add_bos_token"] = tokenizer.add_bos
    for variant in variants:
        metadata = {f"tokenizer.ggml.{key}": value for key, value in {**found, **variant}.items()}
        if tokenizer.chat_template is not None:
            metadata["tokenizer.chat_template"] = tokenizer.chat_template
        try:
            made = Tokenizer.from_gguf(metadata, vocab_size=config.vocab_size)
        except LoadError:
            continue
        if all(made.encode(text) == tokenizer.encode(text) for text in _PROBES):
            return metadata
    raise problem
