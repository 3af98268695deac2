"""Second copies: every rank's file goes to a rank of the neighbour place, in chunks, and is verified there.

[Note: Turns of neighbour copies]
A rank sends one file and receives those of some ranks of the place before, one a turn. In a turn every pair exchanges
its chunks in step, so each rank needs memory for two of them. No rank leaves a turn before its end: a rank that cannot
write what it receives takes the rest and drops it, one that cannot read what it sends sends zeros; both report that
when the turns are over, and until then no rank has to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from polyaccel.checkpoint.collective_call import run_on_all
from polyaccel.checkpoint.format.extents import Extent
from polyaccel.checkpoint.format.pieces import RankFile
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator, message_from, message_to
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

CHUNK_NBYTES = 8 << 20

Turn = dict[int, int]
"""By rank that sends, the rank that receives: in a turn a rank receives from one at most."""


def copy_turns(places: StorageNodes) -> tuple[Turn, ...]:
    """Who sends its file to whom, turn by turn. Every rank sends once; nothing where there is one place."""
    turns = list[Turn]()
    for place in range(places.count if places.count > 1 else 0):
        takers = places.members(places.neighbour(place))
        for number, rank in enumerate(places.members(place)):
            turn, taker = divmod(number, len(takers))
            while len(turns) <= turn:
                turns.append({})
            turns[turn][rank] = takers[taker]
    return tuple(turns)


def write_copies(
    storage: Storage,
    folder: str,
    places: StorageNodes,
    files: Sequence[RankFile],
    communicator: Communicator,
    step: str,
) -> None:
    """Copy each place's files to the next place, verified. Collective; raises CheckpointError on every rank."""
    rank, failures = communicator.rank, list[Exception]()
    for turn in copy_turns(places):
        source = next((sender for sender, taker in turn.items() if taker == rank), None)
        taker = turn.get(rank)
        if source is None and taker is None:
            continue
        turned = TurnExchange(
            communicator,
            chunk_buffers(communicator),
            taker=taker,
            source=source,
            read=partial(storage.read, f"{folder}/{files[rank].name}"),
            out_nbytes=files[rank].nbytes,
            in_nbytes=0 if source is None else files[source].nbytes,
        )
        try:
            if source is not None:
                storage.write(f"{folder}/{files[source].name}", turned.chunks())
        except Exception as error:  # whatever it is, the others have to receive it
            failures.append(error)
        turned.finish()
        failures += turned.failures
        if source is not None and not failures:
            try:
                _verify(storage, folder, files[source])
            except CheckpointError as error:
                failures.append(error)

    def tell() -> None:
        if failures:
            raise failures[0]

    run_on_all(communicator, step, tell)


class TurnExchange:
    """One turn of a rank: `out_nbytes` bytes, as `read` gives them by offset and length, to the rank `taker`, and
    `in_nbytes` from the rank `source`; to or from no rank where that is None. `buffers` are two of CHUNK_NBYTES. What
    `read` could not give is in `failures`."""

    def __init__(
        self,
        communicator: Communicator,
        buffers: Sequence[Buffer],
        *,
        taker: int | None,
        source: int | None,
        read: Callable[[int, int], bytes | memoryview],
        out_nbytes: int,
        in_nbytes: int,
        label: str = "copies of a checkpoint",
    ) -> None:
        self._communicator, self._buffers, self._label = communicator, buffers, label
        self._taker, self._source, self._source_of_out = taker, source, read
        self._out_nbytes = 0 if taker is None else out_nbytes
        self._in_nbytes = 0 if source is None else in_nbytes
        self._done = 0
        self.failures: list[Exception] = []

    def chunks(self) -> Iterator[bytes]:
        """What arrives."""
        while self._done * CHUNK_NBYTES < self._in_nbytes:
            yield self._step()

    def finish(self) -> None:
        """Exchange what is left."""
        while self._done * CHUNK_NBYTES < max(self._in_nbytes, self._out_nbytes):
            self._step()

    def _step(self) -> bytes:
        start, messages = self._done * CHUNK_NBYTES, []
        self._done += 1
        out_nbytes = min(CHUNK_NBYTES, self._out_nbytes - start)
        in_nbytes = min(CHUNK_NBYTES, self._in_nbytes - start)
        if self._taker is not None and out_nbytes > 0:
            out = self._buffers[0].view(0, out_nbytes)
            out.from_bytes(self._read(start, out_nbytes))
            messages.append(message_to(out, self._taker))
        if self._source is None or in_nbytes <= 0:
            self._communicator.batch(messages, label=self._label)
            return b""
        arrived = self._buffers[1].view(0, in_nbytes)
        messages.append(message_from(arrived, self._source))
        self._communicator.batch(messages, label=self._label)
        return arrived.to_bytes()

    def _read(self, start: int, nbytes: int) -> bytes | memoryview:
        try:
            return self._source_of_out(start, nbytes)
        except CheckpointError as error:
            self.failures.append(error)
            return bytes(nbytes)


def chunk_buffers(communicator: Communicator) -> list[Buffer]:
    """The buffers of exchanges, one after the other."""
    return [communicator.allocate(CHUNK_NBYTES, DType.UINT8) for _ in range(2)]


def _verify(storage: Storage, folder: str, file: RankFile) -> None:
    """Read a copy back. Raises CheckpointError where it has not the checksums of what was written."""
    for tensor in file.tensors:
        for piece in tensor.pieces:
            Extent.of_piece(tensor, piece).read(storage, folder)
    for number, blob in enumerate(file.blobs):
        Extent.of_blob(blob, number).read(storage, folder)
