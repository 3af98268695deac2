"""The keepers of a job's hosts as its ranks see them: each rank that of its host."""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.checkpoint.in_memory.storage import ApartStorage, KeptStorage
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.save.ranks import CollectiveRanks
from polyaccel.comm.base import Communicator
from polyaccel.job.memory_server.client import KeeperClient

_WHO = "place"


@dataclass(frozen=True, slots=True)
class HostKeepers(CollectiveRanks):
    """Ranks whose storages are keepers: `client` is connected to this rank's. `HostTopology` does not say which ranks
    share one: a host has a keeper for each launcher's agent that runs there."""

    client: KeeperClient

    @classmethod
    def found(cls, communicator: Communicator, client: KeeperClient) -> HostKeepers:
        """Look which ranks have which keeper. Collective. Raises CheckpointError on every rank when one is lost."""
        storage = ApartStorage(client, _WHO)
        return cls(communicator, StorageNodes.found(storage, communicator, may_write=True), client)

    def storage(self, folder: str) -> KeptStorage:
        """What the keepers have in a folder."""
        return (ApartStorage if self.nodes.count > 1 else KeptStorage)(self.client, folder)
