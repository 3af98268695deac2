"""A gloo group next to the job's own: its members come from several jobs, and torch's default group knows none of it.

[Note: Groups apart]
torch makes groups of ranks of the default group only. A group with processes of another job is therefore gloo's own
object with a separate store, and its messages are called on that object. Ranks count inside the group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.backends.torch.communicator import is_timeout, tensor_of
from polyaccel.comm.backends.torch.exchange import ExchangeCommunicator, TorchExchange
from polyaccel.comm.base import Communicator, Rendezvous, StatusStore
from polyaccel.comm.collective import Collective
from polyaccel.comm.collectives.p2p import Message
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.comm.host_address import address_facing
from polyaccel.comm.torch_group import open_store
from polyaccel.core.buffer import Buffer
from polyaccel.errors import CommError, CommTimeout


class ApartExchange(TorchExchange):
    """Messages by gloo's own calls."""

    def start(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Message | None:
        group: Any = self._owner.group
        begin = group.send if sends else group.recv
        try:
            return Message(peer, begin([tensor_of(buffer)], peer, tag))
        except RuntimeError as error:
            self._failed[peer] = error
            return None


class ApartCommunicator(ExchangeCommunicator):
    """The members of a gloo group next to the job's own. See [Note: Groups apart]."""

    def __init__(self, group: Any, store: Any, rank: int, world_size: int, accelerator: Accelerator, timeout_s: float):
        self.rank, self.world_size, self.ranks = rank, world_size, tuple(range(world_size))
        self.backend, self.accelerator, self.timeout_s = "gloo", accelerator, timeout_s
        self.pool = ScratchPool(accelerator)
        self._background = None
        self._group = group
        self._store = store

    def new_exchange(self, collective: Collective) -> ApartExchange:
        return ApartExchange(self, collective)

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise CommError("the gloo communicator is closed", hint="close it after the last call")
        return self._group

    def split(self, ranks: Any) -> Communicator | None:
        raise CommError(f"a group apart is not split into {list(ranks)}", hint="connect another one", value=ranks)

    def board(self) -> StatusStore | None:
        return None

    def close(self) -> None:
        group, self._group, self._store = self._group, None, None
        if self._background is not None:
            self._background.close()
            self._background = None
        if group is not None:
            group.shutdown()


def connect_apart(rendezvous: Rendezvous, accelerator: Accelerator, timeout_s: float) -> ApartCommunicator:
    """Join a group apart. Raises CommTimeout or CommError, with the place where its members meet."""
    where = f"{rendezvous.address}:{rendezvous.port}"
    deadline = rendezvous.deadline(timeout_s)

    def make() -> ApartCommunicator:
        store = open_store(rendezvous, deadline)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        facing = address_facing(rendezvous.address or "")
        options._devices = [gloo.create_device(hostname=facing or "")]
        group = gloo(store, rendezvous.rank, rendezvous.world_size, options)
        return ApartCommunicator(group, store, rendezvous.rank, rendezvous.world_size, accelerator, timeout_s)

    try:
        return deadline.run(f"the group of {rendezvous.world_size} members at {where}", make)
    except (RuntimeError, OSError) as error:
        if isinstance(error, CommError):
            raise
        kind = CommTimeout if is_timeout(error) else CommError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise kind(
            f"rank {rendezvous.rank} could not join the {rendezvous.world_size} members at {where}: {reason}",
            hint="look at the other members, and for a firewall between the hosts",
            value=where,
        ) from error
