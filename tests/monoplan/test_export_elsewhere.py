"""Exported plans from another language, and in a browser: the programs of examples/."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from pathlib import Path

import numpy as np
import pytest

import monoplan as mp
from tests.browser import browser_page
from tests.modules import Block
from tests.monoplan.test_export import run
from tests.monoplan.test_export_chat import small
from tests.needs import needs

EXAMPLES = Path(__file__).parents[2] / "examples"


@needs("rustc")
@pytest.mark.full
def test_a_plan_from_rust(tmp_path: Path) -> None:
    fast = mp.compile(Block(24, 40), mp.spec("batch", "seq", 24), options={"threads": 2})
    fast.export(tmp_path)
    done = run(tmp_path, str(EXAMPLES / "rust" / "build.sh"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    x = ((np.arange(3 * 5 * 24) % 17) / 8 - 1).astype(np.float32).reshape(3, 5, 24)
    done = run(tmp_path, "./rust_main", "weights.bin", "3", "5", "24")
    shape, _, total = done.stdout.strip().rpartition(" ")
    assert shape == "[3, 5, 24]" and abs(float(total) - float(fast(x).astype(np.float64).sum())) < 1e-3
    refused = run(tmp_path, "./rust_main", "weights.bin", "3", "5", "25")
    assert refused.returncode == 1 and "size 25 of axis 2 must be 24" in refused.stderr
    refused = run(tmp_path, "./rust_main", "none.bin", "1", "1", "24")
    assert refused.returncode == 1 and "can't be opened" in refused.stderr


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@needs("wasm", "browser")
@pytest.mark.full
def test_a_language_model_in_a_page(tmp_path: Path) -> None:
    """The tokens of the plan, by WebAssembly in Chromium."""
    lm = small()
    lm.export(tmp_path / "site", isa="generic")
    done = run(tmp_path, str(EXAMPLES / "web" / "build.sh"), str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "chat.wasm").stat().st_size < 1_000_000
    handler = functools.partial(_Quiet, directory=str(tmp_path / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser_page(tmp_path) as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(f"http://127.0.0.1:{server.server_port}/index.html")
        assert page.js("window.ready.then(() => 'ok', (e) => e.message)") == "ok"
        prompt = "hello ab a"
        call = f"run({json.dumps(prompt)}, {{most: 24}}).then((ids) => JSON.stringify(ids))"
        expected = lm.generate_ids(lm.tokenizer.encode(prompt), 24)
        assert json.loads(page.js(call)) == expected
        assert page.js("document.getElementById('out').textContent").startswith(prompt)
        chat = lm.generate_ids(lm.tokenizer.chat([{"role": "user", "content": prompt}]), 8, temperature=0.9, seed=3)
        options = "{message: true, most: 8, temperature: 0.9, seed: 3}"
        assert json.loads(page.js(f"run({json.dumps(prompt)}, {options}).then((x) => JSON.stringify(x))")) == chat
        assert page.js("run('').catch((e) => e.message)") == "the prompt is empty"
        assert page.problems == []
        server.shutdown()
