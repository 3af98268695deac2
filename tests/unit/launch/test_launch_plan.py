"""A plan is complete and possible before anything starts, or an error that says what to change."""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from polyaccel.errors import LaunchError
from polyaccel.job import ports
from polyaccel.job.auth import LEAST_SECRET_LENGTH, SECRET_VARIABLE
from polyaccel.job.ports import free_port, is_free
from polyaccel.launch import plan as planning
from polyaccel.launch.affinity import Core
from polyaccel.launch.base import Job, LaunchPlan
from polyaccel.launch.local import LocalLauncher
from polyaccel.launch.plan import plan_host
from polyaccel.launch.program import python_command


def plan_local(command: list[str], *, nproc: int, environment: dict[str, str], **job: Any) -> LaunchPlan:
    """The ranks of a job on this machine."""
    return plan_host(Job(command=tuple(command), hosts={"localhost": tuple(range(nproc))}, **job), 0, environment)


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_cores", lambda cpus: tuple(Core(0, (cpu, cpu + 6)) for cpu in range(6)))


@pytest.mark.usefixtures("six_cores")
@pytest.mark.parametrize(("nproc", "threads"), [(1, "6"), (2, "3"), (4, "1"), (9, "1")])
def test_ranks_share_the_cores(nproc: int, threads: str) -> None:
    plan = plan_local(["program"], nproc=nproc, environment={})
    assert [spec.rank for spec in plan.ranks] == list(range(nproc))
    assert {spec.environment["OMP_NUM_THREADS"] for spec in plan.ranks} == {threads}
    assert {spec.cores for spec in plan.ranks} == {None}


@pytest.mark.usefixtures("six_cores")
def test_bound_ranks_have_whole_cores() -> None:
    plan = plan_local(["program"], nproc=3, environment={}, bind_cores=True)
    assert [spec.cores for spec in plan.ranks] == [(0, 6, 1, 7), (2, 8, 3, 9), (4, 10, 5, 11)]


def test_the_users_variables_win_where_they_are_a_choice() -> None:
    choices = {"OMP_NUM_THREADS": "5", "PYTHONUNBUFFERED": "", "GLIBC_TUNABLES": ""}
    chosen = {**choices, "MASTER_PORT": "1", "LOCAL_RANK": "9"}
    (spec,) = plan_local(["program"], nproc=1, environment=chosen, master_port=free_port()).ranks
    assert {name: spec.environment[name] for name in choices} == choices
    assert spec.environment["MASTER_PORT"] != "1"
    assert spec.environment["LOCAL_RANK"] == "0"


def test_every_job_has_an_id_that_its_ranks_share() -> None:
    first, second = (plan_local(["program"], nproc=2, environment={}) for _ in range(2))
    assert {spec.environment["POLYACCEL_JOB_ID"] for spec in first.ranks} == {first.job_id}
    assert first.job_id != second.job_id


def test_every_job_has_a_secret_that_its_ranks_share_unless_the_user_gives_one() -> None:
    first, second = (plan_local(["program"], nproc=2, environment={}) for _ in range(2))
    given = plan_local(["program"], nproc=2, environment={SECRET_VARIABLE: "for all hosts of the job"})
    shared = [{spec.environment[SECRET_VARIABLE] for spec in plan.ranks} for plan in (first, second, given)]
    assert [len(secrets) for secrets in shared] == [1, 1, 1]
    assert len(set.union(*shared)) == 3
    assert shared[2] == {"for all hosts of the job"}
    assert min(map(len, set.union(*shared))) >= LEAST_SECRET_LENGTH


