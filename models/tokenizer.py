"""Text to token ids and back: `tokenizer.json` or a GGUF vocabulary, chat templates."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.models.config_json import read_json
from monoplan.models.streaming import StreamDecoder

Messages = Sequence[Mapping[str, Any]]

# How a byte-level vocabulary cuts text into words, under the names of tokenizer.ggml.pre. The patterns of a
# list are applied in turn; None is the cut of GPT-2, "digits" the same after setting every digit apart.
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _WORDS + r"|\p{N}{1,3}" + _ENDS]
_QWEN2 = [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _WORDS + r"|\p{N}" + _ENDS]
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = [
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
_DEFAULT = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
]
PRE_TOKENIZERS: dict[str, list[str] | str | None] = {
    "default": _DEFAULT, "gpt-2": None, "gpt2": None, "olmo": None,
    "smollm": "digits", "starcoder": "digits", "refact": "digits",
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN,
}  # fmt: skip
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # these want a BOS as well
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Control tokens that end a turn or a text, though a GGUF file can name only one of them as its eos_token_id.
_ENDS_OF_TEXT = frozenset(
    "<|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <end_of_turn> <EOT>".split()
)


class MissingTokenizer(LoadError):
    """A checkpoint without a tokenizer: token ids can go in and come out all the same."""


class Tokenizer:
    """A tokenizer with the model's own idea of BOS, ends of text and chat format."""

    def __init__(
        self,
        core: Any,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
        where: object = None,
    ) -> None:
        self._core, self._where = core, where
        self.bos_id, self.eos_ids, self.add_bos = bos_id, frozenset(eos_ids), add_bos and bos_id is not None
        self.chat_template, self.special_tokens = chat_template, dict(special_tokens or {})
        ids = core.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise LoadError("the tokenizer has an empty vocabulary", where=where)
        if vocab_size is not None and max(ids) >= vocab_size:
            what = f"the tokenizer has token id {max(ids)}, but the model has {vocab_size} tokens"
            raise LoadError(what, where=where, fix="use the tokenizer that belongs to the model")
        # A model may have more rows than tokens, to round its size up: such ids are legal and have no text.
        self.vocab_size = vocab_size if vocab_size is not None else max(ids) + 1
        core.no_truncation()
        core.no_padding()

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Read tokenizer.json and what lies beside it in a Hugging Face directory."""
        directory = Path(directory)
        core = _read_tokenizer_json(directory / "tokenizer.json")
        settings = _read_optional(directory / "tokenizer_config.json")
        special: dict[str, str] = {}
        named = {**_read_optional(directory / "special_tokens_map.json"), **settings}
        for key, value in named.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                special[key] = text
        bos_id = core.token_to_id(special["bos_token"]) if "bos_token" in special else None
        if "bos_token" not in named:  # then tokenizer.json itself may tell, or the model
            bos_id = _put_in_front(core, _read_optional(directory / "config.json").get("bos_token_id"))
        add_bos = settings.get("add_bos_token")
        if not isinstance(add_bos, bool):
            legacy = "LlamaTokenizer" in str(settings.get("tokenizer_class"))
            add_bos = legacy or _put_in_front(core) == bos_id
        eos_ids = {core.token_to_id(special.get("eos_token", ""))}
        for name in ("config.json", "generation_config.json"):
            found = _read_optional(directory / name).get("eos_token_id")
            eos_ids.update(found if isinstance(found, list) else [found])
        return cls(
            core,
            bos_id=bos_id,
            eos_ids=[value for value in eos_ids if isinstance(value, int)],
            add_bos=add_bos,
            chat_template=_read_template(directory, settings),
            special_tokens=special,
            vocab_size=vocab_size,
            where=directory,
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, vocab_size: int | None = None, where: object = None
    ) -> Tokenizer:
        """Build the tokenizer that the metadata of a GGUF file describes."""
        try:
            return _from_gguf(metadata, vocab_size, where)
        except LoadError as error:
            raise type(error)(error.what, where=where, why=error.why, fix=error.fix) from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with one BOS in front where the model wants it and the text has none."""
        try:
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ArgumentError("the text can't be tokenized", why=str(error)) from None
        if add_special_tokens and self.add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]  # type: ignore[list-item]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if not isinstance(ids, Iterable):
            raise ArgumentError("decode takes a list of token ids", why=f"it is {ids!r:.60}")
        checked = [self._check(token) for token in ids]
        return str(self._core.decode(checked, skip_special_tokens=skip_special_tokens))

    def token(self, token: int) -> str | None:
        """Return the vocabulary's own spelling of a token; None where the model has a row without one."""
        text = self._core.id_to_token(self._check(token))
        return None if text is None else str(text)

    def stream(self, context: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder for ids that arrive one by one after `context`, the end of the prompt."""
        return StreamDecoder(self, context)

    def chat(self, messages: Messages, add_generation_prompt: bool = True, **values: Any) -> list[int]:
        """Return the ids of a conversation in the model's own format; one BOS where the model wants it."""
        return self.encode(self.chat_text(messages, add_generation_prompt, **values))

    def chat_text(self, messages: Messages, add_generation_prompt: bool = True, **values: Any) -> str:
        """Return a conversation as the chat template writes it; `values` are further variables for it."""
        if self.chat_template is None:
            raise LoadError("the model has no chat template", where=self._where, fix="give it a plain prompt")
        if not messages or not all(
            isinstance(message, Mapping) and "role" in message for message in messages
        ):
            raise ArgumentError("a chat needs messages with a role and a content")
        values = {"tools": None, "documents": None, **self.special_tokens, **values}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return _render(self.chat_template, values, self._where)

    def _check(self, token: int) -> int:
        try:
            number = operator.index(token)  # of any library's integers
        except TypeError:
            raise ArgumentError("a token id is a whole number", why=f"it is {token!r:.60}") from None
        if not 0 <= number < self.vocab_size:
            raise ArgumentError(f"token id {number} is not in the vocabulary of {self.vocab_size}")
        return number


def _read_tokenizer_json(path: Path) -> Any:
    if not path.is_file():
        fix = "make one from tokenizer.model with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise MissingTokenizer("there is no tokenizer.json", where=path.parent, fix=fix)
    from tokenizers import Tokenizer as Core

    try:
        return Core.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare exceptions, and its panics are not even those
        raise LoadError("tokenizer.json can't be used", where=path, why=str(error)) from None


def _put_in_front(core: Any, otherwise: Any = None) -> int | None:
    """Return the id that the tokenizer itself puts in front of a text, or another one if it has that."""
    core.no_padding()
    try:
        encoding = core.encode("a", add_special_tokens=True)
    except Exception:  # the library raises bare exceptions where a vocabulary has no such letter
        encoding = core.encode("", add_special_tokens=True)
    if encoding.ids and encoding.sequence_ids[0] is None:  # not of the text
        return int(encoding.ids[0])
    return otherwise if isinstance(otherwise, int) and core.id_to_token(otherwise) is not None else None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError("can't read chat_template.jinja", where=path, why=str(error)) from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _render(template: str, values: Mapping[str, Any], where: object) -> str:
    """Render a chat template in a sandbox: it comes with the model and is not trusted."""
    from datetime import datetime

    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it is only its contents."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Refused(Exception):
        """The template itself does not accept the messages."""

    def refuse(message: str) -> None:
        raise Refused(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**values)
    except Refused as error:
        raise ArgumentError("the model's chat template refuses the messages", why=str(error)) from None
    except jinja2.TemplateSyntaxError as error:
        raise LoadError("the chat template is damaged", where=where, why=str(error)) from None
    except Exception as error:  # a template is a program: it may fail in any way
        raise LoadError(
            "the chat template failed", where=where, why=f"{type(error).__name__}: {error}"
        ) from None


def _from_gguf(metadata: Mapping[str, Any], vocab_size: int | None, where: object) -> Tokenizer:
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, kind, pre = get("tokens"), get("model"), get("pre", "default")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        problem = MissingTokenizer if tokens is None or isinstance(tokens, list) and not tokens else LoadError
        raise problem("the file has no vocabulary", why="tokenizer.ggml.tokens is empty or missing")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        again = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise LoadError(f"the token {again!r} is in the vocabulary twice")
    kinds = _numbers(get("token_type", [_NORMAL] * len(tokens)), len(tokens), "types")
    build = {"gpt2": _byte_level, "llama": _sentence_pieces}.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise LoadError(f"unknown tokenizer model {kind!r}", fix="supported: gpt2, llama")
    core = build(vocab, kinds, metadata)
    _add_tokens(core, tokens, kinds)
    named = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        if (token := get(f"{name}_token_id")) is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise LoadError(f"{name}_token_id {token!r} is not in the vocabulary of {len(tokens)}")
        named[name] = token
    ends = {vocab[text] for text in _ENDS_OF_TEXT & vocab.keys() if kinds[vocab[text]] == _CONTROL}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        core,
        bos_id=named.get("bos"),
        eos_ids=ends | {named[name] for name in ("eos", "eot", "eom") if name in named},
        add_bos=bool(get("add_bos_token", kind == "llama" or pre in _WHOLE_WORDS_FIRST)),
        chat_template=template if isinstance(template, str) else None,
        special_tokens={names[name]: tokens[token] for name, token in named.items() if name in names},
        vocab_size=vocab_size,
        where=where,
    )


