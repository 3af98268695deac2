"""The contract of tiers as tests: subclass `TierContract` and say how to open yours."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from polyaccel.buffer import Buffer
from polyaccel.offload.tier import Tier
from polyaccel.ops.base import SCALE
from polyaccel.ops.reference import to_float64
from polyaccel.testkit.contract import refused
from polyaccel.testkit.kernels.contract import encode
from polyaccel.types import DType, Probe

_F32 = DType.FLOAT32


class TierContract(ABC):
    """The tests that every tier passes."""

    @abstractmethod
    def make(self) -> Tier:
        """A new, open tier, which the caller closes."""

    def test_probes(self) -> None:
        tier = self.make()
        probe = type(tier).probe()
        tier.close()
        assert isinstance(probe, Probe)
        assert probe.reason

    def test_begins_with_zeros(self) -> None:
        tier = self.make()
        buffer = tier.allocate("a", 5, _F32)
        assert (buffer.numel, buffer.dtype, _values(buffer)) == (5, _F32, [0.0] * 5)
        staged = tier.stage(7, DType.FLOAT16)
        assert (staged.numel, staged.dtype) == (7, DType.FLOAT16)
        tier.close()

    def test_lends_in_order_what_kernels_reach_and_keeps_the_changes(self) -> None:
        tier = self.make()
        first, second, third = (tier.allocate(key, numel, _F32) for key, numel in [("a", 3), ("b", 2000), ("c", 7)])
        for value, buffer in enumerate((first, second, third), 1):
            _put(buffer, [float(value)] * buffer.numel)
        kernel = tier.compute.kernels()[SCALE]
        seen = []
        for lent in tier.lend([[third, first], [second]]):
            assert [buffer.device for buffer in lent] == [tier.compute.current_device()] * len(lent)
            seen.append([_values(buffer)[0] for buffer in lent])
            for buffer in lent:
                kernel(buffer, 10.0)
        assert seen == [[3.0, 1.0], [2.0]], f"lent {seen}"
        assert [set(_values(buffer)) for buffer in (first, second, third)] == [{10.0}, {20.0}, {30.0}]
        assert list(tier.lend([])) == []
        tier.close()

    def test_keeps_what_was_changed_when_a_walk_ends_early(self) -> None:
        tier = self.make()
        first, second = tier.allocate("a", 4, _F32), tier.allocate("b", 4, _F32)
        walk = tier.lend([[first], [second]])
        next(walk)[0].fill(3.0)
        walk.close()
        assert (_values(first), _values(second)) == ([3.0] * 4, [0.0] * 4)
        assert [_values(buffer) for (buffer,) in tier.lend([[second], [first]])] == [[0.0] * 4, [3.0] * 4]
        tier.close()

    def test_buffers_are_cut_copied_filled_and_saved_between_walks(self) -> None:
        tier = self.make()
        buffer, narrow = tier.allocate("a", 6, _F32), tier.allocate("b", 2, DType.FLOAT16)
        _put(buffer, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        before = buffer.generation
        buffer.view(1, 3).view(1, 2).fill(9.0)
        assert _values(buffer) == [1.0, 2.0, 9.0, 9.0, 5.0, 6.0]
        assert buffer.generation > before
        narrow.copy_from(buffer.view(4, 2))  # with a cast
        assert _values(narrow) == [5.0, 6.0]
        refused(lambda: buffer.view(4, 3), "a view beyond the end")
        refused(lambda: buffer.from_bytes(b"1"), "from_bytes of too few bytes")
        refused(lambda: buffer.copy_from(narrow), "a copy of another length")
        tier.close()

    def test_what_is_fetched_arrives(self) -> None:
        tier = self.make()
        source, target = tier.allocate("a", 3000, _F32), tier.stage(3000, _F32)
        _put(source, [float(number) for number in range(3000)])
        fetch = tier.fetch(source, target)
        fetch.finish()
        assert _values(target) == _values(source)
        tier.fetch(source, target).drop()
        tier.close()

    def test_is_refused_after_it_was_closed(self) -> None:
        tier = self.make()
        tier.allocate("a", 4, _F32)
        tier.close()
        tier.close()
        refused(lambda: tier.allocate("b", 1, _F32), "allocate after close")


def _values(buffer: Buffer) -> list[float]:
    values: list[float] = to_float64(buffer.to_bytes(), buffer.dtype).tolist()
    return values


def _put(buffer: Buffer, numbers: list[float]) -> None:
    buffer.from_bytes(encode(np.array(numbers), buffer.dtype))
