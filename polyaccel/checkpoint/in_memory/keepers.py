"""The keepers of a job's hosts as its ranks see them: each rank that of its host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from polyaccel.checkpoint.collective_call import run_on_all
from polyaccel.checkpoint.in_memory.storage import ApartStorage, KeptStorage
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.comm.base import Communicator
from polyaccel.job.memory_server.client import KeeperClient

T = TypeVar("T")
_WHO = "place"


@dataclass(frozen=True, slots=True)
class HostKeepers:
    """The keepers of the ranks of `communicator`: `client` is connected to this rank's, `places` says whose it is
    too. `HostTopology` does not say that: a host has a keeper for each launcher's agent that runs there."""

    communicator: Communicator
    client: KeeperClient
    places: StorageNodes

    @classmethod
    def found(cls, communicator: Communicator, client: KeeperClient) -> HostKeepers:
        """Look which ranks have which keeper. Collective. Raises CheckpointError on every rank when one is lost."""
        storage = ApartStorage(client, _WHO)
        return cls(communicator, client, StorageNodes.found(storage, communicator, may_write=True))

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its keeper."""
        return self.places.is_leader(self.communicator.rank)

    @property
    def place(self) -> int:
        """The number of this rank's keeper."""
        return self.places.of_rank[self.communicator.rank]

    def storage(self, folder: str) -> KeptStorage:
        """What the keepers have in a folder."""
        return (ApartStorage if self.places.count > 1 else KeptStorage)(self.client, folder)

    def of_each(self, step: str, action: Callable[[], T]) -> list[T]:
        """What `action` gives, plain values, by keeper: one rank does it for each. Collective. Raises CheckpointError
        on every rank where it failed on any."""
        gathered = run_on_all(self.communicator, step, lambda: [action()] if self.is_leader else [])
        return [gathered[self.places.members(place)[0]][0] for place in range(self.places.count)]
