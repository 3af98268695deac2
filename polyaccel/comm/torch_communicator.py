"""Collectives of torch process groups: the backend's own ones, for devices whose libraries do them best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.comm.arguments import (
    Call,
    check_equal_parts,
    check_members,
    check_reduction,
    check_root,
    is_own_part,
)
from polyaccel.comm.base import (
    NO_INFO,
    Board,
    CallInfo,
    Communicator,
    DoneWork,
    Work,
    check_collective,
)
from polyaccel.comm.objects import gather_objects
from polyaccel.comm.single import SingleCommunicator
from polyaccel.comm.torch_board import StoreBoard
from polyaccel.errors import CommError, CommTimeout
from polyaccel.types import DType, ReduceOp

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
_DONE = DoneWork()


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """The flat tensor over a buffer's memory, without a copy, whatever framework made it."""
    raw = buffer.raw
    return raw if isinstance(raw, torch.Tensor) else from_dlpack(buffer)


class TorchWork(Work):
    """A collective of a torch process group. Holds its buffers until waited for."""

    def __init__(
        self, work: dist.Work, written: Buffer | None, held: tuple[Any, ...], failed: Callable[[Exception], CommError]
    ) -> None:
        self._work: dist.Work | None = work
        self._written = written
        self._held = held
        self._failed = failed

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        if self._written is not None:
            self._written.mark_written()
        self._work, self._written, self._held = None, None, ()

    def is_done(self) -> bool:
        return self._work is None or self._work.is_completed()


