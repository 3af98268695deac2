"""MPI's variables: each launcher's, which agree and which do not, what goes without mpi4py, and what rank 0 decides.

MPI itself is played here; tests/procs/comm/test_discovery_launchers.py has real ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from polyaccel.comm import host_address
from polyaccel.comm.discovery import discover
from polyaccel.comm.launchers.mpi import may_start
from polyaccel.comm.mpi import rendezvous as mpi_meeting
from polyaccel.comm.mpi.rendezvous import Answer, Note, assign_ranks
from polyaccel.core.install_line import install_line
from polyaccel.errors import CommError

LAUNCHERS = {
    "Open MPI": dict(
        zip((f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), "3412", strict=True)
    )
    | {"PMIX_RANK": "3"},
    "MVAPICH2": dict(
        zip((f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), "3412", strict=True)
    ),
    "PMI": {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "PALS": {
        "PALS_RANKID": "3",
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        "PALS_LOCAL_RANKID": "1",
        "PALS_LOCAL_SIZE": "2",
    },
}
MEETING = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}


@pytest.fixture
def without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_meeting, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_mpi4py")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_without_mpi4py_the_environment_is_enough_where_it_says_where_to_meet(launcher: str) -> None:
    found = discover(environ=LAUNCHERS[launcher] | MEETING)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.address, found.port, found.source) == ("10.0.0.7", 1234, launcher)


@pytest.mark.usefixtures("without_mpi4py")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_without_mpi4py_and_a_meeting_place_the_cure_is_named(launcher: str) -> None:
    with pytest.raises(CommError) as caught:
        discover(environ=LAUNCHERS[launcher])
    for part in (launcher, "4 ranks", "mpi4py is not installed", "MASTER_ADDR unset", install_line("mpi")):
        assert part in str(caught.value)


@pytest.mark.usefixtures("without_mpi4py")
def test_one_rank_needs_nobody() -> None:
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert discover(environ=alone).world_size == 1


@pytest.mark.usefixtures("without_mpi4py")
def test_a_url_is_a_meeting_place() -> None:
    found = discover(environ=LAUNCHERS["PMI"], init_method="file:///tmp/x")
    assert (found.rank, found.init_method) == (3, "file:///tmp/x")


@pytest.mark.usefixtures("without_mpi4py")
def test_a_rank_of_pmix_alone_must_ask_how_many_there_are() -> None:
    with pytest.raises(CommError) as caught:
        discover(environ={"PMIX_RANK": "1", **MEETING})
    assert caught.value.value == "PMIX_RANK=1"
    assert all(part in str(caught.value) for part in ("PMIx", "mpi4py"))


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        (LAUNCHERS["Open MPI"] | {"PMI_RANK": "0", "PMI_SIZE": "4"}, ("OMPI_COMM_WORLD_RANK=3", "PMI_RANK=0")),
        (LAUNCHERS["Open MPI"] | {"PMI_RANK": "3", "PMI_SIZE": "1"}, ("PMI_RANK 3 is not in a world of 1",)),
        (LAUNCHERS["Open MPI"] | {"PMIX_RANK": "0"}, ("OMPI_COMM_WORLD_RANK=3", "PMIX_RANK=0")),
        (LAUNCHERS["PMI"] | {"WORLD_SIZE": "8"}, ("WORLD_SIZE=8 is set, but PMI sets 4", "PMI_SIZE=4")),
        (LAUNCHERS["PMI"] | {"LOCAL_RANK": "0"}, ("LOCAL_RANK=0 is set, but PMI sets 1", "MPI_LOCALRANKID=1")),
        (LAUNCHERS["PMI"] | {"PMI_RANK": "four"}, ("PMI_RANK='four' is not an integer",)),
    ],
)
def test_variables_that_contradict_each_other_are_both_shown(
    environ: Mapping[str, str], shown: tuple[str, ...]
) -> None:
    with pytest.raises(CommError) as caught:
        discover(environ={**environ, **MEETING})
    for part in shown:
        assert part in str(caught.value)


def test_mpi_is_not_asked_when_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("MPI was asked")

    monkeypatch.setattr(mpi_meeting, "find_spec", lambda name: name)
    monkeypatch.setattr(mpi_meeting, "mpi_rendezvous", refuse)
    assert discover(environ=LAUNCHERS["PMI"] | MEETING, ask_mpi=False).rank == 3
    with pytest.raises(CommError) as caught:
        discover(environ=LAUNCHERS["PMI"], ask_mpi=False)
    assert caught.value.value == "auto_mpi_discovery=False"
    with pytest.raises(AssertionError) as caught:
        discover(environ=LAUNCHERS["PMI"])
    assert "MPI" in str(caught.value)


def test_mpi_may_start_where_a_launcher_or_slurm_has_prepared_it() -> None:
    for environ in (*LAUNCHERS.values(), {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "PMI_RANK": "0"}):
        assert may_start(environ)
    assert not may_start({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", **MEETING, "RANK": "0"})


def note(host: str, *addresses: str, address: str | None = None, port: str | None = None) -> Note:
    return Note(host, addresses, address, port)


def test_ranks_on_one_host_meet_on_its_loopback() -> None:
    answers = assign_ranks([note("a", "10.0.0.1")] * 3, {}, None)
    assert {answer.address for answer in answers} == {"127.0.0.1"}
    assert len({answer.port for answer in answers}) == 1
    assert 1024 < answers[0].port < 65536
    assert [(answer.local_rank, answer.local_world_size) for answer in answers] == [(0, 3), (1, 3), (2, 3)]


def test_ranks_on_several_hosts_meet_on_the_way_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge for containers, the same on all hosts, is not it; nor is an address that is reached another way."""
    ways = {"172.17.0.1": "172.17.0.1", "10.0.0.2": "10.0.0.1", "192.168.7.2": "8.8.8.8"}
    monkeypatch.setattr(host_address, "address_facing", ways.get)
    notes = [
        note("a", "172.17.0.1", "10.0.0.1"),
        note("b", "172.17.0.1", "192.168.7.2", "10.0.0.2"),
        note("a", "172.17.0.1", "10.0.0.1"),
        note("b", "172.17.0.1", "192.168.7.2", "10.0.0.2"),
    ]
    answers = assign_ranks(notes, {}, 7)
    assert {(answer.address, answer.port) for answer in answers} == {("10.0.0.1", 7)}
    assert [(answer.local_rank, answer.local_world_size) for answer in answers] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_no_way_between_hosts_is_said_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_address, "address_facing", lambda peer: None)
    answers = assign_ranks([note("a", "10.0.0.1"), note("b")], {}, 7)
    problem = "rank 0 on a (10.0.0.1) finds no way to the other hosts: b (no address)"
    assert answers == [Answer(problem=problem)] * 2


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        ({"address": "h"}, "MASTER_ADDR=h is set on rank 1, but rank 0 has 127.0.0.1"),
        ({"port": "9"}, "MASTER_PORT=9 is set on rank 1, but rank 0 has 7"),
    ],
)
def test_what_only_one_rank_says_is_refused_on_all(theirs: dict[str, str], problem: str) -> None:
    answers = assign_ranks([note("a", "10.0.0.1"), note("a", "10.0.0.1", **theirs)], {}, 7)
    assert answers == [Answer(problem=problem)] * 2


