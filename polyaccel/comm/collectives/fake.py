"""A group with one present rank, for estimates of what it would do: no value matters."""

from __future__ import annotations

from collections.abc import Sequence

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.arguments import check_members
from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import Collective
from polyaccel.comm.work import DONE, Work


class FakeCommunicator(Communicator):
    """The first of `world_size` ranks, to which the others send nothing: collectives leave their buffers as they are,
    and of objects the others have the same. For tensors without values, so memory is not looked at either."""

    def __init__(self, world_size: int, accelerator: Accelerator) -> None:
        self.rank = 0
        self.world_size = world_size
        self.ranks = tuple(range(world_size))
        self.backend = "absent"
        self.accelerator = accelerator
        self.timeout_s = 0.0

    def call(self, collective: Collective) -> Work:
        return self.start(collective)

    def start(self, collective: Collective) -> Work:
        return DONE

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.world_size

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        check_members("split", tuple(ranks), self.world_size)
        return FakeCommunicator(len(ranks), self.accelerator) if self.rank in ranks else None

    def close(self) -> None:
        return None
