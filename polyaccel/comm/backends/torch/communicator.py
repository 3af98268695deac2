"""Collectives of torch process groups: the backend's own ones, for devices whose libraries do them best.

[Note: Names of process groups]
Ranks find each other by the name of a group. torch makes that name from a count of groups that this process made
(torch 2.14), or of which it is a member (before). Ranks that were in unequally many groups count differently, so they
wait under different names until the time limit. A group of a group's ranks is therefore named by polyaccel: the
name of the group that it is split from, and the number of that split. All ranks of a group split it in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.arguments import check_members
from polyaccel.comm.backends.torch.board import StoreBoard
from polyaccel.comm.base import Communicator, StatusStore
from polyaccel.comm.collective import EQUAL_PARTS, Collective, Operation, ended
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.work import DONE, Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, CommTimeout

# torch 2.13 renamed both; the old names warn there, the new ones do not exist before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_TORCH_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.AVG,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.PROD: dist.ReduceOp.PRODUCT,
}


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """The flat tensor over a buffer's memory, without a copy, whatever framework made it."""
    raw = buffer.raw
    if isinstance(raw, np.ndarray) and buffer.dtype is DType.BFLOAT16:  # which numpy does not export
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    return raw if isinstance(raw, torch.Tensor) else from_dlpack(buffer)


class TorchWork(Work):
    """A collective of a torch process group. Holds its buffers until waited for."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        written: Sequence[Buffer],
        held: tuple[Any, ...],
        failed: Callable[[Exception], CommError],
    ) -> None:
        self._works = works
        self._written = written
        self._held = held
        self._failed = failed

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        for buffer in self._written:
            buffer.bump_version()
        self._works, self._written, self._held = (), (), ()

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)


class TorchCommunicator(Communicator):
    """A torch process group's own collectives. `wait` orders the current stream after them, as torch's does.

    The device's library decides the order of additions, hence not deterministic; AVG is its own where it has one.
    """

    native_ops: ClassVar[frozenset[Operation]] = EQUAL_PARTS | {Operation.BATCH}
    native_uneven_ops: ClassVar[frozenset[Operation]] = frozenset({Operation.ALL_TO_ALL})

    def __init__(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], accelerator: Accelerator, backend: str, timeout_s: float
    ) -> None:
        self.rank = ranks.index(dist.get_rank())
        self.world_size = len(ranks)
        self.ranks = ranks
        self.backend = backend
        self.accelerator = accelerator
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = group

    def start(self, collective: Collective) -> Work:
        collective.check(self.rank, self.world_size)
        kind, group = collective.operation, self.group
        if kind is Operation.BATCH and not collective.parts:
            return DONE
        if kind is Operation.BARRIER:
            return self._all_reduce_nothing(collective)
        source: Any = None if collective.source is None else tensor_of(collective.source)
        target: Any = None if collective.target is None else tensor_of(collective.target)
        op, peer = _TORCH_OPS[collective.reduction], self.ranks[collective.root]
        begin: Callable[[], Any]
        if kind is Operation.ALL_REDUCE:
            begin = partial(dist.all_reduce, target, op, group, async_op=True)
        elif kind is Operation.REDUCE_SCATTER:
            begin = partial(_reduce_scatter, target, source, op, group, async_op=True)
        elif kind is Operation.ALL_GATHER:
            begin = partial(_all_gather, target, source, group, async_op=True)
        elif kind is Operation.BROADCAST:
            begin = partial(dist.broadcast, target, peer, group, async_op=True)
        elif kind is Operation.ALL_TO_ALL:
            out_counts, in_counts = (each and list(each) for each in (collective.counts, collective.source_counts))
            begin = partial(dist.all_to_all_single, target, source, out_counts, in_counts, group, async_op=True)
        elif kind is Operation.SEND:
            begin = partial(dist.isend, source, peer, group)
        elif kind is Operation.RECV:
            begin = partial(dist.irecv, target, peer, group)
        else:
            begin = partial(_start_messages, [self._message(part) for part in collective.parts])
        return self._work(collective, begin, source, target)

    def _all_reduce_nothing(self, collective: Collective) -> Work:
        # torch's own barrier guesses a device and warns about it.
        token = self.accelerator.allocate(1, DType.FLOAT32)
        tensor = tensor_of(token)
        work = self._work(collective, partial(dist.all_reduce, tensor, group=self.group, async_op=True), tensor)
        work.wait()
        self.accelerator.synchronize()
        return work

    def _message(self, part: Collective) -> dist.P2POp:
        peer = self.ranks[part.root]
        if part.operation is Operation.SEND:
            return dist.P2POp(dist.isend, tensor_of(part.buffer_sent()), peer, self.group)
        return dist.P2POp(dist.irecv, tensor_of(part.buffer_received()), peer, self.group)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        members = tuple(ranks)
        check_members("split", members, self.world_size)
        outer = tuple(self.ranks[rank] for rank in members)
        if outer != tuple(sorted(outer)) and not self.deterministic:
            raise CommError(
                f"backend {self.backend!r} orders the ranks of a group itself, it cannot keep {list(members)}",
                hint="list the ranks in ascending order",
                value=members,
            )
        if len(outer) == 1:
            if outer[0] != self.ranks[self.rank]:
                return None
            return SingleCommunicator(
                self.accelerator, timeout_s=self.timeout_s, global_rank=outer[0], backend=self.backend
            )
        name = name_of_split(self.group)
        if self.world_size < dist.get_world_size() and self.rank not in members:
            return None
        everybody = self.world_size == dist.get_world_size()
        group = new_group(outer, self.backend, self.timeout_s, everybody=everybody, name=name)
        return None if group is None else type(self)(group, outer, self.accelerator, self.backend, self.timeout_s)

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def board(self) -> StatusStore | None:
        return StoreBoard.of_default_group()

    @property
    def group(self) -> dist.ProcessGroup:
        """The torch process group. Raises CommError once closed."""
        if self._group is None or not dist.is_initialized():
            raise CommError(f"the {self.backend} communicator is closed", hint="close it after the last call")
        return self._group

    def _work(self, collective: Collective, begin: Callable[[], Any], *held: Any) -> Work:
        def failed(error: Exception) -> CommError:
            return self.error_of(collective, error)

        try:
            begun = begin()
        except RuntimeError as error:
            raise failed(error) from error
        works = begun if isinstance(begun, list) else [begun] if begun is not None else []
        if not works:
            return DONE
        written = [part.target for part in collective.parts or (collective,) if part.target is not None]
        if collective.operation is Operation.BROADCAST and self.rank == collective.root:
            written = []
        return ended(TorchWork(works, written, (*held, collective), failed), collective)

    def error_of(self, collective: Collective, error: Exception, missing: Sequence[int] = ()) -> CommError:
        """The error to raise for a failed call; `missing` are the global ranks that have certainly not taken part."""
        who = f"rank {self.ranks[self.rank]}"
        lost = f": ranks {list(missing)} did not take part" if missing else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if is_timeout(error):
            return CommTimeout(
                f"{collective} on {who} timed out after {self.timeout_s:g} s{lost} ({reason})",
                missing_ranks=missing,
                hint="find out what the missing ranks do: stopped, dead, or in another call",
            )
        return CommError(
            f"{collective} on {who} failed{lost} ({reason})",
            hint="look for the first error among the ranks: a rank that ends closes its connections" if missing else "",
            missing_ranks=missing,
        )


def _start_messages(messages: list[dist.P2POp]) -> list[Any]:
    """Start all messages of one group at once."""
    if type(messages[0].group) is dist.ProcessGroup:
        works: list[Any] = dist.batch_isend_irecv(messages)
        return works
    # A backend that is a group itself: torch 2.14 looks for the backend inside of it and finds none.
    return [message.op(message.tensor, message.peer, message.group) for message in messages]


_splits: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Counts the splits of each group."""


