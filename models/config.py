"""`LlamaConfig`: what a LLaMA-like model is."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from monoplan.ir.errors import LoadError, located
from monoplan.models.families import family_of
from monoplan.models.load.config_json import (
    ARCHITECTURES,
    COMMON,
    FAMILIES,
    OWN,
    SIZES,
    check_types,
    dtype_name,
    family_arguments,
    family_keys,
    is_size,
    key_of,
    read_arguments,
    read_json,
    short,
)
from monoplan.models.rope_scaling import standard_parameters

# What transformers calls an activation, and what it is: gelu_tanh is the gelu with approximate="tanh".
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
_FLAGS = ("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings", "qk_norm", "use_cache")


class FrozenDict(dict[str, Any]):
    """A dictionary that stays as it is, so that a configuration can be hashed and shared."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a configuration can't be changed: make another one with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((key, repr(value)) for key, value in self.items())))

    def __reduce__(self) -> Any:
        return FrozenDict, (dict(self),)


def same(names: str) -> dict[str, str]:
    """Keys of a config.json that fields have the names of."""
    return {name: name for name in names.split()}


class _OldName:
    """`config.torch_dtype` reads as `dtype`; on the class it is None, the default of the constructor."""

    def __get__(self, config: LlamaConfig | None, owner: type) -> str | None:
        return None if config is None else config.dtype


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that decides the shapes and the arithmetic of a LLaMA-like model; checked when made."""

    base_model_tp_plan: ClassVar[Mapping[str, str]] = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar[Mapping[str, tuple[list[str], list[str]]]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    # What a family changes, in its own subclass: as a property where it follows from fields.
    norm: ClassVar[str] = "rms"  # rms_offset: times 1 + weight; layer; layer_without_bias
    attention_softcap: ClassVar[float | None] = None
    rope_algo: ClassVar[str] = "gpt_neox"  # gpt_j: pairs lie side by side
    local_rope: ClassVar[Mapping[str, Any] | None] = None  # rope_scaling of layers with a window, where it is another
    trained_rope: ClassVar[bool] = False  # max_position_embeddings is the context already, whatever the scaling
    joined: ClassVar[bool] = False  # q, k and v are one matrix, qkv_proj; gate and up are gate_up_proj
    gated: ClassVar[bool] = True  # MLP: act(gate(x)) * up(x), else act(up(x))
    sinks: ClassVar[bool] = False  # attention has a learned score more in each head, whose value is 0
    latent: ClassVar[bool] = False  # a cache has keys alone, in which the values are
    parallel: ClassVar[int] = 0  # norms in front of attention and MLP where they stand side by side
    head_bias: ClassVar[bool] = False
    embedding_scale: ClassVar[float] = 1.0
    residual_scale: ClassVar[float] = 1.0  # of what a layer adds
    logit_scale: ClassVar[float] = 1.0
    logit_softcap: ClassVar[float | None] = None

    # How a family reads its config.json; without `keys` it is one of those that load/config_json.py lists.
    keys: ClassVar[Mapping[str, str]] = {}  # key -> field, besides the common ones or in place of them
    also: ClassVar[tuple[str, ...]] = ()  # keys that `complete` reads
    defaults: ClassVar[Mapping[str, Any]] = {}  # by field: those of the transformers class
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # key -> the values that are supported
    partial: ClassVar[float | None] = None  # partial_rotary_factor where there is none; None: it is not defined

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = None  # type: ignore[assignment]  # None: as many as num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # spelled with rope_type; None: the default kind
    attention_bias: bool = True
    mlp_bias: bool = False
    head_dim: int = None  # type: ignore[assignment]  # None: hidden_size // num_attention_heads
    dtype: str = None  # type: ignore[assignment]  # float32 (also for None), bfloat16 or float16
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None  # set only where layers differ in having the window
    qk_norm: bool = False
    attention_out_bias: bool = None  # type: ignore[assignment]  # None: as attention_bias; False in Qwen2
    partial_rotary_factor: float = 1.0
    model_type: str = None  # type: ignore[assignment]  # None: the family that has these features
    initializer_range: float = 0.02
    use_cache: bool = True
    torch_dtype: InitVar[Any] = _OldName()

    def __post_init__(self, torch_dtype: Any) -> None:
        inside = self.rope_scaling if isinstance(self.rope_scaling, Mapping) else {}
        for name in ("rope_theta", "partial_rotary_factor"):
            self._set(name, inside.get(name, getattr(self, name)))
        self._set("dtype", dtype_name(self.dtype if self.dtype is not None else torch_dtype))
        if self.num_key_value_heads is None:
            self._set("num_key_value_heads", self.num_attention_heads)
        out_bias = self.attention_bias if self.attention_out_bias is None else self.attention_out_bias
        self._set("attention_out_bias", out_bias)
        own = self.own_fields()
        check_types(type(self), {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, own)
        self._check_sizes()
        self._check_values()
        self._check_tokens()
        self._check_windows()
        rope = standard_parameters(self.rope_scaling, self.max_position_embeddings, self.rotary_dim)
        self._set("rope_scaling", None if rope is None else FrozenDict(rope))
        self._set("model_type", self.model_type or self._family())

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_sizes(self) -> None:
        if self.head_dim is None and is_size(self.hidden_size) and is_size(self.num_attention_heads):
            if self.hidden_size % self.num_attention_heads:
                what = f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads"
                raise LoadError(what, fix="give head_dim")
            self._set("head_dim", self.hidden_size // self.num_attention_heads)
        for name in SIZES:
            if not is_size(value := getattr(self, name)):
                what = f"{key_of(type(self), name)} must be a positive integer below 2**31"
                raise LoadError(f"{what}, got {short(value)}")
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads % shared:
            raise LoadError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}")

    def _check_values(self) -> None:
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise LoadError(f"{key_of(type(self), name)} must be true or false, got {short(value)}")
        for name, least, most in (
            ("rms_norm_eps", 0.0, 1.0),
            ("initializer_range", 0.0, 1.0),
            ("partial_rotary_factor", 0.0, 1.0),
            ("rope_theta", 1.001, 1e30),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
                name = key_of(type(self), name)
                raise LoadError(f"{name} must be a number from {least} to {most}, got {short(value)}")
            self._set(name, float(value))
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            what = f"head_dim {self.head_dim} gives {self.rotary_dim} rotated values"
            what += f" with partial_rotary_factor {self.partial_rotary_factor}" * (self.partial_rotary_factor != 1.0)
            raise LoadError(what, why="RoPE turns pairs of values, so their number must be even")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            supported = f"supported: {', '.join(ACTIVATIONS)}"
            raise LoadError(f"unknown {key_of(type(self), 'hidden_act')} {short(self.hidden_act)}", fix=supported)

    def _check_tokens(self) -> None:
        if isinstance(self.eos_token_id, (list, tuple)):
            self._set("eos_token_id", tuple(self.eos_token_id))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            found = getattr(self, name)
            ids = found if isinstance(found, tuple) else (found,)
            if not all(value is None or (type(value) is int and 0 <= value < 2**31) for value in ids):
                raise LoadError(f"{name} must be a token id, got {short(found)}")

    def _check_windows(self) -> None:
        if self.sliding_window is not None and not is_size(self.sliding_window):
            raise LoadError(f"sliding_window must be a positive integer, got {short(self.sliding_window)}")
        if self.layer_types is None:
            return
        kinds = list(self.layer_types) if isinstance(self.layer_types, (list, tuple)) else []
        known = all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if len(kinds) != self.num_hidden_layers or not known:
            wanted = f"full_attention or sliding_attention for each of {self.num_hidden_layers} layers"
            raise LoadError(f"layer_types must say {wanted}, got {short(self.layer_types)}")
        if "sliding_attention" in kinds and self.sliding_window is None:
            raise LoadError("layer_types has sliding_attention, but there is no sliding_window")
        if "sliding_attention" not in kinds:
            self._set("sliding_window", None)
        self._set("layer_types", tuple(kinds) if len(set(kinds)) > 1 else None)

    def _family(self) -> str:
        if self.qk_norm:
            return "qwen3"
        if self.attention_bias and not self.attention_out_bias:
            return "qwen2"
        return "llama" if self.sliding_window is None else "mistral"

    @property
    def rotary_dim(self) -> int:
        """How many values of a head RoPE turns: the first ones."""
        return int(self.head_dim * self.partial_rotary_factor + 1e-6)  # a ratio may be a hair too small

    @property
    def attention_scale(self) -> float:
        """What the scores of attention are multiplied with."""
        return float(self.head_dim**-0.5)

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Heads of a KV cache, and values of each."""
        return self.num_key_value_heads, self.head_dim

    def layer_scale(self, layer: int) -> float:
        """What the scores of a layer are multiplied with."""
        return self.attention_scale

    @property
    def activation(self) -> str:
        """The function that `hidden_act` names: silu, relu, gelu or gelu_tanh."""
        return ACTIVATIONS[self.hidden_act]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-text ids as a tuple, whether there are none, one or several."""
        ids = self.eos_token_id
        return ids if isinstance(ids, tuple) else () if ids is None else (ids,)

    def layer_window(self, layer: int) -> int | None:
        """Return how many positions, itself included, a query of this layer sees; None: all of them."""
        is_full = self.layer_types is not None and self.layer_types[layer] == "full_attention"
        return None if is_full else self.sliding_window

    def layer_has_rope(self, layer: int) -> bool:
        """Say whether a layer rotates its queries and keys."""
        return True

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: object = None) -> LlamaConfig:
        """Read the contents of a `config.json`; an absent key means what it means to transformers."""
        with located(where, LoadError):
            return cls(**(family_arguments if cls.keys else read_arguments)(data, cls))

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        """The fields that a family adds."""
        shared = {field.name for field in dataclasses.fields(LlamaConfig)}
        return frozenset(field.name for field in dataclasses.fields(cls) if field.name not in shared)

    @classmethod
    def complete(cls, arguments: dict[str, Any], data: Mapping[str, Any]) -> None:
        """Adds to the arguments, or changes, what is more than one key of a family's config.json."""

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> LlamaConfig:
        """Read the `config.json` of a Hugging Face directory."""
        path = Path(directory) / "config.json"
        return cls.from_dict(read_json(path), where=path)

    def to_dict(self) -> dict[str, Any]:
        """Return a `config.json` that transformers and `from_dict` read back as this model."""
        if self.keys:
            return self._checked(self._family_dict())
        if self.model_type not in FAMILIES or self.partial_rotary_factor != 1.0:
            raise LoadError(f"transformers has no {self.model_type} that turns {self.rotary_dim} values a head")
        names = (*COMMON, *OWN[self.model_type], "rope_theta", "model_type")
        data: dict[str, Any] = {name: _plain(getattr(self, name)) for name in names}
        rope = self.rope_scaling or {}
        data["rope_scaling"] = {key: _plain(value) for key, value in rope.items()} or None
        if rope.get("rope_type") == "longrope":  # the place where transformers 4 looks for it
            data["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        data |= {"architectures": [ARCHITECTURES[self.model_type]], "torch_dtype": self.dtype}
        if self.model_type in ("qwen2", "qwen3"):
            data["layer_types"] = kinds = self._layer_kinds()
            data |= {"sliding_window": self.sliding_window, "max_window_layers": kinds.count("full_attention")}
            data["use_sliding_window"] = self.sliding_window is not None
        return self._checked(data)

    def _layer_kinds(self) -> list[str]:
        return layer_kinds(self.layer_window(layer) is not None for layer in range(self.num_hidden_layers))

    def _family_dict(self) -> dict[str, Any]:
        """The keys of a family with a class of its own."""
        keys = family_keys(type(self))
        data = {key: _plain(getattr(self, field)) for key, field in keys.items()}
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        if self.partial is not None:
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        data["rope_parameters"] = {key: _plain(value) for key, value in rope.items()}
        if self.local_rope is not None:
            local = {"rope_type": "default", **self.local_rope}
            data["rope_parameters"] = {"full_attention": data["rope_parameters"], "sliding_attention": local}
        if "layer_types" in keys:
            data["layer_types"] = self._layer_kinds()
        return data | {"model_type": self.model_type, "torch_dtype": self.dtype}

    def _checked(self, data: dict[str, Any]) -> dict[str, Any]:
        again = type(self).from_dict(data)
        fields = dataclasses.fields(self)
        lost = [field.name for field in fields if getattr(again, field.name) != getattr(self, field.name)]
        if lost:
            raise LoadError(f"the config.json of a {self.model_type} model can't say: {', '.join(lost)}")
        return data


def layer_kinds(windowed: Iterable[bool]) -> list[str]:
    """layer_types of layers that have a window, or have none."""
    return ["sliding_attention" if window else "full_attention" for window in windowed]


def windows_but_every(nth: int, layers: int) -> list[str]:
    """layer_types where every n-th layer sees all tokens, and the others have a window."""
    return layer_kinds((i + 1) % nth != 0 for i in range(layers))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def config_of(name: str, fields: Mapping[str, Any]) -> LlamaConfig:
    """The configuration that has these fields, of LlamaConfig or of the class of that name of a family."""
    found: Any = LlamaConfig
    if name != "LlamaConfig":
        family = family_of(fields.get("model_type"))
        home = None if family is None else inspect.getmodule(family.model)
        found = getattr(home, name, None) if name.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, LlamaConfig):
        raise LoadError(f"there is no family of models with a {name!s:.60}")
    unknown = fields.keys() - {f.name for f in dataclasses.fields(found)}
    if unknown:
        raise LoadError(f"a {name} has no {', '.join(sorted(map(str, unknown)))}")
    arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return found(**arguments)
