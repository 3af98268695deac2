"""Group of one rank: every collective is a copy at most, and in place not even that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.arguments import check_members
from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import ALL_OPERATIONS, MESSAGES, UNEVEN_PARTS, Collective, Operation
from polyaccel.comm.work import DONE, Work
from polyaccel.errors import CommError


class SingleCommunicator(Communicator):
    """The communicator of world size 1. It connects to nothing and is deterministic.

    Args:
        accelerator: Device of the buffers.
        timeout_s: Time limit in seconds, for readers of the attribute: no call blocks.
        global_rank: Rank of this process in the job.
        backend: Name of the backend that it stands for.
    """

    native_ops: ClassVar[frozenset[Operation]] = ALL_OPERATIONS
    native_uneven_ops: ClassVar[frozenset[Operation]] = UNEVEN_PARTS
    deterministic = True

    def __init__(
        self, accelerator: Accelerator, *, timeout_s: float, global_rank: int = 0, backend: str = "local"
    ) -> None:
        self.rank = 0
        self.world_size = 1
        self.ranks = (global_rank,)
        self.backend = backend
        self.accelerator = accelerator
        self.timeout_s = timeout_s

    def start(self, collective: Collective) -> Work:
        if collective.operation in MESSAGES and (collective.parts or collective.operation is not Operation.BATCH):
            raise CommError(
                f"{collective.described()}: this group has one rank", hint="start more ranks", value=collective.root
            )
        collective.check(0, 1)
        source, target = collective.source, collective.target
        if source is not None and target is not None and target.numel and source.data_ptr() != target.data_ptr():
            target.copy_from(source)
        return DONE

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        check_members("split", tuple(ranks), 1)
        return self

    def close(self) -> None:
        return None
