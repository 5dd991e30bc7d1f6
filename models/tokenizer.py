"""Text to token ids and back: `tokenizer.json` or a GGUF vocabulary, chat templates."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.models.chat_template import read_template, render_chat
from monoplan.models.config_json import read_json, short
from monoplan.models.streaming import StreamDecoder

Messages = Sequence[Mapping[str, Any]]


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
            ends = found if isinstance(found, list) else [found]
            if not all(end is None or (type(end) is int and end >= 0) for end in ends):
                what = f"eos_token_id must be a token id or a list of them, got {short(found)}"
                raise LoadError(what, where=directory / name)
            eos_ids.update(ends)
        return cls(
            core,
            bos_id=bos_id,
            eos_ids=[value for value in eos_ids if isinstance(value, int)],
            add_bos=add_bos,
            chat_template=read_template(directory, settings),
            special_tokens=special,
            vocab_size=vocab_size,
            where=directory,
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, vocab_size: int | None = None, where: object = None
    ) -> Tokenizer:
        """Build the tokenizer that the metadata of a GGUF file describes."""
        from monoplan.models.gguf_tokenizer import gguf_tokenizer

        try:
            core, settings = gguf_tokenizer(metadata)
            return cls(core, **settings, vocab_size=vocab_size, where=where)
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
