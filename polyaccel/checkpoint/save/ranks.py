"""The ranks of a save, as its protocol uses them: here by collectives, in `async_process` by notes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from polyaccel.checkpoint.collective_call import on_rank_0, run_on_all
from polyaccel.checkpoint.format.pieces import RankFile
from polyaccel.checkpoint.save.neighbor_copies import write_copies
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator

T = TypeVar("T")
Holders = Mapping[str, tuple[tuple[str, str], ...]]
"""By file, (id, name) of the places that have it, as in `Manifest.held`; empty for a storage that all ranks see."""
_log = logging.getLogger(__name__)
_logged: set[str] = set()
"""The locations that were logged as having no copy."""


class SaveRanks(Protocol):
    """How this rank takes the steps of a save with the others. Each storage has one leader: the first rank that sees
    it. A step that failed on any rank raises CheckpointError on each rank that takes part in it."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes what a storage has once: manifest and marker."""

    def on_rank_0(self, step: str, action: Callable[[], T]) -> T:
        """Return what `action`, a plain value, is on rank 0."""

    def on_leaders(self, step: str, action: Callable[[], T]) -> list[T]:
        """Return what `action` gives, plain values, on each storage's leader."""

    def gather(self, step: str, write: Callable[[], RankFile]) -> Sequence[RankFile] | None:
        """Let every rank write its file; return all files on leaders and where they are copied, else None."""

    def copy(self, storage: Storage, folder: str, files: Sequence[RankFile], step: str) -> Holders:
        """Make the second copies where hosts have separate storages."""

    def settle(self) -> None:
        """Wait until no rank writes any more."""


@dataclass(frozen=True, slots=True)
class CollectiveRanks:
    """The ranks of `communicator`, whose storages are `nodes`: every method is collective."""

    communicator: Communicator
    nodes: StorageNodes

    @classmethod
    def discover(cls, storage: Storage, communicator: Communicator) -> CollectiveRanks:
        """Find the ranks' storages, each with an identity where hosts have their own. Collective."""
        if storage.is_shared:
            return cls(communicator, StorageNodes.single(communicator.world_size))
        nodes = StorageNodes.found(storage, communicator, may_write=True)
        if nodes.count == 1 and communicator.rank == 0 and storage.location not in _logged:
            _logged.add(storage.location)
            _log.info(
                "all ranks see one storage, %s: checkpoints have no second copy on another host", storage.location
            )
        return cls(communicator, nodes)

    @property
    def is_leader(self) -> bool:
        return self.nodes.is_leader(self.communicator.rank)

    @property
    def node(self) -> int:
        """The number of this rank's storage."""
        return self.nodes.of_rank[self.communicator.rank]

    def on_rank_0(self, step: str, action: Callable[[], T]) -> T:
        return on_rank_0(self.communicator, step, action)

    def on_leaders(self, step: str, action: Callable[[], T]) -> list[T]:
        """Return what `action` gives, plain values, by node."""
        gathered = run_on_all(self.communicator, step, lambda: [action()] if self.is_leader else [])
        return [gathered[self.nodes.members(node)[0]][0] for node in range(self.nodes.count)]

    def gather(self, step: str, write: Callable[[], RankFile]) -> Sequence[RankFile]:
        written = list[RankFile]()
        run_on_all(self.communicator, step, lambda: written.append(write()))
        tree = written[0].to_tree()
        if self.nodes.count > 1:
            trees = self.communicator.all_gather_object(tree)
        else:
            trees = self.communicator.gather_object(tree) or []
        return [RankFile.from_tree(each, f"what rank {rank} wrote") for rank, each in enumerate(trees)]

    def copy(self, storage: Storage, folder: str, files: Sequence[RankFile], step: str) -> Holders:
        nodes = self.nodes
        if nodes.count == 1:
            return {}
        write_copies(storage, folder, nodes, files, self.communicator, step)
        return {
            file.name: tuple((nodes.ids[at], nodes.names[at]) for at in (node, nodes.neighbour(node)))
            for file, node in zip(files, nodes.of_rank, strict=True)
        }

    def settle(self) -> None:
        """Nothing to wait for: a step that failed has ended on every rank."""
