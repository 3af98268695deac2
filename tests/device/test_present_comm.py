"""The communicators' contract over the own backend of every device that is present here, a rank a device: nccl and its
like. A skip with its reason for each of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from present import STATUSES, each_device, need

from polyaccel.accelerators.detect import choose_accelerator
from polyaccel.registry import PluginStatus
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.comm.faults import CommFaultContract
from polyaccel.testkit.ranks.procs import RankPool


@each_device
def test_ranks_on_devices_meet(status: PluginStatus) -> None:
    need(status)
    name, ranks = status.info.name, choose_accelerator(status.info.name).device_count()
    if ranks < 2:
        pytest.skip(f"{name}: one device, and a library such as nccl has no two ranks on one")
    with _pool(name, ranks) as pool:
        assert pool.run(_meet) == [ranks] * ranks


def _meet(comm: Any) -> int:
    return len(comm.all_gather_object(comm.rank))


def _pool(accelerator: str, world_size: int, **limits: float) -> RankPool:
    backend = choose_accelerator(accelerator).communication_backend_name()
    return RankPool(world_size, backend=backend, accelerator=accelerator, by_port=True, **limits)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str, int], RankPool]]:
    started: dict[tuple[str, int], RankPool] = {}

    def pool(accelerator: str, world_size: int) -> RankPool:
        key = (accelerator, world_size)
        if key not in started:
            started[key] = _pool(*key)
        return started[key]

    yield pool
    for one in started.values():
        one.close()


def _contract_of(accelerator: str, sizes: tuple[int, ...]) -> type[CommContract]:
    class OnDevices(CommContract):
        world_sizes = sizes

        @pytest.fixture(autouse=True)
        def _pools(self, pools: Callable[[str, int], RankPool]) -> None:
            self.pools = pools

        def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
            return self.pools(accelerator, world_size).run(body, *args)

    return OnDevices


def _faults_of(accelerator: str, ranks: int) -> type[CommFaultContract]:
    class OnDevices(CommFaultContract):
        world_size = ranks

        def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
            return _pool(accelerator, world_size, comm_timeout_s=comm_timeout_s, grace_s=grace_s)

    return OnDevices


# pytest finds two classes a device that has a second one beside it, and none for those that are absent.
for _status in STATUSES:
    _count = choose_accelerator(_status.info.name).device_count() if _status.usable else 0
    if _count > 1:
        _sizes = tuple(size for size in (2, 3, 4) if size <= _count)
        globals()[f"Test{_status.info.name.title()}"] = _contract_of(_status.info.name, _sizes)
        globals()[f"Test{_status.info.name.title()}Faults"] = _faults_of(_status.info.name, min(_count, 3))
