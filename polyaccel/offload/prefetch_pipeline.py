"""A walk over groups of files: the order in which they are read, lent and written, in a bounded number of buffers.

[Note: Prefetch from files]
A group's files are read side by side into host buffers, lent, and written back. With `pipeline_read` the groups that
come next are read while one is in use, as far ahead as there are host buffers; with `pipeline_write` a group is written
while later ones are in use. All of it runs on its own threads (`Transfers`). A host buffer is used again only when its
contents have been written. A write that fails does not stop the walk, for a step that is half done on one rank would be
lost on all: its buffer becomes the contents, the walk continues, and its end raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import OffloadError
from polyaccel.offload.file_buffer import FileBuffer
from polyaccel.offload.state_file import padded
from polyaccel.offload.tier import TierOptions
from polyaccel.offload.transfers import Transfers


class Loan:
    """One group under way: its files, and the host buffers that they are read into and written from."""

    def __init__(self, group: Sequence[FileBuffer], transfers: Transfers, take: Callable[[DType], Buffer]) -> None:
        self.group = group
        self._transfers = transfers
        self.held = [take(buffer.dtype) for buffer in group]
        self._under_way = [buffer.file.start_reading(transfers, blocks) for buffer, blocks in self._blocks()]

    def _blocks(self) -> list[tuple[FileBuffer, Buffer]]:
        """Each file with whole blocks of memory for it."""
        return [
            (buffer, held.view(0, padded(buffer.nbytes) // buffer.dtype.itemsize))
            for buffer, held in zip(self.group, self.held, strict=True)
        ]

    def buffers(self) -> list[Buffer]:
        """The buffers to lend, once the files have been read into them. Raises OffloadError."""
        for access in self._under_way:
            access.finish()
        return [held.view(0, buffer.numel) for buffer, held in zip(self.group, self.held, strict=True)]

    def start_writing(self) -> None:
        for buffer in self.group:
            buffer.bump_version()
        self._under_way = [buffer.file.start_writing(self._transfers, blocks) for buffer, blocks in self._blocks()]

    @property
    def is_done(self) -> bool:
        return all(access.is_done for access in self._under_way)

    def settle(self, give_back: Callable[[Buffer], None], failures: list[OffloadError]) -> None:
        """Wait until nothing is under way, and give the host buffers back, except for those of failed writes."""
        for (buffer, blocks), held, access in zip(self._blocks(), self.held, self._under_way, strict=True):
            error = access.wait()
            if error is None:
                give_back(held)
            else:
                buffer.file.keep(blocks)
                failures.append(error)

    def drop(self, give_back: Callable[[Buffer], None]) -> None:
        """Wait until nothing is under way, and give the host buffers back without writing anything."""
        for held, access in zip(self.held, self._under_way, strict=True):
            access.wait()
            give_back(held)


class Walk:
    """One walk over `groups`. See [Note: Prefetch from files].

    `take` gives a host buffer for a whole file of a type, `give_back` returns it; `failures` collects failed writes.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[FileBuffer]],
        options: TierOptions,
        transfers: Transfers,
        take: Callable[[DType], Buffer],
        give_back: Callable[[Buffer], None],
        failures: list[OffloadError],
    ) -> None:
        self._waiting = deque(groups)
        self._options = options
        self._transfers = transfers
        self._take, self._give_back = take, give_back
        self._failures = failures
        self._read: deque[Loan] = deque()
        self._lent: Loan | None = None
        self._written: deque[Loan] = deque()
        self._limit = host_buffer_limit(options, max(map(len, groups), default=0))

    def run(self) -> Generator[list[Buffer], None, None]:
        while self._waiting or self._read:
            if not self._read:
                while not self._has_room():
                    self._settle_oldest()
                self._read_next()
            loan = self._read.popleft()
            try:
                lent = loan.buffers()
            except BaseException:
                loan.drop(self._give_back)
                raise
            self._lent = loan
            while self._options.pipeline_read and self._waiting and self._has_room():
                self._read_next()
            yield lent
            self._write_back()
            if not self._options.pipeline_write:
                self._settle_oldest()

    def end(self) -> None:
        """Bring everything under way to its end."""
        if self._lent is not None:  # closed early, by an error perhaps: what was changed so far is kept
            self._write_back()
        while self._written:
            self._settle_oldest()
        while self._read:
            self._read.popleft().drop(self._give_back)

    def _has_room(self) -> bool:
        while self._written and self._written[0].is_done:
            self._settle_oldest()
        loans = [*self._read, *self._written, *([self._lent] if self._lent else [])]
        return sum(len(loan.held) for loan in loans) + len(self._waiting[0]) <= self._limit

    def _read_next(self) -> None:
        self._read.append(Loan(self._waiting.popleft(), self._transfers, self._take))

    def _write_back(self) -> None:
        assert self._lent is not None  # called for a group that is lent
        loan, self._lent = self._lent, None
        loan.start_writing()
        self._written.append(loan)

    def _settle_oldest(self) -> None:
        self._written.popleft().settle(self._give_back, self._failures)


def host_buffer_limit(options: TierOptions, group: int) -> int:
    """Host buffers that may be under way together for groups of `group` files; at least what the pipelining needs."""
    return max(options.buffer_count, _groups_at_once(options) * group)


def most_host_buffers(options: TierOptions, group: int, groups: int) -> int:
    """Host buffers that a walk over `groups` groups of `group` files each makes at most."""
    loans = host_buffer_limit(options, group) // group if _groups_at_once(options) > 1 else 1
    return min(loans, groups) * group


def _groups_at_once(options: TierOptions) -> int:
    return 1 + options.pipeline_read + options.pipeline_write
