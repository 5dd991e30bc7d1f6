"""Messages and tools for templates, and calls out of text that comes in any pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monoplan.ir.errors import ArgumentError
from monoplan.serve.chat import CallParser, Part, call_form, calls_schema, chat_ids, message_of, tool_of
from tests.serve.support import tiny_lm

ARGUMENTS = '{"city": "Paris \\"}{ é", "deep": {"a": [1, {"b": "]"}]}}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "time", "arguments": {}}'
NAMES = ["weather", "time"]
# form, text, its content, its calls
BOTH = [("weather", ARGUMENTS), ("time", "{}")]
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Hello <tool> there", "Hello <tool> there", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>", "", BOTH),
    ("hermes", f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call> Done.", "Let me see. Done.", BOTH[:1]),
    ("hermes", f"<tool_call>{CALL}", "", [("weather", ARGUMENTS)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', "", [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}, "id": 7}</tool_call>', "", [("time", "{}")]),
    ("hermes", "<tool_call>nothing", "nothing", []),
    ("hermes", '<tool_call>{"no": "call"}</tool_call>', '{"no": "call"}</tool_call>', []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", "", BOTH),
    ("mistral", f" [{CALL}]", "", [("weather", ARGUMENTS)]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}", "", BOTH),
    ("mistral", f"weather{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
    ("mistral", "weather is fine", "weather is fine", []),
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("mistral", f"So: [TOOL_CALLS][{OTHER}]", "So: ", [("time", "{}")]),
    ("llama", CALL.replace("arguments", "parameters"), "", [("weather", ARGUMENTS)]),
    ("llama", f"<|python_tag|>{CALL}; {OTHER}", "", BOTH),
    ("llama", '{"type": "function", "name": "time", "parameters": {"x": 1}}', "", [("time", '{"x": 1}')]),
    ("llama", '{"answer": {"name": "weather"}}', '{"answer": {"name": "weather"}}', []),
    ("llama", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama", "Plain {text}", "Plain {text}", []),
    ("llama", "{ no json", "{ no json", []),
    ("list", f"[{CALL},{OTHER}]", "", BOTH),
]  # fmt: skip


def collect(parser: CallParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parts: list[Part] = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    content = "".join(part.text for part in parts if part.call is None)
    names = {part.call: part.name for part in parts if part.name is not None}
    assert sorted(names) == list(range(parser.count)) and all(p.id for p in parts if p.name is not None)
    calls = {n: "".join(p.text for p in parts if p.call == n) for n in names}
    return content, [(str(names[n]), calls[n]) for n in sorted(names)]  # type: ignore[type-var]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_in_whole_text_and_letter_by_letter(form: str, text: str, content: str, calls: Any) -> None:
    assert collect(CallParser(form, NAMES), [text]) == (content, calls)
    assert collect(CallParser(form, NAMES), list(text)) == (content, calls)


@given(case=st.sampled_from(CASES), data=st.data())
def test_pieces_of_any_size_give_the_same(case: Any, data: Any) -> None:
    form, text, content, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert collect(CallParser(form, NAMES), pieces) == (content, calls)


WORDS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "{", "}", "[", "]",
    '{"name": "time"', ": ", "time", '"arguments"', ",", '"', " ", "\\", '{"name": "time", "arguments": {}}', "é",
]  # fmt: skip


@given(st.sampled_from(["hermes", "mistral", "llama", "list"]), st.lists(st.sampled_from(WORDS), max_size=14))
def test_any_text_is_content_or_calls(form: str, pieces: list[str]) -> None:
    whole, parts = collect(CallParser(form, NAMES), ["".join(pieces)]), collect(CallParser(form, NAMES), pieces)
    assert whole == parts


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = CallParser("hermes", NAMES)
    assert parser.push('<tool_call>{"name": "weather", "arguments": {"city"')[0].name == "weather"
    assert parser.push(': "Par') == [Part(': "Par', 0)]


def test_one_tools_arguments_alone() -> None:
    assert collect(CallParser("list", NAMES, "time"), ["{", "}"]) == ("", [("time", "{}")])


def test_the_form_follows_from_the_template() -> None:
    assert call_form("... <tool_call> ...") == "hermes" and call_form(None) == "hermes"
    assert call_form("... [TOOL_CALLS] ...") == "mistral" and call_form("<|python_tag|>") == "llama"


def test_messages_are_made_for_templates() -> None:
    assert message_of({"role": "developer", "content": "x"}, "m") == {"role": "system", "content": "x"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message_of({"role": "user", "content": parts}, "m")["content"] == "ab"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    made = message_of({"role": "assistant", "content": None, "tool_calls": [call]}, "m")
    assert made["tool_calls"][0]["function"]["arguments"] == {"a": 1} and made["content"] == ""
    assert message_of({"role": "tool", "content": "5", "tool_call_id": "1"}, "m")["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("x", "a role of"),
        ({"role": "king", "content": "x"}, "a role of"),
        ({"role": ["user"], "content": "x"}, "a role of"),
        ({"role": "user"}, "has no content"),
        ({"role": "user", "content": 5}, "a text or a list of parts"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}, "text only"),
        ({"role": "user", "content": [{"type": "text"}]}, "without a text"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "message of the assistant"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "must be JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "JSON object"),
        ({"role": "assistant", "tool_calls": [{}]}, "a function with a name"),
    ],
)
def test_messages_that_make_no_sense_are_refused(message: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        message_of(message, "messages[0]")


def test_tools_are_checked() -> None:
    for tool in (5, {}, {"type": "function", "function": {}}, {"type": "code"}):
        with pytest.raises(ArgumentError, match="must be"):
            tool_of(tool, "tools[0]")
    with pytest.raises(ArgumentError, match="JSON schema"):
        tool_of({"type": "function", "function": {"name": "f", "parameters": 5}}, "tools[0]")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "5"},
]


def test_a_template_that_knows_tools_writes_them() -> None:
    tokenizer = tiny_lm().tokenizer
    text = tokenizer.decode(chat_ids(tokenizer, TALK, [TOOL], {}, True), skip_special_tokens=False)
    assert f"<tools>{json.dumps(TOOL)}</tools>" in text and '<tool_call>{"name": "f", "arguments": {"a": 1}}' in text
    assert text.endswith("<|start|>tool\n5<|start|>assistant\n")


def test_other_templates_get_them_as_text() -> None:
    template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    tokenizer = tiny_lm(template).tokenizer
    text = tokenizer.decode(chat_ids(tokenizer, TALK, [TOOL], {}, True))
    assert text.startswith("[system: # Tools") and json.dumps(TOOL) in text
    assert '[assistant: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>]' in text
    assert text.endswith("[user: <tool_response>\n5\n</tool_response>]")
    told = tokenizer.decode(chat_ids(tokenizer, [{"role": "system", "content": "Be kind."}, *TALK], [TOOL], {}, True))
    assert told.startswith("[system: Be kind.\n\n# Tools")


def test_the_schema_of_calls() -> None:
    schema = calls_schema([TOOL], parallel=False)
    assert schema["maxItems"] == 1 and schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "f"}
