"""A real browser for tests: headless Chromium, driven through its DevTools protocol with nothing but the stdlib."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
    "--window-size=1500,950",
)  # fmt: skip
PATIENCE = 60.0  # seconds


def find_browser() -> str | None:
    """The program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab: evaluates JavaScript, clicks, takes pictures, and collects what the console complains about."""

    def __init__(self, address: str) -> None:
        host, _, path = address.removeprefix("ws://").partition("/")
        name, _, port = host.partition(":")
        self.socket = socket.create_connection((name, int(port)), timeout=PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.socket.recv(4096)
        self.buffer = self.buffer.partition(b"\r\n\r\n")[2]
        self.count = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Sends a command and waits for its answer; events that come meanwhile are noted."""
        self.count += 1
        self._send(json.dumps({"id": self.count, "method": method, "params": params}).encode())
        while True:
            message = json.loads(self._receive())
            if message.get("id") == self.count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        """Loads a page and waits until it is ready."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.js(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Clicks in the middle of an element, with a real mouse event."""
        place = self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); if (!e) return null;"
            " e.scrollIntoView({block: 'nearest'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        if place is None:
            raise LookupError(f"there is no {selector}")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def picture(self, path: Path) -> Path:
        """A PNG of what is visible."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _send(self, data: bytes) -> None:
        mask = os.urandom(4)
        size = len(data)
        head = (
            bytes([0x81, 0x80 | size])
            if size < 126
            else (
                bytes([0x81, 0xFE]) + struct.pack(">H", size)
                if size < 1 << 16
                else bytes([0x81, 0xFF]) + struct.pack(">Q", size)
            )
        )
        self.socket.sendall(head + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))

    def _receive(self) -> bytes:
        """One whole message; control frames are skipped."""
        whole = b""
        while True:
            first, second = self._read(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(self._read(2 if size == 126 else 8), "big")
            data = self._read(size)
            if first & 0x0F in (0, 1, 2):
                whole += data
                if first & 0x80:
                    return whole

    def _read(self, count: int) -> bytes:
        while len(self.buffer) < count:
            got = self.socket.recv(1 << 16)
            if not got:
                raise ConnectionError("the browser is gone")
            self.buffer += got
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data


@contextlib.contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """A page of a browser whose profile lives in `folder`; the browser ends with the block."""
    program = find_browser()
    assert program is not None
    home = folder / "browser"
    home.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={home}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(home)},
    )
    try:
        port = _port(home, process)
        end = time.monotonic() + PATIENCE
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=PATIENCE) as answer:
                pages = [p for p in json.load(answer) if p["type"] == "page"]
            if pages or time.monotonic() > end:
                break
            time.sleep(0.1)
        yield Page(pages[0]["webSocketDebuggerUrl"])
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(home: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that the browser chose."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended with status {process.returncode}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((home / "DevToolsActivePort").read_text().splitlines()[0])
        time.sleep(0.1)
    raise TimeoutError("the browser did not start")
