"""How many threads a plan uses when nobody says: as many as really run at once, and a sentence that says why.

With more threads than a container's CPU quota the kernel stops some while the others spin at a barrier, and
all is many times slower. So the smallest of affinity, cgroup quota and physical cores wins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from monoplan.ir.errors import ArgumentError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.runtime.machine.features import sysctl

VARIABLES = ("MONOPLAN_NUM_THREADS", "OMP_NUM_THREADS")
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads and the human reason for it."""

    count: int
    reason: str


def default_threads(
    environ: Mapping[str, str] | None = None, root: Path = Path("/"), affinity: Collection[int] | None = None
) -> ThreadChoice:
    """The count in the environment, else the smallest limit; tests give `root` (of /proc, /sys)."""
    environ = os.environ if environ is None else environ
    for name in VARIABLES:
        text = environ.get(name, "").strip()
        if text:
            count = _parse(name, text)
            return ThreadChoice(count, f"{count}: {name}")
    cpus = _affinity() if affinity is None else affinity
    quota = cgroup_quota(root)
    # On a tie the first is named: a machine's cores explain more than an affinity that nobody set.
    limits = {"physical cores": physical_cores(cpus, root), "affinity": len(cpus), "cgroup quota": quota}
    least = min((value for value in limits.values() if value is not None), default=1)
    winner = next((name for name, value in limits.items() if value == least), "affinity")
    others = (f"{name} {_text(value)}" for name, value in limits.items() if name != winner)
    # Rounded down: with 1.5 CPUs a second thread is stopped half of the time, and the first waits for it.
    count = max(1, int(least))
    shown = winner if least == count else f"{winner} {_text(least)}"
    return ThreadChoice(count, f"{count}: {shown}; {', '.join(others)}")


def check_threads(count: int) -> int:
    """The count itself, if it is a possible number of threads."""
    if not isinstance(count, int) or not 1 <= count <= MAX_THREADS:
        raise ArgumentError(
            f"threads={count!r} is not a number of threads", fix=f"give a whole number from 1 to {MAX_THREADS}"
        )
    return count


def _parse(name: str, text: str) -> int:
    # OMP_NUM_THREADS may be a list, one number for each level of nesting; the outermost counts.
    first = text.split(",")[0].strip() if name == "OMP_NUM_THREADS" else text
    if not (first.isascii() and first.isdigit() and 1 <= int(first) <= MAX_THREADS):
        raise ArgumentError(
            f"{name}={text!r} is not a number of threads", fix=f"give a whole number from 1 to {MAX_THREADS}"
        )
    return int(first)


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _affinity() -> Collection[int]:
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def physical_cores(cpus: Collection[int], root: Path = Path("/")) -> int | None:
    """How many different cores the given CPUs lie on; None where the system doesn't say."""
    if sys.platform == "darwin" and root == Path("/"):
        # The slow cores of a mixed chip would hold up every barrier.
        answers = (sysctl(key).strip() for key in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"))
        return next((int(answer) for answer in answers if answer.isdigit()), None)
    found = {_core_from_sys(cpu, root) for cpu in cpus}
    if found and None not in found:
        return len(found)
    table = _cores_from_cpuinfo(root)
    if all(cpu in table for cpu in cpus):
        return len({table[cpu] for cpu in cpus}) or None
    return None


def _core_from_sys(cpu: int, root: Path) -> str | None:
    """The core's name: the list of CPUs that share it."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(folder / "core_cpus_list") or _read(folder / "thread_siblings_list") or None


def _cores_from_cpuinfo(root: Path) -> dict[int, tuple[str, str]]:
    """CPU number -> (package, core) for every CPU that /proc/cpuinfo describes so; ARM kernels don't."""
    table = {}
    for block in _read(root / "proc/cpuinfo").split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        values = {name.strip(): value.strip() for name, _, value in pairs}
        if values.get("processor", "").isdigit() and "core id" in values:
            table[int(values["processor"])] = (values.get("physical id", "0"), values["core id"])
    return table


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota of this process's cgroup and its ancestors, in CPUs; None without one."""
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "0::/\n1:cpu:/").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            # In a hybrid system version 2 is mounted one folder down.
            folders = [*_upwards(root, "unified", path), *_upwards(root, "", path)]
            texts = [_read(folder / "cpu.max").split() + ["", ""] for folder in folders]  # 200000 100000, max 100000
            quotas += [_ratio(*text[:2]) for text in texts]
        elif "cpu" in controllers.split(","):
            for mount in dict.fromkeys((controllers, "cpu")):
                for folder in _upwards(root, mount, path):  # quota -1: none
                    quotas.append(_ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
    return min((quota for quota in quotas if quota is not None), default=None)


def _upwards(root: Path, mount: str, path: str) -> Iterator[Path]:
    """The cgroup's folder and all above it; in a container often only the last, the mount itself, exists."""
    base = root / "sys/fs/cgroup" / mount
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def _ratio(quota: str, period: str) -> float | None:
    if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
        return int(quota) / int(period)
    return None


def _read(path: Path) -> str:
    """The text of a small system file; empty where it can't be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
