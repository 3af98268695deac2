"""The limits of control groups, in folders as both versions of them have."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyaccel.accelerators.memory import host
from polyaccel.core import cgroup

MIB = 1 << 20


def group(folder: Path, *, is_first: bool, limit: str, used: int = 0, files: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"total_inactive_file {files}",
    }
    second = {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 3\ninactive_file {files}"}
    for name, text in (first if is_first else second).items():
        (folder / name).write_text(f"{text}\n")


def use(monkeypatch: pytest.MonkeyPatch, place: Path, own: str) -> None:
    (place / "own").write_text(own)
    monkeypatch.setattr(cgroup, "_groups", lambda: cgroup._limited(place / "own", place))


def test_the_tightest_of_the_groups_above_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group(tmp_path / "a" / "b", is_first=False, limit=str(800 * MIB), used=500 * MIB, files=100 * MIB)
    group(tmp_path / "a", is_first=False, limit=str(1000 * MIB), used=900 * MIB, files=10 * MIB)
    group(tmp_path, is_first=False, limit="max")
    use(monkeypatch, tmp_path, "0::/a/b\n")
    assert cgroup.memory_limit_nbytes() == 800 * MIB
    assert cgroup.memory_free_nbytes() == 110 * MIB  # of the group above: others use that too


def test_a_container_sees_its_group_as_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group(tmp_path, is_first=False, limit=str(64 * MIB), used=80 * MIB, files=4 * MIB)
    use(monkeypatch, tmp_path, "0::/../../outside\n")
    assert cgroup.memory_limit_nbytes() == 64 * MIB
    assert cgroup.memory_free_nbytes() == 0
    assert host.memory_stats().free_nbytes == 0


def test_the_first_version_is_read_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group(tmp_path / "memory" / "job", is_first=True, limit=str(100 * MIB), used=60 * MIB, files=20 * MIB)
    group(tmp_path / "memory", is_first=True, limit=str(9223372036854771712))
    use(monkeypatch, tmp_path, "3:cpu,cpuacct:/\n2:memory:/job\n0::/\n")
    assert cgroup.memory_limit_nbytes() == 100 * MIB
    assert cgroup.memory_free_nbytes() == 60 * MIB


@pytest.mark.parametrize("own", ["", "0::/\n", "0::/gone\n"], ids=["none", "no limit", "gone"])
def test_without_a_limit_the_machine_counts(own: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, own)
    assert cgroup.memory_limit_nbytes() is None
    assert cgroup.memory_free_nbytes() is None
    assert host.memory_stats().free_nbytes > 0
