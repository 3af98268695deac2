"""A group of one rank: every collective is a copy at most, and in place not even that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.comm.arguments import check_members, check_reduction, check_root, is_own_part
from polyaccel.comm.base import NO_INFO, CallInfo, Communicator, DoneWork, Work, check_collective
from polyaccel.errors import CommError
from polyaccel.types import ReduceOp

_DONE = DoneWork()


class SingleCommunicator(Communicator):
    """The communicator of world size 1. Connects to nobody and is deterministic."""

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

    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        check_reduction("all_reduce", buffer.dtype, op)
        return _DONE

    def reduce_scatter(
        self,
        out: Buffer,
        source: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
        info: CallInfo = NO_INFO,
    ) -> Work:
        check_reduction("reduce_scatter", source.dtype, op)
        return self._copy("reduce_scatter", out, source)

    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        return self._copy("all_gather", out, source)

    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("broadcast", root, 1)
        return _DONE

    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        return self._copy("all_to_all", out, source)

    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        raise CommError(f"send to rank {to}: this group has one rank", cure="start more ranks", value=to)

    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        raise CommError(f"recv from rank {source}: this group has one rank", cure="start more ranks", value=source)

    def barrier(self, *, info: CallInfo = NO_INFO) -> None:
        return None

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        check_members("split", tuple(ranks), 1)
        return self

    def close(self) -> None:
        return None

    @staticmethod
    def _copy(kind: str, out: Buffer, source: Buffer) -> Work:
        check_collective(kind, out, source, world_size=1, parts_of="out")
        if not is_own_part(kind, out, source, 0):
            out.copy_from(source)
        return _DONE
