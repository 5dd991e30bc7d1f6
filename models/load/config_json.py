"""What a Hugging Face `config.json` says, in arguments of `LlamaConfig`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoplan.ir.errors import LoadError
from monoplan.models.families import FAMILIES as OTHER_FAMILIES

DTYPES = {
    "float32": "float32", "float": "float32", "f32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "half": "float16", "f16": "float16",
}  # fmt: skip
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "head_dim",
)  # fmt: skip

# Defaults of the transformers classes where they differ from the ones of `LlamaConfig` here.
_QWEN = {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "mistral": {
        "attention_bias": False, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "qwen2": {**_QWEN, "attention_bias": True, "attention_out_bias": False},
    "qwen3": {**_QWEN, "attention_bias": False, "qk_norm": True, "head_dim": 128},
}  # fmt: skip
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
# Keys that every family reads, and keys of one family; what its transformers class ignores is ignored here.
COMMON = (
    *SIZES, "hidden_act", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id", "initializer_range", "use_cache",
)  # fmt: skip
OWN: dict[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"), "mistral": ("sliding_window",),
    "qwen2": (), "qwen3": ("attention_bias",),
}  # fmt: skip
ROPE_KEYS = (
    "rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
MOST_LAYERS = 2**20  # no model has so many: there is an entry of layer_types for each
_READ = {"rope_parameters", "original_max_position_embeddings", "use_sliding_window", "max_window_layers"}
# A key that is not read here is let through unless its name says that it may change the numbers.
_SUSPICIOUS = re.compile(
    r"scal|cap|multipl|expert|moe|quant|compress|rope|rotary|window|norm|bias|alibi|clip|clamp|residual|parallel", re.I
)


def changes_numbers(key: str, value: Any) -> bool:
    """Say whether a key that nothing here reads may change a model's numbers, going by its name and value."""
    # 0, 1 and the empty values are what such keys hold where they do nothing.
    neutral = value is None or value is False or (value is not True and value in (0, 1, [], {}, ""))
    return _SUSPICIOUS.search(key) is not None and not neutral


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or say what is wrong with the file."""
    try:
        return parse_json(path.read_text(encoding="utf-8"), path, path.name)
    except UnicodeDecodeError as error:
        raise LoadError(f"{path.name} is not valid JSON", where=path, why=str(error)) from None
    except OSError as error:
        raise LoadError(f"can't read {path.name}", where=path, why=error.strerror or str(error)) from None


def parse_json(text: str, where: object, name: str = "it") -> dict[str, Any]:
    """Return the object that a JSON text of that name holds."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{name} is not valid JSON", where=where, why=str(error)) from None
    if not isinstance(data, dict):
        raise LoadError(f"{name} must hold a JSON object, not a {type(data).__name__}", where=where)
    return data


def read_arguments(data: Mapping[str, Any], config: type[Any]) -> dict[str, Any]:
    """Translate a `config.json` into arguments of `config`, which is `LlamaConfig`."""
    family = _model_type(data)
    _refuse_unsupported(data, family, config)
    arguments = {**FAMILIES[family], "model_type": family}
    arguments |= {name: data[name] for name in (*COMMON, *OWN[family]) if name in data}
    if arguments.get("pad_token_id") == -1:  # what Llama 1 checkpoints have for "none"
        arguments["pad_token_id"] = None
    arguments["dtype"] = data.get("dtype", data.get("torch_dtype"))
    if family in ("qwen2", "qwen3"):
        arguments |= _qwen_windows(data, arguments.get("num_hidden_layers", config.num_hidden_layers))
    arguments["rope_scaling"] = _rope(data, config.rope_theta)
    rope = arguments["rope_scaling"]
    if isinstance(rope, Mapping) and rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise LoadError(f"partial_rotary_factor is not defined for a {family} model")
    return arguments


def family_keys(config: type[Any]) -> dict[str, str]:
    """The keys of a family's config.json, and the fields that have them."""
    renamed = set(config.keys.values())
    return {**{name: name for name in COMMON if name not in renamed}, **config.keys}