@pytest.mark.parametrize("mark", ["POLYACCEL_JOB_ID", "TORCHELASTIC_RUN_ID", "LOCAL_RANK", "CROSS_RANK"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_rank_of_another_launcher_starts_no_job(name: str, mark: str) -> None:
    with pytest.raises(LaunchError) as caught:
        plan_local(["program"], nproc=2, environment={name: "1", mark: "0"})
    assert name in str(caught.value)


def test_numbers_that_an_operator_has_set_for_a_pod_are_replaced() -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456", "PET_NNODES": "4"}
    first, second = (dict(spec.environment) for spec in plan_local(["program"], nproc=2, environment=pod).ranks)
    assert [each["RANK"] for each in (first, second)] == ["0", "1"]
    assert {each["WORLD_SIZE"] for each in (first, second)} == {"2"}
    assert first["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] != "23456"


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(LaunchError) as caught:
        plan_local(["program"], nproc=0, environment={})
    assert caught.value.value == 0
    assert "--ranks" in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        taken = server.getsockname()[1]
        assert not is_free(taken)
        with pytest.raises(LaunchError) as caught:
            plan_local(["program"], nproc=1, environment={}, master_port=taken)
        assert caught.value.value == taken
        assert "--master-port" in str(caught.value)
        with pytest.raises(LaunchError) as caught:
            free_port([taken])
        assert str(taken) in str(caught.value)


def test_a_free_port_is_one_that_the_kernel_does_not_hand_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_range = tmp_path / "range"
    kernel_range.write_text("15300 65535\n")
    monkeypatch.setattr(ports, "_KERNEL_RANGE_FILE", kernel_range)
    found = free_port()
    assert 15000 <= found < 15300
    with socket.create_server(("127.0.0.1", found)):
        pass


def test_the_local_launcher_is_usable_here() -> None:
    assert LocalLauncher.probe().usable


def test_a_script_runs_with_this_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert python_command(str(script), ["-x", ""]) == (sys.executable, str(script), "-x", "")
    assert python_command("json.tool", module=True) == (sys.executable, "-m", "json.tool")


@pytest.mark.parametrize(
    ("target", "module", "value"),
    [
        ("absent.py", False, "absent.py"),
        ("json", False, "json"),
        ("absent.module", True, "absent.module"),
        ("train.py", True, "train.py"),
        ("some/train", True, "some/train"),
    ],
)
def test_a_missing_program_is_said_with_the_cure(target: str, module: bool, value: object) -> None:
    with pytest.raises(LaunchError) as caught:
        python_command(target, module=module)
    assert caught.value.value == value


def test_a_program_that_cannot_be_executed_leaves_nothing(tmp_path: Path) -> None:
    gc.collect()
    before = set(os.listdir("/dev/fd"))
    job = Job(command=(str(tmp_path / "absent"),), hosts={"localhost": (0, 1)})
    with pytest.raises(LaunchError) as caught:
        LocalLauncher().run(job)
    assert "rank 0" in str(caught.value)
    assert set(os.listdir("/dev/fd")) <= before  # what another test left may be closed meanwhile


def test_the_ranks_of_a_host_stand_after_those_before_it() -> None:
    hosts = {"a": (0, 1), "b": (1, 3), "c": (0,)}
    job = Job(command=("program",), hosts=hosts, master_addr="a", master_port=29500, device_variable="SEEN")
    plan = plan_host(job, 1, {"SEEN": "7", "KEPT": "1"})
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT SEEN KEPT"
    found = [[spec.environment[name] for name in names.split()] for spec in plan.ranks]
    assert found == [
        [rank, local, "5", "2", "1", "3", "a", "29500", "1,3", "1"] for rank, local in (("2", "0"), ("3", "1"))
    ]


def test_ranks_of_several_hosts_have_to_be_told_where_to_meet() -> None:
    with pytest.raises(LaunchError) as caught:
        plan_host(Job(command=("program",), hosts={"a": (0,), "b": (0,)}), 0, {})
    assert "--master_addr" in str(caught.value)


def test_the_local_rank_stands_between_program_and_arguments() -> None:
    job = Job(command=("python", "x.py"), arguments=("--lr", "1"), hosts={"a": (0, 1)}, names_local_rank=True)
    assert [spec.command for spec in plan_host(job, 0, {}).ranks] == [
        ("python", "x.py", f"--local_rank={rank}", "--lr", "1") for rank in range(2)
    ]


def test_ranks_are_bound_to_the_cpus_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "usable_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(planning, "find_cores", lambda cpus: tuple(Core(0, (cpu,)) for cpu in sorted(cpus)))
    plan = plan_local(["program"], nproc=2, environment={}, bind_cores=True, cores=(2, 3, 6, 7))
    assert [spec.cores for spec in plan.ranks] == [(2, 3), (6, 7)]
    with pytest.raises(LaunchError) as caught:
        plan_local(["program"], nproc=2, environment={}, bind_cores=True, cores=(2, 8))
    assert caught.value.value == (2, 8)
    assert "CPU" in str(caught.value)


def test_a_job_travels_as_json() -> None:
    hosts = {"b": (1, 3), "a": (0,)}
    job = Job(command=("p", "\n'"), hosts=hosts, exports={"A": "ü"}, cores=(1, 2), launcher_args=("-x",))
    assert Job.from_json(job.to_json()) == job
    assert list(Job.from_json(job.to_json()).hosts) == ["b", "a"]
    assert "\n" not in job.to_json()
    assert job.secret not in repr(job)
