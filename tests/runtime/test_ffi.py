"""Declarations: parsed once, by any number of threads, without a word."""

from __future__ import annotations

import errno
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from monoplan.runtime.build import toolchain


def test_declarations_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where TMPDIR is full."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("builtins.open", "tempfile.mkdtemp", "os.rename"):
        monkeypatch.setattr(name, full)
    assert "mp_alone" in toolchain._parsed("int mp_alone(void);")


def test_threads_parse_and_standard_output_stays(capsys: pytest.CaptureFixture[str]) -> None:
    stdout = sys.stdout
    seen = []

    def parse(number: int) -> str:
        text = toolchain._parsed(f"int mp_function_{number}(const double *, int64_t);")
        seen.append(sys.stdout is stdout)
        return text

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(parse, range(32)))
    assert all(seen) and sys.stdout is stdout
    assert all(f"mp_function_{i}" in text for i, text in enumerate(made))
    assert capsys.readouterr().out == ""
    names: dict[str, object] = {}
    exec(made[3], names)
    assert "ffi" in names
