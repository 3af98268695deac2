"""Reading all of a checkpoint to see that its checksums are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from polyaccel.checkpoint import CheckpointReader
from polyaccel.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was read of a checkpoint, in bytes and seconds, and a sentence for each run of bytes that is damaged."""

    tag: str
    nbytes: int
    seconds: float
    damages: tuple[str, ...]


def checked_nbytes(reader: CheckpointReader) -> int:
    """The bytes of all tensors of a checkpoint."""
    return sum(tensor.numel * tensor.dtype.itemsize for tensor in reader.tensors())


def verified(reader: CheckpointReader, progress: Callable[[int], None]) -> Verdict:
    """Read every piece of every tensor once, and every rank's own states; `progress` is told the bytes of each piece.
    Memory is that of a piece."""
    begin, nbytes, damages = perf_counter(), 0, list[str]()
    for tensor in reader.tensors():
        for piece in tensor.pieces:
            try:
                reader.verify(tensor.fqn, tensor.kind, piece.start, piece.length, tensor.dtype, block=piece.block)
            except CheckpointError as error:
                damages.append(error.message)
            nbytes += piece.length * tensor.dtype.itemsize
            progress(piece.length * tensor.dtype.itemsize)
    for rank in range(reader.world_size):
        try:
            nbytes += sum(len(blob) for blob in reader.rank_blobs(rank).values())
        except CheckpointError as error:
            damages.append(error.message)
    return Verdict(reader.tag, nbytes, perf_counter() - begin, tuple(damages))