def key_of(config: type[Any], name: str) -> str:
    """A field as the family's config.json calls it, for messages."""
    found = next((key for key, field in config.keys.items() if field == name), name)
    return name if found == name else f"{found} ({name})"


def check_types(config: type[Any], values: Mapping[str, Any], own: frozenset[str]) -> None:
    """Refuse values that sizes, and the fields of a family's `own`, can't have by their types.

    Sizes are positive, unless their default is 0; factors are positive and neither infinite nor too small for float32.
    """
    for field in dataclasses.fields(config):
        name, kind = field.name, str(field.type)
        if name not in values or name not in (*SIZES, *own):
            continue
        value = values[name]
        # A family may make intermediate_size of other sizes; lists may be null.
        may_be_none = field.default is None or "None" in kind or "tuple" in kind or name == "intermediate_size"
        if value is None and may_be_none:
            continue
        wanted = _wanted(kind, value, field.default)
        if wanted is not None:
            raise LoadError(f"{key_of(config, name)} must be {wanted}, got {short(value)}")


def _wanted(kind: str, value: Any, default: Any) -> str | None:
    """What a value of a type must be; None where it is."""
    if kind == "bool":
        return None if isinstance(value, bool) else "true or false"
    if kind in ("int", "int | None"):
        if is_size(value) or (default == 0 and type(value) is int and value == 0):
            return None
        return "a positive integer below 2**31" + (", or 0" if default == 0 else "")
    if kind in ("float", "float | None"):
        return None if is_factor(value) else "a positive number from 1e-30 to 1e30"
    if kind.startswith("tuple[int"):
        items = value if isinstance(value, (list, tuple)) else [None]
        return None if all(type(item) is int and item >= 0 for item in items) else "a list of integers of 0 or more"
    return None


def whole(data: Mapping[str, Any], key: str, default: int) -> int:
    """A positive integer of a config.json, of which null means the default."""
    value = default if data.get(key) is None else data[key]
    if not is_size(value):
        raise LoadError(f"{key} must be a positive integer below 2**31, got {short(value)}")
    return value  # type: ignore[no-any-return]


def rope_of(data: Mapping[str, Any], layers: str) -> Mapping[str, Any]:
    """What rope_parameters says of one kind of layer; nothing where it does not tell them apart."""
    rope = data.get("rope_parameters") or {}
    found = (rope.get(layers) or {}) if isinstance(rope, Mapping) else None
    if not isinstance(found, Mapping):
        raise LoadError(f"rope_parameters must be an object, for {layers}, too: got {short(rope)}")
    return found


def family_arguments(data: Mapping[str, Any], config: type[Any]) -> dict[str, Any]:
    """Translate the `config.json` of a family with a class of its own; see LlamaConfig.keys."""
    keys = family_keys(config)
    arguments = {**config.defaults, "model_type": data.get("model_type")}
    for key, value in data.items():
        if key in keys:
            arguments[keys[key]] = value
        elif key in config.only:
            if value not in config.only[key]:
                raise LoadError(f"{key} = {short(value)} is not supported in a {data.get('model_type')} model")
        elif key not in (*ROPE_KEYS, *config.also) and changes_numbers(key, value):
            raise LoadError(f"unsupported key {key!r} in the configuration", why=f"it is {short(value)}")
    check_types(config, arguments, config.own_fields())  # `complete` reads them
    if arguments.get("num_hidden_layers", 0) >= MOST_LAYERS:
        what = f"{key_of(config, 'num_hidden_layers')} is {arguments['num_hidden_layers']}"
        raise LoadError(what, why="no model has so many layers")
    arguments["dtype"] = data.get("dtype", data.get("torch_dtype"))
    layers = "full_attention" if config.local_rope is not None else None
    rope = arguments["rope_scaling"] = _rope(data, config.defaults.get("rope_theta", config.rope_theta), layers)
    if not isinstance(rope, dict):
        key = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
        raise LoadError(f"{key} must be an object, got {short(rope)}")
    if rope.get("partial_rotary_factor", 1) != 1 and config.partial is None:
        raise LoadError(f"partial_rotary_factor is not defined for a {data.get('model_type')} model")
    if config.partial is not None:
        rope.setdefault("partial_rotary_factor", config.partial)
    config.complete(arguments, data)
    return arguments


