"""gloo keeps the contract of communicators over real processes: by our exchange, and by torch's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyaccel.comm.backends.torch.communicator import TorchCommunicator
from polyaccel.comm.backends.torch.exchange import ExchangeCommunicator
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.testkit.comm.contract import CommContract
from polyaccel.testkit.comm.values import combined, expect, put, values_of
from polyaccel.testkit.ranks.procs import RankPool


class TestGloo(CommContract):
    @pytest.fixture(autouse=True)
    def _pools(self, rank_pool: Callable[[int], RankPool]) -> None:
        self.pools = rank_pool

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pools(world_size).run(body, *args)


class TestTorchsOwnCollectives(CommContract):
    """What nccl, xccl and hccl use, on the only backend that runs here. gloo has no average."""

    world_sizes = (2,)
    test_all_reduce = test_reduce_scatter = None

    @pytest.fixture(autouse=True)
    def _pools(self, rank_pool: Callable[[int], RankPool]) -> None:
        self.pools = rank_pool

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pools(world_size).run(by_torch, body, *args)

    def test_reductions(self) -> None:
        self.check(sums_and_maxima)


def by_torch(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    assert isinstance(comm, ExchangeCommunicator)
    return body(TorchCommunicator(comm.group, comm.ranks, comm.accelerator, "gloo", 20.0), *args)


def sums_and_maxima(comm: Communicator) -> int:
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD):
        whole = put(comm, values_of(comm.rank, 10), DType.FLOAT32)
        part = comm.allocate(5, DType.FLOAT32)
        comm.reduce_scatter(part, whole, op, async_op=True).wait()
        expected = combined(comm, 10, op)
        expect(comm, part, expected[5 * comm.rank : 5 * comm.rank + 5], f"reduce_scatter {op}")
        whole = put(comm, values_of(comm.rank, 10), DType.FLOAT32)
        comm.all_reduce(whole, op)
        expect(comm, whole, expected, f"all_reduce {op}")
    return 1
