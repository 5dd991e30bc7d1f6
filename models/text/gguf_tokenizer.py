"""The tokenizer that a GGUF file describes: its vocabulary, how text is cut, and which tokens end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.ir.errors import LoadError
from monoplan.models.text.tokenizer import MissingTokenizer

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
_FALCON = [r"[\p{P}\$\+<=>\^~\|`]+", _DEFAULT[1], _DEFAULT[3]]
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = [
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
PRE_TOKENIZERS: dict[str, list[str] | str | None] = {
    "default": _DEFAULT, "gpt-2": None, "gpt2": None, "olmo": None,
    "smollm": "digits", "starcoder": "digits", "refact": "digits",
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN, "falcon": _FALCON, "command-r": "digits",
    "gpt-4o": _GPT4O, "dbrx": _LLAMA3, "smaug-bpe": _LLAMA3, "stablelm2": [*_QWEN2],
}  # fmt: skip
_LONGEST_PIECE = 512  # characters; SentencePiece's own vocabularies have 16, or some more for spaces
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # these want a BOS as well
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Tokens that end a turn or a text, though a GGUF file can name only one of them as its eos_token_id. They count as
# control tokens whatever type the file gives them, as llama.cpp has it: some converters gave them none.
_ENDS_OF_TEXT = frozenset(
    "<|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <end_of_turn> <EOT>".split()
)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The object of the tokenizers library that the metadata describe, and what else a Tokenizer wants to know."""

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, kind, pre = get("tokens"), get("model"), get("pre", "default")
    if not isinstance(tokens, list) or not tokens or set(map(type, tokens)) != {str}:
        problem = MissingTokenizer if tokens is None or isinstance(tokens, list) and not tokens else LoadError
        raise problem("the file has no vocabulary", why="tokenizer.ggml.tokens is empty or missing")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) < len(tokens):
        again = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise LoadError(f"the token {again!r} is in the vocabulary twice")
    kinds = _numbers(get("token_type", [_NORMAL] * len(tokens)), len(tokens), "types")
    ends = {vocab[text] for text in _ENDS_OF_TEXT & vocab.keys()}
    kinds[list(ends)] = _CONTROL
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
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    template = metadata.get("tokenizer.chat_template")
    return core, {
        "bos_id": named.get("bos"),
        "eos_ids": ends | {named[name] for name in ("eos", "eot", "eom") if name in named},
        "add_bos": _flag(metadata, "add_bos_token", kind == "llama" or pre in _WHOLE_WORDS_FIRST),
        "chat_template": template if isinstance(template, str) else None,
        "special_tokens": {names[name]: tokens[token] for name, token in named.items() if name in names},
        "last_id": len(tokens) - 1,
    }


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, int) or value not in (0, 1):
        raise LoadError(f"tokenizer.ggml.{key} must be true or false, got {value!r:.60}", fix="convert the model again")
    return bool(value)


def _numbers(values: Any, count: int, what: str) -> Any:
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in "iuf":
        raise LoadError(f"{count} tokens have {array.size} {what}")
    return array.astype(np.float64)


def _add_tokens(core: Any, tokens: Sequence[str], kinds: Any) -> None:
    """Let the text of control, unknown and user-defined tokens be found before any other cut."""
    from tokenizers import AddedToken

    def added(wanted: tuple[int, ...], special: bool) -> list[Any]:
        texts = [tokens[int(index)] for index in np.flatnonzero(np.isin(kinds, wanted))]
        return [AddedToken(text, special=special, normalized=False) for text in texts if text]

    core.add_special_tokens(added((_CONTROL, _UNKNOWN), True))
    core.add_tokens(added((_USER_DEFINED,), False))


def _byte_level(vocab: dict[str, int], kinds: Any, metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Core

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise LoadError(f"unknown pre-tokenizer {pre!r}", fix=f"supported: {', '.join(PRE_TOKENIZERS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or (pairs := _pairs(merges)) is None:
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


def _pairs(merges: list[str]) -> list[tuple[str, str]] | None:
    """The two words of each merge; None unless each has one space. There are 100 000: all are looked at at once."""
    if not merges:
        return []
    text = "\0".join(merges)
    marks = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    marks = marks[(marks == 0) | (marks == ord(" "))]
    if len(marks) != 2 * len(merges) - 1 or marks[::2].min() == 0 or marks[1::2].any():
        return None
    words = text.replace("\0", " ").split(" ")
    return list(zip(words[::2], words[1::2], strict=True))


def _sentence_pieces(vocab: dict[str, int], kinds: Any, metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, normalizers

    scores = _numbers(metadata.get("tokenizer.ggml.scores", []), len(vocab), "scores").tolist()
    kinds = kinds.tolist()  # numbers of Python's are read faster, one by one
    # SentencePiece joins the pair whose whole has the best score: merges are all splits of pieces, by score.
    pieces = [text for text, index in vocab.items() if kinds[index] in (_NORMAL, _USER_DEFINED)]
    if (longest := max(map(len, pieces), default=0)) > _LONGEST_PIECE:
        what = f"the vocabulary has a piece of {longest} characters, the limit is {_LONGEST_PIECE}"
        raise LoadError(what, why="the time to find its merges grows with the square of that")
    ranked = [
        (-scores[vocab[piece]], vocab[piece], vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = next((text for text, index in vocab.items() if kinds[index] == _UNKNOWN), None)
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    core = Core(model)
    prefix = _flag(metadata, "add_space_prefix", True)
    to_marks, to_spaces = normalizers.Replace(" ", "\u2581"), decoders.Replace("\u2581", " ")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * prefix + [to_marks])
    ending = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence([to_spaces, decoders.ByteFallback(), decoders.Fuse(), *ending])
    return core
