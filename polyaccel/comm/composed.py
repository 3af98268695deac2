"""Dispatch of collectives: assigns sequence numbers and emulates the operations that a backend lacks.

[Note: Emulated collectives]
A backend states its native operations, so an operation that is added later breaks none. Uneven parts of an all-gather
and of a reduce-scatter are padded to the longest and sent as equal parts, which keeps the order of additions. An
all-to-all, a gather, a scatter and a batch become messages, all under way at once. These messages share the order of
the pair's other messages: a message that a rank sends outside of them must have the same place among its collectives as
the receive of the other rank. Nothing here needs a second round, hence no rank's `wait` depends on another's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.arguments import pieces_of
from polyaccel.comm.collective import EQUAL_PARTS, MESSAGES, UNEVEN_PARTS, Collective, Operation, ended
from polyaccel.comm.work import CombinedWork, Work
from polyaccel.core.buffer import Buffer
from polyaccel.errors import CommError

_MESSAGES = frozenset({Operation.SEND, Operation.RECV})


class ComposedCollectives(ABC):
    """The part of a `Communicator` that maps calls to native operations of its backend."""

    rank: int
    world_size: int
    backend: str
    accelerator: Accelerator
    native_ops: ClassVar[frozenset[Operation]] = EQUAL_PARTS
    """Operations that `start` takes. See [Note: Emulated collectives]."""
    native_uneven_ops: ClassVar[frozenset[Operation]] = frozenset()
    """Those of them that `start` also takes with `counts`."""
    supports_strided: bool = False
    """Whether `start` takes an all-to-all of non-contiguous parts (`Collective.pieces`)."""
    coalesces_small_sends: bool = False
    """Whether an all-to-all of uneven parts is faster with `Collective.max_send_numel`."""
    _numbers_given: int = 0
    _part_of: int | None = None

    @abstractmethod
    def start(self, collective: Collective) -> Work:
        """Start one of the operations of `native_ops`. Called by `call`, which has numbered it.

        The implementation calls `collective.check` first. Errors later than that name the collective and the global
        ranks that did not take part. It marks the buffers that it wrote (`Buffer.bump_version`).

        Args:
            collective: The call. Its `counts` are set only for `native_uneven_ops`.

        Returns:
            The work, done unless `async_op`. It owns the buffers until `wait`.

        Raises:
            ShardingError: Buffers do not fit, before anything is sent.
            CommTimeout: Ranks did not come in time. `wait` raises it too.
            CommError: Every other failure. `wait` raises it too.
        """

    def call(self, collective: Collective) -> Work:
        """Number a collective and start it, natively or composed of others.

        Args:
            collective: The call; its `number` is set.

        Returns:
            The work, done unless `async_op`.

        Raises:
            CommError: The backend has neither the operation nor those that it could be composed of.
        """
        kind = collective.operation
        if collective.number is None:
            collective.number = self.last_number() if kind in MESSAGES else self.next_number()
        if collective.pieces is not None and not self.supports_strided:
            raise CommError(
                f"comm backend {self.backend!r} has no {kind.value} of parts in pieces",
                hint="look at supports_strided, and put the parts together before",
            )
        if kind in (self.native_ops if collective.counts is None else self.native_uneven_ops):
            return self.start(collective)
        collective.check(self.rank, self.world_size)
        work = self._compose(collective)
        if work is None:
            uneven = " of uneven parts" if collective.is_uneven else ""
            raise CommError(
                f"comm backend {self.backend!r} has no {kind.value}{uneven}, nor that of which it could be made",
                hint="choose another backend: POLYACCEL_COMM or init_distributed(dist_backend=...)",
                value=kind.value,
            )
        return ended(work, collective)

    def next_number(self) -> int | None:
        """Return the number of the next collective and count it; None where a wrapped communicator assigns the
        numbers."""
        if self._part_of is not None:
            return self._part_of
        number = self._numbers_given
        self._numbers_given = number + 1
        return number

    def last_number(self) -> int | None:
        """Return the number of the last collective, -1 before the first. Messages use it: ranks outside of a message do
        not count it."""
        return self._numbers_given - 1 if self._part_of is None else self._part_of

    def inside(self, number: int | None) -> AbstractContextManager[None]:
        """Give every call inside a context the number of one call, which they are part of.

        Args:
            number: Number of the outer call. An enclosing `inside` takes precedence.

        Returns:
            The context.
        """
        return self._inside(number)

    @contextmanager
    def _inside(self, number: int | None) -> Iterator[None]:
        outer = self._part_of
        self._part_of = number if outer is None else outer
        try:
            yield
        finally:
            self._part_of = outer

    def _compose(self, collective: Collective) -> Work | None:
        """The collective made of others, asynchronous; None if this communicator lacks those too."""
        kind, native = collective.operation, self.native_ops
        if kind is Operation.BATCH and native >= _MESSAGES:
            return self._start_messages(collective, [part.on(part.source, part.target) for part in collective.parts])
        if collective.is_uneven and kind in native and kind in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER):
            return self._compose_padded(collective)
        if kind not in UNEVEN_PARTS or not native >= _MESSAGES:
            return None
        if kind is Operation.ALL_TO_ALL:
            return self._compose_of_messages(
                collective,
                pieces_of(collective.buffer_sent(), collective.source_bounds(self.world_size)),
                pieces_of(collective.buffer_received(), collective.bounds(self.world_size)),
            )
        here: list[Buffer | None] = [None] * self.world_size
        here[collective.root] = collective.source if kind is Operation.GATHER else collective.target
        if self.rank == collective.root:
            whole = collective.target if kind is Operation.GATHER else collective.source
            parts = [] if whole is None else pieces_of(whole, collective.bounds(self.world_size))
            if kind is Operation.GATHER:
                return self._compose_of_messages(collective, here, parts)
            return self._compose_of_messages(collective, parts, here)
        if kind is Operation.GATHER:
            return self._compose_of_messages(collective, here, [None] * self.world_size)
        if kind is Operation.SCATTER:
            return self._compose_of_messages(collective, [None] * self.world_size, here)
        return None

    def _start_messages(self, collective: Collective, messages: Sequence[Collective]) -> CombinedWork:
        """The messages that `collective` is made of, all under way."""
        for message in messages:
            message.async_op, message.number = True, collective.number
            message.label, message.bucket = message.label or collective.label, collective.bucket
        if Operation.BATCH in self.native_ops and messages:
            batch = Collective(
                Operation.BATCH,
                numel=sum(message.numel for message in messages),
                dtype=messages[0].dtype,
                async_op=True,
                label=collective.label,
                bucket=collective.bucket,
                number=collective.number,
                parts=tuple(messages),
            )
            return CombinedWork([self.start(batch)])
        return CombinedWork([self.start(message) for message in messages])

    def _compose_of_messages(
        self, collective: Collective, sent: Sequence[Buffer | None], received: Sequence[Buffer | None]
    ) -> Work:
        """`sent[j]` goes to rank j, `received[i]` comes from rank i; nothing where None or empty stands."""
        messages = []
        for kind, buffers in ((Operation.RECV, received), (Operation.SEND, sent)):
            for peer, buffer in enumerate(buffers):
                if buffer is None or not buffer.numel or peer == self.rank:
                    continue
                source, target = (buffer, None) if kind is Operation.SEND else (None, buffer)
                messages.append(Collective(kind, source, target, buffer.numel, buffer.dtype, root=peer))
        mine, own = sent[self.rank], received[self.rank]
        if mine is not None and own is not None and mine.numel and mine.data_ptr() != own.data_ptr():
            own.copy_from(mine)
        return self._start_messages(collective, messages)

    def _compose_padded(self, collective: Collective) -> Work:
        """Uneven parts in a buffer of equal ones, as long as the longest."""
        counts = collective.counts or ()
        longest = max(counts)
        source, target = collective.buffer_sent(), collective.buffer_received()
        numel, bounds = longest * self.world_size, collective.bounds(self.world_size)
        padded: Buffer = self.accelerator.allocate(numel, source.dtype)
        own = padded.view(self.rank * longest, longest)
        finish: Callable[[], None]
        if collective.operation is Operation.ALL_GATHER:
            own.view(0, source.numel).copy_from(source)
            equal = collective.on(own, padded)

            def finish() -> None:
                for peer, piece in enumerate(pieces_of(target, bounds)):
                    piece.copy_from(padded.view(peer * longest, piece.numel))
        else:
            for peer, piece in enumerate(pieces_of(source, bounds)):
                padded.view(peer * longest, piece.numel).copy_from(piece)
            equal = collective.on(padded, own)

            def finish() -> None:
                target.copy_from(own.view(0, target.numel))

        equal.counts, equal.numel = None, numel
        return CombinedWork([self.start(equal)], finish)
