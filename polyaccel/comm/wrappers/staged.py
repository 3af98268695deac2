"""Device buffers over a communicator that moves host memory: staged through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import ALL_OPERATIONS, Collective, Operation, ended
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.work import CombinedWork, Work
from polyaccel.comm.wrappers.wrapped import WrappedCommunicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType

_OF_ONE = frozenset({Operation.ALL_REDUCE, Operation.BROADCAST})
_IN_SOURCE = frozenset({Operation.REDUCE_SCATTER, Operation.SCATTER})
_IN_TARGET = frozenset({Operation.ALL_GATHER, Operation.GATHER})


class StagedCommunicator(WrappedCommunicator):
    """`inner`, which works on the host, for buffers of `accelerator`.

    What is sent is copied to host memory (pinned, of a device that pins) within the call, which waits for the current
    stream; the result is copied back in `wait`. Reductions run on the host, in `inner`'s order.
    """

    native_ops: ClassVar[frozenset[Operation]] = ALL_OPERATIONS - {Operation.BATCH}

    def __init__(self, inner: Communicator, accelerator: Accelerator) -> None:
        super().__init__(inner)
        self.supports_strided = False
        self.accelerator = accelerator
        # Pinned memory only of a device that has it: others allocate for it what `inner`'s kernels need not support.
        pins = accelerator.capabilities().host_pinning
        self._pool = ScratchPool(accelerator if pins else inner.accelerator, pinned=pins)

    def start(self, collective: Collective) -> Work:
        """Run the collective on host memory: one block where buffers coincide or nest, else one for each."""
        collective.check(self.rank, self.world_size)
        kind, source, target = collective.operation, collective.source, collective.target
        blocks: list[Buffer] = []

        def stage(numel: int, dtype: DType) -> Buffer:
            blocks.append(self._pool.take(numel, dtype))
            return blocks[-1].view(0, numel)

        from_host = to_host = None
        own = slice(0, 0)
        if kind in _IN_SOURCE or kind in _IN_TARGET:
            bounds = collective.bounds(self.world_size)
            own = slice(bounds[self.rank], bounds[self.rank + 1])
        if kind in _OF_ONE and target is not None:
            from_host = to_host = stage(target.numel, target.dtype)
        elif kind in _IN_SOURCE and source is not None:
            from_host = stage(source.numel, source.dtype)
            to_host = from_host.view(own.start, own.stop - own.start)
        elif kind in _IN_TARGET and target is not None:
            to_host = stage(target.numel, target.dtype)
            from_host = to_host.view(own.start, own.stop - own.start)
        else:
            from_host = None if source is None else stage(source.numel, source.dtype)
            to_host = None if target is None else stage(target.numel, target.dtype)
        if kind is Operation.BROADCAST:
            source, target = (source, None) if self.rank == collective.root else (None, target)
        if source is not None and from_host is not None:
            from_host.copy_from(source)
        self.accelerator.current_stream().synchronize()  # pinned copies are queued, and the host sends what is there

        def finish() -> None:
            if target is not None and to_host is not None:
                target.copy_from(to_host)
                self.accelerator.current_stream().synchronize()  # the host memory serves the next call
            for block in blocks:
                self._pool.give_back(block)

        return ended(CombinedWork([self.inner.call(collective.on(from_host, to_host))], finish), collective)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        part = self.inner.split(ranks)
        if part is None or part.world_size > 1:
            return None if part is None else StagedCommunicator(part, self.accelerator)
        part.close()
        return SingleCommunicator(
            self.accelerator, timeout_s=self.timeout_s, global_rank=part.ranks[0], backend=self.backend
        )

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        return self.accelerator.allocate(numel, dtype)
