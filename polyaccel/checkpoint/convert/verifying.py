"""Reading all of a checkpoint to see that its checksums are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.format.save_folders import rank_file
from polyaccel.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was read of a checkpoint, in bytes and seconds, and a sentence for each run of bytes that is damaged.
    `elsewhere_nbytes` of its tensors are on other hosts, where each has its own part."""

    tag: str
    nbytes: int
    seconds: float
    damages: tuple[str, ...]
    elsewhere_nbytes: int = 0


def checked_nbytes(reader: CheckpointReader) -> int:
    """The bytes of all tensors of a checkpoint."""
    return sum(tensor.numel * tensor.dtype.itemsize for tensor in reader.tensors())


def verified(reader: CheckpointReader, progress: Callable[[int], None]) -> Verdict:
    """Read every piece and every rank's states once, in the memory of a piece; `progress` receives bytes."""
    begin, nbytes, elsewhere_nbytes, damages = perf_counter(), 0, 0, list[str]()
    files = {piece.file for tensor in reader.tensors() for piece in tensor.pieces}
    absent = {file for file in files if reader.is_elsewhere(file)}
    for tensor in reader.tensors():
        for piece in tensor.pieces:
            piece_nbytes = piece.length * tensor.dtype.itemsize
            progress(piece_nbytes)
            if piece.file in absent:
                elsewhere_nbytes += piece_nbytes
                continue
            nbytes += piece_nbytes
            try:
                reader.verify(tensor.fqn, tensor.kind, piece.start, piece.length, tensor.dtype, block=piece.block)
            except CheckpointError as error:
                damages.append(error.message)
    for rank in range(reader.world_size):
        if reader.is_elsewhere(rank_file(rank)):
            continue
        try:
            nbytes += sum(len(blob) for blob in reader.rank_blobs(rank).values())
        except CheckpointError as error:
            damages.append(error.message)
    return Verdict(reader.tag, nbytes, perf_counter() - begin, tuple(damages), elsewhere_nbytes)
