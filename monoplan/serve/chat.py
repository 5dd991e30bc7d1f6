"""Conversations: messages and tools as the model's chat template wants them, and tool calls out of its text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monoplan.ir.errors import ArgumentError
from monoplan.ir.lazy_dataclass import dataclass

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# For models whose template knows nothing of tools: the words of Qwen's and Hermes' templates, which others follow too.
_HERMES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def message_of(message: Any, place: str) -> dict[str, Any]:
    """One message of a request, checked, as templates want it."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise ArgumentError(
            f"{place} must be an object with a role of {', '.join(ROLES)}", why=f"it is {message!r:.80}"
        )
    made: dict[str, Any] = {"role": ROLES[role], "content": _content(message.get("content"), place)}
    made |= {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    calls = message.get("tool_calls")
    if calls is not None and calls != []:
        if made["role"] != "assistant" or not isinstance(calls, list):
            raise ArgumentError(f"{place}.tool_calls must be a list in a message of the assistant")
        made["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif made["content"] is None:
        raise ArgumentError(f"{place} has no content")
    if made["content"] is None:
        made["content"] = ""
    return made


def _content(content: Any, place: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ArgumentError(f"{place}.content must be a text or a list of parts", why=f"it is {content!r:.80}")
    texts = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "refusal"):
            raise ArgumentError(
                f"{place}.content has a part of type {part.get('type')!r:.40}, the model reads text only"
            )
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise ArgumentError(f"{place}.content has a part of type text without a text")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ArgumentError(f"{place} must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # templates write them as JSON themselves
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise ArgumentError(f"{place}.function.arguments must be JSON", why=f"it is {arguments!r:.80}") from None
    if not isinstance(arguments, dict):
        raise ArgumentError(f"{place}.function.arguments must be a JSON object", why=f"it is {arguments!r:.80}")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def tool_of(tool: Any, place: str) -> dict[str, Any]:
    """One tool of a request, checked."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ArgumentError(
            f"{place} must be {{'type': 'function', 'function': {{'name': ...}}}}", why=f"it is {tool!r:.80}"
        )
    if not isinstance(function.get("parameters", {}), dict | None):
        raise ArgumentError(f"{place}.function.parameters must be a JSON schema")
    return {"type": "function", "function": function}


def chat_ids(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]], values: Mapping[str, Any], reply: bool
) -> list[int]:
    """The prompt of a conversation, by the model's template."""
    template = tokenizer.chat_template or ""
    if "tools" not in template:
        messages = list(_without_tools(messages, tools))
    given = {**values, **({"tools": tools} if tools else {})}
    ids: list[int] = tokenizer.chat(messages, reply, **given)
    return ids


def _without_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same conversation for a template that knows nothing of tools: they and their calls become text."""
    if tools:
        words = _HERMES.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages[0]["role"] == "system":
            words, messages = f"{messages[0]['content']}\n\n{words}", messages[1:]
        yield {"role": "system", "content": words}
    for message in messages:
        if message["role"] == "tool":
            yield {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif "tool_calls" in message:
            calls = (json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
            texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
            yield {"role": "assistant", "content": "\n".join(text for text in texts if text)}
        else:
            yield message


def calls_schema(tools: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls: what tool_choice "required" holds the model to."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": 16 if parallel else 1}


# Tool calls in the text of an answer.


@dataclass(frozen=True)
class Part:
    """A part of an answer: content, or of a call its beginning (with a name) or more of its arguments."""

    text: str = ""
    call: int | None = None  # the number of a call
    name: str | None = None
    id: str | None = None  # noqa: A003


# Beginning of a call whose arguments can be passed on as they come.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")  # newer Mistral models: name{...}
_NAMED_SO_FAR = re.compile(r"[\w.-]+(\[[A-Z_]*\]?\w*)*\s*")
_SPACE = " \t\r\n"
_MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>"}


def call_form(template: str | None) -> str:
    """How a model writes calls, by its template: hermes (Qwen and many others), mistral or llama."""
    text = template or ""
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<|python_tag|>" in text or ("ipython" in text and "<tool_call>" not in text):
        return "llama"
    return "hermes"


class CallParser:
    """Takes the text of an answer as it comes, and tells calls from content.

    Forms: hermes `<tool_call>{"name": .., "arguments": ..}</tool_call>`; mistral `[TOOL_CALLS][{..}, ..]` or
    `[TOOL_CALLS]name{..}`; llama `{"name": .., "parameters": ..}`, several with `;` between them; list, `[{..}, ..]`,
    which a schema enforces; and one tool's arguments alone, whose name is given. What begins as a call and is none is
    content. Marks that are special tokens of the vocabulary do not reach the text: the forms can do without them.
    """

    def __init__(self, form: str, names: Sequence[str], only: str | None = None) -> None:
        self.form, self.names, self.count = form, frozenset(names), 0
        self._held = ""  # not yet told
        self._state = "start"  # start, text, between (calls), value, rest (of a call, behind its arguments)
        self._scan, self._scanned = _Scan(), 0  # of an object that is held back, how much was looked at
        self._marked = form == "list"
        if only is not None:
            self._state, self.form = "only", "only"
            self._only = only

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts, False):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back, now that no more text comes."""
        parts: list[Part] = []
        while self._step(parts, True):
            pass
        return parts

    def _step(self, parts: list[Part], last: bool) -> bool:
        """Does what can be done with the text at hand; False if nothing more can."""
        return bool(self._held) and getattr(self, f"_in_{self._state}")(parts, last)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _begin(self, parts: list[Part], name: str) -> None:
        parts.append(Part("", self.count, name, f"call_{uuid.uuid4().hex[:24]}"))
        self.count += 1

    def _in_only(self, parts: list[Part], last: bool) -> bool:
        if self.count == 0:
            self._begin(parts, self._only)
        parts.append(Part(self._take(len(self._held)), self.count - 1))
        return False

    def _in_start(self, parts: list[Part], last: bool) -> bool:
        """Calls that need no mark stand at the beginning of the text."""
        text, mark = self._held.lstrip(_SPACE), _MARKS.get(self.form, "")
        if self.form == "hermes" or (last and not text):
            self._state = "text"
            return True
        if not last and (mark.startswith(text) or (self.form == "mistral" and self._may_name(text))):
            return False
        named = _NAMED.match(text) if self.form == "mistral" else None
        if mark and text.startswith(mark):
            self._marked = True
            self._take(len(self._held) - len(text) + len(mark))
            self._state = "between"
        elif text[0] == ("{" if self.form == "llama" else "[") or (named and named[1] in self.names):
            self._state = "between"
        else:
            self._state = "text"
        return True

    def _may_name(self, text: str) -> bool:
        """Whether a text may become the name of a tool and a brace."""
        begun = any(name.startswith(text) for name in self.names)
        return begun or (text.startswith(tuple(self.names)) and bool(_NAMED_SO_FAR.fullmatch(text)))

    def _in_text(self, parts: list[Part], last: bool) -> bool:
        if self.form not in ("hermes", "mistral"):
            return self._flush(parts, len(self._held))
        mark = _MARKS[self.form]
        at = self._held.find(mark)
        if at >= 0:
            self._content(parts, self._take(at).rstrip(_SPACE) if self.form == "hermes" else self._take(at))
            self._take(len(mark))
            self._state, self._marked = "between", True
            return True
        keep = 0 if last else next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
        if self.form == "hermes" and not last:  # spaces before a call are not content
            body = self._held[: len(self._held) - keep]
            keep += len(body) - len(body.rstrip(_SPACE))
        text = self._take(len(self._held) - keep)
        self._content(parts, "" if last and self.count and not text.strip(_SPACE) else text)
        return False

    def _in_between(self, parts: list[Part], last: bool) -> bool:
        """Before a call, between two, or behind the last one."""
        text = self._held.lstrip(_SPACE)
        end, mark = ("</tool_call>" if self.form == "hermes" else ""), _MARKS.get(self.form, "")
        for word in (end, mark if self.form == "mistral" else ""):
            if word and text.startswith(word):
                self._take(len(self._held) - len(text) + len(word))
                self._state, self._marked = "text" if word is end else "between", True
                return True
            if word and word.startswith(text) and not last:
                return False
        if self.form != "hermes":
            text = text.lstrip(_SPACE + ",;[" + "]" * (self._marked or self.count > 0))
        skipped = len(self._held) - len(text)
        if not text:
            return last and self._flush(parts, 0 if self.count else skipped)
        if text.startswith("{"):
            return self._object(parts, text, last)
        if self.form == "mistral":
            named = _NAMED.match(text)
            if named and (self._marked or named[1] in self.names):
                self._take(skipped + named.end())
                self._begin(parts, named[1])
                self._scan, self._state = _Scan(), "named"
                return True
            if not last and _NAMED_SO_FAR.fullmatch(text):
                return False
        return self._flush(parts, skipped + 1)

    def _object(self, parts: list[Part], text: str, last: bool) -> bool:
        skipped = len(self._held) - len(text)
        if head := _HEAD.match(text):
            name = _loads(head[1])
            if self._marked or name in self.names:
                self._take(skipped + head.end())
                self._begin(parts, str(name))
                self._scan, self._scanned, self._state = _Scan(), 0, "value"
                return True
        size = self._scan.push(text[self._scanned :])
        if size is None:
            self._scanned = len(text)
            return last and self._flush(parts, len(self._held))
        size, self._scan, self._scanned = size + self._scanned, _Scan(), 0
        call = _loads(text[:size])
        name, arguments = (
            (call.get("name"), call.get("arguments", call.get("parameters", {})))
            if isinstance(call, dict)
            else (None, None)
        )
        if not isinstance(name, str) or not (self._marked or name in self.names):
            return self._flush(parts, skipped + size)
        self._take(skipped + size)
        self._begin(parts, name)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(Part(written, self.count - 1))
        return True

    def _in_value(self, parts: list[Part], last: bool) -> bool:
        """Arguments are passed on as they come."""
        size = self._scan.push(self._held)
        text = self._take(len(self._held) if size is None else size)
        parts.append(Part(text, self.count - 1))
        if size is not None:
            self._scan, self._state = _Scan(), "between" if self._state == "named" else "rest"
        return size is not None

    _in_named = _in_value

    def _in_rest(self, parts: list[Part], last: bool) -> bool:
        """Whatever a call has behind its arguments, up to its brace."""
        at = self._held.find("}")
        self._take(len(self._held) if at < 0 else at + 1)
        if at >= 0:
            self._state = "between"
        return at >= 0

    def _flush(self, parts: list[Part], count: int) -> bool:
        """So much of it is content; calls come behind a mark only, from here on."""
        self._content(parts, self._take(count))
        self._scan, self._scanned, self._state = _Scan(), 0, "text"
        return count > 0

    def _content(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(Part(text))


class _Scan:
    """Finds the end of a JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def push(self, text: str) -> int | None:
        """How much of the text belongs to the object; None if it does not end in it."""
        for at, c in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = c == "\\", c != '"'
            elif c == '"':
                self._quoted = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
