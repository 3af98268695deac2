"""Memory without a name that the ranks of a host have in common: each has a window, which all of them map.

[Note: Shared-memory windows]
A window is a file in memory that its rank has open. The others of its group open it through `/proc/<pid>/fd`, which
the system allows to processes of the same user that see each other. Where it does not (another system, hardened
kernels) a rank is alone in its group, and reads for itself. Nothing has to be removed: the memory goes with the
last process that maps it.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from polyaccel.comm.base import Communicator
from polyaccel.job.host_topology import group_ranks, host_id

_NAME = "polyaccel-window"


@dataclass(frozen=True, slots=True)
class MemoryGroups:
    """Which ranks share memory: `groups[g]` are the ranks of group g, in order; `of_rank[r]` is rank r's group.
    `descriptors` are this rank's open files of the windows of its own group, by rank.

    These are not the hosts of `HostTopology`: ranks of one host id that a launcher takes for two hosts share memory,
    and ranks of one host that a hardened kernel keeps apart, or that see other storages, do not.
    """

    groups: tuple[tuple[int, ...], ...]
    of_rank: tuple[int, ...]
    rank: int
    descriptors: dict[int, int]

    @classmethod
    def found(cls, communicator: Communicator, places: Sequence[int]) -> MemoryGroups:
        """The groups of ranks on one host that see the same storage, as `places` says by rank. Collective."""
        rank, own, ids = communicator.rank, _new_file(), communicator.host_topology.id_by_rank()
        gathered = communicator.all_gather_object((os.getpid(), own))
        hosts = [ids[communicator.ranks[other]] if file >= 0 else "" for other, (_, file) in enumerate(gathered)]
        keys = [(host, places[other]) if host else other for other, host in enumerate(hosts)]
        descriptors = {rank: own}
        for other, (pid, descriptor) in enumerate(gathered):
            if other != rank and keys[other] == keys[rank]:
                with suppress(OSError):
                    descriptors[other] = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        has_all = len(descriptors) == keys.count(keys[rank])
        alone = {keys[other] for other, ok in enumerate(communicator.all_gather_object(has_all)) if not ok}
        groups = group_ranks([(key, other) if key in alone else key for other, key in enumerate(keys)])
        of_rank = {other: group for group, ranks in enumerate(groups) for other in ranks}
        found = cls(groups, tuple(of_rank[other] for other in range(len(gathered))), rank, descriptors)
        for other in descriptors.keys() - set(found.group):
            os.close(descriptors.pop(other))
        return found

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks of this rank's group."""
        return self.groups[self.of_rank[self.rank]]

    def resize(self, nbytes: int) -> None:
        """Make this rank's window so long. Before others map it."""
        if self.descriptors[self.rank] >= 0:
            os.ftruncate(self.descriptors[self.rank], nbytes)

    def windows(self, nbytes: int) -> dict[int, mmap.mmap]:
        """The windows of this group, by rank, each of so many bytes. Pages take memory once they are written."""
        if nbytes == 0:
            return {}
        return {rank: mmap.mmap(descriptor, nbytes) for rank, descriptor in self.descriptors.items()}

    def own_window(self, nbytes: int) -> mmap.mmap:
        """Return a window of this rank alone, in large pages: new small ones take three times as long as a read."""
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        window = mmap.mmap(-1, max(1, nbytes), **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                window.madvise(mmap.MADV_HUGEPAGE)
        return window

    def close(self) -> None:
        """Release the open files. What is mapped stays."""
        for descriptor in self.descriptors.values():
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors.clear()


def _new_file() -> int:
    """A new file in memory; -1, which `mmap` takes for memory of one process, where there are none."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return -1
    try:
        host_id()  # of a host without one no other rank knows whether it can open this rank's files
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except OSError:
        return -1
