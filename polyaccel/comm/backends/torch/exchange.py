"""Direct messages between host buffers over a torch process group: what gloo's ranks use. See [Note: Direct exchange]
in `collectives/p2p.py`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.backends.torch.communicator import TorchCommunicator, is_timeout, tensor_of
from polyaccel.comm.collective import Collective
from polyaccel.comm.collectives.p2p import Exchange, Message, P2PCollectives, Steps
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.comm.work import Background, Work
from polyaccel.core.buffer import Buffer
from polyaccel.errors import CommError

_MOMENT = timedelta(milliseconds=1)


class TorchExchange(Exchange):
    """Messages by a process group's isend and irecv."""

    def __init__(self, owner: ExchangeCommunicator, collective: Collective) -> None:
        super().__init__(owner, collective)
        self._owner = owner
        self._failed: dict[int, RuntimeError] = {}

    def start(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Message | None:
        owner = self._owner
        group = owner.group
        begin = dist.isend if sends else dist.irecv
        try:
            work = begin(tensor_of(buffer), owner.ranks[peer], group, tag)
        except RuntimeError as error:
            # After a peer's death the others still get their messages: they would blame this rank.
            self._failed[peer] = error
            return None
        if work is None:
            raise CommError(f"{self.collective}: this process is not in the group", value=owner.ranks)
        return Message(peer, work)

    def finish(self, messages: list[Message]) -> None:
        """Wait for `messages`. Raises CommError for what failed, naming every peer that is missing."""
        for error in self._failed.values():
            # The rank that ended first may have been written to just before that was noticed.
            ended = {message.peer for message in messages if _is_gone(message.work, in_time=True)}
            raise self._owner.failure(self, error, [*ended.union(self._failed)]) from error
        for index, message in enumerate(messages):
            try:
                message.work.wait()
            except RuntimeError as error:
                # Name every rank that is missing, not only the first one waited for. One that is merely slower than
                # the news of another's end is not missing.
                in_time = not is_timeout(error)
                gone = [other.peer for other in messages[index + 1 :] if _is_gone(other.work, in_time=in_time)]
                raise self._owner.failure(self, error, [message.peer, *gone]) from error


def _is_gone(work: dist.Work, *, in_time: bool) -> bool:
    """Whether `work` has failed; or has not ended, if there is no time left (`in_time` False)."""
    try:
        work.wait(_MOMENT)
    except RuntimeError as error:
        return not (in_time and is_timeout(error))
    return False


class ExchangeWork(Work):
    """A collective whose first messages are under way; `wait` does the rest. Owns buffers and scratch until then."""

    def __init__(self, exchange: TorchExchange, steps: Steps, written: Buffer | None) -> None:
        self._exchange = exchange
        self._steps = steps
        self._awaited = next(steps, None)
        self._written = written

    def wait(self) -> None:
        if self._awaited is None:
            return
        while self._awaited is not None:
            self._exchange.finish(self._awaited)
            self._awaited = next(self._steps, None)
        if self._written is not None:
            self._written.bump_version()
        self._written = None

    def is_done(self) -> bool:
        return self._awaited is None


class ExchangeCommunicator(P2PCollectives[TorchExchange], TorchCommunicator):
    """Every collective by direct messages between host buffers. See [Note: Direct exchange]."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], accelerator: Accelerator, backend: str, timeout_s: float
    ) -> None:
        super().__init__(group, ranks, accelerator, backend, timeout_s)
        self.pool = ScratchPool(accelerator)
        self._background: Background | None = None

    def new_exchange(self, collective: Collective) -> TorchExchange:
        self.group  # noqa: B018 - a closed communicator raises
        return TorchExchange(self, collective)

    def carry(self, exchange: TorchExchange, steps: Steps, written: Buffer | None, *, rounds: int) -> Work:
        work = ExchangeWork(exchange, steps, written)
        if not exchange.collective.async_op:
            work.wait()
        elif rounds > 1:
            self._background = self._background or Background("polyaccel exchange")
            return self._background.carry(work)
        return work

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None
        super().close()

    def failure(self, exchange: Exchange, error: Exception, peers: Sequence[int]) -> CommError:
        """The error for an exchange in which `peers` of this group did not take part."""
        missing = sorted(self.ranks[peer] for peer in peers)
        return self.error_of(exchange.collective, error, missing)
