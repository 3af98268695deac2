"""Tiers by their contract: what is allocated is zero, what a walk changed is kept, and buffers work between walks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.base import Accelerator, Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.buffer import Buffer
from polyaccel.errors import InvariantError, ShardingError
from polyaccel.offload.device import DeviceTier
from polyaccel.offload.host import HostTier
from polyaccel.offload.nvme import NvmeTier
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.types import DType

F32 = DType.FLOAT32
TIERS = (DeviceTier, HostTier, NvmeTier)
Opener = Callable[..., Any]


class CountingHost(CpuAccelerator):
    """A host of numpy arrays that counts the buffers it handed out, and says whether they were to be pinned."""

    def __init__(self) -> None:
        super().__init__("numpy")
        self.pinned: list[bool] = []

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        self.pinned.append(pinned)
        return super().allocate(numel, dtype, pinned=pinned)


class PinningDevice(CountingHost):
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset(DType), "local", host_pinning=True)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """`opened(kind, host, **options)`: an open tier, closed at the end."""
    tiers: list[Tier] = []

    def make(kind: type[Tier], host: Accelerator | None = None, **options: Any) -> Tier:
        host = host or CpuAccelerator("numpy")
        tiers.append(kind())
        tiers[-1].open(host, host, TierOptions(**{"path": str(tmp_path), "run_id": f"test{len(tiers)}", **options}))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def values(buffer: Buffer) -> list[float]:
    array = CpuAccelerator("numpy").allocate(buffer.numel, buffer.dtype)
    array.copy_from(buffer)
    return array.raw.tolist()


def put(buffer: Buffer, numbers: list[float]) -> None:
    source = CpuAccelerator("numpy").allocate(len(numbers), F32)
    source.raw[:] = numbers
    buffer.copy_from(source)


@pytest.mark.parametrize("name", ["device", "host", "nvme"])
def test_every_tier_is_found_by_name_and_passes_for_the_contract(name: str) -> None:
    assert load_plugin(PluginGroup.TIERS, name, Tier, Tier.API_VERSION).name == name


@pytest.mark.parametrize("memory", ["numpy", "torch"])
@pytest.mark.parametrize("kind", TIERS)
class TestEveryTier:
    @pytest.fixture
    def tier(self, kind: type[Tier], memory: str, opened: Opener) -> Tier:
        return opened(kind, CpuAccelerator(memory))

    def test_begins_with_zeros(self, tier: Tier) -> None:
        buffer = tier.allocate("a", 5, F32)
        assert (buffer.numel, buffer.dtype, values(buffer)) == (5, F32, [0.0] * 5)

    def test_lends_in_order_what_kernels_reach_and_keeps_the_changes(self, tier: Tier) -> None:
        first, second, third = (tier.allocate(key, numel, F32) for key, numel in [("a", 3), ("b", 2000), ("c", 7)])
        put(third, [7.0] * 7)
        lent_values = []
        for index, lent in enumerate(tier.lend([[third, first], [second]])):
            assert [buffer.device for buffer in lent] == [tier.compute.current_device()] * len(lent)
            lent_values.append([values(buffer) for buffer in lent])
            for buffer in lent:
                buffer.raw[:] = index + 1.0  # as kernels do
        assert lent_values == [[[7.0] * 7, [0.0] * 3], [[0.0] * 2000]]
        assert [set(values(buffer)) for buffer in (first, second, third)] == [{1.0}, {2.0}, {1.0}]

    def test_keeps_what_was_changed_when_a_walk_ends_early(self, tier: Tier) -> None:
        first, second = tier.allocate("a", 4, F32), tier.allocate("b", 4, F32)
        walk = tier.lend([[first], [second]])
        next(walk)[0].fill(3.0)
        walk.close()
        assert (values(first), values(second)) == ([3.0] * 4, [0.0] * 4)
        assert [values(buffer) for (buffer,) in tier.lend([[second], [first]])] == [[0.0] * 4, [3.0] * 4]

    def test_buffers_can_be_cut_copied_filled_and_saved_between_walks(self, tier: Tier) -> None:
        buffer, narrow = tier.allocate("a", 6, F32), tier.allocate("b", 2, DType.FLOAT16)
        put(buffer, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        before = buffer.generation
        buffer.view(1, 3).view(1, 2).fill(9.0)
        assert values(buffer) == [1.0, 2.0, 9.0, 9.0, 5.0, 6.0]
        assert buffer.generation > before
        narrow.copy_from(buffer.view(4, 2))  # with a cast
        assert values(narrow) == [5.0, 6.0]
        data = buffer.view(2, 4).to_bytes()
        assert data == np.array([9, 9, 5, 6], dtype="<f4").tobytes()
        buffer.view(0, 4).from_bytes(data)
        assert values(buffer) == [9.0, 9.0, 5.0, 6.0, 5.0, 6.0]
        for wrong in (lambda: buffer.view(4, 3), lambda: buffer.from_bytes(b"1"), lambda: buffer.copy_from(narrow)):
            with pytest.raises(ShardingError):
                wrong()

    def test_lends_nothing_when_there_is_nothing(self, tier: Tier) -> None:
        assert list(tier.lend([])) == []

    def test_is_refused_after_it_was_closed(self, tier: Tier) -> None:
        tier.close()
        tier.close()
        with pytest.raises(InvariantError, match="after it was closed"):
            tier.allocate("a", 1, F32)


def test_the_host_tier_pins_where_the_device_can_and_the_options_ask(opened: Opener) -> None:
    for pin_memory in (True, False):
        device, host, tier = PinningDevice(), CountingHost(), HostTier()
        tier.open(device, host, TierOptions(pin_memory=pin_memory))
        tier.allocate("a", 4, F32)
        assert (device.pinned, host.pinned) == (([True], []) if pin_memory else ([], [False]))
        assert tier.compute is host


def test_what_rests_in_a_file_has_no_memory(opened: Opener) -> None:
    buffer = opened(NvmeTier).allocate("a", 4, F32)
    for ask in (lambda: buffer.raw, buffer.data_ptr):
        with pytest.raises(InvariantError, match=r"rests in .*/rank0/a and has no"):
            ask()


def test_only_whole_buffers_of_the_tier_are_lent_one_walk_at_a_time(opened: Opener) -> None:
    tier, other = opened(NvmeTier), opened(HostTier)
    buffer = tier.allocate("a", 4, F32)
    for stranger in (buffer.view(0, 2), other.allocate("a", 4, F32)):
        with pytest.raises(InvariantError, match="not a whole buffer"):
            next(tier.lend([[stranger]]))
    walk = tier.lend([[buffer]])
    next(walk)
    with pytest.raises(InvariantError, match="while it lends"):
        next(tier.lend([[buffer]]))
    walk.close()
    assert len(list(tier.lend([[buffer]]))) == 1


@pytest.mark.parametrize("key", ["a", "a/b", "", "../a"])
def test_keys_are_unique_and_name_files(opened: Opener, key: str) -> None:
    tier = opened(NvmeTier)
    tier.allocate("a", 4, F32)
    with pytest.raises(InvariantError, match="in use, or cannot"):
        tier.allocate(key, 4, F32)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=3), min_size=1, max_size=6),
    buffer_count=st.integers(1, 9),
    pipeline_read=st.booleans(),
    pipeline_write=st.booleans(),
)
def test_no_setting_changes_what_is_kept_nor_takes_more_host_buffers_than_allowed(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    buffer_count: int,
    pipeline_read: bool,
    pipeline_write: bool,
) -> None:
    host, tier = CountingHost(), NvmeTier()
    tier.open(
        host,
        host,
        TierOptions(
            path=str(tmp_path_factory.mktemp("nvme")),
            buffer_count=buffer_count,
            pipeline_read=pipeline_read,
            pipeline_write=pipeline_write,
        ),
    )
    groups = [[tier.allocate(f"{g}.{i}", n, F32) for i, n in enumerate(group)] for g, group in enumerate(sizes)]
    for walk in range(3):
        for index, lent in enumerate(tier.lend(groups)):
            for place, buffer in enumerate(lent):
                assert (buffer.raw == walk * (10 * index + place)).all()
                buffer.raw[:] = (walk + 1) * (10 * index + place)
    assert all(
        values(b) == [3.0 * (10 * g + i)] * b.numel for g, group in enumerate(groups) for i, b in enumerate(group)
    )
    largest = max(map(len, sizes))
    if pipeline_read or pipeline_write:
        assert largest <= len(host.pinned) <= max(buffer_count, (1 + pipeline_read + pipeline_write) * largest)
    else:
        assert len(host.pinned) == largest
    tier.close()
