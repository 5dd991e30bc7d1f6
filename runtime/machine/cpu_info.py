"""What the system says about its CPU: architecture, model and flags, and the C library that goes with it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

_MACOS_ARM = {
    "FEAT_FP16": "asimdhp", "FEAT_DotProd": "asimddp", "FEAT_LSE": "atomics", "FEAT_FHM": "asimdfhm",
    "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "FEAT_CRC32": "crc32", "FEAT_RDM": "asimdrdm",
}  # fmt: skip
_ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def machine() -> str:
    """The architecture by one name on every system."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(name, name)


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """Model name and flags, by their Linux names; flags that only some of the cores have don't count."""
    if sys.platform == "darwin":
        return _read_macos()
    values: dict[str, list[str]] = {}
    try:
        for line in cpuinfo.read_text("utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            values.setdefault(name.strip(), []).append(value.strip())
    except OSError:
        pass  # no /proc: an unknown CPU of no special abilities
    sets = [frozenset(text.split()) for text in values.get("flags", values.get("Features", []))]
    part = values.get("CPU part", ["unknown"])[0]
    model = values.get("model name", [f"{machine()} {_ARM_PARTS.get(part, part)}"])[0]
    return model, frozenset.intersection(*sets) if sets else frozenset()


def _read_macos() -> tuple[str, frozenset[str]]:
    model = sysctl("machdep.cpu.brand_string").strip()
    if machine() == "x86_64":
        return model, frozenset(sysctl("machdep.cpu.features", "machdep.cpu.leaf7_features").lower().split())
    lines = sysctl("hw.optional.arm", names=True).splitlines()  # hw.optional.arm.FEAT_BF16: 1
    present = {line[:-3].rpartition(".")[2] for line in lines if line.endswith(": 1")}
    return model, frozenset(linux for apple, linux in _MACOS_ARM.items() if apple in present)


def sysctl(*keys: str, names: bool = False) -> str:
    """Output of macOS's sysctl for `keys`; empty where there is none."""
    command = ["sysctl", *(() if names else ("-n",)), *keys]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def libc() -> str:
    """Name and version: a library of a newer system does not load on an older one that shares the cache."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "")
    except (AttributeError, ValueError, OSError):
        return "".join(platform.libc_ver()) or platform.release()