def _rope(data: Mapping[str, Any], default_theta: float, layers: str | None = None) -> Any:
    # rope_scaling is the old place; where both are there transformers takes it, too.
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return rope
    rope = dict(rope.get(layers) or _flat(rope))
    theta = data.get("rope_theta")  # only null is as good as absent: 0 or "" must be refused, not replaced
    rope.setdefault("rope_theta", default_theta if theta is None else theta)
    original = data.get("original_max_position_embeddings")
    if original and (rope.get("rope_type") or rope.get("type")) in ("yarn", "longrope", "su", "llama3"):
        rope["original_max_position_embeddings"] = original
    if data.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", data["partial_rotary_factor"])
    return rope


def _model_type(data: Mapping[str, Any]) -> str:
    family = data.get("model_type")
    if family is None:
        names = data.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        family = next((key for key, name in ARCHITECTURES.items() if name == first), None)
    if family == "smollm":
        return "llama"
    if not isinstance(family, str) or family not in FAMILIES:
        what = "config.json names no model_type" if family is None else f"unsupported model_type {short(family)}"
        raise LoadError(what, fix=f"supported: {', '.join((*FAMILIES, *OTHER_FAMILIES))}, smollm")
    return family


def _refuse_unsupported(data: Mapping[str, Any], family: str, config: type[Any]) -> None:
    known = {field.name for field in dataclasses.fields(config)} | _READ
    for key, value in data.items():
        if key not in known and changes_numbers(key, value):
            raise LoadError(f"unsupported key {key!r} in the configuration", why=f"it is {short(value)}")
    window = data.get("sliding_window", FAMILIES[family].get("sliding_window"))
    if family == "llama" and window is not None:
        raise LoadError("a llama model has no sliding_window", why=f"it is {short(window)}", fix="use mistral")
    if family in ("llama", "mistral") and data.get("layer_types"):
        expected = "full_attention" if window is None else "sliding_attention"
        if not isinstance(kinds := data["layer_types"], (list, tuple)) or any(kind != expected for kind in kinds):
            raise LoadError(f"layer_types of a {family} model must all be {expected}, got {short(kinds)}")


def _qwen_windows(data: Mapping[str, Any], layers: Any) -> dict[str, Any]:
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window", False) else None
    kinds, full = data.get("layer_types"), data.get("max_window_layers", 28)
    if kinds is None and window is not None and is_size(layers) and layers < MOST_LAYERS:
        if not isinstance(full, int):
            raise LoadError(f"max_window_layers must be an integer, got {short(full)}")
        count = min(max(full, 0), layers)
        kinds = ["full_attention"] * count + ["sliding_attention"] * (layers - count)
    return {"sliding_window": window, "layer_types": kinds}


def _flat(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one dictionary of rope parameters where a config has one for each kind of layer."""
    nested = [value for key, value in rope.items() if key in ("full_attention", "sliding_attention")]
    if any(value != nested[0] or not isinstance(value, Mapping) for value in nested):
        raise LoadError("rope_parameters differ between layers", fix="use one kind for all of them")
    return nested[0] if nested else rope


def is_factor(value: Any) -> bool:
    """Say whether this is a positive number that float32 has, and its inverse, too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-30 <= value <= 1e30


def is_size(value: Any) -> bool:
    """Say whether this can be the size of a dimension."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def short(value: Any) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def dtype_name(dtype: Any) -> str:
    """Return the one name of an element type, of which there are several."""
    if dtype is None:
        return "float32"
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise LoadError(f"unsupported dtype {name!r}", fix="use float32, bfloat16 or float16")
    return DTYPES[name]
