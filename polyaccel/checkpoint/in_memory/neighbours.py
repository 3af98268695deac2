"""Parts on their way to the keeper of a neighbour host, so that the loss of a host with its keeper loses no step.

Who sends to whom follows from `places.copies`, as for second copies on disks: every rank sends its part to one rank of
the next host, and takes those of some ranks of the host before, turn by turn. Every rank takes all of its turns for
each step that has begun: one that has no part sends a message about that.
"""

from __future__ import annotations

import struct

from polyaccel.checkpoint.in_memory.images import DoubleBuffer, MemoryBudget
from polyaccel.checkpoint.in_memory.parts import PartKey
from polyaccel.checkpoint.save.async_image import Image
from polyaccel.checkpoint.save.neighbor_copies import TurnExchange, chunk_buffers, copy_turns
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.save.per_node_thread import thread_communicator
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.job.memory_server.client import KeeperClient, KeeperGone

_LENGTHS = struct.Struct("<QQ")
_LABEL = "replicas between hosts"


class NeighbourCopies:
    """What the ranks of `communicator` send each other for the keepers of their hosts, which are `places`. Collective,
    and so is `exchange`; that may be called by another thread than uses `communicator`, if `overlaps` is True: the
    messages have their own communicator, and lie in host memory."""

    def __init__(self, communicator: Communicator, places: StorageNodes, room: MemoryBudget) -> None:
        extra = thread_communicator(communicator)
        self.overlaps = extra is not None
        self._communicator = extra or communicator
        self._rank = communicator.rank
        self._room = room
        self._buffers = chunk_buffers(self._communicator)
        self._turns: list[tuple[int | None, int | None]] = []
        """(the rank that takes this one's part, the rank whose part this one takes), for its turns."""
        for turn in copy_turns(places):
            source = next((sender for sender, taker in turn.items() if taker == self._rank), None)
            taker = turn.get(self._rank)
            if source is not None or taker is not None:
                self._turns.append((taker, source))
        self._taken = {source: DoubleBuffer(source, room) for _, source in self._turns if source is not None}

    def exchange(
        self, key: PartKey, whole: int | None, part: tuple[bytes, Image] | None, client: KeeperClient | None
    ) -> bool:
        """Send this rank's part, a note and an image, and let this host's keeper have those that come, of the same
        step; `whole` is the last that every rank has finished. Whether all that are to come have come.

        Raises CheckpointError where a part could not be kept, once all turns are over.
        """
        failures, has_all = list[Exception](), True
        for taker, source in self._turns:
            note, image = part if part is not None and taker is not None else (b"", None)
            received = self._turn(taker, source, _LENGTHS.pack(len(note), 0 if image is None else image.nbytes))
            lengths = _LENGTHS.unpack(received) if source is not None else (0, 0)
            arrived = self._turn(taker, source, note, lengths[0])
            try:
                has_all &= self._take(key, whole, taker, source, image, lengths[1], arrived, client)
            except (CheckpointError, OSError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return has_all

    def forget_parts(self) -> None:
        """As `DoubleBuffer.forget_parts`."""
        for each in self._taken.values():
            each.forget_parts()

    def let_go(self) -> None:
        """Release the images."""
        for each in self._taken.values():
            each.close()

    def close(self) -> None:
        """Release images and the communicator."""
        self.let_go()
        if self.overlaps:
            self._communicator.close()

    def _turn(self, taker: int | None, source: int | None, out: bytes, in_nbytes: int = _LENGTHS.size) -> bytes:
        """Bytes for those that come."""
        exchange = TurnExchange(
            self._communicator,
            self._buffers,
            taker=taker,
            source=source,
            read=lambda start, nbytes: out[start : start + nbytes],
            out_nbytes=len(out),
            in_nbytes=in_nbytes,
            label=_LABEL,
        )
        arrived = b"".join(exchange.chunks())
        exchange.finish()
        return arrived

    def _take(
        self,
        key: PartKey,
        whole: int | None,
        taker: int | None,
        source: int | None,
        image: Image | None,
        in_nbytes: int,
        note: bytes,
        client: KeeperClient | None,
    ) -> bool:
        """Send an image, and take another in, which `note` describes. Whether one came, or none was to come."""
        exchange = TurnExchange(
            self._communicator,
            self._buffers,
            taker=taker,
            source=source,
            read=lambda start, nbytes: bytes(nbytes) if image is None else image.view(start, nbytes),
            out_nbytes=0 if image is None else image.nbytes,
            in_nbytes=in_nbytes,
            label=_LABEL,
        )
        try:
            if source is None or not in_nbytes:
                return source is None
            if client is None:
                raise KeeperGone("the keeper of this host has ended")
            half, reached = self._taken[source].half_for(whole, in_nbytes, client), 0
            for chunk in exchange.chunks():
                with half.image.view(reached, len(chunk)) as target:
                    target[:] = chunk
                reached += len(chunk)
            taken = PartKey(key.step, key.attempt, key.engine, key.world_size, source)
            client.put(str(taken), note, half.image.descriptor)
            half.key = taken
            return True
        finally:
            exchange.finish()
