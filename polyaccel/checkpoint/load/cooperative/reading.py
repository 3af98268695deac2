"""Ranks that read a save together. Each byte range is read once per host and pass, verified, and shared in memory.

[Note: Two-pass load]
A load looks at everything before it changes anything, so it goes through its extents twice. Where all of them fit the
memory that may be used they are read once, verified, and kept by the ranks that read them until they are taken over.
Where they do not, or where the system itself keeps files that were just read (a folder that all ranks see: new memory
for a gigabyte takes longer to get than a copy out of the system's), the first pass verifies and forgets, and the second
reads them again, round by round. What several ranks of a group want is shown to them in windows, two a rank that take
turns: while ranks take over round k, round k + 1 may be brought, and all ranks wait for each other between two rounds,
so no rank writes into a window that another still reads. New pages of shared memory cost more than what is copied into
them, so windows are small and what is kept is not in them. No rank continues alone: one that fails reports that where
all wait next.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

from polyaccel.accelerators.memory.host import memory_stats
from polyaccel.checkpoint.collective_call import run_on_all
from polyaccel.checkpoint.format.extents import Extent, ExtentTable, FileLocations
from polyaccel.checkpoint.load.cooperative.rounds import ReadTarget, Round, ScheduledRead, plan_rounds, window_for
from polyaccel.checkpoint.load.cooperative.windows import MemoryGroups
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

T = TypeVar("T")
_ROUNDS_BETWEEN_MEETINGS = 64
"""Where no rank waits for what another rank reads: 1 GiB a rank, long before a communicator's time is up."""
_log = logging.getLogger(__name__)
WINDOW_NBYTES = 16 << 20
"""The memory of a rank for one round."""


