"""The memory of parts: two images of each rank's, and how much all of them may take.

[Note: Replica generations]
A rank has two images of its parts, and two of those of each rank whose copies it takes. While one holds the part of the
last replica that *every* rank has finished, the next part goes into the other. The ranks agree on the step of that last
one when they begin the next: each sends which part it has finished, its own with its keeper and the neighbours' here,
and the oldest of these is whole. So at every instant there is one that is whole, a rank that dies in the middle leaves
it, and no rank waits for another's copy. Keepers have no part in this: a reader takes the newest step of which there
are all parts. A part is dropped there before its image is written again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyaccel.accelerators.memory.host import memory_stats
from polyaccel.checkpoint.in_memory.parts import PartKey
from polyaccel.checkpoint.save.async_image import Image
from polyaccel.errors import CheckpointError
from polyaccel.job.memory_server.client import KeeperClient


class NoRoom(CheckpointError):
    """The images would be more than a rank may take."""


@dataclass
class BufferSlot:
    """One of two images. `key`: the part that a keeper has in it. `frozen` has for segments of parameters that no
    update writes the count of writes when they were copied, `sums` their checksums."""

    image: Image
    key: PartKey | None = None
    frozen: dict[int, tuple[int, int]] = field(default_factory=dict)
    sums: dict[int, tuple[int, ...]] = field(default_factory=dict)


class MemoryBudget:
    """What the images of rank `rank` may take: `limit_nbytes`, or half of what the host has left, shared by its
    `local_size` ranks."""

    def __init__(self, rank: int, local_size: int, limit_nbytes: int | None) -> None:
        self._rank, self._local_size, self._limit_nbytes = rank, local_size, limit_nbytes
        self._claims: dict[int, int] = {}
        self._taken_nbytes = 0

    def image(self, of_rank: int, nbytes: int) -> Image:
        """New memory for the parts of a rank. Raises NoRoom."""
        self._claims[of_rank] = 2 * nbytes
        needed, most = sum(self._claims.values()), self._limit_nbytes
        if most is None:
            most = memory_stats().free_nbytes // 2 // self._local_size + self._taken_nbytes
        if needed > most:
            raise NoRoom(
                f"replicas of rank {self._rank} would take {needed:,} bytes, and may take {most:,}",
                hint='raise "checkpoint.in_memory": {"memory": BYTES}, or free some memory',
                value=needed,
            )
        image = Image.new(nbytes)
        self._taken_nbytes += nbytes
        return image

    def give_back(self, image: Image) -> None:
        self._taken_nbytes -= image.nbytes
        image.close()


class DoubleBuffer:
    """The two images of the parts of rank `of_rank`. See [Note: Replica generations]."""

    def __init__(self, of_rank: int, room: MemoryBudget) -> None:
        self._of_rank, self._room = of_rank, room
        self.halves: list[BufferSlot] = []

    def half_for(self, whole: int | None, nbytes: int, client: KeeperClient) -> BufferSlot:
        """Return the image without the part of step `whole`, with room for `nbytes`; its own part is dropped."""
        free = [half for half in self.halves if half.key is None or half.key.step != whole]
        if len(self.halves) < 2 and not free:
            free = [BufferSlot(self._room.image(self._of_rank, nbytes))]
            self.halves += free
        half = free[0]
        if half.key is not None:
            client.drop(str(half.key))
            half.key = None
        if half.image.nbytes != nbytes:
            self.halves.remove(half)
            self._room.give_back(half.image)
            half = BufferSlot(self._room.image(self._of_rank, nbytes))
            self.halves.append(half)
        return half

    def forget_parts(self) -> None:
        """What the images hold is in no keeper any more."""
        for half in self.halves:
            half.key = None

    def forget_contents(self) -> None:
        """Segments lie elsewhere from now on. Parts that are kept stay until others are whole."""
        for half in self.halves:
            half.frozen.clear()
            half.sums.clear()

    def close(self) -> None:
        """Release the memory."""
        while self.halves:
            self._room.give_back(self.halves.pop().image)
