"""Two hosts, brought up once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_jobs import Hosts
from ssh_hosts import SshHosts, why_absent


@pytest.fixture(scope="session")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = why_absent()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    with SshHosts(folder, 2) as up:
        yield Hosts(up, folder)
