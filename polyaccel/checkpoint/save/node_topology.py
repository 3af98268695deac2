"""Which ranks see one and the same storage, where hosts have their own.

A *place* is a storage that some ranks see and others do not. It has an identity, in a separate file: ranks that read
the same one see the same files. A place without that file, such as a new disk, is that of the host and the location.

`HostTopology` does not answer that: a file system may be shared by some hosts, containers of one host may each have
their own, and a host may have several.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from secrets import token_hex

from polyaccel.checkpoint.collective_call import run_on_all
from polyaccel.checkpoint.format.commit import NOTE, place_id, read_note, write_note
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.job.host_topology import group_ranks


@dataclass(frozen=True, slots=True)
class StorageNodes:
    """The places of a group's ranks: `of_rank[r]` is that of rank r; `ids` and `names` are by place. An id is empty
    where the place has none yet; a name is for people."""

    of_rank: tuple[int, ...]
    ids: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def single(cls, world_size: int) -> StorageNodes:
        """One storage that all ranks see."""
        return cls((0,) * world_size, ("",), ("",))

    @classmethod
    def found(cls, storage: Storage, communicator: Communicator, *, may_write: bool) -> StorageNodes:
        """Find out which ranks see which storage. `may_write`: give places that have no identity one; without it, hosts
        and locations count as different even where they turn out to be one storage, which does no harm to readers.
        Collective.

        Raises CheckpointError on every rank when a storage fails on any, or is the clone of another.
        """
        step, host = "looking for the hosts' own storages", socket.gethostname()

        def mark() -> None:
            if may_write and not place_id(storage):
                write_note(storage, token_hex(8))

        run_on_all(communicator, step, mark)  # of several notes the last one stays
        gathered = run_on_all(communicator, step, lambda: (place_id(storage), host, storage.location))
        keys = [found if may_write else f"{found}:{host}:{location}" for found, host, location in gathered]
        groups = group_ranks(keys)
        of_rank = {rank: place for place, ranks in enumerate(groups) for rank in ranks}
        found = cls(
            tuple(of_rank[rank] for rank in range(len(keys))),
            tuple(gathered[ranks[0]][0] for ranks in groups),
            tuple(f"{gathered[ranks[0]][1]}:{gathered[ranks[0]][2]}" for ranks in groups),
        )
        if may_write and len(set(gathered)) > found.count:
            found._prove(storage, communicator, step)
        return found

    def _prove(self, storage: Storage, communicator: Communicator, step: str) -> None:
        """See that ranks of several hosts or locations with one identity do see one storage, and no clone of it."""
        place = self.of_rank[communicator.rank]

        def renew() -> None:
            if self.is_leader(communicator.rank):
                write_note(storage, self.ids[place], token_hex(8))

        run_on_all(communicator, step, renew)
        gathered = communicator.all_gather_object(read_note(storage).get("proof"))

        def compare() -> None:
            if gathered[communicator.rank] != gathered[self.members(place)[0]]:
                raise CheckpointError(
                    f"{storage.location} on {socket.gethostname()} has the identity of {self.names[place]}, and other "
                    "files",
                    hint=f"a disk was cloned: delete {NOTE} from it, and save again",
                    value=self.ids[place],
                )

        run_on_all(communicator, step, compare)

    @property
    def count(self) -> int:
        return len(self.names)

    def members(self, place: int) -> tuple[int, ...]:
        """The ranks that see a place."""
        return tuple(rank for rank, of_rank in enumerate(self.of_rank) if of_rank == place)

    def is_leader(self, rank: int) -> bool:
        """Whether `rank` is the first that sees its place: it writes what a place has once."""
        return self.of_rank.index(self.of_rank[rank]) == rank

    def kept_by(self, place: int) -> tuple[int, ...]:
        """The ranks whose files a place has: of those that see it, and of the places that it is the neighbour of."""
        places = {place, *(other for other in range(self.count) if self.neighbour(other) == place)}
        return tuple(rank for rank, of_rank in enumerate(self.of_rank) if of_rank in places)

    def neighbour(self, place: int) -> int:
        """The place that has the copies of a place's files."""
        return (place + 1) % self.count
