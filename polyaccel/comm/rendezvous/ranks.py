"""`RendezvousGroup`: where a rank joins its job, before there is a communicator, under any launcher.

Every comm backend joins here: under torchrun an agent holds MASTER_PORT, under `polyaccel run`, mpirun and srun rank 0
may bind it, and a script may have made torch's default group before. With torch all of these are torch's store. Without
it, the ranks of one host find each other through its kernel.
"""

from __future__ import annotations

import hmac
import os
import secrets
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from polyaccel.comm.base import Rendezvous
from polyaccel.comm.launchers.request import LOOPBACK
from polyaccel.comm.rendezvous.unix_rendezvous import all_gather_on_host
from polyaccel.comm.secret import shared_secret
from polyaccel.comm.torch_group import has_torch, join_default_group, store_all_gather
from polyaccel.core import tagged_json
from polyaccel.errors import CommError
from polyaccel.job import auth

_meetings = count()


class RendezvousGroup:
    """All ranks of a job, joined when this is made. Every rank makes one, and makes the same calls.

    With torch its default group, over gloo, exists afterwards: samplers and scripts read the rank from it.

    Args:
        rendezvous: This process's rank and the place where the ranks join.
        timeout_s: Time limit in seconds of everything until the ranks are joined.

    Raises:
        CommTimeout: Ranks did not come in time; `missing_ranks` names them.
        CommError: Ranks on several hosts cannot join without torch.
    """

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self.deadline = rendezvous.deadline(timeout_s)
        self.meeting_host = urlsplit(rendezvous.init_method or "").hostname or rendezvous.address or LOOPBACK
        """Name or address of the rendezvous host."""
        self._where = rendezvous.init_method or f"{rendezvous.address}:{rendezvous.port}"
        self._topic = f"members/{next(_meetings)}"
        self._exchanges = count()
        if has_torch():
            join_default_group("gloo", rendezvous, self.deadline, lambda: None)
        elif rendezvous.local_world_size != rendezvous.world_size:
            raise CommError(
                f"{rendezvous.world_size} ranks on several hosts cannot meet without torch ({rendezvous.source})",
                hint="install torch, whose store they would meet in, or use the comm backend mpi",
                value=rendezvous.local_world_size,
            )

    def exchange(self, value: Any) -> list[Any]:
        """Gather a plain value from every rank. Collective; blocks.

        Args:
            value: The value of this rank, plain as for `all_gather_object`.

        Returns:
            The values in rank order.

        Raises:
            CommTimeout: Ranks did not come in time; `missing_ranks` names them.
            CommError: A received text is not a value of a rank.
        """
        text = tagged_json.to_bytes(value, "the note").decode()
        if self.world_size == 1:
            texts = [text]
        elif has_torch():
            topic = f"{self._topic}/{next(self._exchanges)}"
            texts = store_all_gather(topic, self.rank, self.world_size, text, self.deadline)
        else:
            texts = all_gather_on_host(self._where, self.rank, self.world_size, text, self.deadline)
        return [self._read(text, rank) for rank, text in enumerate(texts)]

    def agree_on_token(self) -> bytes:
        """Derive a token that all members share, new at each call. Collective; blocks.

        A process outside the job cannot derive it where the ranks share a secret: POLYACCEL_JOB_SECRET, or a file of
        this user's on one host (see [Note: Per-user job secret]). Elsewhere every reader of the store can.

        Returns:
            32 bytes.
        """
        own = auth.job_secret_from_env(os.environ)
        said = self.exchange([own is not None, secrets.token_hex(auth.MAC_NBYTES) if self.rank == 0 else ""])
        common = own if any(has for has, _ in said) else shared_secret(self.rank, self.exchange)
        return hmac.digest(common or b"none", f"token {said[0][1]}".encode(), "sha256")

    def _read(self, text: str, rank: int) -> Any:
        try:
            return tagged_json.from_bytes(text.encode())
        except tagged_json.SerializationError as error:
            raise CommError(
                f"what stands in the place of rank {rank}'s note at {self._where} is none: {error.message}",
                hint="give each job its own MASTER_PORT; a stranger may have written this",
                missing_ranks=[rank],
                value=error.value,
            ) from error
