"""`HostTopology`: which ranks of a job share a host, found once when they join, and the identity of a host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the identity of the running kernel. Linux only; raises OSError elsewhere."""
    return _BOOT_ID.read_text(encoding="ascii", errors="replace").strip()


def host_id() -> str:
    """Return an identity of processes that can share files: kernel and pid namespace. Linux only."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def network_id() -> str:
    """Return an identity of processes that share the loopback: kernel and network namespace. Linux only."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"


def group_ranks(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each key, where rank r has `keys[r]`; groups are ordered by their first rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True, slots=True)
class HostTopology:
    """The hosts of a job as rank `rank` has them: `ranks_by_host[h]` are the global ranks of host h, and `host_ids[h]`
    is its `host_id` (empty where it is not known). Hosts are ordered by their first rank.

    All ranks have equal topologies except for `rank`. A group of ranks has the topology of its whole job: what ranks of
    a host share, such as its memory, they share with the job's other groups too.
    """

    rank: int
    ranks_by_host: tuple[tuple[int, ...], ...]
    host_ids: tuple[str, ...]

    @classmethod
    def of_notes(cls, rank: int, notes: Sequence[tuple[str, int]]) -> HostTopology:
        """Make the topology of all (host id, local rank); several launchers under one id are several hosts."""
        seen = Counter[tuple[str, int]]()
        keys: list[tuple[str, int]] = []
        for note in notes:
            keys.append((note[0], seen[note]))
            seen[note] += 1
        ranks_by_host = group_ranks(keys)
        return cls(rank, ranks_by_host, tuple(notes[members[0]][0] for members in ranks_by_host))

    @classmethod
    def one_host(cls, rank: int, ranks: Sequence[int], host_id: str = "") -> HostTopology:
        """Make the topology of a job whose global `ranks` are all on one host."""
        return cls(rank, (tuple(sorted(ranks)),), (host_id,))

    @property
    def num_hosts(self) -> int:
        return len(self.ranks_by_host)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The global ranks on this rank's host."""
        return next(ranks for ranks in self.ranks_by_host if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """This rank's place among those of its host, by global rank: the launcher's LOCAL_RANK may count otherwise."""
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """The number of the job's ranks on this rank's host."""
        return len(self.local_ranks)

    def id_by_rank(self) -> dict[int, str]:
        """Return the host id of each global rank."""
        return {rank: found for ranks, found in zip(self.ranks_by_host, self.host_ids, strict=True) for rank in ranks}
