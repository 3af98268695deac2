"""Device buffers over a communicator that moves host memory: staged through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.comm.arguments import check_equal_parts, is_own_part
from polyaccel.comm.base import NO_INFO, Board, CallInfo, Communicator, Work, check_collective
from polyaccel.comm.scratch import ScratchPool
from polyaccel.comm.single import SingleCommunicator
from polyaccel.types import ReduceOp


class StagedWork(Work):
    """A collective of host memory; `wait` copies its result to the device."""

    def __init__(self, inner: Work, finish: Callable[[], None]) -> None:
        self._inner = inner
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        self._inner.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_done(self) -> bool:
        return self._inner.is_done()


class StagedCommunicator(Communicator):
    """`inner`, which works on the host, for buffers of `accelerator`.

    What is sent is copied to pinned host memory within the call, which waits for the current stream; the result is
    copied back in `wait`. Reductions run on the host, in `inner`'s order.
    """

    def __init__(self, inner: Communicator, accelerator: Accelerator) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.ranks = inner.ranks
        self.backend = inner.backend
        self.timeout_s = inner.timeout_s
        self.deterministic = inner.deterministic
        self.accelerator = accelerator
        self._inner = inner
        self._pool = ScratchPool(accelerator, pinned=True)

    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        def start(host: Buffer) -> Work:
            return self._inner.all_reduce(host, op, async_op=async_op, info=info)

        return self._staged(buffer, start, async_op, inputs=[(0, buffer)], out=(0, buffer))

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
        is_own_part("reduce_scatter", source, out, self.rank)
        own = self.rank * out.numel

        def start(host: Buffer) -> Work:
            return self._inner.reduce_scatter(host.view(own, out.numel), host, op, async_op=async_op, info=info)

        return self._staged(source, start, async_op, inputs=[(0, source)], out=(own, out))

    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_collective("all_gather", out, source, world_size=self.world_size, parts_of="out")
        is_own_part("all_gather", out, source, self.rank)
        own = self.rank * source.numel

        def start(host: Buffer) -> Work:
            return self._inner.all_gather(host, host.view(own, source.numel), async_op=async_op, info=info)

        return self._staged(out, start, async_op, inputs=[(own, source)], out=(0, out))

    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        def start(host: Buffer) -> Work:
            return self._inner.broadcast(host, root, async_op=async_op, info=info)

        is_root = self.rank == root
        inputs = [(0, buffer)] if is_root else []
        return self._staged(buffer, start, async_op, inputs=inputs, out=None if is_root else (0, buffer))

    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_equal_parts(out, source, self.world_size)
        arrived = self._pool.take(out.numel, out.dtype)

        def start(host: Buffer) -> Work:
            return self._inner.all_to_all(arrived.view(0, out.numel), host, async_op=async_op, info=info)

        return self._staged(source, start, async_op, inputs=[(0, source)], out=(0, out), arrived=arrived)

    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        def start(host: Buffer) -> Work:
            return self._inner.send(host, to, async_op=async_op, info=info)

        return self._staged(buffer, start, async_op, inputs=[(0, buffer)], out=None)

    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        def start(host: Buffer) -> Work:
            return self._inner.recv(host, source, async_op=async_op, info=info)

        return self._staged(buffer, start, async_op, inputs=[], out=(0, buffer))

    def barrier(self, *, info: CallInfo = NO_INFO) -> None:
        self._inner.barrier(info=info)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._inner.all_gather_object(value)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        part = self._inner.split(ranks)
        if part is None or part.world_size > 1:
            return None if part is None else StagedCommunicator(part, self.accelerator)
        part.close()
        return SingleCommunicator(
            self.accelerator, timeout_s=self.timeout_s, global_rank=part.ranks[0], backend=self.backend
        )

    def close(self) -> None:
        self._inner.close()

    def board(self) -> Board | None:
        return self._inner.board()

    def _staged(
        self,
        whole: Buffer,
        start: Callable[[Buffer], Work],
        async_op: bool,
        *,
        inputs: list[tuple[int, Buffer]],
        out: tuple[int, Buffer] | None,
        arrived: Buffer | None = None,
    ) -> Work:
        """`start` with as much host memory as `whole` has, which holds `inputs` at their offsets; afterwards `out` gets
        what stands at its offset there, or in `arrived`."""
        block = self._pool.take(whole.numel, whole.dtype)
        host = block.view(0, whole.numel)
        for offset, buffer in inputs:
            host.view(offset, buffer.numel).copy_from(buffer)
        stream = self.accelerator.current_stream()
        stream.synchronize()  # pinned copies are queued, and the host sends what is there

        def finish() -> None:
            if out is not None:
                offset, target = out
                target.copy_from((block if arrived is None else arrived).view(offset, target.numel))
                self.accelerator.current_stream().synchronize()  # the host memory serves the next call
            for used in (block, arrived):
                if used is not None:
                    self._pool.give_back(used)

        work = StagedWork(start(host), finish)
        if not async_op:
            work.wait()
        return work
