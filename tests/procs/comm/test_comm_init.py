"""`init_distributed`: alone without asking anybody, under torchrun's variables, and beside a script's own group."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from polyaccel import comm
from polyaccel.comm.backends.shm.backend import ShmBackend
from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.comm.launchers.request import VARIABLES
from polyaccel.errors import CommError, PluginNotFound
from polyaccel.job.ports import free_port
from polyaccel.testkit.ranks.procs import RankPool


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "LOCAL_SIZE", "POLYACCEL_COMM", "POLYACCEL_COMM_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_one_process_needs_no_network_and_runs_no_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def asked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"init_distributed asked {args}")

    for name in ("gethostname", "getfqdn", "getaddrinfo", "gethostbyname", "socket", "create_connection"):
        monkeypatch.setattr(socket, name, asked)
    monkeypatch.setattr(subprocess, "Popen", asked)
    monkeypatch.setattr("os.system", asked)
    with caplog.at_level(logging.INFO):
        comm.init_distributed(timeout=timedelta(seconds=9))
    try:
        assert comm.is_initialized()
        assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
        assert comm.default_communicator().backend == "local"
        assert comm.default_communicator().timeout_s == 9.0
        assert "process group of 1 ranks over local (no launcher)" in caplog.text
        comm.barrier()
        before = comm.default_communicator()
        comm.init_distributed()
        assert comm.default_communicator() is before
    finally:
        comm.destroy_process_group()
    assert not comm.is_initialized()
    comm.destroy_process_group()


@pytest.mark.usefixtures("no_launcher")
def test_backend_debug_and_time_limit_come_from_argument_variable_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"comm": {"backend": "nonesuch", "timeout_s": 33, "debug": True}}
    with pytest.raises(PluginNotFound) as caught:
        comm.init_distributed(config=config)
    assert caught.value.value == "nonesuch"
    monkeypatch.setenv("POLYACCEL_COMM", "local")
    comm.init_distributed(config=config)
    found = comm.default_communicator()
    comm.destroy_process_group()
    assert isinstance(found, RecordingCommunicator)
    assert (found.backend, found.timeout_s, found.debug) == ("local", 33.0, True)
    with pytest.raises(PluginNotFound) as caught:
        comm.init_distributed("other", config=config)
    assert caught.value.value == "other"
    assert not comm.is_initialized()


@pytest.mark.usefixtures("no_launcher")
def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(CommError) as caught:
        comm.init_distributed(timeout=0)
    assert caught.value.value == 0
    with pytest.raises(CommError) as caught:
        comm.init_distributed(dist_init_required=False)
    assert caught.value.value is False
    assert "dist_init_required=False" in str(caught.value)
    with pytest.raises(CommError) as caught:
        comm.init_distributed("local", rank=0, world_size=2)
    assert caught.value.value == 2
    assert "'local'" in str(caught.value)


SCRIPT = """
import warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
torch.set_num_threads(1)
from polyaccel import comm
comm.init_distributed(timeout=90)
assert dist.is_initialized() and dist.get_rank() == comm.get_rank() and dist.get_world_size() == 2
tensor = torch.full((3,), 1.0 + comm.get_rank())
comm.all_reduce(tensor)
everything = torch.zeros(6)
comm.all_gather_into_tensor(everything, tensor, async_op=True).wait()
objects = [None, None]
comm.all_gather_object(objects, comm.get_local_rank())
comm.destroy_process_group()
print(comm.is_initialized(), everything.tolist(), objects)
"""


@pytest.mark.usefixtures("no_launcher")
def test_two_scripts_meet_under_torchruns_variables(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["False [3.0, 3.0, 3.0, 3.0, 3.0, 3.0] [0, 1]\n"] * 2


def adopt(inner: Communicator, world_size: int, wanted: str = "") -> tuple[str, list[Any]]:
    """In a worker of a pool, whose script has initialised torch.distributed already, and goes on using it."""
    comm.set_default_communicator(None)
    os.environ.update(RANK=str(inner.rank), WORLD_SIZE=str(world_size), MASTER_ADDR="nowhere.invalid")
    os.environ.update(POLYACCEL_COMM=wanted)
    try:
        comm.init_distributed(dist_init_required=False, timeout=60)
        group = comm.new_group([0, 1])
        values = [None, None]
        comm.all_gather_object(values, inner.rank)
        assert not isinstance(group, comm.NonMember)
        group.close()
        ours = torch.full((3,), 1.0 + inner.rank)
        torch.distributed.all_reduce(ours)
        assert torch.distributed.get_backend() == "gloo"
        assert ours.tolist() == [3.0] * 3
        return comm.default_communicator().backend, values
    finally:
        comm.destroy_process_group()  # what looks on at this one must not do so beside later tests
        comm.set_default_communicator(inner)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "POLYACCEL_COMM"):
            del os.environ[name]


@pytest.mark.parametrize("wanted", ["", "gloo"])
def test_a_group_that_the_script_made_is_adopted(rank_pool: Callable[[int], RankPool], wanted: str) -> None:
    """It stays the script's, and ours use shared memory beside it, unless somebody wants gloo."""
    backend = "shm" if ShmBackend.probe().usable and not wanted else "gloo"
    assert rank_pool(2).run(adopt, 2, wanted) == [(backend, [0, 1])] * 2


def test_a_group_that_contradicts_the_launcher_is_an_error(rank_pool: Callable[[int], RankPool]) -> None:
    with pytest.raises(CommError) as caught:
        rank_pool(2).run(adopt, 5)
    assert caught.value.value[1] == 2
    assert all(part in str(caught.value) for part in ("torch.distributed", "of 2", "of 5"))
