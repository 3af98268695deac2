"""Timing the collectives of a communicator, all of whose ranks measure together.

[Note: Timed interval]
A round begins when all ranks have met, and lasts until its slowest rank has come out of the last of its calls: a sender
may be done long before its message has arrived. Small sizes are called several times a round, for one call is shorter
than ranks are apart after a barrier. Buffers are those that the communicator allocates, gathers and reduce-scatters are
in place, as the engine does it, and all values are zero, so that sums stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from statistics import median
from time import perf_counter

from polyaccel.comm.base import Communicator, message_from, message_to
from polyaccel.comm.benchmark.table import OPERATIONS, CollectiveTimings, SpeedRow, speed_table
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CommError

SMALLEST_NBYTES, LARGEST_NBYTES = 1 << 10, 64 << 20
_ROUND_S = 2e-3
"""A round of small sizes takes about this long."""
_MOST_REPEATS, _LEAST_ROUNDS, _WARMUPS = 50, 3, 2


def sizes(smallest_nbytes: int, largest_nbytes: int, factor: int) -> tuple[int, ...]:
    """`smallest_nbytes` and its products with powers of `factor`, up to `largest_nbytes`, which is always the last."""
    found = []
    size = smallest_nbytes
    while size < largest_nbytes:
        found.append(size)
        size *= factor
    return (*found, largest_nbytes)


class SpeedMeter:
    """Times collectives of up to `largest_nbytes` bytes of `dtype`. All ranks make it and call it in the same way.

    Raises CommError for a group of one rank.
    """

    def __init__(self, communicator: Communicator, largest_nbytes: int, dtype: DType) -> None:
        if communicator.world_size < 2:
            raise CommError(
                "a single rank has no peer to send to",
                hint="start several: polyaccel comm bench --nproc 2, or --hostfile FILE",
                value=communicator.world_size,
            )
        self._communicator = communicator
        self._dtype = dtype
        numel = self._whole_numel(largest_nbytes)
        self._whole = communicator.allocate(numel, dtype)
        self._other = communicator.allocate(numel, dtype)

    def row(self, operation: str, nbytes: int, *, rounds: int, budget_s: float, warmups: int = _WARMUPS) -> SpeedRow:
        """Time one operation, for about `budget_s` seconds, but at least three rounds, and at most `rounds`.

        The size is `nbytes` rounded down to equal parts, at least an element a rank.
        """
        numel = self._whole_numel(nbytes)
        call = self._call(operation, self._whole.view(0, numel), self._other.view(0, numel))
        for _ in range(max(1, warmups)):
            once_s = self._agreed([self._round(call, 1)])[0]
        repeats = max(1, min(_MOST_REPEATS, int(_ROUND_S / once_s)))
        most = int(min(rounds, max(_LEAST_ROUNDS, budget_s / (once_s * repeats))))
        seconds = self._agreed([self._round(call, repeats) for _ in range(most)])
        return SpeedRow(operation, numel * self._dtype.itemsize, median(seconds), min(seconds))

    def _round(self, call: Callable[[], object], repeats: int) -> float:
        accelerator = self._communicator.accelerator
        self._communicator.barrier()
        accelerator.synchronize()
        began_s = perf_counter()
        for _ in range(repeats):
            call()
        accelerator.synchronize()
        return (perf_counter() - began_s) / repeats

    def _agreed(self, seconds: list[float]) -> list[float]:
        """Each round's time on its slowest rank."""
        return [max(times) for times in zip(*self._communicator.all_gather_object(seconds), strict=True)]

    def _whole_numel(self, nbytes: int) -> int:
        ranks = self._communicator.world_size
        return max(1, nbytes // self._dtype.itemsize // ranks) * ranks

    def _call(self, operation: str, whole: Buffer, other: Buffer) -> Callable[[], object]:
        communicator = self._communicator
        rank, ranks = communicator.rank, communicator.world_size
        part = whole.view(rank * (whole.numel // ranks), whole.numel // ranks)
        messages = [message_from(other, (rank - 1) % ranks), message_to(whole, (rank + 1) % ranks)]
        calls: Mapping[str, Callable[[], object]] = {
            "all_reduce": lambda: communicator.all_reduce(whole),
            "all_gather": lambda: communicator.all_gather(whole, part),
            "reduce_scatter": lambda: communicator.reduce_scatter(part, whole),
            "all_to_all": lambda: communicator.all_to_all(other, whole),
            "broadcast": lambda: communicator.broadcast(whole, 0),
            "send_recv": lambda: communicator.batch([each.on(each.source, each.target) for each in messages]),
        }
        return calls[operation]


def measured(
    communicator: Communicator,
    dtype: DType,
    wanted: Iterable[tuple[str, int]],
    *,
    rounds: int,
    budget_s: float,
    ranks_on_hosts: Iterable[int],
) -> CollectiveTimings:
    """The table of the `wanted` operations and sizes; the same on all ranks, which call this together."""
    cases = tuple(wanted)
    meter = SpeedMeter(communicator, max(nbytes for _, nbytes in cases), dtype)
    rows = {(row.operation, row.nbytes): row for row in _rows(meter, cases, rounds, budget_s)}
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    name = communicator.accelerator.name
    return speed_table(communicator.backend, name, dtype.value, ranks_on_hosts, now, rows.values())


def _rows(meter: SpeedMeter, cases: Iterable[tuple[str, int]], rounds: int, budget_s: float) -> Iterator[SpeedRow]:
    for operation, nbytes in cases:
        yield meter.row(operation, nbytes, rounds=rounds, budget_s=budget_s)


def all_cases(operations: Iterable[str], nbytes: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Every operation of `OPERATIONS` that is named, at every size. Raises CommError for a name that is none."""
    every = tuple(nbytes)
    for operation in operations:
        if operation not in OPERATIONS:
            raise CommError(
                f"no operation {operation!r} is measured", hint=f"name some of {', '.join(OPERATIONS)}", value=operation
            )
        for size in every:
            yield operation, size