class TorchCommunicator(Communicator):
    """A torch process group's own collectives. `wait` orders the current stream after them, as torch's does.

    The device's library decides the order of additions, hence not deterministic; AVG is its own where it has one.
    """

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
        self._calls = 0

    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        check_reduction("all_reduce", buffer.dtype, op)
        call = Call("all_reduce", buffer.numel, buffer.dtype, op.value, info)
        tensor = tensor_of(buffer)
        return self._start(
            call, async_op, buffer, lambda: dist.all_reduce(tensor, _TORCH_OPS[op], self.group, async_op=True)
        )

    def reduce_scatter(
        self,
        out: Buffer,
        source: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
        info: CallInfo = NO_INFO,
    ) -> Work:
        check_collective("reduce_scatter", out, source, world_size=self.world_size, parts_of="source")
        check_reduction("reduce_scatter", source.dtype, op)
        is_own_part("reduce_scatter", source, out, self.rank)
        call = Call("reduce_scatter", source.numel, source.dtype, op.value, info)
        to, what = tensor_of(out), tensor_of(source)
        return self._start(
            call, async_op, out, lambda: _reduce_scatter(to, what, _TORCH_OPS[op], self.group, async_op=True), what
        )

    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_collective("all_gather", out, source, world_size=self.world_size, parts_of="out")
        is_own_part("all_gather", out, source, self.rank)
        call = Call("all_gather", out.numel, out.dtype, info=info)
        to, what = tensor_of(out), tensor_of(source)
        return self._start(call, async_op, out, lambda: _all_gather(to, what, self.group, async_op=True), what)

    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("broadcast", root, self.world_size)
        call = Call("broadcast", buffer.numel, buffer.dtype, f"from {root}", info)
        tensor, source = tensor_of(buffer), self.ranks[root]
        return self._start(call, async_op, buffer, lambda: dist.broadcast(tensor, source, self.group, async_op=True))

    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_equal_parts(out, source, self.world_size)
        call = Call("all_to_all", out.numel, out.dtype, info=info)
        to, what = tensor_of(out), tensor_of(source)
        return self._start(
            call, async_op, out, lambda: dist.all_to_all_single(to, what, group=self.group, async_op=True), what
        )

    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("send", to, self.world_size)
        call = Call("send", buffer.numel, buffer.dtype, f"to {to}", info)
        tensor, peer = tensor_of(buffer), self.ranks[to]
        return self._start(call, async_op, None, lambda: dist.isend(tensor, peer, self.group), tensor)

    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("recv", source, self.world_size)
        call = Call("recv", buffer.numel, buffer.dtype, f"from {source}", info)
        tensor, peer = tensor_of(buffer), self.ranks[source]
        return self._start(call, async_op, buffer, lambda: dist.irecv(tensor, peer, self.group))

    def barrier(self, *, info: CallInfo = NO_INFO) -> None:
        # torch's own barrier guesses a device and warns about it.
        self.all_reduce(self.accelerator.allocate(1, DType.FLOAT32), info=info)
        self.accelerator.synchronize()

    def all_gather_object(self, value: Any) -> list[Any]:
        return gather_objects(self, value)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        members = tuple(ranks)
        check_members("split", members, self.world_size)
        outer = tuple(self.ranks[rank] for rank in members)
        if outer != tuple(sorted(outer)) and not self.deterministic:
            raise CommError(
                f"backend {self.backend!r} orders the ranks of a group itself, it cannot keep {list(members)}",
                cure="list the ranks in ascending order",
                value=members,
            )
        if len(outer) == 1:
            if outer[0] != self.ranks[self.rank]:
                return None
            return SingleCommunicator(
                self.accelerator, timeout_s=self.timeout_s, global_rank=outer[0], backend=self.backend
            )
        if self.world_size < dist.get_world_size() and self.rank not in members:
            return None
        group = new_group(outer, self.backend, self.timeout_s, everybody=self.world_size == dist.get_world_size())
        return None if group is None else type(self)(group, outer, self.accelerator, self.backend, self.timeout_s)

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def board(self) -> Board | None:
        return StoreBoard.of_default_group()

    @property
    def group(self) -> dist.ProcessGroup:
        """The torch process group. Raises CommError once closed."""
        if self._group is None or not dist.is_initialized():
            raise CommError(f"the {self.backend} communicator is closed", cure="close it after the last call")
        return self._group

    def _start(
        self, call: Call, async_op: bool, written: Buffer | None, start: Callable[[], dist.Work | None], *held: Any
    ) -> Work:
        seq = self._calls
        self._calls += 1
        self.group  # noqa: B018 - a closed communicator says so before torch says something else

        def failed(error: Exception) -> CommError:
            return self._failure(call, seq, error)

        try:
            work = start()
        except RuntimeError as error:
            raise failed(error) from error
        if work is None:
            return _DONE
        ours = TorchWork(work, written, (written, *held), failed)
        if not async_op:
            ours.wait()
        return ours

    def _failure(self, call: Call, seq: int, error: Exception, missing: Sequence[int] = ()) -> CommError:
        """The error to raise for a failed call; `missing` are the global ranks known not to have taken part."""
        who = f"rank {self.ranks[self.rank]}"
        lost = f": ranks {list(missing)} did not take part" if missing else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if is_timeout(error):
            return CommTimeout(
                f"#{seq} {call} on {who} timed out after {self.timeout_s:g} s{lost} ({reason})",
                missing_ranks=missing,
                cure="find out what the missing ranks do: stopped, dead, or in another call",
                value=tuple(missing),
            )
        return CommError(
            f"#{seq} {call} on {who} failed{lost} ({reason})",
            cure="look for the first error among the ranks: a rank that ends closes its connections" if missing else "",
            value=tuple(missing),
        )


def new_group(
    ranks: tuple[int, ...], backend: str, timeout_s: float, *, everybody: bool = True
) -> dist.ProcessGroup | None:
    """A process group of those global `ranks`, None on the others. Raises CommError when it cannot be made.

    `everybody`: all processes call this, members or not. Otherwise only members do, which works as long as they were in
    equally many groups before (torch names such a group by their number).
    """
    try:
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
            cure="all of them must ask for it, and reach each other (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
            value=ranks,
        ) from error
    return group if isinstance(group, dist.ProcessGroup) else None


def is_timeout(error: Exception) -> bool:
    """Whether torch gave up waiting; its backends have no common exception for that."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
