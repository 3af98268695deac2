"""A checkpoint written again, by another number of ranks and in today's format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from polyaccel.checkpoint import CheckpointReader, Commit, TensorEntry, TensorPiece, save_checkpoint
from polyaccel.checkpoint.convert.elements import SourceBuffer, read
from polyaccel.checkpoint.convert.importing import NO_LIMIT_S
from polyaccel.checkpoint.load.cooperative.blobs import OWNED
from polyaccel.comm.base import Communicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import CheckpointError

_OF_A_RANK = "rng."
"""The states of random generators are each rank's own; whatever else a rank saved, rank 0 has for all, or it is of
`OWNED`."""


def resharded(
    reader: CheckpointReader, directory: str, tag: str, ranks: int, progress: Callable[[int], None]
) -> Commit:
    """Write the checkpoint as files of `ranks` ranks; generator states only for as many ranks as before."""
    if ranks < 1:
        raise CheckpointError(f"{ranks} ranks cannot write a checkpoint", hint="give --ranks 1 or more", value=ranks)

    def save(communicator: Communicator) -> Commit:
        return save_checkpoint(
            directory,
            tag,
            communicator=communicator,
            pieces=list(_pieces(reader, communicator.rank, ranks, progress)),
            scalars=reader.scalars,
            rank_blobs=_blobs(reader, communicator.rank, ranks),
            about=reader.about,
        )

    commit = run_threads(ranks, save, timeout_s=NO_LIMIT_S)[0]
    assert isinstance(commit, Commit)
    return commit


def _pieces(reader: CheckpointReader, rank: int, ranks: int, progress: Callable[[int], None]) -> Iterator[TensorPiece]:
    for tensor in reader.tensors():
        low, high = (tensor.numel * at // ranks for at in (rank, rank + 1))
        if low < high or not tensor.numel:
            buffer = SourceBuffer(high - low, tensor.dtype, _reading(reader, tensor, low, progress))
            yield TensorPiece(tensor.fqn, tensor.kind, tensor.shape, tensor.dtype, low, buffer)


def _reading(
    reader: CheckpointReader, tensor: TensorEntry, low: int, progress: Callable[[int], None]
) -> Callable[[int, int], bytes]:
    def read_bytes(start: int, numel: int) -> bytes:
        data = read(reader, tensor, low + start, numel).tobytes()
        progress(len(data))
        return data

    return read_bytes


def _blobs(reader: CheckpointReader, rank: int, ranks: int) -> dict[str, bytes]:
    if ranks == reader.world_size:
        return reader.rank_blobs(rank)
    kept = {name: blob for name, blob in reader.rank_blobs(0).items() if not name.startswith((_OF_A_RANK, OWNED))}
    return kept if rank else kept | reader.owned_blobs()
