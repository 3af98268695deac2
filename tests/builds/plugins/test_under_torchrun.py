"""The row of a check that trains under torchrun: it passes for a backend that works there, and says what dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from throwaway import Distribution, install

from polyaccel.testkit.training.torch_launched import check_under_torchrun

BINDER = """
import socket
from polyaccel.comm.base import CommBackend
from polyaccel.errors import CommError
from polyaccel.core.types import Probe

class Binder(CommBackend):
    API_VERSION = (3, 0)
    name = "binder"
    @classmethod
    def probe(cls):
        return Probe(True, "sockets")
    def connect(self, rendezvous, accelerator, *, timeout_s):
        try:
            socket.create_server((rendezvous.address, rendezvous.port)).close()
        except OSError as error:
            raise CommError(f"cannot listen on {rendezvous.port}: {error}") from error
        raise CommError("nobody holds the port")
"""

pytestmark = pytest.mark.timeout(280)


def test_a_backend_of_ours_trains_under_torchrun() -> None:
    check_under_torchrun("cpu", "gloo", 2, timeout_s=240)


def test_a_backend_that_binds_the_agents_port_is_said_to_die_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    install(site, Distribution("acme_binder", "1.0", BINDER, {"polyaccel.comm": {"binder": "acme_binder:Binder"}}))
    monkeypatch.setenv("PYTHONPATH", str(site))
    with pytest.raises(AssertionError) as caught:
        check_under_torchrun("cpu", "binder", 2, timeout_s=240)
    assert "CommError" in str(caught.value)
