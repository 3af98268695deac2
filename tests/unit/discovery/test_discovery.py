"""Discovery: what each source says, which comes first, and that half-set variables are errors that show all of them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from polyaccel.comm import host_address
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.discovery import SOURCES, discover, export_torchrun_env, list_sources
from polyaccel.comm.launchers.request import VARIABLES
from polyaccel.errors import CommError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "1234",
}


def test_nothing_set_is_a_world_of_one_without_asking_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"discovery asked {args}")

    for name in ("gethostname", "getfqdn", "getaddrinfo", "gethostbyname", "socket"):
        monkeypatch.setattr(socket, name, asked)
    monkeypatch.setattr(subprocess, "Popen", asked)
    monkeypatch.setattr("os.system", asked)
    found = discover(environ={})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (0, 1, 0, 1)
    assert found.address is None
    assert found.source == "no launcher"


def test_torchrun_variables() -> None:
    found = discover(environ=TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.address, found.port, found.init_method) == ("10.0.0.7", 1234, None)
    assert found.source == "torchrun variables"


def test_an_agent_that_holds_the_store_is_met_through_torch() -> None:
    assert discover(environ={**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).init_method == "env://"


def test_defaults_of_what_torchrun_would_set() -> None:
    found = discover(environ={"RANK": "5", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "MASTER_ADDR": "h"}, port=77)
    assert (found.local_rank, found.local_world_size, found.port) == (1, 4, 77)
    alone = discover(environ={"RANK": "0", "WORLD_SIZE": "1"})
    assert (alone.world_size, alone.address) == (1, None)


def test_arguments_come_before_variables() -> None:
    found = discover(rank=1, world_size=2, init_method="file:///tmp/x", environ=TORCHRUN | {"LOCAL_RANK": "1"})
    assert (found.rank, found.world_size, found.init_method) == (1, 2, "file:///tmp/x")
    assert found.source == "arguments"


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TORCHRUN.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without("WORLD_SIZE"), "WORLD_SIZE not set"),
        (without("RANK"), "RANK not set"),
        (without("RANK", "WORLD_SIZE"), "RANK and WORLD_SIZE not set"),
        (without("MASTER_ADDR"), "MASTER_ADDR is not set"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (TORCHRUN | {"RANK": "4"}, "RANK 4 is not in a world of 4"),
        (TORCHRUN | {"RANK": "-1"}, "RANK -1 is not in a world of 4"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "RANK 3 is not in a world of 0"),
        (TORCHRUN | {"RANK": "two"}, "RANK='two' is not an integer"),
        (TORCHRUN | {"WORLD_SIZE": "4.0"}, "WORLD_SIZE='4.0' is not an integer"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT='' is not an integer"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK 2 is not in a world of 2"),
    ],
)
def test_variables_that_cannot_be_used_are_all_shown(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(CommError) as caught:
        discover(environ=environ)
    assert message in str(caught.value)
    assert "hint: " in str(caught.value)
    for name in VARIABLES:
        assert (
            f"{name}={environ[name]}" in str(caught.value) if name in environ else f"{name} unset" in str(caught.value)
        )


def test_half_of_the_arguments_is_an_error() -> None:
    with pytest.raises(CommError) as caught:
        discover(rank=1, environ={})
    assert caught.value.value == (1, None)
    assert all(part in str(caught.value) for part in ("rank=1", "world_size=None"))
    with pytest.raises(CommError) as caught:
        discover(rank=2, world_size=2, environ={})
    assert caught.value.value == (2, 2)
    assert "RANK" in str(caught.value)


def test_the_order_of_sources_is_stated() -> None:
    assert [source.name for source in SOURCES] == [
        "arguments",
        "torchrun variables",
        "AzureML",
        "SageMaker",
        "MPI",
        "Slurm",
        "torch.distributed",
        "incomplete variables",
    ]


OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "SIZE"), "12", strict=True)}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize("outer", [OPEN_MPI, STEP], ids=["mpirun", "srun"])
def test_variables_left_over_from_elsewhere_contradict_the_launcher(outer: Mapping[str, str]) -> None:
    with pytest.raises(CommError) as caught:
        discover(environ={**outer, "RANK": "0", "WORLD_SIZE": "1"})
    for shown in (
        "RANK=0",
        "WORLD_SIZE=1",
        *(f"{name}={outer[name]}" for name in outer if "RANK" in name or "PROC" in name),
    ):
        assert shown in str(caught.value)
    assert "hint: unset" in str(caught.value)


@pytest.mark.parametrize("mark", ["TORCHELASTIC_RUN_ID", "POLYACCEL_JOB_ID", "CROSS_SIZE"])
@pytest.mark.parametrize("outer", [OPEN_MPI, STEP], ids=["mpirun", "srun"])
def test_a_launcher_on_every_host_is_right_about_its_own_ranks(outer: Mapping[str, str], mark: str) -> None:
    found = discover(environ={**outer, **TORCHRUN, mark: "1"})
    assert (found.rank, found.world_size, found.source) == (3, 4, "torchrun variables")


def test_variables_that_agree_with_the_launcher_are_used_without_asking_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    agreed = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"}
    found = discover(environ={**OPEN_MPI, **agreed})
    assert (found.rank, found.world_size, found.address, found.port) == (1, 2, "h", 7)


def test_a_batch_script_is_one_process(caplog: pytest.LogCaptureFixture) -> None:
    """Its variables name a task too."""
    job = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    found = discover(environ=job)
    assert (found.rank, found.world_size, found.source) == (0, 1, "no launcher")
    assert "job 7 of 2 tasks, but srun did not start this process; start ranks with srun" in caplog.text


def test_what_was_found_is_published_and_what_was_set_stays() -> None:
    environ = {"MASTER_PORT": "99", "LOCAL_RANK": "1"}
    export_torchrun_env(Rendezvous(1, 2, 1, 2, "10.0.0.7", 1234, "Slurm"), environ)
    assert environ == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "99",
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Rendezvous(0, 1, 0, 1, None, None, "Open MPI"), {}),
        (Rendezvous(0, 2, 0, 2, "h", 1, "arguments"), {}),
        (Rendezvous(0, 2, 0, 2, "h", 1, "torchrun variables"), {}),
    ],
)
def test_nothing_is_published_for_one_process_or_where_everybody_knows(
    found: Rendezvous, expected: Mapping[str, str]
) -> None:
    environ: dict[str, str] = {}
    export_torchrun_env(found, environ)
    assert environ == expected


@pytest.mark.parametrize("source", ["torchrun variables", "Slurm"])
def test_between_hosts_gloo_is_told_the_interface_on_the_way_to_rank_0(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_address, "interface_between_hosts", lambda peer: f"to {peer}")
    apart = Rendezvous(1, 2, 0, 1, "10.0.0.7", 1, source)
    environ: dict[str, str] = {}
    export_torchrun_env(apart, environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "to 10.0.0.7"
    environ = {"GLOO_SOCKET_IFNAME": "ib0"}
    export_torchrun_env(apart, environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_looking_around_shows_every_source_and_the_one_that_counts() -> None:
    rows = {row.source: row for row in list_sources({**STEP, **OPEN_MPI})}
    assert [row.source for row in rows.values() if row.matched] == ["MPI"]
    assert "OMPI_COMM_WORLD_RANK=1" in rows["MPI"].text
    assert "SLURM_STEP_ID=0" in rows["Slurm"].text
    assert "RANK unset" in rows["torchrun variables"].text
    assert not any(row.matched for row in list_sources({}))


@pytest.mark.parametrize("left_over", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}])
def test_looking_around_shows_contradictions(left_over: Mapping[str, str]) -> None:
    (matched,) = (row for row in list_sources({**OPEN_MPI, **left_over}) if row.matched)
    assert "RANK=0" in matched.problem


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_where_nobody_can_meet_is_refused(port: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.raises(CommError) as caught:
        discover(environ=environ)
    assert caught.value.value == int(port)
    assert "MASTER_PORT" in str(caught.value)
