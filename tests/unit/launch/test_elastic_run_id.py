"""The name of a job in torch's rendezvous."""

from __future__ import annotations

import pytest

from polyaccel.launch.base import ElasticHosts
from polyaccel.launch.elastic.torch_rendezvous_store import RUN_ID_VARIABLE, RendezvousStore, free_port


@pytest.mark.parametrize(("given", "name"), [("mine", "mine"), ("", "polyaccel")])
def test_a_job_has_the_name_that_its_scheduler_gives(given: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_ID_VARIABLE, given)
    store = RendezvousStore("127.0.0.1", free_port(), "127.0.0.1", is_host=True)
    assert store.handler(ElasticHosts(least=1, most=1)).get_run_id() == name
