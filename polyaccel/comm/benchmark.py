"""How fast a communicator moves buffers: measured, and as a table that others read.

[Note: Timed interval]
A round begins when all ranks have met, and lasts until its slowest rank has come out of the last of its calls: a sender
may be done long before its message has arrived. Small sizes are called several times a round, for one call is shorter
than ranks are apart after a barrier. Buffers are those that the communicator allocates, gathers and reduce-scatters are
in place, as the engine does it, and all values are zero, so that sums stay what they are.

[Note: Collective bandwidths]
Sizes and bandwidths are those of nccl-tests. The size of an all-gather is that of the gathered whole, of a
reduce-scatter that of the source, of an all-to-all that of all parts of one rank, of a message that of the message. The
algorithm bandwidth is size over time. The bus bandwidth is that times the share of the size which the slowest link of
an ideal algorithm carries (`bus_factor`): it can be compared between operations and numbers of ranks, and with what the
hardware promises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

from polyaccel.comm.base import Communicator, message_from, message_to
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
                hint="start several: polyaccel comm bench --ranks 2, or --hostfile FILE",
                value=communicator.world_size,
            )
        self._communicator = communicator
        self._dtype = dtype
        numel = self._whole_numel(largest_nbytes)
        self._whole = communicator.allocate(numel, dtype)
        self._other = communicator.allocate(numel, dtype)

    def row(self, operation: str, nbytes: int, *, rounds: int, budget_s: float, warmups: int = _WARMUPS) -> SpeedRow:
        """Time one operation for about `budget_s` seconds, three rounds or more, on `nbytes` rounded down."""
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
            "send_recv": lambda: communicator.batch(
                [message.on(message.source, message.target) for message in messages]
            ),
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


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
"""What is measured. `send_recv`: every rank sends to the next one and receives from the one before."""
_FORMAT = "polyaccel comm speeds 1"
_SHARES: Mapping[str, int] = MappingProxyType({"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1})


def bus_factor(operation: str, world_size: int) -> float:
    """Return bus over algorithm bandwidth: 2 (n - 1) / n for all-reduce, 1 for broadcast, else (n - 1) / n."""
    share = _SHARES.get(operation)
    return 1.0 if share is None else share * (world_size - 1) / world_size


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """`seconds`: the median over rounds of the slowest rank's time for a call; `fastest_s`: the best round."""

    operation: str
    nbytes: int
    seconds: float
    fastest_s: float


