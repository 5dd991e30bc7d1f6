"""What ranks learn of their machine, and the file that they share."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from monoplan.runtime.ranks import comm as comm_host


def test_a_shared_file_is_new_private_and_zero() -> None:
    first, second = comm_host.shared_file(4096), comm_host.shared_file(4096)
    try:
        assert first != second
        assert Path(first).read_bytes() == bytes(4096) and os.stat(first).st_mode & 0o077 == 0
    finally:
        os.unlink(first)
        os.unlink(second)


def test_no_file_stays_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full /dev/shm is an error at the start, not a SIGBUS in the middle of a plan."""

    def refuse(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "access", lambda *given: False)
    monkeypatch.setattr(comm_host.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    with pytest.raises(OSError, match="No space left"):
        comm_host.shared_file(4096)
    assert not list(tmp_path.iterdir())


def test_hosts_and_cores() -> None:
    assert comm_host.host() == comm_host.host() != ""
    if hasattr(os, "sched_getaffinity"):
        assert set(comm_host.cpus()) == os.sched_getaffinity(0)
