"""The backend `shm`: all ranks on one Linux host, by memory that they share."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.comm.base import CommBackend, Communicator, Rendezvous, unusable_error
from polyaccel.comm.host_notes import exchange_on_host
from polyaccel.comm.shm_library import MOST_RANKS, probe_library
from polyaccel.comm.shm_meeting import share_memory
from polyaccel.comm.single import SingleCommunicator
from polyaccel.comm.torch_pg import GlooBackend, exchange_notes, join_default_group

_connections = count()


class ShmBackend(CommBackend):
    """Ranks meet as gloo's do, and torch's default group (gloo) is theirs to use; our collectives go through memory.
    Without torch they meet on the host."""

    name: ClassVar[str] = "shm"

    @classmethod
    def probe(cls) -> Probe:
        return probe_library()

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        self._check(rendezvous, accelerator)
        has_torch = GlooBackend.probe().usable
        if has_torch:
            join_default_group(GlooBackend, rendezvous, timeout_s)
        if rendezvous.world_size == 1:
            return SingleCommunicator(accelerator, timeout_s=timeout_s, backend=self.name)
        rank, world = rendezvous.rank, rendezvous.world_size
        topic = f"shm/{next(_connections)}"

        def exchange(note: str) -> list[str]:
            if has_torch:
                return exchange_notes(topic, rank, world, note, timeout_s)
            where = rendezvous.init_method or f"{rendezvous.address}:{rendezvous.port}"
            return exchange_on_host(where, rank, world, note, timeout_s)

        return share_memory(tuple(range(world)), rank, accelerator, timeout_s, exchange)

    def _check(self, rendezvous: Rendezvous, accelerator: Accelerator) -> None:
        probe = self.probe()
        reason, world = probe.reason, rendezvous.world_size
        if probe.usable and accelerator.current_device().type != "cpu":
            reason = f"{accelerator.name} has memory of its own"
        elif probe.usable and rendezvous.local_world_size != world:
            reason = f"{rendezvous.local_world_size} of {world} ranks are on this host ({rendezvous.source})"
        elif probe.usable and world > MOST_RANKS:
            reason = f"{world} ranks are more than {MOST_RANKS}"
        elif probe.usable:
            return
        raise unusable_error(self.name, reason)
