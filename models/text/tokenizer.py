"""Text to token ids and back: `tokenizer.json` or a GGUF vocabulary, chat templates."""

from __future__ import annotations

import json
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monoplan.ir.errors import ArgumentError, LoadError, in_words, located
from monoplan.ir.garbage import kept
from monoplan.models.load.config_json import parse_json, read_json
from monoplan.models.text.chat_template import read_template, render_chat

# Token ids that come one by one, as text in whole characters.


CONTEXT = 8  # tokens of the prompt that are decoded with what follows
HALF = "\ufffd"  # what bytes that make no character are shown as, and so an unfinished one
_LATER_BYTE = re.compile("<0x[89AB][0-9A-F]>")  # the second to fourth byte of a character, each its own token


class StreamDecoder:
    """Turns ids into text as they come and holds back what may still be half a character."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Some vocabularies drop a space where a text begins; after a few tokens this is no beginning.
        self._window = [int(token) for token in context[self._beginning(context) :]]
        self._fresh = 0  # how many ids of the window have not been part of a finished text
        text = self._text(len(self._window))
        self._given = len(text)  # how much of the window's text is out already
        self._prompt = text if text.endswith(HALF) else ""  # it may end inside a character

    def _beginning(self, context: Sequence[int]) -> int:
        """Where the window begins: never inside a character, which would make a whole run of bytes invalid."""
        at = max(len(context) - CONTEXT, 0)
        while at < len(context) and _LATER_BYTE.fullmatch(self._tokenizer.token(context[at]) or ""):
            at += 1
        return at

    def _text(self, count: int) -> str:
        return self._tokenizer.decode(self._window[:count])

    def push(self, token: int) -> str:
        """Take one id and return the text that is certain by now: often a word, sometimes nothing."""
        self._tokenizer._check(token)
        self._window.append(token)
        self._fresh += 1
        text = self._all()
        if not text.endswith(HALF):
            return self._release(text)
        # An unfinished character has at most three bytes, thus three tokens: what is before them is settled.
        settled = text.rstrip(HALF)
        if self._fresh > 3 and len(early := self._text(len(self._window) - 3)) > len(settled):
            settled = early
        piece = settled[self._given :]
        self._given += len(piece)
        return piece

    def finish(self) -> str:
        """Return what was held back: the replacement character stands for bytes that make no character."""
        return self._release(self._all())

    def _all(self) -> str:
        """The text of the window; what of it is new begins earlier if the prompt ended inside a character."""
        text = self._text(len(self._window))
        if not text.startswith(self._prompt):  # the character is whole now, and belongs to what follows
            held = self._unfinished(len(self._window) - self._fresh)
            self._fresh, self._prompt = self._fresh + held, ""
            self._given = len(self._text(len(self._window) - self._fresh))
        return text

    def _release(self, text: str) -> str:
        piece = text[self._given :]
        if piece:
            # Only the last ids stay, as context; their own text tells where the next piece begins.
            self._window, self._fresh, self._prompt = self._window[-self._fresh :], 0, ""
            self._given = len(self._text(len(self._window)))
        return piece

    def _unfinished(self, count: int) -> int:
        """How many of the first `count` ids of the window are an unfinished character at their end: three at most."""
        return next((n for n in range(1, min(count, 3) + 1) if not self._text(count - n).endswith(HALF)), 0)


Messages = Sequence[Mapping[str, Any]]
SECONDS, CHARACTERS_A_SECOND = 5.0, 50_000  # time for any text, and more for a long one: 20 x what they take
_SURROGATE = re.compile("[\ud800-\udfff]")


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
        last_id: int | None = None,
    ) -> None:
        """last_id: the largest one, where it is known; to ask the library for all of them takes a while."""
        self._core, self._where = core, where
        self.bos_id, self.eos_ids, self.add_bos = bos_id, frozenset(eos_ids), add_bos and bos_id is not None
        self.chat_template, self.special_tokens = chat_template, dict(special_tokens or {})
        if last_id is None:
            last_id = max(core.get_vocab(with_added_tokens=True).values(), default=-1)
        if last_id < 0:
            raise LoadError("the tokenizer has an empty vocabulary", where=where)
        if vocab_size is not None and last_id >= vocab_size:
            what = f"the tokenizer has token id {last_id}, but the model has {vocab_size} tokens"
            raise LoadError(what, where=where, fix="use the tokenizer that belongs to the model")
        # A model may have more rows than tokens, to round its size up: such ids are legal and have no text.
        self.vocab_size = vocab_size if vocab_size is not None else last_id + 1
        core.no_truncation()
        core.no_padding()

    @classmethod
    @kept()
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
                if not _is_unicode(text):
                    why = "it has half of a surrogate pair, which no text has"
                    raise LoadError(f"{key} is {text!r:.60}", where=directory / "tokenizer_config.json", why=why)
                special[key] = text
        bos_id = core.token_to_id(special["bos_token"]) if "bos_token" in special else None
        if "bos_token" not in named:  # then tokenizer.json itself may tell, or the model
            bos_id = _put_in_front(core, directory, _read_optional(directory / "config.json").get("bos_token_id"))
        add_bos = settings.get("add_bos_token")
        if not isinstance(add_bos, bool):
            legacy = "LlamaTokenizer" in str(settings.get("tokenizer_class"))
            add_bos = legacy or _put_in_front(core, directory) == bos_id
        eos_ids = {core.token_to_id(special["eos_token"])} if "eos_token" in special else set()
        for name in ("config.json", "generation_config.json"):
            eos_ids.update(_ends(_read_optional(directory / name), directory / name))
        return cls(
            core,
            bos_id=bos_id,
            eos_ids=eos_ids - {None},
            add_bos=add_bos,
            chat_template=read_template(directory, settings),
            special_tokens=special,
            vocab_size=vocab_size,
            where=directory,
        )

    @classmethod
    def from_text(cls, text: bytes, settings: Mapping[str, Any], *, is_checked: bool = False) -> Tokenizer:
        """The tokenizer of a saved plan: tokenizer.json, and what a Tokenizer knows besides."""
        from tokenizers import Tokenizer as Core

        where = "the tokenizer of a saved plan"
        if not is_checked:
            _check_normalizer(text, where)
        core = _made(lambda: Core.from_buffer(text), where)
        last_id = settings["vocab_size"] - 1 if is_checked else None
        return cls(core, **_checked_settings(settings, where), where=where, last_id=last_id)

    @classmethod
    @kept()
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, vocab_size: int | None = None, where: object = None
    ) -> Tokenizer:
        """Build the tokenizer that the metadata of a GGUF file describes."""
        from monoplan.models.text.gguf_tokenizer import gguf_tokenizer

        with located(where, LoadError):
            core, settings = gguf_tokenizer(metadata)
            return cls(core, **settings, vocab_size=vocab_size, where=where)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with one BOS in front where the model wants it and the text has none."""
        if not isinstance(text, str):
            raise ArgumentError("the text can't be tokenized", why=f"it is {text!r:.60}")
        if not _is_unicode(text):
            why = "it has half of a surrogate pair, which UTF-8 can't write"
            raise ArgumentError("the text can't be tokenized", why=why, fix="text.encode('utf-8', 'replace').decode()")
        ids: list[int] = _encoded(self._core, [text], self._where)[0].ids
        if add_special_tokens and self.add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]  # type: ignore[list-item]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if not isinstance(ids, Iterable):
            raise ArgumentError("decode takes a list of token ids", why=f"it is {ids!r:.60}")
        checked = [self._check(token) for token in ids]
        try:
            return str(self._core.decode(checked, skip_special_tokens=skip_special_tokens))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics are no Exceptions
            raise LoadError("the tokenizer failed", where=self._where, why=in_words(error)) from None

    def to_json(self) -> str:
        """The text of a tokenizer.json, for other libraries that read one."""
        return str(self._core.to_str())

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
        if (
            not isinstance(messages, Iterable)
            or not (messages := list(messages))
            or not all(isinstance(message, Mapping) and "role" in message for message in messages)
        ):
            raise ArgumentError("a chat needs messages with a role and a content")
        values = {"tools": None, "documents": None, **self.special_tokens, **values}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return render_chat(self.chat_template, values, self._where)

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
        _check_normalizer(path.read_bytes(), path)
    except OSError as error:
        raise LoadError("can't read tokenizer.json", where=path, why=error.strerror or str(error)) from None
    return _made(lambda: Core.from_file(str(path)), path)


