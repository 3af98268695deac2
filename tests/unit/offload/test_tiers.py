"""Tiers by their contract: what is allocated is zero, what a walk changed is kept, and buffers work between walks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.base import Accelerator, Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.host import HostArrays
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import InvariantError
from polyaccel.offload.device import DeviceTier
from polyaccel.offload.host import HostTier
from polyaccel.offload.nvme import NvmeTier
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.testkit.tier import TierContract

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


class OwnTier(TierContract):
    """The contract of tiers, on `kind` over the CPU's `memory`."""

    kind: ClassVar[type[Tier]]
    memory: ClassVar[HostArrays] = "numpy"

    @pytest.fixture(autouse=True)
    def _opened(self, opened: Opener) -> None:
        self.opened = opened

    def make(self) -> Tier:
        tier: Tier = self.opened(self.kind, CpuAccelerator(self.memory))
        return tier


class TestDevice(OwnTier):
    kind = DeviceTier


class TestHost(OwnTier):
    kind = HostTier


class TestNvme(OwnTier):
    kind = NvmeTier


class TestDeviceOnTorch(TestDevice):
    memory = "torch"


class TestHostOnTorch(TestHost):
    memory = "torch"


class TestNvmeOnTorch(TestNvme):
    memory = "torch"


@pytest.mark.parametrize("kind", TIERS)
def test_what_is_asked_too_late_is_a_bug_of_the_caller(kind: type[Tier], opened: Opener) -> None:
    tier = opened(kind)
    tier.close()
    with pytest.raises(InvariantError) as caught:
        tier.allocate("a", 1, F32)
    assert tier.name in str(caught.value)


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
        with pytest.raises(InvariantError) as caught:
            ask()
        assert str(caught.value.value).endswith("/polyaccel-test1/rank0/a")
        assert "/rank0/a" in str(caught.value)


def test_only_whole_buffers_of_the_tier_are_lent_one_walk_at_a_time(opened: Opener) -> None:
    tier, other = opened(NvmeTier), opened(HostTier)
    buffer = tier.allocate("a", 4, F32)
    for stranger in (buffer.view(0, 2), other.allocate("a", 4, F32)):
        with pytest.raises(InvariantError) as caught:
            next(tier.stream_groups([[stranger]]))
        assert caught.value.value is stranger
    walk = tier.stream_groups([[buffer]])
    next(walk)
    with pytest.raises(InvariantError) as caught:
        next(tier.stream_groups([[buffer]]))
    assert tier.name in str(caught.value)
    walk.close()
    assert len(list(tier.stream_groups([[buffer]]))) == 1


@pytest.mark.parametrize("key", ["a", "a/b", "", "../a"])
def test_keys_are_unique_and_name_files(opened: Opener, key: str) -> None:
    tier = opened(NvmeTier)
    tier.allocate("a", 4, F32)
    with pytest.raises(InvariantError) as caught:
        tier.allocate(key, 4, F32)
    assert caught.value.value == key


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
        for index, lent in enumerate(tier.stream_groups(groups)):
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
