"""The command lines that MPIs and Slurm are given for a job, word for word."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from polyaccel.cli.job import choose_hosts
from polyaccel.cli.options import add_options
from polyaccel.core.types import Probe
from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, Launcher
from polyaccel.launch.commands.base import CommandLauncher
from polyaccel.launch.commands.mpi import HydraLauncher, IntelMpiLauncher, MvapichLauncher, OpenMpiLauncher
from polyaccel.launch.commands.slurm import SlurmLauncher
from polyaccel.launch.commands.task import JOB_VARIABLE, main
from polyaccel.launch.hosts import Hosts

JOB = Job(
    command=("python", "train.py"),
    arguments=("two words", "$HOME"),
    hosts={"a": (0, 1), "b": (3,)},
    exports={"NCCL_DEBUG": "INFO"},
    launcher_args=("--verbose",),
)
TASK = f"{sys.executable} -m polyaccel.launch.commands.task"


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        (
            OpenMpiLauncher(),
            (
                "mpirun -n 3 --host a:2,b:1 --map-by slot --bind-to none -x POLYACCEL_JOB -x NCCL_DEBUG "
                f"--verbose {TASK} OMPI_COMM_WORLD_RANK"
            ),
        ),
        (HydraLauncher(), f"mpiexec --verbose -hosts a:2,b:1 -n 3 {TASK} PMI_RANK"),
        (IntelMpiLauncher(), f"mpirun --verbose -host a -n 2 {TASK} PMI_RANK : -host b -n 1 {TASK} PMI_RANK"),
        (MvapichLauncher(), f"mpirun --verbose -hosts a:2,b:1 -n 3 {TASK} PMI_RANK"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_mpi_gets_hosts_and_tasks(launcher: Launcher, line: str) -> None:
    (command,) = launcher.plan(JOB).ranks
    assert " ".join(command.command) == line
    passed = Job.from_json(command.environment[JOB_VARIABLE])
    assert replace(passed, master_port=None) == replace(JOB, master_addr="a")
    assert 20000 <= (passed.master_port or 0) < 29000
    assert command.environment["NCCL_DEBUG"] == "INFO"
    assert JOB.secret not in line


def test_their_pinning_is_off_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher, name in ((IntelMpiLauncher(), "I_MPI_PIN"), (MvapichLauncher(), "MV2_ENABLE_AFFINITY")):
        assert launcher.plan(JOB).ranks[0].environment[name] == "0"
        monkeypatch.setenv(name, "1")
        assert launcher.plan(JOB).ranks[0].environment[name] == "1"


def test_ssh_reaches_the_port_that_was_named() -> None:
    (command,) = OpenMpiLauncher().plan(replace(JOB, ssh_port=2222)).ranks
    assert "--mca plm_rsh_args -p 2222" in " ".join(command.command)


def test_slurm_gets_nodes_with_equally_many_tasks() -> None:
    even = replace(JOB, hosts={"a": (0, 1), "b": (0, 1)})
    how = "--export=ALL --cpu-bind=none --kill-on-bad-exit=1 --verbose"
    (command,) = SlurmLauncher().plan(even).ranks
    nodes = "srun -n 4 --nodelist a,b --nodes 2 --ntasks-per-node 2"
    assert " ".join(command.command) == f"{nodes} {how} {TASK} SLURM_PROCID"
    (command,) = SlurmLauncher().plan(replace(JOB, hosts={"localhost": (0, 1)})).ranks
    assert " ".join(command.command) == f"srun -n 2 --nodes 1 --ntasks-per-node 2 {how} {TASK} SLURM_PROCID"
    with pytest.raises(LaunchError) as caught:
        SlurmLauncher().plan(JOB)
    assert caught.value.value == "a: 2, b: 1"
    assert "--ranks" in str(caught.value)


SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[08-09],login"}


def _install_scontrol(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of Slurm's, which is not installed here; it lists what the real one lists."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("variables", "options", "ranks"),
    [
        ({}, (), 5),  # devices of this host
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "9"}, (), 2),
        ({"SLURM_NTASKS": "9"}, (), 3),
        ({"SLURM_NTASKS": "4"}, (), 5),  # tasks that no equal number on each node makes
        ({"SLURM_NTASKS_PER_NODE": "2"}, ("--ranks", "4"), 4),
    ],
)
def test_slurm_s_nodes_are_those_of_the_allocation(
    variables: dict[str, str], options: tuple[str, ...], ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = "[ $1/$2/$3 = 'show/hostnames/gpu[08-09],login' ] && printf 'gpu08\\ngpu09\\nlogin\\n'"
    _install_scontrol(tmp_path, script, monkeypatch)
    for name, value in {**SLURM_JOB, **variables}.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    add_options(parser)

    def hosts(*words: str) -> Hosts:
        return choose_hosts(parser.parse_args([*words, "train.py"]), lambda: 5)

    assert hosts("--launcher", "slurm", *options) == dict.fromkeys(("gpu08", "gpu09", "login"), tuple(range(ranks)))
    two = hosts("--launcher", "slurm", "--num-nodes", "2", *options)
    assert list(two) == ["gpu08", "gpu09"]
    assert list(hosts("--launcher", "slurm", "--hosts", "a:2,b:2")) == ["a", "b"]
    assert list(hosts()) == ["localhost"]


@pytest.mark.parametrize("script", ["echo invalid >&2; exit 1", "exit 0"])
def test_an_allocation_without_names_is_refused(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert SlurmLauncher.allocation({}) is None
    _install_scontrol(tmp_path, script, monkeypatch)
    with pytest.raises(LaunchError) as caught:
        SlurmLauncher.allocation(SLURM_JOB)
    assert caught.value.value == SLURM_JOB["SLURM_JOB_NODELIST"]
    assert "--hosts" in caught.value.hint
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(LaunchError):
        SlurmLauncher.allocation(SLURM_JOB)


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0)), (1, (0, 1)), (2, (1, 0))])
def test_a_task_becomes_the_rank_of_its_number(
    rank: int, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    became = []
    monkeypatch.setattr(os, "execvpe", lambda *what: became.append(what))
    monkeypatch.chdir(tmp_path)
    job = replace(JOB, master_addr="a", master_port=29500, folder=str(tmp_path))
    monkeypatch.setenv(JOB_VARIABLE, job.to_json())
    monkeypatch.setenv("PMI_RANK", str(rank))
    main("PMI_RANK")
    ((program, command, environment),) = became
    assert (program, command) == ("python", ("python", "train.py", "two words", "$HOME"))
    found = tuple(int(environment[name]) for name in ("CROSS_RANK", "LOCAL_RANK"))
    assert (int(environment["RANK"]), found) == (rank, place)
    assert JOB_VARIABLE not in environment
    assert json.loads(job.to_json())["secret"] == environment["POLYACCEL_JOB_SECRET"]


def test_a_process_that_is_no_task_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_VARIABLE, raising=False)
    with pytest.raises(LaunchError) as caught:
        main("PMI_RANK")
    assert caught.value.value == "POLYACCEL_JOB"
    monkeypatch.setenv(JOB_VARIABLE, JOB.to_json())
    monkeypatch.delenv("PMI_RANK", raising=False)
    with pytest.raises(LaunchError) as caught:
        main("PMI_RANK")
    assert caught.value.value == "PMI_RANK"


@pytest.mark.parametrize(
    ("answer", "usable"),
    [
        ("mpirun (Open MPI) 4.1.4", {OpenMpiLauncher}),
        ("HYDRA build details:\n    Version: 4.2.1", {HydraLauncher}),
        ("HYDRA build details:\n    Configure options: mvapich2", {HydraLauncher, MvapichLauncher}),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", {IntelMpiLauncher}),
        ("", set()),
    ],
)
def test_an_mpi_is_usable_where_its_own_command_answers(
    answer: str, usable: set[type[CommandLauncher]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert OpenMpiLauncher.probe() == Probe(False, "the command mpirun is not on the PATH")
    for name in ("mpirun", "mpiexec"):
        (tmp_path / name).write_text(f"#!/bin/sh\n[ $1 = --version ] && /bin/cat <<'END'\n{answer}\nEND\n")
        (tmp_path / name).chmod(0o755)
    every = {OpenMpiLauncher, HydraLauncher, IntelMpiLauncher, MvapichLauncher}
    assert {launcher for launcher in every if launcher.probe().usable} == usable
