"""The contract of tiers as tests: subclass `TierContract` and implement `make`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Barrier, Thread
from typing import TypeVar

import numpy as np

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, Probe
from polyaccel.errors import InvariantError, ShardingError
from polyaccel.offload.tier import Tier
from polyaccel.ops.base import SCALE
from polyaccel.ops.reference import to_float64
from polyaccel.testkit.comparison import equal, refused, same_numbers
from polyaccel.testkit.growth import keeps_nothing
from polyaccel.testkit.kernels.contract import encode

T = TypeVar("T")
_F32 = DType.FLOAT32
_THREAD_TIMEOUT_S = 60.0


class TierContract(ABC):
    """The tests that every tier passes."""

    @abstractmethod
    def make(self) -> Tier:
        """Return a new, open tier, which the caller closes."""

    def test_probes(self) -> None:
        """The probe reports whether the tier could be used here, and why: `doctor` shows it."""
        tier = self.make()
        probe = type(tier).probe()
        tier.close()
        equal(type(probe), Probe, "type of what probe() gives")
        equal(bool(probe.reason), True, "whether probe() gives a reason")

    def test_begins_with_zeros(self) -> None:
        """`allocate` and `stage` give zeros of the length and type that were asked for: moments start there."""
        tier = self.make()
        for key, numel, dtype in (("a", 5, _F32), ("b", 4099, DType.FLOAT16), ("c", 0, _F32)):
            buffer, staged = tier.allocate(key, numel, dtype), tier.stage(numel, dtype)
            for what, one in ((f"allocate({key!r}, {numel})", buffer), (f"stage({numel})", staged)):
                equal((one.numel, one.dtype), (numel, dtype), f"length and type of {what}")
                same_numbers(_values(one), [0.0] * numel, what)
        tier.close()

    def test_lends_in_order_what_kernels_reach_and_keeps_the_changes(self) -> None:
        """A walk lends each group's contents in memory of `compute`, in order, and keeps what kernels change: the
        optimizer's update is this."""
        tier = self.make()
        first, second, third = (tier.allocate(key, numel, _F32) for key, numel in [("a", 3), ("b", 2000), ("c", 7)])
        for value, buffer in enumerate((first, second, third), 1):
            _put(buffer, [float(value)] * buffer.numel)
        kernel = tier.compute.kernels()[SCALE]
        seen = []
        for lent in tier.stream_groups([[third, first], [second]]):
            devices = [buffer.device for buffer in lent]
            equal(devices, [tier.compute.current_device()] * len(lent), "devices of buffers that were lent")
            seen.append([_values(buffer)[0] for buffer in lent])
            for buffer in lent:
                kernel(buffer, 10.0)
        equal(seen, [[3.0, 1.0], [2.0]], "first elements of the groups, in the order in which they were lent")
        for value, buffer in enumerate((first, second, third), 1):
            same_numbers(_values(buffer), [10.0 * value] * buffer.numel, f"buffer {value}, scaled by 10 while lent")
        equal(list(tier.stream_groups([])), [], "a walk over nothing")
        tier.close()

    def test_keeps_what_was_changed_when_a_walk_ends_early(self) -> None:
        """A walk that is closed keeps what was changed before, and lends the rest as it was: an update may fail."""
        tier = self.make()
        first, second = tier.allocate("a", 4, _F32), tier.allocate("b", 4, _F32)
        walk = tier.stream_groups([[first], [second]])
        next(walk)[0].fill(3.0)
        walk.close()
        same_numbers(_values(first), [3.0] * 4, "what was filled with 3 before its walk was closed")
        same_numbers(_values(second), [0.0] * 4, "what its walk did not come to")
        lent = [_values(buffer) for (buffer,) in tier.stream_groups([[second], [first]])]
        equal(lent, [[0.0] * 4, [3.0] * 4], "the next walk")
        tier.close()

    def test_buffers_are_cut_copied_filled_and_saved_between_walks(self) -> None:
        """Between walks a buffer can be cut, copied with a cast, filled and read, and refuses what does not fit by a
        ShardingError: checkpoints and `safe_set_full_*` do so."""
        tier = self.make()
        buffer, narrow = tier.allocate("a", 6, _F32), tier.allocate("b", 2, DType.FLOAT16)
        _put(buffer, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        before = buffer.version
        buffer.view(1, 3).view(1, 2).fill(9.0)
        same_numbers(_values(buffer), [1.0, 2.0, 9.0, 9.0, 5.0, 6.0], "elements 2 and 3 filled with 9")
        if buffer.version <= before:
            raise AssertionError(f"generation after a fill of a view: expected more than {before}, got the same")
        narrow.copy_from(buffer.view(4, 2))  # with a cast
        same_numbers(_values(narrow), [5.0, 6.0], "the last two elements, copied to float16")
        refused(lambda: buffer.view(4, 3), "a view beyond the end", ShardingError)
        refused(lambda: buffer.from_bytes(b"1"), "from_bytes of too few bytes", ShardingError)
        refused(lambda: buffer.copy_from(narrow), "a copy of another length", ShardingError)
        tier.close()

    def test_what_is_fetched_arrives(self) -> None:
        """A fetch that was finished has brought every element, and one that was dropped has ended: parameters come to
        the device so."""
        tier = self.make()
        source, target = tier.allocate("a", 3000, _F32), tier.stage(3000, _F32)
        _put(source, [float(number) for number in range(3000)])
        fetch = tier.fetch(source, target)
        fetch.finish()
        same_numbers(_values(target), _values(source), "the target of a fetch that was finished")
        tier.fetch(source, target).cancel()
        tier.close()

    def test_threads_use_it_in_turn(self) -> None:
        """One thread allocates, another walks and fetches, a third reads: autograd walks backward in its own
        threads."""
        tier = self.make()
        buffer, target = in_thread(lambda: (tier.allocate("a", 2000, _F32), tier.stage(2000, _F32)))

        def walk() -> None:
            for lent in tier.stream_groups([[buffer]]):
                lent[0].fill(4.0)

        in_thread(walk)
        in_thread(lambda: tier.fetch(buffer, target).finish())
        values = in_thread(lambda: (_values(buffer), _values(target)))
        same_numbers(values[0], [4.0] * 2000, "what another thread filled in its walk")
        same_numbers(values[1], [4.0] * 2000, "what a third thread fetched")
        tier.close()

    def test_tiers_of_two_threads_do_not_meet(self) -> None:
        """Two tiers at once, each in a thread, keep their own contents under equal keys: ranks may be threads, and
        jobs share a machine."""
        tiers = [self.make(), self.make()]
        together = Barrier(len(tiers))
        found: dict[int, list[float]] = {}

        def use(number: int) -> None:
            buffer = tiers[number].allocate("a", 5000, _F32)
            for turn in range(4):
                together.wait(_THREAD_TIMEOUT_S)
                for lent in tiers[number].stream_groups([[buffer]]):
                    _put(lent[0], [float(10 * turn + number)] * 5000)
            together.wait(_THREAD_TIMEOUT_S)
            found[number] = _values(buffer)

        threads = [Thread(target=use, args=(number,), daemon=True) for number in range(len(tiers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_THREAD_TIMEOUT_S)
        for number, tier in enumerate(tiers):
            same_numbers(found.get(number, []), [30.0 + number] * 5000, f"contents of tier {number} of two")
            tier.close()

    def test_walks_keep_no_memory(self) -> None:
        """Walks over the same buffers need the same memory again and again: a run walks in every step."""
        tier = self.make()
        buffers = [tier.allocate(f"b{number}", 1 << 18, _F32) for number in range(4)]

        def walk() -> None:
            for _ in range(4):
                for lent in tier.stream_groups([[buffer] for buffer in buffers]):
                    lent[0].fill(1.0)

        keeps_nothing(walk, 16 << 20, "memory of four walks over 4 MiB")
        tier.close()

    def test_is_refused_after_it_was_closed(self) -> None:
        """A closed tier refuses to allocate by an InvariantError, and may be closed again: its place is given back."""
        tier = self.make()
        tier.allocate("a", 4, _F32)
        tier.close()
        tier.close()
        refused(lambda: tier.allocate("b", 1, _F32), "allocate after close", InvariantError)


def in_thread(act: Callable[[], T]) -> T:
    """Call a function in a new thread and wait for it.

    Args:
        act: The function. Its exception is raised here.

    Returns:
        Its result.

    Raises:
        AssertionError: It did not end in time.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(_THREAD_TIMEOUT_S)
    if errors:
        raise errors[0]
    if not found:
        raise AssertionError(f"a call in its own thread: expected an end within {_THREAD_TIMEOUT_S:g} s, got none")
    return found[0]


def _values(buffer: Buffer) -> list[float]:
    values: list[float] = to_float64(buffer.to_bytes(), buffer.dtype).tolist()
    return values


def _put(buffer: Buffer, numbers: list[float]) -> None:
    buffer.from_bytes(encode(np.array(numbers), buffer.dtype))
