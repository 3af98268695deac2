"""Shards in files are read ahead of their gathers: in one order on all ranks, within bounds, failing clearly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.base import Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import OffloadError
from polyaccel.offload.device import DeviceTier
from polyaccel.offload.nvme import NvmeTier
from polyaccel.offload.state_file import StateFile
from polyaccel.offload.tier import Fetch, TierOptions
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.buckets.gathered_buckets import GatheredBuckets
from polyaccel.zero.buckets.param_listener import ParamListener
from polyaccel.zero.buckets.sharded_bucket import ShardedBucket
from polyaccel.zero.plan.bucket_plan import plan_step
from polyaccel.zero.plan.gather_schedule import EventKind, SyncPoint, event, merge_schedules
from polyaccel.zero.plan.layout import plan_layout
from polyaccel.zero.plan.policy import GatherPolicy, StepPolicy, ZeroPolicy
from polyaccel.zero.resources import Communicators

NUMEL = 64
HOST = CpuAccelerator("numpy")
F32 = DType.FLOAT32


class Reading(Fetch):
    """Writes nothing to its target before it is finished."""

    def __init__(self, disk: Disk, source: Buffer, target: Buffer) -> None:
        self._disk, self._source, self._target = disk, source, target
        self.index = disk.indices[id(source)]
        disk.log.append(f"read {self.index}")
        disk.under_way += 1

    def finish(self) -> None:
        self._disk.under_way -= 1
        if self.index in self._disk.broken:
            raise OffloadError(f"shard {self.index} cannot be read")
        self._disk.log.append(f"have {self.index}")
        self._target.copy_from(self._source)

    def cancel(self) -> None:
        if self.index not in self._disk.broken:
            self._disk.under_way -= 1
            self._disk.log.append(f"drop {self.index}")


class Ignores(ParamListener):
    """A frontend that looks at nothing."""

    def read_param(self, fqn: str) -> Buffer:
        raise NotImplementedError


class Disk(DeviceTier):
    """A tier whose contents are elsewhere. `log` has what was done with the shards."""

    is_resident = False

    def __init__(self) -> None:
        super().__init__()
        self.indices: dict[int, int] = {}
        self.log: list[str] = []
        self.broken: set[int] = set()
        self.under_way = 0

    def fetch(self, source: Buffer, target: Buffer) -> Fetch:
        return Reading(self, source, target)

    def take(self) -> str:
        told, self.log = ", ".join(self.log), []
        return told


def make(communicator: Any, count: int, **policy: int) -> tuple[GatheredBuckets, Disk]:
    """`count` buckets of 64 elements, all of which have the value of their index; the shards are on the disk."""
    disk = Disk()
    params = [ParamSpec(str(index), (NUMEL,), F32) for index in range(count)]
    layout = plan_layout(params, mesh=Mesh.flat(communicator.world_size), max_bucket_numel=NUMEL)
    places = []
    for plan in plan_step(layout, ZeroPolicy.of_stage(3), StepPolicy()).buckets:
        bucket = plan.bucket
        own = communicator.accelerator.allocate(bucket.shard_numel, F32)
        own.fill(float(bucket.index))
        disk.indices[id(own)] = bucket.index
        places.append(ShardedBucket(plan, own, disk))
    real = communicator.all_gather

    def noted(*args: Any, bucket: Any, **kwargs: Any) -> Any:
        disk.log.append(f"gather {bucket}")
        return real(*args, bucket=bucket, **kwargs)

    communicator.all_gather = noted
    bounds = GatherPolicy(**{"max_live_numel": 10**9, "prefetch_numel": 0, "max_reuse_numel": 0, **policy})
    return GatheredBuckets(places, bounds, Communicators.plain(communicator), Ignores(), nullcontext), disk


def pass_by(gathering: GatheredBuckets, kind: EventKind, index: int) -> None:
    """If that is what the course has next."""
    if gathering.schedule.peek() == event(kind, index):
        gathering.schedule.step()


def expect(gathering: GatheredBuckets, units: Sequence[Sequence[int]]) -> None:
    """A step begins that is known to use these units."""
    gathering.end_step()
    events = [event(kind, index) for unit in units for kind in (EventKind.UNSHARD, EventKind.RESHARD) for index in unit]
    gathering.schedule.begin_step(merge_schedules((), [[(SyncPoint.FORWARD, tuple(events))]]))


def use(gathering: GatheredBuckets, disk: Disk, *indices: int) -> None:
    """A unit computes with these buckets."""
    for index in indices:
        pass_by(gathering, EventKind.UNSHARD, index)
        gathering.unshard(index, ahead=True)
    disk.log.append("compute")
    for index in indices:
        assert set(gathering.full(index).raw.tolist()) == {float(index)}
        pass_by(gathering, EventKind.RESHARD, index)
        gathering.reshard(index)


def test_the_next_unit_is_read_while_one_computes_and_gathered_when_it_begins():
    def work(communicator):
        gathering, disk = make(communicator, 6, prefetch_numel=2 * NUMEL)
        units = ((0, 1), (2, 3), (4, 5))
        expect(gathering, units)
        told = []
        for unit in units:
            use(gathering, disk, *unit)
            told.append(disk.take())
        assert disk.under_way == 0
        return told

    first, second = run_threads(2, work)
    assert first == second
    assert first == [
        "read 0, have 0, gather 0, read 1, read 2, have 1, gather 1, read 3, compute",
        "have 2, gather 2, read 4, have 3, gather 3, read 5, compute",
        "have 4, gather 4, have 5, gather 5, compute",
    ]


def test_with_room_for_more_units_gathers_are_ahead_too():
    def work(communicator):
        gathering, disk = make(communicator, 4, prefetch_numel=2 * NUMEL)
        expect(gathering, ((0,), (1,), (2,), (3,)))
        use(gathering, disk, 0)
        disk.take()
        use(gathering, disk, 1)
        return disk.take()

    assert run_threads(2, work)[0] == "have 1, gather 1, read 3, have 2, gather 2, compute"


def test_what_was_read_for_nothing_is_let_go():
    def work(communicator):
        gathering, disk = make(communicator, 4, prefetch_numel=2 * NUMEL)
        expect(gathering, ((0,), (1,), (2,), (3,)))
        use(gathering, disk, 0)
        assert disk.under_way == 2
        assert gathering.live_numel == 2 * NUMEL
        assert gathering.unsharded_or_none(1) is None  # somebody writes to the shard
        assert (disk.under_way, gathering.live_numel) == (1, NUMEL)
        gathering.end_step()
        assert (disk.under_way, gathering.live_numel) == (0, 0)
        assert disk.take().endswith("compute, drop 1, drop 2")
        use(gathering, disk, 1)

    run_threads(2, work)


def test_a_shard_that_cannot_be_read_is_an_error_and_never_taken_for_whole():
    def work(communicator):
        gathering, disk = make(communicator, 3, prefetch_numel=NUMEL)
        expect(gathering, ((0,), (1,), (2,)))
        use(gathering, disk, 0)
        disk.broken.add(1)
        for _ in range(2):
            with pytest.raises(OffloadError) as caught:
                gathering.unshard(1)
            assert "1" in str(caught.value)
            assert not gathering.is_whole(1)
        assert (gathering.live_numel, disk.under_way) == (0, 0)
        disk.broken.clear()
        use(gathering, disk, 1)

    run_threads(1, work)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ranks_gather_in_one_order_whatever_is_asked(data):
    """A `LocalWorld` refuses gathers that differ; values are right, and bounds are kept."""
    bound = data.draw(st.integers(1, 5)) * NUMEL
    policy = {
        "max_live_numel": bound,
        "prefetch_numel": data.draw(st.integers(0, 5)) * NUMEL,
        "max_reuse_numel": data.draw(st.integers(0, 5)) * NUMEL,
    }
    uses = st.tuples(st.integers(0, 4), st.booleans())
    program = data.draw(st.lists(st.lists(uses, max_size=8), min_size=1, max_size=3))

    def work(communicator):
        gathering, disk = make(communicator, 5, **policy)
        for step in program:
            held: list[int] = []
            for index, drops in step:
                gathering.unshard(index, ahead=True)
                held.append(index)
                assert set(gathering.full(index).raw.tolist()) == {float(index)}
                assert gathering.live_numel <= max(bound, len(set(held)) * NUMEL)
                if drops:
                    gathering.reshard(held.pop(0))
            while held:
                gathering.reshard(held.pop())
            expect(gathering, [[index] for index, _ in step])
            assert (gathering.live_numel, disk.under_way) == (0, 0)

    run_threads(2, work)


# Through host buffers to a device that is not the host.


class Far(CpuAccelerator):
    """Counts the host buffers that were made for it."""

    def __init__(self) -> None:
        super().__init__("numpy")
        self.rooms = 0

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        self.rooms += pinned
        return super().allocate(numel, dtype)

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), host_pinning=True)


def shards(path: Path, buffer_count: int, piece_numel: int) -> tuple[NvmeTier, Far, list[Buffer]]:
    """Three files, 5 pieces each at a `piece_numel` of 300."""
    device, tier = Far(), NvmeTier()
    tier.open(device, HOST, TierOptions(path=str(path), buffer_count=buffer_count, piece_numel=piece_numel))
    sources = [tier.allocate(f"shard{index}", 1500, F32) for index in range(3)]
    for index, source in enumerate(sources):
        source.from_bytes((np.arange(1500, dtype=np.float32) + 10_000 * index).tobytes())
    return tier, device, sources


@pytest.mark.parametrize("buffer_count", [1, 2, 3, 20])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_fetches_share_their_buffers_and_end_in_any_order(tmp_path, monkeypatch, buffer_count, order):
    started = []
    start = StateFile.start_reading
    monkeypatch.setattr(StateFile, "start_reading", lambda self, *rest: started.append(self) or start(self, *rest))
    tier, device, sources = shards(tmp_path, buffer_count, piece_numel=300)
    for _ in range(2):
        targets = [device.allocate(1500, F32) for _ in sources]
        started.clear()
        fetches = [tier.fetch(source, target) for source, target in zip(sources, targets, strict=True)]
        assert len(started) == min(buffer_count - 1, 15)  # ahead of any need, but for the room left to who needs it
        for index in order:
            fetches[index].finish()
            assert targets[index].raw.tolist() == [10_000.0 * index + place for place in range(1500)]
        assert len(started) == 15
    assert device.rooms <= buffer_count
    tier.close()


def test_what_is_dropped_or_cannot_be_read_gives_its_buffers_back(tmp_path):
    tier, device, sources = shards(tmp_path, buffer_count=3, piece_numel=300)
    target = device.allocate(1500, F32)
    sources[1].file.path.write_bytes(b"short")  # type: ignore[attr-defined]
    for _ in range(3):
        tier.fetch(sources[0], target).cancel()
        with pytest.raises(OffloadError) as caught:
            tier.fetch(sources[1], target).finish()
        assert caught.value.value == str(tmp_path / "polyaccel-0/rank0/shard1")
    tier.fetch(sources[2], target).finish()
    assert target.raw[0] == 20_000.0
    assert device.rooms == 3
    tier.close()