def _made(make: Callable[[], Any], where: object) -> Any:
    """The library's object, whatever it raises while it makes it."""
    try:
        core = make()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare exceptions, and its panics are not even those
        raise LoadError("tokenizer.json can't be used", where=where, why=str(error)) from None
    if core.decoder is not None and b'"Regex"' in core.decoder.__getstate__():
        # It is run for every token that is generated, with Python's lock held: nobody could give up waiting for it.
        raise LoadError("tokenizer.json can't be used", where=where, why="its decoder has a regular expression")
    return core


def _checked_settings(given: Mapping[str, Any], where: object) -> dict[str, Any]:
    """What a Tokenizer wants to know, of a file that anybody may have made."""
    template, special, ends = given["chat_template"], given["special_tokens"], given["eos_ids"]
    ids = [*ends, given["vocab_size"], *([] if given["bos_id"] is None else [given["bos_id"]])]
    texts = [*special, *special.values(), "" if template is None else template]
    if not all(map(_is_id, ids)) or not all(isinstance(t, str) and _is_unicode(t) for t in texts):
        raise LoadError("the settings of the tokenizer can't be used", where=where)
    return {k: given[k] for k in ("bos_id", "eos_ids", "chat_template", "special_tokens", "vocab_size")} | {
        "add_bos": bool(given["add_bos"])
    }