def name_of_split(group: dist.ProcessGroup) -> str:
    """Name the next group of ranks of `group`, equally on all of them. See [Note: Names of process groups]."""
    return f"{group.group_name}/{next(_splits.setdefault(group, count()))}"


@contextmanager
def _named(name: str | None) -> Iterator[None]:
    """Let torch give the group that is made inside the name `name`, where it is given."""
    module: Any = dist.distributed_c10d
    names = getattr(module, "_process_group_name", None)
    if name is None or names is None:
        yield
        return
    module._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        module._process_group_name = names


def new_group(
    ranks: tuple[int, ...], backend: str, timeout_s: float, *, everybody: bool = True, name: str | None = None
) -> dist.ProcessGroup | None:
    """Make a process group of global `ranks`, None on others; `everybody` calls, else members with one `name`."""
    try:
        with _named(name):
            group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=not everybody,
            )
    except RuntimeError as error:
        kind = CommTimeout if is_timeout(error) else CommError
        raise kind(
            f"ranks {list(ranks)} could not form a {backend} group: {str(error).splitlines()[0]}",
            hint="all of them must ask for it, and reach each other (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
            value=ranks,
        ) from error
    return group if isinstance(group, dist.ProcessGroup) else None


def is_timeout(error: Exception) -> bool:
    """Whether torch gave up waiting; its backends have no common exception for that."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
