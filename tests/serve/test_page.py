"""The page in a real browser: it streams, stops, shows speed, keeps to its server and treats text as text."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route

from monoplan.serve.app import make_app
from monoplan.serve.engine import Engine
from tests.browser import Page, browser_page
from tests.needs import needs
from tests.serve.support import NAME, serving

TEXT = "Two *kinds* of **text**:\n\n- one `code`\n- <img src=x onerror=alert(1)>\n\n```python\nprint('<b>')\n```\nEnd."
pytestmark = needs("browser")


class Script:
    """The application with answers that a test has written; it notes what was asked, and what was broken off."""

    def __init__(self, app: Any) -> None:
        self.asked: list[Any] = []
        self.left = 0
        self.endless = False
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"]), Mount("/", app)])

    async def answer(self, request: Request) -> Any:
        self.asked.append(await request.json())
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self) -> AsyncIterator[str]:
        try:
            yield self.event({"role": "assistant", "content": ""})
            pieces = [TEXT[i : i + 7] for i in range(0, len(TEXT), 7)]
            while True:
                for piece in pieces:
                    yield self.event({"content": piece})
                    await asyncio.sleep(0.02)
                if not self.endless:
                    break
            yield self.event({}, "stop")
            used = {
                "prompt_tokens": 20,
                "completion_tokens": len(pieces),
                "prompt_tokens_details": {"cached_tokens": 16},
            }
            yield f"data: {json.dumps({'choices': [], 'usage': used})}\n\ndata: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left += 1
            raise

    @staticmethod
    def event(delta: Any, reason: str | None = None) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"


@pytest.fixture(scope="module")
def script(lm: Any) -> Iterator[tuple[Script, str]]:
    with Engine(lm) as engine:
        made = Script(make_app(engine, NAME))
        with serving(made.app) as url:
            yield made, url


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("page")) as made:
        yield made


def say(page: Page, text: str) -> None:
    """Types as a person does, and presses Enter."""
    page.click("#input")
    page.call("Input.insertText", text=text)
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    page.call("Input.dispatchKeyEvent", type="keyDown", **key)
    page.call("Input.dispatchKeyEvent", type="keyUp", **key)


def test_it_answers_in_pieces_and_as_text(page: Page, script: tuple[Script, str]) -> None:
    made, url = script
    page.open(url + "/")
    page.wait(f"document.getElementById('model').textContent === {NAME!r}")
    assert page.js("document.activeElement.id") == "input" and page.js("document.getElementById('send').disabled")
    say(page, "Hello <b>you</b>")
    page.wait("!!document.querySelector('.message.assistant.running .speed')?.textContent.includes('tokens/s')")
    assert not page.js("document.getElementById('stop').hidden")
    page.wait("!document.querySelector('.running')")
    assert made.asked[-1]["messages"] == [{"role": "user", "content": "Hello <b>you</b>"}] and made.asked[-1]["stream"]
    assert page.js("document.querySelector('.user .body').textContent") == "Hello <b>you</b>"
    assert page.js("document.querySelector('.assistant pre code').textContent") == "print('<b>')"
    assert page.js("[...document.querySelectorAll('.assistant li')].map((e) => e.textContent)") == [
        "one code",
        "<img src=x onerror=alert(1)>",
    ]
    assert page.js("document.querySelectorAll('.assistant img, .assistant b, .user b').length") == 0
    assert page.js("document.querySelector('.assistant strong').textContent") == "text"
    note = page.js("document.querySelector('.note span').textContent")
    assert "tokens/s" in note and "16 of 20 prompt tokens reused" in note
    say(page, "More")
    page.wait("document.querySelectorAll('.message.assistant').length === 2 && !document.querySelector('.running')")
    assert [m["role"] for m in made.asked[-1]["messages"]] == ["user", "assistant", "user"]
    assert made.asked[-1]["messages"][1]["content"] == TEXT


def test_escape_and_the_button_stop_an_answer(page: Page, script: tuple[Script, str]) -> None:
    made, url = script
    made.endless = True
    try:
        page.open(url + "/")
        for count, stop in enumerate(("key", "button"), 1):
            before = made.left
            say(page, "Go on")
            page.wait("!!document.querySelector('.running .speed')?.textContent.includes('tokens/s')")
            if stop == "key":
                page.call(
                    "Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27
                )
            else:
                page.click("#stop")
            page.wait(f"document.querySelectorAll('.message.assistant:not(.running)').length === {count}")
            assert "stopped" in page.js("[...document.querySelectorAll('.note span')].at(-1).textContent")
            page.wait("document.activeElement.id === 'input'")
            end = time.monotonic() + 20
            while made.left == before:
                assert time.monotonic() < end, "the server was not told"
                time.sleep(0.02)
    finally:
        made.endless = False
    page.click("#new")
    assert page.js("document.querySelectorAll('.message').length") == 0


def test_settings_are_sent_and_errors_shown(page: Page, lm: Any, tmp_path: Path) -> None:
    with Engine(lm) as engine, serving(make_app(engine, NAME, api_key="k")) as url:
        page.open(url + "/")
        page.wait("!document.getElementById('settings').hidden && document.activeElement.id === 'key'")
        page.problems.clear()  # the browser says that the key was missing
        page.call("Input.insertText", text="k")
        page.js("document.getElementById('max_tokens').value = '6'")
        page.click("#system")
        page.wait(f"document.getElementById('model').textContent === {NAME!r}")
        say(page, "Hi")
        page.wait("!!document.querySelector('.assistant .note button')")
        assert "cut at the limit" in page.js("document.querySelector('.note span').textContent")
        assert page.problems == []
        say(page, "a" * 2000)
        page.wait("!!document.querySelector('.error')")
        assert "context" in page.js("document.querySelector('.error').textContent")
        page.problems.clear()  # the browser says that a request was refused


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_screens_and_themes(
    page: Page, script: tuple[Script, str], width: int, theme: str, tmp_path: Path
) -> None:
    _, url = script
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=760, deviceScaleFactor=1, mobile=False)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    page.open(url + "/")
    say(page, "A word that is long: " + "x" * 300)
    page.wait("!!document.querySelector('.note button')")
    assert page.js("document.documentElement.scrollWidth") <= width
    colours = page.js("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    bright = [sum(map(int, c.removeprefix("rgb(").removesuffix(")").split(","))) for c in colours]
    assert (bright[0] < bright[1]) == (theme == "light") and abs(bright[0] - bright[1]) > 400
    assert page.picture(tmp_path / "page.png").stat().st_size > 5000


def test_it_asks_only_its_own_server(page: Page, script: tuple[Script, str]) -> None:
    page.requests.clear()
    page.open(script[1] + "/")
    page.wait(f"document.getElementById('model').textContent === {NAME!r}")
    assert page.requests and all(url.startswith((script[1], "data:")) for url in page.requests)
    assert page.problems == []
