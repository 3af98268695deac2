"""The default process group of torch.distributed: whether there is one, joining it, and notes through its store. Light
to import; torch is loaded when a group is made.

[Note: Two process groups]
Scripts use `torch.distributed` beside us (a DistributedSampler asks it for the rank), so its default group always
exists afterwards: the one that the script made is adopted, else we make it. Our collectives run on a second group of
all ranks, which has our time limit and in which no call of the script can stand between ours.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from polyaccel.comm.base import Rendezvous
from polyaccel.errors import CommError, CommTimeout


def has_torch() -> bool:
    """Whether torch is installed."""
    spec = find_spec("torch")
    return spec is not None and spec.origin is not None


def initialized_world() -> tuple[int, int] | None:
    """(rank, world size) of torch's default group if the script made one; imports nothing."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def join_default_group(backend: str, rendezvous: Rendezvous, timeout_s: float) -> None:
    """Make torch's default group over `backend`, or adopt the script's. Nothing happens for one process without one."""
    adopted = initialized_world()
    if rendezvous.world_size == 1 and adopted is None:
        return
    if adopted is None:
        _make_default_group(backend, rendezvous, timeout_s)
    elif adopted != (rendezvous.rank, rendezvous.world_size):
        raise CommError(
            f"torch.distributed is initialised as rank {adopted[0]} of {adopted[1]}, "
            f"but {rendezvous.source} says rank {rendezvous.rank} of {rendezvous.world_size}",
            cure="let both come from the same launcher, or drop your own init_process_group",
            value=adopted,
        )


def exchange_notes(topic: str, rank: int, world_size: int, text: str, timeout_s: float) -> list[str]:
    """Every rank's `text` for `topic`, in rank order, through the store where the default group met.

    Raises CommTimeout, naming them, when ranks post none within `timeout_s`.
    """
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    keys = [f"polyaccel/{topic}/{peer}" for peer in range(world_size)]
    try:
        store.set(keys[rank], text)
        store.wait(keys, timedelta(seconds=timeout_s))
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise CommTimeout(
            f"ranks {missing} did not say within {timeout_s:g} s how they are reached ({topic})",
            missing_ranks=missing,
            cure="all ranks must use the same backend; look for the first error among them",
        ) from error


def _make_default_group(name: str, rendezvous: Rendezvous, timeout_s: float) -> None:
    import torch.distributed as dist

    where = rendezvous.init_method or f"tcp://{rendezvous.address}:{rendezvous.port}"
    try:
        dist.init_process_group(
            name,
            init_method=where,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        message = (
            f"rank {rendezvous.rank} could not meet the other {rendezvous.world_size - 1} ranks "
            f"at {where} ({rendezvous.source}) within {timeout_s:g} s: {reason}"
        )
        cure = "check that all ranks were started, with the same address and port, and that the port is free"
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        raise (CommTimeout if late else CommError)(message, cure=cure, value=where) from error