def _check_normalizer(data: bytes, where: object) -> None:
    """Raises where added tokens can't be normalized in time: the library does it while it loads a file, with Python's
    lock held, so that nobody could give up waiting for it. A file without such a regular expression is not parsed."""
    from tokenizers import Tokenizer as Core

    text = data.decode("utf-8", "replace")
    # Names could be spelled with escapes of plain letters, which no program writes.
    if not any(mark in text for mark in ("\\u006", "\\u007")) and not _has_pattern(text, "normalizer"):
        return
    found = parse_json(text, where)
    tokens, normalizer = found.get("added_tokens"), found.get("normalizer")
    if not isinstance(tokens, list) or '"Regex"' not in json.dumps(normalizer):
        return
    model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    try:
        core = Core.from_str(json.dumps({"version": "1.0", "normalizer": normalizer, "model": model}))
    except Exception as error:  # the library raises bare exceptions
        raise LoadError("tokenizer.json can't be used", where=where, why=str(error)) from None
    texts = [t["content"] for t in tokens if isinstance(t, dict) and isinstance(t.get("content"), str)]
    _encoded(core, texts, where)


def _has_pattern(text: str, name: str) -> bool:
    """Whether an object of that name in a JSON text has a regular expression in it."""
    for found in re.finditer(rf'"{name}"\s*:\s*', text):
        try:
            if '"Regex"' in json.dumps(json.JSONDecoder().raw_decode(text, found.end())[0]):
                return True
        except (ValueError, RecursionError):
            return True  # the library will say what is wrong
    return False


def _encoded(core: Any, texts: Sequence[str], where: object, special: bool = False) -> list[Any]:
    """Encodings of texts, or an error when the library takes too long: a regular expression may try for ever.

    It can't be stopped. The thread that it runs in goes on until it is done, or the process ends.
    """
    found: list[Any] = []

    def encode() -> None:
        try:
            # For one text there is `encode`, but that keeps Python's lock, and nobody could give up waiting for it.
            found.append(core.encode_batch(texts, add_special_tokens=special))
        except BaseException as error:  # panics are no Exceptions
            found.append(error)

    thread, length = threading.Thread(target=encode, name="monoplan-tokenizer", daemon=True), sum(map(len, texts))
    thread.start()
    seconds = SECONDS + length / CHARACTERS_A_SECOND
    thread.join(seconds)
    why = "the time of a regular expression in tokenizer.json may grow exponentially with the length of a text"
    if not found:
        what = f"the tokenizer was not done with {length} characters in {seconds:.0f} s"
        raise LoadError(what, where=where, why=why, fix="use another tokenizer.json")
    if isinstance(found[0], BaseException):
        why = f"{in_words(found[0])}; {why}" if "retry-limit" in str(found[0]) else in_words(found[0])
        raise LoadError(f"the tokenizer failed on {length} characters", where=where, why=why)
    encodings: list[Any] = found[0]
    return encodings


def _put_in_front(core: Any, where: object, otherwise: Any = None) -> int | None:
    """Return the id that the tokenizer itself puts in front of a text, or another one if it has that."""
    core.no_padding()
    try:
        (encoding,) = _encoded(core, ["a"], where, special=True)
    except LoadError:  # a vocabulary that has no such letter
        (encoding,) = _encoded(core, [""], where, special=True)
    if encoding.ids and encoding.sequence_ids[0] is None:  # not of the text
        return int(encoding.ids[0])
    return otherwise if _is_id(otherwise) and core.id_to_token(otherwise) is not None else None


def _ends(data: Mapping[str, Any], where: object) -> list[int]:
    """The ids that end a text, of a configuration: one, or a list of them."""
    found = data.get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(map(_is_id, ends)):
        what = f"eos_token_id must be a token id or a list of them, got {found!r:.60}"
        raise LoadError(what, where=where, fix="correct it, or remove it")
    return ends


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can write a text: not if it has half of a surrogate pair."""
    return text.isascii() or not _SURROGATE.search(text)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
