"""What ranks need to know of the machine that they are on: which one it is, its cores, and memory to share."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path


def host() -> str:
    """The host, as far as memory and process numbers are shared: containers have processes of their own."""
    about = [socket.gethostname()]
    with contextlib.suppress(OSError):
        about += [Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(about)


def cpus() -> tuple[int, ...]:
    """The cores that this process may use; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def shared_file(nbytes: int) -> str:
    """A new file of zeros, of a name that no other group has, which only this user can read."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    number, path = tempfile.mkstemp(prefix="monoplan-", dir=folder)
    try:
        os.ftruncate(number, nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, nbytes)  # now, not as a SIGBUS when the place is full
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(number)
    return path
