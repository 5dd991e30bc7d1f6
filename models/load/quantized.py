"""Hugging Face checkpoints with a `quantization_config`: gptq, awq, fp8 and compressed-tensors.

The stored tensors of a layer (codes, scales, zero points) appear as one matrix under its plain name, `….weight`. Plans
keep its codes and scales, as blocks of a low-bit type; what they mean is scale * (code - zero) in float32. Which layers
are quantized is seen by their tensors: those in `modules_to_not_convert` or `ignore` have a plain weight and stay as
they are. Quantization of activations, static or dynamic, is ignored: activations are exact here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from monoplan.codegen.formats.blocks import block_format
from monoplan.frontend.parameter import low_bit_part
from monoplan.ir.errors import LoadError, located
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import LOW_BITS, Array, DType, Part, as_dtype, f16, f64
from monoplan.models.load.config_json import short
from monoplan.models.load.safetensors import DTYPES, FLOATS, Checkpoint
from monoplan.models.load.weight_file import Origin, code_of

Config = Mapping[str, Any]

_SUPPORTED = (
    "supported: gptq and awq (gemm) of 4 bits, gptq of 8, fp8, and compressed-tensors int-quantized, pack-quantized "
    "(4 and 8 bits) and float-quantized (fp8), mxfp4 of gpt-oss"
)
_INT32, _INT8, _FP8 = frozenset([DTYPES["I32"]]), frozenset([DTYPES["I8"]]), frozenset([DTYPES["F8_E4M3"]])
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # which nibble of a word has each of its 8 columns
_ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale")  # what layers with static activations have
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(DTYPES["F8_E4M3"]).astype(np.float32)  # by code


@dataclass(frozen=True)
class _Matrix:
    """A matrix [out, in] whose codes are unsigned, and signed or fp8 ones in `_Plain`.

    `group` columns and `tall` rows share a scale; with `order`, columns have the groups that this tensor says.
    """

    stored: Checkpoint
    layer: str
    shape: tuple[int, int]
    bits: int
    group: int
    scale: str
    order: str | None = None
    tall: int = 1

    @property
    def middle(self) -> int:
        """The zero point of codes that are as often negative as positive."""
        return 2 ** (self.bits - 1)

    @property
    def is_fp8(self) -> bool:
        return False

    def codes(self, rows: Part) -> Array:
        """The codes of some rows, [rows, in]."""
        raise NotImplementedError

    def scales(self, rows: Part) -> Array:
        """Their scales, [rows, groups]."""
        first, last = rows.start // self.tall, (rows.start + rows.length - 1) // self.tall
        name = f"{self.layer}.{self.scale}"
        if len(self.stored.shape(name)) < 2:  # one for all, or one for each row
            found = self.stored.tensor(name).reshape(-1, 1)[first : last + 1]
        else:
            found = self.stored.tensor(name, Part(0, first, last + 1 - first))
        return found[np.arange(rows.start, rows.start + rows.length) // self.tall - first]

    def zeros(self, rows: Part) -> Array | int:
        """Their zero points in the codes' numbers, [rows, groups], or the one of all."""
        raise NotImplementedError

    def groups(self) -> Array:
        """The group of each column."""
        regular: Array = np.arange(self.shape[1]) // self.group
        if self.order is None:
            return regular
        found, last = self.stored.tensor(self.order), regular[-1]
        if (found == -1).all():  # what compressed-tensors has where nothing was reordered
            return regular
        if found.min() < 0 or found.max() > last:
            why = f"it has groups {found.min()} to {found.max()}, and there are {last + 1}"
            raise LoadError(f"tensor {self.order!r} is out of range", where=self.stored.path, why=why)
        return found

    def values(self, rows: Part) -> Array:
        """What some rows stand for, in float32."""
        codes, groups, columns = self.codes(rows), self.groups(), self.shape[1]
        values = (_FP8_VALUES[codes.view(np.uint8)] if codes.dtype in _FP8 else codes).astype(np.float32, copy=False)
        found = values
        place: tuple[Any, ...] = (slice(None), groups)
        if columns % self.group == 0 and np.array_equal(groups, np.arange(columns) // self.group):
            # A view with an axis of groups: a copy of the scales for each column takes most of the time.
            found, place = values.reshape(rows.length, -1, self.group), (..., None)
        zeros = self.zeros(rows)
        if not isinstance(zeros, int):
            found -= zeros.astype(np.float32)[place]
        elif zeros:
            found -= zeros
        with np.errstate(all="ignore"):  # damaged scales are seen in the numbers
            found *= self.scales(rows).astype(np.float32)[place]
        return values

    def low_bit(self) -> DType | str:
        """The type of blocks with the same numbers, the largest whose columns share a scale; or why there is none."""
        columns, groups, scale = self.shape[1], self.groups(), as_dtype(self.stored.dtype(f"{self.layer}.{self.scale}"))
        if columns % 32 or scale == f64:
            return f"scales are {scale}" if scale == f64 else f"rows of {columns} numbers are not whole blocks of 32"
        sizes = (n for n in (128, 64, 32) if columns % n == 0 and not np.ptp(groups.reshape(-1, n), axis=1).any())
        if (size := next(sizes, 0)) == 0:
            return "columns that share a scale do not lie together"
        is_plain = not np.any(np.asarray(self.zeros(Part(0, 0, self.shape[0]))).astype(np.float32) != self.middle)
        if self.is_fp8:
            return LOW_BITS["fp8_128" if size == 128 else "fp8_32"] if is_plain else "it has zero points"
        if size == 32 and scale == f16 and is_plain:
            return LOW_BITS["q4_0" if self.bits == 4 else "q8_0"]
        return LOW_BITS[f"int4_{size}_{scale}" if self.bits == 4 else f"int8_{size}_f32"]

    def blocks(self, rows: Part, dtype: DType) -> Array:
        """Some rows as blocks of that type; codes of 8 bits have signs there."""
        found, first = block_format(dtype), self.groups()[:: dtype.block]
        codes, zeros = self.codes(rows).view(np.uint8), self.zeros(rows)
        if self.bits == 8 and self.middle:
            codes, zeros = codes ^ np.uint8(128), np.subtract(zeros, 128, dtype=np.int16)
        scales = self.scales(rows).astype(np.float32)
        points = np.broadcast_to(zeros, scales.shape).astype(np.int8)[:, first] if found.zeros else None
        return found.join(codes, scales[:, first], points)


@dataclass(frozen=True)
class _Gptq(_Matrix):
    """qweight [in / codes per word, out], qzeros [groups, out / codes per word], scales [groups, out].

    `shift`: what is added to stored zero points.
    """

    shift: int = 0

    def codes(self, rows: Part) -> Array:
        words = self.stored.tensor(f"{self.layer}.qweight", Part(1, rows.start, rows.length))
        return _codes(words.T, self.bits)

    def scales(self, rows: Part) -> Array:
        return self.stored.tensor(f"{self.layer}.{self.scale}", Part(1, rows.start, rows.length)).T

    def zeros(self, rows: Part) -> Array | int:
        # The writer's z - 1 of a zero point 0 is all ones.
        return (self._across("qzeros", rows) + np.uint8(self.shift)) & np.uint8(2**self.bits - 1)

    def _across(self, name: str, rows: Part) -> Array:
        """Codes that share words with those of other rows."""
        words, skipped = _words(rows, 32 // self.bits)
        found = _codes(self.stored.tensor(f"{self.layer}.{name}", words._replace(axis=1)), self.bits)
        return self._in_order(found)[:, skipped : skipped + rows.length].T

    def _in_order(self, codes: Array) -> Array:
        return codes


@dataclass(frozen=True)
class _Awq(_Gptq):
    """qweight [in, out / 8], else as gptq; columns of a word are interleaved."""

    def codes(self, rows: Part) -> Array:
        words, skipped = _words(rows, 8)
        found = np.ascontiguousarray(self.stored.tensor(f"{self.layer}.qweight", words._replace(axis=1)).T)
        codes = np.empty((len(found), 8, self.shape[1]), np.uint8)
        for column, nibble in enumerate(_AWQ_ORDER):
            codes[:, column] = found >> 4 * nibble & 15
        return codes.reshape(-1, self.shape[1])[skipped : skipped + rows.length]

    def _in_order(self, codes: Array) -> Array:
        return codes.reshape(len(codes), -1, 8)[:, :, _AWQ_ORDER].reshape(codes.shape)


@dataclass(frozen=True)
class _Packed(_Matrix):
    """weight_packed [out, in / codes per word]; weight_zero_point, packed along out: 2^(bits - 1) is added to both."""

    def codes(self, rows: Part) -> Array:
        words = self.stored.tensor(f"{self.layer}.weight_packed", rows)
        return np.ascontiguousarray(_codes(words, self.bits)[:, : self.shape[1]])

    def zeros(self, rows: Part) -> Array | int:
        name, middle = f"{self.layer}.weight_zero_point", 2 ** (self.bits - 1)
        if name not in self.stored:
            return middle
        words, skipped = _words(rows, 32 // self.bits)
        return _codes(self.stored.tensor(name, words).T, self.bits)[:, skipped : skipped + rows.length].T


@dataclass(frozen=True)
class _Plain(_Matrix):
    """weight [out, in] in int8 or fp8, and weight_zero_point of the shape of the scales."""

    @property
    def middle(self) -> int:
        return 0

    @property
    def is_fp8(self) -> bool:
        return self.stored.dtype(f"{self.layer}.weight") in _FP8

    def codes(self, rows: Part) -> Array:
        return self.stored.tensor(f"{self.layer}.weight", rows)

    def zeros(self, rows: Part) -> Array | int:
        if f"{self.layer}.weight_zero_point" not in self.stored:
            return 0
        return replace(self, scale="weight_zero_point").scales(rows)  # of the same shape


def _codes(words: Array, bits: int) -> Array:
    """The codes in words of 32 bits along the last axis, lowest bits first."""
    found = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    return found if bits == 8 else np.stack([found & 15, found >> 4], axis=-1).reshape(len(found), -1)


def _words(rows: Part, count: int) -> tuple[Part, int]:
    """The words, of `count` codes each, that have codes of these rows; and how many of the first belong to others."""
    first, end = rows.start // count, -(-(rows.start + rows.length) // count)
    return Part(0, first, end - first), rows.start - first * count


class QuantizedCheckpoint:
    """The tensors of a checkpoint with those of each quantized layer gathered as one matrix, `….weight`."""

    def __init__(self, stored: Checkpoint, config: Config, matrices: list[_Matrix], hidden: Collection[str]) -> None:
        self.path, self._stored = stored.path, stored
        self._scheme, self.method = json.dumps(config, sort_keys=True), str(config["quant_method"])
        self._matrices = {f"{matrix.layer}.weight": matrix for matrix in matrices}
        self._names = list(dict.fromkeys([*(n for n in stored.names() if n not in hidden), *self._matrices]))
        self._low_bits: dict[str, DType | str] = {}

    def names(self) -> list[str]:
        """Return the names of all tensors, quantized ones by their plain names."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._matrices[name].shape if name in self._matrices else self._stored.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype that `tensor` gives: the stored one, or float32 for quantized matrices."""
        return np.dtype(np.float32) if name in self._matrices else self._stored.dtype(name)

    def tensor(self, name: str, part: Part | None = None) -> Array:
        """Return a copy of a tensor, or of a part of it, computed from what is read now."""
        if name not in self._matrices:
            return self._stored.tensor(name, part)
        matrix = self._matrices[name]
        if part is not None and part.axis == 0:
            return matrix.values(part)
        found = matrix.values(Part(0, 0, matrix.shape[0]))
        return found if part is None else np.ascontiguousarray(part.cut(found))

    def origin(self, name: str) -> Origin | None:
        """Return where a tensor comes from; None where it is made of tensors in several files."""
        if name not in self._matrices:
            return self._stored.origin(name)
        layer = self._matrices[name].layer
        files = {self._stored.origin(n).file for n in self._stored.names() if n.rpartition(".")[0] == layer}
        return Origin(f"{name} of {self._scheme} by {code_of(__file__)}", files.pop()) if len(files) == 1 else None

    def low_bit(self, name: str) -> DType | None:
        """Return the type of blocks that a matrix is exactly; its zero points are read to know it."""
        found = self.kept(name)
        return found if isinstance(found, DType) else None

    def kept(self, name: str) -> DType | str | None:
        """Return that type, or why there is none; None for what is not quantized."""
        if name in self._matrices and name not in self._low_bits:
            self._low_bits[name] = self._matrices[name].low_bit()
        return self._low_bits.get(name)

    def blocks(self, name: str, part: Part | None = None) -> Array:
        """Return the rows of such a matrix as blocks, [rows, bytes]."""
        if (dtype := self.low_bit(name)) is None:
            raise LoadError(f"tensor {name!r} has no blocks", where=self.path)
        matrix = self._matrices[name]
        if part is not None and part.axis == 0:
            return matrix.blocks(part, dtype)
        return np.ascontiguousarray(low_bit_part(matrix.blocks(Part(0, 0, matrix.shape[0]), dtype), part, dtype))


def open_quantized(stored: Checkpoint, config: Any, wanted: Collection[str]) -> QuantizedCheckpoint | Checkpoint:
    """Gather the layers of a checkpoint by its quantization_config; `wanted` are the names that its model has."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method == "mxfp4":  # those are experts, and a family with such experts reads them
        return stored
    if not isinstance(method, str) or method not in _METHODS:
        what = f"the weights are quantized by {short(method)}" if method else "quantization_config has no quant_method"
        raise LoadError(what, where=stored.path, why="this method is not supported" if method else "", fix=_SUPPORTED)
    with located(stored.path, LoadError):
        matrices = _METHODS[method](stored, config)
    layers, hidden = {matrix.layer for matrix in matrices}, set()
    for name in stored.names():
        layer, _, own = name.rpartition(".")
        if layer not in layers:
            continue
        # Some writers of gptq give every layer a bias of zeros, also where the model has none.
        is_spare = own == "bias" and name not in wanted and not stored.tensor(name).any()
        if is_spare or own in (*_PARTS[method], *_ACTIVATIONS):
            hidden.add(name)
    return QuantizedCheckpoint(stored, config, matrices, hidden)


def _layers(stored: Checkpoint, own: str, dtypes: Collection[Any]) -> list[tuple[str, tuple[int, int]]]:
    """The layers that have such a tensor, and its shape; a weight of another dtype is not a quantized one."""
    found: list[tuple[str, tuple[int, int]]] = []
    for name in stored.names():
        if name.endswith(f".{own}") and (own != "weight" or stored.dtype(name) in dtypes):
            shape = _check(stored, name, None, dtypes)
            if len(shape) != 2 or 0 in shape:
                raise LoadError(f"tensor {name!r} must be a matrix, and is {list(shape)}")
            found.append((name.removesuffix(f".{own}"), (shape[0], shape[1])))
    return found


def _check(
    stored: Checkpoint, name: str, shapes: Collection[tuple[int, ...]] | None, dtypes: Collection[Any]
) -> tuple[int, ...]:
    """The shape of a tensor, which must be one of these."""
    if name not in stored:
        raise LoadError(f"the quantized layer {name.rpartition('.')[0]!r} has no {name.rpartition('.')[2]}")
    shape, dtype = stored.shape(name), stored.dtype(name)
    if dtype not in dtypes:
        raise LoadError(f"tensor {name!r} is of the type {dtype}", why=f"it must be {_or(d.name for d in dtypes)}")
    if shapes is not None and shape not in shapes:
        what = f"tensor {name!r} is {list(shape)}"
        raise LoadError(what, why=f"by the layer's other tensors it is {_or(list(s) for s in shapes)}")
    return shape


def _or(values: Any) -> str:
    return " or ".join(sorted(map(str, values)))


def _order(stored: Checkpoint, name: str, columns: int, needed: str) -> str | None:
    """The name of the tensor with each column's group, if there is one; `needed` says why there must be, or is ""."""
    if name not in stored:
        if needed:
            layer, _, own = name.rpartition(".")
            raise LoadError(f"the quantized layer {layer!r} has no {own}", why=f"{needed}: columns have other groups")
        return None
    _check(stored, name, [(columns,)], _INT32)
    return name


def _number(config: Config, key: str, allowed: Collection[int] = ()) -> int:
    value = config.get(key)
    if type(value) is not int or (allowed and value not in allowed) or (value < 1 and value != -1):
        raise LoadError(f"quantization_config has {key} {short(value)}", fix=_SUPPORTED)
    return value


def _refuse(config: Config, *keys: str) -> None:
    for key in keys:
        if config.get(key):
            what = f"quantization_config has {key} {short(config[key])}"
            raise LoadError(what, why="this is not supported", fix=_SUPPORTED)


def _one_of(config: Config, key: str, value: Any, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value.lower() not in allowed:
        what = f"the weights are quantized by {config['quant_method']} with {key} {short(value)}"
        raise LoadError(what, why="this is not supported", fix=_SUPPORTED)
    return value.lower()


def _gptq(stored: Checkpoint, config: Config) -> list[_Matrix]:
    bits, size = _number(config, "bits", (4, 8)), _number(config, "group_size")
    name = config.get("checkpoint_format", config.get("format")) or "gptq"
    shift = 1 if _one_of(config, "checkpoint_format", name, ("gptq", "gptq_v2")) == "gptq" else 0
    rules = config.get("dynamic") or {}  # other settings for some layers; "-:" excludes layers
    if not isinstance(rules, Mapping) or not all(str(rule).startswith("-") for rule in rules):
        _refuse(config, "dynamic")
    found: list[_Matrix] = []
    for layer, (words, out) in _layers(stored, "qweight", _INT32):
        columns = words * (32 // bits)
        group = columns if size == -1 else size
        _check_columns(stored, layer, out, -(-columns // group), bits)
        needed = "desc_act is true" if config.get("desc_act") and group < columns else ""
        order = _order(stored, f"{layer}.g_idx", columns, needed)
        found.append(_Gptq(stored, layer, (out, columns), bits, group, "scales", order, shift=shift))
    return found


def _awq(stored: Checkpoint, config: Config) -> list[_Matrix]:
    bits, size = _number(config, "bits", (4,)), _number(config, "group_size")
    _one_of(config, "version", config.get("version") or "gemm", ("gemm",))
    found: list[_Matrix] = []
    for layer, (columns, words) in _layers(stored, "qweight", _INT32):
        group = columns if size == -1 else size
        _check_columns(stored, layer, words * 8, -(-columns // group), bits)
        found.append(_Awq(stored, layer, (words * 8, columns), bits, group, "scales"))
    return found


def _check_columns(stored: Checkpoint, layer: str, out: int, groups: int, bits: int) -> None:
    _check(stored, f"{layer}.scales", [(groups, out)], FLOATS)
    _check(stored, f"{layer}.qzeros", [(groups, -(-out * bits // 32))], _INT32)


def _fp8(stored: Checkpoint, config: Config) -> list[_Matrix]:
    block = config.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise LoadError(f"quantization_config has weight_block_size {short(block)}", fix="it is two numbers")
    found: list[_Matrix] = []
    for layer, (out, columns) in _layers(stored, "weight", _FP8):
        scale = "weight_scale_inv" if f"{layer}.weight_scale_inv" in stored else "weight_scale"
        blocks = (-(-out // block[0]), -(-columns // block[1]))
        shape = _check(stored, f"{layer}.{scale}", [(), (1,), (1, 1), (out,), (out, 1), blocks], FLOATS)
        if shape in ((), (1,), (1, 1)):
            tall, group = out, columns
        else:
            tall, group = (1, columns) if shape in ((out,), (out, 1)) else (block[0], block[1])
        found.append(_Plain(stored, layer, (out, columns), 8, group, scale, tall=tall))
    return found


def _compressed(stored: Checkpoint, config: Config) -> list[_Matrix]:
    _refuse(config, "kv_cache_scheme", "transform_config")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        _refuse(config, "sparsity_config")
    groups = config.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    if not groups or not all(isinstance(g, Mapping) and isinstance(g.get("weights"), Mapping) for g in groups):
        raise LoadError("quantization_config has no config_groups with weights", fix=_SUPPORTED)
    schemes = [(g.get("format") or config.get("format"), _Scheme.read(g["weights"])) for g in groups]
    if any(scheme != schemes[0] for scheme in schemes):
        raise LoadError("the layers are quantized in several ways", why="config_groups differ", fix=_SUPPORTED)
    kind = _one_of(config, "format", schemes[0][0], ("int-quantized", "pack-quantized", "float-quantized"))
    scheme = schemes[0][1]
    expected = "float" if kind == "float-quantized" else "int"
    if scheme.type != expected or scheme.bits not in ((8,) if expected == "float" else (4, 8)):
        raise LoadError(f"{kind} weights of {scheme.bits!r} bits, type {scheme.type!r}", fix=_SUPPORTED)
    if kind == "pack-quantized":
        layers = _layers(stored, "weight_packed", _INT32)
        return [_packed(stored, layer, out, words, scheme) for layer, (out, words) in layers]
    found: list[_Matrix] = []
    for layer, shape in _layers(stored, "weight", _FP8 if expected == "float" else _INT8):
        tall, group, shapes = scheme.layout(shape)
        _check(stored, f"{layer}.weight_scale", shapes, FLOATS)
        if (zeros := f"{layer}.weight_zero_point") in stored:
            _check(stored, zeros, shapes, _FP8 | _INT8 | FLOATS if expected == "float" else _INT8)
        elif not scheme.symmetric:
            _check(stored, zeros, None, ())
        order = _order(stored, f"{layer}.weight_g_idx", shape[1], scheme.needs_order)
        found.append(_Plain(stored, layer, shape, 8, group, "weight_scale", order, tall))
    return found


def _packed(stored: Checkpoint, layer: str, out: int, words: int, scheme: _Scheme) -> _Matrix:
    name = f"{layer}.weight_shape"
    _check(stored, name, [(2,)], (DTYPES["I64"], DTYPES["I32"]))
    shape, count = tuple(map(int, stored.tensor(name))), 32 // scheme.bits
    if shape[0] != out or shape[1] < 1 or -(-shape[1] // count) != words:
        raise LoadError(f"tensor {name!r} says {list(shape)}", why=f"weight_packed is {[out, words]}")
    shape = (out, shape[1])
    tall, group, shapes = scheme.layout(shape)
    _check(stored, f"{layer}.weight_scale", shapes, FLOATS)
    if not scheme.symmetric or f"{layer}.weight_zero_point" in stored:
        _check(stored, f"{layer}.weight_zero_point", [(-(-out // count), -(-shape[1] // group))], _INT32)
    order = _order(stored, f"{layer}.weight_g_idx", shape[1], scheme.needs_order)
    return _Packed(stored, layer, shape, scheme.bits, group, "weight_scale", order, tall)


@dataclass(frozen=True)
class _Scheme:
    """How compressed-tensors describe the weights of a group of layers."""

    bits: Any
    type: Any
    symmetric: bool
    strategy: Any
    group: Any
    block: Any
    needs_order: str  # why there must be tensors with the columns' groups

    @classmethod
    def read(cls, weights: Config) -> _Scheme:
        size, strategy = weights.get("group_size"), weights.get("strategy")
        # Without a strategy the size of a group decides, as in the library.
        strategy = strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
        block, symmetric = weights.get("block_structure"), weights.get("symmetric", True) is not False
        ordered = weights.get("actorder") in (True, "group", "dynamic") and strategy == "group"
        why = f"actorder is {weights['actorder']!r}" if ordered else ""
        return cls(weights.get("num_bits", 8), weights.get("type", "int"), symmetric, strategy, size, block, why)

    def layout(self, shape: tuple[int, int]) -> tuple[int, int, list[tuple[int, ...]]]:
        """Rows and columns that share a scale, and the shapes that scales may have."""
        out, columns = shape
        if self.strategy == "tensor":
            return out, columns, [(), (1,), (1, 1)]
        if self.strategy == "channel":
            return 1, columns, [(out,), (out, 1)]
        sizes = [1, self.group] if self.strategy == "group" else self.block if self.strategy == "block" else None
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
            what = f"weights have the strategy {short(self.strategy)}, group_size {short(self.group)}"
            raise LoadError(what, why="this is not supported", fix=_SUPPORTED)
        return sizes[0], sizes[1], [(-(-out // sizes[0]), -(-columns // sizes[1]))]


_METHODS = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}
_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"), "awq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight_scale", "weight_scale_inv"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}  # fmt: skip