class CooperativeReader:
    """The extents that the ranks of `communicator` want of a save, on their way into their memory.

    Every rank states what it wants (`request`); then all of them `verify`; then all of them `load`, and there each
    extent is given by `read` as often as it was wanted, at best in ascending order. `most_nbytes` is the memory that a
    rank may use for what is kept between the two; None: its share of half of what the host has left.
    """

    def __init__(
        self,
        communicator: Communicator,
        storage: Storage,
        folder: str,
        table: ExtentTable,
        locations: FileLocations,
        groups: MemoryGroups,
        most_nbytes: int | None,
    ) -> None:
        self._communicator, self._storage, self._folder = communicator, storage, folder
        self._table, self._where, self._groups, self._most_nbytes = table, locations, groups, most_nbytes
        self._place_of = tuple(locations.places[ranks[0]] for ranks in groups.groups)
        self._uses: Counter[int] = Counter()
        self._kept: dict[int, bytes] = {}
        self._corrupt: set[tuple[int, int]] = set()
        """(extent, place) of what was damaged or could not be read there."""
        self._rounds: tuple[Round, ...] = ()
        self._place_in: dict[int, tuple[int, ReadTarget]] = {}
        """In which round and where each extent comes to this rank."""
        self._windows: Mapping[int, mmap.mmap] = {}
        self._own_window: mmap.mmap | None = None
        self._slot_nbytes = (0, 0)
        """The bytes of a round in a window of one rank, and in one of its group."""
        self._keeps_all = True
        self._brought = 0
        self._step = ""
        self._over: CheckpointError | None = None

    def __enter__(self) -> CooperativeReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.clear()
        self._windows, self._own_window = {}, None

    def request(self, extent: Extent) -> None:
        """This rank will take over an extent, once more."""
        self._uses[self._table.number_of[extent.key]] += 1

    def verify(self, step: str) -> None:
        """Verify that every wanted extent exists and has its checksum. Collective; raises on every rank."""
        self._step = step
        wanted = self._wanted_by()
        extents = self._table.extents
        sizes = [extent.nbytes for extent in extents]
        window_nbytes = window_for((sizes[number] for number, _ in wanted), WINDOW_NBYTES)
        self._rounds = plan_rounds(wanted, sizes, self._holders, self._groups.groups, window_nbytes)
        self._allocate()
        if self._keeps_all and self._where.files is None:  # no rank waits for what another one reads
            for first in range(0, len(self._rounds), _ROUNDS_BETWEEN_MEETINGS):
                self._agree(partial(self._read_rounds, first))
            return
        for _ in self._rounds:
            self._bring(delivers=self._keeps_all)
        self._brought = 0

    def load(self, step: str, action: Callable[[], None]) -> None:
        """Run `action`, which reads what this rank wanted. Collective; raises on every rank when any failed."""
        self._step, failure = step, None
        try:
            action()
            while self._brought < len(self._rounds):
                self._advance()
        except Exception as error:
            failure = error
        if self._over is not None:
            raise self._over
        self._agree(lambda: _raise(failure) if failure is not None else None)

    def is_wanted(self, extent: Extent) -> bool:
        """Whether `read` gives an extent: this rank wanted it, and it was verified."""
        return self._table.number_of[extent.key] in self._place_in

    def read(self, extent: Extent) -> memoryview | bytes:
        """Return the bytes of an extent, valid until the next call, inside `load`. Collective within a group."""
        number = self._table.number_of[extent.key]
        index, landing = self._place_in[number]
        if self._keeps_all and landing.rank == self._communicator.rank:
            return self._own_memory(index, landing, extent.nbytes)
        data: memoryview | bytes | None = self._kept.get(number)
        if data is None:
            while self._brought <= index:
                self._advance()
            if index < self._brought - 1:  # got more often than wanted
                return extent.read(self._storage, self._folder)
            data = self._shown(index, landing, extent.nbytes)
        self._uses[number] -= 1
        if self._uses[number] <= 0:
            self._kept.pop(number, None)
        return data

    def _agree(self, action: Callable[[], T]) -> list[T]:
        """Return what `run_on_all` gives; after an error wait for no rank any more."""
        try:
            return run_on_all(self._communicator, self._step, action)
        except CheckpointError as error:
            self._over = error
            raise

    def _wanted_by(self) -> list[tuple[int, list[int]]]:
        """(extent, ranks that want it), ascending."""
        mine = np.zeros(len(self._table.extents), bool)
        mine[list(self._uses)] = True
        gathered = self._communicator.all_gather_object(np.packbits(mine).tobytes())
        rows = np.array([np.frombuffer(bits, np.uint8) for bits in gathered])
        by_rank = np.unpackbits(rows, axis=1, count=mine.size).astype(bool)
        return [
            (int(number), np.flatnonzero(by_rank[:, number]).tolist()) for number in np.flatnonzero(by_rank.any(axis=0))
        ]

    def _holders(self, number: int) -> tuple[int, ...]:
        """Return the groups whose storage has an extent, as far as is recorded."""
        places = self._where.having(self._table.extents[number].file)
        return tuple(
            group
            for group, place in enumerate(self._place_of)
            if place in places and (number, place) not in self._corrupt
        )

    def _allocate(self) -> None:
        """Make the windows, and memory for what is kept where everything may be."""
        rank = self._communicator.rank
        mine = self._groups.of_rank[rank]
        ends, self._place_in = ([0], [0]), {}
        for index, one in enumerate(self._rounds):
            for carried in one:
                for landing in carried.landings:
                    ends[landing.is_shared].append(landing.offset + self._table.extents[carried.extent].nbytes)
                own = carried.landing(mine)
                if own is not None and (own.is_shared or own.rank == rank):
                    self._place_in[carried.extent] = (index, own)
        own_nbytes, group_nbytes = (max(each) + -max(each) % mmap.PAGESIZE for each in ends)
        self._slot_nbytes = own_nbytes, group_nbytes
        most_nbytes = self._most_nbytes
        if most_nbytes is None:
            most_nbytes = memory_stats().free_nbytes // 2 // len(self._groups.group)
        nbytes = len(self._rounds) * (own_nbytes + group_nbytes)
        is_at_hand = self._storage.is_cached and self._where.files is None
        self._keeps_all = all(self._communicator.all_gather_object(nbytes <= most_nbytes and not is_at_hand))
        slots = min(len(self._rounds), 2)
        if group_nbytes:
            self._groups.resize(slots * group_nbytes)
            self._communicator.barrier(label="windows of a load")
            self._windows = self._groups.windows(slots * group_nbytes)
        self._own_window = self._groups.own_window(nbytes if self._keeps_all else slots * own_nbytes)

    def _own_memory(self, number: int, landing: ReadTarget, nbytes: int) -> memoryview:
        """Where this rank puts an extent of that round which it brings."""
        if not self._keeps_all:
            return self._shown(number, landing, nbytes)
        own_nbytes, group_nbytes = self._slot_nbytes
        start = number * (own_nbytes + group_nbytes) + (own_nbytes if landing.is_shared else 0) + landing.offset
        assert self._own_window is not None
        return memoryview(self._own_window)[start : start + nbytes]

    def _shown(self, number: int, landing: ReadTarget, nbytes: int) -> memoryview:
        """Where this rank sees an extent of that round, in a window."""
        window = self._windows[landing.rank] if landing.is_shared else self._own_window
        assert window is not None
        start = number % 2 * self._slot_nbytes[landing.is_shared] + landing.offset
        return memoryview(window)[start : start + nbytes]

    def _advance(self) -> None:
        """Show the next round, read again or from memory. Collective where several ranks of a group want it."""
        number = self._brought
        if not self._keeps_all:
            self._bring()
            return
        if number:
            self._keep_what_is_wanted_later(number - 1)
        self._brought += 1
        landings = [(carried.extent, landing) for carried in self._rounds[number] for landing in carried.landings]
        if not any(landing.is_shared for _, landing in landings):
            return
        for extent, landing in landings:
            if landing.is_shared and landing.rank == self._communicator.rank:
                nbytes = self._table.extents[extent].nbytes
                self._shown(number, landing, nbytes)[:] = self._own_memory(number, landing, nbytes)
        self._agree(lambda: None)

    def _bring(self, *, delivers: bool = True) -> None:
        """Read the next round and deliver it to groups on other hosts; other places fill gaps. Collective."""
        number = self._brought
        if number and not self._keeps_all:
            self._keep_what_is_wanted_later(number - 1)
        borrowed: dict[int, bytes] = {}
        todo: Sequence[ScheduledRead] = self._rounds[number]
        while todo:
            reading = partial(self._read, number, todo, borrowed)
            gathered = self._agree(reading)
            failed = self._note_spoilt(gathered)
            todo = [carried for carried in todo if carried.extent in failed]
        self._brought += 1
        if delivers and any(
            self._source(c, landing) != landing.group for c in self._rounds[number] for landing in c.landings
        ):
            self._deliver(number, borrowed)

    def _read_rounds(self, first: int) -> None:
        """Read this rank's share of the rounds until the next meeting."""
        for number in range(first, min(first + _ROUNDS_BETWEEN_MEETINGS, len(self._rounds))):
            self._read(number, self._rounds[number], {})

    def _source(self, carried: ScheduledRead, landing: ReadTarget) -> int:
        """The group that reads an extent for a landing: as planned, unless it could not."""
        place = self._place_of[landing.source]
        if (carried.extent, place) not in self._corrupt:
            return landing.source
        return self._holders(carried.extent)[0]

    def _reader(self, carried: ScheduledRead, source: int) -> int:
        """The rank of the group `source` that reads an extent."""
        landing = carried.landing(source)
        if landing is not None and self._source(carried, landing) == source:
            return landing.rank
        ranks = self._groups.groups[source]
        return ranks[carried.extent % len(ranks)]

    def _read(self, number: int, todo: Sequence[ScheduledRead], borrowed: dict[int, bytes]) -> list[list[Any]]:
        """Read this rank's share; return [extent, message, hint] of what another place may have."""
        failed = []
        rank = self._communicator.rank
        for carried in todo:
            extent = self._table.extents[carried.extent]
            for source in {self._source(carried, landing) for landing in carried.landings}:
                if self._reader(carried, source) != rank:
                    continue
                landing = carried.landing(source)
                try:
                    if landing is None or landing.rank != rank:
                        borrowed[carried.extent] = extent.read(self._storage, self._folder)
                    else:
                        target = self._own_memory(number, landing, extent.nbytes)
                        extent.read_into(self._storage, self._folder, target)
                except CheckpointError as error:
                    if self._where.files is None:
                        raise
                    failed.append([carried.extent, error.message, error.hint])
        return failed

    def _note_spoilt(self, gathered: Sequence[Sequence[Sequence[Any]]]) -> set[int]:
        """Record unreadable extents; return those that other places shall give. Raises if there are none."""
        failed = set()
        for rank, failures in enumerate(gathered):
            place = self._where.places[rank]
            for number, message, hint in failures:
                self._corrupt.add((number, place))
                failed.add(number)
                others = [self._place_of[group] for group in self._holders(number)]
                if not others:
                    self._over = CheckpointError(f"{self._step} failed on rank {rank}: {message}", hint=hint)
                    raise self._over
                if self._communicator.rank == 0:
                    _log.warning("%s; it is taken from %s", message, self._where.names[others[0]])
        return failed

    def _deliver(self, number: int, borrowed: Mapping[int, bytes]) -> None:
        """Send groups what they lack, in one order of messages on all ranks: no cycle of waits. Collective."""
        rank, extents = self._communicator.rank, self._table.extents
        buffer: Buffer | None = None
        failures: list[CheckpointError] = []
        for carried in self._rounds[number]:
            extent = extents[carried.extent]
            for landing in carried.landings:
                source = self._source(carried, landing)
                reader = self._reader(carried, source)
                if source == landing.group or rank not in (reader, landing.rank):
                    continue
                if buffer is None or buffer.numel < extent.nbytes:
                    buffer = self._communicator.allocate(extent.nbytes, DType.UINT8)
                part = buffer.view(0, extent.nbytes)
                if rank == reader:
                    own = carried.landing(source)
                    is_here = own is not None and own.rank == rank and carried.extent not in borrowed
                    part.from_bytes(
                        self._own_memory(number, own, extent.nbytes)
                        if own is not None and is_here
                        else borrowed[carried.extent]
                    )
                    self._communicator.send(part, landing.rank, label="a load")
                else:
                    self._communicator.recv(part, reader, label="a load")
                    target = self._own_memory(number, landing, extent.nbytes)
                    part.copy_to_host(target)
                    try:
                        extent.check(target, self._folder, f"what rank {reader} sent")
                    except CheckpointError as error:
                        failures.append(error)
        self._agree(lambda: _raise(failures[0]) if failures else None)

    def _keep_what_is_wanted_later(self, number: int) -> None:
        """Copy what this rank has not got yet of a round that is about to be forgotten."""
        for carried in self._rounds[number]:
            at = self._place_in.get(carried.extent)
            if at is None or self._uses[carried.extent] <= 0 or carried.extent in self._kept:
                continue
            if not self._keeps_all or at[1].rank != self._communicator.rank:
                self._kept[carried.extent] = bytes(self._shown(*at, self._table.extents[carried.extent].nbytes))


def _raise(error: Exception) -> NoReturn:
    raise error
