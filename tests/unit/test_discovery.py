"""Discovery: what each source says, which comes first, and that half-set variables are errors that show all of them."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from polyaccel.comm.discovery import SOURCES, VARIABLES, discover
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
        (without("MASTER_ADDR"), "MASTER_ADDR does not say where they meet"),
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
    assert "cure: " in str(caught.value)
    for name in VARIABLES:
        assert (
            f"{name}={environ[name]}" in str(caught.value) if name in environ else f"{name} unset" in str(caught.value)
        )


def test_half_of_the_arguments_is_an_error() -> None:
    with pytest.raises(CommError, match="rank=1, world_size=None"):
        discover(rank=1, environ={})
    with pytest.raises(CommError, match="RANK 2 is not in a world of 2"):
        discover(rank=2, world_size=2, environ={})


def test_the_order_of_sources_is_stated() -> None:
    assert [source.name for source in SOURCES] == ["arguments", "torchrun variables", "torch.distributed"]


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_where_nobody_can_meet_is_refused(port: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.raises(CommError, match=f"MASTER_PORT {port}"):
        discover(environ=environ)
