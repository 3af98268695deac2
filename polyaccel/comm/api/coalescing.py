"""Many small buffers in one collective of each element type: a message costs more than the bytes of a small buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from polyaccel.comm.arguments import check_equal_parts
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import CombinedWork, Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ShardingError


def all_reduce_coalesced(
    communicator: Communicator,
    buffers: Sequence[Buffer],
    op: ReduceOp = ReduceOp.SUM,
    *,
    async_op: bool = False,
    label: str = "",
) -> Work:
    """`Communicator.all_reduce` of each of `buffers`, in place, as one collective for each element type."""
    works: list[Work] = []
    for dtype, indices in _by_dtype(buffers):
        members = [buffers[index] for index in indices]
        pack = communicator.accelerator.allocate(sum(map(len, members)), dtype)
        windows = _windows(pack, map(len, members))
        _copy(windows, members)
        work = communicator.all_reduce(pack, op, async_op=async_op, label=label)
        works.append(CombinedWork([work], partial(_copy, members, windows)))
    return _together(works, async_op)


def all_gather_coalesced(
    communicator: Communicator,
    outs: Sequence[Buffer],
    sources: Sequence[Buffer],
    *,
    async_op: bool = False,
    label: str = "",
) -> Work:
    """All-gather each of `sources` into its `outs`, by one collective for each element type."""
    _check("all_gather_coalesced", communicator, outs, sources, parts_of="out")
    works: list[Work] = []
    for dtype, indices in _by_dtype(sources):
        members = [sources[index] for index in indices]
        numel = sum(map(len, members))
        pack = communicator.accelerator.allocate(numel * communicator.world_size, dtype)
        own = pack.view(communicator.rank * numel, numel)
        _copy(_windows(own, map(len, members)), members)
        work = communicator.all_gather(pack, own, async_op=async_op, label=label)
        works.append(
            CombinedWork([work], partial(_copy, *_of_all_ranks(communicator, pack, [outs[index] for index in indices])))
        )
    return _together(works, async_op)


def reduce_scatter_coalesced(
    communicator: Communicator,
    outs: Sequence[Buffer],
    sources: Sequence[Buffer],
    op: ReduceOp = ReduceOp.SUM,
    *,
    async_op: bool = False,
    label: str = "",
) -> Work:
    """Reduce-scatter each of `sources` into its `outs`, by one collective for each element type."""
    _check("reduce_scatter_coalesced", communicator, outs, sources, parts_of="source")
    works: list[Work] = []
    for dtype, indices in _by_dtype(sources):
        members = [sources[index] for index in indices]
        pack = communicator.accelerator.allocate(sum(map(len, members)), dtype)
        parts, windows = _of_all_ranks(communicator, pack, members)
        _copy(windows, parts)
        numel = pack.numel // communicator.world_size
        own = pack.view(communicator.rank * numel, numel)
        work = communicator.reduce_scatter(own, pack, op, async_op=async_op, label=label)
        results = [outs[index] for index in indices]
        works.append(CombinedWork([work], partial(_copy, results, _windows(own, map(len, results)))))
    return _together(works, async_op)


def _by_dtype(buffers: Sequence[Buffer]) -> Iterable[tuple[DType, list[int]]]:
    """The indices of the buffers of each type, in the order in which types first appear: the same on all ranks."""
    found: dict[DType, list[int]] = {}
    for index, buffer in enumerate(buffers):
        found.setdefault(buffer.dtype, []).append(index)
    return found.items()


def _check(
    kind: str, communicator: Communicator, outs: Sequence[Buffer], sources: Sequence[Buffer], *, parts_of: str
) -> None:
    if len(outs) != len(sources):
        raise ShardingError(
            f"{kind}: {len(sources)} buffers in, {len(outs)} out",
            hint="pass a result for every source",
            value=(len(outs), len(sources)),
        )
    for out, source in zip(outs, sources, strict=True):
        check_equal_parts(kind, out, source, world_size=communicator.world_size, parts_of=parts_of)


def _windows(pack: Buffer, numels: Iterable[int]) -> list[Buffer]:
    """`pack` cut into runs of these lengths."""
    windows, start = [], 0
    for numel in numels:
        windows.append(pack.view(start, numel))
        start += numel
    return windows


def _of_all_ranks(
    communicator: Communicator, pack: Buffer, wholes: Sequence[Buffer]
) -> tuple[list[Buffer], list[Buffer]]:
    """Each rank's part of each of `wholes`, and its place in `pack`, which holds rank after rank."""
    ranks = communicator.world_size
    parts = [
        whole.view(rank * (whole.numel // ranks), whole.numel // ranks) for rank in range(ranks) for whole in wholes
    ]
    return parts, _windows(pack, map(len, parts))


def _copy(targets: Sequence[Buffer], sources: Sequence[Buffer]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_from(source)


def _together(works: Sequence[Work], async_op: bool) -> Work:
    together = CombinedWork(works)
    if not async_op:
        together.wait()
    return together
