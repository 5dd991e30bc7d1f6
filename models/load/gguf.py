"""GGUF files: metadata, configuration, and weights under Hugging Face names, dequantized when read."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.frontend.parameter import low_bit_part
from monoplan.ir.errors import LoadError, located
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import LOW_BITS, Array, DType, Part
from monoplan.models.config import LlamaConfig
from monoplan.models.families import ARCHITECTURES as FAMILY_ARCHITECTURES
from monoplan.models.families import Family, family_of
from monoplan.models.load.config_json import changes_numbers, is_size
from monoplan.models.load.safetensors import DTYPES
from monoplan.models.load.weight_file import Origin, WeightFile

# The header of a GGUF file, read with a check at every step, and the tensors that it describes.
#
# `gguf.GGUFReader` trusts the counts in the file and needs seconds for a vocabulary. The block formats of the weights
# are the library's.


FLOATS = {kind: DTYPES[kind] for kind in ("F32", "F16", "BF16")}
CHUNK = 1 << 18  # values dequantized at a time: small enough to stay in the CPU's cache
EXPERT_COLUMNS = 16  # columns of experts in low-bit types are a multiple of it: plans read them so
FIRST_READ = 4 << 20  # bytes: more than the header of most small models, vocabulary and all
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MANY = 64  # strings: fewer are read one by one
# Number in the file -> name, numbers in a block, its bytes: the usual ones, for which the library is not imported until
# one is decoded.
KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: its block format, its shape (row-major), and where its bytes are."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: WeightFile
    begin: int
    nbytes: int

    def values(self, part: Part | None = None) -> Array:
        """Return a copy of the numbers, or of a part of them: in the stored type if that is of floats, else float32."""
        what = f"tensor {self.name!r}"
        if self.kind in FLOATS:
            return self.file.tensor(self.begin, FLOATS[self.kind], self.shape, what, part)
        if part is None:
            return dequantized(self.kind, self.shape, self.file.read(self.begin, self.nbytes, what))
        if part.axis == 0 and len(self.shape) > 1:  # rows are made of whole blocks
            row = self.nbytes // self.shape[0]
            raw = self.file.read(self.begin + part.start * row, part.length * row, what)
            return dequantized(self.kind, part.of(self.shape), raw)
        return np.ascontiguousarray(part.cut(self.values()))

    def blocks(self, part: Part | None = None) -> Array:
        """The blocks of a matrix as they are, [rows, bytes]; or a part of them."""
        rows = self.nbytes // self.shape[0]
        first, count = (0, self.shape[0]) if part is None or part.axis else (part.start, part.length)
        raw = self.file.read(self.begin + first * rows, count * rows, f"tensor {self.name!r}").reshape(count, rows)
        if part is None or part.axis == 0:
            return raw
        return np.ascontiguousarray(low_bit_part(raw, part, LOW_BITS[self.kind.lower()]))


def dequantized(kind: str, shape: tuple[int, ...], raw: Array) -> Array:
    """Return the numbers, in float32, that the blocks of a format stand for."""
    import gguf

    codec = getattr(gguf.quants, kind)
    codec.init_grid()
    blocks = raw.reshape(-1, codec.type_size)
    out = np.empty((len(blocks), codec.block_size), np.float32)
    step = max(1, CHUNK // codec.block_size)
    # Damaged scales may overflow to infinity; that is seen in the numbers and needs no warning as well.
    with np.errstate(all="ignore"):
        for begin in range(0, len(blocks), step):
            out[begin : begin + step] = codec.dequantize_blocks(blocks[begin : begin + step])
    return out.reshape(shape)


class _MoreNeeded(Exception):  # noqa: N818  (no error: more of the file is read)
    """The header goes on beyond what was read of the file."""


class Header:
    """The header of a GGUF file; every length is checked against the file before it is used."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, WeightFile(path)
        self.size, count = self.file.size, FIRST_READ
        while True:
            self.bytes = memoryview(self.file.read(0, min(count, self.size), "the header"))  # type: ignore[arg-type]
            try:
                self._parse()
                break
            except _MoreNeeded:
                count *= 4
        self.bytes = memoryview(b"")  # it may be large, and all that was in it has been taken

    def _parse(self) -> None:
        if bytes(self.bytes[:4]) != b"GGUF":
            raise self.damaged("it does not begin with GGUF")
        self.position = 4
        version = self.number("I")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            raise self.damaged("it is big-endian" if swapped else f"format version {version} is unknown")
        tensors, pairs = self.number("Q"), self.number("Q")
        # The smallest pair has 13 bytes and the smallest tensor 24: a larger count can only be damage.
        if tensors * 24 + pairs * 13 > self.size:
            raise self.damaged(f"{tensors} tensors and {pairs} metadata entries can't fit into the file")
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, int] = {}  # of metadata, as the file numbers them
        for _ in range(pairs):
            key = self.string()
            if key in self.metadata:
                raise self.damaged(f"the key {key!r} is there twice")
            self.kinds[key] = self.number("I")
            self.metadata[key] = self.value(self.kinds[key])
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        # As the format says: with any other, weights would begin at the wrong byte.
        if not is_size(alignment) or alignment % 8 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {alignment!r:.60}, not a power of two from 8")
        start = -(-self.position // alignment) * alignment
        for name, _, _, offset in infos:
            if offset % alignment:
                raise self.damaged(f"the tensor {name!r} begins at {offset}, no multiple of the alignment {alignment}")
        self.tensors: dict[str, StoredTensor] = {}
        for name, kind, shape, offset in infos:
            if name in self.tensors:
                raise self.damaged(f"the tensor {name!r} is there twice")
            self.tensors[name] = self._tensor(name, kind, shape, start + offset)

    def damaged(self, why: str) -> LoadError:
        fix = "provide a GGUF file of version 2 or 3, or download it again"
        return LoadError(f"{self.path.name} is not a usable GGUF file", where=self.path, why=why, fix=fix)

    def take(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        begin = self.position
        if begin + count > len(self.bytes):
            if begin + count <= self.size:
                raise _MoreNeeded
            raise self.damaged(f"it ends inside its header: {count} bytes wanted at byte {begin}")
        self.position += count
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.bytes, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"a metadata entry has the unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
            begin = self.take(count * dtype.itemsize)
            return np.frombuffer(self.bytes, dtype, count, begin).copy()
        if kind != _STRING:
            raise self.damaged(f"a metadata array has the unsupported type {kind}")
        if count * 8 > self.size:
            raise self.damaged(f"an array of {count} strings can't fit into the file")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """Read strings, of which a vocabulary has 100 000: all at once where they are usual, else in a plain loop."""
        texts = self._usual_strings(count) if count >= MANY else None
        if texts is not None:
            return texts
        texts = []
        data, position, size = self.bytes, self.position, len(self.bytes)
        length_at, add = struct.Struct("<Q").unpack_from, texts.append
        try:
            for _ in range(count):
                begin = position + 8
                end = begin + length_at(data, position)[0]
                if end > size:
                    break
                add(str(data[begin:end], "utf-8"))
                position = end
        except (struct.error, UnicodeDecodeError):
            pass
        if len(texts) < count:
            if size < self.size and (position + 8 > size or position + 8 + length_at(data, position)[0] > size):
                raise _MoreNeeded
            raise self.damaged(f"the text at byte {position} is longer than the file or not UTF-8")
        self.position = position
        return texts

    def _usual_strings(self, count: int) -> list[str] | None:
        """Strings of 1 to 255 bytes without a zero among them, so that seven zeros are always those of a length."""
        window = np.frombuffer(self.bytes, np.uint8)[self.position :][: count * 24]
        two = (window[:-1] | window[1:]) == 0
        four = two[:-2] & two[2:]
        lengths_at = np.flatnonzero(four[1:-3] & four[4:])[:count]
        ends = lengths_at + 8 + window[lengths_at]
        if len(ends) < count or lengths_at[0] != 0 or (ends[:-1] != lengths_at[1:]).any() or ends[-1] > len(window):
            return None
        text = window[: ends[-1]].copy()
        text[lengths_at] = 0
        kept = text != 0
        if np.count_nonzero(kept) != len(text) - 8 * count:
            return None
        kept[lengths_at] = True  # one zero between two strings
        try:
            found = str(text[kept].data, "utf-8").split("\0")[1:]
        except UnicodeDecodeError:
            return None
        self.position += len(text)
        return found

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name, rank = self.string(), self.number("I")
        if not 1 <= rank <= 4:
            raise self.damaged(f"the tensor {name!r} has {rank} dimensions, not 1 to 4")
        shape = tuple(reversed([self.number("Q") for _ in range(rank)]))
        if 0 in shape:  # whatever its other sizes are: they would be checked against nothing
            raise self.damaged(f"the tensor {name!r} has no elements: its shape is {list(shape)}")
        return name, self.number("I"), shape, self.number("Q")

    def _tensor(self, name: str, number: int, shape: tuple[int, ...], begin: int) -> StoredTensor:
        kind, block, size = KINDS[number] if number in KINDS else self._unusual_kind(name, number)
        count = 1
        for length in shape:
            count *= length
        nbytes = count // block * size
        if count % block or (shape and shape[-1] % block):
            raise self.damaged(f"a row of the tensor {name!r} is not made of whole {kind} blocks")
        if begin + nbytes > self.size:
            raise self.damaged(f"the tensor {name!r} ends at byte {begin + nbytes}, the file at {self.size}")
        return StoredTensor(name, kind, shape, self.file, begin, nbytes)

    def _unusual_kind(self, name: str, number: int) -> tuple[str, int, int]:
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(number)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.damaged(f"the tensor {name!r} has the unknown type {number}") from None
        if not hasattr(getattr(gguf.quants, kind.name, None), "dequantize_blocks"):
            raise LoadError(f"tensor {name!r} has the unsupported type {kind.name}", where=self.path)
        return kind.name, block, size


_NAMES = {
    "layer": "model.layers", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip


class GGUFCheckpoint:
    """The tensors of a GGUF file under Hugging Face names, its metadata, and the configuration in it.

    A tensor is read at each call, into memory of its own (see weight_file.py); block formats become float32.
    """

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, Any]) -> None:
        self.path, self.metadata = path, dict(metadata)
        with located(path, LoadError):
            self.config = read_config(self.metadata, tensors)
        self.family = _family(self.metadata)
        self._format = None if self.family is None else self.family.gguf
        self._names = {**_NAMES, **(self._format.names(self.config) if self._format else {})}
        self._tensors = {self.name_of(tensor): tensor for name, tensor in tensors.items() if name not in ROPE_TENSORS}

    def names(self) -> list[str]:
        """Return the names of all tensors; one that has no Hugging Face name keeps its own."""
        return list(self._tensors)

    def name_of(self, tensor: StoredTensor) -> str:
        """Return the Hugging Face name of a tensor of the file; its own where it has none."""
        return _hf_name(tensor.name, self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype that `tensor` gives: the stored one, or float32 for block formats."""
        return FLOATS.get(self._find(name).kind, np.dtype(np.float32))

    def stored_type(self, name: str) -> str:
        """Return the format in the file: F32, F16, BF16, Q8_0, Q4_K and so on."""
        return self._find(name).kind

    def origin(self, name: str) -> Origin:
        """Return where a tensor comes from."""
        return Origin(name, self._find(name).file)

    def tensor(self, name: str, part: Part | None = None) -> Array:
        """Return a copy of a tensor, or of a part of it, with the rows of q and k in Hugging Face order."""
        values = self._in_order(name, self._find(name).values, part)
        is_offset = self._format is not None and self._format.offset_norms and name.endswith("norm.weight")
        return values - 1 if is_offset else values

    def low_bit(self, name: str) -> DType | None:
        """The type of a matrix, or of those of experts, whose blocks plans can keep as they are; None for others."""
        stored = self._find(name)
        kept = len(stored.shape) == 2 or (len(stored.shape) == 3 and stored.shape[1] % EXPERT_COLUMNS == 0)
        return LOW_BITS.get(stored.kind.lower()) if kept else None

    def blocks(self, name: str, part: Part | None = None) -> Array:
        """Return the blocks of such a matrix, [rows, bytes], with its rows in the same order as those of `tensor`."""
        return self._in_order(name, self._find(name).blocks, part)

    def _in_order(self, name: str, read: Callable[[Part | None], Array], part: Part | None) -> Array:
        heads = self._permuted_heads(name)
        if heads is None:
            return read(part)
        if part is None or part.axis > 0:
            return _unpermute(read(part), heads)
        rows = self._find(name).shape[0] // heads  # are permuted within each head
        if rows and part.start % rows == part.length % rows == 0:
            return _unpermute(read(part), part.length // rows)
        return part.cut(_unpermute(read(None), heads)).copy()

    def _permuted_heads(self, name: str) -> int | None:
        if not (self._format.permuted if self._format else self.metadata["general.architecture"] == "llama"):
            return None  # only some writers interleave the halves of a head
        if ".q_proj." in name:
            return self.config.num_attention_heads
        return self.config.num_key_value_heads if ".k_proj." in name else None

    def _find(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise LoadError(f"there is no tensor {name!r}", where=self.path)
        return self._tensors[name]


def open_gguf(path: str | Path) -> GGUFCheckpoint:
    """Open a GGUF file of a llama, qwen2 or qwen3 model and check its whole header."""
    path = Path(path)
    header = Header(path)
    return GGUFCheckpoint(path, header.tensors, header.metadata)


def _family(metadata: Mapping[str, Any]) -> Family | None:
    arch = str(metadata.get("general.architecture"))
    if arch == "llama" and _Keys(metadata, {}).size("expert_count"):
        return family_of("mixtral")
    return family_of(FAMILY_ARCHITECTURES.get(arch))


def _hf_name(name: str, names: Mapping[str, str]) -> str:
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[3] not in names:
        return name
    return f"{names['layer']}.{match[2]}.{names[match[3]]}.{match[4]}" if match[1] else f"{names[match[3]]}.{match[4]}"


def _unpermute(array: Array, heads: int) -> Array:
    """Undo the row order of llama files, which put the pairs that RoPE turns side by side."""
    if array.shape[0] % (2 * heads):
        raise LoadError(f"{array.shape[0]} rows of q or k can't be split into {heads} heads")
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def permute(array: Array, heads: int) -> Array:
    """The row order of llama files."""
    pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def gguf_name(name: str) -> str:
    """The name that a GGUF file has for a Hugging Face name."""
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    own = {hf: short for short, hf in _NAMES.items() if short != "layer"}
    if match is None or match[2] not in own:
        raise LoadError(f"GGUF files have no name for the tensor {name!r}")
    return f"{f'blk.{match[1]}.' if match[1] else ''}{own[match[2]]}.{match[3]}"


# What a GGUF file says of its model: metadata and shapes of tensors become a `LlamaConfig`.


ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_READ = frozenset(
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length expert_count "
    "attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.sliding_window rope.freq_base "
    "rope.dimension_count rope.scale_linear rope.scaling.type rope.scaling.factor rope.scaling.attn_factor "
    "rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_fast "
    "rope.scaling.yarn_beta_slow".split()
)


# Other numbers are from 1e-30 to 1e30, and those that are 0 count as absent: converters write what a model has not so.
_BOUNDS = {
    "rope.freq_base": (1.001, 1e30), "rope.freq_base_swa": (1.001, 1e30),
    "attention.layer_norm_rms_epsilon": (0.0, 1.0), "attention.layer_norm_epsilon": (0.0, 1.0),
}  # fmt: skip
_NOT_ZERO = frozenset(
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length block_count "
    "context_length embedding_length feed_forward_length rope.dimension_count rope.freq_base rope.freq_base_swa".split()
)


class _Keys:
    """The metadata under the name of the architecture, with the types that are wanted."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
        self.arch, self.metadata, self.tensors = metadata.get("general.architecture"), metadata, tensors

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry; an array of equal numbers, one for each layer, counts as that number."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        is_array = isinstance(value, np.ndarray) and value.size > 0 and bool((value == value.flat[0]).all())
        return value.flat[0].item() if is_array else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a positive number, a float in its shortest decimal form; 0 may stand for an absent key."""
        value, (least, most) = self.get(key), _BOUNDS.get(key, (1e-30, 1e30))
        if value is None or (least > 0 and self._is_absent(key, value)):
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise LoadError(f"{key} must be a number from {least} to {most}, got {value!r:.60}")
        # The file holds float32, the model was made with the decimal: 1e-05 and not 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def size(self, key: str, default: int | None = None) -> Any:
        """Return a positive integer; 0 may stand for an absent key."""
        value = self.get(key)
        if value is None or self._is_absent(key, value):
            return default
        if not is_size(value):
            raise LoadError(f"{key} must be a positive integer below 2**31, got {value!r:.60}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise LoadError(f"{key} must be true or false, got {value!r:.60}")
        return value

    def _is_absent(self, key: str, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0 and key not in _NOT_ZERO


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> LlamaConfig:
    """Return the configuration in a file, or say what is wrong with it."""
    keys = _Keys(metadata, tensors)
    family = _family(metadata)
    if not isinstance(keys.arch, str) or (keys.arch not in ARCHITECTURES and family is None):
        supported = ", ".join((*ARCHITECTURES, *FAMILY_ARCHITECTURES))
        raise LoadError(f"unsupported architecture {keys.arch!r}", fix=f"supported: {supported}")
    if not np.isin(metadata.get("split.count", 1), (0, 1)).all():
        what = f"the model is split into several files: split.count is {metadata['split.count']!r:.60}"
        raise LoadError(what, fix="merge them with gguf-split --merge")
    read = _READ if family is None or family.gguf is None else {*_READ, *family.gguf.keys}
    if keys.size("expert_count") and "expert_used_count" not in read:
        raise LoadError("mixture-of-experts models are not supported")
    if not keys.flag("attention.causal", True):
        why = "every token of it sees those behind it, so that it can't continue a text"
        raise LoadError("attention.causal is false: the model is an encoder", why=why)
    for name, value in metadata.items():
        key = name.removeprefix(f"{keys.arch}.")
        if key not in (name, *read) and not isinstance(value, np.ndarray) and changes_numbers(key, value):
            raise LoadError(f"unsupported metadata {name!r}", why=f"it is {value!r:.60}")
    head_dim = _check_shapes(keys, tensors)
    turned = keys.size("rope.dimension_count", head_dim)
    if turned > head_dim or turned % 2 or (keys.arch == "llama" and turned != head_dim):
        why = "RoPE turns pairs of values of a head" + (", in a llama model all of them" if turned < head_dim else "")
        raise LoadError(f"rope.dimension_count is {turned}, but a head has {head_dim} values", why=why)
    stored = next((tensors[n].kind for n in ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight") if n in tensors), "F32")
    arguments: dict[str, Any] = dict(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=keys.size("embedding_length"),
        intermediate_size=keys.size("feed_forward_length"),
        num_hidden_layers=keys.size("block_count"),
        num_attention_heads=keys.size("attention.head_count"),
        num_key_value_heads=keys.size("attention.head_count_kv"),
        head_dim=head_dim,
        max_position_embeddings=keys.size("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon", keys.number("attention.layer_norm_epsilon", 1e-6)),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_scaling=_rope(keys, tensors),
        partial_rotary_factor=turned / head_dim,
        attention_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        sliding_window=keys.size("attention.sliding_window"),
        dtype=FLOATS.get(stored, FLOATS["F32"]).name,
    )
    if family is not None and family.gguf is not None:
        made = family.gguf.config
        arguments["model_type"] = FAMILY_ARCHITECTURES.get(keys.arch, "mixtral")
        arguments["hidden_act"] = made.defaults.get("hidden_act", made.hidden_act)
        family.gguf.complete(keys, arguments)
        return made(**arguments)  # type: ignore[no-any-return]
    if keys.arch != "llama":
        arguments["model_type"] = keys.arch
    return LlamaConfig(**arguments)


def _check_shapes(keys: _Keys, tensors: Mapping[str, StoredTensor]) -> int:
    """Compare the sizes in the metadata with the tensors, and return the length of a head."""
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise LoadError("there is no matrix 'token_embd.weight'")
    rows, width = tensors["token_embd.weight"].shape
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise LoadError(f"the vocabulary has {len(tokens)} tokens, but the embedding has {rows} rows")
    if keys.size("embedding_length") != width:
        raise LoadError(f"embedding_length is {keys.get('embedding_length')!r}, the embedding has {width} columns")
    found = {int(match[1]) for name in tensors if (match := re.match(r"blk\.(\d{1,6})\.", name))}
    layers, heads = keys.size("block_count"), keys.size("attention.head_count")
    if not isinstance(layers, int) or found != set(range(min(layers, len(found) + 1))):
        raise LoadError(f"block_count is {layers!r}, but the file has {len(found)} layers")
    if not isinstance(heads, int) or heads > width:
        raise LoadError(f"attention.head_count must be a positive integer up to {width}, got {heads!r}")
    shared = keys.size("attention.head_count_kv", heads)
    if heads % shared:
        raise LoadError(f"attention.head_count {heads} is not a multiple of attention.head_count_kv {shared}")
    head_dim = keys.size("attention.key_length", width // heads)
    value_dim = keys.size("attention.value_length", head_dim)
    latent = keys.size("attention.kv_lora_rank") is not None  # its family knows what its lengths are
    if value_dim != head_dim and not latent:
        raise LoadError(
            "keys and values of different length are not supported",
            why=f"attention.key_length is {head_dim}, attention.value_length {value_dim}",
        )
    return head_dim


def _rope(keys: _Keys, tensors: Mapping[str, StoredTensor]) -> dict[str, Any] | None:
    """Translate the scaling keys and tensors of a GGUF file into `rope_scaling`."""
    kind, context = str(keys.get("rope.scaling.type", "linear")), keys.size("context_length")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) if kind != "none" else 1.0
    original = keys.size("rope.scaling.original_context_length", context)
    attention = keys.number("rope.scaling.attn_factor")
    found = {name: tensors[name].values().ravel().tolist() for name in ROPE_TENSORS if name in tensors}
    if kind == "yarn" and not found:
        values = {name: keys.number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        if attention is not None:
            # llama.cpp multiplies this key with the factor that other formats mean by attention_factor.
            values["attention_factor"] = attention * (1.0 + 0.1 * math.log(max(factor, 1.0)))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **values}
    # Files of Phi-3 do not name the kind.
    if (kind == "longrope" or keys.arch == "phi3") and found.keys() == set(ROPE_TENSORS[1:]):
        long, short = found["rope_factors_long.weight"], found["rope_factors_short.weight"]
    elif kind in ("none", "linear") and found.keys() == {"rope_freqs.weight"}:
        # Llama 3's scaling comes as one divisor for each frequency: longrope with equal factors is just that.
        long = short = [value * factor for value in found["rope_freqs.weight"]]
        attention, original = 1.0, context
    elif kind in ("none", "linear") and not found:
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    else:
        what = f"unsupported rope scaling {kind!r:.60} with the tensors {sorted(found)}"
        raise LoadError(what, why=f"{keys.arch}.rope.scaling.type says so")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }
