"""The rendezvous of a job's agents: a store of torch's on one of its hosts."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from time import sleep

import torch.distributed.elastic.rendezvous.registry as registry
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from polyaccel.job.ports import free_port
from polyaccel.launch.base import ElasticHosts, Job

RUN_ID_VARIABLE = "ELASTIC_RUN_ID"
"""Names the job to torch's rendezvous, the same on every host."""
_RUN_ID = "polyaccel"
_LOOPBACK = "127.0.0.1"
_LAST_CALL_S = 3
"""When the fewest hosts are there, others have so long to come before the ranks begin."""
_KEEP_ALIVE_S, _KEEP_ALIVE_ATTEMPTS = 1, 4
_STORE_S = 15
"""A host that is silent for so long during the rendezvous is lost."""
_JOIN_S = 30 * 24 * 3600
_KNOCK_S, _KNOCK_TIMEOUT_S = 0.5, 5.0


@dataclass(frozen=True, slots=True)
class RendezvousStore:
    """The store at `address` and `port`; `own` is where other hosts find this one, which may have the store."""

    address: str
    port: int
    own: str
    is_host: bool

    @classmethod
    def from_job(cls, job: Job) -> RendezvousStore:
        """Make the store of a job, on the loopback if it stays on this host. Raises OSError for an unknown address."""
        address, port = job.master_addr or _LOOPBACK, job.master_port or free_port()
        (family, kind, _, _, place), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as asking:
            asking.connect(place)  # sends nothing
            own = str(asking.getsockname()[0])
        # A host may have a name for itself of its loopback, which is another address on all others.
        is_host = own == place[0] or ipaddress.ip_address(str(place[0])).is_loopback
        return cls(address, port, address if is_host else own, is_host)

    def handler(self, hosts: ElasticHosts) -> RendezvousHandler:
        """Return the rendezvous for torch's agents, once the store is there."""
        if not self.is_host:
            self._await_store()
        settings = {"last_call_timeout": _LAST_CALL_S, "join_timeout": _JOIN_S, "read_timeout": _STORE_S}
        settings |= {"keep_alive_interval": _KEEP_ALIVE_S, "keep_alive_max_attempt": _KEEP_ALIVE_ATTEMPTS}
        return registry.get_rendezvous_handler(
            RendezvousParameters(
                backend="c10d",
                endpoint=f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}",
                run_id=os.environ.get(RUN_ID_VARIABLE) or _RUN_ID,
                min_nodes=hosts.least,
                max_nodes=hosts.most,
                local_addr=self.own,
                is_host=self.is_host,
                **settings,
            )
        )

    def _await_store(self) -> None:
        is_logged = False
        while True:
            try:
                socket.create_connection((self.address, self.port), timeout=_KNOCK_TIMEOUT_S).close()
                return
            except OSError as error:
                if not is_logged:
                    say(f"waiting for the rendezvous of the hosts at {self.address}, port {self.port}: {error}")
                    is_logged = True
                sleep(_KNOCK_S)


def say(sentence: str) -> None:
    """A sentence of this host's agent, on standard error."""
    with suppress(OSError):
        os.write(2, f"polyaccel on {socket.gethostname()}: {sentence}\n".encode(errors="backslashreplace"))