def test_what_the_user_set_holds() -> None:
    said = {"address": "h", "port": "99"}
    answers = assign_ranks([note("a", **said), note("b", **said)], {"MASTER_PORT": "99"}, 7)
    assert {(answer.address, answer.port) for answer in answers} == {("h", 99)}


AZURE = LAUNCHERS["Open MPI"] | {"AZUREML_EXPERIMENT_ID": "e"}
ONE_NODE = AZURE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
SAGEMAKER = LAUNCHERS["Open MPI"] | {"SM_TRAINING_ENV": json.dumps({"master_hostname": "algo-1"})}


@pytest.mark.usefixtures("without_mpi4py")
@pytest.mark.parametrize(
    ("environ", "source", "meeting"),
    [
        (AZURE | {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, "AzureML", ("10.0.0.4", 6105)),
        (AZURE | {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"} | MEETING, "AzureML", ("10.0.0.7", 1234)),
        (ONE_NODE | {"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}, "AzureML", ("10.0.0.5", 54965)),
        (ONE_NODE, "AzureML", ("127.0.0.1", 54965)),
        (AZURE | MEETING | {"DLTS_JOB_ID": "1"}, "Open MPI", ("10.0.0.7", 1234)),
        (SAGEMAKER, "SageMaker", ("algo-1", 29500)),
        (SAGEMAKER | MEETING, "SageMaker", ("10.0.0.7", 1234)),
    ],
)
def test_cloud_services_say_where_to_meet(environ: Mapping[str, str], source: str, meeting: tuple[str, int]) -> None:
    found = discover(environ=environ)
    assert (found.rank, found.world_size, found.source) == (3, 4, source)
    assert (found.address, found.port) == meeting


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (AZURE, "AZ_BATCH_MASTER_NODE"),
        (SAGEMAKER | {"SM_TRAINING_ENV": "{"}, "SM_TRAINING_ENV"),
        (SAGEMAKER | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8"),
    ],
)
def test_cloud_services_that_do_not_say_it_are_errors(environ: Mapping[str, str], named: str) -> None:
    with pytest.raises(CommError) as caught:
        discover(environ=environ)
    assert named in str(caught.value)


def test_a_services_job_of_one_process_is_one() -> None:
    assert discover(environ={"AZUREML_EXPERIMENT_ID": "e", "SM_TRAINING_ENV": "{}"}).source == "no launcher"
