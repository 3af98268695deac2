"""A communicator over another one: everything is the inner one's but what a subclass does otherwise in `start`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

from polyaccel.comm.base import Communicator, StatusStore
from polyaccel.comm.collective import ALL_OPERATIONS, UNEVEN_PARTS, Collective, Operation
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType


class WrappedCommunicator(Communicator):
    """The group of `inner`, which gives the numbers of calls that have none."""

    native_ops: ClassVar[frozenset[Operation]] = ALL_OPERATIONS
    native_uneven_ops: ClassVar[frozenset[Operation]] = UNEVEN_PARTS

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.ranks = inner.ranks
        self.backend = inner.backend
        self.accelerator = inner.accelerator
        self.timeout_s = inner.timeout_s
        self.deterministic = inner.deterministic
        self.summed_first = inner.summed_first
        self.supports_strided = inner.supports_strided
        self.coalesces_small_sends = inner.coalesces_small_sends
        self.host_topology = inner.host_topology

    def start(self, collective: Collective) -> Work:
        return self.inner.call(collective)

    def next_number(self) -> int | None:
        return None

    def last_number(self) -> int | None:
        return None

    def inside(self, number: int | None) -> AbstractContextManager[None]:
        return self.inner.inside(number)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.inner.all_gather_bytes(data)

    def close(self) -> None:
        self.inner.close()

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        return self.inner.allocate(numel, dtype)

    def board(self) -> StatusStore | None:
        return self.inner.board()