@dataclass(frozen=True, slots=True)
class CollectiveTimings:
    """What was measured. `ranks_on_hosts` counts the ranks of each host; `rows` are sorted by operation and size."""

    backend: str
    accelerator: str
    dtype: str
    ranks_on_hosts: tuple[int, ...]
    date: str
    """UTC."""
    rows: tuple[SpeedRow, ...]

    @property
    def world_size(self) -> int:
        return sum(self.ranks_on_hosts)

    def bandwidths(self, row: SpeedRow) -> tuple[float, float]:
        """The algorithm and the bus bandwidth of a row, in bytes a second."""
        algorithm = row.nbytes / row.seconds
        return algorithm, algorithm * bus_factor(row.operation, self.world_size)

    def seconds(self, operation: str, nbytes: int, world_size: int | None = None) -> float:
        """What a collective of that size takes by this table.

        Between two measured sizes a straight line, below the smallest its time, above the largest in proportion to the
        size. For another number of ranks than was measured the bus bandwidth is taken to be the same. Raises CommError
        when the operation was not measured.
        """
        rows = [row for row in self.rows if row.operation == operation]
        if not rows:
            known = ", ".join(dict.fromkeys(row.operation for row in self.rows))
            raise CommError(
                f"the table of speeds has {known}, not {operation}",
                hint="measure all operations: polyaccel comm bench --json FILE",
                value=operation,
            )
        scale = 1.0
        if world_size is not None and world_size != self.world_size:
            scale = bus_factor(operation, world_size) / bus_factor(operation, self.world_size)
        if nbytes <= rows[0].nbytes:
            return scale * rows[0].seconds
        for before, after in pairwise(rows):
            if nbytes <= after.nbytes:
                share = (nbytes - before.nbytes) / (after.nbytes - before.nbytes)
                return scale * (before.seconds + share * (after.seconds - before.seconds))
        return scale * rows[-1].seconds * nbytes / rows[-1].nbytes

    def to_json(self) -> str:
        """The table as JSON, with both bandwidths in every row."""
        tree = asdict(self)
        for values, row in zip(tree["rows"], self.rows, strict=True):
            values["algorithm_bytes_per_s"], values["bus_bytes_per_s"] = self.bandwidths(row)
        return json.dumps({"format": _FORMAT, "world_size": self.world_size, **tree}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str) -> CollectiveTimings:
        """The inverse of `to_json`. `source` names the text in errors. Raises CommError for any other text."""
        try:
            tree = json.loads(text)
            if tree["format"] != _FORMAT:
                raise ValueError(f"its format is {tree['format']!r}")
            rows = [_row(values) for values in tree["rows"]]
            hosts = tuple(int(count) for count in tree["ranks_on_hosts"])
            if not rows or sum(hosts) < 2 or min(hosts) < 1:
                raise ValueError(f"{len(rows)} rows of {sum(hosts)} ranks")
            backend, accelerator, dtype = (str(tree[name]) for name in ("backend", "accelerator", "dtype"))
            return cls(backend, accelerator, dtype, hosts, str(tree["date"]), _sorted(rows))
        except (ValueError, TypeError, KeyError, LookupError, RecursionError) as error:
            raise CommError(
                f"{source} is not a table of speeds: {type(error).__name__}: {error}",
                hint="write one: polyaccel comm bench --json FILE",
                value=source,
            ) from error

    @classmethod
    def read(cls, file: Path) -> CollectiveTimings:
        """The table in a file. Raises CommError where there is none."""
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = "write one: polyaccel comm bench --json FILE"
            raise CommError(f"{file} cannot be read: {error}", hint=hint, value=str(file)) from error
        return cls.from_json(text, str(file))


def speed_table(
    backend: str, accelerator: str, dtype: str, ranks_on_hosts: Iterable[int], date: str, rows: Iterable[SpeedRow]
) -> CollectiveTimings:
    """A table of rows in any order."""
    return CollectiveTimings(backend, accelerator, dtype, tuple(ranks_on_hosts), date, _sorted(rows))


def shown(table: CollectiveTimings) -> str:
    """The table for people: sizes in bytes, times in microseconds, bandwidths in GB/s (10^9 bytes)."""
    hosts = table.ranks_on_hosts
    where = f"{len(hosts)} hosts of {', '.join(map(str, hosts))}" if len(hosts) > 1 else "one host"
    lines = [
        f"{table.world_size} ranks on {where}, {table.accelerator}, by {table.backend}, {table.dtype}, {table.date}",
        f"{'operation':<14} {'bytes':>11} {'time us':>11} {'best us':>11} {'algbw GB/s':>11} {'busbw GB/s':>11}",
    ]
    for row in table.rows:
        algorithm, bus = table.bandwidths(row)
        lines.append(
            f"{row.operation:<14} {row.nbytes:>11} {1e6 * row.seconds:>11.1f} {1e6 * row.fastest_s:>11.1f} "
            f"{algorithm / 1e9:>11.3f} {bus / 1e9:>11.3f}"
        )
    return "\n".join(lines)


def _sorted(rows: Iterable[SpeedRow]) -> tuple[SpeedRow, ...]:
    return tuple(sorted(rows, key=lambda row: (OPERATIONS.index(row.operation), row.nbytes)))


def _row(values: Mapping[str, Any]) -> SpeedRow:
    row = SpeedRow(
        str(values["operation"]), int(values["nbytes"]), float(values["seconds"]), float(values["fastest_s"])
    )
    if row.operation not in OPERATIONS or row.nbytes < 1 or not 0 < row.seconds < float("inf"):
        raise ValueError(f"no row: {row}")
    return row
