"""The default number of threads, over fake /proc and /sys trees."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from monoplan.ir.errors import ArgumentError
from monoplan.runtime.machine import threads
from monoplan.runtime.machine.threads import default_threads

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def topology(*siblings: str) -> dict[str, str]:
    """Files that say which CPUs share a core: topology("0,2", "1,3", "0,2", "1,3")."""
    return {f"sys/devices/system/cpu/cpu{n}/topology/core_cpus_list": f"{s}\n" for n, s in enumerate(siblings)}


def test_own_variable_wins() -> None:
    choice = default_threads({"MONOPLAN_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"})
    assert choice == threads.ThreadChoice(3, "3: MONOPLAN_NUM_THREADS")


@pytest.mark.parametrize("text", ["5", " 5 ", "5,2", "5, 2,1"])
def test_openmp_variable(text: str) -> None:
    assert default_threads({"MONOPLAN_NUM_THREADS": "", "OMP_NUM_THREADS": text}).count == 5


@pytest.mark.parametrize("name", threads.VARIABLES)
@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "2x", "99999", "³", ","])
def test_bad_values_name_the_variable(name: str, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        default_threads({name: text})
    assert name in str(caught.value) and repr(text) in str(caught.value)


def test_own_variable_takes_no_list() -> None:
    with pytest.raises(ArgumentError, match="MONOPLAN_NUM_THREADS"):
        default_threads({"MONOPLAN_NUM_THREADS": "4,2"})


def test_physical_cores_are_the_least(tmp_path: Path) -> None:
    root = tree(tmp_path, topology("0,2", "1,3", "0,2", "1,3"))
    choice = default_threads({}, root, range(4))
    assert choice == threads.ThreadChoice(2, "2: physical cores; affinity 4, cgroup quota none")


def test_affinity_is_the_least(tmp_path: Path) -> None:
    root = tree(tmp_path, topology("0", "1", "2", "3"))
    assert default_threads({}, root, {1, 3}).count == 2
    root = tree(tmp_path, topology("0,2", "1,3", "0,2", "1,3"))
    assert default_threads({}, root, {0, 2}).count == 1  # two threads of one core
    assert default_threads({}, tmp_path / "nothing", range(3)) == threads.ThreadChoice(
        3, "3: affinity; physical cores none, cgroup quota none"
    )


@pytest.mark.parametrize(
    ("quota", "count", "reason"),
    [
        ("200000 100000", 2, "2: cgroup quota; physical cores 8, affinity 8"),
        ("150000 100000", 1, "1: cgroup quota 1.5; physical cores 8, affinity 8"),
        ("50000 100000", 1, "1: cgroup quota 0.5; physical cores 8, affinity 8"),
        ("max 100000", 8, "8: physical cores; affinity 8, cgroup quota none"),
        ("1600000 100000", 8, "8: physical cores; affinity 8, cgroup quota 16"),
        ("garbage", 8, "8: physical cores; affinity 8, cgroup quota none"),
        ("", 8, "8: physical cores; affinity 8, cgroup quota none"),
        ("100000 0", 8, "8: physical cores; affinity 8, cgroup quota none"),
    ],
)
def test_quota_of_cgroup_v2(tmp_path: Path, quota: str, count: int, reason: str) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": quota + "\n"}
    root = tree(tmp_path, files | topology(*"01234567"))
    assert default_threads({}, root, range(8)) == threads.ThreadChoice(count, reason)


@pytest.mark.parametrize("where", ["", "a/", "a/b/", "a/b/c/"])
def test_quota_of_any_ancestor_counts(tmp_path: Path, where: str) -> None:
    files = {"proc/self/cgroup": "0::/a/b/c\n", "sys/fs/cgroup/a/b/c/cpu.max": "max 100000\n"}
    root = tree(tmp_path, files | {f"sys/fs/cgroup/{where}cpu.max": "300000 100000\n"})
    assert threads.cgroup_quota(root) == 3.0


def test_tightest_quota_wins(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/cpu.max": "400000 100000", "sys/fs/cgroup/a/b/cpu.max": "600000 100000"}
    assert threads.cgroup_quota(tree(tmp_path, files | {"proc/self/cgroup": "0::/a/b"})) == 4.0
    (tmp_path / "sys/fs/cgroup/other").mkdir()
    (tmp_path / "sys/fs/cgroup/other/cpu.max").write_text("100000 100000")
    assert threads.cgroup_quota(tmp_path) == 4.0  # a neighbour's quota is not ours


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize("inside", ["docker/abc", ""])  # in a container the mount is the container's own cgroup
def test_quota_of_cgroup_v1(tmp_path: Path, mount: str, inside: str) -> None:
    folder = f"sys/fs/cgroup/{mount}/{inside}"
    files = {
        "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:cpuset:/\n0::/x\n",
        f"{folder}/cpu.cfs_quota_us": "250000\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
    }
    root = tree(tmp_path, files)
    assert threads.cgroup_quota(root) == 2.5
    (root / folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads.cgroup_quota(root) is None


@pytest.mark.parametrize("path", ["/../../host/a", "/", "", "/gone"])
def test_odd_cgroup_paths(tmp_path: Path, path: str) -> None:
    files = {"proc/self/cgroup": f"0::{path}\nnonsense\n\n", "sys/fs/cgroup/cpu.max": "100000 100000"}
    assert threads.cgroup_quota(tree(tmp_path, files)) == 1.0


def test_hybrid_and_missing_proc(tmp_path: Path) -> None:
    root = tree(tmp_path / "a", {"proc/self/cgroup": "0::/x", "sys/fs/cgroup/unified/x/cpu.max": "100000 50000"})
    assert threads.cgroup_quota(root) == 2.0
    assert threads.cgroup_quota(tree(tmp_path / "b", {"sys/fs/cgroup/cpu.max": "100000 50000"})) == 2.0
    assert threads.cgroup_quota(tmp_path / "c") is None


def test_cores_from_cpuinfo(tmp_path: Path) -> None:
    block = "processor\t: {}\nphysical id\t: {}\ncore id\t\t: {}\n\n"
    text = "".join(block.format(n, n // 4, n % 2) for n in range(8))  # 2 packages of 2 cores of 2 threads
    root = tree(tmp_path, {"proc/cpuinfo": text})
    assert threads.physical_cores(range(8), root) == 4
    assert threads.physical_cores({0, 2}, root) == 1
    assert threads.physical_cores({0, 9}, root) is None
    tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp\n\nprocessor\t: 1\n"})
    assert threads.physical_cores({0, 1}, root) is None


def test_older_name_of_the_sibling_list(tmp_path: Path) -> None:
    files = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": "0-1\n" for n in range(2)}
    assert threads.physical_cores({0, 1}, tree(tmp_path, files)) == 1


@linux_only
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    choice = default_threads()
    assert 1 <= choice.count <= len(os.sched_getaffinity(0))
    assert choice.reason.startswith(f"{choice.count}: ")
    monkeypatch.setenv("MONOPLAN_NUM_THREADS", "7")
    assert default_threads().count == 7
