"""Slurm's variables: which hold when, what a list of hosts begins with, and where tasks meet that can ask nobody."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.comm.discovery import discover
from polyaccel.comm.launchers.slurm import first_host
from polyaccel.errors import CommError

# Two nodes of a job of three; tasks 0 and 1 on the first of the step, 2 on the second.
STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "n[01-03]",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[02-03]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
}
TASKS = [
    STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1"},
    STEP | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1"},
    STEP | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "2"},
]


def test_the_tasks_of_a_step_agree_without_talking() -> None:
    found = [discover(environ=task) for task in TASKS]
    assert [(r.rank, r.world_size, r.local_rank, r.local_world_size) for r in found] == [
        (0, 3, 0, 2),
        (1, 3, 1, 2),
        (2, 3, 0, 1),
    ]
    assert {r.address for r in found} == {"n02"}
    assert len({r.port for r in found}) == 1
    assert {r.source for r in found} == {"Slurm"}


def test_steps_and_jobs_on_one_host_meet_on_different_ports() -> None:
    ports = {
        discover(environ=TASKS[0] | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).port
        for job in ("123456", "123457")
        for step in ("0", "1")
    }
    assert len(ports) == 4
    assert all(port is not None and 15000 <= port < 29500 for port in ports)


def test_what_the_user_says_about_the_meeting_holds() -> None:
    found = discover(environ=TASKS[2] | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "77"}, port=5)
    assert (found.address, found.port) == ("elsewhere", 77)
    assert discover(environ=TASKS[2], port=5).port == 5


def test_tasks_on_one_node_need_no_name_of_it() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_GTIDS": "0,1", "SLURM_NTASKS": "2"}
    assert discover(environ=TASKS[1] | one).address == "127.0.0.1"


def test_on_one_node_all_tasks_are_local_though_none_is_listed() -> None:
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_GTIDS": "", "SLURM_STEP_NODELIST": "n02"}
    assert discover(environ=TASKS[1] | one).local_world_size == 3


def test_an_interactive_shell_of_a_larger_job_is_one_process() -> None:
    """`salloc` may start its shell as a step of one task."""
    shell = TASKS[0] | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}
    found = discover(environ=shell)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (0, 1, 0, 1)


def test_the_variables_of_pmi2_are_slurms_own() -> None:
    """`srun --mpi=pmi2` sets them for programs that have no MPI as well."""
    found = discover(environ=TASKS[1] | {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "11"})
    assert (found.rank, found.source) == (1, "Slurm")


def test_an_mpirun_that_slurm_started_is_asked_first() -> None:
    """Its daemons are tasks of a step, and their children inherit that."""
    hydra = {"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
    meeting = {"MASTER_ADDR": "h", "MASTER_PORT": "7"}
    found = discover(environ=TASKS[1] | hydra | meeting, ask_mpi=False)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 6, 2, 3)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"SLURM_PROCID": "3"}, (3, 3)),
        ({"SLURM_GTIDS": ""}, "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3, SLURM_LOCALID=0, SLURM_GTIDS=, SLURM_STEP_ID=0"),
        ({"SLURM_NODEID": "1", "SLURM_PROCID": "0"}, "1"),
        ({"SLURM_STEP_NODELIST": "n[02"}, "n[02"),
        ({"WORLD_SIZE": "4"}, ("4", 3)),
        ({"LOCAL_RANK": "1"}, ("1", 0)),
    ],
)
def test_what_cannot_be_is_an_error(change: Mapping[str, str], value: object) -> None:
    with pytest.raises(CommError) as caught:
        discover(environ=TASKS[2] | change)
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("a,b", "a"),
        ("gpu[008-011,20]-ib[0-1],login", "gpu008-ib0"),
        ("rack[7,9-12]", "rack7"),
        ("n[2-3],n[1]", "n2"),
        ("c1-0.example.org,c2", "c1-0.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "[", "a[", "a[]", "a[x-y]", ",a", "a b", "(null)[1"])
def test_what_is_no_list_is_refused(nodes: str) -> None:
    with pytest.raises(CommError) as caught:
        first_host(nodes)
    assert caught.value.value == nodes


NAMES = st.text("abcxyz-.", min_size=1, max_size=5)
RANGES = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=4)


@given(st.lists(st.tuples(NAMES, st.one_of(st.none(), RANGES), st.sampled_from(["", "-ib"])), min_size=1, max_size=4))
def test_whatever_follows_the_first_number_does_not_matter(
    parts: list[tuple[str, list[tuple[int, int]] | None, str]],
) -> None:
    """Lists are written here as Slurm writes them, with the first host known."""
    written, hosts = [], []
    for name, ranges, suffix in parts:
        if ranges is None:
            written.append(name + suffix)
            hosts.append(name + suffix)
        else:
            pieces = [f"{low:03}" if low == high else f"{low:03}-{high:03}" for low, high in map(sorted, ranges)]
            written.append(f"{name}[{','.join(pieces)}]{suffix}")
            hosts.append(f"{name}{min(ranges[0]):03}{suffix}")
    assert first_host(",".join(written)) == hosts[0]
