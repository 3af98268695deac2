"""Cores are counted and shared as the machine says, in shares that cover them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.launch.affinity import (
    Core,
    find_cores,
    memory_binding,
    node_count,
    parse_cpulist,
    split_cores,
    usable_cpus,
)


def make_sysfs(root: Path, siblings: dict[int, str], nodes: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        topology = root / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    for node, text in nodes.items():
        (root / f"node/node{node}").mkdir(parents=True)
        (root / f"node/node{node}/cpulist").write_text(text + "\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of two cores of two logical CPUs, numbered as Linux likes to, and a node of memory only."""
    return make_sysfs(
        tmp_path,
        siblings={cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)},
        nodes={0: "0-1,4-5", 1: "2-3,6-7", 2: ""},
    )


def test_logical_cpus_of_a_core_are_one_core(two_sockets: Path) -> None:
    cores = find_cores(range(8), two_sockets)
    assert cores == (Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7)))
    assert node_count(cores) == 2


def test_only_usable_cpus_count(two_sockets: Path) -> None:
    cores = find_cores({4, 5, 1}, two_sockets)
    assert cores == (Core(0, (1, 5)), Core(0, (4,)))
    assert node_count(cores) == 1


def test_without_sysfs_each_cpu_is_a_core(tmp_path: Path) -> None:
    cores = find_cores([3, 1], tmp_path / "absent")
    assert cores == (Core(0, (1,)), Core(0, (3,)))
    assert node_count(cores) == 1


def test_this_machine_has_cores() -> None:
    cores = find_cores(usable_cpus())
    assert {cpu for core in cores for cpu in core.cpus} == usable_cpus()


@given(st.integers(1, 70), st.integers(1, 20))
def test_shares_cover_the_cores_evenly(cores: int, ranks: int) -> None:
    shares = split_cores([Core(0, (cpu,)) for cpu in range(cores)], ranks)
    assert len(shares) == ranks
    flat = [core.cpus[0] for share in shares for core in share]
    lengths = {len(share) for share in shares}
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1
    if ranks <= cores:
        assert flat == list(range(cores))
    else:
        used = [flat.count(cpu) for cpu in range(cores)]
        assert max(used) - min(used) <= 1


@pytest.mark.parametrize(
    ("text", "expected"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-0,2-3", {0, 2, 3})]
)
def test_cpulists_are_read(text: str, expected: set[int]) -> None:
    assert parse_cpulist(text) == expected


def test_nonsense_is_no_cpulist() -> None:
    with pytest.raises(ValueError) as caught:
        parse_cpulist("nonsense")
    assert "nonsense" in str(caught.value)


def test_memory_is_bound_to_the_node_of_the_cores(two_sockets: Path) -> None:
    """A program that a child becomes has the policy, where the kernel shows it; cores of two nodes bind nothing."""
    assert memory_binding(range(8), two_sockets) is None
    bind = memory_binding(usable_cpus())
    maps = Path("/proc/self/numa_maps")
    if bind is None or not maps.exists():
        assert sys.platform != "linux" or not maps.exists() or node_count(find_cores(usable_cpus())) > 1
        return
    code = f"print(open({str(maps)!r}).readline())"
    line = subprocess.check_output([sys.executable, "-c", code], preexec_fn=bind, text=True)
    assert line.split()[1].startswith("bind:")