def _numbers(values: Any, count: int, what: str) -> list[float]:
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in "iuf":
        raise LoadError(f"{count} tokens have {array.size} {what}")
    return array.astype(np.float64).tolist()


def _add_tokens(core: Any, tokens: Sequence[str], kinds: Sequence[float]) -> None:
    """Let the text of control and user-defined tokens be found before any other cut."""
    from tokenizers import AddedToken

    def added(kind: int, special: bool) -> list[Any]:
        texts = [text for text, found in zip(tokens, kinds, strict=True) if found == kind and text]
        return [AddedToken(text, special=special, normalized=False) for text in texts]

    core.add_special_tokens(added(_CONTROL, True))
    core.add_tokens(added(_USER_DEFINED, False))


def _byte_level(vocab: dict[str, int], kinds: Sequence[float], metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Core

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise LoadError(f"unknown pre-tokenizer {pre!r}", fix=f"supported: {', '.join(PRE_TOKENIZERS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges] if isinstance(merges, list) else [()]
    if any(len(pair) != 2 for pair in pairs):
        raise LoadError("the vocabulary has no usable merges")
    try:
        core = Core(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    except Exception as error:  # the library raises bare exceptions
        raise LoadError("the merges do not fit the vocabulary", why=str(error)) from None
    cut = PRE_TOKENIZERS[pre]
    if isinstance(cut, list):
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if cut == "digits" else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    if cut is _QWEN2:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    return core


def _sentence_pieces(vocab: dict[str, int], kinds: Sequence[float], metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, normalizers

    scores = _numbers(metadata.get("tokenizer.ggml.scores", []), len(vocab), "scores")
    # SentencePiece joins the pair whose whole has the best score: merges are all splits of pieces, by score.
    pieces = [text for text, index in vocab.items() if kinds[index] in (_NORMAL, _USER_DEFINED)]
    ranked = [
        (
            -scores[vocab[piece]],
            vocab[piece],
            vocab[piece[:cut]],
            vocab[piece[cut:]],
            piece[:cut],
            piece[cut:],
        )
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = next((text for text, index in vocab.items() if kinds[index] == _UNKNOWN), None)
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    core = Core(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_marks, to_spaces = normalizers.Replace(" ", "\u2581"), decoders.Replace("\u2581", " ")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * prefix + [to_marks])
    ending = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence([to_spaces, decoders.ByteFallback(), decoders.Fuse(), *ending])
    return core
